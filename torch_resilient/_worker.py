"""Work on tensors that a thread hands to a worker thread: the order of streams, and results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


class Handover:
    """A tensor that the calling thread hands to a worker, and the future of the result.

    Attributes:
        result: set by the worker.
        delivered: for the caller: the same value or error.
    """

    def __init__(self, tensor: Tensor) -> None:
        device = tensor.device
        on_cpu = device.type == "cpu"
        self.device = device
        self.result: Future[Any] = Future() if on_cpu else Future(devices=[device])
        # A future made in Python keeps an error as its value, which C++ would take for a tensor;
        # one that comes from then() fails for C++, too.
        self.delivered: Future[Any] = self.result.then(lambda future: future.value())
        # After this event `tensor` holds what the caller has queued.
        self._ready = None if on_cpu else torch.accelerator.current_stream(device).record_event()

    def receive(self) -> None:
        """In the worker: its current stream of the device waits for the tensor."""
        if self._ready is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._ready)

    def fail(self, error: BaseException) -> None:
        """In the worker: ends the future with `error`, unless it has ended."""
        if not self.result.done():
            self.result.set_exception(error)


class WorkerStreams:
    """The streams of one worker thread: one of its own on each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    @contextlib.contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """The worker's stream of `device` is the current one in this context.

        The device also becomes the worker's current one. To leave a stream is to switch back to the
        current device, which otherwise is device 0, and that makes a context there.
        """
        if device.type == "cpu":
            yield
            return
        torch.accelerator.set_device_index(device)
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        with self._streams[device]:
            yield
