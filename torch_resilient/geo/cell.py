"""A cell: pipelines over several sites that share the links between them.

`Cell` is the problem and `CellPlan` a schedule of it. `cell_policies.plan_cell` finds schedules;
`cell_replay` checks them, and times any orders.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

SHARINGS = ("temporal", "spatial")
DIRECTIONS = ("forward", "backward")
# Rounding errors of the iteration time, as a part of it.
ROUNDING = 1e-9


class Transfer(NamedTuple):
    """A result on its way between sites, from stage `hop` to the next or back.

    Attributes:
        direction: a name of DIRECTIONS: activations go forward, gradients backward.
        start_ms, end_ms: it holds the link from start to end, and arrives a latency later.
        nodes: how many nodes of the site send it together.
    """

    pipe: int
    hop: int
    direction: str
    microbatch: int
    start_ms: float
    end_ms: float
    nodes: int


@dataclass(frozen=True)
class Cell:
    """Pipelines over the same sites; times in milliseconds. Use `cell_input.read_cell` to check.

    Attributes:
        pipelines, microbatches: how many; microbatches of each pipeline.
        sites: the site of each stage. Stages of a site are adjacent.
        forward_ms, recompute_ms, backward_ms, weight_ms: by stage. The last stage recomputes
            nothing, and without `split` the weight backward is part of the backward.
        split: whether the weight backward W is an operation of its own.
        hop_ms: by hop and direction (activation, gradient): the time that one node needs for a
            transfer between sites; the time to arrive within a site.
        latency_ms: by hop and direction, between sites. It does not hold the link.
        sharing: "temporal", where all nodes send for one pipeline after the other, or "spatial",
            where each pipeline has its own node.
        relays: nodes of a transfer with temporal sharing.
        caps: by stage, the maximum number of microbatches between F and B; F and W with `split`.
    """

    pipelines: int
    microbatches: int
    sites: tuple[str, ...]
    forward_ms: tuple[float, ...]
    recompute_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_ms: tuple[float, ...]
    split: bool
    hop_ms: tuple[tuple[float, float], ...]
    latency_ms: tuple[tuple[float, float], ...]
    sharing: str
    relays: int
    caps: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.sites)

    @property
    def crosses(self) -> tuple[bool, ...]:
        """By hop, whether it leads to another site."""
        return tuple(a != b for a, b in itertools.pairwise(self.sites))

    @property
    def nodes(self) -> int:
        """The nodes that each transfer between sites uses."""
        return self.relays if self.sharing == "temporal" else 1

    @property
    def max_nodes(self) -> int:
        """The nodes that may send over a hop in one direction at a time."""
        return max(self.relays, self.pipelines) if self.sharing == "temporal" else self.pipelines

    @property
    def kinds(self) -> str:
        """The kinds of operations of all stages but the last, which has no R."""
        return "FRBW" if self.split else "FRB"

    @property
    def operations(self) -> int:
        """Of one iteration."""
        count = len(self.kinds) * self.stages - 1
        return self.pipelines * self.microbatches * count

    def duration_ms(self, kind: str, stage: int) -> float:
        times = {
            "F": self.forward_ms,
            "R": self.recompute_ms,
            "B": self.backward_ms,
            "W": self.weight_ms,
        }
        return times[kind][stage]

    def arrival_ms(self, hop: int, direction: int) -> float:
        """The minimum time from the end of an operation to the arrival of its result."""
        if not self.crosses[hop]:
            return self.hop_ms[hop][direction]
        return self.hop_ms[hop][direction] / self.nodes + self.latency_ms[hop][direction]


@dataclass(frozen=True)
class CellPlan:
    """A schedule of a cell.

    Attributes:
        chosen: the rules that made it.
        orders: of each pipeline and stage, the operations, such as "F0".
        starts_ms: when each starts.
        transfers: between sites, by start.
        lower_bound_ms: no schedule is shorter.
        utilisation: the part of the iteration that GPUs compute, 0 to 1.
    """

    chosen: str
    orders: list[list[list[str]]]
    starts_ms: list[list[list[float]]]
    transfers: list[Transfer]
    iteration_ms: float
    lower_bound_ms: float
    utilisation: float


class _Path(NamedTuple):
    """Minimum times of a microbatch that has all GPUs and links for itself."""

    head_ms: list[float]  # by stage: until its first F can start
    turn_ms: list[float]  # from the start of F to the end of B on this stage
    tail_ms: list[float]  # from the end of B on this stage to that on the first
    end_ms: list[float]  # the same to the end of the iteration, which includes W


def _paths(cell: Cell) -> _Path:
    stages = cell.stages
    forward, backward, weight = cell.forward_ms, cell.backward_ms, cell.weight_ms
    head, tail, end, turn = [0.0], [0.0], [weight[0]], [0.0] * stages
    for s in range(1, stages):
        head.append(head[-1] + forward[s - 1] + cell.arrival_ms(s - 1, 0))
        step = cell.arrival_ms(s - 1, 1) + backward[s - 1]
        tail.append(tail[-1] + step)
        end.append(max(weight[s], end[-1] + step))
    turn[-1] = forward[-1] + backward[-1]
    for s in reversed(range(stages - 1)):
        there = forward[s] + cell.arrival_ms(s, 0)
        turn[s] = there + turn[s + 1] + cell.arrival_ms(s, 1) + backward[s]
    return _Path(head, turn, tail, end)


def lower_bound_ms(cell: Cell) -> float:
    """A time that no schedule is shorter than.

    It is the largest of these. A stage starts after the forwards before it, has its operations to
    run, and after its last B the gradient returns to the first stage; it also has all its B to run
    after the first round trip, and with K microbatches at most, each K of them take a round trip. A
    hop starts with the first result, has the transfers of all pipelines to carry, and the last one
    continues to the end. The part about limits holds for orders in which microbatches take turns.
    """
    count, path = cell.microbatches, _paths(cell)
    bound = 0.0
    for s in range(cell.stages):
        once = cell.forward_ms[s] + cell.backward_ms[s]
        if s + 1 < cell.stages:
            once += cell.recompute_ms[s]
        weight = cell.weight_ms[s]
        first_b_ms = path.head_ms[s] + path.turn_ms[s] - cell.backward_ms[s]
        held_ms = path.turn_ms[s] + (weight if cell.split else 0.0)
        groups = math.ceil(count / cell.caps[s])
        bound = max(
            bound,
            path.head_ms[s] + count * (once + weight),
            path.head_ms[s] + count * once + path.end_ms[s],
            first_b_ms + count * cell.backward_ms[s] + path.end_ms[s],
            path.head_ms[s] + groups * held_ms + path.end_ms[s] - weight,
        )
    # With spatial sharing, each pipeline's node carries its own transfers only.
    for hop in (hop for hop, crosses in enumerate(cell.crosses) if crosses):
        there, back = (
            count * cell.pipelines * cell.hop_ms[hop][direction] / cell.max_nodes
            + cell.latency_ms[hop][direction]
            for direction in range(2)
        )
        sent_ms = path.head_ms[hop] + cell.forward_ms[hop]
        rest_ms = path.turn_ms[hop + 1] + path.tail_ms[hop + 1]
        bound = max(bound, sent_ms + there + rest_ms)
        first_ms = path.head_ms[hop + 1] + path.turn_ms[hop + 1]
        rest_ms = cell.backward_ms[hop] + path.end_ms[hop]
        bound = max(bound, first_ms + back + rest_ms)
    return bound


def plan_of(
    cell: Cell,
    chosen: str,
    orders: list[list[list[str]]],
    starts_ms: list[list[list[float]]],
    transfers: list[Transfer],
    iteration_ms: float,
) -> CellPlan:
    """The plan with these orders and times, with its bound and its utilisation."""
    stages = range(cell.stages)
    each_ms = sum(cell.duration_ms(kind, s) for s in stages for kind in cell.kinds)
    each_ms -= cell.recompute_ms[-1]
    room_ms = cell.stages * iteration_ms
    return CellPlan(
        chosen,
        orders,
        starts_ms,
        transfers,
        iteration_ms,
        # Rounding may lift the bound above the time: the two are different sums.
        min(lower_bound_ms(cell), iteration_ms),
        cell.microbatches * each_ms / room_ms if room_ms > 0 else 0.0,
    )
