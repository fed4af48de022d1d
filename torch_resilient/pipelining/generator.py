"""Orders made by simulating the pipeline and choosing, at each moment: Algorithms 3 and 4.

One function serves the paper's policy and the others of the planner, which differ in `Rules`. It
works on compact orders (`orders.Kinds`). csrc/planning/generator.cpp is the same in C++; `core`
chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from torch_resilient.pipelining.costs import PipelineCosts
from torch_resilient.pipelining.orders import (
    FORWARD,
    INPUT_BACKWARD,
    WEIGHT_BACKWARD,
    Kinds,
    Order,
    from_kinds,
    require_microbatches,
)
from torch_resilient.pipelining.warmup import adapted_warmup, require_warmup

_NEVER = float("inf")


@dataclass(frozen=True)
class Limits:
    """The most microbatches a stage may hold, of each stage: the number of all means no limit.

    Attributes:
        activations: between F and B.
        pending: between F and W.
    """

    activations: tuple[int, ...]
    pending: tuple[int, ...]

    def allow_stage(self, stage: int, kinds: Kinds) -> bool:
        """Whether the stage's order keeps to them; False, too, if it has a B before its F."""
        held, pending = 0, 0
        most_held, most_pending = self.activations[stage], self.pending[stage]
        for kind in kinds:
            if kind == FORWARD:
                held += 1
                pending += 1
                if held > most_held or pending > most_pending:
                    return False
            elif kind == INPUT_BACKWARD:
                held -= 1
                if held < 0:
                    return False
            else:
                pending -= 1
                if pending < held:
                    return False
        return True


@dataclass(frozen=True)
class Rules:
    """How a stage chooses among the operations that could start now.

    B comes before F before W, but:

    Attributes:
        warmup: a count per stage, x_i of the paper.
        wait_for_warmup: before its first B, a stage runs its warm-up forwards and nothing else
            (Algorithm 3).
        gate: F waits while x_i microbatches are between F and B.
        forward_first: F before B as long as fewer than x_i are: keeps the slack of slow links.
        weight_share: W starts only if at least this share of it fits before the next message
            whose arrival is known; 0 for always.
        most_weights: with this many W ready, W comes before F.
    """

    warmup: tuple[int, ...]
    wait_for_warmup: bool = False
    gate: bool = False
    forward_first: bool = False
    weight_share: float = 0.0
    most_weights: int | None = None


def generate(
    costs: PipelineCosts, num_microbatches: int, rules: Rules, limits: Limits
) -> tuple[list[Kinds], float]:
    """The orders by these rules, within the limits, and the iteration time in seconds.

    Of the paper's listing these parts are read otherwise. Operations become available by arrival,
    `end of the operation + c`, and not `t + c`. On the last stage F makes its own B available. W is
    available when the local B has ended. What has not arrived cannot be chosen. Stages choose when
    something ends or arrives, which gives the orders of a time step that divides all times.
    """
    # Paper: PIPEMORPH §4.3, Algorithms 3 and 4
    num_stages = costs.num_stages
    last = num_stages - 1
    count = num_microbatches
    length = 3 * count
    forward_s, backward_s = costs.forward_s, costs.input_backward_s
    weight_s = costs.weight_backward_s
    kinds = [bytearray() for _ in range(num_stages)]
    inputs: list[list[float]] = [[] for _ in range(num_stages)]
    inputs[0] = [0.0] * count
    gradients: list[list[float]] = [[] for _ in range(num_stages)]
    done = [[0, 0, 0] for _ in range(num_stages)]
    free_s = [0.0] * num_stages
    most_weights = count if rules.most_weights is None else max(rules.most_weights, 1)
    wait_for_warmup, forward_first = rules.wait_for_warmup, rules.forward_first
    share = rules.weight_share
    quota: list[int] = []
    for stage in range(num_stages):
        most = min(rules.warmup[stage], limits.activations[stage], limits.pending[stage])
        # A stage that waited for more than the one before it gives would wait forever.
        quota.append(min(most, quota[-1]) if quota else most)
    most_held = quota if rules.gate else limits.activations
    # (time, stage): when a stage looks what it can do.
    events = [(0.0, 0)]
    while events:
        now_s, stage = heappop(events)
        if free_s[stage] > now_s:
            continue  # it looks again when its operation ends
        counts = done[stage]
        forwards, backwards, weights = counts
        arrived = inputs[stage]
        answered = gradients[stage]
        held = forwards - backwards
        input_s = (
            arrived[forwards]
            if forwards < len(arrived)
            and held < most_held[stage]
            and forwards - weights < limits.pending[stage]
            else _NEVER
        )
        gradient_s = answered[backwards] if backwards < len(answered) else _NEVER
        if wait_for_warmup and forwards < quota[stage]:
            if input_s > now_s:
                continue
            kind = FORWARD
        elif gradient_s <= now_s and not (
            forward_first and input_s <= now_s and held < quota[stage]
        ):
            kind = INPUT_BACKWARD
        elif input_s <= now_s and backwards - weights < most_weights:
            kind = FORWARD
        elif weights < backwards:
            if share and backwards - weights < most_weights:
                next_s = input_s if input_s < gradient_s else gradient_s
                if next_s - now_s < share * weight_s[stage]:
                    continue
            kind = WEIGHT_BACKWARD
        else:
            continue
        kinds[stage].append(kind)
        counts[kind] += 1
        other = -1
        if kind == FORWARD:
            end_s = now_s + forward_s[stage]
            if stage < last:
                other = stage + 1
                arrival_s = end_s + costs.delay_forward_s[stage]
                inputs[other].append(arrival_s)
            else:
                answered.append(end_s)
        elif kind == INPUT_BACKWARD:
            end_s = now_s + backward_s[stage]
            if stage:
                other = stage - 1
                arrival_s = end_s + costs.delay_backward_s[other]
                gradients[other].append(arrival_s)
        else:
            end_s = now_s + weight_s[stage]
        free_s[stage] = end_s
        if len(kinds[stage]) < length:
            heappush(events, (end_s, stage))
        # A neighbour that is busy beyond the arrival looks when it is free. At the very moment it
        # is free it may have looked already.
        if other >= 0 and free_s[other] <= arrival_s:
            heappush(events, (arrival_s, other))
    return [bytes(each) for each in kinds], max(free_s)


def no_limits(num_stages: int, num_microbatches: int) -> Limits:
    """Limits that never bind."""
    all_of_them = (num_microbatches,) * num_stages
    return Limits(all_of_them, all_of_them)


def paper_rules(warmup: Sequence[int]) -> Rules:
    """Algorithm 3: the warm-up forwards first, then B before F before W."""
    # Paper: PIPEMORPH §4.3, Algorithm 3
    return Rules(tuple(warmup), wait_for_warmup=True)


def paper_schedule(
    costs: PipelineCosts, num_microbatches: int, warmup: Sequence[int] | None = None
) -> list[Order]:
    """The schedule of the paper: warm-up by Algorithm 2 if not given, then Algorithms 3 and 4.

    As printed, Algorithm 3 holds a stage to its warm-up only until that many forwards have run:
    while no B has arrived it goes on with F, so the counts are a floor and no limit of memory. For
    limits there is `planner.plan_schedule` with the policy "paper".

    Raises ValueError unless the warm-up falls along the stages, from 1 to num_microbatches.
    """
    require_microbatches(num_microbatches)
    if warmup is None:
        warmup = adapted_warmup(costs, num_microbatches)
    if len(warmup) != costs.num_stages:
        raise ValueError(
            f"warmup: expected {costs.num_stages} counts, one per stage, got {len(warmup)}"
        )
    require_warmup(warmup, num_microbatches)
    limits = no_limits(costs.num_stages, num_microbatches)
    kinds, _ = generate(costs, num_microbatches, paper_rules(warmup), limits)
    return [from_kinds(each) for each in kinds]
