"""The order of streams: late inputs, ways of waiting, freed memory, many streams."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .checks import Rank
from .operations import FORMS, WAYS, fault_of

_MESSAGES = 30
_OPERATIONS = 64
_STREAMS = 4
# torch's pool has 32 streams of a priority.
_POOL = 32
# An operation that waits for this kernel takes far longer than one that does not. On a busy
# machine, where each may take long, it does so beside one of the longer kernels only.
_BUSY_S = (0.4, 1.6, 6.4)


def run(rank: Rank) -> None:
    """Runs the section."""
    for way in WAYS:
        for name, operation in FORMS.items():
            with rank.check(f"{name}, late kernels, {way}") as check:
                for strided in (False, True):
                    fault = fault_of(
                        rank, operation, torch.float32, way=way, strided=strided, late=True
                    )
                    check.require(not fault, f"{'not contiguous: ' if strided else ''}{fault}")
    for name, operation in FORMS.items():
        with rank.check(f"{name}, late kernels, large tensors") as check:
            fault = fault_of(rank, operation, torch.float32, late=True, large=True)
            check.require(not fault, fault)
    _freed_memory(rank)
    _many_streams(rank)
    _beside_a_busy_stream(rank)


def _freed_memory(rank: Rank) -> None:
    device = rank.device
    elements = 1 << 20 if device.kind == "cuda" else 1 << 14
    with rank.check("memory that is freed after isend") as check, device.stream():
        wrong = 0
        for i in range(_MESSAGES):
            received = torch.zeros(elements, device=device.torch_device)
            receive = dist.irecv(received, rank.peer)
            assert receive is not None
            sent = torch.full((elements,), float(i + rank.number), device=device.torch_device)
            device.sleep(0.0005)
            send = dist.isend(sent, rank.peer)
            del sent
            if i % 2:
                del send
            # The allocator gives out the same memory, if it is free.
            other = torch.full((elements,), -1.0, device=device.torch_device)
            receive.wait()
            wrong += not bool((received.cpu() == i + rank.peer).all())
            del other
        check.require(wrong == 0, f"{wrong} of {_MESSAGES} messages are wrong")


def _many_streams(rank: Rank) -> None:
    device = rank.device
    with rank.check(f"{_OPERATIONS} operations on {_STREAMS} streams") as check:
        check.skip_if(device.lacks("streams"))
        streams = [device.new_stream() for _ in range(_STREAMS)]
        tensors, works = [], []
        for i in range(_OPERATIONS):
            with device.on(streams[i % _STREAMS]):
                if i % _STREAMS == 0:
                    device.sleep(0.001)
                tensor = torch.full((10_000,), float(i + rank.number), device=device.torch_device)
                tensors.append(tensor)
                works.append(dist.all_reduce(tensor, async_op=True))
        for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
            with device.on(streams[(i + 1) % _STREAMS]):
                work.wait()
                good = bool((tensor.cpu() == 2 * i + 1).all())
            check.require(good, f"operation {i} is wrong")


def _beside_a_busy_stream(rank: Rank) -> None:
    device = rank.device
    with rank.check("operations beside a busy stream do not wait for it") as check:
        check.skip_if(device.lacks("streams"))
        tensor = torch.ones(1000, device=device.torch_device)
        dist.all_reduce(tensor)
        device.synchronize()
        for busy_s in _BUSY_S:
            longest_s = 0.0
            with device.stream():
                device.sleep(busy_s)
            with device.stream():
                for _ in range(_POOL + 8):
                    begin_s = time.monotonic()
                    dist.all_reduce(tensor)
                    tensor[:1].cpu()
                    longest_s = max(longest_s, time.monotonic() - begin_s)
            device.synchronize()
            # All ranks go on or end together, or the next operation would have no partner.
            slow = torch.full((1,), float(longest_s >= busy_s / 2), device=device.torch_device)
            dist.all_reduce(slow, dist.ReduceOp.MAX)
            if not slow.item():
                break
        check.require(
            longest_s < busy_s / 2, f"one took {longest_s:.2f} s beside a kernel of {busy_s} s"
        )
