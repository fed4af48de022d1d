"""Linux namespaces for single threads: the kernel interfaces that a lab needs, in Python.

A namespace belongs to a thread until it starts a process, which inherits it. Every function here
that changes namespaces therefore runs in its own thread, and the program keeps its namespaces.
Nothing has a name in the file system: a namespace disappears with its last process and descriptor.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")

_CLONE_FS = 0x200
_CLONE_NEWNS = 0x20000
_CLONE_NEWUTS = 0x4000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000
_MS_REC = 0x4000
_MS_BIND = 0x1000
_MS_SLAVE = 1 << 19
_MNT_DETACH = 2

_IFF_TUN, _IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x0002, 0x1000, 0x4000
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOFFLOAD = 0x400454CA, 0x400454CB, 0x400454D0
_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
# A guest's window of packets, many times over; more would be dropped.
_PACKET_BUFFER_BYTES = 16 << 20
_OFFLOAD_TCP = 0x01 | 0x02 | 0x04 | 0x08  # checksums, TSO for IPv4, IPv6, with ECN
_OFFLOAD_UDP = 0x20 | 0x40  # since Linux 6.2
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    """Calls a function of libc that returns 0 on success. Raises OSError with its name."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = kind.encode() if kind else None
    _call("mount", source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None)


def in_thread(function: Callable[[], _T]) -> _T:
    """Calls `function` in a new thread; returns its result or raises its exception."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="torch_resilient-lab")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def first_of_new_pid_namespace(start: Callable[[], subprocess.Popen[bytes]]) -> tuple[Any, int]:
    """(the process that `start` starts, its PID namespace as a descriptor).

    When that process ends, for any reason, the kernel kills all others of the namespace.
    """

    def body() -> tuple[subprocess.Popen[bytes], int]:
        _call("unshare", _CLONE_NEWPID)
        process = start()
        try:
            return process, os.open(f"/proc/{process.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            process.kill()
            process.wait()
            raise

    return in_thread(body)


@dataclass(frozen=True)
class Namespaces:
    """A host: network, host name and mounts of its own, as descriptors."""

    net: int
    mounts: int
    host_name: int
    hosts_file: int  # what this host sees as /etc/hosts
    processes: int  # the lab's, shared by all hosts

    @staticmethod
    def create(name: str, processes: int) -> Namespaces:
        """Makes a host that is called `name`. Raises OSError."""

        def body() -> Namespaces:
            _call("unshare", _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWUTS)
            encoded = name.encode()
            _call("sethostname", encoded, ctypes.c_size_t(len(encoded)))
            # Later mounts outside still appear inside; mounts inside never appear outside.
            _mount("none", "/", None, _MS_REC | _MS_SLAVE)
            # This file needs no cleanup: its private file system is unmounted at once and
            # disappears when the file is no longer used.
            _mount("tmpfs", "/sys", "tmpfs", 0)
            hosts_file = os.open("/sys/hosts", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.path.exists("/etc/hosts"):
                _mount("/sys/hosts", "/etc/hosts", None, _MS_BIND)
            _call("umount2", b"/sys", _MNT_DETACH)
            # /sys/class/net lists the devices of the network namespace that mounted it.
            _mount("sysfs", "/sys", "sysfs", 0)
            net, mounts, host_name = (
                os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
                for kind in ("net", "mnt", "uts")
            )
            return Namespaces(net, mounts, host_name, hosts_file, processes)

        made = in_thread(body)
        # Only a process within the PID namespace can mount its /proc.
        mount = made.popen(
            ["mount", "-t", "proc", "proc", "/proc"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, said = mount.communicate()
        if mount.returncode != 0:
            made.close()
            raise OSError(f"mount /proc: {said.decode(errors='replace').strip()}")
        return made

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls `function` in a thread within the network namespace; returns its result or raises.

        Sockets, devices and threads that it makes stay in that namespace.
        """

        def body() -> _T:
            _call("setns", self.net, _CLONE_NEWNET)
            return function()

        return in_thread(body)

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Like subprocess.Popen, within all namespaces."""
        options["cwd"] = options.get("cwd") or os.getcwd()  # entering mounts changes it

        def body() -> subprocess.Popen[Any]:
            _call("unshare", _CLONE_FS)
            _call("setns", self.mounts, _CLONE_NEWNS)
            _call("setns", self.host_name, _CLONE_NEWUTS)
            _call("setns", self.processes, _CLONE_NEWPID)
            _call("setns", self.net, _CLONE_NEWNET)
            return subprocess.Popen(arguments, **options)

        return in_thread(body)

    def write_hosts_file(self, text: str) -> None:
        """Replaces the contents of /etc/hosts for this host's processes."""
        os.ftruncate(self.hosts_file, 0)
        os.pwrite(self.hosts_file, text.encode(), 0)

    def close(self) -> None:
        """Closes the descriptors, but not that of the shared PID namespace."""
        for fd in (self.net, self.mounts, self.host_name, self.hosts_file):
            os.close(fd)


def open_tun(device: str) -> int:
    """Makes a TUN device in this thread's network namespace; closing the descriptor removes it.

    It hands over super-packets. Raises OSError.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        try:
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_TCP | _OFFLOAD_UDP)
        except OSError:
            fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_TCP)
    except OSError:
        os.close(fd)
        raise
    return fd


def make_tap(device: str) -> None:
    """Makes a TAP device for a guest in this thread's network namespace. Raises OSError.

    It disappears with the namespace.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def open_packet_socket(device: str) -> socket.socket:
    """Reads what a guest sends through a TAP device that is up, writes what it receives.

    Frames have the header of TUN devices, as open_tun() sets it up, and may be super-packets.
    Raises OSError.
    """
    kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    sock = socket.socket(socket.AF_PACKET, kind, 0)
    try:
        sock.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        sock.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
        for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
            sock.setsockopt(socket.SOL_SOCKET, option, _PACKET_BUFFER_BYTES)
        sock.bind((device, _ETH_P_ALL))
    except OSError:
        sock.close()
        raise
    return sock


def set_device_up(device: str, up: bool) -> None:
    """Like `ip link set DEVICE up` or `down`, in this thread's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", device.encode(), 0)
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", device.encode(), flags))


def probe() -> None:
    """Tries the kernel features that a lab needs; no change outlives the call. Raises OSError."""

    def body() -> None:
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWNS | _CLONE_NEWUTS)
        _mount("none", "/", None, _MS_REC | _MS_SLAVE)
        _mount("sysfs", "/sys", "sysfs", 0)
        os.close(open_tun("probe"))
        _call("unshare", _CLONE_NEWPID)

    in_thread(body)
