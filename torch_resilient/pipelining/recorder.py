"""Records spans of a stage's operations and of its waits, measured as they run."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

# How many operations may be queued on a device before the host decides about the next one: with
# one running and one waiting the device never starves, and what arrives meanwhile still counts.
_RUN_AHEAD = 2
# A median over this number of operations forgets a change of speed within an iteration or two.
_REMEMBERED = 64

WAIT = "wait"


class MeasuredSpan(NamedTuple):
    """An operation or a wait of this rank.

    Attributes:
        kind: "F", "B", "W", or "wait".
        microbatch: of the operation; of a wait -1.
        start_s, end_s: seconds by time.monotonic(); of an operation on a device, when the device
            began and ended it.
    """

    kind: str
    microbatch: int
    start_s: float
    end_s: float


class MeasuredWait:
    """Filled in when the wait is over."""

    duration_s = 0.0


class Recorder:
    """Measures one stage's operations, iteration by iteration.

    On a device, operations are measured by events, and the host waits before it runs more than two
    operations ahead: what runs next must be decided when it is about to run.

    Thread: the one that runs the schedule.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type != "cpu" else None
        self._spans: list[MeasuredSpan] = []
        self._queued: deque[tuple[str, int, torch.Event, torch.Event]] = deque()
        self._origin: torch.Event | None = None
        self._origin_s = 0.0
        self._durations = {kind: deque[float](maxlen=_REMEMBERED) for kind in "FBW"}
        # (kind, microbatch, when): the message that this F or B needed was there.
        self.arrivals: list[tuple[str, int, float]] = []
        self._typical = True
        self.step = -1
        self.start_s = 0.0

    def begin(self, step: int, typical: bool = True) -> None:
        """A new iteration; what was recorded before is dropped.

        `typical`: whether its operations count for typical_s().
        """
        self._typical = typical
        self._spans = []
        self._queued.clear()
        self.arrivals = []
        self.step = step
        if self._device is not None:
            # Ties the device's clock, which only measures distances, to the host's.
            torch.accelerator.synchronize(self._device)
            self._origin = torch.Event(self._device, enable_timing=True)
            self._origin.record()
            self._origin_s = time.monotonic()
        self.start_s = time.monotonic()

    @contextmanager
    def operation(self, kind: str, microbatch: int) -> Iterator[None]:
        """Measures the body as an operation."""
        if self._device is None:
            start_s = time.monotonic()
            yield
            self._add(MeasuredSpan(kind, microbatch, start_s, time.monotonic()))
            return
        while len(self._queued) >= _RUN_AHEAD:
            self._resolve()
        start = torch.Event(self._device, enable_timing=True)
        end = torch.Event(self._device, enable_timing=True)
        start.record()
        yield
        end.record()
        self._queued.append((kind, microbatch, start, end))

    @contextmanager
    def wait(self) -> Iterator[MeasuredWait]:
        """Measures the body as a wait of the host; tells how long it was when it is over."""
        measured = MeasuredWait()
        start_s = time.monotonic()
        yield measured
        end_s = time.monotonic()
        measured.duration_s = end_s - start_s
        self._spans.append(MeasuredSpan(WAIT, -1, start_s, end_s))

    def end(self) -> list[MeasuredSpan]:
        """The spans of the iteration, once the device has ended it."""
        while self._queued:
            self._resolve()
        return self._spans

    def typical_s(self, kind: str) -> float:
        """Seconds of an operation of this kind: the median of the last ones; NaN if none ran."""
        durations = self._durations[kind]
        return statistics.median(durations) if durations else math.nan

    def _resolve(self) -> None:
        """Waits for the oldest operation that the device has not been seen to end."""
        kind, microbatch, start, end = self._queued.popleft()
        end.synchronize()
        assert self._origin is not None
        start_s = self._origin_s + self._origin.elapsed_time(start) / 1e3
        end_s = self._origin_s + self._origin.elapsed_time(end) / 1e3
        self._add(MeasuredSpan(kind, microbatch, start_s, end_s))

    def _add(self, span: MeasuredSpan) -> None:
        self._spans.append(span)
        if self._typical:
            self._durations[span.kind].append(span.end_s - span.start_s)
