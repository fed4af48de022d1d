"""Mistakes in the arguments of a call: found before anything is sent, raised as gloo raises them.

gloo raises RuntimeError, NCCL usually ValueError. Ours is both, and holds the words that PyTorch's
own tests of gloo look for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import backend_name, on_gloo, run_ranks, world_size
from torch.distributed import distributed_c10d as c10d

FLOAT, DOUBLE, PAIR = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
SPARSE = torch.sparse_coo_tensor([[0]], [1.0], (1,), check_invariants=True)
LONG_SPARSE = torch.sparse_coo_tensor([[0]], [1.0], (4,), check_invariants=True)
WHOLE_SPARSE = torch.sparse_coo_tensor([[0]], [1], (1,), check_invariants=True)

# (what is wrong, the call, what the text must match)
Mistake = tuple[str, Callable[[Any], Any], str]


def with_root(options: Any, root: int, tensor: int = 0) -> Any:
    options.rootRank = root
    if hasattr(options, "rootTensor"):
        options.rootTensor = tensor
    return options


def rooted(rank: int, size: int) -> list[Mistake]:
    broadcast, reduce = c10d.BroadcastOptions, c10d.ReduceOptions
    gather, scatter = c10d.GatherOptions, c10d.ScatterOptions
    elsewhere = (rank + 1) % size
    mistakes: list[Mistake] = []
    for root in (-1, size):
        words = f"invalid root rank: {root}"
        mistakes += [
            (f"broadcast from {root}", lambda g, r=root: g.broadcast([FLOAT], at(r)), words),
            (f"reduce to {root}", lambda g, r=root: g.reduce([FLOAT], to(r)), words),
            (f"gather to {root}", lambda g, r=root: g.gather([], [FLOAT], gather_to(r)), words),
            (f"scatter from {root}", lambda g, r=root: g.scatter([FLOAT], [], from_(r)), words),
        ]

    def at(root: int, tensor: int = 0) -> Any:
        return with_root(broadcast(), root, tensor)

    def to(root: int, tensor: int = 0) -> Any:
        return with_root(reduce(), root, tensor)

    def gather_to(root: int) -> Any:
        return with_root(gather(), root)

    def from_(root: int) -> Any:
        return with_root(scatter(), root)

    for tensor in (-1, 1):
        words = f"invalid root tensor: {tensor}"
        mistakes += [
            ("broadcast: tensor", lambda g, t=tensor: g.broadcast([FLOAT], at(rank, t)), words),
            ("reduce: tensor", lambda g, t=tensor: g.reduce([FLOAT], to(rank, t)), words),
        ]
    mistakes += [
        ("broadcast of none", lambda g: g.broadcast([], at(rank)), "invalid root tensor"),
        ("broadcast", lambda g: g.broadcast([FLOAT, DOUBLE], at(rank)), "invalid tensor type"),
        ("broadcast", lambda g: g.broadcast([FLOAT, PAIR], at(rank)), "invalid tensor size"),
        (
            "reduce of two",
            lambda g: g.reduce([FLOAT, FLOAT], to(rank)),
            "requires a single-element tensor list",
        ),
    ]
    for wrong in ([], [FLOAT, FLOAT]):
        mistakes += [
            (
                "gather of another number than one",
                lambda g, w=wrong: g.gather([], w, gather_to(0)),
                "requires a single-element input tensor list",
            ),
            (
                "scatter to another number than one",
                lambda g, w=wrong: g.scatter(w, [], from_(0)),
                "requires a single-element output tensor list",
            ),
        ]
    for lists in ([], [[FLOAT] * size, [FLOAT] * size]):
        mistakes += [
            (
                "gather to another number of lists than one",
                lambda g, w=lists: g.gather(w, [FLOAT], gather_to(rank)),
                "requires a single-element output list",
            ),
            (
                "scatter from another number of lists than one",
                lambda g, w=lists: g.scatter([FLOAT], w, from_(rank)),
                "requires a single-element input list",
            ),
        ]
    for length in (size - 1, size + 1):
        mistakes += [
            (
                f"gather to {length} tensors",
                lambda g, n=length: g.gather([[FLOAT] * n], [FLOAT], gather_to(rank)),
                f"Incorrect output list size {length}. Output list size should be {size}",
            ),
            (
                f"scatter from {length} tensors",
                lambda g, n=length: g.scatter([FLOAT], [[FLOAT] * n], from_(rank)),
                f"Incorrect input list size {length}. Input list size should be {size}",
            ),
        ]
    for part, words in ((DOUBLE, "invalid tensor type"), (PAIR, "invalid tensor size")):
        mistakes += [
            (
                "gather: outputs",
                lambda g, p=part: g.gather([[p] * size], [FLOAT], gather_to(rank)),
                words,
            ),
            (
                "scatter: inputs",
                lambda g, p=part: g.scatter([FLOAT], [[p] * size], from_(rank)),
                words,
            ),
        ]
    mistakes += [
        (
            "gather: outputs elsewhere than at the root",
            lambda g: g.gather([[FLOAT] * size], [FLOAT], gather_to(elsewhere)),
            "requires empty output on non-root",
        ),
        (
            "scatter: inputs elsewhere than at the root",
            lambda g: g.scatter([FLOAT], [[FLOAT] * size], from_(elsewhere)),
            "requires empty input on non-root",
        ),
    ]
    return mistakes


def all_reduces() -> list[Mistake]:
    plain, coalesced = c10d.AllreduceOptions, c10d.AllreduceCoalescedOptions

    def reducing(op: Any) -> Any:
        options = plain()
        options.reduceOp = op
        return options

    mistakes: list[Mistake] = [
        ("none", lambda g: g.allreduce([], plain()), "requires non-empty tensor list"),
        ("types", lambda g: g.allreduce([FLOAT, DOUBLE], plain()), "invalid tensor type"),
        ("sizes", lambda g: g.allreduce([FLOAT, PAIR], plain()), "invalid tensor size"),
        ("layouts", lambda g: g.allreduce([FLOAT, SPARSE], plain()), "invalid tensor layout"),
        (
            "sizes of sparse tensors",
            lambda g: g.allreduce([SPARSE, LONG_SPARSE], plain()),
            "invalid tensor size",
        ),
        (
            "coalesced: none",
            lambda g: g.allreduce_coalesced([], coalesced()),
            "requires non-empty tensor list",
        ),
        (
            "coalesced: types",
            lambda g: g.allreduce_coalesced([FLOAT, DOUBLE], coalesced()),
            "tensors must all have the same type",
        ),
        (
            "coalesced: layouts",
            lambda g: g.allreduce_coalesced([FLOAT, WHOLE_SPARSE], coalesced()),
            "invalid tensor layout at index",
        ),
        (
            "coalesced: sparse",
            lambda g: g.allreduce_coalesced([SPARSE, SPARSE.clone()], coalesced()),
            "unsupported layout",
        ),
    ]
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        mistakes.append(
            (
                f"{op} of a sparse tensor",
                lambda g, o=op: g.allreduce([SPARSE.clone()], reducing(o)),
                "unsupported reduction operation",
            )
        )
    return mistakes


def gathers(size: int) -> list[Mistake]:
    options = c10d.AllgatherOptions
    many = [FLOAT] * size
    mistakes: list[Mistake] = [
        ("nothing", lambda g: g.allgather([], [], options()), "requires non-empty input tensor"),
        ("types", lambda g: g.allgather([[DOUBLE] * size], [FLOAT], options()), "tensor type"),
        ("sizes", lambda g: g.allgather([[PAIR] * size], [FLOAT], options()), "tensor size"),
    ]
    for lists in ([], [many, many]):
        mistakes.append(
            (
                f"{len(lists)} lists for one input",
                lambda g, w=lists: g.allgather(w, [FLOAT], options()),
                "requires input/output tensor lists to have the same length",
            )
        )
    for length in (size - 1, size + 1):
        mistakes.append(
            (
                f"{length} outputs",
                lambda g, n=length: g.allgather([[FLOAT] * n], [FLOAT], options()),
                "invalid output tensor list",
            )
        )
    for other, words in ((DOUBLE, "invalid tensor type"), (PAIR, "invalid tensor size")):
        mistakes.append(
            (
                "inputs that differ",
                lambda g, o=other: g.allgather([many * 2, many * 2], [FLOAT, o], options()),
                words,
            )
        )
    return mistakes


def coalesced_gathers(size: int) -> list[Mistake]:
    def gather(first: list[torch.Tensor], count: int) -> Callable[[Any], Any]:
        lists = [first] + [[torch.zeros(1)] for _ in range(count - 1)]
        return lambda group: dist.all_gather_coalesced(lists, [FLOAT], group)

    return [
        ("size", gather([torch.zeros(0)], size), "invalid size of output tensor at index 0"),
        ("type", gather([DOUBLE.clone()], size), "invalid tensor type at index 0"),
        ("lists", gather([FLOAT.clone()], size + 1), "output lists should be equal to world size"),
    ]


def raised(call: Callable[[Any], Any], group: Any) -> Exception | None:
    try:
        call(group)
    except Exception as error:
        return error
    return None


def compare(rank: int) -> list[str]:
    size, cpu = world_size(), torch.device("cpu")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    wrong: list[str] = []
    for through_backend, (what, call, words) in itertools.chain(
        ((True, m) for m in rooted(rank, size) + all_reduces() + gathers(size)),
        ((False, m) for m in coalesced_gathers(size)),
    ):
        errors = [
            raised(call, group._get_backend(cpu) if through_backend else group)
            for group in (ours, gloo)
        ]
        mine, theirs = errors
        case = f"{what}: {mine!r}, with gloo {theirs!r}"
        if theirs is None or not re.search(words, str(theirs)):
            wrong.append(f"the test itself is wrong: {case}")
        elif not isinstance(mine, type(theirs)) or not isinstance(mine, ValueError):
            wrong.append(f"another type: {case}")
        elif not re.search(words, str(mine)):
            wrong.append(f"other words than {words}: {case}")
        elif "\n" in str(mine):
            wrong.append(f"more than one line: {case}")
    for group in (ours, gloo):
        total = torch.ones(2)
        dist.all_reduce(total, group=group)
        if total.tolist() != [size, size]:
            wrong.append(f"afterwards a sum is {total.tolist()}")
    return wrong


@pytest.mark.skipif(on_gloo(), reason="compares with gloo")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_mistakes_raise_what_gloo_raises() -> None:
    for rank, wrong in enumerate(run_ranks(compare)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


def through_dist(rank: int) -> list[tuple[str, bool]]:
    """Calls torch.distributed's own functions and torch's functional collectives."""
    import torch.distributed._functional_collectives as funcol

    size = world_size()
    errors = [
        raised(call, None)
        for call in (
            lambda _: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND),
            lambda _: dist.broadcast(torch.ones(2), size, group=None),
            lambda _: dist.send(torch.ones(2), (rank + 1) % size, tag=-1),
            lambda _: funcol.all_reduce(torch.ones(2), "band", dist.group.WORLD).clone(),
        )
    ]
    dist.barrier()
    return [(repr(e), isinstance(e, ValueError) and isinstance(e, RuntimeError)) for e in errors]


@pytest.mark.skipif(on_gloo(), reason="gloo raises RuntimeError only")
def test_mistakes_are_both_kinds_of_error() -> None:
    assert backend_name() == "resilient"
    for found in run_ranks(through_dist):
        for text, both in found:
            assert both or text.startswith("ValueError"), text
        assert sum(both for _, both in found) >= 3, found
