"""Failures: a stream that does not get on, a rank that does not call, an abort."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .checks import Check, Rank
from .operations import PATIENCE_S

_TIMEOUT_S = 2.0
# The news of a failure is late on a busy machine.
_LATE_S = 5.0


def run(rank: Rank) -> None:
    """Runs the section."""
    with rank.check("synchronize() of a pending all_reduce") as check:
        check.skip_if(rank.device.lacks("streams"))
        tensor = torch.full((1 << 16,), rank.number + 1.0, device=rank.device.torch_device)
        if rank.number == 0:
            time.sleep(0.2)
        dist.all_reduce(tensor, async_op=True).synchronize()
        check.require(bool((tensor.clone().cpu() == 3).all()), "it does not order the stream")
    with rank.check("a rank that does not call is named in time") as check:
        group = _group(rank)
        if rank.number == 0:
            tensor = torch.ones(1000, device=rank.device.torch_device)
            text = _error_in_time(check, dist.all_reduce(tensor, group=group, async_op=True))
            check.require("rank 1" in text, f"rank 1 is not named: {text}")
        dist.barrier()
    for name, begin in (("all_reduce", _all_reduce), ("isend", _message)):
        with rank.check(f"a stream that does not get on ends {name} in time") as check:
            check.skip_if(rank.device.lacks("streams"))
            _held(check, rank, begin)
    with rank.check("abort ends operations that wait for a copy") as check:
        check.skip_if(rank.device.lacks("streams"))
        group = _group(rank)
        tensor = torch.ones(1000, device=rank.device.torch_device)
        rank.device.hold(1.0)
        work = dist.isend(tensor, rank.peer, group=group)
        assert work is not None
        group.abort()
        text = _error_in_time(check, work)
        check.require("abort" in text, f"the error is {text}")
        rank.device.release()
    with rank.check("other groups go on") as check:
        tensor = torch.full((1000,), rank.number + 1.0, device=rank.device.torch_device)
        dist.all_reduce(tensor)
        check.require(bool((tensor.cpu() == 3).all()), "the result is wrong")


def _group(rank: Rank) -> Any:
    timeout = timedelta(seconds=_TIMEOUT_S)
    return dist.new_group(timeout=timeout, backend=rank.device.backend())


def _error_in_time(check: Check, work: Any) -> str:
    """Waits for `work`, which must fail before the group's time-out and a little more."""
    begin_s = time.monotonic()
    try:
        work.wait(timedelta(seconds=PATIENCE_S / 2))
    except dist.DistBackendError as error:
        text = str(error)
    else:
        text = "no error"
    took_s = time.monotonic() - begin_s
    check.require(text != "no error", "it did not fail")
    check.require(took_s < _TIMEOUT_S + _LATE_S, f"it failed after {took_s:.1f} s")
    return text


def _all_reduce(rank: Rank, tensor: torch.Tensor, group: Any) -> Any:
    return dist.all_reduce(tensor, group=group, async_op=True)


def _message(rank: Rank, tensor: torch.Tensor, group: Any) -> Any:
    if rank.number == 0:
        return dist.isend(tensor, 1, group=group)
    return dist.irecv(tensor, 0, group=group)


def _held(check: Check, rank: Rank, begin: Callable[[Rank, torch.Tensor, Any], Any]) -> None:
    """Rank 0 has a kernel in front of the operation that takes longer than the time-out."""
    device = rank.device
    group = _group(rank)
    tensor = torch.ones(1000, device=device.torch_device)
    device.synchronize()
    dist.barrier()
    if rank.number == 0:
        device.hold(_TIMEOUT_S + _LATE_S + 1)
    text = _error_in_time(check, begin(rank, tensor, group))
    check.require("has not finished" in text, f"the error does not name the stream: {text}")
    if rank.number == 0:
        device.release()
    dist.barrier()  # release() can take longer than the time-out of the group
    if rank.number == 0:
        dist.send(torch.full((1000,), 7.0, device=device.torch_device), 1, group=group)
    else:
        check.require("rank 0" in text, f"the error does not name rank 0: {text}")
        dist.recv(tensor, 0, group=group)
        # The failed operation keeps its place: the next message is not taken for it.
        check.require(bool((tensor.cpu() == 7).all()), "the next message is wrong")
