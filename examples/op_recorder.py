"""The activity of each pipeline rank: spans of F, B, I, W and O, and the waits between them.

The letters are torch's: F forward, B the whole backward, I the backward for the inputs, W the
backward for the weights (B = I + W), O the optimizer. `wait` is everything else inside a step:
the rank had nothing to compute, because a message had not come yet or its turn had not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.pipelining import PipelineStage

WAIT = "wait"


class Span(NamedTuple):
    """One occupation of a rank; times in seconds, microbatch -1 where it has no meaning."""

    step: int
    kind: str
    stage: int
    microbatch: int
    start_s: float
    end_s: float


class OpRecorder:
    """Records the spans of one rank.

    Args:
        device: where the operations run; an accelerator is synchronised after every operation,
            since a span must end when the work does, not when it has been queued.
        pace_s: an operation of one unit of work (the forward of all this rank's layers; a whole
            backward is two units) occupies the rank for at least this time. Zero: as fast as it
            goes. With more ranks than cores, pacing gives each rank the steady speed of a device
            of its own; the arithmetic stays the same.

    Thread: the trainer's only.
    """

    def __init__(self, device: torch.device, pace_s: float = 0.0) -> None:
        self.spans: list[Span] = []
        self._device = device
        self._pace_s = pace_s
        self._step = 0
        self._busy_until_s = 0.0
        # The wall clock gives ranks on several hosts one axis (as well as their clocks agree).
        # The monotonic clock counts, because it is never set back.
        self._clock_offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        """Seconds since the epoch, never going back."""
        return time.monotonic() + self._clock_offset_s

    def begin_step(self, step: int) -> None:
        """Assigns the following operations to `step`."""
        self._step = step
        self._busy_until_s = self.now_s()

    @contextmanager
    def span(
        self, kind: str, stage: int = -1, microbatch: int = -1, units: float = 0.0
    ) -> Iterator[None]:
        """Record the body as one operation of `units` units of work."""
        start_s = self.now_s()
        if start_s > self._busy_until_s:
            self.spans.append(Span(self._step, WAIT, -1, -1, self._busy_until_s, start_s))
        yield
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        rest_s = start_s + units * self._pace_s - self.now_s()
        if rest_s > 0:
            time.sleep(rest_s)
        self._busy_until_s = self.now_s()
        self.spans.append(Span(self._step, kind, stage, microbatch, start_s, self._busy_until_s))

    def extend(self) -> None:
        """The last operation lasted until now: counts the loss to the forward it follows."""
        self._busy_until_s = self.now_s()
        self.spans[-1] = self.spans[-1]._replace(end_s=self._busy_until_s)


class RecordedStage(PipelineStage):
    """A stage of torch that reports its operations to a recorder.

    Set `recorder`, and `units` (the share of its rank's layers that this stage holds), before
    the first step.
    """

    recorder: OpRecorder
    units: float

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self.recorder.span("F", self.stage_index, fwd_chunk_id, self.units):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        # On the first stage the gradient of the inputs is not needed: I does nothing there,
        # and W is the whole backward.
        kind, units = ("B", 2.0) if full_backward else ("I", 0.0 if self.is_first else 1.0)
        with self.recorder.span(kind, self.stage_index, bwd_chunk_id, units * self.units):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        units = 2.0 if self.is_first else 1.0
        with self.recorder.span("W", self.stage_index, bwd_chunk_id, units * self.units):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


class IterationTimes(NamedTuple):
    """Seconds per iteration, seconds from its first operation to its last, and busy seconds
    summed over the ranks; one entry per step in each."""

    steps: list[int]
    iteration_s: list[float]
    window_s: list[tuple[float, float]]
    busy_s: list[float]


def iteration_times(ranks: Sequence[Sequence[Span]]) -> IterationTimes:
    """Times of each iteration over all ranks.

    An iteration ends when the last rank has finished its optimizer, and lasts from the end of the
    one before: ranks roll into the next iteration without a barrier, so its first operation may
    be earlier. The first one lasts from its own first operation.
    """
    start_s: dict[int, float] = defaultdict(lambda: float("inf"))
    end_s: dict[int, float] = defaultdict(lambda: float("-inf"))
    busy_s: dict[int, float] = defaultdict(float)
    for spans in ranks:
        for span in spans:
            if span.kind == WAIT:
                continue
            start_s[span.step] = min(start_s[span.step], span.start_s)
            end_s[span.step] = max(end_s[span.step], span.end_s)
            busy_s[span.step] += span.end_s - span.start_s
    steps = sorted(end_s)
    iteration_s = [
        end_s[step] - (end_s[steps[i - 1]] if i else start_s[step]) for i, step in enumerate(steps)
    ]
    return IterationTimes(
        steps,
        iteration_s,
        [(start_s[step], end_s[step]) for step in steps],
        [busy_s[step] for step in steps],
    )


def bubble_fraction(times: IterationTimes, ranks: int, skip: int = 1) -> float:
    """Share of idle time in the time of all ranks, without the first `skip` steps."""
    if len(times.steps) <= skip:
        skip = 0
    return 1.0 - sum(times.busy_s[skip:]) / (ranks * sum(times.iteration_s[skip:]))
