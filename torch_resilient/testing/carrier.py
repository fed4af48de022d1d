"""The process that carries a lab's packets, and the communication with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import util

from torch_resilient.testing import namespaces

# Loads the compiled module by its path: neither this package nor torch is imported.
_PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("torch_resilient._lab", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.carrier(int(sys.argv[2]), int(sys.argv[3]))
"""
# No answer takes longer than a few milliseconds; the machine may be busy.
_ANSWER_TIMEOUT_S = 30.0
_MESSAGE_BYTES_MAX = 128 * 1024
_REPLY_BYTES_MAX = 1 << 20


def module_path() -> str:
    """The path of torch_resilient._lab. Raises FileNotFoundError if it has not been built."""
    spec = util.find_spec("torch_resilient._lab")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "torch_resilient._lab is missing: build this copy of torch_resilient with "
            "`pip install --no-build-isolation --no-deps -e .`"
        )
    return spec.origin


class Carrier:
    """csrc/lab/carrier.h as a process. Its end ends all others of its PID namespace."""

    def __init__(self) -> None:
        path = module_path()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.pidfd_open(os.getpid())
        try:
            fds = (theirs.fileno(), owner)
            self.process, self.pid_namespace = namespaces.first_of_new_pid_namespace(
                lambda: subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _PROGRAM, path, *map(str, fds)],
                    pass_fds=fds,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the owner
                )
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(owner)
        ours.settimeout(_ANSWER_TIMEOUT_S)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _MESSAGE_BYTES_MAX)
        self._socket = ours
        self._lock = threading.Lock()

    def ask(self, lines: Sequence[str], fd: int | None = None) -> str:
        """Sends requests in order and returns what the carrier answers after "ok".

        Raises RuntimeError if it refuses one, ChildProcessError if it has ended.
        """
        fds = [] if fd is None else [fd]
        answer = ""
        with self._lock:
            rest = list(lines)
            while rest:
                message = rest.pop(0)
                while rest and len(message) + len(rest[0]) < _MESSAGE_BYTES_MAX:
                    message += "\n" + rest.pop(0)
                answer += self._exchange(message, fds)
        return answer

    def _exchange(self, message: str, fds: list[int]) -> str:
        try:
            socket.send_fds(self._socket, [message.encode()], fds)
            reply = self._socket.recv(_REPLY_BYTES_MAX).decode()
        except OSError as error:
            raise ChildProcessError(f"the lab's carrier does not answer: {error}") from error
        if not reply:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            raise ChildProcessError(
                f"the lab's carrier has ended with status {self.process.returncode}"
            )
        if not reply.startswith("ok"):
            raise RuntimeError(f"the lab's carrier refused: {reply}")
        return reply[2:]

    def kill(self) -> None:
        """Kills it and, with it, every process of the lab. wait() afterwards."""
        self._socket.close()
        self.process.kill()

    def wait(self) -> None:
        """Waits for its end. Before, this process must have waited for the processes it started."""
        self.process.wait()
        os.close(self.pid_namespace)
