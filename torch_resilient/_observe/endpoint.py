"""Serves the state of this process over HTTP, if TORCH_RESILIENT_METRICS asks for it.

`/metrics` for Prometheus, `/stats` as JSON, on a Unix socket in a folder or on a TCP port. Meant
for tools on this host: there is neither encryption nor a password.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import socketserver
import stat
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from torch_resilient._observe import prometheus
from torch_resilient._observe.snapshot import snapshot

# A folder, or where to listen.
VARIABLE = "TORCH_RESILIENT_METRICS"
SUFFIX = ".sock"
# A client that says or takes nothing for this long is sent away.
_CLIENT_TIMEOUT_S = 5.0
# The most that a client gets in all, however often it says a little.
_CLIENT_MAX_S = 10.0
# Until a caller is taken again who could not be.
_PAUSE_S = 0.1
# At a time; further ones are closed. Two scrapers and a few people.
_CLIENTS_MAX = 8
# The size of sun_path, including the terminating zero.
_SOCKET_NAME_BYTES_MAX = 108

_TCP = re.compile(r"(?:(?P<host>\[[^\]]+\]|[^:\[\]]*):)?(?P<port>\d+)")


class _Handler(BaseHTTPRequestHandler):
    timeout = _CLIENT_TIMEOUT_S
    server_version = "torch_resilient"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._answer(200, prometheus.CONTENT_TYPE, prometheus.render(snapshot()))
        elif path == "/stats":
            self._answer(200, "application/json", json.dumps(snapshot().to_dict()))
        else:
            self._answer(404, "text/plain", "there are /metrics and /stats\n")

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line in the job's log."""


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, family: int, address: Any) -> None:
        self.address_family = family
        self._clients = threading.BoundedSemaphore(_CLIENTS_MAX)
        self._limits_s: dict[Any, float] = {}  # by the connection
        super().__init__(address, _Handler, bind_and_activate=False)

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError:
            # No descriptor is left, and the caller waits: to try at once would take a processor.
            time.sleep(_PAUSE_S)
            raise

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
        self._limits_s[request] = time.monotonic() + _CLIENT_MAX_S
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._limits_s[request]
            self._clients.release()

    def service_actions(self) -> None:
        """Called by serve_forever() again and again."""
        for request, limit_s in list(self._limits_s.items()):
            if time.monotonic() > limit_s:
                with contextlib.suppress(OSError):  # it has ended meanwhile
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


def parse_tcp(text: str) -> tuple[str, int]:
    """Host and port of "9400", ":9400", "0.0.0.0:9400" or "[::1]:9400"; the host is loopback
    where none is given.

    Raises ValueError, which names the variable, for anything else.
    """
    match = _TCP.fullmatch(text.strip())
    port = int(match["port"]) if match else 0
    if match is None or port > 65535:
        raise ValueError(
            f'{VARIABLE}="{text}": expected a folder (with a "/", such as /tmp/job or ./job), or a '
            'port, or host:port, such as "9400", "127.0.0.1:9400" or "[::1]:9400"'
        )
    return (match["host"] or "127.0.0.1").strip("[]"), port


def _check_owner(folder: Path) -> None:
    """Raises PermissionError if another user can take the folder's sockets away or put others in
    their place."""
    about = folder.stat()
    others_write = about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX
    if about.st_uid not in (os.geteuid(), 0) or others_write:
        raise PermissionError(
            f"{VARIABLE}={folder}: user {about.st_uid} owns this folder (mode "
            f"{stat.S_IMODE(about.st_mode):04o}), and other users may write to it: choose one of "
            "your own (chmod 700)"
        )


class Endpoint:
    """Listens and answers, in threads of its own, until close().

    Args:
        where: value of the variable.
        rank: in the default group; for the socket's name.
        local_rank: is added to a TCP port, which gives each rank of a host its own port.

    Raises ValueError for a value that cannot be read; OSError if it cannot listen there.
    """

    def __init__(self, where: str, rank: int, local_rank: int = 0) -> None:
        self._path: Path | None = None
        if "/" in where:
            folder = Path(where)
            self._path = folder / f"rank{rank:05}.{os.getpid()}{SUFFIX}"
            if len(os.fsencode(self._path)) >= _SOCKET_NAME_BYTES_MAX:
                raise ValueError(
                    f"{VARIABLE}={where}: {self._path} is too long for the name of a socket (at "
                    f"most {_SOCKET_NAME_BYTES_MAX - 1} bytes): choose a shorter folder"
                )
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(folder)
            self._path.unlink(missing_ok=True)
            self._server = _Server(socket.AF_UNIX, str(self._path))
        else:
            host, port = parse_tcp(where)
            if port + local_rank > 65535:
                raise ValueError(
                    f"{VARIABLE}={where}: local rank {local_rank} would have port "
                    f"{port + local_rank}: choose a lower one"
                )
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._server = _Server(family, (host, port + local_rank if port else 0))
        try:
            if self._path is not None:
                # Only the owner has access: Linux gives the file the mode of the socket. Changing
                # the mode of the file would follow a link that another process may have put there
                # in the meantime.
                os.fchmod(self._server.fileno(), 0o600)
            self._server.server_bind()
            self._server.server_activate()
        except BaseException:
            self._server.server_close()
            raise
        self.address = self._server.server_address
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.2},
            name="torch_resilient metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stops listening and removes the socket; a second call does nothing."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
