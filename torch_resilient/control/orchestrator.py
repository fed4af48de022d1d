"""Keeps the plans of a pipeline's ranks in step.

Every rank tells all others its measurements in each iteration, in one small all-gather that has a
whole iteration to get through. The rank of the first stage makes plans, in a thread of its own, and
publishes them in the store. A plan comes into force when every rank has said that it holds it: all
ranks see that in the same iteration, so they switch at the same step. No rank ever waits for the
planner: if that is slow or gone, the plan in force stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from torch_resilient import _events
from torch_resilient.control.plan import AdaptivePlan, Decider
from torch_resilient.control.report import StageReport, costs_of, links_measured
from torch_resilient.pipelining.costs import PipelineCosts

# For so many iterations after a change was found, one opinion is enough for a new plan: the first
# measurements may still be half of before.
_ALERT_STEPS = 4


class PlanStore(Protocol):
    """Where plans are published; torch's stores fit."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class Orchestrator:
    """One rank's part.

    Args:
        stage: this rank's stage; that of stage 0 plans.
        decider: how it plans.
        initial: the plan in force before the first one is agreed on; the same on all ranks.
        store: shared by the ranks of this pipeline, and by nothing else under `prefix`.
        prefix: of the keys; another one for each schedule.

    Thread: one at a time; it has a thread of its own for plans.
    """

    def __init__(
        self, stage: int, decider: Decider, initial: AdaptivePlan, store: PlanStore, prefix: str
    ) -> None:
        self._stage = stage
        self._decider = decider
        self._store = store
        self._prefix = prefix
        self._plans = {initial.epoch: initial}  # in force, or received and newer
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch_resilient_plan")
        self._job: Future[None] | None = None
        self._failure = ""
        self._changes = 0.0
        self._alert_until = 0
        self.current = initial
        self.published = 0
        self.costs: PipelineCosts | None = None
        self.links_measured = False

    @property
    def newest(self) -> int:
        """The epoch of the newest plan that this rank holds: part of its report."""
        with self._lock:
            return max(self._plans)

    def consume(self, reports: Sequence[StageReport], step: int) -> bool:
        """Takes the reports of all ranks, in order of their stages, before iteration `step`.

        All ranks must call it with the same reports. Returns whether another plan is in force now.
        """
        self.costs = costs_of(reports)
        self.links_measured = links_measured(reports)
        agreed = int(min(report.epoch for report in reports))
        switched = False
        with self._lock:
            if agreed > self.current.epoch:
                self.current = self._plans[agreed]
                self._plans = {e: plan for e, plan in self._plans.items() if e >= agreed}
                switched = True
        if switched:
            _events.record(
                "plan",
                f"stage {self._stage}, step {step}: plan {agreed}: {self.current.reason}",
                step=step,
                stage=self._stage,
                epoch=agreed,
                predicted_s=self.current.predicted_s,
            )
        published = int(max(report.published for report in reports))
        if published > self.newest and self._idle:
            self._submit(lambda: self._fetch(published))
        changes = sum(report.changes for report in reports)
        # Nothing new is planned while ranks are still on their way to the last plan.
        if self._stage == 0 and self._idle and self.newest == self.current.epoch:
            costs = self.costs
            if costs is not None:
                if changes > self._changes:
                    self._changes = changes
                    self._alert_until = step + _ALERT_STEPS
                changed, current = step < self._alert_until, self.current
                rooms = [report.room for report in reports]
                known = self.links_measured
                self._submit(lambda: self._plan(costs, current, changed, rooms, known))
        return switched

    def close(self) -> None:
        """Ends the thread; a plan that is being made is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def _idle(self) -> bool:
        return self._job is None or self._job.done()

    def _submit(self, function: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                function()
            except Exception as error:  # planning must never harm the training
                text = f"stage {self._stage}: no new plan: {error!r}"
                if text != self._failure:  # once, and not in every iteration
                    self._failure = text
                    _events.record("plan_failed", text)

        self._job = self._thread.submit(guarded)

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
        self._store.set(self._key(plan.epoch), plan.to_json())
        with self._lock:
            self._plans[plan.epoch] = plan
        self.published = plan.epoch

    def _fetch(self, epoch: int) -> None:
        plan = AdaptivePlan.from_json(self._store.get(self._key(epoch)).decode())
        with self._lock:
            self._plans[plan.epoch] = plan

    def _key(self, epoch: int) -> str:
        return f"{self._prefix}/{epoch}"
