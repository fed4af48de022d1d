"""The decision of a rank of an adaptive pipeline before an iteration: a function of one value."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from torch_resilient.control.agreement import (
    ALERT_STEPS,
    PLANNER_PATIENCE_S,
    Situation,
    decide,
)
from torch_resilient.control.plan import PlanId
from torch_resilient.control.report import StageReport

FIRST, SECOND, RIVAL = PlanId(0, 0), PlanId(1, 0), PlanId(1, 2)
MEASURED = StageReport(forward_s=1.0, input_backward_s=1.0, weight_backward_s=1.0)


def situation(*reports: StageReport, **values: object) -> Situation:
    """Stage 0 of three stages, which all hold the first plan, have measured and are idle."""
    quiet = Situation(
        step=10,
        stage=0,
        reports=reports or (MEASURED,) * 3,
        current=FIRST,
        newest=FIRST,
        planning=False,
        fetching=False,
        changes=0.0,
        alert_until=0,
    )
    return replace(quiet, **values)  # type: ignore[arg-type]


def holding(plan: PlanId, **values: float) -> StageReport:
    return replace(MEASURED, epoch=float(plan.epoch), planner=float(plan.planner), **values)


def test_a_plan_comes_into_force_when_all_hold_it() -> None:
    some = situation(holding(SECOND), holding(SECOND), holding(FIRST), newest=SECOND)
    assert decide(some).in_force == FIRST
    every = situation(*[holding(SECOND)] * 3, newest=SECOND)
    assert decide(every).in_force == SECOND
    # All hold the one in force: nothing changes.
    assert decide(replace(every, current=SECOND)).in_force == SECOND
    # Two planners made a plan of the same epoch: the larger stage's is the newer.
    mixed = situation(holding(SECOND), holding(RIVAL), holding(RIVAL), newest=SECOND)
    assert decide(mixed).in_force == FIRST


def test_the_newest_published_plan_is_fetched_once() -> None:
    published = (holding(FIRST), holding(FIRST, published=1.0), holding(FIRST))
    assert decide(situation(*published)).fetch == PlanId(1, 1)
    assert decide(situation(*published, fetching=True)).fetch is None
    assert decide(situation(*published, newest=PlanId(1, 1))).fetch is None
    assert decide(situation()).fetch is None


@pytest.mark.parametrize(
    ("late_s", "planner"),
    [
        ((0.0, 0.0, 0.0), 0),
        ((PLANNER_PATIENCE_S, 0.0, 0.0), 0),
        ((PLANNER_PATIENCE_S + 0.1, 0.0, 0.0), 1),
        ((math.inf, math.inf, 0.0), 2),
        ((math.inf, math.inf, math.inf), 0),
    ],
)
def test_the_planner_is_the_first_stage_in_time(late_s: tuple[float, ...], planner: int) -> None:
    reports = [replace(MEASURED, late_s=each) for each in late_s]
    found = [decide(situation(*reports, stage=stage)) for stage in range(3)]
    assert [each.planner for each in found] == [planner] * 3
    # Only the planner plans.
    assert [each.request is not None for each in found] == [s == planner for s in range(3)]


def test_nothing_is_planned_before_its_time() -> None:
    assert decide(situation()).request is not None
    assert decide(situation(planning=True)).request is None
    # Ranks are on their way to a plan that this one holds already.
    assert decide(situation(newest=SECOND)).request is None
    # One stage has measured nothing yet.
    silent = decide(situation(MEASURED, StageReport(), MEASURED))
    assert silent.costs is None
    assert silent.request is None


def test_a_change_is_fresh_for_some_iterations() -> None:
    reports = (replace(MEASURED, changes=1.0), MEASURED, replace(MEASURED, room=5.0))
    found = decide(situation(*reports))
    assert found.request is not None
    assert found.request.changed
    assert found.request.rooms == (math.inf, math.inf, 5.0)
    assert (found.changes, found.alert_until) == (1.0, 10 + ALERT_STEPS)
    later = situation(*reports, changes=1.0, alert_until=found.alert_until)
    for step, changed in ((10 + ALERT_STEPS - 1, True), (10 + ALERT_STEPS, False)):
        request = decide(replace(later, step=step)).request
        assert request is not None
        assert request.changed == changed
    # While it is busy, the change is not forgotten.
    busy = decide(situation(*reports, planning=True))
    assert (busy.changes, busy.alert_until) == (0.0, 0)
