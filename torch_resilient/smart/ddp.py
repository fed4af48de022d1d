"""Data-parallel gradients over links that drop packets: DDP's hook with error feedback.

    state = SmartState(model=model)            # every rank, at the same point of the program
    model.register_comm_hook(state, smart_hook)

The documentation of lossy links has the algorithm, why replicas stay identical, and the guard
rails.

Paper: SMART §3.3; the priority of packets is §3.1, and what is sent again is §3.2.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from torch_resilient._groups import carries, find_backend
from torch_resilient._reports.topology import topology
from torch_resilient.smart import recovery
from torch_resilient.smart.gradient_drop import ErrorMemory, Layout, all_finite, sampled_cutoff
from torch_resilient.smart.guard import Guard, SmartStatistics
from torch_resilient.smart.options import SmartOptions
from torch_resilient.smart.plan import ReducePlan
from torch_resilient.smart.recovery import Range
from torch_resilient.smart.transfers import Transfer, Transfers

__all__ = [
    "SmartReduceScatter",
    "SmartState",
    "smart_hook",
    "smart_reduce_scatter",
]

# Matching uses the number of the bucket; c10d's tags are 32 bits.
_TAGS = 1 << 29
# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class SmartState:
    """The state of `smart_hook` on one rank: settings, error memory, counters.

    Making one is a collective: all ranks of `process_group` (None: the default group; it must be
    the one DDP uses) do so at the same point of the program. It makes a group of its own, because
    its operations must not get between those of the program. On another backend than "resilient"
    the hook is torch's all-reduce.

    `model` (the module, or DDP around it) gives parameters their names; needed for state_dict().
    `sites`: the site of each rank, by rank, the same on all ranks. Ranks of one site add up their
    gradients exactly before anything is sent to another site, and only there anything may be
    dropped. None: as `torch_resilient.topology()` knows; without any, each rank is its own site.

    Raises ValueError for `sites` of the wrong length, or without a process group.

    Thread: the program's, between two steps. All work of a bucket runs on one thread of this
    object. Autograd's thread never waits, and all ranks gather in the order of buckets, whichever
    arrives first.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        options: SmartOptions | None = None,
        *,
        model: nn.Module | None = None,
        sites: Sequence[str] | None = None,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            process_group = process_group or model.process_group
            model = model.module
        self.options = options or SmartOptions()
        process_group = process_group or dist.group.WORLD
        if process_group is None:
            raise ValueError("SmartState: call init_process_group() first")
        self.process_group: dist.ProcessGroup = process_group
        size, rank = process_group.size(), process_group.rank()
        if sites is not None and len(sites) != size:
            raise ValueError(f"SmartState: {len(sites)} sites for {size} ranks: one for each")
        self._names: dict[Tensor, str] = {}
        if model is not None:
            self._names.update((p, n) for n, p in model.named_parameters())
        self._named = model is not None
        self._modules: dict[str, None] = {}  # keys of FSDP's modules, of sizes that it chooses
        self._memory = ErrorMemory()
        # Of its own: the program's random numbers must not depend on the network.
        self._generator = torch.Generator().manual_seed(rank)
        self._step_bad = False  # a result was not finite
        self._step_memory = self._memory.snapshot()  # of before the step
        self._carried: dict[str, bool] = {}  # by type of device: whether this backend carries it
        self._guard = Guard(self.options, rank)
        self._transfers = Transfers()

        self._group = _own_group(self.process_group)
        if self._group is None:
            self._guard.never = "the group does not use the backend resilient"
        elif sites is None and size > 1:
            sites = topology(self._group).sites
        if sites is None or not any(sites):
            sites = [f"rank {r}" for r in range(size)]
        self._plan = ReducePlan(rank, sites)

    # ---- for the program ------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether all messages of this rank are exact from now on. May be set.

        Ranks need not agree: each decides about what it sends.
        """
        return self._guard.exact

    @exact.setter
    def exact(self, value: bool) -> None:
        self._guard.set_exact(value)

    def exact_next_step(self) -> None:
        """Makes the next step exact, on this rank: it sends all of the error memory, too.

        Before the last step, or a checkpoint that will go on with another number of ranks.
        """
        self._guard.exact_next = True

    def scale_error_memory(self, factor: float) -> None:
        """Multiplies the error memory, where the unit of gradients changes: a new loss scale.

        Raises ValueError unless `factor` is finite.
        """
        if not math.isfinite(factor):
            raise ValueError(f"scale_error_memory: factor={factor}: expected a finite number")
        self._memory.scale(factor)

    def error_memory(self) -> dict[str, Tensor]:
        """Returns the values still to be sent, by name: flat tensors, 0 where nothing is left."""
        return {
            name: self._memory.dense(name, parameter.numel())
            for parameter, name in self._names.items()
            if self._memory.holds([(name, 0)])
        }

    def statistics(self) -> SmartStatistics:
        """Returns this rank's counts so far. Reads the whole error memory for its norm."""
        return self._guard.statistics(self._memory)

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's part of a checkpoint; each rank must save its own.

        Raises ValueError if the state was made without `model`: buckets do not last, so a later run
        could not assign the values without names.
        """
        self._need_names()
        return {
            "error_memory": self._memory.state_dict(),
            "generator": self._generator.get_state(),
            **self._guard.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where state_dict() was taken, on the same rank of as many ranks.

        Buckets may have other sizes. Raises ValueError if the state was made without `model`, or
        if a parameter is missing or has another size; then nothing is changed.
        """
        self._need_names()
        sizes = {**{n: p.numel() for p, n in self._names.items()}, **self._modules}
        self._memory.load_state_dict(state["error_memory"], sizes)
        self._step_memory = self._memory.snapshot()
        self._generator.set_state(state["generator"])
        self._guard.load_state_dict(state, sizes)

    def _need_names(self) -> None:
        if not self._named:
            raise ValueError(
                "a SmartState without names of parameters cannot be saved: make it with "
                "SmartState(..., model=model)"
            )

    # ---- the way of a bucket --------------------------------------------------------------------

    def _start(
        self,
        buffer: Tensor,
        layout: Layout,
        output: Tensor | None = None,
        divide: bool = True,
    ) -> Future[Tensor]:
        """Begins to reduce `buffer`, in place; the future gives `buffer`, or `output` if set."""
        return self._transfers.start(buffer, layout, output, divide, self._begin)

    def _begin(self, transfer: Transfer) -> None:
        """Forms p = x + e, and adds up what the ranks of this site have."""
        plan, buffer = self._plan, transfer.buffer
        self._transfers.enter(transfer)
        if self._guard.begins_step([key for key, _ in transfer.layout]):
            self._step_bad = False
            self._step_memory = self._memory.snapshot()
        elements = buffer.numel()
        chunk = -(-elements // plan.size)
        # Sums are in float32 at least, whatever the type of the gradients.
        payload = buffer.new_empty(
            plan.size * chunk, dtype=torch.promote_types(buffer.dtype, torch.float32)
        )
        payload[:elements].copy_(buffer)
        payload[elements:].zero_()
        self._memory.add_to(payload, transfer.layout)
        transfer.payload = payload.view(plan.size, chunk)
        transfer.wire = transfer.payload.to(buffer.dtype)

        peers = [peer for peer in plan.site_members if peer != plan.rank]
        if not peers:
            self._send(transfer)
            return
        transfer.incoming = {
            peer: transfer.wire.new_empty(len(plan.duties[plan.rank]), chunk) for peer in peers
        }
        within = recovery.exchange(
            {peer: transfer.wire[plan.duties[peer]] for peer in peers},
            transfer.incoming,
            self._own,
            tag=2 * (transfer.number % _TAGS),
        )
        self._transfers.after(transfer, [*within.received, *within.sent], self._add_site)

    def _add_site(self, transfer: Transfer) -> None:
        """The partial sums of this site take the place of what this rank alone had."""
        plan = self._plan
        duties = plan.duties[plan.rank]
        parts = {**transfer.incoming, plan.rank: transfer.payload[duties]}
        transfer.payload[duties] = _sum_in_order([parts[peer] for peer in plan.site_members])
        if transfer.wire is not transfer.payload:
            transfer.wire[duties] = transfer.payload[duties].to(transfer.wire.dtype)
        self._send(transfer)

    def _send(self, transfer: Transfer) -> None:
        """Sends each shard's part straight to the rank that reduces it: one hop, no partial sums.

        Paper: SMART §3.1, one threshold for each bucket.
        """
        plan, options, wire = self._plan, self.options, transfer.wire
        chunk = wire.shape[1]
        message_bytes = chunk * wire.element_size()
        transfer.incoming = {
            peer: wire.new_empty(chunk) for peer in plan.senders if peer != plan.rank
        }
        outgoing = {peer: wire[peer] for peer in plan.remote_shards}
        threshold = -1.0
        if (
            outgoing
            and not self._guard.exact_now
            and options.max_low_priority_drop > 0
            and message_bytes >= options.exact_below_bytes
        ):
            # All of the bucket, unless some of its shards are for others of the site to send.
            sent = wire if len(plan.site_members) == 1 else wire[plan.remote_shards]
            if not all_finite(sent):
                transfer.finite = False
                self._guard.say_once("gradients with NaN or infinite values are sent exactly")
            else:
                cutoff = sampled_cutoff(
                    sent.view(-1), options.top_fraction, options.samples, self._generator
                )
                # If hardly any element differs from 0, every packet that has one matters.
                threshold = cutoff if cutoff > 0 else -1.0
        transfer.tolerant = threshold >= 0
        sent_bytes = message_bytes * len(outgoing)
        self._guard.on_sent(len(outgoing), sent_bytes, transfer.tolerant)
        transfer.exchange = recovery.exchange(
            outgoing,
            transfer.incoming,
            self._own,
            tag=2 * (transfer.number % _TAGS) + 1,
            threshold=threshold,
            max_drop_fraction=options.max_low_priority_drop if transfer.tolerant else 0.0,
        )
        self._transfers.after(transfer, transfer.exchange.received, self._reduce)

    def _reduce(self, transfer: Transfer) -> None:
        """Adds up this rank's shard in the order of the sites."""
        plan = self._plan
        parts = {**transfer.incoming, plan.rank: transfer.payload[plan.rank]}
        total = _sum_in_order([parts[peer] for peer in plan.senders])
        if transfer.divide:
            total /= plan.size
        transfer.shard = total.to(transfer.wire.dtype)
        transfer.incoming = {}
        # Collectives match by their order: that of the buckets, not of arrival.
        while self._transfers.gathers and self._transfers.gathers[0].shard is not None:
            self._gather(self._transfers.gathers[0])  # stays among those that fail if this does
            self._transfers.gathers.popleft()

    def _gather(self, transfer: Transfer) -> None:
        """All ranks get the reduced shards, exactly: replicas stay identical."""
        assert transfer.exchange is not None
        assert transfer.shard is not None
        waiting = list(transfer.exchange.sent)
        if transfer.output is None:
            transfer.gathered = torch.empty_like(transfer.wire)
            work = _all_gather(
                transfer.gathered.view(-1), transfer.shard, group=self._own, async_op=True
            )
            assert work is not None, "asynchronous"
            waiting.append(work.get_future())
        self._transfers.after(transfer, waiting, self._finish)

    def _finish(self, transfer: Transfer) -> None:
        """Stores what was dropped as the new error memory, and hands over the result."""
        assert transfer.exchange is not None
        assert transfer.shard is not None
        if transfer.gathered is not None:
            value = transfer.buffer
            value.copy_(transfer.gathered.view(-1)[: value.numel()])
        else:
            assert transfer.output is not None
            value = transfer.output.copy_(transfer.shard)
        dropped = self._dropped(transfer)
        # A step with such a result is skipped or ruins the model, and what its other buckets have
        # delivered with it: what the memory was before the step, it is again. With DDP all ranks
        # see the same result.
        if not self._step_bad and not (transfer.finite and all_finite(value)):
            self._step_bad = True
            self._memory.rewind(self._step_memory)
            self._guard.say_once("a result with NaN or infinite values: the error memory is kept")
        if not self._step_bad and (dropped or self._memory.holds(transfer.layout)):
            self._memory.remember(transfer.payload.view(-1), transfer.layout, dropped)
        transfer.handover.result.set_result(value)

    def _dropped(self, transfer: Transfer) -> list[Range]:
        """Returns the ranges that others zero-filled, ascending; counts and guards."""
        assert transfer.exchange is not None
        dropped = []
        chunk, element_bytes = transfer.wire.shape[1], transfer.wire.element_size()
        bound = self.options.max_low_priority_drop if transfer.tolerant else 0.0
        for peer, ranges in sorted(transfer.exchange.dropped().items()):
            count = sum(stop - start for start, stop in ranges)
            self._guard.on_dropped(count * element_bytes)
            if count > bound * chunk:
                self._guard.make_exact(
                    f"rank {peer} zero-filled {count / chunk:.1%} of a message, more than "
                    f"the bound of {bound:.1%}"
                )
            dropped += [(peer * chunk + start, peer * chunk + stop) for start, stop in ranges]
        return dropped

    def _carries(self, tensor: Tensor) -> bool:
        """Whether tensors like this one are this backend's: not with "cuda:nccl"."""
        kind = tensor.device.type
        if kind not in self._carried:
            self._carried[kind] = self._group is not None and carries(self._group, tensor.device)
            if not self._carried[kind]:
                self._guard.say_once(f"tensors on {kind} are reduced exactly, by another backend")
        dense = tensor.layout == torch.strided
        return self._carried[kind] and dense and tensor.is_floating_point()

    @property
    def _own(self) -> dist.ProcessGroup:
        assert self._group is not None
        return self._group

    def _name_of(self, parameter: Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            if self._named:
                raise ValueError(
                    "SmartState: a bucket has a parameter that `model` lacks: give SmartState the "
                    "model that DDP wraps"
                )
            name = f"parameter {len(self._names)}"
            self._names[parameter] = name
        return name


def smart_hook(
    state: SmartState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> Future[Tensor]:
    """DDP's communication hook: the mean of the gradients, on every rank the same bits.

    For `DistributedDataParallel.register_comm_hook(state, smart_hook)`. Returns at once. On
    another backend than "resilient", and for complex or sparse gradients, it is torch's all-reduce.
    """
    buffer = bucket.buffer()
    layout = [(state._name_of(p), p.numel()) for p in bucket.parameters()]
    if not state._carries(buffer):
        group = state.process_group
        if state._memory.holds(layout):  # from a checkpoint
            state._memory.add_to(buffer, layout)
            state._memory.remember(buffer, layout, [])
        buffer.div_(group.size())
        work = dist.all_reduce(buffer, group=group, async_op=True)
        assert work is not None, "asynchronous"
        reduced: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return reduced
    return state._start(buffer, layout)


class SmartReduceScatter:
    """FSDP2's reduce-scatter with error feedback, for one module; see smart_reduce_scatter."""

    def __init__(self, state: SmartState, name: str) -> None:
        self._state, self._name = state, name
        # Not the name of a parameter: those are kept apart in one error memory.
        self._key = f"{name}/" if name else "/"
        state._modules[self._key] = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new tensor, as by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces `input_tensor` (one part for each rank) to this rank's part.

        Raises ValueError for another operation than sum and mean, or another group than the
        state's.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"smart_reduce_scatter: operation {op}: expected SUM or AVG")
        state = self._state
        if dist.get_process_group_ranks(group) != dist.get_process_group_ranks(state.process_group):
            raise ValueError(
                f"smart_reduce_scatter: module {self._name!r} is sharded over other ranks than "
                "the SmartState's process_group"
            )
        if not state._carries(input_tensor):
            _reduce_scatter(output_tensor, input_tensor, op=op, group=group)
            return
        layout = [(self._key, input_tensor.numel())]
        flat = input_tensor.view(-1)
        state._start(flat, layout, output_tensor, op == dist.ReduceOp.AVG).wait()


def smart_reduce_scatter(state: SmartState, model: nn.Module) -> None:
    """Makes FSDP2 reduce the gradients of `model` (after fully_shard) as smart_hook does.

    `state` is made with the process group over which `model` is sharded and with model=model.
    The backward waits for each reduction. Parameters are always gathered exactly. Raises
    ValueError if no part of `model` is sharded by fully_shard().
    """
    from torch.distributed.fsdp import FSDPModule

    sharded = [(n, m) for n, m in model.named_modules() if isinstance(m, FSDPModule)]
    if not sharded:
        raise ValueError("smart_reduce_scatter: call fully_shard(model) first")
    for name, module in sharded:
        # Else FSDP leaves out what was not used in this backward, and the parameters that the rest
        # belongs to would be unknown. torch before 2.13 always does.
        if hasattr(module, "set_reduce_scatter_unused_params"):
            module.set_reduce_scatter_unused_params(True, recurse=False)
        module.set_custom_reduce_scatter(SmartReduceScatter(state, name))  # type: ignore[arg-type]


def _own_group(process_group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """A group of the same ranks with the same limits; None if it is of another backend."""
    try:
        timeout = find_backend(process_group).options._timeout
    except (ValueError, ImportError):
        return None
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(process_group),
        timeout=timeout,
        backend=dist.get_backend_config(process_group),
        use_local_synchronization=True,
        group_desc="smart",
    )
    return made


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum in float32 at least, always in this order: the same bits in every run."""
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    if len(parts) == 1:
        return parts[0].to(wide, copy=True)
    total = parts[0].to(wide) + parts[1].to(wide)
    for part in parts[2:]:
        total += part
    return total
