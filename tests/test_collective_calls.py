"""The ways to call a collective: on views and aliases, asynchronously, several at once, through
torch's functional and object interfaces, and wrongly. Barriers, too.

test_collectives.py has the values: every dtype, shape, reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_oracle import (
    BAND,
    BXOR,
    MAX,
    SIZES,
    SUM,
    Checks,
    assert_good,
    bits,
    reduced,
    small,
)
from harness import error_of, make_store, on_gloo, run_outcomes, run_ranks, wait_until, world_size
from torch._prims_common import is_non_overlapping_and_dense_or_false

# ---- layouts, aliases, asynchronous calls -------------------------------------------------------


def layouts() -> list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]]:
    """Views of a 12 x 10 matrix; each function returns a view that shares memory with it."""
    return [
        ("transposed", lambda t: t.t()),
        ("a column block", lambda t: t[:, 2:7]),
        ("an offset block", lambda t: t[3:9]),
        ("three dimensions, permuted", lambda t: t.view(3, 4, 10).permute(2, 0, 1)),
        ("one column", lambda t: t[:, 3]),
        ("every other row", lambda t: t[::2]),
        ("every other element", lambda t: t.view(-1)[::2]),
    ]


def noncontiguous(rank: int) -> Any:
    checks, size = Checks(), world_size()
    for name, view in layouts():
        # gloo: wrong numbers, without an error, for views that are not dense; point of the test.
        dense = is_non_overlapping_and_dense_or_false(view(torch.empty(12, 10)))
        base = [small((12, 10), torch.float32, "n", r, name) for r in range(size)]
        if dense or not on_gloo():
            whole = base[rank].clone()
            dist.all_reduce(view(whole))
            want = base[rank].clone()
            view(want).copy_(reduced([view(t) for t in base], SUM))
            checks.equal(whole, want, f"all_reduce of {name}: only the view may change")

            whole = base[rank].clone()
            dist.broadcast(view(whole), 0)
            want = base[rank].clone()
            view(want).copy_(view(base[0]))
            checks.equal(whole, want, f"broadcast of {name}: only the view may change")
        if on_gloo():
            continue
        outputs = [torch.zeros(12, 10) for _ in range(size)]
        dist.all_gather([view(t) for t in outputs], view(base[rank]))
        for r in range(size):
            want = torch.zeros(12, 10)
            view(want).copy_(view(base[r]))
            checks.equal(outputs[r], want, f"all_gather into {name}")

        outputs = [torch.zeros(12, 10) for _ in range(size)]
        inputs = [view(small((12, 10), torch.float32, "t", rank, to)) for to in range(size)]
        dist.all_to_all([view(t) for t in outputs], inputs)
        for r in range(size):
            want = torch.zeros(12, 10)
            view(want).copy_(view(small((12, 10), torch.float32, "t", r, rank)))
            checks.equal(outputs[r], want, f"all_to_all into {name}")

        whole = base[rank].clone()
        dist.reduce(view(whole), 1)
        if rank == 1:
            want = base[1].clone()
            view(want).copy_(reduced([view(t) for t in base], SUM))
            checks.equal(whole, want, f"reduce of {name}")
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_noncontiguous_tensors(size: int) -> None:
    reports = run_ranks(noncontiguous, world_size=size)
    assert_good(reports)


def aliases(rank: int) -> Any:
    checks, size = Checks(), world_size()
    mine = [bits((6,), torch.float32, "alias", r) for r in range(size)]

    whole = torch.zeros(size, 6)
    whole[rank] = mine[rank]
    dist.all_gather_into_tensor(whole.view(-1), whole[rank])
    checks.equal(whole, torch.stack(mine), "all_gather_into_tensor in place")

    whole = torch.zeros(size, 6)
    whole[rank] = mine[rank]
    dist.all_gather(list(whole.unbind()), whole[rank])
    checks.equal(whole, torch.stack(mine), "all_gather in place")

    whole = torch.stack([small((6,), torch.float32, rank, to) for to in range(size)])
    dist.reduce_scatter_tensor(whole[rank], whole.view(-1))
    want = reduced([small((6,), torch.float32, r, rank) for r in range(size)], SUM)
    checks.equal(whole[rank], want, "reduce_scatter_tensor in place")

    whole = torch.stack([small((6,), torch.float32, rank, to) for to in range(size)])
    dist.reduce_scatter(whole[rank], list(whole.unbind()))
    checks.equal(whole[rank], want, "reduce_scatter in place")

    whole = torch.stack(mine) if rank == 1 else torch.zeros(size, 6)
    dist.scatter(whole[rank], list(whole.unbind()) if rank == 1 else None, 1)
    checks.equal(whole[rank], mine[rank], "scatter in place")

    whole = torch.zeros(size, 6)
    whole[rank] = mine[rank]
    dist.gather(whole[rank], list(whole.unbind()) if rank == 1 else None, 1)
    if rank == 1:
        checks.equal(whole, torch.stack(mine), "gather in place")

    # The same input given to every rank, and an input which the caller keeps using.
    mine_now = mine[rank].clone()
    outputs = [torch.empty(6) for _ in range(size)]
    dist.all_to_all(outputs, [mine_now] * size)
    checks.equal(torch.stack(outputs), torch.stack(mine), "all_to_all of one tensor")
    checks.equal(mine_now, mine[rank], "the input of all_to_all is unchanged")

    expanded = torch.full((1,), float(rank)).expand(6)
    outputs = [torch.empty(6) for _ in range(size)]
    if not on_gloo():
        dist.all_gather(outputs, expanded)
        checks.equal(outputs[1], torch.ones(6), "all_gather of an expanded tensor")
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_aliased_inputs_and_outputs(size: int) -> None:
    for rank, (_, wrong, _) in enumerate(run_ranks(aliases, world_size=size)):
        assert not wrong, f"rank {rank}: {wrong}"


def asynchronous(rank: int) -> Any:
    checks, size = Checks(), world_size()
    works, expected = [], []
    for i in range(40):
        shape = (1 + 997 * i,)
        inputs = [small(shape, torch.float32, "async", r, i) for r in range(size)]
        kind = i % 4
        if kind == 0:
            got = inputs[rank].clone()
            works.append(dist.all_reduce(got, async_op=True))
            expected.append((got, reduced(inputs, SUM)))
        elif kind == 1:
            got = inputs[rank].clone()
            works.append(dist.broadcast(got, i % size, async_op=True))
            expected.append((got, inputs[i % size]))
        elif kind == 2:
            got = torch.empty(size, *shape)
            work = dist.all_gather_into_tensor(got.view(-1), inputs[rank], async_op=True)
            works.append(work)
            expected.append((got, torch.stack(inputs)))
        else:
            got = torch.empty(shape)
            whole = torch.cat([inputs[rank]] * size)
            works.append(dist.reduce_scatter_tensor(got, whole, async_op=True))
            del whole  # the Work must keep it
            expected.append((got, reduced(inputs, SUM)))
    for i in reversed(range(len(works))):  # in no order the backend can rely on
        works[i].wait()
        checks.equal(*expected[i], f"asynchronous operation {i}")
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_many_asynchronous_operations(size: int) -> None:
    assert_good(
        [(count, wrong, "") for count, wrong, _ in run_ranks(asynchronous, world_size=size)]
    )


# ---- coalesced, functional, objects, barriers ---------------------------------------------------


def coalesced(rank: int) -> Any:
    import torch.distributed._functional_collectives as funcol

    checks, size = Checks(), world_size()
    shapes = [(3,), (0,), (1,), (5, 7), (4099,)]
    inputs = [[small(s, torch.float32, "c", r, s) for s in shapes] for r in range(size)]
    sums = [reduced([inputs[r][i] for r in range(size)], SUM) for i in range(len(shapes))]

    def eager_all_reduce() -> None:
        tensors = [t.clone() for t in inputs[rank]]
        dist.all_reduce_coalesced(tensors)
        for got, want in zip(tensors, sums, strict=True):
            checks.equal(got, want, "all_reduce_coalesced")

    def manager() -> None:
        tensors = [t.clone() for t in inputs[rank]]
        with dist._coalescing_manager():
            for t in tensors:
                dist.all_reduce(t)
        for got, want in zip(tensors, sums, strict=True):
            checks.equal(got, want, "_coalescing_manager of all_reduce")
        outputs = [torch.empty(size * s[0], *s[1:]) for s in shapes]
        with dist._coalescing_manager(async_ops=True) as work:
            for out, t in zip(outputs, inputs[rank], strict=True):
                dist.all_gather_into_tensor(out, t)
        work.wait()
        for i, out in enumerate(outputs):
            want = torch.cat([inputs[r][i] for r in range(size)])
            checks.equal(out, want, "_coalescing_manager of all_gather_into_tensor")
        outputs = [torch.empty(s) for s in shapes]
        with dist._coalescing_manager():
            for out, t in zip(outputs, inputs[rank], strict=True):
                dist.reduce_scatter_tensor(out, torch.cat([t] * size))
        for out, want in zip(outputs, sums, strict=True):
            checks.equal(out, want, "_coalescing_manager of reduce_scatter_tensor")

    def all_gather_coalesced() -> None:
        lists = [[torch.empty(s) for s in shapes] for _ in range(size)]
        dist.all_gather_coalesced(lists, inputs[rank])
        for r in range(size):
            for got, want in zip(lists[r], inputs[r], strict=True):
                checks.equal(got, want, f"all_gather_coalesced of {r}")

    def functional() -> None:
        group = dist.group.WORLD
        got = funcol.all_reduce(inputs[rank][3], "sum", group)
        checks.equal(got.clone(), sums[3], "funcol.all_reduce")
        gathered = funcol.all_gather_tensor(inputs[rank][3], 0, group)
        want = torch.cat([inputs[r][3] for r in range(size)])
        checks.equal(gathered.clone(), want, "funcol.all_gather_tensor")
        many = funcol.all_gather_into_tensor_coalesced(inputs[rank], group)
        for i, got in enumerate(many):
            want = torch.cat([inputs[r][i] for r in range(size)])
            checks.equal(got.clone(), want, "funcol.all_gather_into_tensor_coalesced")
        many = funcol.all_reduce_coalesced(inputs[rank], "sum", group)
        for got, want in zip(many, sums, strict=True):
            checks.equal(got.clone(), want, "funcol.all_reduce_coalesced")
        stacked = [torch.cat([t] * size) for t in inputs[rank]]
        got = funcol.reduce_scatter_tensor(stacked[3], "sum", 0, group)
        checks.equal(got.clone(), sums[3], "funcol.reduce_scatter_tensor")
        many = funcol.reduce_scatter_tensor_coalesced(stacked, "sum", [0] * len(stacked), group)
        for got, want in zip(many, sums, strict=True):
            checks.equal(got.clone(), want, "funcol.reduce_scatter_tensor_coalesced")
        got = funcol.broadcast(inputs[rank][3], 1, group)
        checks.equal(got.clone(), inputs[1][3], "funcol.broadcast")
        splits_in = [(rank + to) % 3 for to in range(size)]
        splits_out = [(r + rank) % 3 for r in range(size)]
        got = funcol.all_to_all_single(
            torch.full((sum(splits_in),), float(rank)), splits_out, splits_in, group
        )
        want = torch.cat([torch.full((n,), float(r)) for r, n in enumerate(splits_out)])
        checks.equal(got.clone(), want, "funcol.all_to_all_single")

    eager_all_reduce()
    manager()
    all_gather_coalesced()
    functional()
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_coalesced_and_functional(size: int) -> None:
    for rank, (count, wrong, _) in enumerate(run_ranks(coalesced, world_size=size)):
        assert not wrong, f"rank {rank}: {wrong}"
        assert count > 20


def objects(rank: int) -> None:
    size = world_size()
    thing = {"rank": rank, "list": list(range(rank * 1000)), "tensor": torch.arange(rank + 1)}
    everything: list[Any] = [None] * size
    dist.all_gather_object(everything, thing)
    for r in range(size):
        assert everything[r]["rank"] == r
        assert len(everything[r]["list"]) == r * 1000
        assert torch.equal(everything[r]["tensor"], torch.arange(r + 1))
    at_root: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(thing, at_root, 1)
    if rank == 1:
        assert at_root is not None
        assert [t["rank"] for t in at_root] == list(range(size))
    many: list[Any] = ["a", None, {"b": 1.5}] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(many, 1)
    assert many == ["a", None, {"b": 1.5}]
    one: list[Any] = [None]
    dist.scatter_object_list(one, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert one == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([1, "two", thing], 1)
    elif rank == 1:
        received: list[Any] = [None, None, None]
        dist.recv_object_list(received, 0)
        assert received[:2] == [1, "two"]
        assert received[2]["rank"] == 0


@pytest.mark.parametrize("size", SIZES)
def test_object_collectives(size: int) -> None:
    run_ranks(objects, world_size=size)


def barrier_holds(rank: int) -> None:
    """No rank leaves a barrier before all have entered it; the store records who has."""
    size, store = world_size(), make_store("barrier")
    for i in range(20):
        store.add(f"entered {i}", 1)
        if i % 2:
            dist.barrier()
        else:
            dist.group.WORLD.monitored_barrier(timedelta(seconds=30))
        assert store.add(f"entered {i}", 0) >= (size if i % 2 else 1)
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30), wait_all_ranks=True)


@pytest.mark.parametrize("size", SIZES)
def test_barrier_holds(size: int) -> None:
    run_ranks(barrier_holds, world_size=size)


def monitored_barrier_names_the_absent(rank: int, absent: list[int], wait_all: bool) -> str:
    store = make_store("absent")
    error = ""
    if rank not in absent:
        error = error_of(
            lambda: dist.group.WORLD.monitored_barrier(
                timedelta(seconds=1.5), wait_all_ranks=wait_all
            )
        )
    store.add("done", 1)  # an absent rank must not leave before the others have missed it
    wait_until(lambda: store.add("done", 0) == world_size(), "all ranks are done")
    return error


@pytest.mark.parametrize("wait_all", [False, True])
def test_monitored_barrier_names_the_absent(wait_all: bool) -> None:
    outcomes = run_outcomes(monitored_barrier_names_the_absent, [1, 3], wait_all, world_size=4)
    errors = [outcome.value for outcome in outcomes]
    if wait_all:
        assert "Ranks 1, 3 failed to pass monitoredBarrier" in errors[0]
    else:
        assert "Rank 1 failed to pass monitoredBarrier" in errors[0]
    assert "rank 0" in errors[2].lower(), "the present rank hears that it failed"


# ---- refusals -----------------------------------------------------------------------------------


def refusals(rank: int) -> list[str]:
    """Calls that cannot work fail at once on the caller's side and harm no other rank."""
    size = world_size()
    wrong: list[str] = []

    def refused(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            wrong.append(f"{name} was accepted")
        except (RuntimeError, ValueError, TypeError) as error:
            if len(str(error)) < 10:
                wrong.append(f"{name}: the error says only {error}")
        got = torch.ones(3)
        dist.all_reduce(got)
        if got.tolist() != [float(size)] * 3:
            wrong.append(f"after {name} the group is broken: {got.tolist()}")

    refused("BAND of floats", lambda: dist.all_reduce(torch.ones(4), BAND))
    refused("BXOR of floats", lambda: dist.reduce(torch.ones(4), 0, BXOR))
    refused("MAX of complex", lambda: dist.all_reduce(torch.ones(4, dtype=torch.complex64), MAX))
    refused("a root outside the group", lambda: dist.broadcast(torch.ones(4), size))
    refused(
        "all_gather_into_tensor into a tensor of the wrong size",
        lambda: dist.all_gather_into_tensor(torch.empty(size * 4 + 1), torch.ones(4)),
    )
    refused(
        "reduce_scatter_tensor from a tensor of the wrong size",
        lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(size * 4 + 1)),
    )
    refused(
        "all_gather with too few outputs",
        lambda: dist.all_gather([torch.empty(4)] * (size - 1), torch.ones(4)),
    )
    refused(
        "splits that do not add up",
        lambda: dist.all_to_all_single(torch.empty(size), torch.ones(size), [1] * size, [2] * size),
    )
    refused(
        "all_gather with outputs of another dtype",
        lambda: dist.all_gather(
            [torch.empty(4, dtype=torch.float64) for _ in range(size)], torch.ones(4)
        ),
    )
    if not on_gloo():
        refused(
            "PREMUL_SUM of integers",
            lambda: dist.all_reduce(
                torch.ones(4, dtype=torch.int32), dist._make_nccl_premul_sum(0.5)
            ),
        )
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_refused_calls_leave_the_group_usable(size: int) -> None:
    for rank, wrong in enumerate(run_ranks(refusals, world_size=size)):
        assert not wrong, f"rank {rank}: {wrong}"


def mismatch(rank: int, kind: str) -> str:
    if kind == "dtype":
        tensor = torch.ones(8, dtype=torch.float32 if rank else torch.int32)
    elif kind == "size":
        tensor = torch.ones(8 + rank)
    else:
        tensor = torch.ones(8)
    if kind == "operation" and rank == 0:
        # The root of a small broadcast does not wait: at the latest its next call fails.
        return error_of(lambda: (dist.broadcast(tensor, 0), dist.barrier()))
    if kind == "reduction":
        return error_of(lambda: dist.all_reduce(tensor, MAX if rank else SUM))
    return error_of(lambda: dist.all_reduce(tensor))


@pytest.mark.skipif(on_gloo(), reason="gloo hangs, or mixes the data up")
@pytest.mark.parametrize("kind", ["dtype", "size", "operation", "reduction"])
def test_ranks_that_disagree_find_out(kind: str) -> None:
    """Instead of a hang or wrong numbers: an error that shows both sides' calls."""
    outcomes = run_outcomes(mismatch, kind, group_timeout_s=10, timeout_s=30)
    assert all(outcome.returned for outcome in outcomes), [o.describe() for o in outcomes]
    texts = [outcome.value for outcome in outcomes]
    assert any("all_reduce" in text for text in texts), texts
    words = {"dtype": ["int32", "float32"], "size": ["8", "9"]}
    words |= {"operation": ["broadcast", "all_reduce"], "reduction": ["SUM", "MAX"]}
    assert any(all(word in text for word in words[kind]) for text in texts), texts
