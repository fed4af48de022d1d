"""The signal of a rank to the controller, about its idle time."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# An iteration takes longer; the controller counts iterations.
_MIN_PERIOD_S = 1e-6


class ChunkCosts(NamedTuple):
    """The time of a chunk is base_s + flop_s x its floating-point operations."""

    base_s: float
    flop_s: float


class IdleSignal(NamedTuple):
    """A rank's last iteration. Its times are distances, so clocks need not agree.

    Attributes:
        age_s: from the begin of the iteration to the sending of the signal.
        period_s: from its begin to that of the next one.
        guard_s: from the end of a chunk to the end of a window.
        costs: of chunks.
        windows: (seconds from the begin, length) of each idle window, in order.
    """

    age_s: float
    period_s: float
    guard_s: float
    costs: ChunkCosts
    windows: tuple[tuple[float, float], ...]

    def to_tensor(self) -> Tensor:
        head = [self.age_s, self.period_s, self.guard_s, *self.costs]
        flat = [value for window in self.windows for value in window]
        return torch.tensor(head + flat, dtype=torch.float64)

    @classmethod
    def from_tensor(cls, values: Tensor) -> IdleSignal:
        """Raises ValueError for what to_tensor() does not give."""
        numbers = values.double().flatten().tolist()
        if len(numbers) < 5 or len(numbers) % 2 == 0 or not all(map(math.isfinite, numbers)):
            raise ValueError("a signal that says nothing")
        age_s, period_s, guard_s, base_s, flop_s, *flat = numbers
        if period_s < _MIN_PERIOD_S:
            raise ValueError("a signal of an iteration without length")
        if min(guard_s, base_s, flop_s, *flat, 0.0) < 0:
            raise ValueError("a signal of negative times")
        windows = tuple(zip(flat[::2], flat[1::2], strict=True))
        return cls(age_s, period_s, guard_s, ChunkCosts(base_s, flop_s), windows)
