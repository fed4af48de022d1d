"""The exact timeline of given orders: what runs and travels when, what waits for what.

The one source of truth for iteration times, bubbles and memory. Event-driven, no time step: linear
in the number of operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import Operation, OrderError


class Span(NamedTuple):
    """One operation; seconds since the first operation of the iteration."""

    operation: Operation
    start_s: float
    end_s: float


class Message(NamedTuple):
    """A message from `operation` of stage `source`: an activation (F) or its gradient (B)."""

    operation: Operation
    source: int
    destination: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Bubble:
    """Idle time of one stage, in seconds, by its cause.

    Attributes:
        warm_up_s: before the first operation.
        forward_s: between operations, waiting for an activation over the link from stage i - 1.
        backward_s: between operations, waiting for a gradient over the link from stage i + 1.
        cool_down_s: after the last operation, until the last stage of the pipeline has ended.

    A stage waits for the operation that its order names next, even if another could run.
    """

    warm_up_s: float
    forward_s: float
    backward_s: float
    cool_down_s: float

    @property
    def total_s(self) -> float:
        return self.warm_up_s + self.forward_s + self.backward_s + self.cool_down_s


@dataclass(frozen=True)
class Replay:
    """The result of a replay: times in seconds and, for each stage, microbatches held.

    Attributes:
        costs: what they were replayed with.
        stages: the operations of each stage in its order.
        iteration_s: from the first start to the last end.
        bubbles: idle time of each stage.
        peak_activations: the most microbatches between the start of F and the end of B.
        peak_pending: the most microbatches between the start of F and the end of W.
        peak_units: the most memory held, by the weights in `costs`.
    """

    costs: PipelineCosts
    stages: tuple[tuple[Span, ...], ...]
    iteration_s: float
    bubbles: tuple[Bubble, ...]
    peak_activations: tuple[int, ...]
    peak_pending: tuple[int, ...]
    peak_units: tuple[float, ...]

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """All messages, by source and the order in which they leave it."""
        last = len(self.stages) - 1
        found = []
        for stage, spans in enumerate(self.stages):
            for operation, _, end_s in spans:
                if operation.kind == "F" and stage < last:
                    arrival_s = end_s + self.costs.delay_forward_s[stage]
                    found.append(Message(operation, stage, stage + 1, end_s, arrival_s))
                elif operation.kind == "B" and stage:
                    arrival_s = end_s + self.costs.delay_backward_s[stage - 1]
                    found.append(Message(operation, stage, stage - 1, end_s, arrival_s))
        return tuple(found)

    @property
    def bubble(self) -> float:
        """The idle part of all stages' time, 0 to 1."""
        whole_s = self.iteration_s * len(self.stages)
        return sum(each.total_s for each in self.bubbles) / whole_s if whole_s else 0.0


def _check(orders: Sequence[Sequence[Operation]], num_stages: int) -> int:
    """The number of microbatches, if each stage has F, B, W of each of them, in a possible order.

    Raises OrderError for the first fault.
    """
    if len(orders) != num_stages:
        raise OrderError(
            min(len(orders), num_stages), None, f"{len(orders)} orders for {num_stages} stages"
        )
    num_microbatches = max((len(order) for order in orders), default=0) // 3
    # Progress of a microbatch: 1 after F, 2 after B, 3 after W.
    wanted = {"F": 0, "B": 1, "W": 2}
    for stage, order in enumerate(orders):
        done = [0] * num_microbatches
        for operation in order:
            kind, microbatch = operation
            where = f"stage {stage}: {Operation(kind, microbatch)}"
            if kind not in wanted:
                raise OrderError(stage, operation, f"{where}: the kind is not F, B or W")
            if not 0 <= microbatch < num_microbatches:
                raise OrderError(
                    stage,
                    operation,
                    f"{where}: expected microbatches 0 to {num_microbatches - 1}: the longest "
                    f"order has 3 x {num_microbatches} operations",
                )
            if done[microbatch] > wanted[kind]:
                raise OrderError(stage, operation, f"{where} comes twice")
            if done[microbatch] < wanted[kind]:
                before = Operation("FBW"[done[microbatch]], microbatch)
                raise OrderError(stage, operation, f"{where} comes before {before}")
            done[microbatch] += 1
        for microbatch, count in enumerate(done):
            if count < 3:
                missing = Operation("FBW"[count], microbatch)
                raise OrderError(stage, missing, f"stage {stage}: {missing} is missing")
    if not num_microbatches:
        raise OrderError(0, None, "stage 0: no microbatch")
    return num_microbatches


def replay(orders: Sequence[Sequence[Operation]], costs: PipelineCosts) -> Replay:
    """Runs `orders`, one list of operations per stage, with `costs`.

    An operation starts when the one before it on its stage has ended and its message has arrived:
    F of stage i needs F of stage i - 1, B needs B of stage i + 1, on the last stage its own F. The
    microbatches may come in any order.

    Raises OrderError, which names the stage and the operation, if an operation is missing, comes
    twice or before what it needs on its stage, or if the stages wait for each other in a circle.
    """
    num_stages = costs.num_stages
    num_microbatches = _check(orders, num_stages)
    # When the message for F or B of a microbatch arrives, by stage; None until it has left.
    no_message: list[float | None] = [None] * num_microbatches
    inputs = [no_message[:] for _ in range(num_stages)]
    gradients = [no_message[:] for _ in range(num_stages)]
    inputs[0] = [0.0] * num_microbatches
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    free_s = [0.0] * num_stages
    waits = [[0.0, 0.0] for _ in range(num_stages)]
    position = [0] * num_stages
    runnable = list(reversed(range(num_stages)))
    queued = [True] * num_stages
    while runnable:
        stage = runnable.pop()
        queued[stage] = False
        order = orders[stage]
        now_s = free_s[stage]
        begin = position[stage]
        out = spans[stage]
        for i in range(begin, len(order)):
            operation = order[i]
            kind, microbatch = operation
            if kind == "W":
                start_s = now_s
                now_s += costs.weight_backward_s[stage]
            else:
                forward = kind == "F"
                arrival_s = (inputs if forward else gradients)[stage][microbatch]
                if arrival_s is None:
                    break
                start_s = now_s
                if arrival_s > now_s:
                    start_s = arrival_s
                    if i:
                        waits[stage][not forward] += arrival_s - now_s
                if forward:
                    now_s = start_s + costs.forward_s[stage]
                    if stage < num_stages - 1:
                        sent_s = now_s + costs.delay_forward_s[stage]
                        inputs[stage + 1][microbatch] = sent_s
                    else:
                        gradients[stage][microbatch] = now_s
                else:
                    now_s = start_s + costs.input_backward_s[stage]
                    if stage:
                        sent_s = now_s + costs.delay_backward_s[stage - 1]
                        gradients[stage - 1][microbatch] = sent_s
            out.append(Span(operation, start_s, now_s))
        position[stage] = len(out)
        free_s[stage] = now_s
        if position[stage] > begin:
            for neighbour in (stage - 1, stage + 1):
                if 0 <= neighbour < num_stages and not queued[neighbour]:
                    queued[neighbour] = True
                    runnable.append(neighbour)
    for stage, order in enumerate(orders):
        if position[stage] < len(order):
            raise _deadlock(orders, position, stage)
    iteration_s = max(free_s)
    bubbles = tuple(
        Bubble(row[0].start_s, wait[0], wait[1], iteration_s - end_s)
        for row, wait, end_s in zip(spans, waits, free_s, strict=True)
    )
    peaks = [_peaks(order, costs, stage) for stage, order in enumerate(orders)]
    return Replay(
        costs,
        tuple(tuple(row) for row in spans),
        iteration_s,
        bubbles,
        tuple(peak[0] for peak in peaks),
        tuple(peak[1] for peak in peaks),
        tuple(peak[2] for peak in peaks),
    )


def _deadlock(
    orders: Sequence[Sequence[Operation]], position: Sequence[int], first: int
) -> OrderError:
    """Says who waits for whom, from stage `first` on."""
    told = []
    for stage in range(first, len(orders)):
        if position[stage] < len(orders[stage]):
            operation = orders[stage][position[stage]]
            source = stage + (1 if operation.kind == "B" else -1)
            told.append(f"stage {stage} waits to run {operation} until stage {source} has run it")
        if len(told) == 3:
            break
    return OrderError(first, orders[first][position[first]], "deadlock: " + "; ".join(told))


def _peaks(order: Sequence[Operation], costs: PipelineCosts, stage: int) -> tuple[int, int, float]:
    """The most microbatches from F to B, from F to W, and the most memory, of one stage."""
    activations = pending = max_activations = max_pending = 0
    units = max_units = 0.0
    held = costs.activation_units[stage]
    kept = costs.weight_backward_units[stage]
    backward = 0  # between B and W
    for kind, _ in order:
        if kind == "F":
            activations += 1
            pending += 1
            max_activations = max(max_activations, activations)
            max_pending = max(max_pending, pending)
        elif kind == "B":
            activations -= 1
            backward += 1
        else:
            pending -= 1
            backward -= 1
        units = activations * held + backward * kept
        max_units = max(max_units, units)
    return max_activations, max_pending, max_units
