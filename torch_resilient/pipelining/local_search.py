"""Betters given orders by small changes on the critical path."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random

from torch_resilient.pipelining.costs import PipelineCosts
from torch_resilient.pipelining.generator import Kinds, Limits
from torch_resilient.pipelining.orders import FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD

# Late acceptance: a change is kept if the result is no longer than that of so many changes ago.
# Fewer and the search is stuck sooner, more and it wanders when time is short.
_MEMORY = 20
# How many operations before a critical block are searched for idle time, and how many such places
# a W may go to. More makes long lists of moves of which nearly all are tried in vain.
_LOOK_BACK = 40
_GAPS = 4
# F and B jump over at most that many operations at once; further by several moves.
_LONGEST_JUMP = 12
# Results kept besides the best, for the choice by other delays.
_KEPT = 8

# When each operation of each stage starts, in seconds.
Starts = list[list[float]]


class Evaluator:
    """Iteration times of compact orders: what `replay` says, and nothing else."""

    def __init__(self, costs: PipelineCosts) -> None:
        self.durations = list(
            zip(costs.forward_s, costs.input_backward_s, costs.weight_backward_s, strict=True)
        )
        self._delays = list(
            zip((*costs.delay_forward_s, 0.0), (0.0, *costs.delay_backward_s), strict=True)
        )

    def __call__(
        self, kinds: list[Kinds], num_microbatches: int, most_s: float = math.inf
    ) -> tuple[float, Starts] | None:
        """(iteration time in seconds, starts); None if the stages wait for each other.

        None also, and sooner, for more than `most_s`.
        """
        num_stages = len(kinds)
        last = num_stages - 1
        length = 3 * num_microbatches
        inputs: list[list[float]] = [[] for _ in kinds]
        inputs[0] = [0.0] * num_microbatches
        gradients: list[list[float]] = [[] for _ in kinds]
        starts: Starts = [[] for _ in kinds]
        free_s = [0.0] * num_stages
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
            # Nobody reads what stage 0 "sends" backwards; the last stage sends to itself.
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
            if now_s + left_s > most_s:
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
        return max(free_s), starts


# Take the operation at one position of a stage's order and put it at another.
Move = tuple[int, int, int]


def _critical_blocks(
    kinds: list[Kinds], starts: Starts, evaluator: Evaluator, random: Random
) -> Iterator[tuple[int, int, int]]:
    """(stage, first, last) of the operations that run back to back on one critical path."""
    places: list[tuple[list[int], list[int], list[int]]] = []
    numbers: list[list[int]] = []
    for order in kinds:
        place: tuple[list[int], list[int], list[int]] = ([], [], [])
        number = []
        for position, kind in enumerate(order):
            number.append(len(place[kind]))
            place[kind].append(position)
        places.append(place)
        numbers.append(number)
    durations = evaluator.durations
    ends_s = [starts[stage][-1] + durations[stage][order[-1]] for stage, order in enumerate(kinds)]
    longest_s = max(ends_s)
    stage = random.choice([stage for stage, end_s in enumerate(ends_s) if end_s == longest_s])
    position = len(kinds[stage]) - 1
    while True:
        order, begins, lengths = kinds[stage], starts[stage], durations[stage]
        block_end = position
        while position and begins[position - 1] + lengths[order[position - 1]] == begins[position]:
            position -= 1
        yield stage, position, block_end
        if begins[position] <= 0:
            return
        # It began when its message arrived.
        kind = order[position]
        microbatch = numbers[stage][position]
        stage += 1 if kind == INPUT_BACKWARD else -1
        position = places[stage][kind][microbatch]


def _moves(kinds: list[Kinds], starts: Starts, evaluator: Evaluator, random: Random) -> list[Move]:
    """Changes that may shorten a critical path, in random order."""
    moves = []
    for stage, first, last in _critical_blocks(kinds, starts, evaluator, random):
        order, begins, lengths = kinds[stage], starts[stage], evaluator.durations[stage]
        # Where the stage idles before the block for at least half of a W.
        gaps = [
            position
            for position in range(max(first - _LOOK_BACK, 1), first + 1)
            if begins[position] - begins[position - 1] - lengths[order[position - 1]]
            >= 0.5 * lengths[WEIGHT_BACKWARD]
        ]
        for position in range(first, last + 1):
            kind = order[position]
            if position > first and order[position - 1] != kind:
                # Swapping neighbours of one kind would change nothing.
                moves.append((stage, position, position - 1))
            if kind == WEIGHT_BACKWARD:
                # Nobody waits for it: behind the block, into idle time before, or anywhere later.
                if position < last:
                    moves.append((stage, position, last))
                moves += [(stage, position, gap) for gap in gaps[-_GAPS:]]
                if position < len(order) - 1:
                    moves.append((stage, position, random.randrange(position + 1, len(order))))
            elif position > first + 1 and position - first < _LONGEST_JUMP:
                moves.append((stage, position, random.randrange(first, position)))
        if first and order[first - 1] != order[first]:
            # The operation before the block, which nothing hurries: let the block pass it.
            moves.append((stage, first, first - 1))
    random.shuffle(moves)
    return moves


def improve(
    kinds: list[Kinds],
    costs: PipelineCosts,
    num_microbatches: int,
    limits: Limits,
    lower_bound_s: float,
    seed: int,
    go_on: Callable[[], bool],
) -> list[tuple[float, list[Kinds]]]:
    """The best orders found from `kinds` on, with their iteration times; the shortest first.

    Args:
        lower_bound_s: the search ends when it is reached.
        seed: of the choices.
        go_on: asked before each evaluation; the search ends when it says no.
    """
    random = Random(seed)
    evaluator = Evaluator(costs)
    outcome = evaluator(kinds, num_microbatches)
    assert outcome is not None
    time_s, starts = outcome
    current = [order[:] for order in kinds]
    found = [(time_s, current)]
    enough_s = lower_bound_s * (1 + 1e-9)
    history = [time_s] * _MEMORY
    step = 0
    moves = _moves(current, starts, evaluator, random)
    # Small pipelines soon have nothing left to find.
    patience = max(1000, 10 * sum(len(order) for order in kinds))
    left = patience
    while found[0][0] > enough_s and left and go_on():
        left -= 1
        if not moves:
            moves = _moves(current, starts, evaluator, random)
            if not moves:
                break
        stage, taken, put = moves.pop()
        order = current[stage][:]
        order.insert(put, order.pop(taken))
        if order == current[stage] or not limits.allow_stage(stage, order):
            continue
        changed = current[:]
        changed[stage] = order
        step += 1
        slot = step % _MEMORY
        # What the stages have left to do is a sum in another order, so leave room for rounding.
        most_s = max(time_s, history[slot])
        outcome = evaluator(changed, num_microbatches, most_s * (1 + 1e-12))
        if outcome is not None and outcome[0] <= most_s:
            current = changed
            time_s, starts = outcome
            moves = _moves(current, starts, evaluator, random)
            if time_s < found[0][0]:
                found.insert(0, (time_s, current))
                del found[_KEPT:]
                left = patience
        if time_s < history[slot]:
            history[slot] = time_s
    return found
