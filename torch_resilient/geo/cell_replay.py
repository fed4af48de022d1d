"""Exact times of any orders of a cell, and a check of any schedule."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from torch_resilient.geo.cell import DIRECTIONS, ROUNDING, Cell, CellPlan, Transfer, plan_of


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
    return plan_of(
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
    slack_ms = ROUNDING * plan.iteration_ms
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
