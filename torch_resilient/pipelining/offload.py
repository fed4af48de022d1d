"""Activations in host memory: for warm-ups that the device has no room for.

When a slow link needs more forwards in flight than the device holds, what they save for the
backward goes to pinned host memory and comes back when it is used.
"""

# Paper: PIPEMORPH §4.2, "memory constraints can be relaxed"

from __future__ import annotations

import contextlib
import math
import os
import time
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
# Saved tensors are copied out once and in twice: B and W each unpack them.
_COPIES = 3


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
        if self.activation_bytes <= 0 or copies_s > microbatch_s:
            return self.on_device()
        return self.on_device() + self.host_bytes // self.activation_bytes


class _InHostMemory:
    """A saved tensor that was moved."""

    __slots__ = ("copied", "host")

    def __init__(self, host: Tensor, copied: torch.Event | None) -> None:
        self.host = host
        self.copied = copied


class HostOffload:
    """Moves what F saves to host memory, for one stage.

    Args:
        device: of the stage. On "cpu" the tensors are copied, which frees nothing: for tests.
        module: the stage's; its parameters and buffers stay where they are.

    Attributes:
        offloaded_bytes: moved so far.
    """

    def __init__(self, device: torch.device, module: torch.nn.Module) -> None:
        self._device = device
        self._module = module
        self._accelerated = device.type != "cpu"
        self._side = torch.Stream(device) if self._accelerated else None
        self.offloaded_bytes = 0

    @contextlib.contextmanager
    def offloading(self) -> Iterator[None]:
        """Tensors saved for the backward in this context go to host memory."""
        stay = self._own_storages()
        # A tensor that stays is detached: an output, kept with its graph by that graph, would be
        # kept for ever if the split backward never runs its operation a last time.

        def pack(tensor: Tensor) -> Any:
            movable = (
                tensor.device.type == self._device.type
                and tensor.layout == torch.strided
                and tensor.nbytes >= _MIN_BYTES
                and tensor.untyped_storage().data_ptr() not in stay
            )
            return self._move(tensor) if movable else tensor.detach()

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

    def _move(self, tensor: Tensor) -> _InHostMemory:
        self.offloaded_bytes += tensor.nbytes
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._accelerated)
        if self._side is None:
            host.copy_(tensor)
            return _InHostMemory(host, None)
        self._side.wait_stream(torch.accelerator.current_stream(self._device))
        with self._side:
            host.copy_(tensor, non_blocking=True)
        # Its memory must not be used again before it has been copied.
        tensor.record_stream(self._side)
        return _InHostMemory(host, self._side.record_event())

    def _bring_back(self, packed: Any) -> Tensor:
        if not isinstance(packed, _InHostMemory):
            assert isinstance(packed, Tensor)
            return packed
        if packed.copied is None:
            return packed.host
        torch.accelerator.current_stream(self._device).wait_event(packed.copied)
        return packed.host.to(self._device, non_blocking=True)

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
