"""Commands in a guest: the server that runs there, and the program on the host that stands for one.

A guest (testing/guest.py) has its own kernel, so the host cannot start a process in it.

    python guest_agent.py serve PORT [MODULE...]       in the guest
    python guest_agent.py run FD ADDRESS PORT COMMAND  on the host

`serve` runs a command for each connection. With modules it imports them first, and a command that
is a Python program runs in a fork of this process: it does not import them again.

`run` behaves like the command: same output, same exit status or signal. It passes its input and the
usual signals on. If it is killed, the server kills the command and all descendants of it. FD holds
the environment, as JSON.

This file runs as a script. It imports nothing of the package, and starts fast.

A frame is a byte (the kind), four bytes (the length), and data. To the server: "r" {arguments,
environment, directory, merged}, "i" input ("" is its end), "s" number of a signal, "n" {device, up}
and "w" {path, text}. From the server: "o" and "e" output, "x" {status}, "f" a failure as text.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

_HEADER = struct.Struct("!cI")
_PART_BYTES = 1 << 16
_IFF_UP = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
# `run` passes these on; the others have a meaning for the program that sends them.
_PASSED_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
# Exit status of `run` if the command could not be started, as in a shell.
NOT_STARTED = 127
READY = "guest agent: ready"
PRELOADED = "guest agent: imported"


def send_frame(sock: socket.socket, kind: bytes, data: bytes = b"") -> None:
    """Raises OSError."""
    sock.sendall(_HEADER.pack(kind, len(data)) + data)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Fewer bytes only if the connection ends."""
    parts = []
    while size > 0 and (part := sock.recv(min(size, _PART_BYTES))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def receive_frame(sock: socket.socket) -> tuple[bytes, bytes] | None:
    """(kind, data), or None at the end of the connection. Raises OSError."""
    header = _receive_exactly(sock, _HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, size = _HEADER.unpack(header)
    data = _receive_exactly(sock, size)
    return (kind, data) if len(data) == size else None


class RefusedError(OSError):
    """The server could not do what it was asked for."""


def request(sock: socket.socket, kind: bytes, what: dict[str, Any]) -> None:
    """Asks the server for something that is not a command.

    Raises RefusedError; another OSError if the connection fails.
    """
    send_frame(sock, kind, json.dumps(what).encode())
    answer = receive_frame(sock)
    if answer is None:
        raise ConnectionError("the guest's agent has closed the connection")
    if answer[0] == b"f":
        raise RefusedError(answer[1].decode())


# ---- in the guest ----


def descendants(pid: int) -> Iterator[int]:
    """All descendants of process `pid`."""
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as children:
                for child in map(int, children.read().split()):
                    yield child
                    yield from descendants(child)


def _kill_tree(pid: int) -> None:
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _switch(device: str, up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        interface = struct.pack("16sh22x", device.encode(), 0)
        (flags,) = struct.unpack_from("H", fcntl.ioctl(control, _SIOCGIFFLAGS, interface), 16)
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh22x", device.encode(), flags))


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


class _Pipes:
    """The ends of a command's input and output that its handler has."""

    def __init__(self, merged: bool) -> None:
        self.child_input, self.input = os.pipe()
        self.output, self.child_output = os.pipe()
        self.errors, self.child_errors = (-1, self.child_output) if merged else os.pipe()

    def close_child_ends(self) -> None:
        for fd in {self.child_input, self.child_output, self.child_errors}:
            os.close(fd)


class _Python(Exception):
    """Raised in the fork that becomes a Python program, to get to the bottom of the stack."""

    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.arguments = arguments


def _become(task: dict[str, Any], pipes: _Pipes) -> NoReturn:
    """In a fork: becomes the Python program of the task."""
    os.setsid()
    for fd, child_fd in enumerate((pipes.child_input, pipes.child_output, pipes.child_errors)):
        os.dup2(child_fd, fd)
    # Everything else belongs to the server.
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(task["directory"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(task["environment"])
    added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in added if path and path not in before]
    raise _Python(task["arguments"])


def _start(task: dict[str, Any], pipes: _Pipes, is_warm: bool) -> int:
    """Starts the command; returns its process id. Raises OSError, or _Python in the child."""
    if not is_warm:
        process = subprocess.Popen(
            task["arguments"],
            stdin=pipes.child_input,
            stdout=pipes.child_output,
            stderr=pipes.child_errors,
            cwd=task["directory"],
            env=task["environment"],
            start_new_session=True,
        )
        process.returncode = 0  # waited for here, not there
        return process.pid
    if not os.path.isdir(task["directory"]):
        raise FileNotFoundError(f"no such directory: {task['directory']}")
    pid = os.fork()
    if pid == 0:
        _become(task, pipes)
    return pid


def _listen_to_owner(
    sock: socket.socket, pid: int, input_fd: int, is_over: threading.Event
) -> None:
    """A thread: input and signals for the command, until the owner goes; then kills it."""
    with contextlib.suppress(OSError):
        while (frame := receive_frame(sock)) is not None:
            kind, data = frame
            if kind == b"s":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, int(data))
            elif kind == b"i" and input_fd >= 0:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(input_fd, view) :]
                except BrokenPipeError:
                    data = b""
                if not data:
                    os.close(input_fd)
                    input_fd = -1
    if not is_over.is_set():
        _kill_tree(pid)
    os._exit(0)


def _run_command(sock: socket.socket, task: dict[str, Any], is_warm: bool) -> None:
    """Runs one command to its end. Raises _Python in the child, if it is a Python program."""
    pipes = _Pipes(task["merged"])
    try:
        pid = _start(task, pipes, is_warm)
    except (OSError, ValueError) as error:
        send_frame(sock, b"f", f"{type(error).__name__}: {error}".encode())
        return
    pipes.close_child_ends()
    end = os.pidfd_open(pid)
    is_over = threading.Event()
    listener = threading.Thread(
        target=_listen_to_owner, args=(sock, pid, pipes.input, is_over), daemon=True
    )
    listener.start()
    outputs = {pipes.output: b"o", pipes.errors: b"e"}
    outputs.pop(-1, None)
    with selectors.DefaultSelector() as selector:
        for fd in (end, *outputs):
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        over = False
        while not over:
            ready = {key.fd for key, _ in selector.select()}
            # What the command wrote before its end is sent. What it left behind may hold the pipes
            # open for ever.
            over = end in ready
            for fd, kind in outputs.items():
                if fd not in ready and not over:
                    continue
                with contextlib.suppress(BlockingIOError):
                    while part := os.read(fd, _PART_BYTES):
                        send_frame(sock, kind, part)
                    if fd in selector.get_map():
                        selector.unregister(fd)
    is_over.set()
    _, status = os.waitpid(pid, 0)
    send_frame(sock, b"x", json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode())
    # Closing now, with input unread, would reset the connection and discard the answer.
    listener.join()


def _handle(sock: socket.socket, is_warm: bool) -> None:
    """Serves one connection."""
    while (frame := receive_frame(sock)) is not None:
        kind, data = frame
        task = json.loads(data)
        if kind == b"r":
            _run_command(sock, task, is_warm)
            return
        try:
            if kind == b"n":
                _switch(task["device"], task["up"])
            else:
                _write(task["path"], task["text"])
        except OSError as error:
            send_frame(sock, b"f", str(error).encode())
        else:
            send_frame(sock, b"x", b"{}")


def _serve(port: int, modules: list[str]) -> None:
    """Accepts connections for ever. Raises _Python in a fork that becomes a program."""
    with socket.create_server(("", port), backlog=64) as server:
        print(READY, flush=True)
        for name in modules:
            importlib.import_module(name)
        if modules:
            gc.collect()
            gc.freeze()  # a collection in a fork would copy all pages
            print(f"{PRELOADED} {' '.join(modules)}", flush=True)
        # The kernel removes ended handlers.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            sock, _ = server.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if os.fork() != 0:
                sock.close()
                continue
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            with contextlib.suppress(OSError):  # the owner has gone
                _handle(sock, bool(modules))
            os._exit(0)


def _run_python(arguments: list[str]) -> None:
    """Runs `python ARGUMENTS`, which begin with -c, -m or a file, as `__main__`."""
    what, *rest = arguments
    if what == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if what == "-c":
        text, name = rest[0], "<string>"
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
    else:
        name = what
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(what)))
        module.__file__ = what
        with open(what, encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, name, "exec"), module.__dict__)


def _exit_status(program: list[str]) -> int:
    """Runs a Python program as the interpreter would; returns its exit status."""
    try:
        _run_python(program)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        for _ in range(2):  # the frames of this file
            trace = trace.tb_next if trace is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def serve(port: int, modules: list[str]) -> None:
    """The server, or in a fork of it the program that it was asked to run."""
    if sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        del sys.path[0]
    program: list[str] | None = None
    try:
        _serve(port, modules)
    except _Python as become:
        program = become.arguments
    # Outside of the handler: tracebacks of the program do not show it.
    if program is not None:
        status = _exit_status(program[1:])
        interpreter: Any = threading
        interpreter._shutdown()  # waits for the program's threads
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        # Without the end of the interpreter: to free the modules of the server would first copy
        # their pages, which takes seconds.
        os._exit(status)


# ---- on the host ----


def _stdin_to(send: Callable[[bytes, bytes], None]) -> None:
    """A thread: input for the command."""
    with contextlib.suppress(OSError):
        while data := os.read(0, _PART_BYTES):
            send(b"i", data)
        send(b"i", b"")


def _end_like(status: int) -> NoReturn:
    """Ends this process as the command has ended."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def run(environment_fd: int, address: str, port: int, arguments: list[str]) -> NoReturn:
    """Stands for a command in the guest."""
    with open(environment_fd, encoding="utf-8") as file:
        environment = json.load(file)
    first, second = os.fstat(1), os.fstat(2)
    task = {
        "arguments": arguments,
        "environment": environment,
        "directory": os.getcwd(),
        # One pipe keeps the order of what goes to the same place.
        "merged": (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino),
    }
    try:
        sock = socket.create_connection((address, port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lock = threading.Lock()

        def send(kind: bytes, data: bytes) -> None:
            with lock:
                send_frame(sock, kind, data)

        send(b"r", json.dumps(task).encode())
        for name in _PASSED_SIGNALS:
            number = getattr(signal, name)
            signal.signal(number, lambda number, _: send(b"s", str(number).encode()))
        threading.Thread(target=_stdin_to, args=(send,), daemon=True).start()
        while (frame := receive_frame(sock)) is not None:
            kind, data = frame
            if kind == b"x":
                _end_like(json.loads(data)["status"])
            elif kind == b"f":
                sys.stderr.write(f"{arguments[0]}: {data.decode()}\n")
                sys.stderr.flush()
                os._exit(NOT_STARTED)
            else:
                _write_all(1 if kind == b"o" else 2, data)
        problem = "the guest's agent has ended"
    except BrokenPipeError:  # the reader of the output has gone
        _end_like(-signal.SIGPIPE)
    except OSError as error:
        problem = f"the guest's agent cannot be reached: {error}"
    sys.stderr.write(f"{arguments[0]}: {problem}\n")
    sys.stderr.flush()
    os._exit(NOT_STARTED)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]), sys.argv[3:])
    else:
        run(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
