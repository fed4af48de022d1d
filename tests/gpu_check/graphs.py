"""Captures of graphs: operations beside them go on, and are refused inside."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from .checks import Rank
from .operations import PATIENCE_S

_CAPTURES = 8
# Several polls of the backend's threads come in this time.
_CAPTURE_S = 0.04


def run(rank: Rank) -> None:
    """Runs the section."""
    device = rank.device
    with rank.check("a capture beside an operation") as check:
        check.skip_if(device.lacks("graphs") or device.lacks("relaxed captures"))
        dist.all_reduce(torch.ones(1000, device=device.torch_device))
        device.synchronize()
        for i in range(_CAPTURES):
            valid, good = _captured_beside(rank)
            check.require(valid, f"capture {i} became invalid")
            check.require(good, f"operation {i} is wrong")
    with rank.check("an operation inside a capture is refused") as check:
        check.skip_if(device.lacks("graphs"))
        tensor = torch.full((1000,), rank.number + 1.0, device=device.torch_device)
        device.synchronize()
        text = ""
        with device.stream():
            capture = device.begin_capture()
            try:
                dist.all_reduce(tensor, async_op=True)
            except (RuntimeError, ValueError) as error:
                text = str(error)
            finally:
                device.end_capture(capture)
        check.require("capturing a graph" in text, f"the error is {text or 'missing'}")
    with rank.check("operations after the refusal") as check:
        check.skip_if(device.lacks("graphs"))
        tensor = torch.full((1000,), rank.number + 1.0, device=device.torch_device)
        dist.all_reduce(tensor)
        check.require(bool((tensor.cpu() == 3).all()), "the result is wrong")


def _captured_beside(rank: Rank) -> tuple[bool, bool]:
    """Captures while an operation waits for its stream; whether both are good."""
    device = rank.device
    recorded = torch.ones(1000, device=device.torch_device)
    late = torch.zeros(1 << 16, device=device.torch_device)
    device.synchronize()
    with device.stream():
        device.sleep(_CAPTURE_S / 2)
        late.fill_(rank.number + 1.0)
        work = dist.all_reduce(late, async_op=True)
    with device.stream():
        capture = device.begin_capture()
        deadline_s = time.monotonic() + _CAPTURE_S
        while time.monotonic() < deadline_s:
            device.record(recorded)
            time.sleep(0.002)
        valid = device.end_capture(capture)
    deadline_s = time.monotonic() + PATIENCE_S
    while not work.is_completed() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    work.wait()
    return valid, bool((late.cpu() == 3).all())
