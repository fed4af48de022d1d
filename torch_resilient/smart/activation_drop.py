"""Activations that drop packets where a model would be cut into pipeline stages.

The data that crosses a boundary is cut into packets as on a datagram path, and some of them arrive
as zeros: the activations of the forward pass, their gradients on the way back, or both. For
`torch-resilient profile-drop`, which looks how much of it a training stands.

Paper: SMART §2.2, Figure 1; what is dropped, and how much of a message at most, is §3.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from torch_resilient import _loss

__all__ = [
    "CHUNK_BYTES",
    "PACKET_BYTES",
    "Boundary",
    "Packets",
    "evenly_spaced",
    "may_miss",
    "plain_name",
]

# Bytes of a message in one packet of a link with an MTU of 1500.
PACKET_BYTES = 1376
# A message is sent in chunks of at most this (TORCH_RESILIENT_CHUNK_BYTES).
CHUNK_BYTES = 512 << 10

# "random": any packet may be dropped, as on the network, which does not look into activations.
# "small": those with the smallest values, if it did.
Packets = Literal["random", "small"]

_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float64: "float64",
}


def _chunks(message_bytes: int) -> list[int]:
    """Bytes of each chunk of a message."""
    whole, rest = divmod(message_bytes, CHUNK_BYTES)
    return [CHUNK_BYTES] * whole + ([rest] if rest else [])


def _may_miss(message_bytes: int, bound: float) -> list[int]:
    """Packets of each chunk that may be missing, as in PacketSender::order()."""
    # The bound travels as float32.
    per_byte = min(1.0, float(np.float32(bound))) / PACKET_BYTES
    counts, begin = [], 0
    for chunk_bytes in _chunks(message_bytes):
        end = begin + chunk_bytes
        packets = -(-chunk_bytes // PACKET_BYTES)
        # The first packet has the frame's header and must arrive.
        counts.append(min(int(per_byte * end) - int(per_byte * begin), packets - 1))
        begin = end
    return counts


def may_miss(message_bytes: int, bound: float) -> int:
    """Packets that the network may leave out of a message of this size.

    `bound` is a fraction, 0 to 1. 0 for small messages, which arrive whole whatever the bound.
    """
    return sum(_may_miss(message_bytes, bound))


@dataclass
class Traffic:
    """Counts of the data that crossed a boundary in one direction so far."""

    messages: int = 0
    largest_bytes: int = 0  # message
    packets: int = 0
    dropped: int = 0  # packets


class _Way:
    """One direction of a boundary: zero-fills as much of each message as the bound allows.

    The same messages drop the same packets for the same seed. Draws from a generator of its own,
    so the training gets the same random numbers as without drops.
    """

    def __init__(self, bound: float, packets: Packets, seed: int, exact_below_bytes: int) -> None:
        self._bound, self._packets = bound, packets
        self._exact_below_bytes = exact_below_bytes
        self._generator = torch.Generator().manual_seed(seed)
        self.traffic = Traffic()

    def carry(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of a floating point `tensor`, with zeros for what was dropped."""
        arrived = tensor.detach().clone(memory_format=torch.contiguous_format)
        width = arrived.element_size()
        message_bytes = arrived.numel() * width
        traffic = self.traffic
        traffic.messages += 1
        traffic.largest_bytes = max(traffic.largest_bytes, message_bytes)
        tolerant = message_bytes >= self._exact_below_bytes and bool(arrived.isfinite().all())
        rest = arrived.view(-1)
        allowed = _may_miss(message_bytes, self._bound if tolerant else 0.0)
        for chunk_bytes, count in zip(_chunks(message_bytes), allowed, strict=True):
            chunk, rest = rest[: chunk_bytes // width], rest[chunk_bytes // width :]
            packets = -(-chunk_bytes // PACKET_BYTES)
            traffic.packets += packets
            if count:
                traffic.dropped += count
                dropped = self._choose(chunk, packets, count)
                elements = PACKET_BYTES // width
                whole = chunk.numel() // elements
                places = dropped[dropped < whole].to(chunk.device)
                chunk[: whole * elements].view(whole, elements)[places] = 0
                if bool((dropped >= whole).any()):
                    chunk[whole * elements :] = 0
        return arrived

    def _choose(self, chunk: Tensor, packets: int, count: int) -> Tensor:
        """The numbers of `count` packets of this chunk, of any but the first."""
        if self._packets == "random" or chunk.dtype not in _DTYPES:
            return torch.randperm(packets - 1, generator=self._generator)[:count] + 1
        # Paper: SMART §3.1, Equation 1.
        data = chunk.cpu().view(torch.uint8).numpy()
        means = _loss.mean_magnitudes(
            _DTYPES[chunk.dtype], data, PACKET_BYTES // chunk.element_size()
        )
        return torch.from_numpy(means[1:]).argsort(stable=True)[:count] + 1


class _Link(torch.autograd.Function):
    """Passes the activation to the next stage, and the gradient of what arrived back to this one.

    As in the schedules, the gradient of dropped values is left out: nothing depends on them.
    """

    @staticmethod
    def forward(ctx: Any, activation: Tensor, boundary: Boundary) -> Tensor:
        arrived = boundary.forward.carry(activation)
        ctx.boundary = boundary
        ctx.save_for_backward((arrived != 0) | (activation == 0))
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (arrived,) = ctx.saved_tensors
        return ctx.boundary.backward.carry(gradient) * arrived, None


class Boundary:
    """A place where a model is cut: the output of a module, on its way to the next stage.

    `forward` and `backward`: the fractions of each message that are dropped of activations and of
    their gradients, 0 to 1. `seed`: decides which packets. Messages below `exact_below_bytes` and
    those with NaN or infinity arrive whole, and so does what is evaluated in between: only while
    the module is in training something is dropped.
    """

    def __init__(
        self,
        name: str,
        *,
        forward: float = 0.0,
        backward: float = 0.0,
        packets: Packets = "random",
        seed: int = 0,
        exact_below_bytes: int = 0,
    ) -> None:
        self.name = name
        self.forward = _Way(forward, packets, 2 * seed, exact_below_bytes)
        self.backward = _Way(backward, packets, 2 * seed + 1, exact_below_bytes)

    def watch(self, module: nn.Module) -> None:
        """From now on, the floating point tensors in the output of `module` cross the boundary."""

        def cross(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return _Link.apply(value, self)  # type: ignore[no-untyped-call]
            return value

        def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
            return tree_map(cross, output) if module.training else None

        module.register_forward_hook(hook)


def plain_name(name: str) -> str:
    """The name of a submodule without what DDP and torch.compile put in front of it."""
    return ".".join(part for part in name.split(".") if part not in ("module", "_orig_mod"))


def evenly_spaced(model: nn.Module, stages: int) -> tuple[str, Sequence[str]]:
    """Finds the default boundaries at which to cut a model into stages: (list, boundaries).

    `list` is the name of the longest ModuleList, ModuleDict or Sequential in the model, the
    outermost of equals; "" is the model itself. `boundaries` are the names of its children that
    send their outputs to the next stage. Without a list of at least two, there are none.
    """
    longest, children = "", list[str]()
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            names = [child for child, _ in module.named_children()]
            if len(names) > len(children):
                longest, children = plain_name(name), names
    count = len(children)
    # Without the last one, behind which nothing is left for a stage.
    lasts = sorted({count * stage // stages - 1 for stage in range(1, stages)})
    prefix = f"{longest}." if longest else ""
    return longest, [prefix + children[last] for last in lasts if 0 <= last < count - 1]


def make_boundaries(
    names: Sequence[str],
    bounds: Mapping[str, float],
    *,
    direction: str,
    seed: int,
    **settings: Any,
) -> list[Boundary]:
    """A Boundary for each name, exact where `bounds` has none.

    `direction`: what drops packets: "forward" activations, "backward" their gradients, "both".
    `settings`: further ones of each Boundary.
    """
    return [
        Boundary(
            name,
            forward=bounds.get(name, 0.0) if direction != "backward" else 0.0,
            backward=bounds.get(name, 0.0) if direction != "forward" else 0.0,
            seed=seed * 1009 + place,
            **settings,
        )
        for place, name in enumerate(names)
    ]
