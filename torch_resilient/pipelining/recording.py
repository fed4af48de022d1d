"""Writes what a running schedule measures to the files that `torch-resilient timeline` reads."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from torch_resilient.pipelining.clocks import ClockUpdates
from torch_resilient.pipelining.measured import FilledSpan
from torch_resilient.pipelining.recorder import MeasuredSpan
from torch_resilient.pipelining.timeline_files import TimelineWriter, clock_offset_s
from torch_resilient.pipelining.torch_actions import AnyStage, control_device, group_of

# The folder for timelines where the schedule is not given one.
VARIABLE = "TORCH_RESILIENT_TIMELINE"

# The number of questions; the one with the shortest way tells the clocks' offset.
_QUESTIONS = 8
# No other code uses this tag on a pipeline's group: torch's stages send with tag 0.
_CLOCK_TAG = 77
# How many schedules this process has recorded as the first stage, by their folder.
_schedules: dict[Path, int] = {}


class Recording:
    """One schedule's file of a run. Made on all ranks of the pipeline at once: it compares clocks.

    Args:
        folder: of the run. If there are several pipelines (replicas), each gets a folder in it,
            named by the global rank of its first stage. So does, as `schedule2` and so on, every
            further schedule of the process of the first stage: two in one file would be none.
        stage: of this rank.

    A file that cannot be written ends the recording with a warning, never the training.
    """

    def __init__(self, folder: str | Path, stage: AnyStage) -> None:
        group = group_of(stage)
        first = dist.get_global_rank(group, stage.stage_index_to_group_rank[0])
        path = Path(folder)
        if group.size() != dist.get_world_size():
            path /= f"pipeline{first:05}"
        number = 0
        if stage.is_first:
            number = _schedules[path.absolute()] = _schedules.get(path.absolute(), 0) + 1
        offset_s, number = _ask_first_stage(stage, group, number)
        if number > 1:
            path /= f"schedule{number}"
        self._clocks = ClockUpdates(stage)
        self._writer: TimelineWriter | None = None
        try:
            self._writer = TimelineWriter(
                path,
                rank=dist.get_rank(),
                stage=stage.stage_index,
                num_stages=stage.num_stages,
                host=socket.gethostname(),
                clock_offset_s=offset_s,
            )
        except OSError as error:
            self._give_up(error)

    def add(
        self,
        step: int,
        epoch: int,
        spans: Sequence[MeasuredSpan],
        arrivals: Sequence[tuple[str, int, float]],
        start_s: float,
        filled: Sequence[FilledSpan] = (),
    ) -> None:
        """Writes an iteration that has just ended."""
        end_s = time.monotonic()
        offset_s = self._clocks.after(step)  # also of a rank that writes no more: others ask it
        if self._writer is not None:
            try:
                self._writer.add(step, epoch, spans, arrivals, start_s, end_s, filled)
                if offset_s is not None:
                    self._writer.clock_offset(offset_s)
            except OSError as error:
                self._give_up(error)

    def event(self, step: int, text: str) -> None:
        """Writes that something happened now."""
        if self._writer is not None:
            try:
                self._writer.event(step, text)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        warnings.warn(f"the timeline is not written any more: {error}", stacklevel=2)


def folder_from_environment() -> str | None:
    """The folder that TORCH_RESILIENT_TIMELINE names, if any."""
    return os.environ.get(VARIABLE) or None


def agreed_folder(folder: str | Path | None, stage: AnyStage) -> str | Path | None:
    """`folder` if every rank of the pipeline has one, else None, with a warning where some have.

    All ranks of the pipeline call it at once: a recording compares clocks, and a rank without one
    would take no part. Costs one all-reduce of a number.
    """
    group = group_of(stage)
    with_one = torch.tensor(float(folder is not None), device=control_device(group, stage.device))
    if group.size() > 1:
        dist.all_reduce(with_one, group=group)
    if 0 < with_one < group.size():
        warnings.warn(
            f"no timeline is written: {int(with_one)} of the {group.size()} ranks of this pipeline "
            f"have a folder for it; set {VARIABLE} (or timeline_dir) on all of them",
            stacklevel=2,
        )
    return folder if with_one == group.size() else None


def _ask_first_stage(stage: AnyStage, group: dist.ProcessGroup, number: int) -> tuple[float, int]:
    """Asks stage 0, over the backend, for its clock minus this rank's clock, and for its `number`.

    The number of any other stage is not used: a rank may have had other pipelines before.
    """
    now = torch.zeros(1, dtype=torch.float64, device=control_device(group, stage.device))
    ranks = stage.stage_index_to_group_rank
    if stage.is_first:
        for other in range(1, stage.num_stages):
            peer = dist.get_global_rank(group, ranks[other])
            for _ in range(_QUESTIONS):
                dist.recv(now, peer, group=group, tag=_CLOCK_TAG)
                now.fill_(time.monotonic())
                dist.send(now, peer, group=group, tag=_CLOCK_TAG)
            now.fill_(number)
            dist.send(now, peer, group=group, tag=_CLOCK_TAG)
        return 0.0, number
    first = dist.get_global_rank(group, ranks[0])
    samples = []
    for _ in range(_QUESTIONS):
        before_s = time.monotonic()
        dist.send(now, first, group=group, tag=_CLOCK_TAG)
        dist.recv(now, first, group=group, tag=_CLOCK_TAG)
        samples.append((before_s, float(now), time.monotonic()))
    dist.recv(now, first, group=group, tag=_CLOCK_TAG)
    return clock_offset_s(samples)[0], int(now)
