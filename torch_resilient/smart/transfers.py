"""Buckets on their way: each runs its stages one after the other, on one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from torch_resilient._worker import Handover, WorkerStreams
from torch_resilient.smart.gradient_drop import Layout
from torch_resilient.smart.recovery import Exchange


@dataclass
class Transfer:
    """One bucket on its way. Thread: the worker's, from the first stage on."""

    buffer: Tensor  # one-dimensional; input, and output unless `output` is set
    layout: Layout
    handover: Handover
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
        self._streams = WorkerStreams()

    def start(
        self, buffer: Tensor, layout: Layout, output: Tensor | None, divide: bool, first: Stage
    ) -> Future[Tensor]:
        """Submits the first stage of another bucket; the future gives the result."""
        handover = Handover(buffer)
        self.submit(Transfer(buffer, layout, handover, output, divide), first)
        return handover.delivered

    def enter(self, transfer: Transfer) -> None:
        """In the first stage: numbers the transfer and queues it for the gathering.

        Makes the device's stream wait for the gradients.
        """
        transfer.number = self.begun
        self.begun += 1
        self.gathers.append(transfer)
        transfer.handover.receive()

    def submit(self, transfer: Transfer, stage: Stage) -> None:
        """Runs `stage(transfer)` on the worker; an error of it fails the transfer."""

        def run() -> None:
            try:
                with self._streams.on(transfer.buffer.device), torch.no_grad():
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

    def _fail(self, transfer: Transfer, error: Exception) -> None:
        """Ends this bucket and those that would be gathered after it: their turn never comes."""
        for other in {id(f): f for f in (transfer, *self.gathers)}.values():
            other.handover.fail(error)
        self.gathers.clear()
