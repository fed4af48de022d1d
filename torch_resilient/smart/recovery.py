"""Sends that may lose what matters little, and what of them was dropped."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from torch_resilient import _native
from torch_resilient.traffic import traffic_class

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work
    from torch.futures import Future

__all__ = ["Exchange", "Range", "SmartOptions", "exchange", "tolerate", "zero_filled"]

# [start, stop) in elements.
Range = tuple[int, int]
# A negative threshold: every message arrives whole.
_EXACT = (-1.0, 0.0)


@dataclass(frozen=True)
class SmartOptions:
    """What may be dropped. Raises ValueError, naming the field, for a value out of its limits.

    `top_fraction` (0 to 1, without the ends): a packet whose mean magnitude reaches that of the
    largest `top_fraction` of the bucket's elements arrives for certain. The paper's K. Larger
    values protect more.

    `max_low_priority_drop` (0 to 1): the part of each message's bytes that may be dropped; what is
    dropped beyond that is sent again. 0: exact.

    `max_mean_drop` (0 to 1): if more than this part of the bytes was dropped in the mean of the
    last `drop_window_steps` steps, the link is worse than error feedback is known to be good for
    (the paper: up to 5 %), and the state becomes exact for the rest of the run.

    `exact_below_bytes` (0 or more): smaller messages are exact. A message is one rank's share of
    a bucket. A few packets more do not pay; biases and the like stay out of it where they have
    buckets of their own.

    `exact_every` (0 or more): every so many steps, all messages are exact, which empties the
    error memory; 0: never.

    `samples` (100 or more): elements drawn from each bucket to estimate the threshold.

    `activation_bound` (0 to 1), for pipeline schedules: the part of the bytes of an activation that
    may be missing where it arrives; the next stage then computes with zeros there, and nothing
    makes up for it. One number holds for the boundaries of low priority, and those of high priority
    are exact; several hold for one boundary each, the first stage's first, as `torch-resilient
    profile-drop` suggests them. 0: exact. The gradients of activations are always exact.

    `depth_ratio` (0 to 1): boundaries in this first part of the model are of high priority, the
    paper's k. The default is where its Figure 1 finds the earlier boundary, layer 6 of 24.
    """

    top_fraction: float = 0.01
    max_low_priority_drop: float = 0.1
    max_mean_drop: float = 0.08
    drop_window_steps: int = 50
    exact_below_bytes: int = 65536
    exact_every: int = 0
    samples: int = 4096
    activation_bound: float | Sequence[float] = 0.0
    depth_ratio: float = 0.25

    def __post_init__(self) -> None:
        def check(name: str, good: bool, expected: str) -> None:
            if not good:
                raise ValueError(f"SmartOptions: {name}={getattr(self, name)}: expected {expected}")

        check("top_fraction", 0 < self.top_fraction < 1, "a fraction above 0 and below 1")
        for name in ("max_low_priority_drop", "max_mean_drop", "depth_ratio"):
            check(name, 0 <= getattr(self, name) <= 1, "a fraction, 0 to 1")
        check("drop_window_steps", self.drop_window_steps >= 1, "a number of steps, 1 or more")
        check("exact_below_bytes", self.exact_below_bytes >= 0, "bytes, 0 or more")
        check("exact_every", self.exact_every >= 0, "a number of steps, or 0 for never")
        check("samples", self.samples >= 100, "100 or more")
        bounds = self.activation_bound
        check(
            "activation_bound",
            all(0 <= each <= 1 for each in (bounds if isinstance(bounds, Sequence) else [bounds])),
            "fractions, 0 to 1",
        )

    def activation_bound_of(self, boundary: int, num_stages: int) -> float:
        """What part of the activations that stage `boundary` sends to the next may be missing.

        Raises ValueError if there are bounds for another number of boundaries than the
        `num_stages` - 1 of this pipeline.

        Paper: SMART §3.1, Equation 2, with layers counted in stages.
        """
        bounds = self.activation_bound
        if isinstance(bounds, Sequence):
            if len(bounds) != num_stages - 1:
                raise ValueError(
                    f"SmartOptions: activation_bound={bounds}: {len(bounds)} bounds for a pipeline "
                    f"of {num_stages} stages: expected {num_stages - 1}, one for each boundary, or "
                    "one number"
                )
            return bounds[boundary]
        high_priority = (boundary + 1) / num_stages <= self.depth_ratio
        return 0.0 if high_priority else bounds


class _Previous(threading.local):
    """What to restore, innermost last; of each thread its own."""

    def __init__(self) -> None:
        self.stack: list[tuple[float, float]] = []


_previous = _Previous()


@final
class tolerate:
    """Lets the sends that this thread issues arrive without some of their packets.

    A context manager::

        with tolerate(threshold=1e-4, max_drop_fraction=0.1):
            work = dist.isend(gradients, dst=1)

    A packet whose values have a mean magnitude below `threshold` may be dropped: the receiver finds
    zeros there. In the traffic classes of activations any packet may, whatever its values, but
    messages with a NaN or infinity are exact. Of each message at most `max_drop_fraction` (0 to 1)
    of the bytes; packets beyond that, and those that reach the threshold, are sent until they
    arrive. A negative threshold means exact, as without this block. It holds for point-to-point
    sends of floating point tensors that the calling thread issues within the block; the innermost
    block counts. Such a send completes when the receiver has told what it has: then ask
    `zero_filled(work)`.

    Raises ValueError for numbers out of these limits.

    Paper: SMART §3.2, low-priority packets of gradients, and activations.
    """

    __slots__ = ("max_drop_fraction", "threshold")

    def __init__(self, threshold: float, max_drop_fraction: float) -> None:
        if not math.isfinite(threshold):
            raise ValueError(
                f"tolerate: threshold={threshold}: expected a finite number (negative: exact)"
            )
        if not 0 <= max_drop_fraction <= 1:
            raise ValueError(
                f"tolerate: max_drop_fraction={max_drop_fraction}: expected 0 to 1, the part of a "
                "message's bytes"
            )
        self.threshold = float(threshold)
        self.max_drop_fraction = float(max_drop_fraction)

    def __enter__(self) -> tolerate:
        before = _native.load().set_tolerance(self.threshold, self.max_drop_fraction)
        _previous.stack.append(_EXACT if before is None else before)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _native.load().set_tolerance(*_previous.stack.pop())

    def __repr__(self) -> str:
        return f"tolerate({self.threshold}, {self.max_drop_fraction})"


def zero_filled(work: Work) -> list[Range]:
    """What of a completed send its receiver has replaced by zeros.

    Element ranges [start, stop) of the tensor that was sent, ascending and disjoint; none if it
    arrived whole. RuntimeError if the send has not completed.
    """
    return [(int(start), int(stop)) for start, stop in _native.load().zero_filled(work)]


class Exchange:
    """Messages to and from several ranks, under way.

    `received` and `sent` are futures, one for each message; the tensors belong to the network
    until all of them are done.
    """

    def __init__(self, sends: Mapping[int, Work], receives: Mapping[int, Work]) -> None:
        self._sends = dict(sends)
        self.sent: list[Future[Any]] = [work.get_future() for work in sends.values()]
        self.received: list[Future[Any]] = [work.get_future() for work in receives.values()]

    def dropped(self) -> dict[int, list[Range]]:
        """After all sends are done: by receiver, the element ranges that it has zero-filled."""
        return {peer: zero_filled(work) for peer, work in self._sends.items()}


def exchange(
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    group: ProcessGroup,
    *,
    tag: int,
    threshold: float = -1.0,
    max_drop_fraction: float = 0.0,
) -> Exchange:
    """Sends `outgoing[r]` to rank r of `group` and receives `incoming[r]` from there.

    The tensors must be contiguous. `threshold` and `max_drop_fraction` as for `tolerate`, for all
    of the sends; the default is exact. Messages match by `tag`, in the order of the calls.
    Returns at once.
    """
    import torch.distributed as dist

    receives: dict[int, Work] = {}
    sends: dict[int, Work] = {}

    def post_sends() -> None:
        for peer, tensor in outgoing.items():
            work = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
            assert work is not None, "this process is a member of its group"
            sends[peer] = work

    for peer, tensor in incoming.items():
        work = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
        assert work is not None, "this process is a member of its group"
        receives[peer] = work
    # Point-to-point messages are activations otherwise.
    with traffic_class("gradient"):
        if threshold < 0:
            post_sends()
        else:
            with tolerate(threshold, max_drop_fraction):
                post_sends()
    return Exchange(sends, receives)
