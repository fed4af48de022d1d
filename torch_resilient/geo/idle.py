"""Longer idle windows for the same schedule: a few long ones hold more prefills than many short
ones."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch_resilient.geo.cell import DIRECTIONS, ROUNDING, Cell, CellPlan

# Larger cells keep their starts. This many operations take about a second.
MAX_OPERATIONS = 50_000
_MAX_ROUNDS = 10


class _Neighbours(NamedTuple):
    """The operations before and after one on its GPU, and what to add to their times."""

    before: int
    before_ms: float
    after: int
    after_ms: float


class _Slack:
    """Operations and transfers as nodes of a graph, whose edges are minimum times between starts.

    Each node moves between its predecessors and successors. The order of a GPU or a link does not
    change, and neither does the iteration time.
    """

    def __init__(self, cell: Cell, plan: CellPlan, period_ms: float) -> None:
        self._iteration_ms = plan.iteration_ms
        self._period_ms = period_ms
        self.starts_ms: list[float] = []
        self._lengths_ms: list[float] = []
        # By node: (node, minimum time from the start of the earlier to the start of the later one).
        self._before: list[list[tuple[int, float]]] = []
        self._after: list[list[tuple[int, float]]] = []
        # By operation, those before and after it on its GPU. They may be in another period.
        self._neighbours: list[_Neighbours] = []
        self.gpus = self._add_operations(cell, plan)
        self.sent = self._add_transfers(cell, plan)

    def _add(self, start_ms: float, length_ms: float) -> int:
        self.starts_ms.append(start_ms)
        self._lengths_ms.append(length_ms)
        self._before.append([])
        self._after.append([])
        return len(self.starts_ms) - 1

    def _require(self, first: int, then: int, lag_ms: float) -> None:
        self._after[first].append((then, lag_ms))
        self._before[then].append((first, lag_ms))

    def _add_operations(self, cell: Cell, plan: CellPlan) -> list[list[list[int]]]:
        """The nodes by pipeline and stage."""
        gpus: list[list[list[int]]] = []
        self._names: dict[tuple[int, int, str], int] = {}
        for pipe, row in enumerate(plan.orders):
            gpus.append([])
            for stage, order in enumerate(row):
                nodes: list[int] = []
                for operation, start_ms in zip(order, plan.starts_ms[pipe][stage], strict=True):
                    node = self._add(start_ms, cell.duration_ms(operation[0], stage))
                    self._names[pipe, stage, operation] = node
                    if nodes:
                        self._require(nodes[-1], node, self._lengths_ms[nodes[-1]])
                    nodes.append(node)
                for before, after in zip((None, *nodes), (*nodes[1:], None), strict=False):
                    self._neighbours.append(
                        _Neighbours(
                            nodes[-1] if before is None else before,
                            -self._period_ms if before is None else 0.0,
                            nodes[0] if after is None else after,
                            self._period_ms if after is None else 0.0,
                        )
                    )
                gpus[pipe].append(nodes)
        return gpus

    def _add_transfers(self, cell: Cell, plan: CellPlan) -> list[int]:
        """The nodes of the plan's transfers; with all edges between stages."""
        sent = []
        links: dict[tuple[int, str, int], list[int]] = {}
        at_a_time = 1 if cell.sharing == "spatial" else cell.max_nodes // cell.nodes
        for each in plan.transfers:
            node = self._add(each.start_ms, each.end_ms - each.start_ms)
            sent.append(node)
            direction = DIRECTIONS.index(each.direction)
            source, target = (each.hop, each.hop + 1)[:: 1 - 2 * direction]
            operation = f"{'FB'[direction]}{each.microbatch}"
            first = self._names[each.pipe, source, operation]
            self._require(first, node, self._lengths_ms[first])
            lag_ms = self._lengths_ms[node] + cell.latency_ms[each.hop][direction]
            self._require(node, self._names[each.pipe, target, operation], lag_ms)
            pipe = each.pipe if cell.sharing == "spatial" else 0
            before = links.setdefault((each.hop, each.direction, pipe), [])
            if before:
                self._require(before[-1], node, 0.0)
            if len(before) >= at_a_time:
                self._require(before[-at_a_time], node, self._lengths_ms[before[-at_a_time]])
            before.append(node)
        for (pipe, stage, operation), node in self._names.items():
            step = {"F": 1, "B": -1}.get(operation[0], 0)
            hop = min(stage, stage + step)
            if step and 0 <= hop < cell.stages - 1 and not cell.crosses[hop]:
                lag_ms = self._lengths_ms[node] + cell.hop_ms[hop][operation[0] == "B"]
                self._require(node, self._names[pipe, stage + step, operation], lag_ms)
        return sent

    def sweep(self, late: bool) -> None:
        """Moves each operation next to the one before or after it, where that makes the longer of
        the two windows longer; if both are as good, to the later or earlier one. Transfers make
        room.

        Later nodes come first if they move to later times, so that others can follow.
        """
        starts_ms = self.starts_ms
        slack_ms = ROUNDING * self._iteration_ms
        for node in sorted(range(len(starts_ms)), key=starts_ms.__getitem__, reverse=late):
            length_ms = self._lengths_ms[node]
            low_ms = max((starts_ms[each] + lag for each, lag in self._before[node]), default=0.0)
            high_ms = min(
                (starts_ms[each] - lag for each, lag in self._after[node]),
                default=self._iteration_ms - length_ms,
            )
            low_ms, high_ms = max(low_ms, 0.0), min(high_ms, self._iteration_ms - length_ms)
            if high_ms - low_ms <= slack_ms:
                continue
            if node >= len(self._neighbours):
                starts_ms[node] = high_ms if late else low_ms
                continue
            near = self._neighbours[node]
            since_ms = starts_ms[near.before] + self._lengths_ms[near.before] + near.before_ms
            until_ms = starts_ms[near.after] - length_ms + near.after_ms
            # The two windows around it have a constant sum. So the start that is farther from the
            # middle makes the longer window.
            middle_ms = (since_ms + until_ms) / 2
            for start_ms in (low_ms, high_ms) if late else (high_ms, low_ms):
                if abs(start_ms - middle_ms) >= abs(starts_ms[node] - middle_ms) - slack_ms:
                    starts_ms[node] = start_ms


def gather_idle(cell: Cell, plan: CellPlan, period_ms: float) -> CellPlan:
    """The schedule with other starts: the same orders, transfers and iteration time, but idle time
    in fewer and longer windows where operations can be moved.

    It moves one operation at a time and does not find the best starts.
    """
    if cell.operations > MAX_OPERATIONS:
        return plan
    slack = _Slack(cell, plan, period_ms)
    for _ in range(_MAX_ROUNDS):
        known_ms = list(slack.starts_ms)
        slack.sweep(late=True)
        slack.sweep(late=False)
        if slack.starts_ms == known_ms:
            break
    starts_ms = slack.starts_ms
    sent = [
        each._replace(
            start_ms=starts_ms[node], end_ms=starts_ms[node] + (each.end_ms - each.start_ms)
        )
        for each, node in zip(plan.transfers, slack.sent, strict=True)
    ]
    return replace(
        plan,
        starts_ms=[[[starts_ms[node] for node in nodes] for nodes in row] for row in slack.gpus],
        transfers=sorted(sent, key=lambda each: each.start_ms),
    )
