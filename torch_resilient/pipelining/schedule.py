"""Schedules for the stages of torch.distributed.pipelining, one per rank."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from torch_resilient.pipelining.bubbles import Bubbles
from torch_resilient.pipelining.executor import StageRun, Waits
from torch_resilient.pipelining.recorder import MeasuredSpan, Recorder
from torch_resilient.pipelining.recording import (
    Recording,
    agreed_folder,
    folder_from_environment,
)
from torch_resilient.pipelining.tolerance import ActivationTolerance
from torch_resilient.pipelining.torch_actions import AnyStage, StageActions, StageSchedule
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.dispatch import Patience, StageGates
from torch_resilient.planning.orders import Operation, Order, OrderError
from torch_resilient.planning.replay import replay
from torch_resilient.smart.options import SmartOptions


def checked_orders(
    orders: Sequence[Sequence[Operation | str]], num_stages: int, num_microbatches: int
) -> list[Order]:
    """`orders`, one per stage, with texts such as "F0" parsed.

    Raises OrderError, which names stage and operation, for orders that no pipeline can run, or that
    do not run F, B and W each in microbatch order: other orders would change the numbers.
    ValueError for another number of stages or microbatches.
    """
    parsed = [
        [Operation.parse(each) if isinstance(each, str) else Operation(*each) for each in order]
        for order in orders
    ]
    if len(parsed) != num_stages:
        raise ValueError(f"orders: expected {num_stages}, one per stage, got {len(parsed)}")
    for stage, order in enumerate(parsed):
        done = dict.fromkeys("FBW", 0)
        for operation in order:
            kind, microbatch = operation
            if kind in done:
                if microbatch != done[kind]:
                    raise OrderError(
                        stage,
                        operation,
                        f"stage {stage}: {operation} where {kind}{done[kind]} is due: F, B and W "
                        "each go through the microbatches in turn, or sums would be rounded "
                        "otherwise",
                    )
                done[kind] += 1
        if done["F"] != num_microbatches:
            raise ValueError(
                f"orders: stage {stage} has {done['F']} forwards, and the schedule "
                f"{num_microbatches} microbatches"
            )
    # Any costs will do: whether orders deadlock does not depend on them.
    replay(
        parsed, PipelineCosts.of(num_stages, forward_s=1, input_backward_s=1, weight_backward_s=1)
    )
    return parsed


class DispatchedSchedule(StageSchedule):
    """The base of SchedulePlanned, ScheduleLive and ScheduleAdaptiveZB: it measures operations and,
    if wanted, writes them down.

    `smart`: what of the activations may be dropped between stages (SmartOptions.activation_bound);
    the default is nothing. It takes effect over datagrams ("resilient" with wan=udp).

    Attributes:
        tolerance: that of this stage's activations, and what was dropped of them.
        recorder: what the stage did in the last iteration.
        waits: how the compute thread was blocked.
        recording: the file of this run; None if none is written.
        bubbles: runs other work while this stage waits in iterations with a backward, see there;
            None, the default, for nothing. Set it before a step. It needs the "resilient" backend.
    """

    def __init__(
        self,
        stage: AnyStage,
        *arguments: Any,
        smart: SmartOptions | None = None,
        timeline_dir: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(stage, *arguments, **keywords)
        self.tolerance = ActivationTolerance.of(smart, stage.stage_index, stage.num_stages)
        self.recorder = Recorder(stage.device)
        self.waits = Waits()
        self._patience = Patience()
        self.recording: Recording | None = None
        self.bubbles: Bubbles | None = None
        self._timeline_dir = timeline_dir or folder_from_environment()
        self._steps = 0

    @property
    def epoch(self) -> int:
        """The epoch of the plan in force."""
        return 0

    @property
    def last_spans(self) -> list[MeasuredSpan]:
        """The operations of this stage in the last iteration; on a device, waits for them to
        end."""
        return self.recorder.end()

    def around_operation(
        self, kind: str, microbatch: int
    ) -> contextlib.AbstractContextManager[None]:
        """The context of an operation, in iterations with a backward."""
        return contextlib.nullcontext()

    @abstractmethod
    def _dispatch(self, run: StageRun) -> None:
        """Runs an iteration with `run_live` or `run_fixed`."""

    def _run(self, actions: StageActions) -> None:
        if self._steps == 0:
            folder = agreed_folder(self._timeline_dir, self.stage)
            if folder is not None:
                self.recording = Recording(folder, self.stage)
        # An evaluation's F, without a graph, tells nothing of the training's.
        self.recorder.begin(self._steps, typical=actions.backward)
        bubbles = self.bubbles if actions.backward else None
        if bubbles is not None:
            bubbles.begin_iteration()
        run = StageRun(
            actions, self.recorder, self.waits, self.around_operation, self._patience, bubbles
        )
        self._dispatch(run)
        filled = [] if bubbles is None else bubbles.take_spans()
        if self.recording is not None and actions.backward:
            recorder = self.recorder
            self.recording.add(
                self._steps,
                self.epoch,
                self.last_spans,
                recorder.arrivals,
                recorder.start_s,
                filled,
            )
        self._steps += 1


class SchedulePlanned(DispatchedSchedule):
    """Runs every stage by a fixed order, as given.

    ::

        costs = PipelineCosts.of(4, forward_s=0.01, input_backward_s=0.01, weight_backward_s=0.01)
        orders = plan_schedule(costs, 12).orders
        schedule = SchedulePlanned(stage, 12, loss_fn, orders=orders)
        schedule.step(x)

    The constructor's other arguments, `step()` and `eval()` are those of torch's single-stage
    schedules; every rank gives the same `orders`: one list per stage, of Operation or texts such as
    "F0". In `eval()`, only the forwards run. It works on any backend. `timeline_dir`, for which the
    environment variable TORCH_RESILIENT_TIMELINE stands in: what all ranks measure is written
    there, for `torch-resilient timeline`. `smart` says which activations may be dropped on lossy
    links (SmartOptions.activation_bound); by default they are exact.

    Gradients and losses have the bits they have with any other order, unless something was dropped.
    Within DDP or FSDP2, gradients are reduced after the last W.

    Raises as `checked_orders`.
    """

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
        orders: Sequence[Sequence[Operation | str]],
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
        self.set_orders(orders)

    def set_orders(self, orders: Sequence[Sequence[Operation | str]]) -> None:
        """Other orders from the next step on; all ranks must change at the same step.

        Raises as `checked_orders`.
        """
        checked = checked_orders(orders, self.stage.num_stages, self.num_microbatches)
        self._order = checked[self.stage.stage_index]

    def _dispatch(self, run: StageRun) -> None:
        run.run_fixed(self._order)


class ScheduleLive(DispatchedSchedule):
    """Live dispatch under fixed gates: each stage runs what has arrived, B before F before W.

    `gates` may differ between ranks and may be replaced between steps, by assignment. A backend
    that cannot tell when its receives have ended, such as gloo, is refused at the first step.

    The other arguments are those of torch's single-stage schedules.
    """

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
        gates: StageGates,
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
        self.gates = gates

    def _dispatch(self, run: StageRun) -> None:
        if not run.live_possible:
            raise RuntimeError(
                'live dispatch needs the "resilient" backend: the receives of this one do not tell '
                "when they have ended; use a fixed order (SchedulePlanned)"
            )
        run.run_live(self.gates)
