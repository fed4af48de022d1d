"""The key-value store of `torch-resilient shift`: text lines over TCP, everything in memory.

    put KEY VALUE     stores a value
    del KEY           removes it
    get KEY           answered with "val KEY VALUE" as soon as the key exists

Keys put over a connection are removed when it ends. Whoever can reach the port can read and write:
the store belongs on the closed management network of the job.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType

LINE_MAX = 4096
# Far more than a process needs for its queue pairs and memory regions.
KEYS_MAX = 1 << 20


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.received = b""
        self.to_send = b""
        self.keys: set[str] = set()


class ShiftStore:
    """A store that serves in a thread of its own; a context manager.

    host, port: where it listens; port 0 chooses a free one. Raises OSError if that is impossible.
    """

    def __init__(self, host: str = "", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, str] = {}
        self._owners: dict[str, _Client] = {}
        self._waiting: dict[str, list[_Client]] = {}
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="shift-store", daemon=True)
        self._thread.start()

    def __enter__(self) -> ShiftStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections. May be repeated."""
        if self._thread.is_alive():
            self._waker.send(b"x")
            self._thread.join()

    def _serve(self) -> None:
        running = True
        while running:
            for key, events in self._selector.select():
                if key.fileobj is self._woken:
                    running = False
                elif key.fileobj is self._listener:
                    self._accept()
                else:
                    self._handle(key.data, events)
        for entry in list(self._selector.get_map().values()):
            entry.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(connection, selectors.EVENT_READ, _Client(connection))

    def _handle(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = client.connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                client.received += data
                *lines, client.received = client.received.split(b"\n")
                for line in lines:
                    self._obey(client, line.decode("ascii"))
                if len(client.received) > LINE_MAX:
                    raise ValueError("the line is too long")
            self._flush(client)
        except (OSError, ValueError):  # gone, or not a client of ours
            self._drop(client)

    def _obey(self, client: _Client, line: str) -> None:
        words = line.split(" ")
        if words[0] == "put" and len(words) == 3:
            self._put(client, words[1], words[2])
        elif words[0] == "del" and len(words) == 2:
            self._remove(client, words[1])
        elif words[0] == "get" and len(words) == 2:
            if words[1] in self._values:
                self._tell(client, words[1])
            else:
                self._waiting.setdefault(words[1], []).append(client)
        else:
            raise ValueError("not a request")

    def _put(self, client: _Client, key: str, value: str) -> None:
        if len(client.keys) >= KEYS_MAX:
            raise ValueError("too many keys")
        owner = self._owners.get(key)
        if owner is not None:
            owner.keys.discard(key)
        self._values[key] = value
        self._owners[key] = client
        client.keys.add(key)
        for other in self._waiting.pop(key, []):
            self._tell(other, key)

    def _remove(self, client: _Client, key: str) -> None:
        if self._owners.get(key) is client:
            client.keys.discard(key)
            del self._owners[key]
            del self._values[key]

    def _tell(self, client: _Client, key: str) -> None:
        client.to_send += f"val {key} {self._values[key]}\n".encode("ascii")
        self._flush(client)

    def _flush(self, client: _Client) -> None:
        if client.connection.fileno() < 0:
            return
        with contextlib.suppress(OSError):  # full, or gone: its own event says so
            sent = client.connection.send(client.to_send)
            client.to_send = client.to_send[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.to_send else 0)
        self._selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        for key in list(client.keys):
            self._remove(client, key)
        for key, waiting in list(self._waiting.items()):
            left = [each for each in waiting if each is not client]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]
