"""Betters given orders by small changes on the critical path.

csrc/planning/local_search.cpp must give the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner_twins.evaluator import Evaluator
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits
from torch_resilient.planning.orders import INPUT_BACKWARD, WEIGHT_BACKWARD, Kinds

# Late acceptance keeps a change if the result is no longer than the result N changes earlier. With
# a smaller N the search is stuck sooner; with a larger N it wanders when time is short. Large
# pipelines try fewer changes in a given time and get a smaller N: the number of changes that takes
# this many evaluated operations, clamped to the range from _MEMORY_MIN to _MEMORY_MAX.
_MEMORY_OPERATIONS = 200_000
_MEMORY_MIN = 20
_MEMORY_MAX = 300
# A search that is stuck restarts from the best, and at first accepts orders that are longer by at
# most this fraction. Much less does not leave the dead end; more loses the merits of the best.
_RESTART_ROOM = 0.02
# The search ends after this number of rounds without a new best.
_ROUNDS = 30
# The number of operations before a critical block that are searched for idle time, and the number
# of such places that a W may go to. Larger values give long lists of moves; nearly all are in vain.
_LOOK_BACK = 40
_GAPS = 4
# F and B jump over at most that many operations at once; further by several moves.
_LONGEST_JUMP = 12
# Results kept besides the best, for the choice by other delays.
_KEPT = 8

# Take the operation at one position of a stage's order and put it at another.
Move = tuple[int, int, int]

_BITS_64 = 2**64 - 1


def _mix_bits(number: int) -> int:
    """One step of splitmix64, `mixBits` in csrc/base/random.h."""
    number = (number + 0x9E3779B97F4A7C15) & _BITS_64
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _BITS_64
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _BITS_64
    return number ^ (number >> 31)


class Search:
    """A search that is run for as many changes at a time as its user likes.

    The choices depend on the seed, an integer from 0 to 2^64 - 1, and on nothing else.
    """

    def __init__(
        self,
        kinds: Sequence[Kinds],
        costs: PipelineCosts,
        limits: Limits,
        lower_bound_s: float,
        seed: int,
    ) -> None:
        """Begins from `kinds`; ends when `lower_bound_s` is reached.

        Raises ValueError if the stages wait for each other.
        """
        # Mixed, since seeds are often neighbours.
        self._seed = _mix_bits(seed)
        self._drawn = 0
        self._limits = limits
        self._evaluator = Evaluator(costs, len(kinds[0]) // 3)
        self._enough_s = lower_bound_s * (1 + 1e-9)
        time_s = self._evaluator.run(kinds)
        if time_s is None:
            raise ValueError("kinds: the stages wait for each other")
        self._time_s = time_s
        self._current = list(kinds)
        self._found = [(time_s, list(kinds))]
        operations = sum(len(order) for order in kinds)
        memory = min(max(_MEMORY_OPERATIONS // operations, _MEMORY_MIN), _MEMORY_MAX)
        self._history = [time_s] * memory
        self._step = 0
        # Small pipelines soon have nothing left to find.
        self._patience = max(1000, 10 * operations)
        self._left = self._patience
        self._rounds = _ROUNDS
        self._moves = self._find_moves()

    @property
    def found(self) -> list[tuple[float, list[Kinds]]]:
        """The best orders until now with their iteration times, the shortest first."""
        return [(time_s, list(kinds)) for time_s, kinds in self._found]

    def run(self, tries: int) -> bool:
        """Tries this number of changes. Returns whether there is more to try."""
        for _ in range(tries):
            if self._found[0][0] <= self._enough_s:
                return False
            if not self._left:
                if not self._rounds:
                    return False
                self._rounds -= 1
                self._restart()
            self._left -= 1
            if not self._try_one():
                return False
        return True

    def _restart(self) -> None:
        self._time_s, kinds = self._found[0]
        self._current = list(kinds)
        self._evaluator.run(kinds)
        self._history = [self._time_s * (1 + _RESTART_ROOM)] * len(self._history)
        self._left = self._patience
        self._moves = self._find_moves()

    def _try_one(self) -> bool:
        """False if there is no change to try."""
        if not self._moves:
            self._evaluator.run(self._current)
            self._moves = self._find_moves()
            if not self._moves:
                return False
        moves = self._moves
        drawn = self._below(len(moves))
        moves[drawn], moves[-1] = moves[-1], moves[drawn]
        stage, taken, put = moves.pop()
        changing = bytearray(self._current[stage])
        changing.insert(put, changing.pop(taken))
        order = bytes(changing)
        if order == self._current[stage] or not self._limits.allow_stage(stage, order):
            return True
        changed = self._current[:]
        changed[stage] = order
        self._step += 1
        slot = self._step % len(self._history)
        # The remaining time of the stages is summed in another order, so leave room for rounding.
        max_s = max(self._time_s, self._history[slot])
        time_s = self._evaluator.run(changed, max_s * (1 + 1e-12))
        if time_s is not None and time_s <= max_s:
            self._current = changed
            self._time_s = time_s
            self._moves = self._find_moves()
            if time_s < self._found[0][0]:
                self._found.insert(0, (time_s, changed))
                del self._found[_KEPT:]
                self._left = self._patience
                self._rounds = _ROUNDS
        self._history[slot] = min(self._history[slot], self._time_s)
        return True

    def _below(self, count: int) -> int:
        """A number from 0 to count - 1."""
        high = _mix_bits((self._seed + self._drawn) & _BITS_64) >> 32
        self._drawn += 1
        return high * count >> 32

    def _critical_blocks(self) -> Iterator[tuple[int, int, int]]:
        """(stage, first, last) of the operations that run back to back on one critical path.

        The path is that of the last run of the evaluator, which must be of the current orders.
        """
        kinds, starts, durations = self._current, self._evaluator.starts, self._evaluator.durations
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
        ends_s = self._evaluator.free_s
        longest = [stage for stage, end_s in enumerate(ends_s) if end_s == self._time_s]
        stage = longest[self._below(len(longest))]
        position = len(kinds[stage]) - 1
        while True:
            order, begins, lengths = kinds[stage], starts[stage], durations[stage]
            block_end = position
            while (
                position and begins[position - 1] + lengths[order[position - 1]] == begins[position]
            ):
                position -= 1
            yield stage, position, block_end
            if begins[position] <= 0:
                return
            # It began when its message arrived.
            kind = order[position]
            microbatch = numbers[stage][position]
            stage += 1 if kind == INPUT_BACKWARD else -1
            position = places[stage][kind][microbatch]

    def _find_moves(self) -> list[Move]:
        """Changes that may shorten a critical path."""
        moves = []
        for stage, first, last in self._critical_blocks():
            order, begins = self._current[stage], self._evaluator.starts[stage]
            lengths = self._evaluator.durations[stage]
            # Positions before the block where the stage idles for at least half of a W.
            gaps = [
                position
                for position in range(first, max(first - _LOOK_BACK - 1, 0), -1)
                if begins[position] - begins[position - 1] - lengths[order[position - 1]]
                >= 0.5 * lengths[WEIGHT_BACKWARD]
            ]
            for position in range(first, last + 1):
                kind = order[position]
                if position > first and order[position - 1] != kind:
                    # Swapping neighbours of one kind would change nothing.
                    moves.append((stage, position, position - 1))
                if kind == WEIGHT_BACKWARD:
                    # No operation waits for W: move it behind the block, into idle time before
                    # it, or anywhere later.
                    if position < last:
                        moves.append((stage, position, last))
                    moves += [(stage, position, gap) for gap in gaps[:_GAPS]]
                    after = len(order) - position - 1
                    if after:
                        moves.append((stage, position, position + 1 + self._below(after)))
                elif position > first + 1 and position - first < _LONGEST_JUMP:
                    moves.append((stage, position, first + self._below(position - first)))
            if first and order[first - 1] != order[first]:
                # The operation before the block, which nothing hurries: let the block pass it.
                moves.append((stage, first, first - 1))
        return moves
