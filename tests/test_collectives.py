"""Every collective over dtypes, shapes, reductions and world sizes, against a local oracle.

All ranks can compute the input of every rank, so each rank checks its own result. Moves and
integer reductions must match bit for bit; float reductions must be close to the float64 result,
have the same bits on every rank, and the same bits when run again.

Many cases share one run of the ranks; a failure names the case.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import error_of, make_store, on_gloo, run_outcomes, run_ranks, wait_until, world_size
from torch._prims_common import is_non_overlapping_and_dense_or_false

SIZES = [2, 3, 4]

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]
COMPLEX = [torch.complex64, torch.complex128]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]

# Empty, scalar, one element, fewer elements than ranks, odd, one above a power of two, and large
# enough to be cut into several pieces whatever the algorithm.
SHAPES = [(0,), (), (1,), (2,), (3, 5), (257,), (70001,)]
SMALL_SHAPES = [(0,), (), (1,), (3, 5)]

SUM, AVG, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR


# ---- inputs and oracles -------------------------------------------------------------------------


def generator(*key: object) -> torch.Generator:
    """The same numbers for the same key in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def bits(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Any bit pattern: NaN, infinities and -0.0 included. For operations that only move."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator(*key)).to(torch.bool)
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator(*key))
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def small(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    """Integers 0, 1, 2: their sums and products over four ranks are exact in every dtype."""
    whole = torch.randint(0, 3, shape, generator=generator(*key))
    if dtype.is_complex:
        other = torch.randint(0, 3, shape, generator=generator("i", *key))
        return torch.complex(whole.double(), other.double()).to(dtype)
    return whole.to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def reduced(inputs: list[torch.Tensor], op: Any) -> torch.Tensor:
    """The oracle: integers in int64 (wrapping as the dtype does), floats in float64."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        return reduced([t.to(torch.uint8) for t in inputs], op).to(torch.bool)
    wide = [t.to(torch.complex128 if dtype.is_complex else torch.float64) for t in inputs]
    if not dtype.is_floating_point and not dtype.is_complex:
        wide = [t.to(torch.int64) for t in inputs]
    result = wide[0].clone()
    for other in wide[1:]:
        if op in (SUM, AVG):
            result = result + other
        elif op == PRODUCT:
            result = result * other
        elif op == MIN:
            result = torch.minimum(result, other)
        elif op == MAX:
            result = torch.maximum(result, other)
        elif op == BAND:
            result = result & other
        elif op == BOR:
            result = result | other
        elif op == BXOR:
            result = result ^ other
        else:
            raise AssertionError(op)
    if op == AVG:
        result = result / len(inputs)
    return result.to(dtype)


def gloo_refuses(dtype: torch.dtype, op: Any) -> bool:
    """What gloo cannot reduce, so that these tests can be run on it, too."""
    return on_gloo() and (dtype in (torch.int16, *FLOAT8, *UNSIGNED) or op == AVG)


class Checks:
    """Collects what went wrong, and digests of what must be equal on all ranks."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.digest = hashlib.sha256()
        self.count = 0

    def equal(self, got: torch.Tensor, want: torch.Tensor, case: str) -> None:
        self.count += 1
        if not same_bits(got, want):
            self.wrong.append(f"{case}: got {brief(got)}, want {brief(want)}")

    def close(self, got: torch.Tensor, want: torch.Tensor, case: str) -> None:
        self.count += 1
        if (
            got.shape != want.shape
            or got.dtype != want.dtype
            or not torch.allclose(got.double(), want.double(), **tolerance(got.dtype))
        ):
            self.wrong.append(f"{case}: got {brief(got)}, want about {brief(want)}")

    def on_all_ranks(self, tensor: torch.Tensor) -> None:
        self.digest.update(raw(tensor))

    def report(self) -> tuple[int, list[str], str]:
        return self.count, self.wrong[:20], self.digest.hexdigest()


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # Four roundings of inputs in [-1, 1]; sums of opposite signs need the absolute part.
    roundings = 8 * torch.finfo(dtype).eps
    return {"rtol": roundings, "atol": roundings}


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts[0].dim() else torch.stack(parts)


def brief(tensor: torch.Tensor) -> str:
    values = tensor.detach().reshape(-1)[:8]
    if values.dtype in FLOAT8:
        values = values.float()
    return f"{tensor.dtype}{list(tensor.shape)} {values.tolist()}"


def assert_good(reports: list[tuple[int, list[str], str]], min_checks: int = 1) -> None:
    for rank, (count, wrong, _) in enumerate(reports):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
        assert count >= min_checks, f"rank {rank} made only {count} checks"
    digests = {digest for _, _, digest in reports}
    assert len(digests) == 1, "results that must be equal on all ranks differ"


# ---- reductions ---------------------------------------------------------------------------------


def exact_cases() -> Iterator[tuple[Any, torch.dtype, tuple[int, ...]]]:
    for op, dtype in itertools.product([SUM, PRODUCT, MIN, MAX], INTEGERS + FLOATS + FLOAT8):
        for shape in SHAPES if op == SUM else SMALL_SHAPES:
            yield op, dtype, shape
    for op, dtype in itertools.product([BAND, BOR, BXOR], INTEGERS):
        for shape in SMALL_SHAPES:
            yield op, dtype, shape
    for dtype, shape in itertools.product(COMPLEX, SMALL_SHAPES):
        yield SUM, dtype, shape
    for op, shape in itertools.product([MIN, MAX, BAND, BOR], SMALL_SHAPES):
        yield op, torch.bool, shape
    for dtype in UNSIGNED:
        yield SUM, dtype, (257,)


def exact_reductions(rank: int) -> Any:
    checks, size = Checks(), world_size()
    for op, dtype, shape in exact_cases():
        if gloo_refuses(dtype, op) or (on_gloo() and dtype == torch.bool and op in (BAND, BOR)):
            continue
        case = f"{op} {dtype} {shape}"
        if dtype in INTEGERS + UNSIGNED and op not in (PRODUCT,) and not dtype.is_floating_point:
            inputs = [bits(shape, dtype, "r", r, shape, str(dtype)) for r in range(size)]
            if dtype in UNSIGNED:  # the oracle works in int64
                inputs = [small(shape, dtype, "r", r, shape) for r in range(size)]
        else:
            inputs = [small(shape, dtype, "r", r, shape, str(dtype)) for r in range(size)]
        want = reduced(inputs, op)

        got = inputs[rank].clone()
        dist.all_reduce(got, op)
        checks.equal(got, want, f"all_reduce {case}")
        checks.on_all_ranks(got)

        root = zlib.crc32(case.encode()) % size
        got = inputs[rank].clone()
        dist.reduce(got, root, op)
        if rank == root:
            checks.equal(got, want, f"reduce to {root} {case}")

        if dtype in UNSIGNED:
            continue
        parts = [
            [small(shape, dtype, "s", r, to, shape, str(dtype)) for to in range(size)]
            for r in range(size)
        ]
        mine = reduced([parts[r][rank] for r in range(size)], op)
        got = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter(got, [p.clone() for p in parts[rank]], op)
        checks.equal(got, mine, f"reduce_scatter {case}")

        if not on_gloo():  # takes the concatenated form only
            got = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(got, torch.stack(parts[rank]), op)
            checks.equal(got, mine, f"reduce_scatter_tensor stacked {case}")
        if shape:
            got = torch.empty(shape, dtype=dtype)
            dist.reduce_scatter_tensor(got, torch.cat(parts[rank]), op)
            checks.equal(got, mine, f"reduce_scatter_tensor {case}")
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_reductions_that_are_exact(size: int) -> None:
    assert_good(run_ranks(exact_reductions, world_size=size), 100)


def rounded_reductions(rank: int) -> Any:
    checks, size = Checks(), world_size()
    for dtype, shape in itertools.product([torch.float32, torch.float64, *FLOATS[:2]], SHAPES):
        inputs = [
            (torch.rand(shape, generator=generator("f", r, shape)) * 2 - 1).to(dtype)
            for r in range(size)
        ]
        for op in [SUM, AVG]:
            if gloo_refuses(dtype, op):
                continue
            case = f"all_reduce {op} {dtype} {shape}"
            results = []
            for _ in range(2):
                got = inputs[rank].clone()
                dist.all_reduce(got, op)
                results.append(got)
            checks.close(results[0], reduced(inputs, op), case)
            checks.equal(results[1], results[0], f"{case}, run again")
            checks.on_all_ranks(results[0])
        if on_gloo() and not shape:
            continue
        got, again = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)
        whole = joined([inputs[rank]] * size)
        dist.reduce_scatter_tensor(got, whole)
        dist.reduce_scatter_tensor(again, whole)
        checks.close(got, reduced(inputs, SUM), f"reduce_scatter_tensor {dtype} {shape}")
        checks.equal(again, got, f"reduce_scatter_tensor {dtype} {shape}, run again")
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_reductions_that_round_are_close_and_reproducible(size: int) -> None:
    assert_good(run_ranks(rounded_reductions, world_size=size), 40)


def two_ranks_against_gloo(rank: int) -> Any:
    """With two operands there is one order only (up to swapping): the bits must be gloo's."""
    checks = Checks()
    gloo = dist.new_group(backend="gloo")
    for dtype, shape, op in itertools.product(
        [torch.float32, torch.float64, torch.bfloat16, torch.float16], SHAPES, [SUM, PRODUCT]
    ):
        ours = (torch.rand(shape, generator=generator("g", rank, shape)) * 2 - 1).to(dtype)
        theirs = ours.clone()
        dist.all_reduce(ours, op)
        dist.all_reduce(theirs, op, group=gloo)
        checks.equal(ours, theirs, f"{op} {dtype} {shape}")
    return checks.report()


def test_two_ranks_give_the_bits_of_gloo() -> None:
    assert_good(run_ranks(two_ranks_against_gloo))


def special_values(rank: int) -> Any:
    checks = Checks()
    nan, inf = float("nan"), float("inf")
    mine = torch.tensor([nan, inf, -inf, -0.0, 1.0] if rank == 0 else [1.0, inf, inf, -0.0, nan])
    dist.all_reduce(mine)
    want = torch.tensor([nan, inf, nan, -0.0, nan])
    if not torch.equal(mine.isnan(), want.isnan()) or mine[1] != inf:
        checks.wrong.append(f"sum of special values: {mine.tolist()}")
    if not torch.signbit(mine[3]):
        checks.wrong.append("-0.0 + -0.0 lost its sign")
    checks.count += 1
    return checks.report()


def test_nan_infinity_and_negative_zero() -> None:
    reports = run_ranks(special_values)
    for _, wrong, _ in reports:
        assert not wrong, wrong


def premul_sum(rank: int) -> Any:
    checks, size = Checks(), world_size()
    for dtype, shape in itertools.product([torch.float32, torch.float64], SHAPES):
        inputs = [
            torch.rand(shape, generator=generator("p", r, shape), dtype=torch.float64).to(dtype)
            for r in range(size)
        ]
        got = inputs[rank].clone()
        dist.all_reduce(got, dist._make_nccl_premul_sum(0.25))
        checks.close(got, reduced([t * 0.25 for t in inputs], SUM), f"all_reduce {dtype} {shape}")
        checks.on_all_ranks(got)
        got = torch.empty(shape, dtype=dtype)
        dist.reduce_scatter_tensor(
            got, torch.stack([inputs[rank]] * size), dist._make_nccl_premul_sum(0.25)
        )
        checks.close(got, reduced([t * 0.25 for t in inputs], SUM), f"scatter {dtype} {shape}")
    # A factor of its own for each rank.
    got = torch.ones(5)
    dist.all_reduce(got, dist._make_nccl_premul_sum(float(rank + 1)))
    checks.equal(got, torch.full((5,), float(size * (size + 1) / 2)), "own factors")
    return checks.report()


@pytest.mark.skipif(on_gloo(), reason="gloo refuses PREMUL_SUM")
@pytest.mark.parametrize("size", SIZES)
def test_premul_sum(size: int) -> None:
    assert_good(run_ranks(premul_sum, world_size=size))


# ---- moves --------------------------------------------------------------------------------------


def moves(rank: int, dtypes: list[torch.dtype]) -> Any:
    checks, size = Checks(), world_size()
    for dtype, shape in itertools.product(dtypes, SHAPES):
        case = f"{dtype} {shape}"
        mine = [bits(shape, dtype, "m", r, shape, str(dtype)) for r in range(size)]
        root = zlib.crc32(case.encode()) % size

        got = mine[rank].clone()
        dist.broadcast(got, root)
        checks.equal(got, mine[root], f"broadcast from {root} {case}")

        outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        dist.all_gather(outputs, mine[rank])
        for r in range(size):
            checks.equal(outputs[r], mine[r], f"all_gather of {r} {case}")
            checks.on_all_ranks(outputs[r])

        if not on_gloo():  # takes the concatenated form only
            got = torch.empty((size, *shape), dtype=dtype)
            dist.all_gather_into_tensor(got, mine[rank])
            checks.equal(got, torch.stack(mine), f"all_gather_into_tensor stacked {case}")
        if shape:
            got = torch.empty((size * shape[0], *shape[1:]), dtype=dtype)
            dist.all_gather_into_tensor(got, mine[rank])
            checks.equal(got, torch.cat(mine), f"all_gather_into_tensor {case}")

        if not (on_gloo() and dtype in (torch.bool, *COMPLEX)):  # gloo: invalid scalar type
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
            dist.gather(mine[rank], outputs if rank == root else None, root)
            if rank == root:
                for r in range(size):
                    checks.equal(outputs[r], mine[r], f"gather of {r} at {root} {case}")

            got = torch.empty(shape, dtype=dtype)
            dist.scatter(got, [t.clone() for t in mine] if rank == root else None, root)
            checks.equal(got, mine[rank], f"scatter from {root} {case}")

        def sent(source: int, to: int) -> torch.Tensor:
            return bits(shape, dtype, "a", source, to, shape, str(dtype))  # noqa: B023

        outputs = [torch.empty(shape, dtype=dtype) for _ in range(size)]
        dist.all_to_all(outputs, [sent(rank, to) for to in range(size)])
        for r in range(size):
            checks.equal(outputs[r], sent(r, rank), f"all_to_all from {r} {case}")

        got = torch.empty((size, *shape), dtype=dtype)
        dist.all_to_all_single(got, torch.stack([sent(rank, to) for to in range(size)]))
        checks.equal(
            got, torch.stack([sent(r, rank) for r in range(size)]), f"all_to_all_single {case}"
        )
    return checks.report()


MOVED = [[torch.float32, torch.bool, *COMPLEX], [*INTEGERS, *FLOATS], [*FLOAT8, *UNSIGNED]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtypes", MOVED, ids=["common", "all", "float8_and_unsigned"])
def test_moves_keep_every_bit(size: int, dtypes: list[torch.dtype]) -> None:
    if on_gloo():
        dtypes = [t for t in dtypes if t not in (torch.int16, *FLOAT8, *UNSIGNED)]
        if not dtypes:
            pytest.skip("gloo moves none of these dtypes")
    assert_good(run_ranks(moves, dtypes, world_size=size), 100)


def uneven(rank: int) -> Any:
    checks, size = Checks(), world_size()

    def rows(source: int, to: int, step: int) -> int:
        return (source * 3 + to * 5 + step) % 4  # 0 included

    for step, dtype, tail in itertools.product(
        range(4), [torch.float32, torch.int64, torch.complex64], [(), (3,)]
    ):

        def block(source: int, to: int) -> torch.Tensor:
            return bits((rows(source, to, step), *tail), dtype, "u", source, to, step)  # noqa: B023

        case = f"step {step} {dtype} {tail}"
        input_splits = [rows(rank, to, step) for to in range(size)]
        output_splits = [rows(r, rank, step) for r in range(size)]
        blocks = [block(rank, to) for to in range(size)]
        want = [block(r, rank) for r in range(size)]

        got = torch.empty((sum(output_splits), *tail), dtype=dtype)
        dist.all_to_all_single(got, torch.cat(blocks), output_splits, input_splits)
        checks.equal(got, torch.cat(want), f"all_to_all_single {case}")

        if on_gloo():  # refuses lists of unequal sizes
            continue
        outputs = [torch.empty_like(t) for t in want]
        dist.all_to_all(outputs, blocks)
        for r in range(size):
            checks.equal(outputs[r], want[r], f"all_to_all from {r} {case}")

        gathered = [torch.empty_like(block(r, r)) for r in range(size)]
        dist.all_gather(gathered, block(rank, rank))
        for r in range(size):
            checks.equal(gathered[r], block(r, r), f"all_gather of {r} {case}")
    return checks.report()


@pytest.mark.parametrize("size", SIZES)
def test_uneven_sizes(size: int) -> None:
    assert_good(run_ranks(uneven, world_size=size))


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
    """Nobody leaves a barrier before everybody has entered it: the store is the witness."""
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
    """Calls that cannot work fail at once on the caller's side, and harm nobody."""
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
        # The root of a small broadcast waits for nobody: at the latest its next call fails.
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


# ---- large --------------------------------------------------------------------------------------


def large(rank: int, count: int) -> None:
    tensor = torch.arange(count, dtype=torch.int64).remainder_(251).to(torch.uint8)
    if rank == 1:
        tensor.zero_()
    dist.broadcast(tensor, 0)
    step = 1 << 20
    for start in range(0, count, step):
        stop = min(start + step, count)
        want = torch.arange(start, stop).remainder_(251).to(torch.uint8)
        assert torch.equal(tensor[start:stop], want), f"wrong bytes after {start}"
    dist.all_reduce(tensor)
    want = torch.arange(count - 1000, count).remainder_(251).to(torch.uint8) * 2
    assert torch.equal(tensor[-1000:], want)


def test_tens_of_megabytes() -> None:
    run_ranks(large, (48 << 20) + 17)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_two_gibibytes() -> None:
    """Sizes and offsets beyond 31 bits. Needs about 10 GiB of memory."""
    count = (2 << 30) + (1 << 20) + 17
    run_ranks(large_without_wide_input, count, timeout_s=500, group_timeout_s=400)


def large_without_wide_input(rank: int, count: int) -> None:
    pattern = torch.arange(251 * 4096, dtype=torch.int32).remainder_(251).to(torch.uint8)
    tensor = torch.zeros(count, dtype=torch.uint8)
    if rank == 0:
        for start in range(0, count, len(pattern)):
            piece = tensor[start : start + len(pattern)]
            piece.copy_(pattern[: len(piece)])
    dist.broadcast(tensor, 0)
    for start in range(0, count, len(pattern)):
        piece = tensor[start : start + len(pattern)]
        assert torch.equal(piece, pattern[: len(piece)]), f"wrong bytes after {start}"
    dist.all_reduce(tensor)
    last = (count - 1) // len(pattern) * len(pattern)
    assert torch.equal(tensor[last:], pattern[: count - last] * 2)
