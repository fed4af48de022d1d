"""Gradients that may be dropped on the way: which are small, and the memory of what was dropped.

Pure: tensors in, tensors out. The DDP hook (ddp.py) and the convergence study use the same
code.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_resilient.smart import _cuda_loss
from torch_resilient.smart.recovery import Range

__all__ = ["ErrorMemory", "Layout", "all_finite", "sampled_cutoff"]

# The parts of a flat tensor, in order: (key, elements). Padding at its end is not listed.
Layout = Sequence[tuple[str, int]]
_KERNEL_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sampled_cutoff(
    flat: Tensor, top_fraction: float, samples: int, generator: torch.Generator
) -> float:
    """The magnitude that the largest `top_fraction` of the elements of `flat` reach, estimated.

    From `samples` elements, drawn uniformly with replacement by `generator`, a generator of the
    CPU of its own, which leaves the draws of the training as they are. 0 for an empty tensor.
    NaN or infinite elements may make the result NaN or infinite.

    Paper: SMART §3.1, the threshold τ.
    """
    if flat.numel() == 0:
        return 0.0
    places = torch.randint(flat.numel(), (samples,), generator=generator)
    magnitudes = flat[places.to(flat.device)].abs()
    top = max(1, math.floor(top_fraction * samples))
    return float(torch.topk(magnitudes, top, sorted=True).values[-1])


def all_finite(tensor: Tensor) -> bool:
    """False if an element is infinite or not a number."""
    if tensor.is_cuda and tensor.dtype in _KERNEL_TYPES and _cuda_loss.available():
        # Reads it once; torch makes several tensors of that size on the way.
        return _cuda_loss.all_finite(tensor.contiguous())
    return bool(torch.isfinite(tensor).all())


@dataclass(frozen=True)
class _Dropped:
    """The dropped part of one key: the values of ascending disjoint ranges, concatenated."""

    elements: int  # of the key, all of them
    ranges: Tensor  # int64 on the CPU, one row [start, stop) for each, in elements of the key
    values: Tensor  # one-dimensional, as many elements as the ranges cover

    def places(self) -> Tensor:
        """The index of each value in its key, on the device of the values."""
        starts, stops = self.ranges.to(self.values.device).unbind(1)
        lengths = stops - starts
        ends = lengths.cumsum(0)
        count = self.values.numel()
        offsets = torch.repeat_interleave(starts - ends + lengths, lengths, output_size=count)
        return offsets + torch.arange(count, device=self.values.device)


class ErrorMemory:
    """Values that were sent and did not arrive, to be sent again with the next gradient.

    Kept by key (the name of a parameter), not by bucket: buckets change. Sparse: it takes as much
    memory as was dropped, and nothing without a drop. Values have the type of the payload (float32,
    or float64 for such gradients) and its device.

    Not thread-safe: its owner calls it from one thread at a time.
    """

    def __init__(self) -> None:
        self._dropped: dict[str, _Dropped] = {}

    def holds(self, layout: Layout) -> bool:
        """Whether anything is remembered of the keys in `layout`."""
        return any(key in self._dropped for key, _ in layout)

    def add_to(self, payload: Tensor, layout: Layout) -> None:
        """Adds what is remembered to the flat `payload`, in place: p = x + e.

        The memory itself stays until remember(), so nothing is lost if sending fails.

        Raises ValueError if a key has another number of elements than when it was remembered.

        Paper: SMART §3.3, Equation 3.
        """
        start = 0
        for key, elements in layout:
            if (dropped := self._dropped.get(key)) is not None:
                if dropped.elements != elements:
                    raise ValueError(
                        f"the error memory of {key!r} is of {dropped.elements} elements, its "
                        f"gradient has {elements}: was it saved with another model, or other ranks?"
                    )
                part = payload[start : start + elements]
                values = dropped.values.to(device=payload.device, dtype=payload.dtype)
                # No place occurs twice, so this is the same on every device and in every run.
                part[dropped.places().to(payload.device)] += values
            start += elements

    def remember(self, payload: Tensor, layout: Layout, dropped: Sequence[Range]) -> None:
        """Replaces the memory of the keys in `layout` by `payload` where it was dropped.

        `dropped` are ranges of `payload`, ascending and disjoint; what lies beyond the layout
        (padding) is ignored. Keys without dropped values are forgotten.

        Raises ValueError for ranges that are not ascending or not within the payload.

        Paper: SMART §3.3, Equations 4 and 5.
        """
        end = 0
        for start, stop in dropped:
            if not end <= start < stop <= payload.numel():
                raise ValueError(
                    f"dropped range [{start}, {stop}): expected ascending, disjoint ranges within "
                    f"{payload.numel()} elements; the one before ended at {end}"
                )
            end = stop
        starts = [start for start, _ in dropped]
        stops = [stop for _, stop in dropped]
        begin = 0
        for key, elements in layout:
            end = begin + elements
            first, last = bisect.bisect_right(stops, begin), bisect.bisect_left(starts, end)
            if elements and first < last:
                ranges = torch.tensor(dropped[first:last], dtype=torch.int64)
                ranges = ranges.clamp(begin, end) - begin
                count = int((ranges[:, 1] - ranges[:, 0]).sum())
                places = _Dropped(elements, ranges, payload.new_empty(count)).places()
                self._dropped[key] = _Dropped(elements, ranges, payload[begin:end][places])
            else:
                self._dropped.pop(key, None)
            begin = end

    def snapshot(self) -> object:
        """Returns the current memory for rewind(). Shares the values: almost free."""
        return dict(self._dropped)

    def rewind(self, snapshot: object) -> None:
        """Remembers what a snapshot() of this memory did."""
        assert isinstance(snapshot, dict)
        self._dropped = dict(snapshot)

    def norm(self) -> float:
        """The Euclidean norm of all that is remembered."""
        return math.sqrt(sum(float(dropped.values.double().square().sum()) for dropped in self))

    def elements(self) -> int:
        """How many elements are remembered."""
        return sum(dropped.values.numel() for dropped in self)

    def __iter__(self) -> Any:
        return iter(self._dropped.values())

    def dense(self, key: str, elements: int) -> Tensor:
        """Returns the memory of `key`, which has this many elements: a flat tensor with zeros."""
        dropped = self._dropped.get(key)
        if dropped is None:
            return torch.zeros(elements)
        whole = dropped.values.new_zeros(elements)
        whole[dropped.places()] = dropped.values
        return whole

    def scale(self, factor: float) -> None:
        """Multiplies the whole memory, for gradients with a changed unit."""
        for key, dropped in self._dropped.items():
            self._dropped[key] = _Dropped(dropped.elements, dropped.ranges, dropped.values * factor)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All that is remembered, by key: `elements`, `ranges`, `values`; copies on the CPU."""
        return {
            key: {
                "elements": dropped.elements,
                "ranges": dropped.ranges.clone(),
                "values": dropped.values.cpu().clone(),
            }
            for key, dropped in self._dropped.items()
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int | None]
    ) -> None:
        """Replaces all that is remembered by `state`; `sizes` are the elements of each key.

        None as a size: not known yet. Raises ValueError, and changes nothing, if `state` has a
        key that `sizes` lacks, or one of another size, or ranges that do not fit.
        """
        loaded = {}
        for key, entry in state.items():
            if key not in sizes:
                raise ValueError(f"the error memory holds {key!r}, which the model lacks")
            elements, ranges, values = int(entry["elements"]), entry["ranges"], entry["values"]
            flat = ranges.reshape(-1)
            fits = sizes[key] in (None, elements)
            fits = fits and ranges.dtype == torch.int64 and ranges.shape[1:] == (2,)
            fits = fits and bool((flat.diff() >= 0).all()) and bool((flat >= 0).all())
            fits = fits and bool((flat <= elements).all())
            if not fits or int((ranges[:, 1] - ranges[:, 0]).sum()) != values.numel():
                raise ValueError(
                    f"the error memory of {key!r}, of {elements} elements, does not fit the "
                    f"model's {sizes[key]}"
                )
            loaded[key] = _Dropped(elements, ranges.clone(), values.clone())
        self._dropped = loaded
