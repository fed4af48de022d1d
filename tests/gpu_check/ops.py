"""Every operation, type and layout, and several sizes, against the same on host tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from .checks import Check, Rank
from .operations import (
    FORMS,
    REDUCTIONS,
    TYPES,
    Operation,
    RefusedOnHost,
    fault_of,
    same,
    type_name,
    values,
)

# Empty, small, odd, and over several chunks of a message.
_ELEMENTS = (0, 1, 3, (1 << 20) + 7)
_LARGE_ELEMENTS = 1 << 24


def run(rank: Rank) -> None:
    """Runs the section."""
    reductions(rank, REDUCTIONS, TYPES)
    for name, operation in FORMS.items():
        if operation not in REDUCTIONS.values():
            with rank.check(f"{name}, {len(TYPES)} types") as check:
                _compare(check, rank, operation, TYPES)
    strided = [torch.float32, torch.bfloat16, torch.complex64]
    for name, operation in FORMS.items():
        with rank.check(f"{name}, not contiguous") as check:
            _compare(check, rank, operation, strided, strided=True)
    sizes = _ELEMENTS if rank.device.kind == "strict" else (*_ELEMENTS, _LARGE_ELEMENTS)
    for elements in sizes:
        with rank.check(f"all_reduce of {elements} elements") as check:
            host = values((elements,), torch.float32, rank.number)
            there = host.to(rank.device.torch_device)
            dist.all_reduce(host)
            dist.all_reduce(there)
            check.require(same(there, host), "the result differs from that of host tensors")
    with rank.check("all_gather_object") as check:
        found: list[object] = [None, None]
        dist.all_gather_object(found, {"rank": rank.number})
        check.require(found == [{"rank": 0}, {"rank": 1}], f"got {found}")
    with rank.check("barrier with device_ids") as check:
        check.skip_if(rank.device.lacks("streams"))
        dist.barrier(device_ids=[rank.device.index])


def reductions(rank: Rank, names: Iterable[str], types: Sequence[torch.dtype]) -> None:
    """An all-reduce with each of these reductions and types."""
    for name in names:
        with rank.check(f"all_reduce {name}, {len(types)} types") as check:
            _compare(check, rank, REDUCTIONS[name], types)


def _compare(
    check: Check,
    rank: Rank,
    operation: Operation,
    types: Sequence[torch.dtype],
    strided: bool = False,
) -> None:
    refused = []
    for dtype in types:
        try:
            fault = fault_of(rank, operation, dtype, strided=strided)
        except RefusedOnHost:
            refused.append(type_name(dtype))
        else:
            check.require(not fault, f"{type_name(dtype)}: {fault}")
    if refused:
        check.remark = f"host tensors of {', '.join(refused)} are refused, too"
