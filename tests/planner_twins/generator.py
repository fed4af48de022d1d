"""Orders made by simulating the pipeline and choosing, at each moment: Algorithms 3 and 4.

csrc/planning/generator.cpp must give the same to the last bit.
"""

from __future__ import annotations

from heapq import heappop, heappush

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules
from torch_resilient.planning.orders import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Kinds

_NEVER = float("inf")


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
