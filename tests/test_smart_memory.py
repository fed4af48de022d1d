"""The error memory of SMART's hook: dropped values are sent later, and survive a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from lossy_training import OPEN, Bucket, LossyNetwork, lossy_only, net, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.smart import SmartState, smart_hook
from torch_resilient.smart.gradient_drop import ErrorMemory, Range, sampled_cutoff

Gradients = list[list[float]]


# ---- nothing stays lost -------------------------------------------------------------------------


def conservation(
    rank: int,
    seed: int,
    rate: float,
    sites: Sequence[str] | None,
    dtype: torch.dtype,
    shapes: Sequence[int],
) -> tuple[Gradients, Gradients, Gradients, int]:
    """The sent gradients, the delivered ones and the error memories; all by step or rank.

    Gradients are small integers: sums and memories are exact in every type.
    """
    network = LossyNetwork(rate, seed)
    size = dist.get_world_size()
    model = nn.ParameterList([nn.Parameter(torch.zeros(n, dtype=dtype)) for n in shapes])
    state = SmartState(options=OPEN, model=model, sites=sites)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    wanted = torch.zeros(sum(shapes), dtype=torch.float64)
    delivered = torch.zeros(sum(shapes), dtype=torch.float64)
    for step in range(6):
        # Like DDP: after the first step, buckets have another order and other parameters.
        groups = [[0], [1, 2], [3]] if step == 0 else [[3, 2], [1, 0]]
        futures = []
        for group in groups:
            parts = []
            for index in group:
                values = torch.randint(-2, 3, (shapes[index],), generator=generator)
                at = sum(shapes[:index])
                wanted[at : at + shapes[index]] += values
                parts.append(values.to(dtype))
            bucket = Bucket(torch.cat(parts), [model[index] for index in group])
            futures.append((group, smart_hook(state, bucket)))  # type: ignore[arg-type]
        for group, future in futures:
            value, at_value = future.wait().double() * size, 0
            for index in group:
                at = sum(shapes[:index])
                delivered[at : at + shapes[index]] += value[at_value : at_value + shapes[index]]
                at_value += shapes[index]
    memory = state.error_memory()
    remembered = [
        memory.get(str(i), torch.zeros(n)).double().tolist() for i, n in enumerate(shapes)
    ]
    flat = [x for part in remembered for x in part]
    return [wanted.tolist()], [delivered.tolist()], [flat], network.messages_hit


@lossy_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("sites", [None, ["a", "a", "b", "b"]], ids=["flat", "2+2"])
@pytest.mark.parametrize("seed", [1, 2])
def test_delivered_is_sent_less_what_is_remembered(
    seed: int, sites: list[str] | None, dtype: torch.dtype
) -> None:
    """Exactly, in integers: nothing is lost for good and nothing counts twice."""
    results = run_ranks(conservation, seed, 0.3, sites, dtype, [301, 77, 1, 450], world_size=4)
    wanted = sum(torch.tensor(result[0][0]) for result in results)
    remembered = sum(torch.tensor(result[2][0]) for result in results)
    assert sum(result[3] for result in results) > 10, "hardly anything was dropped"
    assert float(remembered.abs().sum()) > 0  # type: ignore[union-attr]
    for rank, result in enumerate(results):
        delivered = torch.tensor(result[1][0])
        assert torch.equal(delivered, wanted - remembered), f"rank {rank}"


@lossy_only
def test_an_exact_step_delivers_all_that_was_remembered() -> None:
    wanted, delivered, remembered = (torch.tensor(x) for x in run_ranks(flushed, world_size=2)[0])
    assert torch.equal(delivered, wanted)
    assert not remembered.any()


def flushed(rank: int) -> tuple[list[float], list[float], list[float]]:
    LossyNetwork(0.9)
    parameter = nn.Parameter(torch.zeros(1000))
    model = nn.ParameterList([parameter])
    state = SmartState(options=OPEN, model=model)
    wanted, delivered = torch.zeros(1000), torch.zeros(1000)
    for step in range(3):
        if step == 2:
            assert state.statistics().error_norm > 0
            state.exact_next_step()
        gradient = torch.arange(1000.0) % 7
        wanted += 2 * gradient
        bucket = Bucket(gradient.clone(), [parameter])
        delivered += 2 * smart_hook(state, bucket).wait()  # type: ignore[arg-type]
    assert state.statistics().exact_steps == 1
    memory = state.error_memory().get("0", torch.zeros(1000))
    return wanted.tolist(), delivered.tolist(), memory.tolist()


# ---- the error memory by itself -----------------------------------------------------------------


@st.composite
def layouts_and_losses(draw: Any) -> tuple[list[int], list[Range]]:
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5))
    total = sum(sizes) + draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.integers(0, total), max_size=10)))
    return sizes, list(zip(cuts[::2], cuts[1::2], strict=False))


@given(layouts_and_losses(), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_the_memory_is_the_payload_where_it_was_dropped(
    case: tuple[list[int], list[Range]], seed: int
) -> None:
    """Paper: SMART §3.3, Equations 3 to 6, against the same with a dense vector."""
    sizes, dropped = case
    layout = [(str(i), n) for i, n in enumerate(sizes)]
    total = max([sum(sizes), *(stop for _, stop in dropped)])
    payload = torch.randn(total, generator=torch.Generator().manual_seed(seed))
    memory = ErrorMemory()
    memory.remember(payload + 1, layout, [(0, total)] if total else [])  # is replaced
    memory.remember(payload, layout, dropped)
    dense = torch.zeros(total)
    for start, stop in dropped:
        dense[start:stop] = payload[start:stop]
    dense[sum(sizes) :] = 0  # padding belongs to no parameter
    for entry in memory.state_dict().values():
        assert bool((entry["ranges"][:, 0] < entry["ranges"][:, 1]).all()), "an empty range"
    again = ErrorMemory()
    again.load_state_dict(memory.state_dict(), dict(layout))
    for one in (memory, again):
        corrected = torch.ones(total)
        one.add_to(corrected, layout)
        assert torch.equal(corrected, 1 + dense)
        assert math.isclose(one.norm(), float(dense.double().norm()), abs_tol=1e-12)
        at = 0
        for key, elements in layout:
            assert torch.equal(one.dense(key, elements), dense[at : at + elements])
            at += elements


def test_the_memory_takes_as_much_as_was_dropped() -> None:
    memory = ErrorMemory()
    memory.remember(torch.ones(1000), [("a", 600), ("b", 400)], [])
    assert memory.elements() == 0
    assert memory.state_dict() == {}
    memory.remember(torch.ones(1000), [("a", 600), ("b", 400)], [(590, 610)])
    assert memory.elements() == 20


@pytest.mark.parametrize("dropped", [[(3, 2)], [(0, 5), (4, 6)], [(5, 6), (0, 1)], [(0, 11)]])
def test_ranges_that_make_no_sense_are_refused(dropped: list[Range]) -> None:
    with pytest.raises(ValueError, match="dropped range"):
        ErrorMemory().remember(torch.ones(10), [("a", 10)], dropped)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(other=s.pop("a")), "other"),
        (lambda s: s["a"].update(elements=9), "does not fit"),
        (lambda s: s["a"].update(ranges=torch.tensor([[5, 11]])), "does not fit"),
        (lambda s: s["a"].update(ranges=torch.tensor([[-1, 1]])), "does not fit"),
        (lambda s: s["a"].update(values=torch.ones(3)), "does not fit"),
    ],
)
def test_a_memory_that_does_not_fit_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    memory = ErrorMemory()
    memory.remember(torch.ones(10), [("a", 10)], [(2, 4)])
    state = memory.state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        memory.load_state_dict(state, {"a": 10})
    assert torch.equal(memory.dense("a", 10), torch.tensor([0, 0, 1.0, 1, 0, 0, 0, 0, 0, 0]))


def test_the_threshold_is_the_cutoff_of_the_largest() -> None:
    """Paper: SMART §3.1."""
    flat = torch.randperm(100_000, generator=torch.Generator().manual_seed(3)).float()
    flat[::2] *= -1  # by magnitude
    before = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    cutoff = sampled_cutoff(flat, 0.01, 4096, generator)
    assert 98_500 < cutoff < 99_500
    assert torch.equal(torch.get_rng_state(), before), "the program's random numbers changed"
    assert sampled_cutoff(flat, 0.5, 4096, generator) < 55_000


# ---- checkpoints --------------------------------------------------------------------------------


def restarted(
    rank: int, break_at: int | None, bucket_cap_mb: float, keep_memory: bool = True
) -> tuple[list[list[str]], list[float]]:
    """Seven steps with drops; with `break_at`, everything is rebuilt from a checkpoint there.

    Returns the parameters after each step, and the thresholds of all messages.
    """
    network = LossyNetwork(0.3)
    options = dataclasses.replace(OPEN, exact_every=4)
    model = DistributedDataParallel(net(), bucket_cap_mb=100)
    state = SmartState(options=options, model=model)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    after = []
    for step in range(7):
        # Losses depend on the step alone, not on how many messages there were before.
        network.seed = step
        state._transfers.begun = 0
        if step == break_at:
            saved = state.state_dict(), model.module.state_dict(), optimizer.state_dict()
            assert saved[0]["error_memory"]
            module = net(seed=9)
            module.load_state_dict(saved[1])
            model = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
            state = SmartState(options=options, model=model)
            if keep_memory:
                state.load_state_dict(saved[0])
            model.register_comm_hook(state, smart_hook)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
            optimizer.load_state_dict(saved[2])
        after += train(model, rank, [step], optimizer)
    return after, network.thresholds


@lossy_only
def test_a_restart_with_the_same_buckets_changes_no_bit() -> None:
    straight = run_ranks(restarted, None, 100, world_size=2)
    # One bucket holds everything, so DDP's rebuilding after the first step changes at most its
    # order: break where the next step rebuilds it, too.
    broken = run_ranks(restarted, 3, 100, world_size=2)
    assert broken[0][0] == broken[1][0]
    assert broken == straight
    forgetful = run_ranks(restarted, 3, 100, False, world_size=2)
    assert forgetful[0][0] != straight[0][0]


def moved(rank: int) -> tuple[list[float], list[float]]:
    """Lossy steps, a checkpoint, other buckets, an exact step: what was to send, what came."""
    LossyNetwork(0.6)
    shapes = [500, 30, 800]
    wanted, delivered = torch.zeros(sum(shapes)), torch.zeros(sum(shapes))
    saved = None
    for order in ([0, 1, 2], [2, 0, 1]):
        model = nn.ParameterList([nn.Parameter(torch.zeros(n)) for n in shapes])
        state = SmartState(options=OPEN, model=model)
        if saved is not None:
            state.load_state_dict(saved)
            state.exact_next_step()
        for _ in range(3 if saved is None else 1):
            gradient = torch.arange(float(sum(shapes))) % 5
            wanted += 2 * gradient
            parts = [p.clone() for p in gradient.split(shapes)]
            bucket = Bucket(torch.cat([parts[i] for i in order]), [model[i] for i in order])
            got = smart_hook(state, bucket).wait().split([shapes[i] for i in order])  # type: ignore[arg-type]
            delivered += 2 * torch.cat([got[order.index(i)] for i in range(3)])
        saved = state.state_dict()
    return wanted.tolist(), delivered.tolist()


@lossy_only
def test_a_restart_with_other_buckets_loses_nothing() -> None:
    for wanted, delivered in run_ranks(moved, world_size=2):
        assert wanted == delivered


@lossy_only
def test_a_bucket_cap_changed_by_a_restart_keeps_replicas_identical() -> None:
    results = run_ranks(restarted, 3, 0.01, world_size=2)
    assert results[0][0] == results[1][0]
