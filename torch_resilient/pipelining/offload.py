"""Activations in host memory: for warm-ups that the device has no room for.

When a slow link needs more forwards in flight than the device holds, what they save for the
backward goes to pinned host memory. It comes back one microbatch ahead of its use, where there is
room, and when it is used otherwise.
"""

# Paper: PIPEMORPH §4.2, "memory constraints can be relaxed"

from __future__ import annotations

import contextlib
import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

# A smaller tensor costs more to move than it frees.
_MIN_BYTES = 1 << 16
# The copy that measures the bandwidth; large enough to hide its start.
_PROBE_BYTES = 32 << 20
# The share of free memory that activations may take: allocators lose some to fragments.
_USABLE = 0.9
# Saved tensors are copied out once, and in twice at most: B and W each unpack them.
_COPIES = 3
# The most microbatches that are brought back at a time: the one in use and the next one. Fewer
# would leave nothing to compute beside a copy; more only take room from those that stay.
_BROUGHT = 2


@dataclass(frozen=True)
class Slots:
    """How the room on the device is divided, in microbatches between F and W.

    The two kinds come from different pools of the allocator, since other streams fill them. So one
    does not use the room of the other.

    Attributes:
        stay: that never leave the device.
        brought: that are back from host memory, as a whole, until their W.
    """

    stay: int
    brought: int

    @classmethod
    def of(cls, on_device: int, pending: int) -> Slots:
        """For at most `pending` microbatches between F and W, of which `on_device` fit."""
        if pending <= on_device:
            return cls(on_device, 0)
        brought = min(_BROUGHT, on_device - 1)
        return cls(on_device - brought, brought)


class Residency:
    """The place of the activations of each microbatch during one iteration. Pure.

    Call before() and after() around each operation. F, B and W each go through the microbatches in
    turn.

    Attributes:
        staying: microbatches between F and W that never leave the device.
        moved: those whose activations went to host memory.
        brought: those of `moved` that are on the device as well.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._next = dict.fromkeys("FBW", 0)
        self.staying: set[int] = set()
        self.moved: set[int] = set()
        self.brought: set[int] = set()

    def before(self, kind: str, microbatch: int) -> list[int]:
        """The microbatches to bring back now; `microbatch` is in `moved` if its F is to move."""
        self._next[kind] = microbatch + 1
        if kind == "F":
            stays = len(self.staying) < self._slots.stay
            ahead = self._bring()
            (self.staying if stays else self.moved).add(microbatch)
            return ahead
        return self._bring(*([microbatch] if kind == "B" else []))

    def after(self, kind: str, microbatch: int) -> list[int]:
        """The microbatches to bring back now; after W, nothing of `microbatch` is needed."""
        if kind != "W":
            return []
        for each in (self.staying, self.moved, self.brought):
            each.discard(microbatch)
        return self._bring()

    def _bring(self, *first: int) -> list[int]:
        """Those that the next operations use, in the order in which their copies are missed: B may
        be what another stage waits for."""
        found = []
        for microbatch in (*first, self._next["B"], self._next["W"]):
            if (
                microbatch in self.moved
                and microbatch not in self.brought
                and len(self.brought) < self._slots.brought
            ):
                self.brought.add(microbatch)
                found.append(microbatch)
        return found


@dataclass(frozen=True)
class MemoryRoom:
    """The room that one stage has for microbatches between F and W.

    Attributes:
        activation_bytes: of one microbatch.
        device_bytes: that activations may take on the device, all together.
        host_bytes: that they may take in host memory.
        copy_bytes_per_s: between the two, in one direction.
    """

    activation_bytes: int
    device_bytes: int
    host_bytes: int
    copy_bytes_per_s: float

    def on_device(self) -> int:
        """How many microbatches the device holds; at least one, or nothing could run."""
        if self.activation_bytes <= 0:
            return 1 << 30
        return max(self.device_bytes // self.activation_bytes, 1)

    def in_all(self, microbatch_s: float) -> int:
        """How many it holds with offloading, if its copies fit next to the computation.

        `microbatch_s` is the time of F, B and W of a microbatch. Offloading cannot pay if copies
        take longer, since they would set the pace.
        """
        copies_s = _COPIES * self.activation_bytes / self.copy_bytes_per_s
        on_device = self.on_device()
        if self.activation_bytes <= 0 or copies_s > microbatch_s:
            return on_device
        stay = Slots.of(on_device, on_device + 1).stay
        return max(on_device, stay + self.host_bytes // self.activation_bytes)


class _InHostMemory:
    """A saved tensor that was moved."""

    __slots__ = ("__weakref__", "arrived", "copied", "here", "host", "shape")

    def __init__(self, host: Tensor, shape: torch.Size, copied: torch.Event | None) -> None:
        self.host = host
        self.shape = shape  # `host` has one element where the tensor was expanded
        self.copied = copied
        self.here: Tensor | None = None  # on the device as well, after `arrived`
        self.arrived: torch.Event | None = None


class HostOffload:
    """Moves what F saves to host memory, for one stage, and back.

    Args:
        device: of the stage. On "cpu" the tensors are copied, which frees nothing: for tests.
        module: the stage's; its parameters and buffers stay where they are.

    Attributes:
        offloaded_bytes: moved so far.
        fetched_bytes: brought back so far.
        fetched_ahead_bytes: of these, ahead of their use.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module) -> None:
        self._device = device
        self._module = module
        self._accelerated = device.type != "cpu"
        # One for each direction: a copy back would else wait until the newest F has been computed.
        self._out = torch.Stream(device) if self._accelerated else None
        self._in = torch.Stream(device) if self._accelerated else None
        self._residency = Residency(Slots(0, 0))
        # Those of each microbatch in host memory, as long as the graph keeps them.
        self._moved: dict[int, list[weakref.ref[_InHostMemory]]] = {}
        self.offloaded_bytes = 0
        self.fetched_bytes = 0
        self.fetched_ahead_bytes = 0

    def begin(self, slots: Slots) -> None:
        """Begins an iteration."""
        self._residency = Residency(slots)
        self._moved.clear()

    @contextlib.contextmanager
    def around(self, kind: str, microbatch: int) -> Iterator[None]:
        """The context of an operation. The activations that F saves are moved if there is no room.

        Copies back for the next operations are queued before this one computes.
        """
        for each in self._residency.before(kind, microbatch):
            self._fetch_ahead(each)
        moves = kind == "F" and microbatch in self._residency.moved
        with self.offloading(microbatch) if moves else contextlib.nullcontext():
            yield
        ahead = self._residency.after(kind, microbatch)
        if kind == "W":
            for reference in self._moved.pop(microbatch, ()):
                # A graph may outlive its W.
                if (packed := reference()) is not None:
                    packed.here = None
        for each in ahead:
            self._fetch_ahead(each)

    @contextlib.contextmanager
    def offloading(self, microbatch: int = 0) -> Iterator[None]:
        """Tensors saved for the backward in this context go to host memory."""
        stay = self._own_storages()
        moved = self._moved.setdefault(microbatch, [])
        # A tensor that stays is detached: an output, kept with its graph by that graph, would be
        # kept for ever if the split backward never runs its operation a last time.

        def pack(tensor: Tensor) -> Any:
            tensor = tensor.detach()
            if (
                tensor.device.type != self._device.type
                or tensor.layout != torch.strided
                or tensor.untyped_storage().data_ptr() in stay
            ):
                return tensor
            # An expanded view has one element many times.
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            once = tensor[tuple(slice(1) if step == 0 else slice(None) for _, step in sizes)]
            if once.nbytes < _MIN_BYTES:
                return tensor
            packed = self._move(once, tensor.shape)
            moved.append(weakref.ref(packed))
            return packed

        with saved_tensors_hooks(pack, self._bring_back):
            yield

    @contextlib.contextmanager
    def measuring(self, found: list[int]) -> Iterator[None]:
        """Appends the bytes that are saved for the backward in this context, without parameters."""
        stay = self._own_storages()
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in stay:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        found.append(sum(storages.values()))

    def room(self, activation_bytes: int, held_at_peak: int) -> MemoryRoom:
        """Measures what there is room for, after an iteration that held `held_at_peak` microbatches
        at most. Takes some milliseconds."""
        device = self._device
        free, _ = torch.accelerator.get_memory_info(device)
        cached = torch.accelerator.memory_reserved(device)
        unused = free + cached - torch.accelerator.max_memory_allocated(device)
        room = held_at_peak * activation_bytes + max(int(_USABLE * unused), 0)
        return MemoryRoom(activation_bytes, room, free_host_bytes(), self._copy_bytes_per_s())

    def _own_storages(self) -> set[int]:
        own: Iterable[Tensor] = (*self._module.parameters(), *self._module.buffers())
        return {tensor.untyped_storage().data_ptr() for tensor in own}

    def _move(self, tensor: Tensor, shape: torch.Size) -> _InHostMemory:
        self.offloaded_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._accelerated)
        if self._out is None:
            host.copy_(tensor)
            return _InHostMemory(host, shape, None)
        self._out.wait_stream(torch.accelerator.current_stream(self._device))
        with self._out:
            host.copy_(tensor, non_blocking=True)
        # Its memory must not be used again before it has been copied.
        tensor.record_stream(self._out)
        return _InHostMemory(host, shape, self._out.record_event())

    def _fetch_ahead(self, microbatch: int) -> None:
        """Queues the copies of a microbatch to the device, beside the computation."""
        for reference in self._moved.get(microbatch, ()):
            packed = reference()
            if packed is None:
                continue
            self.fetched_bytes += packed.host.nbytes
            self.fetched_ahead_bytes += packed.host.nbytes
            if self._in is None:
                packed.here = packed.host
                continue
            assert packed.copied is not None
            self._in.wait_event(packed.copied)
            with self._in:
                # Allocated on this stream: memory of the computing stream would be free for this
                # copy only when that stream has come so far.
                packed.here = packed.host.to(self._device, non_blocking=True)
            packed.arrived = self._in.record_event()

    def _bring_back(self, packed: Any) -> Tensor:
        if not isinstance(packed, _InHostMemory):
            assert isinstance(packed, Tensor)
            return packed
        tensor = packed.here
        if tensor is None:
            self.fetched_bytes += packed.host.nbytes
            tensor = packed.host
            if packed.copied is not None:
                torch.accelerator.current_stream(self._device).wait_event(packed.copied)
                tensor = tensor.to(self._device, non_blocking=True)
        elif packed.arrived is not None:
            stream = torch.accelerator.current_stream(self._device)
            stream.wait_event(packed.arrived)
            # Its memory must not be used again before this stream has used it.
            tensor.record_stream(stream)
        return tensor.expand(packed.shape)

    def _copy_bytes_per_s(self) -> float:
        host = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
        there = host.to(self._device, non_blocking=True)
        torch.accelerator.synchronize(self._device)
        start_s = time.monotonic()
        host.copy_(there, non_blocking=True)
        torch.accelerator.synchronize(self._device)
        return _PROBE_BYTES / max(time.monotonic() - start_s, 1e-9)


def free_host_bytes() -> int:
    """This process's share of half of the host's free memory; 0 if the system does not tell."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
                return math.floor(int(line.split()[1]) * 1024 / 2 / max(ranks, 1))
    return 0
