"""Other work in the idle time of a pipeline: chunks of known length, on the thread that waits.

A stage that waits for a message has nothing to compute. `Bubbles` runs chunks of other work there:
prefills, an evaluation, rollouts. A chunk only begins if it ends a guard before the message is due.

    schedule.bubbles = Bubbles(memory_bytes=2 << 30)    # torch's own: bubbles.attach(schedule)
    schedule.bubbles.add(work)

Training does not change: chunks run without gradients and without autocast, and torch's random
numbers are restored after them. Work that raises or is much slower than predicted is suspended.
"""

# Paper: BUBBLETEA §5.1: prefill is only issued in bubbles, and ends before the training resumes.

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torch_resilient import _native
from torch_resilient._groups import find_backend
from torch_resilient._reports import events
from torch_resilient.pipelining.measured import FilledSpan
from torch_resilient.pipelining.torch_actions import TorchSchedule, groups_of, waits_by

# The waits at one place of an iteration that predict the next one there. More would keep a plan's
# waits alive after the network has changed.
_REMEMBERED_WAITS = 8
# A single wait says nothing about its variation.
_MIN_WAITS = 2
# The errors that the guard is learnt from; a hiccup of the host is forgotten after this many.
_REMEMBERED_ERRORS = 64
_SIGMAS = 3.0
# A thread that has to be woken may need this long.
MIN_GUARD_S = 1e-3
# A chunk that takes this many times its prediction suspends its work.
_MAX_FACTOR = 10.0
# Predictions below this count as this: on a busy host, a thread may lose its processor for longer
# than ten times a very short prediction.
_MIN_JUDGED_S = 5e-3
# How often a stage that waits without work looks for new work. Shorter costs processor time,
# longer delays requests.
_POLL_S = 2e-3


class Chunk(NamedTuple):
    """A piece of work that runs without a pause.

    Attributes:
        predicted_s: how long it should take.
        run: does it. If it is not called, nothing has happened.
    """

    predicted_s: float
    run: Callable[[], object]


class BubbleWork(ABC):
    """Work in chunks whose time is known. Thread: the one that runs the schedule.

    Attributes:
        name: for events and pictures.
        memory_bytes: that it holds as long as it is added, such as the weights of a model.
    """

    name = "work"
    memory_bytes = 0

    @abstractmethod
    def next_chunk(self, end_s: float) -> Chunk | None:
        """The next chunk, which must end by `end_s` on time.monotonic(); None if there is none.

        Its time counts as part of the chunk. A chunk that would end later is not run, and offered
        again with the next call.
        """

    def stop(self, reason: str) -> None:  # noqa: B027
        """Called once when the work is suspended or the bubbles end: no chunk will be asked for."""


class MemoryBudget:
    """Bytes that works share.

    Attributes:
        total_bytes, used_bytes: of all works.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    def take(self, count: int) -> bool:
        """Whether `count` bytes fit; then they are taken."""
        if count > self.total_bytes - self.used_bytes:
            return False
        self.used_bytes += count
        return True

    def give_back(self, count: int) -> None:
        self.used_bytes -= count


class Errors:
    """How far predictions are off to the harmful side."""

    def __init__(self) -> None:
        self._squares = deque[float](maxlen=_REMEMBERED_ERRORS)

    def add(self, error_s: float) -> None:
        """An error; harmless ones are negative."""
        self._squares.append(max(error_s, 0.0) ** 2)

    def forget_largest(self) -> None:
        """Drops the largest error, if there is one."""
        if self._squares:
            self._squares.remove(max(self._squares))

    @property
    def sigma_s(self) -> float:
        """The standard deviation, as if errors to both sides were alike."""
        return math.sqrt(2 * statistics.fmean(self._squares)) if self._squares else 0.0


class DueTimes:
    """Predicts waits from those at the same place of earlier iterations. Pure.

    Attributes:
        errors: of the predictions; a message that comes early is the harmful one.
    """

    def __init__(self) -> None:
        self._waits: dict[Hashable, deque[float]] = {}
        self.errors = Errors()

    def predicted_s(self, place: Hashable) -> float | None:
        """The length of the wait at `place`; None if too little is known.

        The last wait counts if it is shorter than usual, since a bubble may vanish at once.
        """
        waits = self._waits.get(place)
        if waits is None or len(waits) < _MIN_WAITS:
            return None
        return min(statistics.median_low(waits), waits[-1])

    def observe(self, place: Hashable, waited_s: float) -> None:
        """A wait has ended."""
        predicted_s = self.predicted_s(place)
        if predicted_s is not None:
            self.errors.add(predicted_s - waited_s)
        waits = self._waits.setdefault(place, deque(maxlen=_REMEMBERED_WAITS))
        waits.append(waited_s)

    def forget(self) -> None:
        """Drops all waits, but not the size of errors."""
        self._waits.clear()


@dataclass(slots=True)
class BubbleStats:
    """Counts since the beginning.

    Attributes:
        waits: how often the stage waited.
        idle_s: for how long in all, filled or not.
        filled_s: of this, the part in which chunks ran.
        chunks: how many.
        late: how often a message came before the end of a chunk.
        late_s: how long these messages lay there, in all: what training lost.
        guard_s: the guard now.
    """

    waits: int = 0
    idle_s: float = 0.0
    filled_s: float = 0.0
    chunks: int = 0
    late: int = 0
    late_s: float = 0.0
    guard_s: float = MIN_GUARD_S


class IdleWindows(NamedTuple):
    """The waits of the last iteration, as a signal for whoever plans work.

    Attributes:
        start_s: when it began, by time.monotonic().
        period_s: from its begin to that of the next iteration.
        windows: (seconds from the begin, length) of each wait.
    """

    start_s: float
    period_s: float
    windows: tuple[tuple[float, float], ...]


class Bubbles:
    """Runs works in the waits of one rank. Thread: the one that runs the schedule.

    Works that were added first go first.

    Args:
        memory_bytes: that all works together may hold.
        device: where chunks run. On an accelerator they use a stream of their own, one chunk at a
            time, after what the training has queued.

    Attributes:
        memory: the budget; works may take transient memory from it.
        suspended: names of suspended works, with the reason.
        last_iteration: its waits; None before the second iteration.
    """

    def __init__(self, memory_bytes: int, device: torch.device | str = "cpu") -> None:
        device = torch.device(device)
        self.memory = MemoryBudget(memory_bytes)
        self.suspended: dict[str, str] = {}
        self.last_iteration: IdleWindows | None = None
        self._device = device if device.type != "cpu" else None
        self._stream = torch.Stream(device, priority=0) if self._device else None  # the lowest
        self._works: tuple[BubbleWork, ...] = ()
        self._due = DueTimes()
        self._chunk_errors = Errors()
        self._stats = BubbleStats()
        self._spans: list[FilledSpan] = []
        self._began_s = math.nan
        self._windows: list[tuple[float, float]] = []
        # In this iteration: whether a chunk has run, and whether the guard alone kept one back.
        self._ran = self._kept_back = False

    def attach(self, schedule: TorchSchedule) -> None:
        """Fills the waits for messages of one of torch's own schedules, such as Schedule1F1B.

        Its `step()` is wrapped. Raises ValueError for a schedule of this package, whose `bubbles`
        is to be set instead, and if another backend carries the messages of `schedule`;
        RuntimeError if this version of torch waits in another place.
        """
        if hasattr(schedule, "bubbles"):
            raise ValueError(
                f"a {type(schedule).__name__} has an attribute `bubbles`: set that instead"
            )
        for group in groups_of(schedule):
            find_backend(group)
        step = schedule.step

        @functools.wraps(step)
        def filled(*args: Any, **kwargs: Any) -> Any:
            self.begin_iteration()
            waits = itertools.count()

            def wait(works: Sequence[dist.Work]) -> None:
                for work in works:
                    # Steps without a backward have other waits.
                    self.wait([work], (torch.is_grad_enabled(), next(waits)))
                    work.wait()

            with waits_by(wait):
                return step(*args, **kwargs)

        schedule.step = filled  # type: ignore[method-assign]

    def add(self, work: BubbleWork) -> None:
        """Raises ValueError if its memory does not fit."""
        if not self.memory.take(work.memory_bytes):
            raise ValueError(
                f"{work.name} needs {work.memory_bytes} bytes, and {self.memory.used_bytes} of the "
                f"{self.memory.total_bytes} for work in bubbles are in use"
            )
        self._works = (*self._works, work)

    def remove(self, work: BubbleWork, reason: str = "removed") -> None:
        """Ends a work; does nothing if it has ended."""
        if work in self._works:
            self._works = tuple(each for each in self._works if each is not work)
            self.memory.give_back(work.memory_bytes)
            work.stop(reason)

    def close(self, reason: str = "the training has ended") -> None:
        """Ends all works."""
        for work in self._works:
            self.remove(work, reason)

    @property
    def guard_s(self) -> float:
        """The minimum time from the predicted end of a chunk to the predicted message."""
        sigma_s = math.hypot(self._due.errors.sigma_s, self._chunk_errors.sigma_s)
        return max(_SIGMAS * sigma_s, MIN_GUARD_S)

    def stats(self) -> BubbleStats:
        """A snapshot."""
        return replace(self._stats, guard_s=self.guard_s)

    def begin_iteration(self) -> None:
        """The schedule begins an iteration."""
        # Otherwise a hiccup that makes the guard longer than every wait would last for ever, since
        # only chunks add to their errors.
        if self._kept_back and not self._ran:
            self._chunk_errors.forget_largest()
        self._ran = self._kept_back = False
        now_s = time.monotonic()
        if not math.isnan(self._began_s):
            period_s = now_s - self._began_s
            self.last_iteration = IdleWindows(self._began_s, period_s, tuple(self._windows))
        self._began_s = now_s
        self._windows.clear()

    def forget(self) -> None:
        """Another plan: the waits so far predict nothing."""
        self._due.forget()

    def take_spans(self) -> list[FilledSpan]:
        """The chunks since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def wait(self, works: Sequence[dist.Work], place: Hashable) -> None:
        """Blocks until one of `works` has ended, and runs chunks meanwhile.

        `place` names the wait: those of earlier iterations at the same place predict its length.
        Programs may use this for waits of their own between steps, such as for an all-reduce. The
        works must be those of the "resilient" backend.
        """
        native = _native.load()
        if self._works and self._device is not None:
            # Only after what is queued does the device idle.
            torch.accelerator.current_stream(self._device).synchronize()
        begin_s = time.monotonic()
        filled_s = self._stats.filled_s
        predicted_s = self._due.predicted_s(place)
        if self._works and predicted_s is not None:
            self._fill(works, begin_s + predicted_s)
        ended = native.wait_any(works)
        came_s = max(native.ended_at(works[ended]) or time.monotonic(), begin_s)
        self._due.observe(place, came_s - begin_s)
        self._windows.append((begin_s - self._began_s, came_s - begin_s))
        stats = self._stats
        stats.waits += 1
        stats.idle_s += came_s - begin_s
        late_s = self._spans[-1].end_s - came_s if stats.filled_s > filled_s else 0.0
        if late_s > 0:
            stats.late += 1
            stats.late_s += late_s
            stats.filled_s -= late_s

    def _fill(self, works: Sequence[dist.Work], due_s: float) -> None:
        """Runs chunks that end a guard before `due_s`, until one of `works` has ended."""
        native = _native.load()
        end_s = due_s - self.guard_s
        latest_s = due_s - MIN_GUARD_S
        with _isolated(self._device):
            if end_s <= time.monotonic() < latest_s:
                self._run_chunk(end_s, latest_s)  # runs none, but learns whether one is kept back
            while native.wait_any(works, 0.0) is None and time.monotonic() < end_s:
                if not self._run_chunk(end_s, latest_s):
                    native.wait_any(works, min(_POLL_S, max(end_s - time.monotonic(), 0.0)))

    def _run_chunk(self, end_s: float, latest_s: float) -> bool:
        """Runs a chunk of the first work that has one which ends by `end_s`.

        With the least guard, it might end by `latest_s`.
        """
        for work in self._works:
            start_s = time.monotonic()
            predicted_s = 0.0
            try:
                chunk = work.next_chunk(end_s)
                if chunk is not None and start_s + chunk.predicted_s <= end_s:
                    predicted_s = chunk.predicted_s
                    self._ran = True
                    self.run_on_device(chunk.run)
                elif chunk is not None:
                    self._kept_back |= start_s + chunk.predicted_s <= latest_s
                    chunk = None
            except Exception as error:
                self._suspend(work, f"{type(error).__name__}: {error}")
                continue
            took_s = time.monotonic() - start_s
            if chunk is not None:
                self._chunk_errors.add(took_s - predicted_s)
                self._stats.chunks += 1
                self._stats.filled_s += took_s
                self._spans.append(FilledSpan(work.name, start_s, start_s + took_s))
            if took_s > _MAX_FACTOR * max(predicted_s, _MIN_JUDGED_S):
                self._suspend(
                    work,
                    f"a chunk took {took_s * 1e3:.1f} ms instead of {predicted_s * 1e3:.1f} ms",
                )
            if chunk is not None:
                return True
        return False

    def run_on_device(self, run: Callable[[], object]) -> None:
        """Runs `run` as a chunk runs, and waits for the device.

        Works may call it before the training begins, to warm up what a stream has of its own.
        """
        try:
            with torch.no_grad(), self._stream or contextlib.nullcontext():
                run()
        finally:
            # Also behind an error: memory of what has failed goes to others.
            if self._stream is not None:
                self._stream.record_event().synchronize()

    def _suspend(self, work: BubbleWork, reason: str) -> None:
        """Training goes on without this work."""
        self.suspended[work.name] = reason
        events.record(
            "bubble_work_suspended",
            f"work in bubbles: {work.name} is suspended: {reason}",
            work=work.name,
            reason=reason,
        )
        try:
            self.remove(work, f"suspended: {reason}")
        except Exception as error:
            events.record(
                "bubble_work_suspended",
                f"work in bubbles: {work.name} failed when it was stopped: {type(error).__name__}",
                work=work.name,
            )


@contextlib.contextmanager
def _isolated(device: torch.device | None) -> Iterator[None]:
    """Work here changes nothing of the training's state in torch."""
    kind = "cpu" if device is None else device.type
    devices = [] if device is None else [device]
    with (
        torch.random.fork_rng(devices, device_type="cuda" if device is None else kind),
        torch.autocast("cpu", enabled=False),
        torch.autocast(kind, enabled=False),
    ):
        yield
