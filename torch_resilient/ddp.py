"""For communication hooks of DistributedDataParallel that begin collectives in callbacks."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch.futures import Future

from torch_resilient import _native
from torch_resilient._worker import Handover, WorkerStreams

__all__ = ["in_order"]

_Hook = TypeVar("_Hook", bound=Callable[..., Future[Any]])


def in_order(hook: _Hook) -> _Hook:
    """Makes a hook of `register_comm_hook` finish each bucket before it begins the next one.

    A hook whose futures have callbacks that begin collectives needs it if there are several
    buckets: torch's PowerSGD hooks and quantization hooks are of this kind. When a callback runs
    depends on the network, so these collectives could come in another order on each rank. Without
    in_order(), an operation that depends on it fails on all ranks.

    A thread of the returned hook calls `hook(state, bucket)` and waits for its future, for one
    bucket after the other, in the order in which DDP hands them over. That order is the same on all
    ranks. Results do not change. The hook may wait for its collectives itself.

    Cost: buckets do not overlap each other. They still overlap the backward, which never waits for
    the thread. The time of a step grows if the collectives of all buckets, one after the other,
    take longer than the backward.

    Use one returned hook for one model. No other thread may call collectives on the hook's process
    group while a backward runs, or they fail on all ranks. SyncBatchNorm and
    find_unused_parameters=True do: give the hook a group of its own then, for example
    `PowerSGDState(dist.new_group(), ...)`. Traffic classes count where they are set: within `hook`.

    Raises (by the future that DDP waits for) what `hook` and its future raise. From then on the
    returned hook fails for every bucket, because this rank may have called fewer collectives than
    the others. Raises ImportError at once if this package has not been built.
    """
    worker = _Worker(hook)

    @functools.wraps(hook)
    def ordered(state: Any, bucket: Any) -> Future[Any]:
        return worker.start(state, bucket)

    # The thread refers to the worker only. It ends when nothing refers to `ordered` any more.
    weakref.finalize(ordered, worker.stop).atexit = False
    return ordered  # type: ignore[return-value]


class _Bucket:
    """One bucket on its way."""

    __slots__ = ("bucket", "handover", "stamp", "state")

    def __init__(self, state: Any, bucket: Any, stamp: int) -> None:
        self.state = state
        self.bucket = bucket
        self.handover = Handover(bucket.buffer())
        self.stamp = stamp


class _Worker:
    """Runs `hook` for one bucket after the other, on one thread.

    Thread: start() on DDP's, which is one at a time; stop() on any; the rest on its own.
    """

    def __init__(self, hook: Callable[..., Future[Any]]) -> None:
        self._hook = hook
        self._native = _native.load()
        self._order = self._native.OrderedHook()
        self._buckets: SimpleQueue[_Bucket | None] = SimpleQueue()
        self._streams = WorkerStreams()
        self._thread: threading.Thread | None = None
        self._failure = ""  # text only: an exception would keep tensors

    def start(self, state: Any, bucket: Any) -> Future[Any]:
        """Queues a bucket; the future gives the result."""
        waiting = _Bucket(state, bucket, self._native.call_stamp())
        delivered = waiting.handover.delivered
        self._buckets.put(waiting)
        if self._thread is None:
            # A daemon: a collective that hangs must not hang the end of the process.
            self._thread = threading.Thread(
                target=self._loop, name="torch_resilient hooks", daemon=True
            )
            self._thread.start()
        return delivered

    def stop(self) -> None:
        """The thread ends after the buckets that are queued."""
        self._buckets.put(None)

    def _loop(self) -> None:
        while (waiting := self._buckets.get()) is not None:
            self._run(waiting)
            del waiting  # it holds tensors, and the next bucket may be long in coming

    def _run(self, waiting: _Bucket) -> None:
        handover = waiting.handover
        try:
            if self._failure:
                raise RuntimeError(
                    "in_order(): the hook was not called for this bucket, because it has failed "
                    f"for an earlier one: {self._failure}"
                )
            with self._streams.on(handover.device), torch.no_grad():
                handover.receive()
                self._order.begin(waiting.stamp)
                try:
                    value = self._hook(waiting.state, waiting.bucket).wait()
                finally:
                    self._order.end()
                handover.result.set_result(value)
        except BaseException as error:
            self._failure = self._failure or f"{type(error).__name__}: {error}"
            handover.fail(error)
