"""Keeps the plans of a pipeline's ranks in step.

Every rank tells all others its measurements in each iteration, in one small all-gather that has a
whole iteration to get through. One rank is the planner: that of the first stage, or, while that one
is late with its plan or has failed, the next. It makes plans, in a thread of its own, and publishes
them in the store. A plan comes into force when every rank has said that it holds it: all ranks see
that in the same iteration, so they switch at the same step. No rank ever waits for the planner.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from torch_resilient import _events
from torch_resilient.control.plan import AdaptivePlan, Decider, PlanId
from torch_resilient.control.report import StageReport, costs_of, links_measured
from torch_resilient.planning.costs import PipelineCosts

# For so many iterations after a change was found, one opinion is enough for a new plan: the first
# measurements may still be half of before.
_ALERT_STEPS = 4
# A planner that has been at one plan for longer is late: a hundred times what a search takes.
PLANNER_PATIENCE_S = 10.0
# One that has failed counts as late for so long.
_PLANNER_PAUSE_S = 30.0


class PlanStore(Protocol):
    """Where plans are published; torch's stores fit."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class _Worker:
    """A thread that does one job at a time; a job that fails is told of, and harms nobody."""

    def __init__(self, stage: int, clock: Callable[[], float]) -> None:
        self._stage = stage
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch_resilient_plan")
        self._begun_s = 0.0
        self._failed_s = -math.inf
        self._failure = ""
        self.job: Future[None] | None = None

    @property
    def idle(self) -> bool:
        return self.job is None or self.job.done()

    @property
    def late_s(self) -> float:
        """How long it has been at its job; infinite for a while after one that failed."""
        now_s = self._clock()
        if now_s - self._failed_s < _PLANNER_PAUSE_S:
            return math.inf
        return 0.0 if self.idle else now_s - self._begun_s

    def submit(self, function: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                function()
            except Exception as error:  # planning must never harm the training
                self._failed_s = self._clock()
                text = f"stage {self._stage}: no new plan: {error!r}"
                if text != self._failure:  # once, and not in every iteration
                    self._failure = text
                    _events.record("plan_failed", text)

        self._begun_s = self._clock()
        self.job = self._thread.submit(guarded)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class Orchestrator:
    """One rank's part.

    Args:
        stage: this rank's stage.
        decider: how it plans while it is the planner.
        initial: the plan in force before the first one is agreed on; the same on all ranks.
        store: shared by the ranks of this pipeline, and by nothing else under `prefix`.
        prefix: of the keys; another one for each schedule.
        clock: seconds, from any start.

    Thread: one at a time; it has threads of its own for plans, and for fetching them.
    """

    def __init__(
        self,
        stage: int,
        decider: Decider,
        initial: AdaptivePlan,
        store: PlanStore,
        prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stage = stage
        self._decider = decider
        self._store = store
        self._prefix = prefix
        self._plans = {initial.id: initial}  # in force, or received and newer
        self._lock = threading.Lock()
        self._planning = _Worker(stage, clock)
        self._fetching = _Worker(stage, clock)
        self._changes = 0.0
        self._alert_until = 0
        self.current = initial
        self.published = 0
        self.planner = 0
        self.costs: PipelineCosts | None = None
        self.links_measured = False

    @property
    def newest(self) -> PlanId:
        """The newest plan that this rank holds: part of its report."""
        with self._lock:
            return max(self._plans)

    @property
    def late_s(self) -> float:
        """How long this rank has been at a plan, infinite if it failed: part of its report."""
        return self._planning.late_s

    def consume(self, reports: Sequence[StageReport], step: int) -> bool:
        """Takes the reports of all ranks, in order of their stages, before iteration `step`.

        All ranks must call it with the same reports. Returns whether another plan is in force now.
        """
        self.costs = costs_of(reports)
        self.links_measured = links_measured(reports)
        switched = self._switch(reports, step)
        published = [PlanId(int(r.published), i) for i, r in enumerate(reports) if r.published]
        if published and max(published) > self.newest and self._fetching.idle:
            self._fetching.submit(lambda: self._fetch(max(published)))
        self._choose_planner(reports, step)
        # Nothing new is planned while ranks are still on their way to the last plan.
        if (
            self._stage == self.planner
            and self._planning.idle
            and self.newest == self.current.id
            and self.costs is not None
        ):
            costs, current, known = self.costs, self.current, self.links_measured
            changes = sum(report.changes for report in reports)
            if changes > self._changes:
                self._changes = changes
                self._alert_until = step + _ALERT_STEPS
            changed = step < self._alert_until
            rooms = [report.room for report in reports]
            self._planning.submit(lambda: self._plan(costs, current, changed, rooms, known))
        return switched

    def close(self) -> None:
        """Ends the threads; a plan that is being made is dropped."""
        self._planning.close()
        self._fetching.close()

    def _switch(self, reports: Sequence[StageReport], step: int) -> bool:
        """Whether all ranks hold a newer plan: then it is in force."""
        held = {PlanId(int(report.epoch), int(report.planner)) for report in reports}
        agreed = held.pop()
        if held or agreed <= self.current.id:
            return False
        with self._lock:
            self.current = self._plans[agreed]
            self._plans = {each: plan for each, plan in self._plans.items() if each >= agreed}
        _events.record(
            "plan",
            f"stage {self._stage}, step {step}: plan {agreed.epoch}: {self.current.reason}",
            step=step,
            stage=self._stage,
            epoch=agreed.epoch,
            planner=agreed.planner,
            predicted_s=self.current.predicted_s,
        )
        return True

    def _choose_planner(self, reports: Sequence[StageReport], step: int) -> None:
        """The first stage that is not late; all ranks choose the same."""
        in_time = (i for i, each in enumerate(reports) if each.late_s <= PLANNER_PATIENCE_S)
        planner = next(in_time, 0)
        if planner != self.planner and self._stage == planner:
            _events.record(
                "planner",
                f"stage {planner}, step {step}: plans from now on, after stage {self.planner}",
                step=step,
                stage=planner,
                before=self.planner,
            )
        self.planner = planner

    def _plan(
        self,
        costs: PipelineCosts,
        current: AdaptivePlan,
        changed: bool,
        rooms: Sequence[float],
        links_known: bool,
    ) -> None:
        plan = self._decider.consider(costs, current, changed, rooms, links_known)
        if plan is None:
            return
        plan = replace(plan, planner=self._stage)
        self._store.set(self._key(plan.id), plan.to_json())
        with self._lock:
            self._plans[plan.id] = plan
        self.published = plan.epoch

    def _fetch(self, wanted: PlanId) -> None:
        plan = AdaptivePlan.from_json(self._store.get(self._key(wanted)).decode())
        with self._lock:
            self._plans[plan.id] = plan

    def _key(self, plan: PlanId) -> str:
        return f"{self._prefix}/{plan.epoch}/{plan.planner}"
