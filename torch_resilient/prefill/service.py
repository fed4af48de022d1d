"""The process that accepts requests, and decodes what the training's ranks have prefilled."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from torch_resilient import _native
from torch_resilient._reports import events
from torch_resilient.prefill.controller import Controller, Rejected, Reservation
from torch_resilient.prefill.handover import Header, Kind, Link, LinkError, Message
from torch_resilient.prefill.model import ModelShape, check_chunk_tokens
from torch_resilient.prefill.signal import IdleSignal

# The maximum of open requests and of those that wait for the thread.
_MAX_OPEN = 256
# The pause between two looks at new requests: an incoming message ends it.
_POLL_S = 1e-3
# The logits among what a request waits for.
_LOGITS = (-1, 0)


class Prefilled(NamedTuple):
    """The result of a prefill.

    Attributes:
        kv: keys and values of the prompt, [layers, 2, tokens, kv_heads, head_dim].
        logits: of the first token after it.
        ttft_s: from the request to the logits: the time to the first token.
        waited_s: from the request to the predicted start.
    """

    kv: Tensor
    logits: Tensor
    ttft_s: float
    waited_s: float


@dataclass(eq=False)
class _Request:
    """An open request.

    Attributes:
        missing: what has not come: (layer, first token) of keys and values, and the logits.
    """

    number: int
    tokens: Tensor
    asked_s: float
    max_wait_s: float
    deadline_s: float
    future: Future[Prefilled] = field(default_factory=Future)
    reservation: Reservation | None = None
    kv: Tensor | None = None
    logits: Tensor | None = None
    missing: set[tuple[int, int]] = field(default_factory=set)

    def awaited(self, kind: Kind, layer: int, start: int) -> tuple[int, int]:
        """The part of `missing` that a message brings. Raises LinkError if it is not missing."""
        is_kv = kind is Kind.KV
        piece = (layer, start) if is_kv else _LOGITS
        if piece not in self.missing or is_kv == (piece == _LOGITS):
            what = f"layer {layer} from token {start}" if is_kv else "the logits"
            raise LinkError(f"{what} of request {self.number} did not have to come")
        return piece

    def holds(self, payload: Tensor) -> bool:
        """Whether it was received for this request, and not before it began."""
        place = payload.untyped_storage().data_ptr()
        mine = (each for each in (self.kv, self.logits) if each is not None)
        return any(each.untyped_storage().data_ptr() == place for each in mine)


@dataclass
class ServiceStats:
    """Counts of requests since the beginning."""

    asked: int = 0
    accepted: int = 0
    finished: int = 0
    failed: int = 0


class PrefillService:
    """Prefills prompts on the ranks of a training. submit() may be called by any thread.

    A thread of its own receives from the workers. Requests that are open when a worker, its link or
    the training ends, or whose deadline passes, end with Rejected.

    Args:
        store: that of the training's workers.
        shape: of the model.
        dtype: of its keys and values.
        pipes: for each copy of the model, the names of the links to its ranks, by layer.
        max_tokens: of a prompt.
        chunk_tokens: of the workers, 1 to 512.

    Raises ValueError for a `chunk_tokens` that no worker has, and for a pipe with more ranks than
    the model has layers.
    """

    def __init__(
        self,
        store: Store,
        shape: ModelShape,
        dtype: torch.dtype,
        pipes: Sequence[Sequence[str]],
        *,
        max_tokens: int = 8192,
        chunk_tokens: int = 512,
    ) -> None:
        check_chunk_tokens(chunk_tokens)
        self.shape = shape
        self.max_tokens = max_tokens
        self.stats = ServiceStats()
        self._dtype = dtype
        self._chunk_tokens = chunk_tokens
        self._controller = Controller(shape, [len(pipe) for pipe in pipes], chunk_tokens)
        # Keys and values of a chunk, or a signal of many windows.
        chunk_bytes = shape.kv_bytes(min(chunk_tokens, max_tokens), 1, dtype)
        max_bytes = max(chunk_bytes, 8 * shape.vocabulary, 1 << 20)
        self._links = [
            [
                Link(store, name, 0, max_bytes, functools.partial(self._destination, number))
                for name in pipe
            ]
            for number, pipe in enumerate(pipes)
        ]
        self._numbers = itertools.count()
        self._open: dict[int, _Request] = {}
        self._asked = deque[_Request]()
        self._cancelled = deque[Future[Prefilled]]()
        self._ended = ""
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._serve, name="torch_resilient prefill", daemon=True
        )
        self._thread.start()

    def submit(
        self, tokens: Sequence[int], max_wait_s: float = 0.5, timeout_s: float = 30.0
    ) -> Future[Prefilled]:
        """Asks for the prefill of a prompt.

        The future raises Rejected at once if it would begin later than `max_wait_s` from now or end
        later than `timeout_s`, and later if it does not end by then or something fails.

        Raises ValueError for a prompt that no worker takes.
        """
        if not 1 <= len(tokens) <= self.max_tokens:
            raise ValueError(f"tokens: expected 1 to {self.max_tokens}, got {len(tokens)}")
        if not all(type(each) is int and 0 <= each < self.shape.vocabulary for each in tokens):
            raise ValueError(f"tokens: expected integers from 0 to {self.shape.vocabulary - 1}")
        for name, value in (("max_wait_s", max_wait_s), ("timeout_s", timeout_s)):
            if not 0 <= value <= 3600:
                raise ValueError(f"{name}: expected 0 to 3600")
        now_s = time.monotonic()
        request = _Request(
            next(self._numbers), torch.tensor(tokens), now_s, max_wait_s, now_s + timeout_s
        )
        with self._lock:
            self.stats.asked += 1
            if self._ended or len(self._open) + len(self._asked) >= _MAX_OPEN:
                reason = self._ended or f"{_MAX_OPEN} requests are open"
                request.future.set_exception(Rejected(reason))
            else:
                self._asked.append(request)
        return request.future

    def cancel(self, future: Future[Prefilled]) -> None:
        """The client has gone: its request ends, and its workers stop."""
        self._cancelled.append(future)

    def close(self, reason: str = "the service has ended") -> None:
        """Ends all requests and the thread."""
        with self._lock:
            self._ended = self._ended or reason
        self._thread.join()

    def _serve(self) -> None:
        try:
            while not self._ended:
                self._turn()
                receiving = [link.receiving for link in self._all_links() if not link.lost]
                if receiving:
                    _native.load().wait_any(receiving, _POLL_S)
                else:
                    time.sleep(_POLL_S)
        finally:
            with self._lock:
                self._ended = self._ended or "the service has failed"
            for request in [*self._open.values(), *self._asked]:
                self._reject(request, self._ended)
            for link in self._all_links():
                link.close()

    def _turn(self) -> None:
        for pipe, links in enumerate(self._links):
            for part, link in enumerate(links):
                for message in link.poll():
                    try:
                        self._take(pipe, part, message)
                    except LinkError as error:
                        self._lose(pipe, f"{link.name}: {error}")
                    except Exception as error:  # other pipes go on
                        self._lose(pipe, f"{type(error).__name__} in what {link.name} has sent")
                if link.lost:
                    self._lose(pipe, f"the link {link.name} is lost: {link.lost}")
        while self._asked:
            with self._lock:
                request = self._asked.popleft()
                self._open[request.number] = request
            self._begin(request)
        while self._cancelled:
            future = self._cancelled.popleft()
            for request in [each for each in self._open.values() if each.future is future]:
                self._reject(request, "the client has gone")
        now_s = time.monotonic()
        for request in [each for each in self._open.values() if each.deadline_s < now_s]:
            self._reject(request, "its deadline has passed")

    def _all_links(self) -> list[Link]:
        return [link for links in self._links for link in links]

    def _begin(self, request: _Request) -> None:
        """Places a request, or rejects it."""
        try:
            reservation = self._controller.place(
                request.number,
                len(request.tokens),
                time.monotonic(),
                request.max_wait_s,
                request.deadline_s,
                request.asked_s,
            )
        except Rejected as rejected:
            self._reject(request, str(rejected))
            return
        self.stats.accepted += 1
        request.reservation = reservation
        shape = self.shape
        size = (shape.layers, 2, len(request.tokens), shape.kv_heads, shape.head_dim)
        request.kv = torch.empty(size, dtype=self._dtype)
        request.logits = torch.empty(shape.vocabulary, dtype=self._dtype)
        starts = range(0, len(request.tokens), self._chunk_tokens)
        request.missing = {_LOGITS, *itertools.product(range(shape.layers), starts)}
        self._links[reservation.pipe][0].send(Kind.PROMPT, request.number, request.tokens)

    def _request_of(self, pipe: int, number: int) -> _Request | None:
        """An open request that this pipe computes."""
        request = self._open.get(number)
        if request is None or request.reservation is None or request.reservation.pipe != pipe:
            return None
        return request

    def _destination(self, pipe: int, header: Header) -> Tensor:
        """The place of a payload. The payload of a request that has ended is dropped."""
        kind, number, (layer, start, _), dtype, size = header
        request = self._request_of(pipe, number)
        if kind not in (Kind.KV, Kind.LOGITS) or request is None:
            return torch.empty(size, dtype=dtype)
        request.awaited(kind, layer, start)
        if kind is Kind.KV:
            assert request.kv is not None
            place = request.kv[layer, :, start : start + self._chunk_tokens]
        else:
            assert request.logits is not None
            place = request.logits
        if place.dtype != dtype or tuple(place.shape) != size:
            raise LinkError(f"a payload of {size} and {dtype} for request {number}")
        return place

    def _take(self, pipe: int, part: int, message: Message) -> None:
        kind, number, (layer, start, _), _, _ = message.header
        request = self._request_of(pipe, number)
        if kind is Kind.SIGNAL:
            try:
                signal = IdleSignal.from_tensor(message.payload)
            except ValueError as error:
                self._lose(pipe, str(error))
                return
            for broken in self._controller.signal(pipe, part, signal, time.monotonic()):
                self._reject(self._open[broken.request], "the idle time for it has vanished")
        elif kind is Kind.END:
            self._lose(pipe, message.text)
        elif request is not None:
            assert request.reservation is not None
            if kind is Kind.FAILED:
                self._reject(request, message.text)
            elif kind in (Kind.KV, Kind.LOGITS) and request.holds(message.payload):
                request.missing.remove(request.awaited(kind, layer, start))
                if kind is Kind.KV:
                    self._controller.chunk_done(request.reservation, layer)
                if not request.missing:
                    self._finish(request)

    def _finish(self, request: _Request) -> None:
        assert request.kv is not None
        assert request.logits is not None
        assert request.reservation is not None
        del self._open[request.number]
        self._controller.done(request.reservation)
        self.stats.finished += 1
        request.future.set_result(
            Prefilled(
                request.kv,
                request.logits,
                time.monotonic() - request.asked_s,
                request.reservation.start_s - request.asked_s,
            )
        )

    def _reject(self, request: _Request, reason: str) -> None:
        """Ends a request without a result."""
        if self._open.pop(request.number, None) is not None and request.reservation is not None:
            self._controller.done(request.reservation)
            self.stats.failed += 1
            for link in self._links[request.reservation.pipe]:
                link.send(Kind.CANCEL, request.number)
        if not request.future.done():
            request.future.set_exception(Rejected(reason))

    def _lose(self, pipe: int, reason: str) -> None:
        """A pipe is of no use any more."""
        if not self._controller.is_lost(pipe):
            events.record("prefill_pipe_lost", f"prefills on pipe {pipe} have ended: {reason}")
            for reservation in self._controller.lose(pipe, reason):
                self._reject(self._open[reservation.request], reason)
