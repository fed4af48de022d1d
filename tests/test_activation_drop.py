"""torch_resilient.smart.activation_drop: what arrives of a message, and where models are cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from torch_resilient.smart.activation_drop import (
    CHUNK_BYTES,
    PACKET_BYTES,
    Boundary,
    evenly_spaced,
    make_boundaries,
    may_miss,
    plain_name,
)


class Identity(nn.Module):
    """Hands out what it gets."""

    def forward(self, x: Any) -> Any:
        return x


def crossed(tensor: torch.Tensor, **settings: Any) -> tuple[torch.Tensor, Boundary]:
    """The tensor behind a boundary, and the boundary."""
    boundary = Boundary("b", **settings)
    module = Identity()
    boundary.watch(module)
    return module(tensor), boundary


def dropped_packets(arrived: torch.Tensor) -> list[int]:
    """The packets of all zeros in a tensor of ones; each other packet must be whole."""
    dropped = []
    elements = PACKET_BYTES // arrived.element_size()
    for number, packet in enumerate(arrived.flatten().split(elements)):
        assert packet.unique().numel() == 1, "a packet is dropped whole or arrives whole"
        if packet[0] == 0:
            dropped.append(number)
    return dropped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("packets", ["random", "small"])
@pytest.mark.parametrize("bound", [0.0, 0.1, 0.5, 1.0])
def test_as_many_packets_are_lost_as_the_bound_allows(
    dtype: torch.dtype, packets: Any, bound: float
) -> None:
    # 40 packets and a part of one.
    elements = 40 * PACKET_BYTES // dtype.itemsize + 3
    arrived, boundary = crossed(
        torch.ones(elements, dtype=dtype), forward=bound, packets=packets, seed=3
    )
    dropped = dropped_packets(arrived)
    assert len(dropped) == int(bound * 40)
    assert 0 not in dropped, "the first has the header of the frame"
    traffic = boundary.forward.traffic
    assert (traffic.messages, traffic.packets, traffic.dropped) == (1, 41, len(dropped))
    assert traffic.largest_bytes == elements * dtype.itemsize
    assert boundary.backward.traffic.messages == 0


def test_the_bound_is_that_of_the_whole_message() -> None:
    chunk = CHUNK_BYTES // 4
    arrived, boundary = crossed(torch.ones(2 * chunk + 10), forward=0.02)
    assert int(0.02 * CHUNK_BYTES / PACKET_BYTES) == 7
    # 7.62 packets of each chunk.
    counts = [len(dropped_packets(arrived[begin : begin + chunk])) for begin in (0, chunk)]
    assert counts == [7, 8]
    assert (arrived[2 * chunk :] == 1).all()
    assert may_miss(4 * (2 * chunk + 10), 0.02) == 15
    assert boundary.forward.traffic.dropped == 15


def test_small_messages_arrive_whole() -> None:
    assert may_miss(99 * PACKET_BYTES, 0.01) == 0
    # 0.01 is a little less as float32, the type on the wire.
    assert may_miss(100 * PACKET_BYTES, 0.01) == 0
    assert may_miss(101 * PACKET_BYTES, 0.01) == 1
    assert may_miss(PACKET_BYTES, 1.0) == 0
    assert may_miss(0, 1.0) == 0
    arrived, _ = crossed(torch.ones(0), forward=1.0)
    assert arrived.numel() == 0


def test_small_packets_are_those_of_the_smallest_mean() -> None:
    elements = PACKET_BYTES // 4
    magnitudes = torch.tensor([0.1, 5.0, -2.0, 3.0, -1.0, 4.0])
    tensor = magnitudes.repeat_interleave(elements)
    arrived, _ = crossed(tensor, forward=0.4, packets="small")
    # 0.4 of 6 is 2. The smallest of all is the first, which must arrive.
    assert arrived[::elements].tolist() == pytest.approx([0.1, 5.0, 0.0, 3.0, 0.0, 4.0])


def test_messages_below_a_size_and_those_that_are_not_finite_arrive_whole() -> None:
    for elements, dropped in ((9999, False), (10_000, True)):
        arrived, _ = crossed(torch.ones(elements), forward=0.5, exact_below_bytes=40_000)
        assert bool(dropped_packets(arrived)) == dropped
    broken = torch.ones(10_000)
    broken[7] = math.inf
    arrived, boundary = crossed(broken, forward=0.5)
    assert (arrived == broken).all()
    assert boundary.forward.traffic.dropped == 0


def test_the_gradient_of_what_was_lost_is_ignored() -> None:
    weight = torch.ones(10_000, requires_grad=True)
    arrived, _ = crossed(2 * weight, forward=0.5)
    (3 * arrived).sum().backward()
    assert weight.grad is not None
    assert dropped_packets(weight.grad) == dropped_packets(arrived.detach())
    assert weight.grad.max() == 6


def test_gradients_lose_packets_apart() -> None:
    weight = torch.ones(10_000, requires_grad=True)
    arrived, boundary = crossed(2 * weight, backward=0.5)
    assert (arrived == 2).all()
    arrived.sum().backward()
    assert weight.grad is not None
    dropped = dropped_packets(weight.grad)
    assert len(dropped) == boundary.backward.traffic.dropped == int(0.5 * 40_000 / PACKET_BYTES)


def test_the_same_seed_loses_the_same_and_leaves_other_random_numbers_alone() -> None:
    def dropped(seed: int) -> list[list[int]]:
        boundary = Boundary("b", forward=0.3, seed=seed)
        module = Identity()
        boundary.watch(module)
        return [dropped_packets(module(torch.ones(20_000))) for _ in range(3)]

    state = torch.get_rng_state()
    first = dropped(1)
    assert (torch.get_rng_state() == state).all()
    assert dropped(1) == first
    assert dropped(2) != first
    assert first[0] != first[1], "each message loses others"


def test_only_floating_point_tensors_in_training_cross() -> None:
    boundary = Boundary("b", forward=1.0)
    module = Identity()
    boundary.watch(module)
    value = {"hidden": torch.ones(5000), "more": (torch.ones(5000, dtype=torch.int64), None)}
    arrived = module(value)
    assert (arrived["hidden"] == 0).any()
    assert (arrived["more"][0] == 1).all()
    assert arrived["more"][1] is None
    assert (value["hidden"] == 1).all(), "the sender's stays what it was"
    module.eval()
    assert module(value) is value
    assert boundary.forward.traffic.messages == 1


def test_boundaries_of_a_model_are_evenly_spaced_in_its_longest_list() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.Identity(), nn.Identity())
            self.blocks = nn.ModuleList(nn.Identity() for _ in range(8))

    assert evenly_spaced(Model(), 4) == ("blocks", ["blocks.1", "blocks.3", "blocks.5"])
    assert evenly_spaced(Model(), 2) == ("blocks", ["blocks.3"])
    assert evenly_spaced(Model(), 100)[1] == [f"blocks.{i}" for i in range(7)]
    assert evenly_spaced(nn.Sequential(nn.Identity(), nn.Identity()), 4) == ("", ["0"])
    keyed = nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})
    assert evenly_spaced(nn.ModuleList([keyed]), 2) == ("0", ["0.a"])
    assert evenly_spaced(nn.Linear(2, 2), 4) == ("", [])
    assert evenly_spaced(nn.Sequential(nn.Linear(2, 2)), 4)[1] == []


def test_names_are_those_of_the_users_model() -> None:
    assert plain_name("module._orig_mod.blocks.3") == "blocks.3"
    assert plain_name("module") == ""


def test_boundaries_are_exact_where_nothing_else_was_asked_for() -> None:
    def dropped(direction: str) -> list[tuple[bool, bool]]:
        made = make_boundaries(
            ["a", "b"], {"b": 1.0}, direction=direction, packets="random", seed=0
        )
        found = []
        for boundary in made:
            weight = torch.ones(5000, requires_grad=True)
            module = Identity()
            boundary.watch(module)
            arrived = module(weight)
            arrived.sum().backward()
            assert weight.grad is not None
            found.append((bool((arrived == 0).any()), bool((weight.grad == 0).any())))
        return found

    assert dropped("forward") == [(False, False), (True, True)]
    assert dropped("backward") == [(False, False), (False, True)]
    assert dropped("both") == [(False, False), (True, True)]
