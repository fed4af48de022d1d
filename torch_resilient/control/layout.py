"""Chooses the replica and the stage of each rank, to minimize the harm of slow links.

A slow link in an all-reduce of gradients costs far more than between two stages, where a schedule
can absorb it: FALCON and PIPEMORPH change the places of ranks to turn the former into the latter.
Here any link may have any delay and bandwidth, and what comes out is the best of all places, with
what it is worth. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_resilient.planning.costs import PipelineCosts, per_place
from torch_resilient.planning.planner import POLICIES, plan_schedule

Matrix = Sequence[Sequence[float]]
_Floats = npt.NDArray[np.float64]
_Grid = list[list[int]]

# Up to this many ranks all layouts are looked at: 8! = 40,320 take some 30 ms, 9! ten times that.
_EXACT_RANKS = 8
# For the search, the iteration time is the sum of what each link costs alone, read off a line
# through these points between the usual and the longest delay.
_SAMPLED_DELAYS = (0.125, 0.35, 1.0)
# It is sampled for at most this many of the links; those between them lie on a line, too.
_SAMPLED_LINKS = 3
# How many layouts are predicted exactly in the end: with few ranks, and with many.
_FINALISTS = 12
_FINALISTS_OF_MANY = 4
# The number of exchanges of two ranks that a search tries, at 10 to 20 µs each. It is a number and
# not a time because the result must not depend on the machine.
_TRIES = 25_000
# With few ranks, as many times that number of pairs are enough.
_TRIES_PER_PAIR = 40
# How many random exchanges lead out of a local optimum.
_KICKS = 3
# The share of the mean in the objective: what is not the slowest matters once the slowest is gone.
_MEAN_SHARE = 1e-3


class Place(NamedTuple):
    """The position of a rank in a layout."""

    replica: int
    stage: int


@dataclass(frozen=True)
class Layout:
    """A grid of ranks: `ranks[replica][stage]`. Each rank stands in one place.

    The ranks of a stage, in the order of the replicas, are the ring of its all-reduce.

    Raises ValueError unless all replicas have as many stages, at least one, and ranks are integers
    from 0, none twice.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        try:
            ranks = tuple(tuple(row) for row in self.ranks)
        except TypeError:
            raise ValueError(
                f"ranks: expected a list of replicas, each a list of ranks, got {self.ranks!r}"
            ) from None
        if not ranks or not ranks[0]:
            raise ValueError("ranks: expected at least one replica of at least one stage")
        seen = set()
        for replica, row in enumerate(ranks):
            if len(row) != len(ranks[0]):
                raise ValueError(
                    f"ranks[{replica}]: expected {len(ranks[0])} stages as in the first replica, "
                    f"got {len(row)}"
                )
            for stage, rank in enumerate(row):
                where = f"ranks[{replica}][{stage}]"
                if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
                    raise ValueError(f"{where}: expected an integer, at least 0, got {rank!r}")
                if rank in seen:
                    raise ValueError(f"{where}: rank {rank} has a place already")
                seen.add(rank)
        object.__setattr__(self, "ranks", ranks)

    @classmethod
    def of(cls, num_replicas: int, num_stages: int) -> Layout:
        """Ranks in order: the stages of the first replica, then those of the second, ..."""
        for field, count in (("num_replicas", num_replicas), ("num_stages", num_stages)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{field}: expected an integer, at least 1, got {count!r}")
        return cls(
            tuple(
                tuple(range(replica * num_stages, (replica + 1) * num_stages))
                for replica in range(num_replicas)
            )
        )

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Reads the output of `to_json`. Raises ValueError."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"layout: not JSON: {error}") from None
        if not isinstance(found, dict) or set(found) != {"ranks"}:
            raise ValueError('layout: expected a JSON object with "ranks" and nothing else')
        return cls(found["ranks"])

    def to_json(self) -> str:
        """One line, such as {"ranks": [[0, 1], [2, 3]]}."""
        return json.dumps({"ranks": self.ranks})

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        return len(self.ranks[0])

    @property
    def world(self) -> tuple[int, ...]:
        """All ranks, replica by replica."""
        return tuple(itertools.chain.from_iterable(self.ranks))

    def place(self, rank: int) -> Place:
        """The place of `rank`. Raises ValueError if it has none."""
        for replica, row in enumerate(self.ranks):
            if rank in row:
                return Place(replica, row.index(rank))
        raise ValueError(f"rank {rank} has no place in the layout {self.to_json()}")

    def rank_at(self, place: Place) -> int:
        """The rank that stands at `place`."""
        return self.ranks[place.replica][place.stage]

    def data_group(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold `stage`, by replica: they reduce its gradients."""
        return tuple(row[stage] for row in self.ranks)

    def moved(self, new: Layout) -> tuple[int, ...]:
        """The ranks that have another place in `new`, in the order of the new places.

        Raises ValueError unless both are of the same shape and the same ranks.
        """
        if (new.num_replicas, new.num_stages) != (self.num_replicas, self.num_stages):
            raise ValueError(
                f"expected {self.num_replicas} x {self.num_stages} places as before, got "
                f"{new.num_replicas} x {new.num_stages}"
            )
        if set(new.world) != set(self.world):
            raise ValueError(
                f"expected the same ranks as before, got others: "
                f"{sorted(set(new.world) ^ set(self.world))}"
            )
        return tuple(a for a, b in zip(new.world, self.world, strict=True) if a != b)


def _matrix(
    field: str, value: Matrix, size: int | None, zero: bool
) -> tuple[tuple[float, ...], ...]:
    """`value` as tuples; the diagonal is not looked at. Raises ValueError."""
    size = len(value) if size is None else size
    if len(value) != size:
        raise ValueError(f"{field}: expected {size} rows, one per rank, got {len(value)}")
    rows = []
    for source, row in enumerate(value):
        if len(row) != size:
            raise ValueError(f"{field}[{source}]: expected {size} numbers, got {len(row)}")
        numbers = []
        for destination, number in enumerate(row):
            if source == destination:
                numbers.append(0.0)
                continue
            large_enough = number >= 0 if zero else number > 0
            if not (large_enough and number < math.inf):
                raise ValueError(
                    f"{field}[{source}][{destination}]: expected a finite number, "
                    f"{'not negative' if zero else 'more than 0'}, got {number!r}"
                )
            numbers.append(float(number))
        rows.append(tuple(numbers))
    return tuple(rows)


@dataclass(frozen=True)
class LayoutCosts:
    """The costs that determine the time of an iteration with any layout.

    Attributes:
        pipeline: operation times of each stage, on whatever rank; its delays are not used.
        num_microbatches: of each replica.
        delays_s: from the start of a small message to its arrival, by [from][to]. The diagonal is
            not used.
        bandwidths_bytes_per_s: by [from][to], or None if the size of messages does not matter.
        activation_bytes: of each message between stages, in both directions.
        gradient_bytes: the size of the all-reduce of a stage: one number, or one per stage.
        policy: the schedule of each pipeline, a name of `pipelining.POLICIES`; "best" is not
            allowed, since its result depends on the time it takes. "paper" adapts to delays, the
            classic ones do not.
        activation_limit, weight_limit: see `pipelining.plan_schedule`.

    Raises ValueError, which names the field.
    """

    pipeline: PipelineCosts
    num_microbatches: int
    delays_s: Matrix
    bandwidths_bytes_per_s: Matrix | None = None
    activation_bytes: float = 0.0
    gradient_bytes: float | Sequence[float] = 0.0
    policy: str = "paper"
    activation_limit: int | None = None
    weight_limit: int | None = None

    def __post_init__(self) -> None:
        delays_s = _matrix("delays_s", self.delays_s, None, zero=True)
        object.__setattr__(self, "delays_s", delays_s)
        if self.bandwidths_bytes_per_s is not None:
            bandwidths = _matrix(
                "bandwidths_bytes_per_s", self.bandwidths_bytes_per_s, len(delays_s), zero=False
            )
            object.__setattr__(self, "bandwidths_bytes_per_s", bandwidths)
        stages = self.pipeline.num_stages
        gradients = per_place("gradient_bytes", self.gradient_bytes, stages, "stage")
        object.__setattr__(self, "gradient_bytes", gradients)
        (activation,) = per_place("activation_bytes", self.activation_bytes, 1, "message")
        object.__setattr__(self, "activation_bytes", activation)
        allowed = [policy for policy in POLICIES if policy != "best"]
        if self.policy not in allowed:
            raise ValueError(f"policy: expected one of {', '.join(allowed)}, got {self.policy!r}")
        count = self.num_microbatches
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"num_microbatches: expected an integer, at least 1, got {count!r}")


@dataclass(frozen=True)
class Prediction:
    """How long an iteration takes, in seconds.

    Attributes:
        pipeline_s: of each replica: its schedule under the delays of its links, replayed.
        all_reduce_s: of each stage: the ring over its replicas.

    The all-reduces begin when the slowest pipeline has ended, so the prediction is on the safe
    side: stages that end earlier, or reduce while they compute, need less.
    """

    pipeline_s: tuple[float, ...]
    all_reduce_s: tuple[float, ...]

    @property
    def iteration_s(self) -> float:
        return max(self.pipeline_s) + max(self.all_reduce_s)


@dataclass(frozen=True)
class LayoutProposal:
    """The layout to go on with, and what it is worth.

    Attributes:
        layout: the present one if no other is worth its moves.
        moved: ranks that take another place; empty if it is the present one.
        before: prediction for the present layout.
        after: prediction for `layout`.
        exact: all layouts were looked at, by the sum of what each link costs alone.
    """

    layout: Layout
    moved: tuple[int, ...]
    before: Prediction
    after: Prediction
    exact: bool

    @property
    def speedup(self) -> float:
        """How many times shorter the iteration becomes; 1 if nothing changes."""
        return self.before.iteration_s / self.after.iteration_s if self.moved else 1.0

    def __str__(self) -> str:
        now_ms, then_ms = self.before.iteration_s * 1e3, self.after.iteration_s * 1e3
        if not self.moved:
            return f"no other layout is worth its moves: {now_ms:.4g} ms per iteration"
        return (
            f"{len(self.moved)} of {len(self.layout.world)} ranks change places: {now_ms:.4g} -> "
            f"{then_ms:.4g} ms per iteration ({self.speedup:.2f} times as fast); "
            f"{self.layout.to_json()}"
        )


class _Model:
    """Times of one problem. Ranks are counted by their present places, whatever they are called."""

    def __init__(self, layout: Layout, costs: LayoutCosts) -> None:
        if layout.num_stages != costs.pipeline.num_stages:
            raise ValueError(
                f"layout: expected {costs.pipeline.num_stages} stages as in the costs, got "
                f"{layout.num_stages}"
            )
        if max(layout.world) >= len(costs.delays_s):
            raise ValueError(
                f"layout: rank {max(layout.world)} has no row in delays_s, which has "
                f"{len(costs.delays_s)}"
            )
        self.layout = layout
        self.costs = costs
        self.replicas = layout.num_replicas
        self.stages = layout.num_stages
        index = np.ix_(layout.world, layout.world)
        delays_s: _Floats = np.array(costs.delays_s)[index]
        assert isinstance(costs.gradient_bytes, tuple)
        if costs.bandwidths_bytes_per_s is None:
            per_byte_s = np.zeros_like(delays_s)
        else:
            bandwidths: _Floats = np.array(costs.bandwidths_bytes_per_s)
            np.fill_diagonal(bandwidths, math.inf)
            per_byte_s = 1 / bandwidths[index]
        # From the end of an operation to the arrival of what it sends.
        self.message_s: _Floats = delays_s + costs.activation_bytes * per_byte_s
        # The time of one stage's all-reduce if all links of the ring were like this one.
        # Ring: 2 (n - 1) rounds of 1/n of the bytes, each as slow as its slowest link.
        rounds = 2 * (self.replicas - 1)
        self.ring_s: list[_Floats] = [
            rounds * (delays_s + size / self.replicas * per_byte_s) for size in costs.gradient_bytes
        ]
        self._known: dict[tuple[float, ...], float] = {}

    def plan_s(self, forward_s: Sequence[float], backward_s: Sequence[float]) -> float:
        """The iteration time of one pipeline with these delays of its links."""
        key = (*forward_s, *backward_s)
        if key not in self._known:
            costs = replace(
                self.costs.pipeline,
                delay_forward_s=tuple(forward_s),
                delay_backward_s=tuple(backward_s),
            )
            self._known[key] = plan_schedule(
                costs,
                self.costs.num_microbatches,
                self.costs.activation_limit,
                self.costs.weight_limit,
                policy=self.costs.policy,
            ).iteration_s
        return self._known[key]

    def predict(self, grid: Sequence[Sequence[int]]) -> Prediction:
        """Exactly, for places given as indices."""
        pipeline_s = []
        for row in grid:
            pairs = list(itertools.pairwise(row))
            pipeline_s.append(
                self.plan_s(
                    [float(self.message_s[a, b]) for a, b in pairs],
                    [float(self.message_s[b, a]) for a, b in pairs],
                )
            )
        all_reduce_s = [0.0] * self.stages
        if self.replicas > 1:
            for stage in range(self.stages):
                ring = [row[stage] for row in grid]
                all_reduce_s[stage] = max(
                    float(self.ring_s[stage][a, b])
                    for a, b in zip(ring, ring[1:] + ring[:1], strict=True)
                )
        return Prediction(tuple(pipeline_s), tuple(all_reduce_s))

    def link_tables(self) -> tuple[float, list[_Floats]]:
        """(iteration time with usual delays, what each pipeline link adds, by [from][to]).

        The usual delay is the median. Both directions count by their mean, as in Equation 1.
        """
        links = self.stages - 1
        count = len(self.message_s)
        mean_s = (self.message_s + self.message_s.T) / 2
        others = mean_s[~np.eye(count, dtype=bool)]
        if not links:
            return self.plan_s([], []), []
        low, usual, high = float(others.min()), float(np.median(others)), float(others.max())
        points = [usual + share * (high - usual) for share in _SAMPLED_DELAYS]
        points = sorted({low, usual, *points})
        base_s = self.plan_s([usual] * links, [usual] * links)
        wanted = min(_SAMPLED_LINKS, links)
        sampled = sorted({round(k * (links - 1) / max(wanted - 1, 1)) for k in range(wanted)})
        lines = []
        for link in sampled:
            times = []
            for point in points:
                delays = [usual] * links
                delays[link] = point
                times.append(self.plan_s(delays, delays) - base_s)
            lines.append(times)
        tables = []
        for link in range(links):
            line = [
                float(np.interp(link, sampled, [each[k] for each in lines]))
                for k in range(len(points))
            ]
            tables.append(np.interp(mean_s, points, line))
        return base_s, tables


class _Candidate(NamedTuple):
    moved: int
    objective_s: float
    grid: tuple[tuple[int, ...], ...]


def _all_layouts(
    model: _Model, base_s: float, links: list[_Floats], near_best: float
) -> list[_Candidate]:
    """The best of all layouts, near-best with fewer moves first, then the best."""
    replicas, stages = model.replicas, model.stages
    count = replicas * stages
    orders = np.array(list(itertools.permutations(range(count))), dtype=np.intp)
    grids = orders.reshape(-1, replicas, stages)
    pipeline_s = np.zeros(grids.shape[:2])
    for link, table in enumerate(links):
        pipeline_s += table[grids[:, :, link], grids[:, :, link + 1]]
    objective_s = base_s + pipeline_s.max(axis=1)
    if replicas > 1:
        following = np.roll(grids, -1, axis=1)
        ring_s = [
            model.ring_s[stage][grids[:, :, stage], following[:, :, stage]].max(axis=1)
            for stage in range(stages)
        ]
        objective_s = objective_s + np.max(ring_s, axis=0)
    moved = (orders != np.arange(count)).sum(axis=1)
    near = np.flatnonzero(objective_s <= objective_s.min() * (1 + near_best))
    by_moves = near[np.lexsort((objective_s[near], moved[near]))][:_FINALISTS]
    by_time = near[np.lexsort((moved[near], objective_s[near]))][:_FINALISTS]
    chosen = dict.fromkeys(int(k) for k in [*by_moves, *by_time])
    return [
        _Candidate(
            int(moved[k]), float(objective_s[k]), tuple(tuple(map(int, row)) for row in grids[k])
        )
        for k in chosen
    ]


class _LocalSearch:
    """Exchanges ranks of the slowest pipeline link or ring link with any other, while it helps."""

    def __init__(
        self, model: _Model, base_s: float, links: list[_Floats], near_best: float, seed: int
    ) -> None:
        self._replicas, self._stages = model.replicas, model.stages
        self._base_s = base_s
        self._links: list[list[list[float]]] = [table.tolist() for table in links]
        self._rings: list[list[list[float]]] = [table.tolist() for table in model.ring_s]
        self._near_best = near_best
        self._random = random.Random(seed)
        self._tries_left = min(_TRIES, _TRIES_PER_PAIR * len(model.message_s) ** 2)
        self._places = [(r, s) for r in range(self._replicas) for s in range(self._stages)]
        # The best layout seen with each number of moved ranks.
        self.seen: dict[int, _Candidate] = {}

    def _pipeline_s(self, row: Sequence[int]) -> float:
        total = self._base_s
        for link, table in enumerate(self._links):
            total += table[row[link]][row[link + 1]]
        return total

    def _ring_s(self, stage: int) -> float:
        if self._replicas == 1:
            return 0.0
        table = self._rings[stage]
        before = self._grid[-1][stage]
        slowest = 0.0
        for row in self._grid:
            rank = row[stage]
            if table[before][rank] > slowest:
                slowest = table[before][rank]
            before = rank
        return slowest

    def _start(self, grid: _Grid) -> None:
        self._grid = [list(row) for row in grid]
        self._pipelines_s = [self._pipeline_s(row) for row in self._grid]
        self._all_reduces_s = [self._ring_s(stage) for stage in range(self._stages)]
        self._note()

    def _objective_s(self) -> float:
        pipelines_s, all_reduces_s = self._pipelines_s, self._all_reduces_s
        mean_s = sum(pipelines_s) / self._replicas + sum(all_reduces_s) / self._stages
        return max(pipelines_s) + max(all_reduces_s) + _MEAN_SHARE * mean_s

    def _note(self) -> None:
        """Keeps the present layout if it is the best with as many moves."""
        moved = sum(
            rank != number for number, rank in enumerate(itertools.chain.from_iterable(self._grid))
        )
        objective_s = self._objective_s()
        known = self.seen.get(moved)
        if known is None or objective_s < known.objective_s:
            grid = tuple(tuple(row) for row in self._grid)
            self.seen[moved] = _Candidate(moved, objective_s, grid)

    def _swap(self, one: tuple[int, int], other: tuple[int, int]) -> None:
        grid = self._grid
        (r, s), (q, t) = one, other
        grid[r][s], grid[q][t] = grid[q][t], grid[r][s]
        self._pipelines_s[r] = self._pipeline_s(grid[r])
        if q != r:
            self._pipelines_s[q] = self._pipeline_s(grid[q])
        self._all_reduces_s[s] = self._ring_s(s)
        if t != s:
            self._all_reduces_s[t] = self._ring_s(t)

    def _hot(self) -> list[tuple[int, int]]:
        """The places at the slowest link of the slowest pipeline and of the slowest ring."""
        hot = []
        if self._links:
            replica = max(range(self._replicas), key=self._pipelines_s.__getitem__)
            row = self._grid[replica]
            link = max(range(len(self._links)), key=lambda k: self._links[k][row[k]][row[k + 1]])
            hot += [(replica, link), (replica, link + 1)]
        if self._replicas > 1:
            stage = max(range(self._stages), key=self._all_reduces_s.__getitem__)
            table = self._rings[stage]
            ring = [row[stage] for row in self._grid]
            replica = max(range(self._replicas), key=lambda k: table[ring[k - 1]][ring[k]])
            hot += [((replica - 1) % self._replicas, stage), (replica, stage)]
        return list(dict.fromkeys(hot))

    def _descend(self) -> None:
        while self._tries_left > 0:
            now_s = best_s = self._objective_s()
            best = None
            for one in self._hot():
                for other in self._places:
                    if one == other:
                        continue
                    self._tries_left -= 1
                    self._swap(one, other)
                    objective_s = self._objective_s()
                    self._swap(one, other)
                    if objective_s < best_s - 1e-9 * now_s:
                        best_s, best = objective_s, (one, other)
            if best is None:
                return
            self._swap(*best)
            self._note()

    def _take_back(self) -> None:
        """Sends ranks back to where they come from, while the layout stays near the best."""
        limit_s = min(each.objective_s for each in self.seen.values()) * (1 + self._near_best)
        changed = True
        while changed:
            changed = False
            for number, home in enumerate(self._places):
                where = next(
                    place for place in self._places if self._grid[place[0]][place[1]] == number
                )
                if where == home:
                    continue
                self._swap(where, home)
                if self._objective_s() <= limit_s:
                    changed = True
                    self._note()
                else:
                    self._swap(where, home)

    def run(self, grid: _Grid) -> list[_Candidate]:
        """The best and the near-best layouts with fewer moves, those with fewest first."""
        self._start(grid)
        self._descend()
        while self._tries_left > 0:
            best = min(self.seen.values(), key=lambda each: each.objective_s)
            self._start([list(row) for row in best.grid])
            for _ in range(_KICKS):
                self._swap(*self._random.sample(self._places, 2))
            self._descend()
        best = min(self.seen.values(), key=lambda each: each.objective_s)
        self._start([list(row) for row in best.grid])
        self._take_back()
        best_s = min(each.objective_s for each in self.seen.values())
        near = [
            each
            for each in self.seen.values()
            if each.objective_s <= best_s * (1 + self._near_best)
        ]
        by_time = sorted(near, key=lambda each: each.objective_s)
        half = _FINALISTS_OF_MANY // 2
        return list(dict.fromkeys([*sorted(near)[:half], *by_time[:half]]))


def predict(layout: Layout, costs: LayoutCosts) -> Prediction:
    """How long an iteration takes with `layout`. Raises ValueError if it does not fit the costs."""
    count = layout.num_stages
    grid = [list(range(r * count, (r + 1) * count)) for r in range(layout.num_replicas)]
    return _Model(layout, costs).predict(grid)


def propose_layout(
    layout: Layout,
    costs: LayoutCosts,
    *,
    margin: float = 0.05,
    near_best: float = 0.01,
    seed: int = 0,
    exact_ranks: int = _EXACT_RANKS,
) -> LayoutProposal:
    """The layout to go on with: another one only if it makes iterations shorter by `margin`.

    Args:
        layout: the present one.
        costs: its delays are those measured now, between all ranks.
        margin: by which part an iteration must become shorter, 0 to 1. Moving costs a pause and
            new process groups, and delays are known to a few percent.
        near_best: layouts with times that differ by less than this part count as equal, and the one
            with the fewest moves is taken. The default is smaller than the precision of measured
            delays.
        seed: of the local search.
        exact_ranks: up to this many ranks all layouts are looked at; more are searched by exchange
            of two ranks at a time. 9 take some 0.4 s, 10 some 4 s and 1 GB.

    The search takes the delay of each pipeline link to cost what it costs alone. The best that it
    finds, and what is near it with fewer moves, are then predicted exactly, and of these again the
    one with the fewest moves near the best is taken. The numbering of the ranks does not matter,
    nor does the number of ranks in `costs` that have no place.

    Raises ValueError if the arguments do not fit each other.
    """
    # Paper: PIPEMORPH §7.3, a slow data-parallel link becomes one between stages
    if not 0 <= margin < 1:
        raise ValueError(f"margin: expected 0 to 1, got {margin}")
    if not 0 <= near_best < math.inf:
        raise ValueError(f"near_best: expected a finite number, not negative, got {near_best}")
    model = _Model(layout, costs)
    count = len(layout.world)
    stages = layout.num_stages
    grid = [list(range(r * stages, (r + 1) * stages)) for r in range(layout.num_replicas)]
    before = model.predict(grid)
    exact = count <= exact_ranks
    stay = LayoutProposal(layout, (), before, before, exact)
    enough_s = before.iteration_s * (1 - margin)
    if count == 1 or _min_s(model) > enough_s:
        return stay
    base_s, links = model.link_tables()
    if exact:
        candidates = _all_layouts(model, base_s, links, near_best)
    else:
        candidates = _LocalSearch(model, base_s, links, near_best, seed).run(grid)
    judged = [(model.predict(each.grid), each) for each in candidates]
    best_s = min(prediction.iteration_s for prediction, _ in judged)
    limit_s = min(best_s * (1 + near_best), enough_s)
    good = [
        (each.moved, prediction.iteration_s, each.grid, prediction)
        for prediction, each in judged
        if prediction.iteration_s <= limit_s
        and prediction.iteration_s < before.iteration_s  # also with a margin of 0
        and each.moved
    ]
    if not good:
        return stay
    _, _, chosen, after = min(good, key=lambda each: each[:3])
    world = layout.world
    new = Layout(tuple(tuple(world[index] for index in row) for row in chosen))
    return LayoutProposal(new, layout.moved(new), before, after, exact)


def _min_s(model: _Model) -> float:
    """About the shortest iteration with the best links everywhere: if it is no gain, nothing is."""
    others = model.message_s[~np.eye(len(model.message_s), dtype=bool)]
    least = [float(others.min())] * (model.stages - 1) if others.size else []
    ring_s = 0.0
    if model.replicas > 1:
        apart = ~np.eye(len(model.message_s), dtype=bool)
        ring_s = max(float(table[apart].min()) for table in model.ring_s)
    return model.plan_s(least, least) + ring_s
