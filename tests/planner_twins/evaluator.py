"""Iteration times and memory of compact orders: the results of `replay`, without its details.

csrc/planning/evaluator.cpp must give the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import FORWARD, INPUT_BACKWARD, Kinds


class Evaluator:
    """Runs compact orders and returns when each operation starts.

    Attributes:
        durations: seconds of F, B and W, of each stage.
        starts: in seconds, of each operation of each stage, in the last run.
        waits: seconds idle after the first operation, for activations and for gradients.
        free_s: when each stage has ended.
    """

    def __init__(self, costs: PipelineCosts, num_microbatches: int) -> None:
        self.durations = list(
            zip(costs.forward_s, costs.input_backward_s, costs.weight_backward_s, strict=True)
        )
        self._delays = list(
            zip((*costs.delay_forward_s, 0.0), (0.0, *costs.delay_backward_s), strict=True)
        )
        self._num_microbatches = num_microbatches
        self.starts: list[list[float]] = []
        self.waits: list[list[float]] = []
        self.free_s: list[float] = []

    def run(self, kinds: Sequence[Kinds], max_s: float = math.inf) -> float | None:
        """The iteration time in seconds; None if the stages wait for each other.

        None also, and sooner, for more than `max_s`.
        """
        num_stages = len(kinds)
        num_microbatches = self._num_microbatches
        last = num_stages - 1
        length = 3 * num_microbatches
        inputs: list[list[float]] = [[] for _ in kinds]
        inputs[0] = [0.0] * num_microbatches
        gradients: list[list[float]] = [[] for _ in kinds]
        starts: list[list[float]] = [[] for _ in kinds]
        waits = [[0.0, 0.0] for _ in kinds]
        free_s = [0.0] * num_stages
        self.starts, self.waits, self.free_s = starts, waits, free_s
        counts = [(0, 0)] * num_stages
        runnable = list(range(last, -1, -1))
        queued = [True] * num_stages
        while runnable:
            stage = runnable.pop()
            queued[stage] = False
            out = starts[stage]
            begin = len(out)
            arrived, answered = inputs[stage], gradients[stage]
            forwards, backwards = counts[stage]
            forward_s, backward_s, weight_s = self.durations[stage]
            forward_delay_s, backward_delay_s = self._delays[stage]
            # The backward messages of stage 0 are not read; the last stage sends to itself.
            to_next = inputs[stage + 1] if stage < last else answered
            to_previous = gradients[stage - 1] if stage else []
            now_s = free_s[stage]
            order = kinds[stage]
            for position in range(begin, length):
                kind = order[position]
                if kind == FORWARD:
                    if forwards == len(arrived):
                        break
                    arrival_s = arrived[forwards]
                    if arrival_s > now_s:
                        if position:
                            waits[stage][0] += arrival_s - now_s
                        now_s = arrival_s
                    out.append(now_s)
                    now_s += forward_s
                    to_next.append(now_s + forward_delay_s)
                    forwards += 1
                elif kind == INPUT_BACKWARD:
                    if backwards == len(answered):
                        break
                    arrival_s = answered[backwards]
                    if arrival_s > now_s:
                        if position:
                            waits[stage][1] += arrival_s - now_s
                        now_s = arrival_s
                    out.append(now_s)
                    now_s += backward_s
                    to_previous.append(now_s + backward_delay_s)
                    backwards += 1
                else:
                    out.append(now_s)
                    now_s += weight_s
            free_s[stage] = now_s
            counts[stage] = forwards, backwards
            position = len(out)
            left_s = (
                (num_microbatches - forwards) * forward_s
                + (num_microbatches - backwards) * backward_s
                + (num_microbatches - position + forwards + backwards) * weight_s
            )
            if now_s + left_s > max_s:
                return None
            if position > begin:
                if stage and not queued[stage - 1] and len(starts[stage - 1]) < length:
                    queued[stage - 1] = True
                    runnable.append(stage - 1)
                if stage < last and not queued[stage + 1] and len(starts[stage + 1]) < length:
                    queued[stage + 1] = True
                    runnable.append(stage + 1)
        if any(len(out) < length for out in starts):
            return None
        return max(free_s)


def evaluate(
    kinds: Sequence[Kinds], costs: PipelineCosts
) -> list[tuple[float, float, float, float]]:
    """Seconds of each stage: its begin, its waits for activations and gradients, its end.

    The waits are those after the first operation. Raises ValueError if the stages wait for each
    other.
    """
    evaluator = Evaluator(costs, len(kinds[0]) // 3)
    if evaluator.run(kinds) is None:
        raise ValueError("kinds: the stages wait for each other")
    return [
        (starts[0], waits[0], waits[1], end_s)
        for starts, waits, end_s in zip(
            evaluator.starts, evaluator.waits, evaluator.free_s, strict=True
        )
    ]


def memory_peaks(kinds: Sequence[Kinds], costs: PipelineCosts) -> list[tuple[int, int, float]]:
    """The maxima of each stage: microbatches from F to B, from F to W, and memory."""
    return [
        _held_by_stage(order, costs.activation_units[stage], costs.weight_backward_units[stage])
        for stage, order in enumerate(kinds)
    ]


def _held_by_stage(kinds: Kinds, held_units: float, kept_units: float) -> tuple[int, int, float]:
    held = backward = max_held = max_pending = 0
    max_units = 0.0
    for kind in kinds:
        if kind == FORWARD:
            held += 1
        elif kind == INPUT_BACKWARD:
            held -= 1
            backward += 1
        else:
            backward -= 1
        max_held = max(max_held, held)
        max_pending = max(max_pending, held + backward)
        max_units = max(max_units, held * held_units + backward * kept_units)
    return max_held, max_pending, max_units
