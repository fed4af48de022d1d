"""Orders made by simulating the pipeline and choosing, at each moment: Algorithms 3 and 4.

csrc/planning/generator.cpp must give the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules
from torch_resilient.planning.orders import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Kinds

_NEVER = float("inf")


@dataclass(slots=True)
class _Stage:
    """A stage in the simulation of `generate`: its limits, then what has happened so far."""

    duration_s: tuple[float, float, float]  # by kind
    quota: int  # x_i, as far as the limits and the stage before allow
    max_held: int  # microbatches between F and B
    max_pending: int  # between F and W
    inputs: list[float]  # when the input of each F arrives, as far as known
    gradients: list[float] = field(default_factory=list)  # the same for B
    order: bytearray = field(default_factory=bytearray)
    done: list[int] = field(default_factory=lambda: [0, 0, 0])  # by kind
    free_s: float = 0.0  # when its last operation ends


def _stages(costs: PipelineCosts, count: int, rules: Rules, limits: Limits) -> list[_Stage]:
    """The stages at the start, when only the inputs of the first one are there."""
    stages: list[_Stage] = []
    for i in range(costs.num_stages):
        quota = min(rules.warmup[i], limits.activations[i], limits.pending[i])
        if stages:
            # A stage that waited for more than the one before it gives would wait forever.
            quota = min(quota, stages[-1].quota)
        stages.append(
            _Stage(
                (costs.forward_s[i], costs.input_backward_s[i], costs.weight_backward_s[i]),
                quota,
                quota if rules.gate else limits.activations[i],
                limits.pending[i],
                [] if i else [0.0] * count,
            )
        )
    return stages


def _choose(stage: _Stage, rules: Rules, max_weights: int, now_s: float) -> int | None:
    """The kind of operation that an idle stage starts now; None: it waits for a message."""
    forwards, backwards, weights = stage.done
    held = forwards - backwards
    may_hold_more = held < stage.max_held and forwards - weights < stage.max_pending
    input_s = stage.inputs[forwards] if forwards < len(stage.inputs) and may_hold_more else _NEVER
    gradient_s = stage.gradients[backwards] if backwards < len(stage.gradients) else _NEVER
    if rules.wait_for_warmup and forwards < stage.quota:
        return FORWARD if input_s <= now_s else None
    keeps_slack = rules.forward_first and input_s <= now_s and held < stage.quota
    if gradient_s <= now_s and not keeps_slack:
        return INPUT_BACKWARD
    if input_s <= now_s and backwards - weights < max_weights:
        return FORWARD
    if weights == backwards:
        return None
    if rules.weight_share and backwards - weights < max_weights:
        next_s = min(input_s, gradient_s)
        if next_s - now_s < rules.weight_share * stage.duration_s[WEIGHT_BACKWARD]:
            return None
    return WEIGHT_BACKWARD


def _deliver(
    stages: list[_Stage], costs: PipelineCosts, sender: int, kind: int
) -> tuple[float, int] | None:
    """Sends the result of the operation that ends when `sender` is free.

    Returns when it arrives at which other stage; None if it stays in this one.
    """
    end_s = stages[sender].free_s
    if kind == FORWARD and sender + 1 < len(stages):
        arrival_s = end_s + costs.delay_forward_s[sender]
        stages[sender + 1].inputs.append(arrival_s)
        return arrival_s, sender + 1
    if kind == FORWARD:
        stages[sender].gradients.append(end_s)
    elif kind == INPUT_BACKWARD and sender > 0:
        arrival_s = end_s + costs.delay_backward_s[sender - 1]
        stages[sender - 1].gradients.append(arrival_s)
        return arrival_s, sender - 1
    return None


def generate(
    costs: PipelineCosts, num_microbatches: int, rules: Rules, limits: Limits
) -> tuple[list[Kinds], float]:
    """The orders by these rules, within the limits, and the iteration time in seconds.

    These parts differ from the paper's listing. Operations become available by arrival,
    `end of the operation + c`, and not `t + c`. On the last stage F makes its own B available. W is
    available when the local B has ended. Messages that have not arrived cannot be chosen. Stages
    choose when something ends or arrives. This gives the same orders as a time step that divides
    all times.
    """
    # Paper: PIPEMORPH §4.3, Algorithms 3 and 4
    count = num_microbatches
    max_weights = count if rules.max_weights is None else max(rules.max_weights, 1)
    stages = _stages(costs, count, rules, limits)
    # (time, stage): when a stage looks what it can do.
    events = [(0.0, 0)]
    while events:
        now_s, number = heappop(events)
        stage = stages[number]
        if stage.free_s > now_s:
            continue  # it looks again when its operation ends
        kind = _choose(stage, rules, max_weights, now_s)
        if kind is None:
            continue
        stage.order.append(kind)
        stage.done[kind] += 1
        stage.free_s = now_s + stage.duration_s[kind]
        if len(stage.order) < 3 * count:
            heappush(events, (stage.free_s, number))
        arrival = _deliver(stages, costs, number, kind)
        # A neighbour that is busy beyond the arrival looks when it is free. At the very moment it
        # is free it may have looked already.
        if arrival is not None and stages[arrival[1]].free_s <= arrival[0]:
            heappush(events, arrival)
    return [bytes(stage.order) for stage in stages], max(stage.free_s for stage in stages)
