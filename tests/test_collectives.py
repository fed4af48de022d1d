"""Every collective over dtypes, shapes, reductions and world sizes, against a local oracle.

All ranks can compute the input of every rank, so each rank checks its own result. Moves and
integer reductions must match bit for bit; float reductions must be close to the float64 result,
have the same bits on every rank, and the same bits when run again.

Many cases share one run of the ranks; a failure names the case.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_oracle import (
    AVG,
    BAND,
    BOR,
    BXOR,
    COMPLEX,
    FLOAT8,
    FLOATS,
    INTEGERS,
    MAX,
    MIN,
    PRODUCT,
    SIZES,
    SUM,
    UNSIGNED,
    Checks,
    assert_good,
    bits,
    generator,
    gloo_refuses,
    joined,
    reduced,
    small,
)
from harness import on_gloo, run_ranks, world_size

# Empty, scalar, one element, fewer elements than ranks, odd, one above a power of two, and large
# enough to be cut into several pieces whatever the algorithm.
SHAPES = [(0,), (), (1,), (2,), (3, 5), (257,), (70001,)]
SMALL_SHAPES = [(0,), (), (1,), (3, 5)]


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
    # Each rank has a different factor.
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
