"""Measurements of the stages of a pipeline, on one clock: operations, messages, causes of idling.

The counterpart of `replay` for iterations that have really run; the causes of idle time have the
same names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from torch_resilient.planning.orders import Operation
from torch_resilient.planning.replay import Message, Span

# Why a stage idled. The first, second, third and last are those of `replay.Bubble`, except for time
# when another operation could have run: that is "order" here.
WARM_UP = "warm_up"
FORWARD = "forward"
BACKWARD = "backward"
ORDER = "order"
OVERHEAD = "overhead"
COOL_DOWN = "cool_down"
CAUSES = {
    WARM_UP: "before the first operation",
    FORWARD: "waits for an activation",
    BACKWARD: "waits for a gradient",
    ORDER: "waits, though another could run",
    OVERHEAD: "nothing awaited: the host",
    COOL_DOWN: "after the last operation",
}

Link = tuple[int, int]

# Twice the rounding of files; smaller values say nothing about the clocks.
_ROUNDING_S = 1e-6


class FilledSpan(NamedTuple):
    """When a chunk of other work, such as a prefill, ran in idle time; see bubbles.py."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Idle:
    """A period during which a stage ran nothing.

    Attributes:
        cause: one of CAUSES.
        start_s, end_s: on the run's clock.
        awaited: the operation that ran next, if it needed a message.
        link: the stages (from, to) between which that message went.
        possible: what could have run meanwhile, where the cause is "order".
    """

    cause: str
    start_s: float
    end_s: float
    awaited: Operation | None = None
    link: Link | None = None
    possible: Operation | None = None

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class StageStep:
    """One iteration of one stage; times in seconds on the run's clock.

    Attributes:
        stage, step: which.
        plan: the epoch of the plan that it ran by.
        start_s, end_s: of the call of the schedule.
        until_s: when the stage's next iteration began; of the last one, when its last stage ended.
        spans: the operations, by start.
        waits: when the host was blocked.
        arrivals: when the message that an F or B needed was there, as far as measured.
        filled: chunks of other work in idle time.
        idle: what remains of the time from `start_s` to `until_s`.
    """

    stage: int
    step: int
    plan: int
    start_s: float
    end_s: float
    until_s: float
    spans: tuple[Span, ...]
    waits: tuple[tuple[float, float], ...]
    arrivals: Mapping[Operation, float]
    filled: tuple[FilledSpan, ...] = ()
    idle: tuple[Idle, ...] = ()


@dataclass(frozen=True)
class Waiting:
    """Idle seconds of a stage until messages came over one direction of a link.

    Attributes:
        waited_s: all of it, also before the stage's first operation.
        transit_s: the part while the message was on its way. This link did not cause the rest: the
            sender had not come so far.
        order_s: the part while another operation could have run.
    """

    waited_s: float = 0.0
    transit_s: float = 0.0
    order_s: float = 0.0

    def __add__(self, other: Waiting) -> Waiting:
        return Waiting(
            self.waited_s + other.waited_s,
            self.transit_s + other.transit_s,
            self.order_s + other.order_s,
        )


@dataclass(frozen=True)
class MeasuredStep:
    """One iteration of the pipeline.

    Attributes:
        step: its number.
        stages: of each stage what it measured; None if it has not written this iteration.
    """

    step: int
    stages: tuple[StageStep | None, ...]

    @cached_property
    def present(self) -> tuple[StageStep, ...]:
        """The stages that have written this iteration; at least one."""
        return tuple(each for each in self.stages if each is not None)

    @property
    def plans(self) -> tuple[int, ...]:
        """The epochs of the plans in use, sorted: one, unless ranks disagree."""
        return tuple(sorted({each.plan for each in self.present}))

    @property
    def start_s(self) -> float:
        return min(each.start_s for each in self.present)

    @property
    def until_s(self) -> float:
        return max(each.until_s for each in self.present)

    @property
    def iteration_s(self) -> float:
        """From its start to the next one's, of the first stage that is there."""
        return self.present[0].until_s - self.present[0].start_s

    @cached_property
    def idle(self) -> dict[str, float]:
        """For each cause, its part of all stages' time, 0 to 1."""
        whole_s = math.fsum(each.until_s - each.start_s for each in self.present)
        found = dict.fromkeys(CAUSES, 0.0)
        for each in self.present:
            for idle in each.idle:
                found[idle.cause] += idle.duration_s
        return {cause: idle_s / whole_s if whole_s else 0.0 for cause, idle_s in found.items()}

    @property
    def bubble(self) -> float:
        """The idle part of all stages' time, 0 to 1."""
        return math.fsum(self.idle.values())

    @cached_property
    def filled(self) -> float:
        """The part of all stages' time in which chunks of other work ran, 0 to 1."""
        whole_s = math.fsum(each.until_s - each.start_s for each in self.present)
        filled_s = math.fsum(
            chunk.end_s - chunk.start_s for each in self.present for chunk in each.filled
        )
        return filled_s / whole_s if whole_s else 0.0

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """The messages with two known ends: they leave when F or B ends."""
        found = []
        for source in self.present:
            for operation, _, end_s in source.spans:
                there = source.stage + {"F": 1, "B": -1, "W": 0}[operation.kind]
                receiver = self.stages[there] if 0 <= there < len(self.stages) else None
                # W sends nothing, and nothing arrives for it.
                arrival_s = receiver.arrivals.get(operation) if receiver else None
                if arrival_s is not None:
                    found.append(Message(operation, source.stage, there, end_s, arrival_s))
        return tuple(found)

    @cached_property
    def waiting(self) -> dict[Link, Waiting]:
        """How long stages waited for messages, by link and direction: (from, to)."""
        sent_s = {
            (each.stage, span.operation): span.end_s for each in self.present for span in each.spans
        }
        found: dict[Link, Waiting] = {}
        for each in self.present:
            for idle in each.idle:
                if idle.link is None or idle.awaited is None:
                    continue
                leaves_s = sent_s.get((idle.link[0], idle.awaited), idle.end_s)
                found[idle.link] = found.get(idle.link, Waiting()) + Waiting(
                    idle.duration_s,
                    max(idle.end_s - max(idle.start_s, leaves_s), 0.0),
                    idle.duration_s if idle.cause == ORDER else 0.0,
                )
        return found


@dataclass(frozen=True)
class RankInfo:
    """The rank that measured.

    Attributes:
        torn: whether its last line was not whole: the run was killed.
    """

    rank: int
    stage: int
    host: str
    pid: int
    torn: bool


@dataclass(frozen=True)
class RunEvent:
    """Something that a rank has said about the run."""

    step: int
    time_s: float
    stage: int
    rank: int
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MeasuredRun:
    """A run; times in seconds on the clock of stage 0.

    Attributes:
        folder: where it was read.
        ranks: the rank that ran each stage; None for a stage without a file.
        steps: by number; numbers may be missing.
        events: by time.
    """

    folder: Path
    ranks: tuple[RankInfo | None, ...]
    steps: tuple[MeasuredStep, ...]
    events: tuple[RunEvent, ...]

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def missing(self) -> list[int]:
        """The stages without a file."""
        return [stage for stage, info in enumerate(self.ranks) if info is None]

    @property
    def start_s(self) -> float:
        return self.steps[0].start_s if self.steps else 0.0

    def changes(self) -> list[int]:
        """The indices in `steps` that have another plan than the step before."""
        return [
            i for i in range(1, len(self.steps)) if self.steps[i].plans != self.steps[i - 1].plans
        ]

    def only(self, steps: Sequence[MeasuredStep]) -> MeasuredRun:
        """The same run with these of its steps, and the events from them."""
        numbers = {each.step for each in steps}
        events = tuple(each for each in self.events if each.step in numbers)
        return replace(self, steps=tuple(steps), events=events)

    def early_s(self) -> dict[Link, float]:
        """The largest lead for each link over which a message seems to arrive before it leaves.

        Then the clocks are off by at least that.
        """
        found: dict[Link, float] = {}
        for step in self.steps:
            for message in step.messages:
                early_s = message.start_s - message.end_s
                if early_s > _ROUNDING_S:
                    link = (message.source, message.destination)
                    found[link] = max(found.get(link, 0.0), early_s)
        return found


def _peaks(spans: Iterable[Span]) -> tuple[int, int]:
    """The most microbatches between F and B, and between F and W."""
    activations = pending = max_activations = max_pending = 0
    for operation, _, _ in spans:
        activations += (operation.kind == "F") - (operation.kind == "B")
        pending += (operation.kind == "F") - (operation.kind == "W")
        max_activations = max(max_activations, activations)
        max_pending = max(max_pending, pending)
    return max_activations, max_pending


class _Walk:
    """Goes through the operations of a stage and tells what else could run."""

    def __init__(
        self, spans: Sequence[Span], arrivals: Mapping[Operation, float], first: bool, last: bool
    ) -> None:
        self._arrivals = arrivals
        self._no_input = first
        self._no_gradient = last
        self._peaks = _peaks(spans)
        self._left = {
            kind: sorted(s.operation.microbatch for s in spans if s.operation.kind == kind)[::-1]
            for kind in "FBW"
        }
        self._done = dict.fromkeys("FBW", 0)

    def run(self, operation: Operation) -> None:
        self._left[operation.kind].remove(operation.microbatch)
        self._done[operation.kind] += 1

    def _ready_s(self, kind: str, now_s: float) -> float | None:
        """From when on the next operation of this kind can run; None if it cannot be told."""
        if not self._left[kind]:
            return None
        microbatch = self._left[kind][-1]
        if kind == "F":
            # An F only if it holds no more microbatches than the stage held anyway at some time:
            # else it was a limit of memory that kept it back, not the order.
            held = self._done["F"] - self._done["B"], self._done["F"] - self._done["W"]
            if held[0] >= self._peaks[0] or held[1] >= self._peaks[1]:
                return None
            if self._no_input:
                return now_s
        else:
            if microbatch in self._left["F" if kind == "B" else "B"]:
                return None
            if kind == "W" or self._no_gradient:
                return now_s
        arrival_s = self._arrivals.get(Operation(kind, microbatch))
        return None if arrival_s is None else max(arrival_s, now_s)

    def possible(self, now_s: float) -> tuple[float, Operation] | None:
        """The operation of the next F, B and W that can run first, and from when on."""
        found = [
            (ready_s, Operation(kind, self._left[kind][-1]))
            for kind in "BFW"
            if (ready_s := self._ready_s(kind, now_s)) is not None
        ]
        return min(found, key=lambda each: each[0], default=None)


def _link(stage: int, num_stages: int, operation: Operation) -> Link | None:
    """Between which stages the message goes that this operation needs on this stage."""
    source = stage + {"F": -1, "B": 1, "W": 0}[operation.kind]
    return (source, stage) if source != stage and 0 <= source < num_stages else None


def idle_of(
    stage: int,
    num_stages: int,
    spans: Sequence[Span],
    arrivals: Mapping[Operation, float],
    start_s: float,
    until_s: float,
) -> tuple[Idle, ...]:
    """Why a stage idled from `start_s` to `until_s`, given its operations, by start.

    Before an F or B, until its message was there, the stage waited for that message; of this, the
    time since which another operation could have run is "order". If the arrival has not been
    measured, the operation counts as awaited until it starts.
    """
    if not spans:
        return (Idle(COOL_DOWN, start_s, until_s),) if until_s > start_s else ()
    first = spans[0].operation
    link = _link(stage, num_stages, first)
    found = [Idle(WARM_UP, start_s, spans[0].start_s, first if link else None, link)]
    walk = _Walk(spans, arrivals, stage == 0, stage == num_stages - 1)
    now_s = spans[0].end_s
    walk.run(first)
    for operation, begin_s, end_s in spans[1:]:
        if begin_s > now_s:
            link = _link(stage, num_stages, operation)
            there_s = now_s
            if link is not None:
                there_s = min(max(arrivals.get(operation, begin_s), now_s), begin_s)
                ready_s, other = walk.possible(now_s) or (there_s, None)
                ready_s = min(ready_s, there_s)
                cause = FORWARD if operation.kind == "F" else BACKWARD
                found.append(Idle(cause, now_s, ready_s, operation, link))
                found.append(Idle(ORDER, ready_s, there_s, operation, link, other))
            found.append(Idle(OVERHEAD, there_s, begin_s))
        walk.run(operation)
        now_s = max(now_s, end_s)
    found.append(Idle(COOL_DOWN, now_s, until_s))
    return tuple(each for each in found if each.end_s > each.start_s)


def without(idle: Iterable[Idle], filled: Sequence[FilledSpan]) -> tuple[Idle, ...]:
    """The parts of idle times in which no chunk of other work ran; both are sorted by start."""
    left = []
    for each in idle:
        now_s = each.start_s
        for chunk in filled:
            if chunk.end_s > now_s and chunk.start_s < each.end_s:
                if chunk.start_s > now_s:
                    left.append(replace(each, start_s=now_s, end_s=chunk.start_s))
                now_s = chunk.end_s
        if now_s < each.end_s:
            left.append(replace(each, start_s=now_s))
    return tuple(left)
