"""One rank of geo_training.py: a stage of a pipeline across sites, with several contenders."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lab_job import say
from stragglers import PacedStage, loss_of
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from torch_resilient.pipelining import ScheduleAdaptiveZB, SchedulePlanned

TIMEOUT = datetime.timedelta(seconds=300)
WIDTH = 4096
# Small enough that weights stay near 1, large enough that each iteration changes their bits.
LEARNING_RATE = 1e-3


class Scaled(nn.Module):
    """Little to compute for many bytes between stages."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@dataclass(frozen=True)
class Place:
    """Ranks are numbered stage by stage: those of a stage are one DP group, in one site."""

    rank: int
    stages: int
    pipelines: int

    @property
    def stage(self) -> int:
        return self.rank // self.pipelines

    @property
    def pipeline(self) -> int:
        return self.rank % self.pipelines


class Contender:
    """One schedule on one backend, with its own copy of the model."""

    def __init__(self, settings: dict[str, Any], place: Place, pp: Any, dp: Any) -> None:
        self.name: str = settings["name"]
        self._place, self._dp = place, dp
        torch.manual_seed(place.stage)  # the replicas of a stage begin alike
        self.module = Scaled()
        count = settings["microbatches"]
        values = torch.zeros(settings["rows"], WIDTH, requires_grad=True)
        stage = PacedStage(
            self.module,
            place.stage,
            place.stages,
            torch.device("cpu"),
            input_args=values if place.stage else values.detach(),
            output_args=values,
            group=pp,
        )
        stage.pace_s = settings["forward_s"]
        kind = settings["schedule"]
        if kind == "live":
            self.schedule: Any = ScheduleAdaptiveZB(stage, count, loss_of)
        elif kind == "planned":
            orders = settings["orders"][place.pipeline]
            self.schedule = SchedulePlanned(stage, count, loss_of, orders=orders)
        else:
            self.schedule = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind](
                stage, count, loss_of
            )
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(1000 + place.pipeline)
        shape = settings["rows"] * count, WIDTH
        self._batch = torch.randn(shape, generator=generator)
        self._target = torch.randn(shape, generator=generator)

    def step(self) -> str | None:
        """One iteration; the loss on the last stage, to the last bit."""
        losses: list[Tensor] = []
        if self._place.stage == 0:
            self.schedule.step(self._batch, return_outputs=False)
        elif self._place.stage == self._place.stages - 1:
            self.schedule.step(target=self._target, losses=losses, return_outputs=False)
        else:
            self.schedule.step(return_outputs=False)
        self._average_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(float(loss) for loss in losses).hex() if losses else None

    def _average_gradients(self) -> None:
        """Over the replicas of the stage, which are in one site. Summed here and not by an
        all-reduce, as backends add in different orders."""
        gradient = self.module.weight.grad
        assert gradient is not None
        found = [torch.empty_like(gradient) for _ in range(self._place.pipelines)]
        dist.all_gather(found, gradient, group=self._dp)
        total = found[0]
        for each in found[1:]:
            total += each
        gradient.copy_(total / self._place.pipelines)

    def bits(self) -> str:
        """A hash of the weights."""
        return hashlib.sha256(self.module.weight.detach().numpy().tobytes()).hexdigest()


def _groups(place: Place, backend: str) -> tuple[Any, Any]:
    """The groups of the rank's pipeline and of its stage's replicas; all ranks make all groups."""
    pp = dp = None
    for pipeline in range(place.pipelines):
        ranks = list(range(pipeline, place.stages * place.pipelines, place.pipelines))
        group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
        pp = group if pipeline == place.pipeline else pp
    for stage in range(place.stages):
        ranks = [stage * place.pipelines + each for each in range(place.pipelines)]
        group = dist.new_group(ranks, backend=backend, timeout=TIMEOUT)
        dp = group if stage == place.stage else dp
    return pp, dp


def worker(settings: dict[str, Any]) -> None:
    """Makes all contenders, and runs those that the parent names, a turn each."""
    if settings["realtime"]:  # before any thread exists: they inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    dist.init_process_group("resilient", timeout=TIMEOUT)
    place = Place(dist.get_rank(), settings["stages"], settings["pipelines"])
    groups: dict[str, tuple[Any, Any]] = {}
    contenders: dict[str, Contender] = {}
    for each in settings["contenders"]:
        if each["backend"] not in groups:
            groups[each["backend"]] = _groups(place, each["backend"])
        contenders[each["name"]] = Contender(each, place, *groups[each["backend"]])
    say("ready")
    commands: dict[str, Callable[[dict[str, Any]], None]] = {
        "turn": lambda command: _turn(contenders[command["contender"]], command["iterations"]),
    }
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        commands[command["do"]](command)
    dist.destroy_process_group()


def _turn(contender: Contender, iterations: int) -> None:
    ends, losses = [], []
    for _ in range(iterations):
        losses.append(contender.step())
        ends.append(time.monotonic())  # the hosts share one clock
    say("turn", contender=contender.name, ends=ends, losses=losses, bits=contender.bits())
