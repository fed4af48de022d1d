"""Activations that may arrive without some of their packets (Paper: SMART §3.2)."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from torch_resilient.smart import recovery
from torch_resilient.smart.options import SmartOptions

_log = logging.getLogger("torch_resilient")


@dataclass
class ActivationTolerance:
    """The part of a stage's sent activations that may be missing, and the part that was.

    The gradient that comes back for what was dropped is ignored: nothing depends on it.

    Attributes:
        bound: the part of the bytes of a message that may be; 0: all arrive.
        exact_below_bytes: smaller messages arrive whole.
        messages: how many have been sent with the bound and have arrived.
        bytes_sent: of these.
        bytes_zero_filled: of these, what the next stage has replaced by zeros.
    """

    bound: float = 0.0
    exact_below_bytes: int = 0
    messages: int = 0
    bytes_sent: int = 0
    bytes_zero_filled: int = 0

    @staticmethod
    def of(options: SmartOptions | None, stage_index: int, num_stages: int) -> ActivationTolerance:
        """The tolerance of a stage. It is zero for the last one, which sends no activations.

        Raises ValueError if `options` are for another number of stages.
        """
        if options is None or stage_index == num_stages - 1:
            return ActivationTolerance()
        bound = options.activation_bound_of(stage_index, num_stages)
        return ActivationTolerance(bound, options.exact_below_bytes)

    def applies_to(self, tensor: Tensor) -> bool:
        """Whether something of this tensor may be missing where it is received."""
        return (
            self.bound > 0
            and tensor.is_floating_point()
            and tensor.nbytes >= max(self.exact_below_bytes, 1)
        )

    def granted(self) -> contextlib.AbstractContextManager[object]:
        """A context for issuing the send of an activation that this applies to."""
        # Activations have no threshold: it is unknown which of their values matter.
        return recovery.tolerate(threshold=0.0, max_drop_fraction=self.bound)

    def arrived(self, work: dist.Work, tensor: Tensor) -> list[recovery.Range]:
        """Counts a completed send of such an activation; returns what of it was dropped.

        If that is more than the bound, which the network should never do, all is exact from then
        on, and the log says so.
        """
        ranges = recovery.zero_filled(work)
        self.messages += 1
        self.bytes_sent += tensor.nbytes
        dropped = tensor.element_size() * sum(b - a for a, b in ranges)
        self.bytes_zero_filled += dropped
        if dropped > self.bound * tensor.nbytes + 1:  # except for rounding
            _log.warning(
                "activations are exact from now on: %d of %d bytes of one were zero-filled, more "
                "than the bound of %g",
                dropped,
                tensor.nbytes,
                self.bound,
            )
            self.bound = 0.0
        return ranges
