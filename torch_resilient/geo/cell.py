"""A cell: pipelines over several sites that share the links between them.

`Cell` is the problem, `plan_cell` finds a schedule, `faults_of` checks one without knowing how it
was made, and `replay` times any orders.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch_resilient.geo import cell_rules
from torch_resilient.geo.cell_rules import Rules

if TYPE_CHECKING:
    from torch_resilient._planning import schedule_cell, time_cell
else:
    try:
        from torch_resilient._planning import schedule_cell, time_cell
    except ImportError:  # a source tree that has not been built

        def schedule_cell(cell: Cell, rules: Rules) -> tuple:
            found = cell_rules.schedule(cell, rules)
            return found.kinds, found.starts_ms, found.sent, found.iteration_ms

        def time_cell(cell: Cell, rules: Rules) -> float:
            return cell_rules.schedule(cell, rules).iteration_ms


_T = TypeVar("_T")

POLICIES = ("best", "paper", "varuna", "1f1b", "gpipe")
SHARINGS = ("temporal", "spatial")
DIRECTIONS = ("forward", "backward")

# `best` counts its planning time in simulated operations: the result then does not depend on the
# machine. A processor of 2025 simulates about twice as many in a millisecond.
_OPERATIONS_PER_MS = 5000
DEFAULT_BUDGET_MS = 15.0
# `faults_of` allows for rounding: this part of the iteration time.
_ROUNDING = 1e-9


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


def _quotas(cell: Cell, factor: float) -> tuple[int, ...]:
    """By stage, `factor` times the number of stages from it to the end, within the limits."""
    quotas: list[int] = []
    most = cell.microbatches
    for s in range(cell.stages):
        # A stage that waited for more than the one before it gives would wait forever.
        most = max(1, min(most, cell.caps[s], math.ceil(factor * (cell.stages - s))))
        quotas.append(most)
    return tuple(quotas)


def _rules_of(cell: Cell, policy: str) -> Rules:
    spatial, every = cell.sharing == "spatial", cell.microbatches
    if policy == "paper":
        # Paper: ATLAS §4.4, rules 1 to 4: one pipeline after the other, in its LocalDPRank; memory
        # limits; computation only if its transfer can follow; backward before forward.
        return Rules(turn=every, reserve=True, spatial=spatial)
    if policy == "varuna":
        return Rules("BRFW", turn=0, spatial=spatial)
    if policy == "1f1b":
        quotas = _quotas(cell, 1)
        return Rules("WBRF", turn=0, spatial=spatial, warmup=quotas, alternate=True)
    assert policy == "gpipe"
    if min(cell.caps) < every:
        raise ValueError(
            f"policy: gpipe holds all {every} microbatches between F and B, more than cap allows"
        )
    quotas = (every,) * cell.stages
    return Rules("WBRF", turn=0, spatial=spatial, warmup=quotas, alternate=True)


def _portfolio(cell: Cell) -> Iterator[tuple[str, Rules]]:
    """The rules that `best` tries, with their names; those that help most often come first."""
    every = cell.microbatches
    yield "microbatch-major", Rules()
    yield "paper", _rules_of(cell, "paper")
    found = [
        ("early R", Rules(early=True)),
        ("warm-up 1.5, F first", Rules("FBRW", warmup=_quotas(cell, 1.5))),
        ("own nodes, R first, early R", Rules("BRFW", turn=0, spatial=True, early=True)),
        ("warm-up 1, F first, early R", Rules("FBRW", early=True, warmup=_quotas(cell, 1))),
        ("warm-up 3, F first", Rules("FBRW", warmup=_quotas(cell, 3))),
        ("own nodes", Rules(turn=0, spatial=True)),
        ("in order of arrival, R first, reserved", Rules("BRFW", turn=0, reserve=True)),
        ("warm-up 2, F first, early R", Rules("FBRW", early=True, warmup=_quotas(cell, 2))),
        ("paper, early R", replace(_rules_of(cell, "paper"), early=True)),
        ("in order of arrival, F first, reserved", Rules("FBRW", turn=0, reserve=True)),
        ("turns of 4, F first, early R", Rules("FBRW", turn=4, early=True)),
        ("varuna", _rules_of(cell, "varuna")),
        ("1f1b", _rules_of(cell, "1f1b")),
    ]
    found += [
        (f"warm-up {factor:g}, early R", Rules(early=True, warmup=_quotas(cell, factor)))
        for factor in (3, 1, 2, 1.5)
    ]
    found += [
        (
            f"{priority}, turns of {turn or 1}{', reserved' * reserve}{', early R' * early}",
            Rules(priority, turn=turn, reserve=reserve, early=early),
        )
        for priority in ("BFRW", "BRFW", "FBRW", "BWRF")
        for turn in dict.fromkeys((1, 0, 2, 4, every))
        for reserve in (False, True)
        for early in (False, True)
        if cell.split or priority != "BWRF"
    ]
    found += [
        (f"{priority}, warm-up {factor:g}", Rules(priority, warmup=_quotas(cell, factor)))
        for priority in ("BFRW", "BRFW", "FBRW")
        for factor in (1, 1.25, 1.5, 2, 3, 4)
    ]
    seen = {Rules(), _rules_of(cell, "paper")}
    for name, rules in found:
        if cell.sharing == "spatial":
            rules = replace(rules, spatial=True, turn=0)
        if rules not in seen:
            seen.add(rules)
            yield name, rules


def _best_rules(cell: Cell, budget_ms: float, bound_ms: float) -> tuple[str, Rules]:
    """The best of the portfolio's first two rules, and of as many others as the budget allows."""
    spatial = cell.sharing == "spatial"
    left = budget_ms * _OPERATIONS_PER_MS
    best: tuple[float, str, Rules] | None = None
    for number, (name, rules) in enumerate(_portfolio(cell)):
        if number >= 2 and left < cell.operations:
            break
        rules = replace(rules, spatial=True) if spatial else rules
        time_ms = time_cell(cell, rules)
        left -= cell.operations
        if best is None or time_ms < best[0]:
            best = time_ms, name, rules
        if best[0] <= bound_ms * (1 + _ROUNDING) and number >= 1:
            break
    assert best is not None
    return best[1], best[2]


def _alone(cell: Cell) -> Cell:
    """The cell itself, or one pipeline of it where pipelines do not meet: all do the same then."""
    if cell.sharing == "spatial" or not any(cell.crosses):
        return replace(cell, pipelines=1)
    return cell


def _choose(cell: Cell, policy: str, budget_ms: float) -> tuple[str, Rules]:
    if policy == "best":
        return _best_rules(cell, budget_ms, lower_bound_ms(cell))
    return policy, _rules_of(cell, policy)


def cell_time_ms(cell: Cell, policy: str = "best", budget_ms: float = DEFAULT_BUDGET_MS) -> float:
    """The iteration time of `plan_cell`, found sooner. Raises ValueError as that does."""
    alone = _alone(cell)
    return time_cell(alone, _choose(alone, policy, budget_ms)[1])


def plan_cell(cell: Cell, policy: str = "best", budget_ms: float = DEFAULT_BUDGET_MS) -> CellPlan:
    """A schedule of the cell.

    Args:
        policy: a name of POLICIES. "paper" is ATLAS §4.4 literally; "best" is the best of "paper"
            and many other rules, and never longer than "paper".
        budget_ms: about the time that "best" takes. The result depends on the budget, not on
            the machine.

    Raises ValueError if the policy cannot keep to the limits.
    """
    alone = _alone(cell)
    name, rules = _choose(alone, policy, budget_ms)
    kinds, starts_ms, sent, iteration_ms = schedule_cell(alone, rules)
    copies = cell.pipelines // alone.pipelines
    nodes = 1 if rules.spatial else cell.nodes
    transfers = [
        Transfer(pipe + copy, hop, DIRECTIONS[direction], microbatch, start_ms, end_ms, nodes)
        for pipe, hop, direction, microbatch, start_ms, end_ms in sent
        for copy in range(copies)
    ]
    return _plan_of(
        cell,
        name,
        _by_pipe(cell, [_names(each) for each in kinds] * copies),
        _by_pipe(cell, list(starts_ms) * copies),
        transfers,
        iteration_ms,
    )


def _names(kinds: bytes) -> list[str]:
    counts = [0] * len(cell_rules.KINDS)
    order = []
    for kind in kinds:
        order.append(f"{cell_rules.KINDS[kind]}{counts[kind]}")
        counts[kind] += 1
    return order


def _by_pipe(cell: Cell, gpus: Sequence[_T]) -> list[list[_T]]:
    return [
        list(gpus[pipe * cell.stages : (pipe + 1) * cell.stages]) for pipe in range(cell.pipelines)
    ]


def _plan_of(
    cell: Cell,
    chosen: str,
    orders: list[list[list[str]]],
    starts_ms: list[list[list[float]]],
    transfers: list[Transfer],
    iteration_ms: float,
) -> CellPlan:
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


class _Timing:
    """For `replay`: operations start when their inputs arrive, and links serve transfers by the
    time at which they are ready, or in a given sequence."""

    def __init__(
        self, cell: Cell, orders: Sequence[Sequence[Sequence[str]]], served: Sequence[Transfer]
    ) -> None:
        self._cell = cell
        self._orders = orders
        pipes = range(cell.pipelines)
        self.starts_ms: list[list[list[float]]] = [[[] for _ in cell.sites] for _ in pipes]
        self.transfers: list[Transfer] = []
        self._free_ms = [[0.0] * cell.stages for _ in pipes]
        # (kind, pipe, stage, microbatch): when the input of this operation arrives.
        self._arrivals_ms: dict[tuple[str, int, int, int], float] = {}
        # (when ready, microbatch, pipe, hop, direction)
        self._ready: list[tuple[float, int, int, int, int]] = []
        # By hop, direction and, with spatial sharing, pipeline: when each server is free, the last
        # start, the transfers that are ready, and the sequence to keep.
        self._servers_ms: dict[tuple[int, int, int], list[float]] = {}
        self._last_ms: dict[tuple[int, int, int], float] = {}
        self._waiting: dict[tuple[int, int, int], dict[tuple[int, int], float]] = {}
        self._sequence: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for each in served:
            link = self._link(each.pipe, each.hop, DIRECTIONS.index(each.direction))
            self._sequence.setdefault(link, []).append((each.pipe, each.microbatch))

    def _link(self, pipe: int, hop: int, direction: int) -> tuple[int, int, int]:
        return hop, direction, pipe if self._cell.sharing == "spatial" else 0

    def _advance(self, pipe: int, stage: int) -> None:
        """Starts the next operations of this GPU whose inputs are known, then those that follow."""
        cell, order = self._cell, self._orders[pipe][stage]
        starts_ms = self.starts_ms[pipe][stage]
        while len(starts_ms) < len(order):
            operation = order[len(starts_ms)]
            kind, microbatch = operation[0], int(operation[1:])
            needs = kind == "F" or (kind == "B" and stage + 1 < cell.stages)
            input_ms = 0.0
            if needs and (kind != "F" or stage > 0):
                place = (kind, pipe, stage, microbatch)
                if place not in self._arrivals_ms:
                    return
                input_ms = self._arrivals_ms[place]
            start_ms = max(self._free_ms[pipe][stage], input_ms)
            starts_ms.append(start_ms)
            end_ms = start_ms + cell.duration_ms(kind, stage)
            self._free_ms[pipe][stage] = end_ms
            if kind == "F" and stage + 1 < cell.stages:
                self._result(pipe, stage, 0, microbatch, end_ms)
            elif kind == "B" and stage > 0:
                self._result(pipe, stage - 1, 1, microbatch, end_ms)

    def _result(self, pipe: int, hop: int, direction: int, microbatch: int, end_ms: float) -> None:
        if self._cell.crosses[hop]:
            heapq.heappush(self._ready, (end_ms, microbatch, pipe, hop, direction))
        else:
            arrival_ms = end_ms + self._cell.hop_ms[hop][direction]
            self._arrive(pipe, hop, direction, microbatch, arrival_ms)

    def _arrive(
        self, pipe: int, hop: int, direction: int, microbatch: int, arrival_ms: float
    ) -> None:
        stage = hop + 1 if direction == 0 else hop
        self._arrivals_ms["FB"[direction], pipe, stage, microbatch] = arrival_ms
        self._advance(pipe, stage)

    def _serve(self, link: tuple[int, int, int], pipe: int, microbatch: int) -> None:
        cell, (hop, direction, _) = self._cell, link
        at_a_time = 1 if cell.sharing == "spatial" else cell.max_nodes // cell.nodes
        servers_ms = self._servers_ms.setdefault(link, [0.0] * at_a_time)
        ready_ms = self._waiting[link].pop((pipe, microbatch))
        free_ms = min(servers_ms)
        start_ms = max(free_ms, ready_ms, self._last_ms.get(link, 0.0))
        end_ms = start_ms + cell.hop_ms[hop][direction] / cell.nodes
        servers_ms[servers_ms.index(free_ms)] = end_ms
        self._last_ms[link] = start_ms
        self.transfers.append(
            Transfer(pipe, hop, DIRECTIONS[direction], microbatch, start_ms, end_ms, cell.nodes)
        )
        arrival_ms = end_ms + cell.latency_ms[hop][direction]
        self._arrive(pipe, hop, direction, microbatch, arrival_ms)

    def run(self) -> None:
        for pipe in range(self._cell.pipelines):
            self._advance(pipe, 0)
        while self._ready:
            ready_ms, microbatch, pipe, hop, direction = heapq.heappop(self._ready)
            link = self._link(pipe, hop, direction)
            waiting = self._waiting.setdefault(link, {})
            waiting[pipe, microbatch] = ready_ms
            if link not in self._sequence:
                self._serve(link, pipe, microbatch)
                continue
            sequence = self._sequence[link]
            while sequence and sequence[0] in waiting:
                self._serve(link, *sequence.pop(0))


def replay(
    cell: Cell,
    orders: Sequence[Sequence[Sequence[str]]],
    served: Sequence[Transfer] = (),
) -> CellPlan:
    """The times of any orders: every operation and transfer starts as early as possible.

    Args:
        orders: by pipeline and stage, the operations, such as "F0".
        served: the sequence of transfers on each hop; a hop without any serves them as they come.

    Raises ValueError if the orders are incomplete or wait for each other.
    """
    _require_complete(cell, orders)
    timing = _Timing(cell, orders, served)
    timing.run()
    for pipe, stage in itertools.product(range(cell.pipelines), range(cell.stages)):
        done = len(timing.starts_ms[pipe][stage])
        if done < len(orders[pipe][stage]):
            raise ValueError(
                f"orders[{pipe}][{stage}]: {orders[pipe][stage][done]} waits for ever: "
                "the stages wait for each other"
            )
    iteration_ms = max(
        starts_ms[-1] + cell.duration_ms(order[-1][0], stage)
        for pipe, row in enumerate(orders)
        for stage, (order, starts_ms) in enumerate(zip(row, timing.starts_ms[pipe], strict=True))
    )
    return _plan_of(
        cell,
        "replay",
        [[list(order) for order in row] for row in orders],
        timing.starts_ms,
        timing.transfers,
        iteration_ms,
    )


def _require_complete(cell: Cell, orders: Sequence[Sequence[Sequence[str]]]) -> None:
    """Raises ValueError unless each stage has all its operations, in an order that it can run."""
    if len(orders) != cell.pipelines or any(len(row) != cell.stages for row in orders):
        raise ValueError(f"orders: expected {cell.pipelines} pipelines of {cell.stages} stages")
    for pipe, stage in itertools.product(range(cell.pipelines), range(cell.stages)):
        kinds = [kind for kind in cell.kinds if kind != "R" or stage + 1 < cell.stages]
        done: set[str] = set()
        where = f"orders[{pipe}][{stage}]"
        for operation in orders[pipe][stage]:
            place = kinds.index(operation[0]) if operation[0] in kinds else -1
            before = kinds[place - 1] + operation[1:] if place > 0 else ""
            known = operation[1:].isdecimal() and int(operation[1:]) < cell.microbatches
            if place < 0 or not known or operation in done:
                raise ValueError(f"{where}: {operation} is unknown or there twice")
            if before and before not in done:
                raise ValueError(f"{where}: {operation} comes before {before}")
            done.add(operation)
        if len(done) < len(kinds) * cell.microbatches:
            raise ValueError(f"{where}: expected {len(kinds) * cell.microbatches} operations")


def faults_of(cell: Cell, plan: CellPlan) -> list[str]:
    """The faults of a schedule; empty if it can be run as it is.

    The check is independent of the rules. It reads the starts and transfers themselves: complete
    orders, one operation of a GPU at a time, each after its inputs, limits of memory, transfers
    that take long enough, and no more nodes in use than there are.
    """
    try:
        _require_complete(cell, plan.orders)
    except ValueError as error:
        return [str(error)]
    slack_ms = _ROUNDING * plan.iteration_ms
    sent = {(each.pipe, each.hop, each.direction, each.microbatch): each for each in plan.transfers}
    faults = [*_link_faults(cell, plan, sent, slack_ms)]
    for pipe in range(cell.pipelines):
        spans = [
            {
                operation: (start_ms, start_ms + cell.duration_ms(operation[0], stage))
                for operation, start_ms in zip(
                    plan.orders[pipe][stage], plan.starts_ms[pipe][stage], strict=True
                )
            }
            for stage in range(cell.stages)
        ]
        for stage, own in enumerate(spans):
            where = f"orders[{pipe}][{stage}]"
            faults += [f"{where}: {each}" for each in _stage_faults(cell, stage, own, slack_ms)]
            if max(end_ms for _, end_ms in own.values()) > plan.iteration_ms + slack_ms:
                faults.append(f"{where}: ends after the iteration")
        for hop, direction in itertools.product(range(cell.stages - 1), range(2)):
            source, target = (hop, hop + 1) if direction == 0 else (hop + 1, hop)
            for microbatch in range(cell.microbatches):
                operation = f"{'FB'[direction]}{microbatch}"
                end_ms = spans[source][operation][1]
                arrival_ms = end_ms + cell.hop_ms[hop][direction]
                if cell.crosses[hop]:
                    transfer = sent.get((pipe, hop, DIRECTIONS[direction], microbatch))
                    if transfer is None:
                        faults.append(f"orders[{pipe}][{source}]: {operation} is not sent")
                        continue
                    if transfer.start_ms < end_ms - slack_ms:
                        faults.append(f"{transfer}: starts before {operation} has ended")
                    arrival_ms = transfer.end_ms + cell.latency_ms[hop][direction]
                if spans[target][operation][0] < arrival_ms - slack_ms:
                    faults.append(f"orders[{pipe}][{target}]: {operation} starts without its input")
    return faults


def _stage_faults(
    cell: Cell, stage: int, spans: dict[str, tuple[float, float]], slack_ms: float
) -> Iterator[str]:
    """Operations that overlap, and limits that are exceeded, on one GPU."""
    operations = list(spans.items())
    for (before, (_, end_ms)), (after, (start_ms, _)) in itertools.pairwise(operations):
        if start_ms < end_ms - slack_ms:
            yield f"{after} starts before {before} has ended"
    held, freed = 0, "W" if cell.split else "B"
    for operation, (start_ms, _) in operations:
        held += {"F": 1, freed: -1}.get(operation[0], 0)
        if held > cell.caps[stage]:
            yield f"{operation} at {start_ms:g} ms exceeds the cap of {cell.caps[stage]}"
    if operations[0][1][0] < 0:
        yield f"{operations[0][0]} starts before 0"


def _link_faults(
    cell: Cell,
    plan: CellPlan,
    sent: dict[tuple[int, int, str, int], Transfer],
    slack_ms: float,
) -> Iterator[str]:
    """Transfers that are too fast, repeated, or more than the links can carry."""
    if len(sent) < len(plan.transfers):
        yield "transfers: one is there twice"
    changes: dict[tuple[int, str, int], list[tuple[float, int]]] = {}
    for each in plan.transfers:
        direction = DIRECTIONS.index(each.direction)
        if not cell.crosses[each.hop]:
            yield f"{each}: the hop is within a site"
            continue
        if not 1 <= each.nodes <= cell.max_nodes or (cell.sharing == "spatial" and each.nodes > 1):
            yield f"{each}: uses {each.nodes} nodes"
        if each.end_ms - each.start_ms < cell.hop_ms[each.hop][direction] / each.nodes - slack_ms:
            yield f"{each}: is too fast"
        pipe = each.pipe if cell.sharing == "spatial" else 0
        found = changes.setdefault((each.hop, each.direction, pipe), [])
        # An end within the rounding of a start counts as before it.
        found.append((each.start_ms + slack_ms, each.nodes))
        found.append((max(each.end_ms, each.start_ms + slack_ms), -each.nodes))
    allowed = 1 if cell.sharing == "spatial" else cell.max_nodes
    for (hop, name, _), each_change in changes.items():
        used = 0
        for time_ms, nodes in sorted(each_change):
            used += nodes
            if used > allowed:
                yield f"hop {hop} {name}: {used} of {allowed} nodes in use at {time_ms:g} ms"
                break
