"""Decides which requests are accepted, from what ranks tell about their idle time. Pure: time is an
argument.

A pipe is the ranks that hold one copy of the model, each a part of its layers. The controller
predicts when a pipe would begin and end a prefill if its idle windows stay those of the last
iteration, and promises the earliest begin. It may be wrong: ranks only run chunks that fit. Without
a controller, the training continues.
"""

# Paper: BUBBLETEA §5.1: plan and signals, the first pipeline with enough bubbles, else rejection.

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_resilient.prefill.model import ModelShape
from torch_resilient.prefill.signal import IdleSignal

# A prefill that needs more iterations is no use to anyone.
_MAX_PERIODS = 1000
# So many signals in a row must say that a promise cannot be kept: one iteration may be odd.
_MAX_DOUBTS = 3
# Entries of the queue that do not count any more, beyond some for each pipe.
_MAX_STALE = 64


class Rejected(Exception):
    """A request ends without a result; the text is the reason."""


class Slot(NamedTuple):
    """When a rank would begin and end its part of a prefill."""

    start_s: float
    end_s: float


class _Run(NamedTuple):
    """Chunks that follow each other: the layers of a rank for some tokens.

    Attributes:
        ready_s: they cannot begin before.
        chunk_s: how long each takes.
        left: how many.
    """

    ready_s: float
    chunk_s: float
    left: int


@dataclass
class _Rank:
    """The idle time of a rank, from its last signal.

    Attributes:
        began_s: when the iteration of the signal began, by the controller's clock.
        free_s: when all reserved prefills end.
        ends_s: of the usable part of each window, from the begin of an iteration.
        longest_s: the longest usable part.
    """

    signal: IdleSignal | None = None
    began_s: float = 0.0
    free_s: float = -math.inf
    ends_s: tuple[float, ...] = ()
    longest_s: float = 0.0

    def take(self, signal: IdleSignal, began_s: float) -> None:
        self.signal, self.began_s = signal, began_s
        self.ends_s = tuple(start + length - signal.guard_s for start, length in signal.windows)
        self.longest_s = max((length for _, length in signal.windows), default=0.0) - signal.guard_s

    def earliest_s(self, from_s: float) -> float:
        """No chunk begins earlier, however short it is; infinite if there are no windows."""
        signal = self.signal
        if signal is None or not signal.windows:
            return math.inf
        from_s = max(from_s, self.free_s)
        period = math.floor((from_s - self.began_s) / signal.period_s)
        base_s = self.began_s + period * signal.period_s
        window = bisect.bisect_right(self.ends_s, from_s - base_s)
        if window < len(self.ends_s):
            return max(base_s + signal.windows[window][0], from_s)
        return max(base_s + signal.period_s + signal.windows[0][0], from_s)

    def slot(self, now_s: float, runs: Sequence[_Run]) -> tuple[Slot, list[float]] | None:
        """Fills the idle windows from `now_s` on; None if that takes too many iterations.

        Runs of which nothing is left come first. The second part of the result is when each ends.
        """
        signal = self.signal
        if signal is None or not signal.windows:
            return None
        now_s = max(now_s, self.free_s)
        ends_s = [now_s for _ in itertools.takewhile(lambda run: not run.left, runs)]
        if len(ends_s) == len(runs):
            return Slot(now_s, now_s), ends_s
        if max(chunk_s for _, chunk_s, left in runs if left) > self.longest_s:
            return None
        # Plain comparisons and tuples: this takes most of the time of a placement.
        ready_s, chunk_s, left = runs[len(ends_s)]
        now_s = max(now_s, ready_s)
        start_s = math.nan
        period = math.floor((now_s - self.began_s) / signal.period_s)
        for number in range(period, period + _MAX_PERIODS):
            base_s = self.began_s + number * signal.period_s
            for offset_s, length_s in signal.windows:
                begin_s = base_s + offset_s
                end_s = begin_s + length_s - signal.guard_s
                if begin_s < now_s:
                    begin_s = now_s
                while True:
                    if begin_s < ready_s:
                        begin_s = ready_s
                    if begin_s + chunk_s > end_s:
                        break
                    if start_s != start_s:  # the first chunk
                        start_s = begin_s
                    fitting = max(int((end_s - begin_s) / chunk_s), 1) if chunk_s > 0 else left
                    if fitting < left:
                        now_s = begin_s + fitting * chunk_s
                        left -= fitting
                        break
                    begin_s = now_s = begin_s + left * chunk_s
                    ends_s.append(now_s)
                    if len(ends_s) == len(runs):
                        return Slot(start_s, now_s), ends_s
                    ready_s, chunk_s, left = runs[len(ends_s)]
        return None


@dataclass(eq=False)
class Reservation:
    """A promise for a request.

    Attributes:
        request: its number.
        tokens: of its prompt.
        pipe: which ranks compute it.
        start_s, end_s: predictions, by the controller's clock.
        latest_start_s, deadline_s: what was asked for.
        chunks_done: by rank of the pipe, how many of its chunks are computed.
        doubts: the last signals, in a row, by which it would begin too late.
    """

    request: int
    tokens: int
    pipe: int
    start_s: float
    end_s: float
    latest_start_s: float
    deadline_s: float
    chunks_done: list[int]
    doubts: int = 0


class Controller:
    """Reservations of the idle time of several pipes.

    A placement looks at the pipes in the order in which they can begin at all, and at no others
    once one is found that begins earlier. Its time is linear in the number of iterations that
    a prefill takes.

    Args:
        shape: of the model.
        depths: the number of ranks of each pipe.
        chunk_tokens: of the workers.

    Raises ValueError for a pipe with more ranks than the model has layers.
    """

    def __init__(self, shape: ModelShape, depths: Sequence[int], chunk_tokens: int = 512) -> None:
        if max(depths, default=0) > shape.layers:
            raise ValueError(f"a pipe of {max(depths)} ranks for {shape.layers} layers")
        self._shape = shape
        self._chunk_tokens = chunk_tokens
        self._ranks = [[_Rank() for _ in range(depth)] for depth in depths]
        self._lost: dict[int, str] = {}
        # The open requests of each pipe, in the order of their starts.
        self._open: list[list[Reservation]] = [[] for _ in depths]
        # (a time before which the pipe cannot begin, the pipe, its number), as a heap. Only the
        # entry with the last number of a pipe counts; a pipe that is lost, or of which nothing is
        # known, has none.
        self._queue: list[tuple[float, int, int]] = []
        self._numbers = [0 for _ in depths]

    def place(
        self,
        request: int,
        tokens: int,
        now_s: float,
        max_wait_s: float,
        deadline_s: float,
        asked_s: float | None = None,
    ) -> Reservation:
        """Reserves the earliest begin.

        Raises Rejected, with the reason, if that would be later than `max_wait_s` after `asked_s`
        (by default now), or the end later than `deadline_s`.
        """
        asked_s = now_s if asked_s is None else asked_s
        best: Reservation | None = None
        best_slots: list[Slot] = []
        seen = []
        # Nothing begins earlier than now.
        while self._queue and (best is None or max(self._queue[0][0], now_s) < best.start_s):
            _, pipe, number = heapq.heappop(self._queue)
            if number != self._numbers[pipe]:
                continue
            bound_s = self._ranks[pipe][0].earliest_s(now_s)
            seen.append((bound_s, pipe))
            if best is not None and bound_s >= best.start_s:
                continue
            nothing = [0] * len(self._ranks[pipe])
            slots = self._slots(pipe, tokens, nothing, now_s)
            if slots and (best is None or slots[0].start_s < best.start_s):
                best_slots = slots
                best = Reservation(
                    request,
                    tokens,
                    pipe,
                    slots[0].start_s,
                    slots[-1].end_s,
                    asked_s + max_wait_s,
                    deadline_s,
                    nothing,
                )
        for bound_s, pipe in seen:
            self._enqueue(pipe, bound_s)
        if best is None:
            if len(self._lost) == len(self._ranks):
                raise Rejected(f"no rank runs prefills: {next(iter(self._lost.values()))}")
            raise Rejected("no idle time is known in which it fits")
        if best.start_s > best.latest_start_s:
            raise Rejected(
                f"it would wait for {1e3 * (best.start_s - asked_s):.0f} ms, at most "
                f"{1e3 * max_wait_s:.0f} are allowed"
            )
        if best.end_s > deadline_s:
            raise Rejected(f"it would end {1e3 * (best.end_s - deadline_s):.0f} ms too late")
        self._reserve(best, best_slots)
        return best

    def signal(self, pipe: int, part: int, signal: IdleSignal, now_s: float) -> list[Reservation]:
        """Takes the signal of a rank, and predicts the open requests of its pipe again.

        Returns those whose promise cannot be kept, since the plan or the network has changed. They
        are no longer open.
        """
        self._ranks[pipe][part].take(signal, now_s - signal.age_s)
        waiting, broken = self._open[pipe], []
        self._open[pipe] = []
        for each in self._ranks[pipe]:
            each.free_s = -math.inf
        for reservation in waiting:
            begun = reservation.start_s <= now_s
            slots = self._slots(pipe, reservation.tokens, reservation.chunks_done, now_s)
            late = not slots or slots[0].start_s > reservation.latest_start_s
            reservation.doubts = reservation.doubts + 1 if late and not begun else 0
            if reservation.doubts >= _MAX_DOUBTS:
                broken.append(reservation)
            else:
                self._reserve(reservation, slots)
        self._enqueue(pipe, self._ranks[pipe][0].earliest_s(now_s))
        return broken

    def chunk_done(self, reservation: Reservation, layer: int) -> None:
        """A layer is computed for the next tokens of a request."""
        parts = self._shape.parts(len(reservation.chunks_done))
        reservation.chunks_done[next(i for i, part in enumerate(parts) if layer in part)] += 1

    def done(self, reservation: Reservation) -> None:
        """A request has ended, well or not."""
        waiting = self._open[reservation.pipe]
        self._open[reservation.pipe] = [each for each in waiting if each is not reservation]
        if not self._open[reservation.pipe]:
            for rank in self._ranks[reservation.pipe]:
                rank.free_s = -math.inf
            self._enqueue(reservation.pipe, -math.inf)

    def lose(self, pipe: int, reason: str) -> list[Reservation]:
        """A pipe takes no requests any more; returns those that were open."""
        self._lost[pipe] = reason
        self._enqueue(pipe, math.inf)
        waiting, self._open[pipe] = self._open[pipe], []
        return waiting

    def is_lost(self, pipe: int) -> bool:
        """Whether lose() was called for it."""
        return pipe in self._lost

    def _enqueue(self, pipe: int, bound_s: float) -> None:
        """The pipe cannot begin before `bound_s`, now or at any later time."""
        self._numbers[pipe] += 1
        if bound_s < math.inf and pipe not in self._lost:
            heapq.heappush(self._queue, (bound_s, pipe, self._numbers[pipe]))
        if len(self._queue) > 4 * len(self._ranks) + _MAX_STALE:
            self._queue = [each for each in self._queue if each[2] == self._numbers[each[1]]]
            heapq.heapify(self._queue)

    def _slots(self, pipe: int, tokens: int, done: Sequence[int], now_s: float) -> list[Slot]:
        """The slots on the ranks of a pipe; empty if it does not fit.

        `done`: by rank, how many chunks are computed. A rank begins with some tokens when the one
        before has computed its layers for them.
        """
        slots: list[Slot] = []
        ranks = self._ranks[pipe]
        starts = range(0, tokens, self._chunk_tokens)
        ready_s = [now_s for _ in starts]
        for rank, part, chunks_done in zip(ranks, self._shape.parts(len(ranks)), done, strict=True):
            if rank.signal is None:
                return []
            base_s, flop_s = rank.signal.costs
            runs = []
            for start, begin_s in zip(starts, ready_s, strict=True):
                flops = self._shape.layer_flops(start, min(self._chunk_tokens, tokens - start))
                over = min(chunks_done, len(part))
                chunks_done -= over
                runs.append(_Run(begin_s, base_s + flop_s * flops, len(part) - over))
            found = rank.slot(now_s, runs)
            if found is None:
                return []
            slots.append(found[0])
            ready_s = found[1]
        return slots

    def _reserve(self, reservation: Reservation, slots: Sequence[Slot]) -> None:
        for rank, slot in zip(self._ranks[reservation.pipe], slots, strict=False):
            rank.free_s = max(rank.free_s, slot.end_s)
        bisect.insort(self._open[reservation.pipe], reservation, key=lambda each: each.start_s)
