"""HTTP in front of a PrefillService: JSON on loopback, for callers that know the token.

    POST /v1/generate
    Authorization: Bearer <token>

    {"tokens": [1, 2, 3], "max_new_tokens": 16, "max_wait_ms": 500, "timeout_ms": 30000}

The answer is {"tokens": [...], "ttft_ms": ..., "waited_ms": ...}, or status 503 with {"rejected":
reason}. Nothing listens unless a program makes a Server. There is no encryption: put a proxy in
front of it to serve other hosts.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import socketserver
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from torch_resilient.prefill.controller import Rejected
from torch_resilient.prefill.decoder import decode
from torch_resilient.prefill.model import ModelPart
from torch_resilient.prefill.service import Prefilled, PrefillService

PATH = "/v1/generate"
_FIELDS = ("tokens", "max_new_tokens", "max_wait_ms", "timeout_ms")
# A token takes up to ten digits, a comma and a blank.
_BYTES_PER_TOKEN = 12
_MAX_NEW_TOKENS = 1024
# A client that sends or takes nothing for this long is disconnected.
_CLIENT_TIMEOUT_S = 5.0
# The maximum of clients at a time; further ones are disconnected. Each takes a thread.
_MAX_CLIENTS = 64
# How often a waiting request looks whether its client is still there.
_GONE_POLL_S = 0.05
_MIN_TOKEN_BYTES = 16


class _Refused(Exception):
    """A request that is not answered as asked: (status, text)."""


class _Call(NamedTuple):
    tokens: list[int]
    max_new_tokens: int
    max_wait_s: float
    timeout_s: float


def read_call(body: bytes) -> _Call:
    """Reads the body of a request. Raises ValueError with a text that names the field."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("the body is not JSON") from None
    if not isinstance(given, dict) or "tokens" not in given:
        raise ValueError("expected an object with tokens")
    for name in given:
        if name not in _FIELDS:
            raise ValueError(f"expected only the fields {', '.join(_FIELDS)}")
    tokens = given["tokens"]
    if not isinstance(tokens, list):
        raise ValueError("tokens: expected a list of integers")
    count = given.get("max_new_tokens", 1)
    if type(count) is not int or not 1 <= count <= _MAX_NEW_TOKENS:
        raise ValueError(f"max_new_tokens: expected 1 to {_MAX_NEW_TOKENS}")
    times = []
    for name, default in (("max_wait_ms", 500), ("timeout_ms", 30_000)):
        value = given.get(name, default)
        if type(value) not in (int, float) or not 0 <= value <= 3_600_000:
            raise ValueError(f"{name}: expected 0 to 3600000")
        times.append(value / 1e3)
    return _Call(tokens, count, *times)


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server_version = "torch_resilient"
    sys_version = ""
    server: _Server

    def do_POST(self) -> None:
        try:
            status, answer = 200, self._answer()
        except _Refused as refused:
            status, answer = refused.args[0], {"error": refused.args[1]}
        except Rejected as rejected:
            status, answer = 503, {"rejected": str(rejected)}
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> dict[str, Any]:
        expected = f"Bearer {self.server.token}".encode()
        given = self.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, expected):
            raise _Refused(401, "the token is missing or wrong")
        if self.path != PATH:
            raise _Refused(404, f"there is {PATH}")
        service = self.server.service
        length = self.headers.get("Content-Length", "")
        max_bytes = 1000 + _BYTES_PER_TOKEN * service.max_tokens
        if not length.isascii() or not length.isdecimal() or len(length) > 9:
            raise _Refused(411, "Content-Length is missing")
        if int(length) > max_bytes:
            raise _Refused(413, f"a request has at most {max_bytes} bytes")
        try:
            call = read_call(self.rfile.read(int(length)))
            future = service.submit(call.tokens, call.max_wait_s, call.timeout_s)
        except ValueError as error:
            raise _Refused(400, str(error)) from None
        found = self._wait(future)
        # One at a time: the model is computed by all processors anyway.
        with self.server.decoding:
            tokens = decode(self.server.model, found.kv, found.logits, call.max_new_tokens)
        return {
            "tokens": tokens,
            "ttft_ms": round(found.ttft_s * 1e3, 3),
            "waited_ms": round(found.waited_s * 1e3, 3),
        }

    def _wait(self, future: Future[Prefilled]) -> Prefilled:
        while True:
            try:
                return future.result(_GONE_POLL_S)
            except FutureTimeoutError:
                if self._client_is_gone():
                    self.server.service.cancel(future)
                    raise _Refused(499, "the client has gone") from None

    def _client_is_gone(self) -> bool:
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        with contextlib.suppress(OSError):
            return bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        return True

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not logged."""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], service: PrefillService, model: ModelPart, token: str
    ) -> None:
        self.service = service
        self.model = model
        self.token = token
        self.decoding = threading.Lock()
        self._clients = threading.BoundedSemaphore(_MAX_CLIENTS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._clients.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._clients.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The text of an error might hold a prompt."""


class Server:
    """Serves until close(), in threads of its own.

    Args:
        service: prefills.
        model: the whole model, which decodes.
        token: that callers must know; at least 16 bytes.
        port: on loopback; 0 for any free one.

    Attributes:
        port: where it listens.

    Raises ValueError for a short token, OSError if it cannot listen.
    """

    def __init__(
        self, service: PrefillService, model: ModelPart, token: str, port: int = 0
    ) -> None:
        if len(token) < _MIN_TOKEN_BYTES or not token.isascii() or not token.isprintable():
            raise ValueError(f"token: expected at least {_MIN_TOKEN_BYTES} printable characters")
        self._server = _Server(("127.0.0.1", port), service, model, token)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="torch_resilient prefill server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Requests that are open end with the service."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
