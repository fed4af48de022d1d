"""One rank of geo_training.py: a stage of a pipeline across sites, with several contenders."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lab_job import say
from stragglers import loss_of, paced_stage
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import torch_resilient
from torch_resilient.pipelining import ScheduleAdaptiveZB, SchedulePlanned
from torch_resilient.pipelining.torch_actions import StageActions

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


class Whole(SchedulePlanned):
    """A fixed order whose backward is not split: W does nothing."""

    def _run(self, actions: StageActions) -> None:
        actions.splits_backward = False
        super()._run(actions)


@dataclass(frozen=True)
class Place:
    """A rank's stage and pipeline, and the groups of its pipeline and of its stage's replicas."""

    stage: int
    stages: int
    pipeline: int
    pipelines: int
    pp: Any
    dp: Any


class Contender:
    """One schedule on one backend, with its own copy of the model."""

    def __init__(self, settings: dict[str, Any], place: Place) -> None:
        self.name: str = settings["name"]
        self._place = place
        torch.manual_seed(place.stage)  # the replicas of a stage begin alike
        self.module = Scaled()
        count = settings["microbatches"]
        stage = paced_stage(
            self.module,
            place.stage,
            place.stages,
            (settings["rows"], WIDTH),
            place.pp,
            settings["forward_s"][place.stage],
        )
        kind = settings["schedule"]
        if kind == "live":
            self.schedule: Any = ScheduleAdaptiveZB(stage, count, loss_of)
        elif kind == "varuna":
            self.schedule = Whole(stage, count, loss_of, orders=settings["orders"])
        else:
            torchs = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}
            self.schedule = torchs[kind](stage, count, loss_of)
        self._optimizer = torch.optim.SGD(self.module.parameters(), lr=LEARNING_RATE)
        generator = torch.Generator().manual_seed(1000 + place.pipeline)
        shape = settings["rows"] * count, WIDTH
        self._batch = torch.randn(shape, generator=generator)
        self._target = torch.randn(shape, generator=generator)
        # Stands for the gradients of a larger stage.
        self._more = torch.zeros(settings["gradient_floats"])

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
        if self._more.numel():
            dist.all_reduce(self._more.fill_(self._place.pipeline), group=self._place.dp)
            assert int(self._more[-1]) == sum(range(self._place.pipelines))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return sum(float(loss) for loss in losses).hex() if losses else None

    def _average_gradients(self) -> None:
        """Over the replicas of the stage. Summed here and not by an all-reduce, as backends add in
        different orders."""
        gradient = self.module.weight.grad
        assert gradient is not None
        found = [torch.empty_like(gradient) for _ in range(self._place.pipelines)]
        dist.all_gather(found, gradient, group=self._place.dp)
        total = found[0]
        for each in found[1:]:
            total += each
        gradient.copy_(total / self._place.pipelines)

    def bits(self) -> str:
        """A hash of the weights."""
        return hashlib.sha256(self.module.weight.detach().numpy().tobytes()).hexdigest()


def _place(layout: list[list[int]], backend: str) -> Place | None:
    """Makes the groups of a layout, the ranks of each pipeline by stage: all ranks make all of
    them. None for a rank that is not in it."""
    rank = dist.get_rank()
    pipelines = [dist.new_group(each, backend=backend, timeout=TIMEOUT) for each in layout]
    stages = [
        dist.new_group(sorted(each), backend=backend, timeout=TIMEOUT)
        for each in zip(*layout, strict=True)
    ]
    for pipeline, ranks in enumerate(layout):
        if rank in ranks:
            stage = ranks.index(rank)
            return Place(
                stage, len(stages), pipeline, len(layout), pipelines[pipeline], stages[stage]
            )
    return None


def worker(settings: dict[str, Any]) -> None:
    """Makes all contenders, and runs those that the parent names, a turn each."""
    if settings["realtime"]:  # before the engine's threads exist: they inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    dist.init_process_group("resilient", timeout=TIMEOUT)
    places: dict[str, Place | None] = {}
    contenders: dict[str, Contender] = {}
    for each in settings["contenders"]:
        key = json.dumps([each["layout"], each["backend"]])
        if key not in places:
            places[key] = _place(each["layout"], each["backend"])
        place = places[key]
        if place is not None:
            contenders[each["name"]] = Contender(each, place)
    say("ready")
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "end":
            break
        _turn(contenders.get(command["contender"]), command["iterations"])
    dist.destroy_process_group()


def _relayed_bytes() -> int:
    """Bytes that this rank has passed on for others."""
    return torch_resilient.stats().relay.bytes


def _turn(contender: Contender | None, iterations: int) -> None:
    """Some iterations; a rank without a stage only says that there are none."""
    if contender is None:
        say("turn", ends=[], bits=[], cpu_s=0.0, relayed_bytes=_relayed_bytes())
        return
    ends, bits = [], []
    cpu_s = time.process_time()
    for _ in range(iterations):
        loss = contender.step()
        ends.append(time.monotonic())  # the hosts share one clock
        bits.append([loss, contender.bits()])
    cpu_s = time.process_time() - cpu_s
    say(
        "turn",
        ends=ends,
        bits=bits,
        cpu_s=cpu_s,
        relayed_bytes=_relayed_bytes(),
    )


if __name__ == "__main__":
    worker(json.loads(sys.argv[2]))
