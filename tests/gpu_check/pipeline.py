"""Pipelines on the device: the bits of the same model in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient.pipelining import ScheduleAdaptiveZB, offload

from .checks import Rank
from .operations import KERNEL_S, same, values

_MICROBATCHES = 6
_STEPS = 3


class _Part(nn.Module):
    """One stage, whose backward is late."""

    def __init__(self, rank: Rank, index: int) -> None:
        super().__init__()
        self._device = rank.device
        width = _width(rank)
        torch.manual_seed(50 + index)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda _: self._device.sleep(KERNEL_S))
        result: Tensor = torch.tanh(self.second(torch.tanh(self.first(x)))) + x
        return result


def run(rank: Rank) -> None:
    """Runs the section."""
    device = rank.device
    if device.kind != "cuda":
        offload._MIN_BYTES = 1  # the tensors are small there
    shape = (_MICROBATCHES * _rows(rank), _width(rank))
    x = values(shape, torch.float32, 1).to(device.torch_device)
    target = values(shape, torch.float32, 2).to(device.torch_device)
    parts = [_Part(rank, index).to(device.torch_device) for index in range(2)]
    expected_losses = []
    for each_x, each in zip(x.chunk(_MICROBATCHES), target.chunk(_MICROBATCHES), strict=True):
        loss = nn.functional.mse_loss(parts[1](parts[0](each_x)), each)
        loss.backward()
        expected_losses.append(loss.detach())
    expected = [_gradient(p) / _MICROBATCHES for p in parts[rank.number].parameters()]
    for name, options in (
        ("live", {}),
        ("fixed", {"dispatch": "fixed"}),
        ("offload", {"device_microbatches": 1}),
        ("offload, back ahead", {"device_microbatches": 3}),
    ):
        with rank.check(f"ScheduleAdaptiveZB, {name}") as check:
            part = _Part(rank, rank.number).to(device.torch_device)
            stage = PipelineStage(part, rank.number, 2, device.torch_device)
            check.skip_if(device.lacks("pipelines"))
            more: dict[str, Any] = options
            schedule = ScheduleAdaptiveZB(stage, _MICROBATCHES, nn.functional.mse_loss, **more)
            for step in range(_STEPS):
                part.zero_grad()
                losses: list[Tensor] = []
                if rank.number == 0:
                    schedule.step(x)
                else:
                    schedule.step(target=target, losses=losses)
                device.synchronize()
                good = [
                    same(_gradient(p), e) for p, e in zip(part.parameters(), expected, strict=True)
                ]
                check.require(all(good), f"step {step}: gradients differ")
                if rank.number == 1:
                    pairs = zip(losses, expected_losses, strict=True)
                    check.require(all(same(*pair) for pair in pairs), f"step {step}: losses differ")
            if name.startswith("offload") and rank.number == 0:
                moved = schedule.stats().offloaded_bytes
                check.require(moved > 0, "nothing was moved to host memory")


def _width(rank: Rank) -> int:
    return 256 if rank.device.kind == "cuda" else 32


def _rows(rank: Rank) -> int:
    return 64 if rank.device.kind == "cuda" else 8


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
