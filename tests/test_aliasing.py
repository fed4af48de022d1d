"""Operands that share memory: in every collective that takes several, on any of the ranks.

All inputs are read before anything is written, and the outputs are written in the order of the
list, so the last one determines shared elements: the results of an operation that flattens its
operands and copies the results back, as gloo does. Each rank takes its operands from one tensor,
the arena, and compares all of it with a model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_oracle import brief, same_bits, small
from harness import error_of, on_gloo, run_ranks, world_size
from strict_device import DEVICE, start

ARENA = 256  # elements
CASES = 150  # of one run
SEEDS = [1, 2, 3]

# gloo keeps to the model here; elsewhere it writes to outputs while it reads inputs, or refuses.
GLOO_KEEPS_TO_IT = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce, coalescing_manager",
    "broadcast",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "gather",
)


@dataclass
class View:
    """`count` elements of the arena from `start` on, every `step`-th one."""

    start: int
    count: int
    step: int = 1

    def of(self, arena: torch.Tensor) -> torch.Tensor:
        return arena[self.start : self.start + self.count * self.step : self.step]


@dataclass
class Operands:
    """The operands of one rank. `inputs` is `outputs` if an operation works in place."""

    inputs: list[View]
    outputs: list[View]


Values = list[list[torch.Tensor]]  # by rank, the inputs before the call


@dataclass
class Operation:
    """The call of an operation, and the values that its outputs receive."""

    # (list length, size) -> how often the basic count each input and output holds.
    inputs: Callable[[int, int], list[int]]
    outputs: Callable[[int, int], list[int]]
    # (rank, root, size, values of all ranks) -> by output; none: it keeps its value.
    model: Callable[[int, int, int, Values], list[torch.Tensor | None]]
    # (inputs, outputs, rank, root, size) -> a Work or a Future
    call: Callable[[list[torch.Tensor], list[torch.Tensor], int, int, int], Any]
    in_place: bool = False
    by_rank: bool = False  # the parts of rank 0 are written first, then those of rank 1, ...


def total(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


def lists(flat: list[torch.Tensor], length: int) -> list[list[torch.Tensor]]:
    return [flat[i : i + length] for i in range(0, len(flat), length)]


def coalesced(call: Callable[[torch.Tensor, torch.Tensor], Any], ins: Any, outs: Any) -> Any:
    with dist._coalescing_manager(async_ops=True) as works:
        for tensor, output in zip(ins, outs, strict=True):
            call(output, tensor)
    (work,) = works.works
    return work


def messages(ins: list[torch.Tensor], outs: list[torch.Tensor], rank: int, size: int) -> Any:
    """Sends to the next rank and receives from the previous one; sends may share memory."""
    operations = [dist.P2POp(dist.isend, t, (rank + 1) % size) for t in ins]
    operations += [dist.P2POp(dist.irecv, t, (rank - 1) % size) for t in outs]
    return dist.batch_isend_irecv(operations)


def each(count: int) -> list[int]:
    return [1] * count


OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(
        lambda k, size: [1],
        lambda k, size: [1],
        lambda rank, root, size, values: [total([v[0] for v in values])],
        lambda ins, outs, rank, root, size: dist.all_reduce(outs[0], async_op=True),
        in_place=True,
    ),
    "all_reduce_coalesced": Operation(
        lambda k, size: each(k),
        lambda k, size: each(k),
        lambda rank, root, size, values: [total(list(v)) for v in zip(*values, strict=True)],
        lambda ins, outs, rank, root, size: dist.all_reduce_coalesced(outs, async_op=True),
        in_place=True,
    ),
    "all_reduce, coalescing_manager": Operation(
        lambda k, size: each(k),
        lambda k, size: each(k),
        lambda rank, root, size, values: [total(list(v)) for v in zip(*values, strict=True)],
        lambda ins, outs, rank, root, size: coalesced(
            lambda output, _: dist.all_reduce(output), outs, outs
        ),
        in_place=True,
    ),
    "broadcast": Operation(
        lambda k, size: [1],
        lambda k, size: [1],
        lambda rank, root, size, values: [values[root][0]],
        lambda ins, outs, rank, root, size: dist.broadcast(outs[0], root, async_op=True),
        in_place=True,
    ),
    "reduce": Operation(
        lambda k, size: [1],
        lambda k, size: [1],
        lambda rank, root, size, values: [total([v[0] for v in values]) if rank == root else None],
        lambda ins, outs, rank, root, size: dist.reduce(outs[0], root, async_op=True),
        in_place=True,
    ),
    "all_gather": Operation(
        lambda k, size: [1],
        lambda k, size: each(size),
        lambda rank, root, size, values: [v[0] for v in values],
        lambda ins, outs, rank, root, size: dist.all_gather(outs, ins[0], async_op=True),
    ),
    "all_gather_coalesced": Operation(
        lambda k, size: each(k),
        lambda k, size: each(k * size),
        lambda rank, root, size, values: [t for v in values for t in v],
        lambda ins, outs, rank, root, size: dist.all_gather_coalesced(
            lists(outs, len(ins)), ins, async_op=True
        ),
    ),
    "all_gather_into_tensor": Operation(
        lambda k, size: each(k),
        lambda k, size: [size] * k,
        lambda rank, root, size, values: [torch.cat(v) for v in zip(*values, strict=True)],
        lambda ins, outs, rank, root, size: coalesced(dist.all_gather_into_tensor, ins, outs),
        by_rank=True,
    ),
    "reduce_scatter": Operation(
        lambda k, size: each(size),
        lambda k, size: [1],
        lambda rank, root, size, values: [total([v[rank] for v in values])],
        lambda ins, outs, rank, root, size: dist.reduce_scatter(outs[0], ins, async_op=True),
    ),
    "reduce_scatter_tensor": Operation(
        lambda k, size: [size] * k,
        lambda k, size: each(k),
        lambda rank, root, size, values: [
            total([t.chunk(size)[rank] for t in v]) for v in zip(*values, strict=True)
        ],
        lambda ins, outs, rank, root, size: coalesced(dist.reduce_scatter_tensor, ins, outs),
    ),
    "gather": Operation(
        lambda k, size: [1],
        lambda k, size: each(size),
        lambda rank, root, size, values: [v[0] for v in values] if rank == root else [None] * size,
        lambda ins, outs, rank, root, size: dist.gather(
            ins[0], outs if rank == root else None, root, async_op=True
        ),
    ),
    "scatter": Operation(
        lambda k, size: each(size),
        lambda k, size: [1],
        lambda rank, root, size, values: [values[root][rank]],
        lambda ins, outs, rank, root, size: dist.scatter(
            outs[0], ins if rank == root else None, root, async_op=True
        ),
    ),
    "all_to_all": Operation(
        lambda k, size: each(size),
        lambda k, size: each(size),
        lambda rank, root, size, values: [v[rank] for v in values],
        lambda ins, outs, rank, root, size: dist.all_to_all(outs, ins, async_op=True),
    ),
    "all_to_all_single": Operation(
        lambda k, size: [size],
        lambda k, size: [size],
        lambda rank, root, size, values: [torch.cat([v[0].chunk(size)[rank] for v in values])],
        lambda ins, outs, rank, root, size: dist.all_to_all_single(outs[0], ins[0], async_op=True),
    ),
    "messages": Operation(
        lambda k, size: each(k),
        lambda k, size: each(k),
        lambda rank, root, size, values: list(values[(rank - 1) % size]),
        lambda ins, outs, rank, root, size: messages(ins, outs, rank, size),
    ),
}


def choose(rng: random.Random, counts: list[int], shared: bool) -> list[View]:
    """One after the other; if `shared`, many of them at or near the place of another one."""
    views: list[View] = []
    free = 0
    for count in counts:
        step = 2 if rng.random() < 0.1 and not on_gloo() else 1
        view = View(free, count, step)
        if shared and views and rng.random() < 0.7:
            other = rng.choice(views)
            inside = rng.randrange(other.count * other.step)
            view.start = rng.choice([other.start, other.start + inside, max(0, free - count)])
        views.append(view)
        free = max(free, view.start + count * step)
    rest = ARENA - free
    assert rest >= 0, "the arena is too small"
    shift = rng.randrange(rest + 1)
    for view in views:
        view.start += shift
    return views


def operands(rng: random.Random, name: str, k: int, count: int, rank: int, size: int) -> Operands:
    operation = OPERATIONS[name]
    shared = rng.random() < 0.8
    sizes = [n * count for n in operation.inputs(k, size)]
    if operation.in_place:
        views = choose(rng, sizes, shared)
        return Operands(views, views)
    results = [n * count for n in operation.outputs(k, size)]
    if name == "messages":  # each is a separate operation: only sent memory may be shared
        own = choose(rng, [2 * sum(sizes), *results], shared=False)[1:]
        first = min(view.start for view in own)
        inputs = choose(random.Random(rng.random()), sizes, shared)
        low = min(view.start for view in inputs)
        for view in inputs:
            view.start += first - 2 * sum(sizes) - low
        return Operands(inputs, own)
    # Outputs first or inputs first: which of them lies where must not matter.
    views = choose(rng, results + sizes, shared)
    outputs, inputs = views[: len(results)], views[len(results) :]
    if rng.random() < 0.3:  # exactly in place, if the operation supports that
        for i, view in enumerate(inputs):
            if name in ("all_gather", "all_gather_coalesced"):
                output = outputs[rank * len(inputs) + i]
                inputs[i] = View(output.start, count, output.step)
            elif name == "all_gather_into_tensor" and outputs[i].step == 1:
                inputs[i] = View(outputs[i].start + rank * count, count)
            elif name == "reduce_scatter_tensor" and view.step == 1:
                outputs[i] = View(view.start + rank * count, count)
        if name == "reduce_scatter":
            outputs[0] = View(inputs[rank].start, count, inputs[rank].step)
    return Operands(inputs, outputs)


def finish(rng: random.Random, handle: Any) -> list[torch.Tensor] | None:
    """Waits by the Work or by its future; returns the future's value."""
    if isinstance(handle, list):
        for work in handle:
            finish(rng, work)
        return None
    if isinstance(handle, torch._C.Future):
        value = handle.wait()
    elif rng.random() < 0.5:
        value = handle.get_future().wait()
    else:
        handle.wait()
        return None
    return list(value)


def one_case(rank: int, seed: int, number: int, device: str) -> str:
    """Returns what went wrong, or nothing."""
    size = world_size()
    rng = random.Random(f"{seed} {number}")
    name = rng.choice([n for n in OPERATIONS if not on_gloo() or n in GLOO_KEEPS_TO_IT])
    operation = OPERATIONS[name]
    k, count, root = rng.randint(1, 3), rng.randint(1, 5), rng.randrange(size)
    # Shared memory in one rank's operands concerns that rank alone.
    of_rank = [operands(rng, name, k, count, r, size) for r in range(size)]
    arenas = [small((ARENA,), torch.float32, seed, number, r) + r for r in range(size)]
    values = [
        [view.of(arena).clone() for view in o.inputs]
        for o, arena in zip(of_rank, arenas, strict=True)
    ]
    want = arenas[rank].clone()
    results = operation.model(rank, root, size, values)
    parts = size if operation.by_rank else 1
    for part in range(parts):
        for view, result in zip(of_rank[rank].outputs, results, strict=True):
            if result is not None:
                view.of(want).chunk(parts)[part].copy_(result.chunk(parts)[part])
    got = arenas[rank].to(device)
    ins = [view.of(got) for view in of_rank[rank].inputs]
    outs = [view.of(got) for view in of_rank[rank].outputs]
    value = finish(rng, operation.call(ins, outs, rank, root, size))
    case = f"seed {seed}, case {number}: {name} of {of_rank[rank]}, root {root}"
    got = got.cpu()
    if not same_bits(got, want):
        different = torch.nonzero(got != want).flatten()
        first = int(different[0])
        return f"{case}: from element {first} on {brief(got[first:])}, want {brief(want[first:])}"
    if value is not None and any(r is not None for r in results) and not on_gloo():
        told = torch.cat([t.reshape(-1) for t in value]).cpu()
        if not same_bits(told, torch.cat([t.reshape(-1) for t in outs]).cpu()):
            return f"{case}: the future's value is {brief(told)}"
    return ""


def many_cases(rank: int, seed: int, cases: int, device: str = "cpu") -> list[str]:
    if device != "cpu":
        start(copy_s=0.0005)
    return [wrong for n in range(cases) if (wrong := one_case(rank, seed, n, device))]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_operands_that_share_memory(seed: int, size: int) -> None:
    for rank, wrong in enumerate(run_ranks(many_cases, seed, CASES, world_size=size)):
        assert not wrong, f"rank {rank}: {len(wrong)} of {CASES} cases:\n" + "\n".join(wrong[:5])


@pytest.mark.skipif(on_gloo(), reason="gloo has no backend for the strict device")
@pytest.mark.usefixtures("strict_device")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_operands_that_share_memory_of_a_device() -> None:
    """Copied to the host and back, some milliseconds late."""
    for rank, wrong in enumerate(run_ranks(many_cases, 4, 40, DEVICE, init=False)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong[:5])


# ---- outputs that cannot be written -------------------------------------------------------------


def expanded_calls(rank: int) -> list[tuple[str, Callable[[], Any]]]:
    """Each with an output on rank 1, in an operation that only that rank can find wrong."""
    size = world_size()
    plain = torch.ones(3)
    bad = torch.zeros(1).expand(3) if rank == 1 else torch.zeros(3)
    wide = torch.zeros(1).expand(3 * size) if rank == 1 else torch.zeros(3 * size)
    others = [torch.zeros(3) for _ in range(size - 1)]
    many = [torch.ones(3) for _ in range(size)]
    return [
        ("all_reduce", lambda: dist.all_reduce(bad)),
        ("all_reduce_coalesced", lambda: dist.all_reduce_coalesced([plain, bad])),
        ("broadcast", lambda: dist.broadcast(bad, 0)),
        ("reduce", lambda: dist.reduce(bad, 1)),
        ("all_gather", lambda: dist.all_gather([*others, bad], plain)),
        ("all_gather_into_tensor", lambda: dist.all_gather_into_tensor(wide, plain)),
        ("reduce_scatter", lambda: dist.reduce_scatter(bad, many)),
        ("gather", lambda: dist.gather(plain, [*others, bad] if rank == 1 else None, 1)),
        ("scatter", lambda: dist.scatter(bad, many if rank == 0 else None, 0)),
        ("all_to_all", lambda: dist.all_to_all([*others, bad], many)),
        ("all_to_all_single", lambda: dist.all_to_all_single(wide, torch.ones(3 * size))),
    ]


# A rank that only sends in these may be done before it hears of the failure.
MAY_SUCCEED = {"broadcast": 0, "reduce": 0, "gather": 0, "scatter": 0}


def expanded_outputs(rank: int) -> list[str]:
    wrong: list[str] = []
    for name, call in expanded_calls(rank):
        start = time.monotonic()
        error = ""
        try:
            call()
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        if time.monotonic() - start > GROUP_TIMEOUT_S / 2:
            wrong.append(f"{name} took {time.monotonic() - start:.1f} s")
        if error or not (name in MAY_SUCCEED and rank != 1):
            kind = "CallError" if rank == 1 else "DistBackendError"
            if not error.startswith(kind) or "several of its elements" not in error:
                wrong.append(f"{name}: {error}")
            if rank != 1 and "rank 1" not in error:
                wrong.append(f"{name} does not name the rank: {error}")
        dist.barrier()  # the group remains usable
    return wrong


GROUP_TIMEOUT_S = 30.0


@pytest.mark.skipif(on_gloo(), reason="gloo gives wrong numbers for expanded outputs")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_output_that_one_rank_cannot_write_fails_on_all_ranks() -> None:
    reports = run_ranks(expanded_outputs, world_size=3, group_timeout_s=GROUP_TIMEOUT_S)
    for rank, wrong in enumerate(reports):
        assert not wrong, f"rank {rank}: {wrong}"


# ---- a block of operations, given a device ------------------------------------------------------


def coalescing_with_device(rank: int) -> None:
    """Operations that torch itself coalesces, others, and messages in any order."""
    size, device = world_size(), torch.device("cpu")
    x, y = torch.full((2,), float(rank + 1)), torch.arange(4.0) + rank
    sums = torch.full((2,), size * (size + 1) / 2)
    with dist._coalescing_manager(device=device):
        dist.all_reduce(x)
        dist.all_reduce(x)
        dist.all_reduce(y)
    assert torch.equal(x, sums), x
    assert torch.equal(y, size * torch.arange(4.0) + size * (size - 1) / 2), y

    received = torch.zeros(3)
    outputs = [torch.zeros(2) for _ in range(size)]
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        # Without waiting: each rank receives before it sends.
        assert dist.recv(received, (rank - 1) % size) == -1
        dist.send(torch.full((3,), float(rank)), (rank + 1) % size)
        assert dist.broadcast(x, 0) is None
        gathered = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    (work,) = block.works
    value = work.get_future().wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.wait()
    assert gathered.is_completed()
    assert torch.equal(received, torch.full((3,), float((rank - 1) % size)))
    assert [o.tolist() for o in outputs] == [[r, r] for r in range(size)]
    assert [t.data_ptr() for t in value] == [
        t.data_ptr() for t in [received, value[1], x, *outputs]
    ]

    with dist._coalescing_manager(device=device, async_ops=True) as block:
        pass
    block.wait()
    after = torch.ones(1)
    assert dist.all_reduce(after, async_op=True) is not None  # the block is over
    dist.barrier()
    text = error_of(lambda: dist.group.WORLD._end_coalescing(device))
    assert text.startswith("CallError"), text
    assert "startCoalescing" in text, text


@pytest.mark.skipif(on_gloo(), reason="gloo has no startCoalescing")
@pytest.mark.parametrize("size", [2, 3])
def test_coalescing_manager_with_a_device(size: int) -> None:
    run_ranks(coalescing_with_device, world_size=size)


def coalesced_failure(rank: int) -> str:
    dist.barrier()
    if rank == 1:
        return ""
    device = torch.device("cpu")
    tensors = [torch.zeros(1), torch.zeros(1)]
    with dist._coalescing_manager(device=device, async_ops=True) as block:
        for tag, tensor in enumerate(tensors):
            dist.irecv(tensor, 1, tag=tag)
    return error_of(block.wait)


@pytest.mark.skipif(on_gloo(), reason="gloo has no startCoalescing")
def test_a_block_fails_with_the_first_of_its_operations() -> None:
    text = run_ranks(coalesced_failure)[0]
    assert text.startswith("DistBackendError: recv of float32[1] from rank 1, tag 0"), text
    assert "has left" in text, text
