"""Sends that may lose what matters little, and what of them was dropped."""

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

__all__ = ["Exchange", "Range", "exchange", "tolerate", "zero_filled"]

# [start, stop) in elements.
Range = tuple[int, int]
# A negative threshold: every message arrives whole.
_EXACT = (-1.0, 0.0)


class _Previous(threading.local):
    """The values to restore, per thread, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[float, float]] = []


_previous = _Previous()


@final
class tolerate:
    """Lets the sends that this thread issues arrive without some of their packets.

    A context manager::

        with tolerate(threshold=1e-4, max_drop_fraction=0.1):
            work = dist.isend(gradients, dst=1)

    A packet may be dropped if its values have a mean magnitude below `threshold`: the receiver
    finds zeros there. In the traffic classes of activations any packet may, whatever its values,
    but messages with a NaN or infinity are exact. At most `max_drop_fraction` (0 to 1) of the bytes
    of each message may be dropped; packets beyond that, and those that reach the threshold, are
    sent until they arrive. A negative threshold means exact, as without this block. It holds for
    point-to-point sends of floating point tensors that the calling thread issues within the block;
    the innermost block counts. Such a send completes when the receiver has told what it has: then
    ask `zero_filled(work)`.

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
    """Returns the parts of a completed send that its receiver replaced by zeros.

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
