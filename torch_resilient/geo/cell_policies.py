"""Schedules of a cell: the paper's rules, those of others, and the best of many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from torch_resilient.geo import cell_rules
from torch_resilient.geo.cell import (
    DIRECTIONS,
    ROUNDING,
    Cell,
    CellPlan,
    Transfer,
    lower_bound_ms,
    plan_of,
)
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

# `best` counts its planning time in simulated operations: the result then does not depend on the
# machine. A processor of 2025 simulates about twice as many in a millisecond.
_OPERATIONS_PER_MS = 5000
DEFAULT_BUDGET_MS = 15.0


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
        if best[0] <= bound_ms * (1 + ROUNDING) and number >= 1:
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
    return plan_of(
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
