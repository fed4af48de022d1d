"""Data-parallel gradients over links that drop packets: DDP's hook with error feedback.

    state = SmartState(model=model)            # every rank, at the same point of the program
    model.register_comm_hook(state, smart_hook)

The documentation of lossy links has the algorithm, why replicas stay identical, and the guard
rails.

Paper: SMART §3.3; the priority of packets is §3.1, and what is sent again is §3.2.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from torch_resilient._groups import carries, find_backend
from torch_resilient._topology import topology
from torch_resilient.smart import recovery
from torch_resilient.smart.gradient_drop import ErrorMemory, Layout, all_finite, sampled_cutoff
from torch_resilient.smart.options import SmartOptions
from torch_resilient.smart.recovery import Range

__all__ = [
    "SmartReduceScatter",
    "SmartState",
    "SmartStatistics",
    "smart_hook",
    "smart_reduce_scatter",
]

_log = logging.getLogger("torch_resilient")
# Matching uses the number of the bucket; c10d's tags are 32 bits.
_TAGS = 1 << 29
# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class SmartStatistics:
    """What one rank's SmartState has done so far; `error_norm` and so on are of this moment."""

    steps: int
    exact_steps: int  # of these, those in which this rank had to be exact throughout
    messages: int  # sent towards the rank that reduces them, other than within a site
    bytes_sent: int  # of these messages
    bytes_tolerant: int  # of those sent with a tolerance
    bytes_zero_filled: int  # of those, dropped
    mean_drop: float  # bytes zero-filled / bytes tolerant, over the last drop_window_steps
    error_elements: int  # in the error memory
    error_norm: float  # its Euclidean norm
    exact_reason: str  # why the state is exact for good; "": it is not


class _Plan:
    """Who sends what to whom: a shard for each rank, and for each site an agent for each shard.

    The agent of a site for shard j adds up what the ranks of its site have of it and sends the
    partial sum to rank j, which adds up those of all sites. Rank j is its own site's agent for
    shard j. Where each rank is a site of its own, it is its own agent for all shards.
    """

    def __init__(self, rank: int, sites: Sequence[str]) -> None:
        names = list(dict.fromkeys(sites))
        members = {site: [r for r, s in enumerate(sites) if s == site] for site in names}

        def agent(site: str, shard: int) -> int:
            if sites[shard] == site:
                return shard
            ranks = members[site]
            # Ranks of another site share out its shards by their place in it.
            return ranks[members[sites[shard]].index(shard) % len(ranks)]

        mine = sites[rank]
        self.rank, self.size = rank, len(sites)
        self.site_members = members[mine]
        self.duties = {
            peer: [j for j in range(self.size) if agent(mine, j) == peer] for peer in members[mine]
        }
        # Shards of which this rank sends its site's partial sum to another site.
        self.remote_shards = [j for j in self.duties[rank] if sites[j] != mine]
        # In the order of the sites: who sends this rank's shard; itself for its own site.
        self.senders = [agent(site, rank) for site in names]


@dataclass
class _Flight:
    """One bucket on its way. Thread: the worker's, once it is under way."""

    buffer: Tensor  # one-dimensional; input, and output unless `output` is set
    layout: Layout
    result: Future[Tensor]
    ready: Any  # an event of the device after which `buffer` holds the gradients; None on the CPU
    output: Tensor | None = None  # set: only this rank's shard is wanted, and goes here
    divide: bool = True
    number: int = 0  # of all buckets of this state
    tolerant: bool = False
    finite: bool = True  # False: this rank sends NaN or infinity
    payload: Tensor = field(init=False)  # (ranks, chunk): p = x + e, in the type of the sums
    wire: Tensor = field(init=False)  # the same in the type of the buffer; maybe the same tensor
    incoming: dict[int, Tensor] = field(default_factory=dict)
    exchange: recovery.Exchange | None = None
    shard: Tensor | None = None  # this rank's, reduced
    gathered: Tensor | None = None


class SmartState:
    """The state of `smart_hook` on one rank: settings, error memory, counters.

    Making one is a collective: all ranks of `process_group` (None: the default group; it must be
    the one DDP uses) do so at the same point of the program. It makes a group of its own, so that
    its operations cannot get between those of the program. On another backend than "resilient"
    the hook is torch's all-reduce.

    `model` (the module, or DDP around it) gives parameters their names; needed for state_dict().
    `sites`: the site of each rank, by rank, the same on all ranks. Ranks of one site add up their
    gradients exactly before anything is sent to another site, and only there anything may be
    dropped. None: as `torch_resilient.topology()` knows; without any, each rank is its own site.

    Raises ValueError for `sites` of the wrong length, or without a process group.

    Thread: the program's, between two steps. All work of a bucket runs on one thread of this
    object, so that autograd's never waits, and so that all ranks gather in the order of buckets
    whatever arrives first.
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
        self._never = ""  # why nothing can be dropped here, whatever the program wants
        self._exact_reason = ""
        self._exact_next = False
        # Of its own: the program's random numbers must not depend on the network.
        self._generator = torch.Generator().manual_seed(rank)
        self._steps = self._exact_steps = self._messages = 0
        self._bytes_sent = self._bytes_tolerant = self._bytes_dropped = 0
        self._step_dropped = self._step_tolerant = 0
        self._step_exact = False
        self._step_bad = False  # a result was not finite
        self._step_memory = self._memory.snapshot()  # of before the step
        self._window: deque[tuple[int, int]] = deque(maxlen=self.options.drop_window_steps)
        self._seen: set[str] = set()
        self._said: set[str] = set()
        self._carried: dict[str, bool] = {}  # by type of device: whether this backend carries it

        self._group = _own_group(self.process_group)
        self._rank = rank
        if self._group is None:
            self._never = "the group does not use the backend resilient"
            return
        if sites is None and size > 1:
            sites = topology(self._group).sites
        if sites is None or not any(sites):
            sites = [f"rank {r}" for r in range(size)]
        self._plan = _Plan(rank, sites)
        self._worker = ThreadPoolExecutor(1, "torch_resilient smart")
        self._streams: dict[torch.device, Any] = {}
        self._flights = 0
        self._gathers: deque[_Flight] = deque()  # in the order of buckets

    # ---- for the program ------------------------------------------------------------------------

    @property
    def exact(self) -> bool:
        """Whether all messages of this rank are exact from now on. May be set.

        Ranks need not agree: each decides about what it sends.
        """
        return bool(self._never or self._exact_reason)

    @exact.setter
    def exact(self, value: bool) -> None:
        self._exact_reason = "the program asked for it" if value else ""

    def exact_next_step(self) -> None:
        """Makes the next step exact, on this rank: it sends all of the error memory, too.

        Before the last step, or a checkpoint that will go on with another number of ranks.
        """
        self._exact_next = True

    def scale_error_memory(self, factor: float) -> None:
        """Multiplies the error memory, where the unit of gradients changes: a new loss scale.

        Raises ValueError unless `factor` is finite.
        """
        if not math.isfinite(factor):
            raise ValueError(f"scale_error_memory: factor={factor}: expected a finite number")
        self._memory.scale(factor)

    def error_memory(self) -> dict[str, Tensor]:
        """What this rank has still to send, by name: flat tensors with zeros where nothing is."""
        return {
            name: self._memory.dense(name, parameter.numel())
            for parameter, name in self._names.items()
            if self._memory.holds([(name, 0)])
        }

    def statistics(self) -> SmartStatistics:
        """What this rank's state has done so far. Reads all of the error memory for its norm."""
        tolerant = self._step_tolerant + sum(tolerant for _, tolerant in self._window)
        dropped = self._step_dropped + sum(dropped for dropped, _ in self._window)
        return SmartStatistics(
            steps=self._steps,
            exact_steps=self._exact_steps + (1 if self._step_exact else 0),
            messages=self._messages,
            bytes_sent=self._bytes_sent,
            bytes_tolerant=self._bytes_tolerant,
            bytes_zero_filled=self._bytes_dropped,
            mean_drop=dropped / tolerant if tolerant else 0.0,
            error_elements=self._memory.elements(),
            error_norm=self._memory.norm(),
            exact_reason=self._never or self._exact_reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of this rank needs; every rank's is different and must be saved.

        Raises ValueError if the state was made without `model`: buckets do not last, so without
        names nobody could tell later what belongs where.
        """
        self._need_names()
        return {
            "error_memory": self._memory.state_dict(),
            "generator": self._generator.get_state(),
            "steps": self._steps,
            "window": list(self._window),
            "unfinished_step": (self._step_dropped, self._step_tolerant),
            "exact_reason": self._exact_reason,
            "exact_next": self._exact_next,
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
        self._steps = state["steps"]
        self._window = deque(state["window"], maxlen=self.options.drop_window_steps)
        self._step_dropped, self._step_tolerant = state["unfinished_step"]
        # All parameters belong to the step before, if there was one.
        self._seen = set(sizes) if self._steps else set()
        self._exact_next = state["exact_next"]
        if state["exact_reason"]:
            self._make_exact(state["exact_reason"])

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
        on_cpu = buffer.device.type == "cpu"
        result: Future[Tensor] = Future() if on_cpu else Future(devices=[buffer.device])
        ready = None
        if not on_cpu:
            device = buffer.device
            ready = torch.get_device_module(device).current_stream(device).record_event()
        flight = _Flight(buffer, layout, result, ready, output, divide)
        self._submit(flight, self._begin)
        # A future made in Python keeps an error as its value, which C++ would take for a tensor;
        # one that comes from then() fails for C++, too.
        delivered: Future[Tensor] = result.then(lambda future: future.value())
        return delivered

    def _submit(self, flight: _Flight, function: Callable[[_Flight], None]) -> None:
        """Runs `function(flight)` on the worker; an error of it fails the flight."""

        def run() -> None:
            try:
                with self._on_stream(flight), torch.no_grad():
                    function(flight)
            except Exception as error:
                self._fail(flight, error)

        self._worker.submit(run)

    def _after(
        self, flight: _Flight, futures: Iterable[Future[Any]], function: Callable[[_Flight], None]
    ) -> None:
        """Runs `function(flight)` on the worker when all `futures` are done."""
        waiting = list(futures)

        if not waiting:
            self._submit(flight, function)
            return
        done: Future[Any] = torch.futures.collect_all(waiting)

        def then(flight: _Flight) -> None:
            done.wait()  # raises the error of any of them
            for future in waiting:
                future.wait()  # makes the device's stream wait
            function(flight)

        done.add_done_callback(lambda _: self._submit(flight, then))

    @contextlib.contextmanager
    def _on_stream(self, flight: _Flight) -> Iterator[None]:
        """The worker has a stream of its own on each device."""
        device = flight.buffer.device
        if flight.ready is None:
            yield
            return
        module = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        with module.stream(self._streams[device]):
            yield

    def _begin(self, flight: _Flight) -> None:
        """Forms p = x + e, and adds up what the ranks of this site have."""
        plan, buffer = self._plan, flight.buffer
        flight.number = self._flights
        self._flights += 1
        self._gathers.append(flight)
        self._count_step(flight.layout)
        if flight.ready is not None:
            device = buffer.device
            torch.get_device_module(device).current_stream(device).wait_event(flight.ready)
        elements = buffer.numel()
        chunk = -(-elements // plan.size)
        # Sums are in float32 at least, whatever the type of the gradients.
        payload = buffer.new_empty(
            plan.size * chunk, dtype=torch.promote_types(buffer.dtype, torch.float32)
        )
        payload[:elements].copy_(buffer)
        payload[elements:].zero_()
        self._memory.add_to(payload, flight.layout)
        flight.payload = payload.view(plan.size, chunk)
        flight.wire = flight.payload.to(buffer.dtype)

        peers = [peer for peer in plan.site_members if peer != plan.rank]
        if not peers:
            self._send(flight)
            return
        flight.incoming = {
            peer: flight.wire.new_empty(len(plan.duties[plan.rank]), chunk) for peer in peers
        }
        within = recovery.exchange(
            {peer: flight.wire[plan.duties[peer]] for peer in peers},
            flight.incoming,
            self._own,
            tag=2 * (flight.number % _TAGS),
        )
        self._after(flight, [*within.received, *within.sent], self._add_site)

    def _add_site(self, flight: _Flight) -> None:
        """The partial sums of this site take the place of what this rank alone had."""
        plan = self._plan
        duties = plan.duties[plan.rank]
        parts = {**flight.incoming, plan.rank: flight.payload[duties]}
        flight.payload[duties] = _sum_in_order([parts[peer] for peer in plan.site_members])
        if flight.wire is not flight.payload:
            flight.wire[duties] = flight.payload[duties].to(flight.wire.dtype)
        self._send(flight)

    def _send(self, flight: _Flight) -> None:
        """Sends each shard's part straight to the rank that reduces it: one hop, no partial sums.

        Paper: SMART §3.1, one threshold for each bucket.
        """
        plan, options, wire = self._plan, self.options, flight.wire
        chunk = wire.shape[1]
        message_bytes = chunk * wire.element_size()
        flight.incoming = {
            peer: wire.new_empty(chunk) for peer in plan.senders if peer != plan.rank
        }
        outgoing = {peer: wire[peer] for peer in plan.remote_shards}
        threshold = -1.0
        if (
            outgoing
            and not self.exact
            and not self._step_exact
            and options.max_low_priority_drop > 0
            and message_bytes >= options.exact_below_bytes
        ):
            # All of the bucket, unless some of its shards are for others of the site to send.
            sent = wire if len(plan.site_members) == 1 else wire[plan.remote_shards]
            if not all_finite(sent):
                flight.finite = False
                self._say_once("gradients with NaN or infinite values are sent exactly")
            else:
                cutoff = sampled_cutoff(
                    sent.view(-1), options.top_fraction, options.samples, self._generator
                )
                # Where hardly any element differs from 0, every packet that has one matters.
                threshold = cutoff if cutoff > 0 else -1.0
        flight.tolerant = threshold >= 0
        sent_bytes = message_bytes * len(outgoing)
        self._messages += len(outgoing)
        self._bytes_sent += sent_bytes
        if flight.tolerant:
            self._bytes_tolerant += sent_bytes
            self._step_tolerant += sent_bytes
        flight.exchange = recovery.exchange(
            outgoing,
            flight.incoming,
            self._own,
            tag=2 * (flight.number % _TAGS) + 1,
            threshold=threshold,
            max_drop_fraction=options.max_low_priority_drop if flight.tolerant else 0.0,
        )
        self._after(flight, flight.exchange.received, self._reduce)

    def _reduce(self, flight: _Flight) -> None:
        """Adds up this rank's shard in the order of the sites."""
        plan = self._plan
        parts = {**flight.incoming, plan.rank: flight.payload[plan.rank]}
        total = _sum_in_order([parts[peer] for peer in plan.senders])
        if flight.divide:
            total /= plan.size
        flight.shard = total.to(flight.wire.dtype)
        flight.incoming = {}
        # Collectives match by their order: that of the buckets, not of arrival.
        while self._gathers and self._gathers[0].shard is not None:
            self._gather(self._gathers[0])  # stays among those that fail if this does
            self._gathers.popleft()

    def _gather(self, flight: _Flight) -> None:
        """All ranks get the reduced shards, exactly: replicas stay identical."""
        assert flight.exchange is not None
        assert flight.shard is not None
        waiting = list(flight.exchange.sent)
        if flight.output is None:
            flight.gathered = torch.empty_like(flight.wire)
            work = _all_gather(
                flight.gathered.view(-1), flight.shard, group=self._own, async_op=True
            )
            assert work is not None, "asynchronous"
            waiting.append(work.get_future())
        self._after(flight, waiting, self._finish)

    def _finish(self, flight: _Flight) -> None:
        """What was dropped becomes the new error memory, and the result is handed over."""
        assert flight.exchange is not None
        assert flight.shard is not None
        if flight.gathered is not None:
            value = flight.buffer
            value.copy_(flight.gathered.view(-1)[: value.numel()])
        else:
            assert flight.output is not None
            value = flight.output.copy_(flight.shard)
        dropped = self._dropped(flight)
        # A step with such a result is skipped or ruins the model, and what its other buckets have
        # delivered with it: what the memory was before the step, it is again. With DDP all ranks
        # see the same result.
        if not self._step_bad and not (flight.finite and all_finite(value)):
            self._step_bad = True
            self._memory.rewind(self._step_memory)
            self._say_once("a result with NaN or infinite values: the error memory is kept")
        if not self._step_bad and (dropped or self._memory.holds(flight.layout)):
            self._memory.remember(flight.payload.view(-1), flight.layout, dropped)
        flight.result.set_result(value)

    def _dropped(self, flight: _Flight) -> list[Range]:
        """What of the payload others have zero-filled, ascending; counts and guards."""
        assert flight.exchange is not None
        dropped = []
        chunk, element_bytes = flight.wire.shape[1], flight.wire.element_size()
        bound = self.options.max_low_priority_drop if flight.tolerant else 0.0
        for peer, ranges in sorted(flight.exchange.dropped().items()):
            count = sum(stop - start for start, stop in ranges)
            self._bytes_dropped += count * element_bytes
            self._step_dropped += count * element_bytes
            if count > bound * chunk and not self.exact:
                self._make_exact(
                    f"rank {peer} zero-filled {count / chunk:.1%} of a message, more than "
                    f"the bound of {bound:.1%}"
                )
            dropped += [(peer * chunk + start, peer * chunk + stop) for start, stop in ranges]
        return dropped

    def _fail(self, flight: _Flight, error: Exception) -> None:
        """Ends this bucket and those that would be gathered after it: their turn never comes."""
        for other in {id(f): f for f in (flight, *self._gathers)}.values():
            if not other.result.done():
                other.result.set_exception(error)  # type: ignore[arg-type]
        self._gathers.clear()

    # ---- steps and guard rails ------------------------------------------------------------------

    def _count_step(self, layout: Layout) -> None:
        """A parameter that was reduced in this step already begins the next one."""
        keys = {key for key, _ in layout}
        if self._steps and not (keys & self._seen):
            self._seen |= keys
            return
        if self._steps:
            self._exact_steps += 1 if self._step_exact else 0
            self._judge()
        self._seen = keys
        self._step_bad = False
        self._step_memory = self._memory.snapshot()
        self._steps += 1
        every = self.options.exact_every
        due = bool(every) and self._steps % every == 0
        self._step_exact = self.exact or self._exact_next or due
        self._exact_next = False

    def _judge(self) -> None:
        """Notes the drops of the step that has ended; too much of it ends all tolerance."""
        self._window.append((self._step_dropped, self._step_tolerant))
        self._step_dropped = self._step_tolerant = 0
        tolerant = sum(tolerant for _, tolerant in self._window)
        dropped = sum(dropped for dropped, _ in self._window)
        limit = self.options.max_mean_drop
        if (
            len(self._window) == self._window.maxlen
            and dropped > limit * tolerant
            and not self.exact
        ):
            self._make_exact(
                f"{dropped / tolerant:.1%} of the bytes were dropped in the last "
                f"{len(self._window)} steps, more than max_mean_drop={limit:.1%}"
            )

    def _make_exact(self, reason: str) -> None:
        self._exact_reason = reason
        self._say_once(f"all gradients are exact from now on: {reason}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            _log.warning("rank %d: SmartState: %s", self.process_group.rank(), text)

    def _carries(self, tensor: Tensor) -> bool:
        """Whether tensors like this one are this backend's: "cuda:nccl" beside it is not."""
        kind = tensor.device.type
        if kind not in self._carried:
            self._carried[kind] = self._group is not None and carries(self._group, tensor.device)
            if not self._carried[kind]:
                self._say_once(f"tensors on {kind} are reduced exactly, by another backend")
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
        # Else FSDP leaves out what was not used in this backward, and nobody could tell of which
        # parameters the rest is. torch before 2.13 always does.
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
