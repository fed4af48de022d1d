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

from torch_resilient._reports import events
from torch_resilient.control.agreement import Decision, PlanRequest, Situation, decide
from torch_resilient.control.plan import AdaptivePlan, Decider, PlanId
from torch_resilient.control.report import StageReport
from torch_resilient.planning.costs import PipelineCosts

# A planner that has failed counts as late for so long.
_PLANNER_PAUSE_S = 30.0


class PlanStore(Protocol):
    """A store for published plans; torch's stores fit."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class _Worker:
    """A thread that does one job at a time; a job that fails is reported and does no other harm."""

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
                    events.record("plan_failed", text)

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
        decision = decide(self._situation(reports, step))
        switched = decision.in_force != self.current.id
        self.costs, self.links_measured = decision.costs, decision.links_measured
        self._changes, self._alert_until = decision.changes, decision.alert_until
        if switched:
            self._switch(decision, step)
        if (wanted := decision.fetch) is not None:
            self._fetching.submit(lambda: self._fetch(wanted))
        if decision.planner != self.planner:
            self._change_planner(decision.planner, step)
        if (request := decision.request) is not None:
            current = self.current
            self._planning.submit(lambda: self._plan(request, current))
        return switched

    def _situation(self, reports: Sequence[StageReport], step: int) -> Situation:
        # Before `newest`: a job that ends in between has added its plan by then.
        planning, fetching = not self._planning.idle, not self._fetching.idle
        return Situation(
            step=step,
            stage=self._stage,
            reports=reports,
            current=self.current.id,
            newest=self.newest,
            planning=planning,
            fetching=fetching,
            changes=self._changes,
            alert_until=self._alert_until,
        )

    def close(self) -> None:
        """Ends the threads; a plan that is being made is dropped."""
        self._planning.close()
        self._fetching.close()

    def _switch(self, decision: Decision, step: int) -> None:
        """All ranks hold this plan: from now on it is in force."""
        agreed = decision.in_force
        with self._lock:
            self.current = self._plans[agreed]
            self._plans = {each: plan for each, plan in self._plans.items() if each >= agreed}
        events.record(
            "plan",
            f"stage {self._stage}, step {step}: plan {agreed.epoch}: {self.current.reason}",
            step=step,
            stage=self._stage,
            epoch=agreed.epoch,
            planner=agreed.planner,
            predicted_s=self.current.predicted_s,
        )

    def _change_planner(self, planner: int, step: int) -> None:
        if self._stage == planner:
            events.record(
                "planner",
                f"stage {planner}, step {step}: plans from now on, after stage {self.planner}",
                step=step,
                stage=planner,
                before=self.planner,
            )
        self.planner = planner

    def _plan(self, request: PlanRequest, current: AdaptivePlan) -> None:
        plan = self._decider.consider(
            request.costs, current, request.changed, request.rooms, request.links_known
        )
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
