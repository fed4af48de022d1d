"""Activations in host memory: what stays, what comes back ahead of its use, and what it takes."""

from __future__ import annotations

import contextlib
import random

import pytest
import strict_device
import torch
from harness import run_ranks, wait_until
from torch import Tensor, nn

from torch_resilient.pipelining import offload
from torch_resilient.pipelining.offload import HostOffload, MemoryRoom, Residency, Slots

# ---- the plan of the places ---------------------------------------------------------------------


def random_order(chance: random.Random, count: int, pending: int) -> list[tuple[str, int]]:
    """An order that a stage may run: each kind in turn, at most `pending` between F and W."""
    done = dict.fromkeys("FBW", 0)
    order = []
    weights = [chance.random() + 0.05 for _ in "FBW"]
    while done["W"] < count:
        possible = {
            "F": done["F"] < count and done["F"] - done["W"] < pending,
            "B": done["B"] < done["F"],
            "W": done["W"] < done["B"],
        }
        (kind,) = chance.choices(
            "FBW", [w * possible[k] for w, k in zip(weights, "FBW", strict=True)]
        )
        order.append((kind, done[kind]))
        done[kind] += 1
    return order


@pytest.mark.parametrize("seed", range(300))
def test_what_is_in_memory_keeps_to_the_room_of_the_plan(seed: int) -> None:
    chance = random.Random(seed)
    room = MemoryRoom(
        activation_bytes=10,
        device_bytes=chance.randrange(100),
        host_bytes=chance.randrange(100),
        copy_bytes_per_s=1e9,
    )
    count = chance.randint(1, 30)
    pending = chance.randint(1, max(room.in_all(1.0), 1))
    residency = Residency(Slots.of(room.on_device(), pending))
    fetched: list[int] = []
    for kind, microbatch in random_order(chance, count, pending):
        fetched += residency.before(kind, microbatch)
        for _ in range(2):
            assert len(residency.staying) + len(residency.brought) <= room.on_device(), seed
            assert len(residency.moved) <= room.host_bytes // 10, seed
            assert residency.brought <= residency.moved, seed
            fetched += residency.after(kind, microbatch)
        if kind == "F" and pending <= room.on_device():
            assert not residency.moved, seed
    assert len(fetched) == len(set(fetched)), f"seed {seed}: a microbatch was fetched twice"
    assert not residency.staying | residency.moved | residency.brought


@pytest.mark.parametrize(("on_device", "ahead"), [(1, 0), (2, 1), (3, 2), (6, 2)])
def test_each_moved_microbatch_is_back_before_its_backward(on_device: int, ahead: int) -> None:
    """In the steady state of a schedule with each W right behind its B."""
    held, count = 8, 40
    slots = Slots.of(on_device, held)
    assert slots == Slots(on_device - ahead, ahead)
    residency = Residency(slots)
    order = [("F", m) for m in range(held)]
    for m in range(count):
        order += [("B", m), ("W", m)]
        order += [("F", m + held)] if m + held < count else []
    moved = set()
    for number, (kind, microbatch) in enumerate(order):
        before = set(residency.brought)
        residency.before(kind, microbatch)
        moved |= residency.moved
        if kind == "B" and microbatch in residency.moved and ahead:
            assert microbatch in before, order[number]
            # With two places, the copy of the next one is beside this computation.
            assert len(residency.brought) == ahead or microbatch + 1 not in residency.moved
        residency.after(kind, microbatch)
    assert len(moved) > count // 3


# ---- copies on the device -----------------------------------------------------------------------

WIDTH, ROWS, COUNT = 64, 16, 6


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def inputs(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(COUNT)]
    return [each.to(device).requires_grad_() for each in made]


def train(mover: HostOffload | None, module: nn.Module, device: str, held: int) -> list[Tensor]:
    """The gradients; B and W are two passes over the graph, as in a split backward."""
    xs, losses = inputs(device), {}
    order = [("F", m) for m in range(held)]
    for m in range(COUNT):
        order += [("B", m), ("W", m)] + ([("F", m + held)] if m + held < COUNT else [])
    for kind, m in order:
        around = contextlib.nullcontext() if mover is None else mover.around(kind, m)
        with around:
            if kind == "F":
                losses[m] = module(xs[m]).square().sum()
            elif kind == "B":
                (xs[m].grad,) = torch.autograd.grad(losses[m], xs[m], retain_graph=True)
            else:
                losses.pop(m).backward(inputs=list(module.parameters()))
    grads = [*(p.grad for p in module.parameters()), *(x.grad for x in xs)]
    return [grad.cpu() for grad in grads if grad is not None]


def same_bits(rank: int, on_device: int) -> tuple[bool, int, int, int]:
    offload._MIN_BYTES = 1  # the tensors of this test are small
    controls = strict_device.load()
    controls.set_copy_time(0.001)
    device = strict_device.DEVICE
    want = train(None, net().to(device), device, 4)
    module = net().to(device)
    mover = HostOffload(torch.device(device), module)
    mover.begin(Slots.of(on_device, 4))
    got = train(mover, module, device, 4)
    same = all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    return same, mover.offloaded_bytes, mover.fetched_bytes, mover.fetched_ahead_bytes


@pytest.mark.usefixtures("strict_device")
@pytest.mark.parametrize("on_device", [1, 2, 3])
def test_the_device_gives_the_same_bits(on_device: int) -> None:
    ((same, moved, fetched, ahead),) = run_ranks(same_bits, on_device, world_size=1, init=False)
    assert same
    assert moved > 0
    if on_device == 1:  # no room: B and W each copy what they use
        assert ahead == 0
        assert fetched > moved
    else:
        assert ahead == fetched == moved, "each microbatch comes back once"


def beside_the_computation(rank: int) -> list[bool]:
    offload._MIN_BYTES = 1
    controls = strict_device.load()
    device = strict_device.DEVICE
    module = net().to(device)
    mover = HostOffload(torch.device(device), module)
    assert mover._out is not None
    assert mover._in is not None
    (x, *_) = inputs(device)
    (want,) = torch.autograd.grad(module(x).square().sum(), x)
    torch.accelerator.synchronize()
    mover.begin(Slots(stay=0, brought=1))
    with mover._out:
        controls.hold()  # the copies to the host are late
    with mover.around("F", 0):
        loss = module(x).square().sum()
    controls.hold()  # and so is the computation
    with mover.around("F", 1):
        pass  # the context alone queues the copies back
    (packed, *_) = [each for r in mover._moved[0] if (each := r()) is not None]
    assert packed.arrived is not None
    checks = [not packed.arrived.query()]
    with mover._out:
        controls.release()
    wait_until(packed.arrived.query, "the copy back has ended")
    checks.append(not torch.accelerator.current_stream().query())
    here = packed.here
    assert here is not None
    with mover._in:
        checks.append(torch.equal(here.to("cpu"), packed.host))
    controls.release()
    with mover.around("B", 0):
        (got,) = torch.autograd.grad(loss, x, retain_graph=True)
    checks.append(torch.equal(got.cpu(), want.cpu()))
    with mover.around("W", 0):
        loss.backward()
        checks.append(packed.here is here)
    checks.append(packed.here is None)
    checks.append(mover.fetched_bytes == mover.fetched_ahead_bytes == mover.offloaded_bytes)
    return checks


@pytest.mark.usefixtures("strict_device")
def test_copies_back_run_beside_the_computation() -> None:
    """After the copies to the host, while the computing stream stands still; once for B and W."""
    assert run_ranks(beside_the_computation, world_size=1, init=False) == [[True] * 7]


class Expands(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        row = torch.tanh(x[:1]).expand(512, -1)
        return row * x[:1]


def test_expanded_views_do_not_grow() -> None:
    x = torch.randn(4, 1 << 14, requires_grad=True)
    want = torch.autograd.grad(Expands()(x).sum(), x)
    mover = HostOffload(torch.device("cpu"), nn.Identity())
    mover.begin(Slots(stay=0, brought=0))
    with mover.around("F", 0):
        result = Expands()(x)
    assert 0 < mover.offloaded_bytes <= 4 * (4 << 14), "three rows at most"
    assert torch.equal(torch.autograd.grad(result.sum(), x)[0], want[0])
