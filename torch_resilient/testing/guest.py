"""A host of a verbs lab: a guest with a Linux kernel of its own, which has RDMA devices.

A guest is a User Mode Linux, one process of the host (and one for each address space inside). It
sees the file system of the host, below an overlay: this Python, torch and build are there, and what
it writes is lost at its end. Its NICs are TAP devices in a network namespace of the host, where the
lab's carrier reads and writes their packets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch_resilient.testing import guest_agent, namespaces
from torch_resilient.testing.lab import Host, LabUnavailable, Network, NetworkLab, Nic

_T = TypeVar("_T")

# The agent's NIC is on no network of the lab, so no fault concerns it. Addresses of this range are
# not used by the backend.
_HOST_ADDRESS, _GUEST_ADDRESS = "169.254.77.1", "169.254.77.2"
_AGENT_INDEX = 0xFFFF
_PORT, _WARM_PORT = 700, 701
# A guest boots in a second; a busy machine may take many times as long.
_BOOT_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 30.0
_CONSOLE_CHARACTERS = 8000
# In the host's memory file system, besides the guest's memory.
_FILES_BYTES = 64 << 20
_CLIENT = (sys.executable, "-I", "-S", guest_agent.__file__, "run")
# Soft-RoCE takes the largest power of two that fits: 4096 bytes.
DATA_MTU = 4200
# Without it a guest whose first ARP request is lost waits for a second.
_NEIGHBOUR_RETRANSMIT_MS = 50
# A second in all, as by default; on a busy machine an answer may take as long.
_NEIGHBOUR_REQUESTS = 20


def mac_address(index: int) -> str:
    """The MAC address of a guest's NIC from the number of the NIC in the lab."""
    return f"02:00:0a:4d:{index >> 8:02x}:{index & 0xFF:02x}"


@dataclass(frozen=True)
class GuestSettings:
    """The settings that the guests of a lab have in common."""

    kernel: Path
    preload: tuple[str, ...]
    memory_bytes: int


class Guest(Host):
    """A guest of a verbs lab. Made by VerbsLab."""

    def __init__(
        self,
        lab: NetworkLab,
        name: str,
        spaces: namespaces.Namespaces,
        settings: GuestSettings,
    ) -> None:
        super().__init__(lab, name, spaces)
        self.settings = settings
        self.rdma_devices: dict[str, str] = {}
        """The RDMA device of each data NIC, such as {"eth0": "rxe0"}."""
        # The kernel and the processes of its address spaces never run at the same time. The host
        # would put each on the processor that is idle, and wake that one at each system call: 50 us
        # instead of 12.
        processors = sorted(os.sched_getaffinity(0))
        self._processor = processors[(os.getpid() + len(lab.hosts)) % len(processors)]
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[subprocess.Popen[Any]] = []
        self._boots = 0
        self._console = ""
        self._is_ready = threading.Event()
        self._is_preloaded = threading.Event()
        self._reader: threading.Thread | None = None
        self._agent: socket.socket | None = None
        self._agent_lock = threading.Lock()

    @property
    def pid(self) -> int:
        """The process of its kernel. Raises RuntimeError if it does not run."""
        self._check_running()
        assert self._process is not None
        return self._process.pid

    @property
    def console(self) -> str:
        """The end of what its kernel and its first process have printed."""
        return self._console

    def popen(self, arguments: Sequence[Any] | str, **options: Any) -> subprocess.Popen[Any]:
        """Like subprocess.Popen, in this guest; stdin is empty by default.

        The process object stands for the command: its input and output, signals except SIGSTOP, and
        its exit status, which is 127 if the guest has no such program. After kill() the command and
        all descendants of it are killed. A Python program starts without the modules to import if
        the lab has preloaded them.
        """
        self._lab._check_open()
        self._check_running()
        command = [arguments] if isinstance(arguments, str) else list(map(os.fspath, arguments))
        if options.pop("shell", False):
            command = ["/bin/sh", "-c", *command]
        environment = options.pop("env", None)
        text = json.dumps(dict(os.environ if environment is None else environment))
        port = _WARM_PORT if self.settings.preload and _is_python_program(command) else _PORT
        fd = os.memfd_create("environment")
        try:
            os.write(fd, text.encode())
            os.lseek(fd, 0, os.SEEK_SET)
            process = self._spaces.popen(
                [*_CLIENT, str(fd), _GUEST_ADDRESS, str(port), *command],
                env={"LC_ALL": "C.UTF-8"},
                pass_fds=(*options.pop("pass_fds", ()), fd),
                **{"stdin": subprocess.DEVNULL, **options},
            )
        finally:
            os.close(fd)
        self._clients = [each for each in self._clients if each.returncode is None]
        self._clients.append(process)
        self._lab._processes.append(process)
        return process

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Not possible: raises TypeError."""
        raise TypeError(f"guest {self.name} has a kernel of its own; use run() or popen()")

    def sysctl(self, name: str, value: object = None) -> str:
        """Reads a setting such as "net.ipv4.tcp_wmem", after writing `value` if it is given.

        Raises OSError.
        """
        path = "/proc/sys/" + name.replace(".", "/")
        if value is not None:
            self.write(path, str(value))
        done = self.run(["cat", path], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"guest {self.name}: {done.stderr.strip()}")
        return str(done.stdout).strip()

    def write(self, path: str, text: str) -> None:
        """Writes a file of the guest, such as one of /sys. Raises OSError."""
        self._ask(b"w", {"path": path, "text": text})

    def freeze(self) -> None:
        """Stops the guest's kernel, as if the machine hung: it neither sends nor receives.

        A program that only computes continues until its next system call.
        """
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues a frozen guest."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the guest and all of its processes, as a power failure does; boot() starts it again.

        Does nothing if it does not run.
        """
        process = self._process
        if process is None or process.returncode is not None:
            return
        spaces = list(guest_agent.descendants(process.pid))
        process.kill()
        for pid in spaces:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        self._end()

    def boot(self, *, wait: bool = True) -> None:
        """Starts the guest; waits until it runs commands, or leaves that to wait_for_boot().

        Raises RuntimeError if it runs already, LabUnavailable if it does not start.
        """
        self._lab._check_open()
        if self.is_running:
            raise RuntimeError(f"guest {self.name} runs already")
        self._end()
        self._prepare()
        self._boots += 1
        self._console = ""
        self._is_ready, self._is_preloaded = threading.Event(), threading.Event()
        reading, writing = os.pipe()
        try:
            self._process = self._spaces.popen(
                self._kernel_command(),
                env={"TMPDIR": "/dev/shm", "PATH": os.defpath},
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self._lab._processes.append(self._process)
        with contextlib.suppress(ProcessLookupError):  # it has ended: wait_for_boot() says so
            os.sched_setaffinity(self._process.pid, {self._processor})
        self._reader = threading.Thread(target=self._read_console, args=(reading,), daemon=True)
        self._reader.start()
        if wait:
            self.wait_for_boot()

    def wait_for_boot(self) -> None:
        """Waits until the guest runs commands. Raises LabUnavailable if it does not."""
        self._wait_for(self._is_ready, "boot")
        # Faults outlive a guest, but its devices start without them.
        for nic in self.nics:
            for kind in nic.network._faults.get(nic.index, ()):
                self._switch(nic, kind, False)

    def wait_for_preload(self) -> None:
        """Waits until the guest has imported the modules that the lab preloads.

        popen() waits by itself, if that is needed. Raises LabUnavailable.
        """
        if self.settings.preload:
            self._wait_for(self._is_preloaded, f"import {' '.join(self.settings.preload)}")

    def _wait_for(self, event: threading.Event, what: str) -> None:
        deadline = time.monotonic() + _BOOT_TIMEOUT_S
        while not event.wait(0.05):
            is_over = not self.is_running
            if is_over or time.monotonic() > deadline:
                state = "has ended" if is_over else f"did not {what} in {_BOOT_TIMEOUT_S:g} s"
                raise LabUnavailable(f"guest {self.name} {state}; its console:\n{self._console}")

    @property
    def is_running(self) -> bool:
        """Whether its kernel runs, even if it is frozen."""
        return self._process is not None and self._process.poll() is None

    def _check_running(self) -> None:
        if not self.is_running:
            raise RuntimeError(f"guest {self.name} does not run; its console:\n{self._console}")

    def _read_console(self, fd: int) -> None:
        awaited = 2 if self.settings.preload else 1
        with open(fd, encoding="utf-8", errors="replace") as console:
            for line in console:
                self._console = (self._console + line)[-_CONSOLE_CHARACTERS:]
                awaited -= guest_agent.READY in line
                if awaited == 0:
                    self._is_ready.set()
                if guest_agent.PRELOADED in line:
                    self._is_preloaded.set()
        # The guest is gone, so nothing is going to answer its commands.
        for client in self._clients:
            client.kill()

    def _end(self) -> None:
        """Forgets a guest that has ended."""
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        with self._agent_lock:
            if self._agent is not None:
                self._agent.close()
                self._agent = None

    def _ask(self, kind: bytes, what: dict[str, Any]) -> None:
        """Has the agent do something. Raises OSError."""
        self._check_running()
        with self._agent_lock:
            if self._agent is None:
                address = (_GUEST_ADDRESS, _PORT)
                self._agent = self._spaces.call(
                    lambda: socket.create_connection(address, _ANSWER_TIMEOUT_S)
                )
            try:
                guest_agent.request(self._agent, kind, what)
            except guest_agent.RefusedError:
                raise
            except OSError:  # a late answer must not be taken for the next one's
                self._agent.close()
                self._agent = None
                raise

    def _switch(self, nic: Nic, kind: str, on: bool) -> None:
        """Takes a NIC down or up: its carrier, or the device. Does nothing to a dead guest."""
        if not self.is_running:
            return
        if kind == "carrier":
            self.write(f"/sys/class/net/{nic.device}/proto_down", str(int(not on)))
        else:
            self._ask(b"n", {"device": nic.device, "up": on})

    # ---- what a guest boots from ----

    def _kernel_command(self) -> list[str]:
        devices = [(nic.device, mac_address(nic.index), nic.mtu) for nic in self.nics]
        devices.append(("agent", mac_address(_AGENT_INDEX), 1500))
        return [
            str(self.settings.kernel),
            f"mem={self.settings.memory_bytes >> 20}M",
            *("root=none", "rootfstype=hostfs", "rootflags=/", "ro", "quiet"),
            *("con=null", "con0=null,fd:1"),
            "init=/dev/shm/guest/init",
            "uml_dir=/dev/shm",
            f"umid={self.name}{self._boots}",
            *(
                # gro=1: otherwise the driver drops what the host's kernel has merged.
                f"vec{i}:transport=tap,ifname={name},mac={mac},mtu={mtu},depth=64,gro=1"
                for i, (name, mac, mtu) in enumerate(devices)
            ),
        ]

    def _setup(self) -> str:
        """A part of the first process's script: NICs and RDMA devices."""
        lines = ["link set lo up"]
        settings = [
            "echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down",
            # A new address stays when the old one is removed.
            "echo 1 >/proc/sys/net/ipv4/conf/all/promote_secondaries",
        ]
        for i, nic in enumerate(self.nics):
            lines += [
                # A device of User Mode Linux always has a carrier; a macvlan device may lose it.
                f"link set vec{i} mtu {nic.mtu} addrgenmode none up",
                f"link add link vec{i} name {nic.device} type macvlan mode passthru",
                f"link set {nic.device} mtu {nic.mtu} up",
                f"address add {nic.address}/24 dev {nic.device}",
                f"address add {nic.address_v6}/64 dev {nic.device} nodad",
            ]
            neighbours = f"/proc/sys/net/ipv4/neigh/{nic.device}"
            settings += [
                f"echo {_NEIGHBOUR_RETRANSMIT_MS} >{neighbours}/retrans_time_ms",
                f"echo {_NEIGHBOUR_REQUESTS} >{neighbours}/mcast_solicit",
            ]
            if device := self.rdma_devices.get(nic.device):
                settings.append(f"rdma link add {device} type rxe netdev {nic.device}")
        last = f"vec{len(self.nics)}"
        lines += [
            f"link set {last} name agent",
            "link set agent up",
            f"address add {_GUEST_ADDRESS}/30 dev agent",
        ]
        values = {
            "python": sys.executable,
            "agent": guest_agent.__file__,
            "port": _PORT,
            "warm_port": _WARM_PORT,
            "preload": " ".join(self.settings.preload),
        }
        # The preloaded modules come from where this process finds its own.
        exported = {"OMP_NUM_THREADS": "1"}
        exported |= {
            name: os.environ[name]
            for name in ("PYTHONPATH", "LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
            if name in os.environ
        }
        return "\n".join(
            [
                f"echo {self.name} >/proc/sys/kernel/hostname",
                "ip -batch - <<'END'",
                *lines,
                "END",
                *settings,
                *(f"{name}={shlex.quote(str(value))}" for name, value in values.items()),
                *(f"export {name}={shlex.quote(value)}" for name, value in exported.items()),
                "",
            ]
        )

    def _prepare(self) -> None:
        """A memory file system for the guest's memory and files, which only this host has."""
        size = self.settings.memory_bytes + _FILES_BYTES
        if self._boots == 0:
            mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && mkdir /dev/shm/guest"
            self._in_namespaces(["sh", "-c", mount])
        init = Path(__file__).with_name("guest_init.sh").read_text(encoding="utf-8")
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0] + "\n\n"
        for name, text in (("init", init), ("setup", self._setup()), ("cpuinfo", cpus)):
            path = f"/dev/shm/guest/{name}"
            self._in_namespaces(["sh", "-c", f"cat >{path} && chmod 755 {path}"], text)

    def _in_namespaces(self, command: Sequence[str], text: str = "") -> None:
        """Runs a command on the host, as the guest's kernel sees it. Raises OSError."""
        process = self._spaces.popen(
            command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        _, said = process.communicate(text)
        if process.returncode != 0:
            raise OSError(f"guest {self.name}: {command}: {said.strip()}")


class GuestNetwork(Network):
    """A network of guests. Its "carrier" and "admin" faults are those of the guests' own NICs."""

    def _replace_address(self, nic: Nic, moved: Nic) -> None:
        # Two commands: the RDMA device first gets a GID, then loses one.
        for verb, address in (("add", moved.address), ("delete", nic.address)):
            command = ["ip", "address", verb, f"{address}/24", "dev", nic.device]
            done = nic.host.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise OSError(f"guest {nic.host.name}: {command}: {done.stderr.strip()}")

    def _switch(self, nic: Nic, kind: str, on: bool) -> None:
        assert isinstance(nic.host, Guest)
        nic.host._switch(nic, kind, on)


def _is_python_program(command: Sequence[str]) -> bool:
    """Whether a preloaded agent can run the command: no option changes the interpreter."""
    return (
        len(command) > 1
        and command[0] == sys.executable
        and (command[1] in ("-c", "-m") or not command[1].startswith("-"))
    )


def attach(nic: Nic) -> socket.socket:
    """The host's half of a guest's NIC, for the carrier. Raises OSError."""
    host = nic.host
    host._spaces.call(lambda: namespaces.make_tap(nic.device))
    host._ip([f"link set {nic.device} mtu {nic.mtu} up"])
    return host._spaces.call(lambda: namespaces.open_packet_socket(nic.device))


def attach_agent(guest: Guest) -> None:
    """The host's half of the NIC for the agent. Raises OSError."""
    guest._spaces.call(lambda: namespaces.make_tap("agent"))
    guest._ip(["link set agent up", f"address add {_HOST_ADDRESS}/30 dev agent"])
