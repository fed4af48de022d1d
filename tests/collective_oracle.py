"""Shared by the tests of collectives: inputs that every rank can compute for all, what must come of
them, and a record of the checks.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import torch
import torch.distributed as dist
from harness import on_gloo

SIZES = [2, 3, 4]  # of the group

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

SUM, AVG, PRODUCT = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT
MIN, MAX = dist.ReduceOp.MIN, dist.ReduceOp.MAX
BAND, BOR, BXOR = dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR


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
    """True for a reduction that gloo lacks; the tests skip it when they run on gloo."""
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
