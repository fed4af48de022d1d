"""One round of agreement between the ranks of a pipeline, as a function: reports in, decision out.

All ranks get the same reports before an iteration, and each decides by itself. The values that must
be the same on all of them (the plan in force, the planner) depend on the reports and on earlier
rounds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_resilient.control.plan import PlanId
from torch_resilient.control.report import StageReport, costs_of, links_measured
from torch_resilient.planning.costs import PipelineCosts

# During this number of iterations after a change was found, one opinion is enough for a new plan:
# half of the first measurements may still date from before the change.
ALERT_STEPS = 4
# A planner that has been at one plan for longer is late: a hundred times what a search takes.
PLANNER_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Situation:
    """The knowledge of one rank before an iteration.

    Attributes:
        step: the iteration.
        stage: this rank's stage.
        reports: of all ranks, in order of their stages.
        current: the plan in force.
        newest: the newest plan that this rank holds; not older than `current`.
        planning, fetching: whether this rank is making a plan, or getting one from the store.
        changes: how many changes of links all ranks had found when this rank last began a plan.
        alert_until: up to this iteration a change counts as fresh.
    """

    step: int
    stage: int
    reports: Sequence[StageReport]
    current: PlanId
    newest: PlanId
    planning: bool
    fetching: bool
    changes: float
    alert_until: int


@dataclass(frozen=True)
class PlanRequest:
    """The input for a new plan; the arguments of Decider.consider()."""

    costs: PipelineCosts
    changed: bool
    rooms: tuple[float, ...]
    links_known: bool


@dataclass(frozen=True)
class Decision:
    """The actions of one rank before an iteration.

    Attributes:
        costs, links_measured: as the reports say; see costs_of() and links_measured().
        in_force: the plan to follow from this iteration on.
        fetch: a plan to get from the store, or None.
        planner: the stage that plans from now on.
        request: a plan to begin, or None.
        changes, alert_until: for the next Situation.
    """

    costs: PipelineCosts | None
    links_measured: bool
    in_force: PlanId
    fetch: PlanId | None
    planner: int
    request: PlanRequest | None
    changes: float
    alert_until: int


def decide(now: Situation) -> Decision:
    """Derives the decision from the reports of a round."""
    costs, known = costs_of(now.reports), links_measured(now.reports)
    in_force = _in_force(now)
    planner = _planner(now.reports)
    changes, alert_until = now.changes, now.alert_until
    request = None
    # Nothing new is planned while ranks are still on their way to the last plan.
    if now.stage == planner and not now.planning and now.newest == in_force and costs is not None:
        found = sum(report.changes for report in now.reports)
        if found > changes:
            changes, alert_until = found, now.step + ALERT_STEPS
        rooms = tuple(report.room for report in now.reports)
        request = PlanRequest(costs, now.step < alert_until, rooms, known)
    return Decision(costs, known, in_force, _fetch(now), planner, request, changes, alert_until)


def _in_force(now: Situation) -> PlanId:
    """The newer plan that all ranks hold, if there is one, else the one in force."""
    held = {PlanId(int(report.epoch), int(report.planner)) for report in now.reports}
    agreed = held.pop()
    return now.current if held or agreed <= now.current else agreed


def _fetch(now: Situation) -> PlanId | None:
    """The newest plan that a rank has published, unless this rank holds it or is getting one."""
    published = [PlanId(int(r.published), i) for i, r in enumerate(now.reports) if r.published]
    newest = max(published, default=now.newest)
    return newest if newest > now.newest and not now.fetching else None


def _planner(reports: Sequence[StageReport]) -> int:
    """The first stage that is not late with its plan."""
    in_time = (i for i, each in enumerate(reports) if each.late_s <= PLANNER_PATIENCE_S)
    return next(in_time, 0)
