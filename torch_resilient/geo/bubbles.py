"""Prefills in the idle time of a training: where each request runs, and when.

All cells run the schedule of one `CellPlan`, period after period. `Table` holds the reservations of
their idle windows; `serve` asks it for each request in the order of arrival. A request is placed or
rejected at once.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_resilient.geo.cell import ROUNDING, Cell, CellPlan

# A part of the time since the start. Times that differ by less are one moment.
_EQUAL = 1e-12
# The maximum of open windows that a table remembers. This many take about 100 MB; fewer cost time,
# but only in cells with thousands of operations for each of hundreds of GPUs.
_MAX_OPEN = 1_000_000


class Request(NamedTuple):
    """A prompt."""

    arrival_ms: float
    tokens: int


@dataclass(frozen=True)
class PrefillTimes:
    """The time of a prefill of L tokens: base + per_token L + per_token2 L^2, on one GPU.

    Attributes:
        hop_ms: added to each stage if there are several.
    """

    base_ms: float
    per_token_ms: float
    per_token2_ms: float
    hop_ms: float

    def stage_ms(self, tokens: int, depth: int) -> float:
        """The time of each of `depth` stages."""
        # As a float, which becomes infinity where an integer would be too large to convert.
        count = float(tokens)
        whole_ms = self.base_ms + self.per_token_ms * count + self.per_token2_ms * count * count
        return whole_ms / depth + (self.hop_ms if depth > 1 else 0.0)


class Window(NamedTuple):
    """The time between two training operations of a GPU, in every period and every cell.

    Attributes:
        start_ms, end_ms: from the start of a period. The last window of a GPU ends in the next one.
    """

    pipe: int
    stage: int
    start_ms: float
    end_ms: float


def idle_windows(cell: Cell, plan: CellPlan, period_ms: float, site: str | None) -> list[Window]:
    """The idle windows of the stages at `site`, or of all stages.

    Operations of no length divide windows, too: a prefill must not be in their way.
    """
    windows = []
    for pipe, stage in itertools.product(range(cell.pipelines), range(cell.stages)):
        if site is not None and cell.sites[stage] != site:
            continue
        starts_ms = plan.starts_ms[pipe][stage]
        ends_ms = [
            start_ms + cell.duration_ms(operation[0], stage)
            for operation, start_ms in zip(plan.orders[pipe][stage], starts_ms, strict=True)
        ]
        for start_ms, end_ms in zip(
            ends_ms, (*starts_ms[1:], starts_ms[0] + period_ms), strict=True
        ):
            if end_ms - start_ms > ROUNDING * period_ms:
                late_ms = period_ms if start_ms >= period_ms else 0.0
                windows.append(Window(pipe, stage, start_ms - late_ms, end_ms - late_ms))
    return windows


class Reservation(NamedTuple):
    """A place for a prefill: stage k runs in cell `cells[k]`, from start_ms + k stage_ms."""

    cells: range
    pipe: int
    stage: int
    start_ms: float


class _Last(NamedTuple):
    """The last prefill of a group of cells in a window. Sorted by the time of its last stage."""

    end_ms: float
    first_end_ms: float  # of its first stage
    group: int


class _Found(NamedTuple):
    """A place, better if smaller: the earlier start, then the window that ends earlier."""

    start_ms: float
    end_ms: float
    window: int
    period: int
    position: int  # of the group in the list of the window, or the length of the list


class Table:
    """Reservations of idle windows. `place` must be called in the order of arrival.

    Cells are divided into groups of `depth`. The k-th cell of a group holds the k-th part of the
    model on each of its GPUs. So a prefill runs on the GPUs of one pipeline and stage in the cells
    of one group, and a GPU needs the memory of one part. cells % depth cells run no prefills.

    Two properties make a lookup short, and exact nevertheless:

    - A prefill fits into one window. Its stages follow each other without a pause, and all its GPUs
      have the same idle windows.
    - In a window, a group never has a gap for a later request. Each prefill starts when its request
      arrives, when the window starts, or as soon as some stage of the last prefill permits. Stages
      keep their order, so the last prefill of a group is all that matters to the next one.

    Time: constant in the number of cells, unless all groups of a window are in use; then linear in
    the number of groups. Linear in the number of windows that are open or begin within the wait.
    """

    def __init__(
        self,
        windows: Sequence[Window],
        period_ms: float,
        cells: int,
        depth: int,
        guard_ms: float,
    ) -> None:
        self._windows = sorted(windows, key=lambda each: (each.start_ms, each.end_ms))
        self._starts_ms = [each.start_ms for each in self._windows]
        self._period_ms = period_ms
        self._depth = depth
        self._groups = cells // depth
        self._guard_ms = guard_ms
        self._longest_ms = max((each.end_ms - each.start_ms for each in windows), default=0.0)
        # The windows that are open change only at these moments of a period.
        moments = {0.0}
        for each in windows:
            moments.add(each.start_ms)
            moments.add(math.fmod(each.end_ms, period_ms))
        self._moments_ms = sorted(moments)
        self._by_gpu: dict[tuple[int, int], list[int]] = {}
        for number, each in enumerate(self._windows):
            self._by_gpu.setdefault((each.pipe, each.stage), []).append(number)
        # By interval between moments, the open windows: ends, by size, and (number, period), where
        # the period is 0 for this one and -1 for the one before. Filled as needed.
        self._open: dict[int, tuple[list[float], list[tuple[int, int]]]] = {}
        # By number and period of a window, the groups that have prefills in it.
        self._used: dict[tuple[int, int], list[_Last]] = {}
        self._max_used = 1000
        self._now_ms = -math.inf

    def place(self, arrival_ms: float, stage_ms: float, max_wait_ms: float) -> Reservation | None:
        """Reserves the earliest start of a prefill with stages of this length; None if it would
        have to wait longer than `max_wait_ms`, or fits into no window.

        Among equal starts, it takes the window that ends first, and keeps long windows free.

        Raises ValueError if an earlier call had a later arrival.
        """
        if arrival_ms < self._now_ms:
            raise ValueError(f"arrival_ms: {arrival_ms} comes after {self._now_ms}")
        self._now_ms = arrival_ms
        found = self._find(arrival_ms, stage_ms, max_wait_ms)
        if found is None:
            return None
        key = found.window, found.period
        used = self._used.get(key)
        if used is None:
            if len(self._used) >= self._max_used:
                self._forget(arrival_ms)
            used = self._used[key] = []
        group = len(used) if found.position == len(used) else used.pop(found.position).group
        end_ms = found.start_ms + self._depth * stage_ms
        bisect.insort(used, _Last(end_ms, found.start_ms + stage_ms, group))
        window = self._windows[found.window]
        first = group * self._depth
        cells = range(first, first + self._depth)
        return Reservation(cells, window.pipe, window.stage, found.start_ms)

    def _find(self, arrival_ms: float, stage_ms: float, max_wait_ms: float) -> _Found | None:
        # Paper: BUBBLETEA §5.1: the first pipeline over GPUs whose bubbles are long enough.
        need_ms = self._depth * stage_ms + self._guard_ms
        # A prefill that just fits still does after rounding.
        need_ms -= _EQUAL * (arrival_ms + self._period_ms)
        if need_ms > self._longest_ms or self._groups == 0:
            return None
        period_ms = self._period_ms
        periods = math.floor(arrival_ms / period_ms)
        # Rounding may make it negative.
        phase_ms = max(0.0, arrival_ms - periods * period_ms)
        best: _Found | None = None
        ends_ms, numbers = self._open_at(phase_ms)
        for i in range(bisect.bisect_left(ends_ms, phase_ms + need_ms), len(ends_ms)):
            number, back = numbers[i]
            found = self._fit(number, periods + back, arrival_ms, stage_ms, need_ms)
            if found is not None and (best is None or found < best):
                best = found
                if found.start_ms == arrival_ms:
                    return found
        # Later windows, in the order of their starts, until one starts too late.
        latest_ms = best.start_ms if best is not None else math.inf
        place = bisect.bisect_right(self._starts_ms, phase_ms)
        while True:
            if place == len(self._starts_ms):
                place, periods = 0, periods + 1
            window = self._windows[place]
            start_ms = periods * period_ms + window.start_ms
            if start_ms > latest_ms or start_ms - arrival_ms > max_wait_ms:
                break
            if need_ms <= window.end_ms - window.start_ms:
                found = self._fit(place, periods, arrival_ms, stage_ms, need_ms)
                if found is not None and (best is None or found < best):
                    best, latest_ms = found, found.start_ms
            place += 1
        if best is None or best.start_ms - arrival_ms > max_wait_ms:
            return None
        return best

    def _open_at(self, phase_ms: float) -> tuple[list[float], list[tuple[int, int]]]:
        """The windows that have started and not ended, by their ends."""
        interval = bisect.bisect_right(self._moments_ms, phase_ms) - 1
        known = self._open.get(interval)
        if known is None:
            if len(self._open) * len(self._by_gpu) >= _MAX_OPEN:
                self._open.clear()
            moment_ms = self._moments_ms[interval]
            found = []
            for numbers in self._by_gpu.values():
                # Windows of a GPU do not overlap. The last one may continue into the next period.
                i = bisect.bisect_right(numbers, moment_ms, key=self._starts_ms.__getitem__)
                number, back = (numbers[i - 1], 0) if i else (numbers[-1], -1)
                end_ms = self._windows[number].end_ms + back * self._period_ms
                if end_ms > moment_ms:
                    found.append((end_ms, number, back))
            found.sort()
            ends_ms = [end_ms for end_ms, _, _ in found]
            known = self._open[interval] = ends_ms, [(number, back) for _, number, back in found]
        return known

    def _fit(
        self, number: int, period: int, arrival_ms: float, stage_ms: float, need_ms: float
    ) -> _Found | None:
        """The earliest start in a window; None if the prefill would end too late."""
        window = self._windows[number]
        base_ms = period * self._period_ms
        earliest_ms = max(base_ms + window.start_ms, arrival_ms)
        end_ms = base_ms + window.end_ms
        used = self._used.get((number, period), ())
        start_ms, position = earliest_ms, len(used)
        if position == self._groups:
            start_ms = math.inf
            before_ms = (self._depth - 1) * stage_ms
            for i, last in enumerate(used):
                # Stage k follows that of the last prefill. Both are linear in k, so the first and
                # the last stage decide.
                after_ms = last.end_ms - before_ms
                if after_ms >= start_ms:
                    break
                possible_ms = max(earliest_ms, last.first_end_ms, after_ms)
                if possible_ms < start_ms:
                    start_ms, position = possible_ms, i
                    if possible_ms == earliest_ms:
                        break
        if start_ms + need_ms > end_ms:
            return None
        return _Found(start_ms, end_ms, number, period, position)

    def _forget(self, now_ms: float) -> None:
        """Drops windows that have ended. The limit doubles with what remains, so the cost for each
        reservation is constant in the mean."""
        self._used = {
            (number, period): used
            for (number, period), used in self._used.items()
            if period * self._period_ms + self._windows[number].end_ms > now_ms
        }
        self._max_used = 1000 + 2 * len(self._used)


@dataclass(frozen=True)
class BubbleJob:
    """Requests, and a training whose bubbles they may use.

    Attributes:
        cells: how many cells run the schedule, in step.
        depth: over how many cells a prefill is divided.
        period_ms: from the start of an iteration to the next.
        site: whose GPUs run prefills; None for all.
        guard_ms: the minimum time from the end of a prefill to the next training operation.
        max_wait_ms: from arrival to start.
    """

    cell: Cell
    plan: CellPlan
    cells: int
    depth: int
    period_ms: float
    site: str | None
    requests: tuple[Request, ...]
    prefill: PrefillTimes
    guard_ms: float
    max_wait_ms: float

    @property
    def gpus(self) -> list[tuple[int, int]]:
        """Pipeline and stage of the GPUs of a cell that may run prefills."""
        stages = [s for s, name in enumerate(self.cell.sites) if self.site in (None, name)]
        return list(itertools.product(range(self.cell.pipelines), stages))


@dataclass(frozen=True)
class BubblePlan:
    """A place for each request, or None.

    Attributes:
        utilisation_training, utilisation: the part of the time in which the GPUs of the site
            compute, without and with prefills, 0 to 1. See `_utilisation`.
        lookups_us: of each request, in the order of arrival.
    """

    places: tuple[Reservation | None, ...]
    utilisation_training: float
    utilisation: float
    lookups_us: tuple[float, ...]


def serve(job: BubbleJob) -> BubblePlan:
    """Places or rejects each request, in the order of arrival and without those that come later."""
    windows = idle_windows(job.cell, job.plan, job.period_ms, job.site)
    table = Table(windows, job.period_ms, job.cells, job.depth, job.guard_ms)
    places: list[Reservation | None] = [None] * len(job.requests)
    lookups_us = []
    for number in sorted(range(len(places)), key=lambda i: job.requests[i].arrival_ms):
        arrival_ms, tokens = job.requests[number]
        stage_ms = job.prefill.stage_ms(tokens, job.depth)
        began_ns = time.perf_counter_ns()
        places[number] = table.place(arrival_ms, stage_ms, job.max_wait_ms)
        lookups_us.append((time.perf_counter_ns() - began_ns) / 1e3)
    return BubblePlan(tuple(places), *_utilisation(job, places), tuple(lookups_us))


def _utilisation(job: BubbleJob, places: Sequence[Reservation | None]) -> tuple[float, float]:
    """Without and with prefills, over whole periods.

    They begin with the first arrival, and as many count as end before the last one, but at least
    one. So the end of the requests is not mistaken for idle GPUs.
    """
    busy_ms = math.fsum(
        job.cell.duration_ms(operation[0], stage)
        for pipe, stage in job.gpus
        for operation in job.plan.orders[pipe][stage]
    )
    training = busy_ms / (len(job.gpus) * job.period_ms)
    if not job.requests:
        return training, training
    arrivals_ms = [each.arrival_ms for each in job.requests]
    begin_ms = min(arrivals_ms)
    periods = max(1, math.floor((max(arrivals_ms) - begin_ms) / job.period_ms))
    end_ms = begin_ms + periods * job.period_ms
    # One of its GPUs computes at each moment of a prefill.
    filled_ms = math.fsum(
        max(
            0.0,
            min(end_ms, place.start_ms + job.depth * job.prefill.stage_ms(each.tokens, job.depth))
            - place.start_ms,
        )
        for place, each in zip(places, job.requests, strict=True)
        if place is not None
    )
    room_ms = len(job.gpus) * job.cells * periods * job.period_ms
    return training, training + filled_ms / room_ms
