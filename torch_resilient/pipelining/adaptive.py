"""The schedule that re-plans itself while it trains."""

from __future__ import annotations

import collections
import contextlib
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from torch_resilient._reports import events
from torch_resilient._reports.stats import stats
from torch_resilient.control.detector import DelayDetector
from torch_resilient.control.link_monitor import RoundTrips, Transfers
from torch_resilient.control.orchestrator import Orchestrator
from torch_resilient.control.plan import Decider, alike, initial_plan
from torch_resilient.control.report import StageReport
from torch_resilient.pipelining.executor import StageRun, Waits
from torch_resilient.pipelining.offload import HostOffload, Slots
from torch_resilient.pipelining.schedule import DispatchedSchedule
from torch_resilient.pipelining.tolerance import ActivationTolerance
from torch_resilient.pipelining.torch_actions import (
    AnyStage,
    GroupStore,
    StageActions,
    carries_messages,
    control_device,
    control_store,
    group_of,
)
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.dispatch import Patience, StageGates, predicted_orders
from torch_resilient.planning.orders import held_at_most
from torch_resilient.planning.planner import limits_of
from torch_resilient.smart.options import SmartOptions
from torch_resilient.traffic import traffic_class

DISPATCH = ("live", "fixed")

# How many schedules each group has had, by its name: all its ranks make them in the same order, so
# the number tells them apart in the store. Other groups of a rank do not matter.
_made: collections.Counter[str] = collections.Counter()


@dataclass(frozen=True, slots=True)
class PlanStats:
    """The plan in force.

    Attributes:
        epoch: its number, from 0.
        predicted_s: how long an iteration should take; 0 if the costs were not known.
        reason: why it was made.
    """

    epoch: int
    predicted_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ScheduleStats:
    """The knowledge and the decisions of an adaptive schedule.

    Attributes:
        plan: the plan in force.
        gates: those of this stage; None in fixed order.
        dispatch: "live" or "fixed".
        waits: how the compute thread was blocked.
        costs: of the whole pipeline, as last measured; None before that.
        links_measured: whether any link is measured. If not, the delays in `costs` are 0 because
            nothing is known of them, and plans keep slack on every link.
        offloaded_bytes: moved to host memory so far.
        tolerance: what of this stage's activations may be missing where they arrive, and was.
        steps: iterations so far.
    """

    plan: PlanStats
    gates: StageGates | None
    dispatch: str
    waits: Waits
    costs: PipelineCosts | None
    links_measured: bool
    offloaded_bytes: int
    tolerance: ActivationTolerance
    steps: int

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, nested values included, fit for JSON."""
        return asdict(self)


class ScheduleAdaptiveZB(DispatchedSchedule):
    """A zero-bubble schedule that adapts to slow links while it trains.

    ::

        schedule = ScheduleAdaptiveZB(stage, n_microbatches, loss_fn)

    stands where `Schedule1F1B(stage, n_microbatches, loss_fn)` stood; `step()` and `eval()` are the
    same. Stages run whatever has arrived, B before F before W (live dispatch), within gates that
    are planned anew when the measured times and delays change enough to pay. Gradients and losses
    have the bits of any other schedule, whatever happens when.

    Args:
        stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec,
            scale_grads: as of torch's single-stage schedules. One stage per rank of the stage's
            group.
        dispatch: "live", or "fixed" for the paper's way: each plan is an order, changed between
            iterations. If another backend than "resilient" carries the tensors of the stage's
            device, it is "fixed", and no link is measured: plans then keep slack on every link.
        activation_limit: the most microbatches between F and B, one for all stages or one each.
        weight_limit: the same between F and W: with torch's split backward, what bounds memory. The
            default is what plans use: up to twice the first stage's warm-up, and one. For S stages
            this is 4 S - 1 until links are measured, and 2 S + 1 with live dispatch without delays.
        device_microbatches: the most microbatches that keep their activations on the device between
            F and W. If plans allow more, activations of the others go to pinned host memory, and
            up to two of these places (never the last one) are for those that come back one
            microbatch ahead. The default is measured on an accelerator after the first iteration,
            if copies of activations fit next to the computation; on the CPU all stay.
        adapt: False keeps the first plan.
        smart: what of the activations may be dropped between stages, see
            SmartOptions.activation_bound. The default is nothing; what is dropped changes the bits.
        timeline_dir: what all ranks measure is written there, for `torch-resilient timeline`; the
            environment variable TORCH_RESILIENT_TIMELINE stands in for it.

    All ranks must give the same arguments.

    Raises ValueError for an argument that cannot be used, and for a group with another number of
    ranks than stages; step() for a batch of another size than those before.
    """

    # Paper: PIPEMORPH §4, §6

    def __init__(
        self,
        stage: AnyStage,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[TensorChunkSpec, ...] | None = None,
        kwargs_chunk_spec: dict[str, TensorChunkSpec] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any] | None = None,
        scale_grads: bool = True,
        *,
        dispatch: str = "live",
        activation_limit: int | Sequence[int] | None = None,
        weight_limit: int | Sequence[int] | None = None,
        device_microbatches: int | None = None,
        adapt: bool = True,
        smart: SmartOptions | None = None,
        timeline_dir: str | Path | None = None,
    ) -> None:
        super().__init__(
            stage,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            smart=smart,
            timeline_dir=timeline_dir,
        )
        if dispatch not in DISPATCH:
            raise ValueError(f"dispatch: expected one of {', '.join(DISPATCH)}, got {dispatch!r}")
        self._group = group_of(stage)
        limits = limits_of(stage.num_stages, n_microbatches, activation_limit, weight_limit)
        self._monitors = self._find_monitors()
        self.dispatch = dispatch if self._monitors is not None else "fixed"
        fixed = self.dispatch == "fixed"
        if device_microbatches is not None and device_microbatches < 1:
            raise ValueError(f"device_microbatches: expected at least 1, got {device_microbatches}")
        self._offload = HostOffload(stage.device, stage.submod)
        self._measures_room = stage.device.type != "cpu" and device_microbatches is None
        self._on_device = device_microbatches or n_microbatches
        self._room = math.inf
        self._activation_bytes: list[int] = []
        cautious = limits
        if self._measures_room and weight_limit is None:
            # Until it is known what fits, as much as 1F1B holds on the first stage.
            most = min(stage.num_stages, n_microbatches)
            cautious = limits_of(stage.num_stages, n_microbatches, activation_limit, most)
        initial = initial_plan(stage.num_stages, n_microbatches, cautious, fixed)
        self._adapt = adapt and stage.num_stages > 1
        name = self._group.group_name
        self._orchestrator = Orchestrator(
            stage.stage_index,
            Decider(n_microbatches, limits, fixed),
            initial,
            GroupStore(control_store(), self._group),
            f"torch_resilient/plan/{name}/{_made[name]}",
        )
        _made[name] += 1
        weakref.finalize(self, self._orchestrator.close)
        # With live dispatch: this stage's order if no message is late, and the costs it was made
        # for.
        self._expected = ""
        self._expected_costs: PipelineCosts | None = None
        self._detector = DelayDetector()
        self._changes = 0

    def stats(self) -> ScheduleStats:
        """A snapshot of what is known and what has been decided."""
        plan = self._orchestrator.current
        live = self.dispatch == "live"
        return ScheduleStats(
            plan=PlanStats(plan.epoch, plan.predicted_s, plan.reason),
            gates=plan.gates.of_stage(self.stage.stage_index) if live else None,
            dispatch=self.dispatch,
            waits=replace(self.waits),
            costs=self._orchestrator.costs,
            links_measured=self._orchestrator.links_measured,
            offloaded_bytes=self._offload.offloaded_bytes,
            tolerance=replace(self.tolerance),
            steps=self._steps,
        )

    def _find_monitors(self) -> dict[int, tuple[RoundTrips, Transfers]] | None:
        """Monitors of the links to the neighbours, by group rank; None if another backend carries
        them."""
        if not carries_messages(self.stage):
            return None
        index = self.stage.stage_index
        ranks = self.stage.stage_index_to_group_rank
        return {
            ranks[neighbour]: (RoundTrips(), Transfers())
            for neighbour in (index - 1, index + 1)
            if 0 <= neighbour < self.stage.num_stages
        }

    @property
    def epoch(self) -> int:
        return self._orchestrator.current.epoch

    def _run(self, actions: StageActions) -> None:
        gathering = self._send_report() if self._adapt and actions.backward else None
        super()._run(actions)
        if actions.backward and self._measures_room:
            self._measure_room()
        if gathering is not None:
            self._consume_reports(*gathering)

    def _dispatch(self, run: StageRun) -> None:
        plan = self._orchestrator.current
        index = self.stage.stage_index
        if self.dispatch == "live":
            gates = plan.gates.of_stage(index)
            self._offload.begin(Slots.of(self._on_device, gates.pending))
            run.run_live(gates, self._expected)
        else:
            order = plan.order_of(index)
            _, pending = held_at_most(order)
            self._offload.begin(Slots.of(self._on_device, pending))
            run.run_fixed(order)

    def around_operation(
        self, kind: str, microbatch: int
    ) -> contextlib.AbstractContextManager[None]:
        if self._measures_room and not self._activation_bytes:
            return self._offload.measuring(self._activation_bytes)
        return self._offload.around(kind, microbatch)

    def _measure_room(self) -> None:
        """Once, after the first iteration: how many microbatches fit, here and in host memory."""
        self._measures_room = False
        held = most = 0
        for span in self.last_spans:
            held += {"F": 1, "W": -1}.get(span.kind, 0)
            most = max(most, held)
        room = self._offload.room(self._activation_bytes[0], most)
        microbatch_s = sum(self.recorder.typical_s(kind) for kind in "FBW")
        self._on_device = room.on_device()
        self._room = float(room.in_all(microbatch_s))
        events.record(
            "memory",
            f"stage {self.stage.stage_index}: a microbatch takes "
            f"{room.activation_bytes / 2**20:.1f} MiB between F and W: {self._on_device} fit on "
            f"the device, {self._room:.0f} with host memory",
            **asdict(room),
        )

    def _send_report(self) -> tuple[dist.Work, list[Tensor]]:
        """Begins to tell all ranks what this one measured in the iteration before."""
        report = torch.tensor(self._report().encode(), dtype=torch.float64)
        report = report.to(control_device(self._group, self.stage.device))
        gathered = [torch.empty_like(report) for _ in range(self._group.size())]
        # A few hundred bytes that nothing should wait for: not behind the gradients.
        first = traffic_class("activation") if self._monitors else contextlib.nullcontext()
        with first:
            work = dist.all_gather(gathered, report, group=self._group, async_op=True)
        assert work is not None
        return work, gathered

    def _consume_reports(self, work: dist.Work, gathered: list[Tensor]) -> None:
        """Every rank has begun this iteration by now, so this has come long ago."""
        work.wait()
        ranks = self.stage.stage_index_to_group_rank
        reports = [
            StageReport.decode(gathered[ranks[stage]].tolist()) for stage in range(len(gathered))
        ]
        switched = self._orchestrator.consume(reports, self._steps)
        plan, costs = self._orchestrator.current, self._orchestrator.costs
        if switched:
            # Experience with the messages of one plan says nothing about those of another.
            self._patience = Patience()
            if self.bubbles is not None:
                self.bubbles.forget()
        if self.dispatch == "live" and costs is not None:
            # By the costs of now, which may change without a plan being worth a switch. Each rank
            # by itself: they need not agree.
            before = self._expected_costs
            if switched or before is None or not alike(costs, before):
                self._expected_costs = costs
                orders = predicted_orders(costs, self.num_microbatches, plan.gates)
                self._expected = orders[self.stage.stage_index]
        if switched and self.recording is not None:
            self.recording.event(self._steps, f"plan {plan.epoch}: {plan.reason}")

    def _report(self) -> StageReport:
        forward_s, input_backward_s, weight_backward_s = map(self.recorder.typical_s, "FBW")
        newest = self._orchestrator.newest
        return StageReport(
            epoch=float(newest.epoch),
            planner=float(newest.planner),
            published=float(self._orchestrator.published),
            changes=float(self._changes),
            forward_s=forward_s,
            input_backward_s=input_backward_s,
            weight_backward_s=weight_backward_s,
            room=self._room,
            late_s=self._orchestrator.late_s,
            **self._measure_links(),
        )

    def _measure_links(self) -> dict[str, float]:
        """The part of a report about the links to the next and to the previous stage."""
        result: dict[str, float] = {}
        if self._monitors:
            peers = {peer.rank: peer for peer in stats(self._group).peers}
            ranks = self.stage.stage_index_to_group_rank
            index = self.stage.stage_index
            for place, neighbour in (("next", index + 1), ("previous", index - 1)):
                if 0 <= neighbour < self.stage.num_stages:
                    rank = ranks[neighbour]
                    round_trips, transfers = self._monitors[rank]
                    if self._watch(neighbour, round_trips, round_trips.update(peers[rank])):
                        transfers.forget(peers[rank])
                    transfers.update(peers[rank], round_trips.typical_s)
                    result[f"round_trip_{place}_s"] = round_trips.typical_s
                    result[f"round_trip_{place}_min_s"] = round_trips.min_s
                    result[f"transfer_{place}_s"] = transfers.typical_s
        return result

    def _watch(self, neighbour: int, monitor: RoundTrips, round_trips_s: list[float]) -> bool:
        """Looks for a change in the delay to a neighbour, taken for half of the round trip: which
        direction has changed, a round trip does not tell. Whether there was one."""
        before = self._changes
        now_s = time.monotonic()
        for i, each in enumerate(round_trips_s):
            change = self._detector.on_sample(
                self.stage.stage_index, neighbour, each / 2, time_s=now_s, step=self._steps
            )
            if change is not None:
                self._changes += 1
                monitor.forget_all_but(len(round_trips_s) - i - 1 + change.samples)
                text = f"half of the round trip between the stages: {change}"
                events.record(f"link_{change.kind}", text, **asdict(change))
                if self.recording is not None:
                    self.recording.event(self._steps, text)
        return self._changes > before
