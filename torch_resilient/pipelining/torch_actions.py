"""torch's pipeline stages, operation by operation: the only file that knows torch's private names.

Written for torch 2.11 to 2.15; tests/test_torch_pipelining.py guards each fact it builds on. The
papers' letters are used: F, B (the gradient of a stage's inputs, torch's I) and W (of its weights).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._backward import stage_backward_weight
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from torch_resilient import _native
from torch_resilient._groups import carries, find_backend
from torch_resilient.control.orchestrator import PlanStore
from torch_resilient.pipelining.tolerance import ActivationTolerance
from torch_resilient.smart import recovery
from torch_resilient.traffic import traffic_class

# torch's PipelineStage, or what its tracer makes (Pipe.build_stage()).
AnyStage = _PipelineStageBase
# Any schedule of torch.
TorchSchedule = torch_schedules._PipelineSchedule

_STORE_TIMEOUT = timedelta(seconds=10)
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


_waiting = threading.local()


def groups_of(schedule: TorchSchedule) -> set[dist.ProcessGroup | None]:
    """The groups over which one of torch's own schedules sends; None is the default group.

    Raises RuntimeError if this version of torch gives waits_by() no place.
    """
    if not hasattr(torch_schedules, "_wait_batch_p2p"):
        raise RuntimeError(
            f"torch {torch.__version__} waits for the messages of its schedules elsewhere: use the "
            "schedules of torch_resilient.pipelining"
        )
    if isinstance(schedule, PipelineScheduleSingle):
        return {schedule._stage.group}
    assert isinstance(schedule, torch_schedules.PipelineScheduleMulti)
    return {stage.group for stage in schedule._stages}


@contextlib.contextmanager
def waits_by(wait: Callable[[Sequence[dist.Work]], None]) -> Iterator[None]:
    """Within, torch's own schedules wait for their messages by `wait`, on this thread only."""
    if torch_schedules._wait_batch_p2p is not _wait_for_messages:
        _waiting_as_torch.append(torch_schedules._wait_batch_p2p)
        torch_schedules._wait_batch_p2p = _wait_for_messages
    before = getattr(_waiting, "by", None)
    _waiting.by = wait
    try:
        yield
    finally:
        _waiting.by = before


# torch's function, once it has been replaced.
_waiting_as_torch: list[Callable[[list[dist.Work]], None]] = []


def _wait_for_messages(work: list[dist.Work]) -> None:
    (getattr(_waiting, "by", None) or _waiting_as_torch[-1])(work)


def control_store() -> Store:
    """A separate client of the default group's store. Its calls block no other user, and fail after
    ten seconds: a store that is gone must not delay the end of the program.

    Raises ValueError if there is no default group.
    """
    store = dist.distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    if hasattr(store, "clone"):
        store = store.clone()
        store.set_timeout(_STORE_TIMEOUT)
    return store


class GroupStore:
    """`store` for the members of `group`, one thread at a time.

    If the group has a secret of its own, each value carries a MAC under it: get() raises ValueError
    for a value that no member has written for that key in this run.
    """

    def __init__(self, store: PlanStore, group: dist.ProcessGroup) -> None:
        self._store = store
        try:
            backend = find_backend(group)
        except ValueError:  # carried by another backend, which has no secret
            self._seal = None
        else:
            self._seal = _native.load().record_seal(backend)

    def set(self, key: str, value: str) -> None:
        self._store.set(key, self._seal.protect(key, value) if self._seal else value)

    def get(self, key: str) -> bytes:
        record = self._store.get(key)
        if self._seal is None:
            return record
        value: str = self._seal.open(key, record.decode(errors="replace"))
        return value.encode()


def group_of(stage: AnyStage) -> dist.ProcessGroup:
    """The process group that carries the stage's messages."""
    group = stage.group or dist.distributed_c10d._get_default_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The cheapest device for a small message of this group: the CPU if the group carries it."""
    cpu = torch.device("cpu")
    return cpu if cpu in group._device_types else device


class StageSchedule(PipelineScheduleSingle):
    """A schedule with one stage per rank; subclasses say in `_run` what comes when.

    Constructor and `step()` are those of torch's own single-stage schedules, such as Schedule1F1B.

    Attributes:
        tolerance: what may be missing of the activations that this stage sends; nothing.

    Raises ValueError for a number of microbatches below 1, for a group with another number of ranks
    than stages, and for a stage that DDP or FSDP2 wraps only in part. step() and eval() raise
    RuntimeError after one that has failed in the middle.
    """

    def __init__(
        self, stage: AnyStage, n_microbatches: int, *arguments: Any, **keywords: Any
    ) -> None:
        if n_microbatches < 1:
            raise ValueError(f"n_microbatches: expected at least 1, got {n_microbatches}")
        ranks = group_of(stage).size()
        if ranks != stage.num_stages:
            raise ValueError(
                f"stage: {stage.num_stages} stages on {ranks} ranks: {type(self).__name__} runs "
                "one stage on each rank of the stage's group"
            )
        _require_wrapped_root(stage.submod)
        super().__init__(stage, n_microbatches, *arguments, **keywords)
        _take_over_weight_backward(stage)
        self.tolerance = ActivationTolerance()
        self._first_shapes: list[tuple[int, ...]] | None = None
        self._failure = ""  # what ended a step in the middle

    @property
    def stage(self) -> AnyStage:
        return self._stage

    @property
    def num_microbatches(self) -> int:
        return int(self._n_microbatches)

    @abstractmethod
    def _run(self, actions: StageActions) -> None:
        """Runs one iteration: F of every microbatch in turn and, if `actions.backward`, B and W of
        each in turn."""

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if self._failure:
            raise RuntimeError(
                f"a step of stage {self.stage.stage_index} failed before ({self._failure}): "
                "messages of it are still under way, which later steps would take for theirs; end "
                "this process, so that the other ranks learn of it, and start all again from a "
                "checkpoint"
            )
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        if self._num_stages > 1:
            for name, microbatches in (
                ("input", arg_mbs),
                ("keyword argument", kwarg_mbs),
                ("target", target_mbs or []),
            ):
                _require_equal_shapes(name, microbatches, self.num_microbatches)
        if self._has_backward and target_mbs is None and self._stage.is_last:
            raise ValueError("step: the rank of the last stage needs target=..., for the loss")
        if self._num_stages > 1 and self._stage.is_first:
            self._require_shapes_of_before(arg_mbs[0], kwarg_mbs[0])
        first_target = target_mbs[0] if target_mbs else None
        initialize = self._initialize_stage
        loss_arguments = _loss_arguments(loss_kwargs)
        # torch 2.11 learns the shapes without a loss.
        for_loss = () if _TORCH < (2, 12) else (first_target, *loss_arguments)
        module = self._stage.submod
        ddp = isinstance(module, DistributedDataParallel)
        # The first time, torch may run the module to learn its shapes: DDP must not take that for
        # the forward after which it reduces gradients.
        self._internal_losses.clear()
        try:
            with module.no_sync() if ddp else contextlib.nullcontext():  # type: ignore[operator]
                initialize(arg_mbs[0], kwarg_mbs[0], *for_loss)  # type: ignore[no-untyped-call]
            actions = StageActions(
                self, arg_mbs, kwarg_mbs, target_mbs, return_outputs, loss_arguments
            )
            self._run(actions)
            # Usually they have ended long ago: a send ends when its buffer may be reused.
            actions.wait_for_sends()
        except BaseException as error:
            # The pipeline cannot go on: its ranks are at different messages.
            if self._num_stages > 1:
                cause = error.__cause__ or error  # torch tells of the user's error as a cause
                self._failure = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
            # Frees the graphs.
            self._internal_losses.clear()
            self._stage.clear_runtime_states()
            self._stage.backward_state.clear()
            self._stage.dw_runner.clear()
            raise
        if actions.backward:
            actions.reduce_gradients()
        self._update_losses(self._stage, losses)  # type: ignore[no-untyped-call]

    def _require_shapes_of_before(self, arguments: Any, keywords: Any) -> None:
        """Raises ValueError for a microbatch of another size than that for which torch has made the
        buffers of all stages."""
        shapes = _shapes((arguments, keywords))
        # If it makes them anew, between training and evaluation, any size will do.
        kept = (
            self._stage_forward_initialized
            and self._has_backward == self._stage_backward_initialized
        )
        if kept and shapes != self._first_shapes:
            raise ValueError(
                f"the inputs of a microbatch have shapes {shapes}, those of the steps before "
                f"{self._first_shapes}: the messages between stages keep their size; drop the odd "
                "batch or pad it, or make a stage and a schedule for each size"
            )
        self._first_shapes = shapes


class StageActions:
    """The operations of one stage in one iteration. One thread uses it.

    F, B and W must each run in microbatch order: torch keeps losses and outputs in the order of F,
    and the order of the sums into the gradients decides their last bit.
    """

    def __init__(
        self,
        schedule: StageSchedule,
        arg_mbs: list[Any],
        kwarg_mbs: list[Any],
        target_mbs: list[Any] | None,
        return_outputs: bool,
        loss_arguments: tuple[dict[str, Any], ...],
    ) -> None:
        self._schedule = schedule
        self._stage = schedule.stage
        self._arguments = arg_mbs
        self._keywords = kwarg_mbs
        self._targets = target_mbs
        self._return_outputs = return_outputs
        self._loss_arguments = loss_arguments
        self._sends: list[dist.Work] = []
        # By microbatch: activations that may lose something, with their place among the outputs.
        self._tolerant_sends: dict[int, list[tuple[int, Tensor, dist.Work]]] = {}
        self._ours = carries_messages(self._stage)
        # Only this backend tolerates drops.
        self._tolerance = schedule.tolerance if self._ours else ActivationTolerance()
        self.num_microbatches = schedule.num_microbatches
        self.backward: bool = schedule._has_backward
        self.splits_backward = splits_backward(self._stage.submod)
        if isinstance(self._stage.submod, FSDPModule):
            _unshard(self._stage.submod, self.backward)

    def receive_input(self, microbatch: int) -> list[dist.Work]:
        """Posts the receives of what F needs; none on the first stage."""
        return _post(self._stage.get_fwd_recv_ops(microbatch))

    def receive_gradient(self, microbatch: int) -> list[dist.Work]:
        """Posts the receives of what B needs; none on the last stage."""
        return _post(self._stage.get_bwd_recv_ops(microbatch))

    def forward(self, microbatch: int) -> None:
        """Runs F, which must have received its input."""
        stage = self._stage
        output = stage.forward_one_chunk(
            microbatch,
            self._arguments[microbatch],
            self._keywords[microbatch],
            save_forward_output=self._return_outputs,
        )
        if not stage.is_last:
            outputs, _ = _kept_by_forward(stage, microbatch)
            _keep_outputs(stage, microbatch, tuple(_not_a_view(each) for each in outputs))
        if not self.backward and not (stage.is_last and self._targets is not None):
            return
        compute_loss = self._schedule._maybe_compute_loss
        compute_loss(stage, output, self._targets, microbatch, *self._loss_arguments)  # type: ignore[no-untyped-call]
        losses = self._schedule._internal_losses
        if losses:
            losses[microbatch] = _not_a_view(losses[microbatch])
        if self.backward and self.splits_backward and microbatch == 0:
            self.splits_backward = self._graph_splits()

    def _graph_splits(self) -> bool:
        """Whether the backward of microbatch 0, after its F, can be split."""
        stage = self._stage
        outputs, inputs = _kept_by_forward(stage, 0)
        if stage.is_last:
            outputs = tuple(self._schedule._internal_losses)
        if stage.is_first:  # W is the whole backward
            return not _compiled_function_in(outputs)
        received = inputs[: len(stage.args_recv_info[0])]  # after them come keyword arguments
        return not _compiled_function_in(outputs) and weights_found_from(
            received, outputs, stage.submod
        )

    def send_output(self, microbatch: int) -> None:
        """Begins to send what F has computed, to the next stage if there is one."""
        if self._stage.is_last:
            return
        tolerant = self._tolerant_sends.setdefault(microbatch, [])
        with self._class("activation"):
            for index, operation in enumerate(self._stage.get_fwd_send_ops(microbatch)):
                if not self._tolerance.applies_to(operation.tensor):
                    self._send([operation])
                    continue
                with self._tolerance.granted():
                    (work,) = _post([operation])
                tolerant.append((index, operation.tensor, work))

    def input_backward(self, microbatch: int) -> None:
        """Runs B, which must have received its gradient.

        On the first stage, the inputs need no gradient, and W is the whole backward. If the
        backward cannot be split (`splits_backward`), B is the whole backward, and W does nothing.
        """
        self._ignore_gradients_of_dropped(microbatch)
        loss = self._schedule._maybe_get_loss(self._stage, microbatch)  # type: ignore[no-untyped-call]
        self._stage.backward_one_chunk(
            microbatch,
            loss=loss,
            full_backward=not self.splits_backward,
            last_backward=False,
        )
        for received in self._stage.args_recv_info[microbatch]:
            # Without a buffer, all of them stay until the next iteration; the placeholders of torch
            # 2.11 have no such attribute.
            buffer = getattr(received, "buffer", None)
            if buffer is not None:
                buffer.grad = None

    def send_gradient(self, microbatch: int) -> None:
        """Begins to send the gradient that B has computed, to the stage before if there is one."""
        with self._class("activation_gradient"):
            self._send(self._stage.get_bwd_send_ops(microbatch))

    def weight_backward(self, microbatch: int) -> None:
        """Runs W, some time after B."""
        if self.splits_backward:
            # Never "last": torch then expects hooks of DDP that a split backward does not run.
            self._stage.backward_weight_one_chunk(microbatch, last_backward=False)

    def reduce_gradients(self) -> None:
        """After all W: averages the gradients over the ranks that hold the same stage, if the
        module is wrapped by DDP or FSDP2, and divides them by the number of microbatches if the
        schedule scales gradients."""
        module = self._stage.submod
        if isinstance(module, DistributedDataParallel):
            _reduce_through_ddp(module)
        scale = self.num_microbatches if self._schedule.scale_grads else 1
        self._stage.perform_reduce_grad(scale)

    def wait_for_sends(self) -> None:
        """Until all buffers that were sent may be reused. Raises what a send ended with."""
        for microbatch in list(self._tolerant_sends):
            self._dropped_of(microbatch)  # not asked yet without a backward
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def _send(self, operations: Sequence[dist.P2POp]) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.pop(0).wait()  # raises its error
        self._sends += _post(operations)

    def _dropped_of(self, microbatch: int) -> dict[int, list[recovery.Range]]:
        """By output, what of it the next stage has replaced by zeros; waits until that is known."""
        dropped = {}
        for index, activation, work in self._tolerant_sends.pop(microbatch, []):
            work.wait()
            dropped[index] = self._tolerance.arrived(work, activation)
        return dropped

    def _ignore_gradients_of_dropped(self, microbatch: int) -> None:
        """Nothing depends on what was dropped, so its gradient is 0.

        The next stage, which has computed with zeros there, sends what their gradient would be. A
        row of zeros has no deviation, which makes the gradient of a layer norm huge.
        """
        for index, ranges in self._dropped_of(microbatch).items():
            gradient = self._stage.grad_recv_info[microbatch][index].buffer
            if gradient is None or not ranges:
                continue
            flat = gradient.reshape(-1)  # a copy if it is not contiguous
            for start, stop in ranges:
                flat[start:stop] = 0
            gradient.copy_(flat.view_as(gradient))

    def _class(self, name: str) -> contextlib.AbstractContextManager[object]:
        """The traffic class of what is sent within, where there are such classes."""
        return traffic_class(name) if self._ours else contextlib.nullcontext()


def carries_messages(stage: AnyStage) -> bool:
    """Whether this project's backend carries the stage's messages: those of its type of device."""
    try:
        return carries(group_of(stage), stage.device)
    except ImportError:  # it has not been built; others need not be told
        return False


def _post(operations: Iterable[dist.P2POp]) -> list[dist.Work]:
    works = []
    for each in operations:
        peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
        works.append(each.op(each.tensor, group=each.group, tag=each.tag, **peer))
    return works


def _require_equal_shapes(name: str, microbatches: Sequence[Any], count: int) -> None:
    """Raises ValueError if one microbatch differs: its receiver expects the shape of the first."""
    shapes = [_shapes(microbatch) for microbatch in microbatches]
    for i, each in enumerate(shapes):
        if each != shapes[0]:
            raise ValueError(
                f"{name} of microbatch {i} has shapes {each}, that of microbatch 0 {shapes[0]}: a "
                f"pipeline needs microbatches of one size; make the batch divisible by {count} "
                "(drop the rest or pad it)"
            )


def _shapes(value: Any) -> list[tuple[int, ...]]:
    """The shapes of all tensors in `value`."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]


def _require_wrapped_root(module: torch.nn.Module) -> None:
    """Raises ValueError if DDP or FSDP2 wraps parts of the module but not the whole: gradients are
    reduced through the root."""
    wrappers = (DistributedDataParallel, FSDPModule)
    if isinstance(module, wrappers):
        return
    for name, each in module.named_modules():
        if isinstance(each, wrappers):
            ddp = isinstance(each, DistributedDataParallel)
            remedy = (
                "wrap the stage's module by DDP instead" if ddp else "fully_shard the stage, too"
            )
            raise ValueError(
                f"stage: {'DDP' if ddp else 'FSDP2'} wraps its module {name!r} but not the whole, "
                f"through which gradients are reduced: {remedy}"
            )


def _take_over_weight_backward(stage: AnyStage) -> None:
    """Lets W work for parameters that a stage uses at several depths.

    Their group's graph runs through those of other parameters, which torch 2.13 has freed by then;
    and where other parameters enter at the same depths, torch 2.13 puts them into several groups,
    and their gradients would be counted as often.
    """
    theirs = type(stage).backward_maybe_with_nosync
    itself = weakref.proxy(stage)  # in no cycle: the module's memory goes with the last reference

    def backward(kind: str, arguments: dict[str, Any], last_backward: bool = False) -> Any:
        if kind != "weight":
            return theirs(itself, kind, arguments, last_backward)
        groups = _disjoint(arguments["param_groups"])
        # Kept or not, the graph goes with the last references to these groups.
        shared = any(len(group["intermediates"]) > 1 for group in groups)
        stage_backward_weight(itself.submod.parameters(), groups, retain_graph=shared)
        return (), None

    stage.backward_maybe_with_nosync = backward  # type: ignore[method-assign, assignment]


def _disjoint(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups that `stage_backward_input` returned; those that share a parameter as one."""
    params: set[Any] = set().union(*(group["params"] for group in groups))
    if len(params) == sum(len(group["params"]) for group in groups):
        return groups
    result: list[dict[str, Any]] = []
    for group in groups:
        grads = dict(zip(group["intermediates"], group["grads"], strict=True))
        params = set(group["params"])
        for other in [each for each in result if not params.isdisjoint(each["params"])]:
            result.remove(other)
            params |= other["params"]
            grads |= zip(other["intermediates"], other["grads"], strict=True)
        merged = {"intermediates": list(grads), "grads": list(grads.values())}
        result.append({"params": params, **merged})
    return result


def splits_backward(module: torch.nn.Module) -> bool:
    """Whether B and W of this module can run apart, as far as the module tells.

    Not if any of it is compiled: a compiled region has one backward for inputs and weights, which
    can run only once. Compiled functions that are no modules show only in the graph of F
    (`_compiled_function_in`). Nor if a parameter has a hook for after its gradient is accumulated:
    W adds up gradients without autograd, which would not call it. Nor with torch before 2.13: its W
    counts some gradients twice if a parameter is used at several depths, and its B refuses
    arguments that are no tensors and inputs that the outputs do not depend on.
    """
    if _TORCH < (2, 13):
        return False
    return not any(
        isinstance(each, OptimizedModule) or each._compiled_call_impl is not None
        for each in module.modules()
    ) and not any(each._post_accumulate_grad_hooks for each in module.parameters())


def weights_found_from(
    received: Sequence[Any], outputs: Sequence[Any], module: torch.nn.Module
) -> bool:
    """Whether W reaches all that the whole backward of these outputs would give a gradient to.

    torch's W begins where B, on its way to the `received` inputs, has passed by, and only looks for
    the module's parameters. So it misses those that an output depends on, but no input, as where
    the stages before are frozen; and tensors from elsewhere, as parameters of the loss.
    """
    wanted = {id(each) for each in (*received, *module.parameters())}
    inputs = {id(each) for each in received}
    roots = []
    for each in outputs:
        if isinstance(each, Tensor) and each.requires_grad and id(each) not in inputs:
            if each.grad_fn is None:  # a parameter is the output
                return False
            roots.append(each.grad_fn)
    users: dict[Any, list[Any]] = {root: [] for root in roots}
    pending, passed = list(users), []
    while pending:
        node = pending.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            if id(node.variable) not in wanted:
                return False
            if id(node.variable) in inputs:
                passed.append(node)
        for after, _ in node.next_functions:
            if after is None:
                continue
            if after not in users:
                users[after] = []
                pending.append(after)
            users[after].append(node)
    reached = set(passed)
    while passed:
        for user in users[passed.pop()]:
            if user not in reached:
                reached.add(user)
                passed.append(user)
    return reached.issuperset(roots)


def _compiled_function_in(outputs: Sequence[Any]) -> bool:
    """Whether a compiled function has a part in what these tensors were computed by."""
    pending = [each.grad_fn for each in outputs if isinstance(each, Tensor)]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CompiledFunctionBackward":
            return True
        seen.add(node)
        pending += [before for before, _ in node.next_functions]
    return False


class _Owned(torch.autograd.Function):
    """The identity; its output shares the memory of its input, but is no view of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        owner = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        with torch.no_grad():
            owner.set_(
                tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            )
        return owner

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _loss_arguments(loss_kwargs: dict[str, Any] | None) -> tuple[dict[str, Any], ...]:
    """The last argument of torch's methods that compute a loss; none if it is the default.

    Before torch 2.13 these methods do not have it.
    """
    return (loss_kwargs,) if loss_kwargs else ()


def _kept_by_forward(stage: Any, microbatch: int) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The outputs and inputs that F has kept for B."""
    if hasattr(stage, "fwd_cache"):
        outputs, inputs = stage.fwd_cache[microbatch]
        return outputs, inputs
    # torch 2.15 and later keep more than these two.
    state = stage._forward_chunk_states[microbatch]
    return tuple(state.live_outputs), state.input_values


def _keep_outputs(stage: Any, microbatch: int, outputs: tuple[Any, ...]) -> None:
    """Replaces the outputs that F has kept for B."""
    _, inputs = _kept_by_forward(stage, microbatch)
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache[microbatch] = (outputs, inputs)
    else:
        stage._forward_chunk_states[microbatch] = stage._make_forward_chunk_state(outputs, inputs)


def _not_a_view(output: Any) -> Any:
    """torch's split backward detaches the stage's outputs in place, which a view refuses."""
    if type(output) is Tensor and output.requires_grad and output._is_view():
        return _Owned.apply(output)  # type: ignore[no-untyped-call]
    return output


def _unshard(module: FSDPModule, backward: bool) -> None:
    """Gathers all parameters of an FSDP2 module, to stay so until the gradients are reduced."""
    # Between B and W the parameters must be the tensors that F has used.
    module.set_reshard_after_forward(not backward)
    handles = []
    assert isinstance(module, torch.nn.Module)
    for each in module.modules():
        if isinstance(each, FSDPModule):
            handles.append(each.unshard(async_op=True))
    for handle in handles:
        if handle is not None:
            handle.wait()


def _reduce_through_ddp(module: DistributedDataParallel) -> None:
    """Lets DDP average the gradients in its buckets, with its communication hook.

    The split backward computes gradients with torch.autograd.grad, which runs no hooks: DDP would
    never reduce them (pytorch/pytorch#144530). So a backward that adds -0.0 to each gradient, which
    changes no bit of any number, runs the hooks.
    """
    parameters = [
        parameter
        for name, parameter in module.module.named_parameters()
        if parameter.requires_grad and name not in module.parameters_to_ignore
    ]
    unused = [parameter for parameter in parameters if parameter.grad is None]
    if unused:
        if not module.find_unused_parameters:
            raise RuntimeError(
                f"DistributedDataParallel: {len(unused)} parameters of this stage had no part in "
                "the loss; find_unused_parameters=True allows that"
            )
        parameters = [parameter for parameter in parameters if parameter.grad is not None]
    # As DDP's own forward does where gradients are to be synchronised.
    module.reducer.prepare_for_backward(parameters)
    zeros = [torch.full((), -0.0, dtype=p.dtype, device=p.device).expand_as(p) for p in parameters]
    torch.autograd.backward(parameters, zeros)
