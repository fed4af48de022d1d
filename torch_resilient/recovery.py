"""Sends that may lose what matters little, and what of them was lost."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from torch_resilient import _native
from torch_resilient.traffic import traffic_class

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work
    from torch.futures import Future

__all__ = ["Exchange", "available", "exchange", "tolerate", "zero_filled"]

# A negative threshold: every message arrives whole.
_EXACT = (-1.0, 0.0)


def available() -> bool:
    """Whether the compiled module can deliver a message with some of its packets missing."""
    native = _native.load()
    return hasattr(native, "set_tolerance") and hasattr(native, "zero_filled")


class _Previous(threading.local):
    """What to restore, innermost last; of each thread its own."""

    def __init__(self) -> None:
        self.stack: list[tuple[float, float]] = []


_previous = _Previous()


@final
class tolerate:
    """Lets the sends that this thread issues arrive without some of their packets.

    A context manager::

        with tolerate(threshold=1e-4, max_lost_fraction=0.1):
            work = dist.isend(gradients, dst=1)

    A packet whose values have a mean magnitude below `threshold` may be lost: the receiver finds
    zeros there. Of each message at most `max_lost_fraction` (0 to 1) of the bytes; packets beyond
    that, and those that reach the threshold, are sent until they arrive. A negative threshold
    means exact, as without this block. It holds for point-to-point sends of floating point
    tensors that the calling thread issues within the block; the innermost block counts. Such a
    send completes when the receiver has told what it has: then ask `zero_filled(work)`.

    Raises ValueError for numbers out of these limits, RuntimeError if the compiled module has no
    tolerant delivery.

    Paper: SMART §3.2, low-priority packets of gradients.
    """

    __slots__ = ("max_lost_fraction", "threshold")

    def __init__(self, threshold: float, max_lost_fraction: float) -> None:
        if not math.isfinite(threshold):
            raise ValueError(
                f"tolerate: threshold={threshold}: expected a finite number (negative: exact)"
            )
        if not 0 <= max_lost_fraction <= 1:
            raise ValueError(
                f"tolerate: max_lost_fraction={max_lost_fraction}: expected 0 to 1, the part of a "
                "message's bytes"
            )
        self.threshold = float(threshold)
        self.max_lost_fraction = float(max_lost_fraction)

    def __enter__(self) -> tolerate:
        if not available():
            raise RuntimeError(
                "tolerate: this build of torch_resilient delivers every message whole; build a "
                "version with tolerant delivery, or send without this block"
            )
        before = _native.load().set_tolerance(self.threshold, self.max_lost_fraction)
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
        return f"tolerate({self.threshold}, {self.max_lost_fraction})"


def zero_filled(work: Work) -> list[tuple[int, int]]:
    """What of a completed send its receiver has replaced by zeros.

    Element ranges [start, stop) of the tensor that was sent, ascending and disjoint; none if it
    arrived whole. RuntimeError if the send has not completed.
    """
    if not available():
        return []
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

    def lost(self) -> dict[int, list[tuple[int, int]]]:
        """After all sends are done: by receiver, the element ranges that it has zero-filled."""
        return {peer: zero_filled(work) for peer, work in self._sends.items()}


def exchange(
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    group: ProcessGroup,
    *,
    tag: int,
    threshold: float = -1.0,
    max_lost_fraction: float = 0.0,
) -> Exchange:
    """Sends `outgoing[r]` to rank r of `group` and receives `incoming[r]` from there.

    The tensors must be contiguous. `threshold` and `max_lost_fraction` as for `tolerate`, for all
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
            with tolerate(threshold, max_lost_fraction):
                post_sends()
    return Exchange(sends, receives)
