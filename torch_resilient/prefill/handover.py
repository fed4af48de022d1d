"""Messages between the ranks that prefill and the process that decodes.

A `Link` is a group of two of its own on the "resilient" backend. If one end dies, only its links
fail: no group of the training contains a decoder. Messages have the traffic class "bulk", so the
training's messages overtake them.
"""

# Paper: BUBBLETEA §5.1, "the KV cache is transferred to decode GPUs"

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from torch_resilient import _native, _process_end, _registration
from torch_resilient.traffic import traffic_class

# Receives wait for the next message, however long it takes.
_RECEIVE_TIMEOUT = timedelta(days=365)
# A message that has not left after this time ends the link: its receiver has fallen silent.
_SEND_TIMEOUT_S = 30.0
# The time in which the peer takes what was sent before a link was closed.
_CLOSE_TIMEOUT_S = 5.0
_TAG = 0
_DTYPES = (torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8)
# kind, request, three numbers, index in _DTYPES, number of dimensions, dimensions.
_MAX_DIMENSIONS = 4
_HEADER = 7 + _MAX_DIMENSIONS


class Kind(IntEnum):
    """The kinds of messages, with their numbers and their payload in parentheses."""

    PROMPT = 1  # to the first worker (; tokens)
    CANCEL = 2  # to a worker: the request has ended elsewhere
    HIDDEN = 3  # between workers (first token, all tokens; outputs of a chunk)
    KV = 4  # to the decoder (layer, first token; [2, tokens of a chunk, kv_heads, head_dim])
    LOGITS = 5  # to the decoder, from the last worker (; [vocabulary])
    FAILED = 6  # to the decoder (; the reason as UTF-8)
    SIGNAL = 7  # to the controller (; see IdleSignal)
    END = 8  # to the controller: the work has ended, and with it the link (; the reason as UTF-8)


class Header(NamedTuple):
    kind: Kind
    request: int
    numbers: tuple[int, int, int]
    dtype: torch.dtype
    size: tuple[int, ...]


class Message(NamedTuple):
    header: Header
    payload: Tensor

    @property
    def text(self) -> str:
        """The text of a message with a reason."""
        return bytes(self.payload.tolist()).decode(errors="replace")


class LinkError(ValueError):
    """The peer has sent something that this end does not accept."""


def _encoded(kind: Kind, request: int, numbers: tuple[int, ...], payload: Tensor) -> Tensor:
    numbers = (*numbers, 0, 0, 0)[:3]
    size = (*payload.shape, 0, 0, 0, 0)[:_MAX_DIMENSIONS]
    dtype = _DTYPES.index(payload.dtype)
    return torch.tensor([kind, request, *numbers, dtype, payload.dim(), *size], dtype=torch.int64)


def _decoded(header: Tensor) -> Header:
    kind, request, *numbers, dtype, dimensions = header[:7].tolist()
    size = header[7:].tolist()
    if (
        kind not in Kind.__members__.values()
        or not 0 <= dtype < len(_DTYPES)
        or not 0 <= dimensions <= _MAX_DIMENSIONS
        or any(each < 0 for each in size)
    ):
        raise LinkError(f"a header that says nothing: kind {kind}")
    a, b, c = numbers
    return Header(Kind(kind), request, (a, b, c), _DTYPES[dtype], tuple(size[:dimensions]))


class Link:
    """One end of a connection that carries messages in order. Thread: one at a time.

    Args:
        store: both ends reach it; it must hold no other link of this name.
        name: of the link.
        end: 0 or 1.
        max_bytes: of a payload that is accepted.
        destination: gives the tensor into which a payload is received. By default each gets a new
            one. It may raise LinkError to refuse the message, which ends the link.

    Attributes:
        lost: why the link has ended; empty as long as it works.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        end: int,
        max_bytes: int,
        destination: Callable[[Header], Tensor] | None = None,
    ) -> None:
        self.name = name
        self.lost = ""
        self._peer = 1 - end
        self._max_bytes = max_bytes
        self._destination = destination or (lambda each: torch.empty(each.size, dtype=each.dtype))
        self._group = _registration.create_group(
            PrefixStore(f"torch_resilient/prefill/{name}", store),
            end,
            2,
            name=f"prefill {name}",
            timeout=_RECEIVE_TIMEOUT,
        )
        self._sends: deque[tuple[float, dist.Work]] = deque()
        self._end_sent = False
        self._header = torch.zeros(_HEADER, dtype=torch.int64)
        self._announced: Header | None = None
        self._payload = torch.empty(0)
        self._receive = self._post(self._header)

    @property
    def receiving(self) -> dist.Work:
        """The receive that ends when something has come."""
        return self._receive

    def send(
        self, kind: Kind, request: int = 0, payload: Tensor | None = None, *numbers: int
    ) -> list[dist.Work]:
        """Begins to send a message; never blocks.

        Returns its works, which end when `payload` may be reused; none if the link is lost.
        """
        if self.lost:
            return []
        payload = torch.empty(0, dtype=torch.uint8) if payload is None else payload
        header = _encoded(kind, request, numbers, payload)
        try:
            with traffic_class("bulk"):
                works = [self._group.send([header], self._peer, _TAG)]
                if payload.numel():
                    works.append(self._group.send([payload], self._peer, _TAG))
        except RuntimeError as error:
            self._lose(error)
            return []
        self._end_sent |= kind is Kind.END
        now_s = time.monotonic()
        self._sends += [(now_s, work) for work in works]
        return works

    def send_text(self, kind: Kind, request: int, text: str) -> None:
        """Begins to send a message with a reason."""
        self.send(kind, request, torch.tensor(list(text.encode()[:1000]), dtype=torch.uint8))

    def poll(self) -> list[Message]:
        """The messages that have come; never blocks. None any more if the link is lost."""
        messages = []
        try:
            self._check_sends()
            while not self.lost and ended(self._receive):
                self._receive.wait()  # raises its error
                if self._announced is None:
                    header = _decoded(self._header)
                    size = math.prod(header.size) * header.dtype.itemsize
                    if size > self._max_bytes:
                        raise LinkError(f"a message of {size} bytes, at most {self._max_bytes}")
                    self._payload = self._destination(header)
                    if self._payload.numel():
                        self._announced = header
                        self._receive = self._post(self._payload)
                        continue
                else:
                    header, self._announced = self._announced, None
                messages.append(Message(header, self._payload))
                if header.kind is Kind.END:
                    self._lose(messages[-1].text)
                    break
                self._receive = self._post(self._header)
        except (RuntimeError, LinkError) as error:
            self._lose(error)
        return messages

    def close(self) -> None:
        """Ends the link, after what was sent before has arrived if the peer lives.

        After `Kind.END` it waits until the peer has taken that: to end the group before would fail
        the peer's receives of what has arrived.
        """
        deadline_s = time.monotonic() + _CLOSE_TIMEOUT_S
        while not self.lost and (self._sends or self._end_sent) and time.monotonic() < deadline_s:
            self.poll()
            time.sleep(1e-3)
        self._lose("closed")

    def close_later(self) -> None:
        """Like close(), in a thread of its own, which this process does not end before."""
        thread = threading.Thread(target=self.close, name=f"torch_resilient end of {self.name}")
        thread.start()
        # Before the engine: only the main interpreter waits for threads by itself.
        _process_end.run_at_end(thread.join, _process_end.OBSERVERS_ORDER)

    def _post(self, tensor: Tensor) -> dist.Work:
        work: dist.Work = self._group.recv([tensor], self._peer, _TAG)
        return work

    def _check_sends(self) -> None:
        while self._sends and ended(self._sends[0][1]):
            self._sends.popleft()[1].wait()  # raises its error
        if self._sends and time.monotonic() - self._sends[0][0] > _SEND_TIMEOUT_S:
            raise LinkError(f"the peer has taken nothing for {_SEND_TIMEOUT_S:.0f} s")

    def _lose(self, reason: object) -> None:
        if not self.lost:
            self.lost = " ".join(str(reason).split()) or type(reason).__name__
            self._sends.clear()
            self._group.abort()


def ended(work: dist.Work) -> bool:
    """Whether a work of the "resilient" backend has ended, well or not; never blocks."""
    return _native.load().wait_any([work], 0.0) is not None
