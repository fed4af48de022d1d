"""Buckets on their way: each runs its stages one after the other, on one thread."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from torch_resilient.smart.gradient_drop import Layout
from torch_resilient.smart.recovery import Exchange


@dataclass
class Transfer:
    """One bucket on its way. Thread: the worker's, from the first stage on."""

    buffer: Tensor  # one-dimensional; input, and output unless `output` is set
    layout: Layout
    result: Future[Tensor]
    ready: Any  # an event of the device after which `buffer` holds the gradients; None on the CPU
    output: Tensor | None = None  # set: only this rank's shard is wanted, and goes here
    divide: bool = True
    number: int = 0  # of all buckets of this state
    tolerant: bool = False
    finite: bool = True  # False: this rank sends NaN or infinity
    payload: Tensor = field(init=False)  # (ranks, chunk): p = x + e, in the type of the sums
    wire: Tensor = field(init=False)  # the same in the type of the buffer; maybe the same tensor
    incoming: dict[int, Tensor] = field(default_factory=dict)
    exchange: Exchange | None = None
    shard: Tensor | None = None  # this rank's, reduced
    gathered: Tensor | None = None


Stage = Callable[[Transfer], None]


class Transfers:
    """All buckets of one SmartState that are under way.

    A stage is a function of a Transfer. It runs on this object's one thread and says what follows:
    submit() or after(). An error in a stage fails the transfer.

    Attributes:
        begun: how many have begun.
        gathers: those with a shard that is not gathered yet, in the order of buckets.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.gathers: deque[Transfer] = deque()
        self._worker = ThreadPoolExecutor(1, "torch_resilient smart")
        self._streams: dict[torch.device, torch.Stream] = {}

    def start(
        self, buffer: Tensor, layout: Layout, output: Tensor | None, divide: bool, first: Stage
    ) -> Future[Tensor]:
        """Submits the first stage of another bucket; the future gives the result."""
        on_cpu = buffer.device.type == "cpu"
        result: Future[Tensor] = Future() if on_cpu else Future(devices=[buffer.device])
        ready = None
        if not on_cpu:
            device = buffer.device
            ready = torch.accelerator.current_stream(device).record_event()
        self.submit(Transfer(buffer, layout, result, ready, output, divide), first)
        # A future made in Python keeps an error as its value, which C++ would take for a tensor;
        # one that comes from then() fails for C++, too.
        delivered: Future[Tensor] = result.then(lambda future: future.value())
        return delivered

    def enter(self, transfer: Transfer) -> None:
        """In the first stage: numbers the transfer and queues it for the gathering.

        Makes the device's stream wait for the gradients.
        """
        transfer.number = self.begun
        self.begun += 1
        self.gathers.append(transfer)
        if transfer.ready is not None:
            device = transfer.buffer.device
            torch.accelerator.current_stream(device).wait_event(transfer.ready)

    def submit(self, transfer: Transfer, stage: Stage) -> None:
        """Runs `stage(transfer)` on the worker; an error of it fails the transfer."""

        def run() -> None:
            try:
                with self._on_stream(transfer), torch.no_grad():
                    stage(transfer)
            except Exception as error:
                self._fail(transfer, error)

        self._worker.submit(run)

    def after(self, transfer: Transfer, futures: Iterable[Future[Any]], stage: Stage) -> None:
        """Runs `stage(transfer)` on the worker when all `futures` are done."""
        waiting = list(futures)

        if not waiting:
            self.submit(transfer, stage)
            return
        done: Future[Any] = torch.futures.collect_all(waiting)

        def then(transfer: Transfer) -> None:
            done.wait()  # raises the error of any of them
            for future in waiting:
                future.wait()  # makes the device's stream wait
            stage(transfer)

        done.add_done_callback(lambda _: self.submit(transfer, then))

    @contextlib.contextmanager
    def _on_stream(self, transfer: Transfer) -> Iterator[None]:
        """The worker has a stream of its own on each device.

        The device also becomes the worker's current one. To leave a stream is to switch back to the
        current device, which otherwise is device 0, and that makes a context there.
        """
        device = transfer.buffer.device
        if transfer.ready is None:
            yield
            return
        torch.accelerator.set_device_index(device)
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        with self._streams[device]:
            yield

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Ends this bucket and those that would be gathered after it: their turn never comes."""
        for other in {id(f): f for f in (transfer, *self.gathers)}.values():
            if not other.result.done():
                other.result.set_exception(error)  # type: ignore[arg-type]
        self.gathers.clear()
