"""The lab: what its networks do to real packets of real hosts, and that nothing of it stays."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from torch_resilient import cli
from torch_resilient.testing import (
    Host,
    LabJob,
    LinkSettings,
    Network,
    NetworkLab,
    ScriptError,
    unavailable,
)
from torch_resilient.testing import job as lab_job
from torch_resilient.testing import lab as lab_module
from torch_resilient.testing.script import (
    RATE,
    SIZE,
    TIME,
    parse_quantity,
    parse_script,
    parse_settings,
)

pytestmark = pytest.mark.lab

# Bounds on how long something takes are this much wider than what was asked for.
LOOSE = 5
IP_AND_UDP_BYTES = 28
UDP_SEGMENT = 103
SO_BINDTODEVICE = 25
IFF_UP, IFF_RUNNING = 0x1, 0x40


def udp(host: Host, address: str, device: str | None = None) -> socket.socket:
    """A socket on a host, bound to one of its addresses; reads wait for ten seconds at most."""

    def make() -> socket.socket:
        made = socket.socket(
            socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM
        )
        if device is not None:
            made.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, device.encode())
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        made.bind((address, 0))
        made.settimeout(10)
        return made

    return host.call(make)


def received(sock: socket.socket) -> list[bytes]:
    """Receives messages until none arrives for half a second."""
    messages = []
    sock.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while True:
            messages.append(sock.recv(65536))
    sock.settimeout(10)
    return messages


@contextlib.contextmanager
def echo(host: Host, address: str) -> Iterator[tuple[str, int]]:
    """Sends every UDP message back; gives where."""
    sock = udp(host, address)

    def serve() -> None:
        while True:
            message, sender = sock.recvfrom(65536)
            if message == b"end":
                return
            sock.sendto(message, sender)

    thread = threading.Thread(target=serve)
    thread.start()
    target = sock.getsockname()[:2]
    try:
        yield target
    finally:
        with udp(host, address) as other:
            other.sendto(b"end", target)
        thread.join()
        sock.close()


def round_trip_s(sock: socket.socket, target: tuple[str, int], count: int = 10) -> float:
    """The shortest of `count`."""
    times = []
    for number in range(count):
        start = time.monotonic()
        sock.sendto(bytes([number]), target)
        assert sock.recv(100) == bytes([number])
        times.append(time.monotonic() - start)
    return min(times)


def transfer(source: Host, target: Host, address: str, data: bytes) -> tuple[float, bytes]:
    """Sends `data` over TCP; (seconds until its end has come, what has come)."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = target.call(lambda: socket.create_server((address, 0), family=family, backlog=1))
    parts = []

    def read() -> None:
        connection, _ = server.accept()
        connection.settimeout(60)
        with connection:
            while part := connection.recv(1 << 20):
                parts.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    sock = source.call(socket.create_connection, server.getsockname()[:2], 10)
    start = time.monotonic()
    sock.settimeout(60)
    with sock, server:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        thread.join()
    return time.monotonic() - start, b"".join(parts)


def flags(host: Host, device: str) -> int:
    """The flags of a network device, as the kernel of the host shows them."""

    def ask() -> int:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            answer = fcntl.ioctl(sock, 0x8913, struct.pack("16s24x", device.encode()))
        (found,) = struct.unpack_from("H", answer, 16)
        return int(found)

    return host.call(ask)


def routing(host: Host) -> str:
    """All rules, routes and addresses of a host."""
    commands = "ip rule; ip route show table all; ip -6 rule; ip -6 route show table all; ip -br a"
    done = host.run(["sh", "-c", commands], capture_output=True, text=True, check=True, timeout=30)
    # After a change of carrier the kernel shows UP instead of UNKNOWN.
    return str(done.stdout).replace("UNKNOWN", "UP     ")


def eventually(condition: Callable[[], bool], within_s: float = 10) -> None:
    """Waits until `condition()`; fails if it takes too long."""
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit, f"not so after {within_s} s"
        time.sleep(0.01)


@pytest.fixture
def pair(lab: NetworkLab) -> tuple[Host, Host, Network]:
    """Two hosts and a link without settings."""
    a, b = lab.host("a"), lab.host("b")
    return a, b, lab.link(a, b)


# ---- what links do ----


def test_delays_are_right_and_change_while_packets_flow(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    with echo(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        assert round_trip_s(sock, target) < 0.05
        link.set(delay_s=0.01)
        assert 0.02 <= round_trip_s(sock, target) < 0.02 * LOOSE
        link.set(direction="a->b", delay_s=0.05)
        assert 0.06 <= round_trip_s(sock, target) < 0.06 * LOOSE
    with echo(b, link.nics[1].address_v6) as target, udp(a, link.nics[0].address_v6) as sock:
        assert 0.06 <= round_trip_s(sock, target) < 0.06 * LOOSE


def test_a_rate_is_right_and_changes_while_packets_flow(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    data = os.urandom(1_000_000)
    link.set(rate_bytes_per_s=2e6)
    elapsed_s, got = transfer(a, b, link.address(b), data)
    assert got == data
    assert 0.5 <= elapsed_s < 0.5 * LOOSE
    # The other direction is on its own.
    link.set(direction="b->a", rate_bytes_per_s=None)
    elapsed_s, got = transfer(b, a, link.address(a), data)
    assert got == data
    assert elapsed_s < 0.45
    timer = threading.Timer(0.2, lambda: link.set(rate_bytes_per_s=None))
    timer.start()
    elapsed_s, got = transfer(a, b, link.address(b), 5 * data)
    timer.join()
    assert got == 5 * data
    assert elapsed_s < 2


def test_settings_may_be_numbers_of_numpy(pair: tuple[Host, Host, Network]) -> None:
    class Number(float):  # as numpy.float64
        def __repr__(self) -> str:
            return f"np.float64({float(self)!r})"

    a, b, link = pair
    link.set(delay_s=Number(0.01), rate_bytes_per_s=Number(1e7), burst_packets=Number(2))
    link.share_rate("a->b", Number(1e7), queue_bytes=Number(1e6))
    with echo(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        assert 0.02 <= round_trip_s(sock, target) < 0.02 * LOOSE


def test_a_full_queue_drops(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    link.set(rate_bytes_per_s=1e5, queue_bytes=10 * 1028)
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        start = time.monotonic()
        for number in range(100):
            sock.sendto(number.to_bytes(2, "big") + bytes(998), target.getsockname())
        sending_s = time.monotonic() - start
        got = [int.from_bytes(message[:2], "big") for message in received(target)]
    counters = link.counters("a->b")
    # While they were sent, some left the queue.
    assert 10 <= len(got) <= 12 + sending_s * 1e5 / 1028
    assert got[:10] == list(range(10))
    assert counters.queue_full.packets == 100 - len(got)


@pytest.mark.parametrize("burst", [None, 8])
def test_the_seed_decides_what_is_lost(burst: float | None) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)

    def arrived(seed: int) -> list[int]:
        with NetworkLab(seed=seed) as lab:
            a, b = lab.host("a"), lab.host("b")
            link = lab.link(a, b, drop=0.1, burst_packets=burst)
            with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
                for number in range(1000):
                    sock.sendto(number.to_bytes(2, "big"), target.getsockname())
                numbers = [int.from_bytes(message, "big") for message in received(target)]
            assert link.counters("a->b").dropped.packets == 1000 - len(numbers)
            return numbers

    first = arrived(5)
    assert numbers_lost(first) != 0
    assert arrived(5) == first
    assert arrived(6) != first
    assert arrived(2**60 + 6) != arrived(2**60 + 5)


def numbers_lost(arrived: list[int]) -> int:
    return 1000 - len(set(arrived))


def test_super_packets_are_lost_by_wire_packet(pair: tuple[Host, Host, Network]) -> None:
    """UDP segmentation: one call sends 40 packets, which cross the lab in one piece or in parts."""
    a, b, link = pair
    link.set(drop=0.2)
    for address in (link.address(b), link.nics[1].address_v6):
        mine = link.address(a) if "." in address else link.nics[0].address_v6
        before = link.counters("a->b")
        with udp(b, address) as target, udp(a, mine) as sock:
            sock.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 1000)
            for block in range(10):
                segments = [(block * 40 + i).to_bytes(2, "big") * 500 for i in range(40)]
                sock.sendto(b"".join(segments), target.getsockname()[:2])
            messages = received(target)
        numbers = [int.from_bytes(message[:2], "big") for message in messages]
        assert all(message == message[:2] * 500 for message in messages)
        assert numbers == sorted(set(numbers))
        lost = link.counters("a->b").dropped.packets - before.dropped.packets
        assert len(numbers) == 400 - lost
        assert 30 < lost < 150


def test_corruption_is_found_by_the_receivers_kernel(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    link.set(corrupt=0.3)

    def bad_checksums() -> int:
        lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Udp:"))
        return int(values[names.index("InCsumErrors")])

    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        sock.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 500)
        for _ in range(10):
            sock.sendto(bytes(20 * 500), target.getsockname())
        messages = received(target)
    corrupted = link.counters("a->b").corrupted.packets
    assert 20 < corrupted < 120
    assert len(messages) == 200 - corrupted
    assert not any(any(message) for message in messages)
    # A damaged length or port is another error than a wrong checksum.
    assert corrupted * 0.8 < b.call(bad_checksums) <= corrupted


def test_tcp_gets_through_everything_at_once(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    link.set(delay_s=0.001, drop=0.01, burst_packets=3, duplicate=0.01, corrupt=0.005, reorder=0.02)
    data = os.urandom(3_000_000)
    for address in (link.address(b), link.nics[1].address_v6):
        _, got = transfer(a, b, address, data)
        assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()
    counters = link.counters()
    for happened in ("dropped", "duplicated", "corrupted", "reordered"):
        assert getattr(counters, happened).packets > 0, happened


def test_counters_are_exact_for_each_direction(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        for _ in range(100):
            sock.sendto(bytes(1000), target.getsockname())
        assert len(received(target)) == 100
    there = link.counters("a->b")
    assert (there.entered.packets, there.delivered.packets) == (100, 100)
    assert there.delivered.bytes == 100 * (1000 + IP_AND_UDP_BYTES)
    assert link.counters("b->a").entered.packets == 0
    assert link.counters() == there


def test_counters_of_thousands_of_directions(pair: tuple[Host, Host, Network]) -> None:
    """As many as 80 hosts on one network have: more than the carrier can send in one message."""
    a, b, link = pair
    more = range(2, 80 * 79)
    link._lab._carrier.ask([f"pipe {pipe} 0 1 {pipe}" for pipe in more])
    link._pipes.update({(0, -pipe): pipe for pipe in more})
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        sock.sendto(b"by the last one", target.getsockname())
        assert target.recv(100) == b"by the last one"
    assert link.counters().delivered.packets == 1
    assert link.counters("a->b").delivered.packets == 0  # the first


# ---- outages ----


def test_a_black_hole_tells_nobody(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    link.set(delay_s=0.5)
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        sock.sendto(b"on its way", target.getsockname())
        link.down("blackhole")
        sock.sendto(b"sent into it", target.getsockname())
        assert flags(a, "eth0") & IFF_RUNNING
        assert flags(b, "eth0") & IFF_RUNNING
        assert received(target) == received(target) == []  # for longer than the delay
        link.up()
        sock.sendto(b"afterwards", target.getsockname())
        assert target.recv(100) == b"afterwards"
    assert link.counters("a->b").outage.packets == 2


def test_a_black_hole_in_one_direction(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    with udp(b, link.address(b)) as there, udp(a, link.address(a)) as here:
        link.down(direction="a->b")
        here.sendto(b"lost", there.getsockname())
        there.sendto(b"arrives", here.getsockname())
        assert here.recv(100) == b"arrives"
        assert received(there) == []
        link.up(direction="a->b")
        here.sendto(b"arrives", there.getsockname())
        assert there.recv(100) == b"arrives"


def test_a_lost_carrier_shows_at_the_end_that_lost_it(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    before = routing(a), routing(b)
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        link.down("carrier", end=a)
        # The kernel reports such changes once a second at most.
        eventually(lambda: flags(a, "eth0") & (IFF_UP | IFF_RUNNING) == IFF_UP)
        assert flags(b, "eth0") & IFF_RUNNING
        sock.sendto(b"lost", target.getsockname())
        target.sendto(b"lost, too", sock.getsockname())
        assert received(target) == received(sock) == []
        link.down("carrier")
        eventually(lambda: not flags(b, "eth0") & IFF_RUNNING)
        link.up(end=b)
        eventually(lambda: bool(flags(b, "eth0") & IFF_RUNNING))
        assert not flags(a, "eth0") & IFF_RUNNING
        link.up()
        eventually(lambda: bool(flags(a, "eth0") & IFF_RUNNING))

        def arrives() -> bool:  # the kernel takes up to a second to use the device again
            sock.sendto(b"back", target.getsockname())
            target.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                return target.recv(100) == b"back"
            return False

        eventually(arrives)
    eventually(lambda: (routing(a), routing(b)) == before)


def test_a_nic_that_is_switched_off_loses_its_routes(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    before = routing(a), routing(b)
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        link.down("admin", end="a")
        assert not flags(a, "eth0") & IFF_UP
        assert flags(b, "eth0") & IFF_UP
        with pytest.raises(OSError, match="unreachable") as caught:
            sock.sendto(b"refused", target.getsockname())
        assert caught.value.errno == errno.ENETUNREACH
        # Messages from the other end are dropped, not queued.
        target.sendto(b"lost", sock.getsockname())
        link.up()
        target.sendto(b"arrives", sock.getsockname())
        assert sock.recv(100) == b"arrives"
        sock.sendto(b"arrives", target.getsockname())
        assert target.recv(100) == b"arrives"
    assert (routing(a), routing(b)) == before


def test_a_nic_is_ready_when_the_kernel_has_its_own_route(
    pair: tuple[Host, Host, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the route follows the address late, and packets were lost."""
    (nic,) = pair[0].nics
    route = f"local {nic.address_v6} dev {nic.device} table local"
    looks = []

    def sleep(_: float) -> None:
        looks.append("in vain")
        nic.host._ip([f"route add {route}"], "-6")

    monkeypatch.setattr(lab_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    nic.configure_routes()
    assert not looks
    nic.host._ip([f"route delete {route}"], "-6")
    nic.configure_routes()
    assert looks == ["in vain"]


def test_a_nic_that_its_host_removes(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    lab.link(a, b)
    other = lab.link(a, b)

    def devices() -> int:
        fds = Path(f"/proc/{lab._carrier.process.pid}/fd")
        return sum(os.readlink(fd) == "/dev/net/tun" for fd in fds.iterdir())

    assert devices() == 4
    a._ip(["link delete eth0"])
    # Otherwise the kernel would wake the carrier repeatedly, at real-time priority.
    eventually(lambda: devices() == 3)
    with echo(b, other.address(b)) as target, udp(a, other.address(a)) as sock:
        round_trip_s(sock, target)


def test_outages_of_several_kinds_end_together(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    before = routing(a), routing(b)
    link.down("blackhole")
    link.down("admin", end=a)
    link.down("admin", end=a)
    link.down("carrier", end=b)
    link.up()
    with echo(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        sock.settimeout(0.1)

        def answers() -> bool:
            with contextlib.suppress(TimeoutError):
                sock.sendto(b"?", target)
                return sock.recv(1) == b"?"
            return False

        eventually(answers)
    eventually(lambda: (routing(a), routing(b)) == before)


def test_a_nic_that_is_off_gets_another_address(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    link.down("admin", end=a)
    address = link.readdress(a)
    link.up()
    assert link.address(a) == address
    with echo(b, link.address(b)) as target, udp(a, address) as sock:
        round_trip_s(sock, target)


def test_no_new_address_is_another_hosts(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    for _ in range(253):
        assert link.readdress(a) != link.address(b)
    with echo(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        round_trip_s(sock, target)


# ---- several networks ----


def test_a_source_address_chooses_the_nic(lab: NetworkLab) -> None:
    """Two NICs on one subnet: the kernel alone would send everything through the first."""
    a, b = lab.host("a"), lab.host("b")
    lan = lab.network([a, a, b, b], name="lan")
    assert [nic.device for nic in a.nics] == ["lan", "lanb"]
    for nic in a.nics:
        for other in b.nics:
            for family in ("address", "address_v6"):
                direction = f"a/{nic.device}->b/{other.device}"
                before = lan.counters(direction).delivered.packets
                whole = lan.counters().delivered.packets
                source, target = getattr(nic, family), getattr(other, family)
                with udp(b, target) as there, udp(a, source) as here:
                    here.sendto(b"?", there.getsockname()[:2])
                    assert there.recv(1) == b"?"
                    there.sendto(b"!", here.getsockname()[:2])
                    assert here.recv(1) == b"!"
                assert lan.counters(direction).delivered.packets == before + 1
                assert lan.counters().delivered.packets == whole + 2
    # One of the two is switched off; the other continues.
    lan.down("admin", end="a/lan")
    with udp(b, b.nics[0].address) as there, udp(a, a.nics[1].address) as here:
        here.sendto(b"?", there.getsockname())
        assert there.recv(1) == b"?"


def test_a_socket_bound_to_a_device_uses_no_other(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    first, second = lab.link(a, b), lab.link(a, b)
    assert a.addresses == {"eth0": "10.77.0.1", "eth1": "10.77.1.1"}
    with udp(b, second.address(b)) as there:
        with udp(a, second.address(a), device="eth1") as here:
            here.sendto(b"?", there.getsockname())
            assert there.recv(1) == b"?"
        with udp(a, "0.0.0.0", device="eth0") as here:
            with contextlib.suppress(OSError):
                here.sendto(b"?", there.getsockname())
            assert received(there) == []
    assert second.counters("a->b").entered.packets == 1
    assert first.counters("b->a").entered.packets == 0


def test_a_fault_concerns_its_network_only(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    link, control = lab.link(a, b), lab.link(a, b, name="control")
    assert lab.link(a, b).name == "eth1"
    for kind in ("blackhole", "carrier", "admin"):
        link.down(kind)
        with echo(b, control.address(b)) as target, udp(a, control.address(a)) as sock:
            assert round_trip_s(sock, target) < 0.1
        link.up()


def test_two_sites_share_their_uplinks(lab: NetworkLab) -> None:
    """Four hosts on one network: a, b at one site, c, d at the other."""
    a, b, c, d = (lab.host(name) for name in "abcd")
    lan = lab.network([a, b, c, d])
    lan.set(direction="a,b<->c,d", delay_s=0.01)
    uplink = lan.share_rate("a,b->c,d", 2e6)
    with echo(b, lan.address(b)) as near, udp(a, lan.address(a)) as sock:
        assert round_trip_s(sock, near) < 0.02
    with echo(d, lan.address(d)) as far, udp(a, lan.address(a)) as sock:
        assert 0.02 <= round_trip_s(sock, far) < 0.02 * LOOSE
    data = os.urandom(800_000)
    results: dict[str, float] = {}

    def send(name: str, source: Host, target: Host) -> None:
        elapsed_s, got = transfer(source, target, lan.address(target), data)
        assert got == data
        results[name] = elapsed_s

    def together(*pairs: tuple[str, Host, Host]) -> float:
        threads = [threading.Thread(target=send, args=each) for each in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(results.pop(name) for name, _, _ in pairs)

    both_s = together(("ac", a, c), ("bd", b, d))
    assert 0.8 <= both_s < 0.8 * LOOSE
    # Neither the way back nor the inside of the site has this limit.
    assert together(("ca", c, a), ("ab", a, b)) < 0.7
    uplink.set(None)
    assert together(("ac", a, c), ("bd", b, d)) < 0.7


# ---- hosts ----


def test_processes_run_on_their_host(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    link = lab.link(a, b)
    program = (
        "import os, socket; print(socket.gethostname(), socket.gethostbyname('b'), os.getpid(), "
        "os.readlink('/proc/self'), sorted(os.listdir('/sys/class/net')), os.getcwd())"
    )
    done = a.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    name, address, pid, own, rest = done.stdout.split(maxsplit=4)
    assert (name, address) == ("a", link.address(b))
    assert pid == own
    assert rest.strip() == f"['eth0', 'lo'] {os.getcwd()}"
    assert a.run(["cat"], input=b"text", capture_output=True).stdout == b"text"
    with pytest.raises(subprocess.CalledProcessError):
        a.run(["false"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        a.run(["sleep", "100"], timeout=0.1)
    with pytest.raises(FileNotFoundError):
        a.popen(["no-such-program"])


def test_addresses_have_names(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    networks = [lab.link(a, b), lab.link(a, b, name="control")]
    program = (
        "import socket, sys; "
        "print(*[socket.gethostbyaddr(address)[0] for address in sys.argv[1:]], "
        "socket.gethostbyname('a'), socket.gethostbyname('a-control'))"
    )
    addresses = [network.address(a) for network in networks]
    command = [sys.executable, "-c", program, *addresses]
    done = b.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["a", "a-control", *addresses]


def test_sysctls_are_the_hosts_own(lab: NetworkLab) -> None:
    path = Path("/proc/sys/net/ipv4/tcp_retries2")
    outside = path.read_text()
    a = lab.host("a", sysctl={"net.ipv4.tcp_retries2": 3})
    b = lab.host("b")
    assert a.sysctl("net.ipv4.tcp_retries2") == "3"
    assert b.sysctl("net.ipv4.tcp_retries2") != "3"
    assert a.sysctl("net.ipv4.tcp_retries2", 4) == "4"
    assert path.read_text() == outside
    with pytest.raises(OSError, match=r"host c: sysctl net\.no=1"):
        lab.host("c", sysctl={"net.no": 1})


def test_what_call_raises_is_raised_here(lab: NetworkLab) -> None:
    a = lab.host("a")
    with pytest.raises(ZeroDivisionError):
        a.call(lambda: 1 // 0)
    assert a.call(lambda x, y: x + y, 1, 2) == 3
    # This thread has stayed where it was.
    assert os.stat("/proc/thread-self/ns/net").st_ino != os.fstat(a._spaces.net).st_ino


# ---- nothing stays ----

OWNER = """
import os, subprocess, sys
from torch_resilient.testing import NetworkLab
lab = NetworkLab()
a, b = lab.host("a"), lab.host("b")
link = lab.link(a, b)
# One ignores signals; the other has its own session, and its parent has ended.
first = a.popen(["sh", "-c", "trap '' TERM INT HUP; setsid sleep 1000 & sleep 1000"])
b.run(["sh", "-c", "setsid sleep 1000 >/dev/null 2>&1 &"], check=True)
inodes = [os.fstat(fd).st_ino for h in (a, b) for fd in (h._spaces.net, h._spaces.mounts)]
print(*inodes, os.fstat(lab._carrier.pid_namespace).st_ino, flush=True)
"""


def processes_in(inodes: set[int]) -> dict[int, str]:
    """Processes in one of these namespaces, with their command lines."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            spaces = {os.stat(process / "ns" / kind).st_ino for kind in ("net", "mnt", "pid")}
            if spaces & inodes:
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(process.name)] = command
    return found


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), 9)", "sys.exit()", "os._exit(1)", "os.abort()"]
)
def test_nothing_stays_however_the_owner_ends(lab: NetworkLab, tmp_path: Path, end: str) -> None:
    program = OWNER + "sys.stdin.readline()\n" + end
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        inodes = {int(word) for word in owner.stdout.readline().split()}
        assert len(inodes) == 5
        # The carrier, sh and its two sleeps, the orphan's sleep.
        eventually(lambda: len(processes_in(inodes)) == 5)
        owner.stdin.write("\n")
        owner.stdin.close()
        owner.wait(30)
        eventually(lambda: not processes_in(inodes))
    assert list(tmp_path.iterdir()) == []


def test_close_leaves_nothing_in_this_process() -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)

    def state() -> tuple[int, int, str]:
        mounts = Path("/proc/self/mounts").read_text()
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mounts

    before = state()
    for _ in range(2):
        lab = NetworkLab()
        a, b = lab.host("a"), lab.host("b")
        link = lab.link(a, b)
        process = a.popen(["sleep", "1000"], stdout=subprocess.PIPE)
        lab.play("100s eth0 down")
        lab.close()
        lab.close()
        assert process.returncode == -signal.SIGKILL
        assert state() == before
    for call in (lambda: lab.host("c"), lambda: a.popen(["true"]), lambda: a.call(int)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    with pytest.raises(ChildProcessError):
        link.set(delay_s=1)


def test_a_dead_carrier_takes_the_hosts_processes_along(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    link = lab.link(a, b)
    process = a.popen(["sleep", "1000"])
    lab._carrier.process.kill()
    assert process.wait(10) == -signal.SIGKILL
    with pytest.raises(ChildProcessError, match="carrier"):
        link.set(delay_s=1)


def test_without_root_it_says_so() -> None:
    """Runs in a child that has given up root; the modules are already loaded."""
    if os.getuid() != 0:
        assert "needs root" in (unavailable() or "")
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        os.write(writer, (unavailable() or "it is available").encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert "needs root" in text


# ---- jobs ----

RANK = """
import json, os, sys
say = lambda **row: print(json.dumps(row), flush=True)
keys = ("RANK", "WORLD_SIZE", "MASTER_PORT", "COLOUR")
say(kind="hello", keys=[os.environ[key] for key in keys], store=os.environ["MASTER_ADDR"])
print("no row", 7, sep="\\n", flush=True)
for number in range(3):
    say(kind="number", number=number)
if sys.stdin.readline() == "fail\\n":
    sys.exit("it was told to fail")
say(kind="bye")
"""


def test_a_job_runs_a_rank_on_each_host_and_gives_their_rows(
    pair: tuple[Host, Host, Network],
) -> None:
    a, b, link = pair
    environment = {"COLOUR": "blue"}
    with LabJob([sys.executable, "-c", RANK], [a, b, b], link, environment=environment) as job:
        hello = {row["rank"]: row for row in (job.row("hello") for _ in range(3))}
        for rank in range(3):
            assert hello[rank]["keys"] == [str(rank), "3", "29400", "blue"]
            assert hello[rank]["store"] == link.address(a)
    # The processes that waited for input are gone.
    assert [process.returncode for process in job.processes] == [-signal.SIGKILL] * 3
    job.close()


def test_a_job_takes_rows_in_order_and_hears_what_it_is_told(
    pair: tuple[Host, Host, Network],
) -> None:
    a, _, link = pair
    environment = {"COLOUR": "blue"}
    with LabJob([sys.executable, "-c", RANK], [a], link, environment=environment) as job:
        row = job.until(lambda row: row.get("number", -1) >= 1, "number 1")
        assert row == {"kind": "number", "number": 1, "rank": 0}
        with pytest.raises(RuntimeError, match=r"no 'bye' within 0\.2 s; exit statuses \[None\]"):
            job.row("bye", timeout_s=0.2)
        job.tell("go on")
        assert job.row("bye")["rank"] == 0
        assert job.wait(10) == [0]


def test_a_job_that_failed_says_with_which_words(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    environment = {"COLOUR": "blue"}
    with LabJob([sys.executable, "-c", RANK], [a, b], link, environment=environment) as job:
        job.tell("fail")
        with pytest.raises(RuntimeError) as caught:
            job.row("bye")
    text = str(caught.value)
    assert "no 'bye' before all ranks ended; exit statuses [1, 1]" in text
    assert "rank 0: it was told to fail" in text
    assert "rank 1: it was told to fail" in text


WORKER = """
import json, subprocess, sys
worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(json.dumps({"kind": "worker", "pid": worker.pid}), flush=True)
if sys.argv[1] == "waits":
    worker.wait()
"""


@pytest.mark.parametrize("rank", ["waits", "ends"])
def test_what_a_rank_has_started_does_not_hold_up_the_end(
    pair: tuple[Host, Host, Network], monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    """A rank's child keeps the rank's output open, as torchrun's workers do."""
    a, _, link = pair
    if rank == "ends":  # then nothing shows which rank started the process
        monkeypatch.setattr(lab_job, "_DRAIN_S", 0.1)
    job = LabJob([sys.executable, "-c", WORKER, rank], [a], link)
    pid = job.row("worker")["pid"]
    if rank == "ends":
        assert job.wait(10) == [0]
    thread = threading.Thread(target=job.close, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if rank == "waits":
        eventually(lambda: a.run(["sh", "-c", f"kill -0 {pid} 2>&1"]).returncode != 0)


STRANGE = """
import json, sys
for stream in (sys.stdout.buffer, sys.stderr.buffer):
    stream.write(b"\\xff\\n" * 100_000)
print("1" * 5000, "[" * 100_000, json.dumps({"kind": "end"}), sep="\\n")
"""


def test_a_job_may_print_anything(pair: tuple[Host, Host, Network]) -> None:
    a, _, link = pair
    with LabJob([sys.executable, "-c", STRANGE], [a], link) as job:
        assert job.row("end") == {"kind": "end", "rank": 0}
        assert job.wait(10) == [0]


# ---- scripts, settings, command line ----


def test_a_script_is_played_at_its_times(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    lab = link._lab
    called = []
    player = lab.play(
        """
        # comment
        0.3s eth0 up ; 0.1s: eth0 down blackhole
        400ms eth0 a->b set delay=30ms drop=5% rate=80mbit queue=1MiB burst=2
        """
    )
    eventually(lambda: len(player.done) == 1)
    with udp(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        sock.sendto(b"lost", target.getsockname())
        assert received(target) == []
    player.wait(10)
    assert [text for _, text in player.done] == [
        "eth0 down blackhole",
        "eth0 up",
        "eth0 a->b set delay=30ms drop=5% rate=80mbit queue=1MiB burst=2",
    ]
    for at_s, (done_s, _) in zip((0.1, 0.3, 0.4), player.done, strict=True):
        assert at_s <= done_s < at_s + 2
    assert link.settings("a->b") == LinkSettings(
        delay_s=0.03, drop=0.05, rate_bytes_per_s=1e7, queue_bytes=1 << 20, burst_packets=2
    )
    assert link.settings("b->a") == LinkSettings()
    lab.play([(0.0, lambda: called.append(1))], wait=True)
    assert called == [1]
    with pytest.raises(ZeroDivisionError):
        lab.play([(0.0, lambda: 1 // 0)], wait=True)


def test_flapping_ends_up(pair: tuple[Host, Host, Network]) -> None:
    a, b, link = pair
    player = link._lab.play("0s eth0 flap admin 20ms 110ms a")
    player.wait(30)
    assert [text.split()[-1] for _, text in player.done] == [f"#{i}" for i in range(6)] + ["ends"]
    assert flags(a, "eth0") & IFF_UP
    with echo(b, link.address(b)) as target, udp(a, link.address(a)) as sock:
        assert round_trip_s(sock, target) < 0.1


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("1s eth0", r"line 1, '1s eth0': expected TIME NETWORK ACTION"),
        (
            "\n1x eth0 down",
            r"line 2, .*'1x': expected a time with its unit \(s, ms or us\), such as 20ms",
        ),
        ("1s wan down", "no network wan; there are eth0"),
        ("1s eth0 explode", "no action explode; there are set, down, up, flap"),
        ("1s eth0 down a", "'a': expected one of blackhole, carrier, admin"),
        ("1s eth0 down carrier c", "c is not on eth0; there are a/eth0, b/eth0"),
        ("1s eth0 down carrier a b", "'b': expected nothing more"),
        ("1s eth0 a->b down carrier", "only a black hole has a direction"),
        ("1s eth0 a->a down", "holds no two hosts"),
        ("1s eth0 a->c set drop=1%", "c is not on eth0"),
        ("1s eth0 set", "expected settings such as delay=40ms"),
        ("1s eth0 set speed=3", "'speed=3': expected one of delay="),
        ("1s eth0 set delay=none", "delay: 'none': expected a time with its unit"),
        ("1s eth0 set drop=200%", "drop: expected a share of packets, 0 to 1"),
        ("1s eth0 flap carrier 1s", "flap: expected KIND PERIOD END_TIME"),
        ("5s eth0 flap carrier 1s 4s", "an end after its start"),
    ],
)
def test_a_script_with_a_mistake_does_nothing(
    pair: tuple[Host, Host, Network], script: str, text: str
) -> None:
    _, _, link = pair
    with pytest.raises(ScriptError, match=text):
        link._lab.play(f"{script}\n0s eth0 down")
    assert link.counters().outage.packets == 0


def test_quantities() -> None:
    assert parse_settings(["rate=1gbit", "delay=1.5ms", "queue=none", "drop=0.1%"]) == {
        "rate_bytes_per_s": 125e6,
        "delay_s": 0.0015,
        "queue_bytes": None,
        "drop": pytest.approx(0.001),
    }
    assert parse_quantity("3s", TIME) == 3
    for units, example in ((TIME, "20ms"), (RATE, "100mbit"), (SIZE, "512KiB")):
        for number in ("3", "0", "20x", "20 ms", "-1ms", "fast"):
            with pytest.raises(ValueError, match=f"^'{number}': expected a .* such as {example}$"):
                parse_quantity(number, units)
        assert parse_quantity(example, units) > 0
    assert parse_script(" # nothing\n\n", {}) == []


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"delay_s": -1}, "delay_s: expected a finite number >= 0, got -1"),
        ({"delay_s": float("nan")}, "delay_s"),
        ({"delay_s": None}, "delay_s: expected a number, got None"),
        ({"drop": 1.5}, "drop: expected a share of packets, 0 to 1, got 1.5"),
        ({"rate_bytes_per_s": 0}, "rate_bytes_per_s: expected at least 1, got 0; None for no"),
        ({"rate_bytes_per_s": "1gbit"}, "rate_bytes_per_s: expected a number"),
        ({"burst_packets": 0.5}, "burst_packets: expected at least 1"),
        ({"drop": 0.9, "burst_packets": 4}, "drop: 0.9 is too much for bursts of 4 packets"),
        ({"reorder": True}, "reorder: expected a number, got True"),
        ({"speed": 1}, "speed"),
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        LinkSettings(**fields)  # type: ignore[arg-type]


def test_a_queue_holds_a_round_trip_by_default() -> None:
    assert LinkSettings(rate_bytes_per_s=125e6, delay_s=0.02).queue_limit_bytes() == 5_000_000
    assert LinkSettings(rate_bytes_per_s=1e6, delay_s=0.02).queue_limit_bytes() == 512 * 1024
    assert LinkSettings(queue_bytes=1).queue_limit_bytes() == 1


def test_mistakes_with_the_lab_itself(lab: NetworkLab) -> None:
    a, b = lab.host("a"), lab.host("b")
    link = lab.link(a, b)
    for call, text in (
        (lambda: lab.host("a"), "host name: 'a' is taken"),
        (lambda: lab.host("A b"), "host name: expected up to 13 of a-z"),
        (lambda: lab.link(a, b, name="eth0"), "network name: 'eth0' is taken"),
        (lambda: lab.link(a, b, name="lo"), "network name: 'lo' is taken"),
        (lambda: lab.link(a, b, name="all"), "network name: 'all' is taken"),
        (lambda: lab.network([a]), "expected at least two hosts"),
        (lambda: lab.link(a, b, mtu=100), "mtu: expected 1280 to 65535 bytes, got 100"),
        (lambda: lab.link(a, b, drop=2), "drop: expected a share"),
        (lambda: link.down("fire"), "kind: expected one of blackhole, carrier, admin, got 'fire'"),
        (lambda: link.down("carrier", direction="a->b"), "only a black hole has one"),
        (lambda: link.set(direction="a to b", drop=1), "direction: expected a->b"),
        (lambda: link.down(end="c"), "c is not on eth0; there are a/eth0, b/eth0"),
        (lambda: lab.host("c").address, "host c has no NIC yet"),
        (lambda: a.nic("eth7"), "host a has no NIC eth7; it has eth0"),
    ):
        with pytest.raises((ValueError, LookupError), match=text):
            call()
    assert list(lab.networks) == ["eth0"]
    assert [nic.device for nic in a.nics] == ["eth0"]


def test_importing_it_loads_no_torch(run_python: Callable[..., str]) -> None:
    program = "import sys, torch_resilient.testing; print('torch' in sys.modules)"
    assert run_python(program) == "False\n"


def test_the_command_runs_a_job(lab: NetworkLab, capfd: pytest.CaptureFixture[str]) -> None:
    """It runs over two links; one of them fails meanwhile."""
    program = (
        'echo "$LAB_HOST $NODE_RANK/$PET_NNODES $RANK/$WORLD_SIZE $MASTER_ADDR $(hostname)"; '
        "ip -br link | cut -d' ' -f1 | tr '\\n' ' '; exit $((RANK * 3))"
    )
    arguments = ["--links", "2", "--control", "--delay", "1ms", "--set", "jitter=1ms"]
    arguments += ["--script", "0s eth0 down; 0s eth0 up"]
    assert cli.main(["lab", *arguments, "--", "sh", "-c", program]) == 3
    out, err = capfd.readouterr()
    assert "[a] a 0/2 0/2 10.77.2.1 a\n" in out
    assert "[b] b 1/2 1/2 10.77.2.1 b\n" in out
    assert "[b] lo eth0 eth1 control" in out
    assert "eth0 down" in err


def test_the_command_ends_when_nobody_reads_its_output(lab: NetworkLab) -> None:
    command = [sys.executable, "-m", "torch_resilient.cli", "lab", "--", "yes"]
    done = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with done:
        assert done.stdout is not None
        assert done.stderr is not None
        try:
            assert done.stdout.readline() in (b"[a] y\n", b"[b] y\n")
            done.stdout.close()
            # The status of the commands, or of the process that writes for them.
            assert done.wait(60) in (128 + signal.SIGPIPE, 1)
            assert b"Traceback" not in done.stderr.read()
        finally:
            done.kill()


JOB = """
import torch
import torch.distributed as dist
dist.init_process_group("resilient")
tensor = torch.full((100_000,), float(dist.get_rank() + 1))
dist.all_reduce(tensor)
assert tensor.eq(3).all(), tensor
dist.destroy_process_group()
print("sum", int(tensor[0]))
"""


def test_the_backend_runs_in_a_lab(lab: NetworkLab, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["lab", "--delay", "2ms", "--drop", "0.5%", "--", sys.executable, "-c", JOB]
    assert cli.main(command) == 0
    out, err = capfd.readouterr()
    assert "[a] sum 3\n" in out
    assert "[b] sum 3\n" in out
    assert "lab: eth0 a->b: " in err


TWO_SITES = """
import torch
import torch.distributed as dist
import torch_resilient
dist.init_process_group("resilient")
for _ in range(8):
    dist.all_reduce(torch.ones(500_000))
print("sites", list(torch_resilient.topology().sites))
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_sites_are_set_inferred_and_turned_off(
    lab: NetworkLab, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Undeclared sites cost as few bytes between sites as declared ones."""
    border = {}
    for site in (None, "auto", ""):
        if site is not None:
            monkeypatch.setenv("TORCH_RESILIENT_SITE", site)
        network = ["--hosts", "4", "--sites", "2", "--delay", "20ms", "--rate", "100mbit"]
        assert cli.main(["lab", *network, "--", sys.executable, "-c", TWO_SITES]) == 0
        out, err = capfd.readouterr()
        sent = re.findall(r"eth0 (\w)->(\w): ([\d.]+) MB", err)
        border[site] = sum(float(mb) for a, b, mb in sent if (a in "ab") != (b in "ab"))
        sites = ["", "", "", ""] if site == "" else ["site0", "site0", "site1", "site1"]
        assert out.count(f"sites {sites}\n") == 4
        said = re.findall(r"no rank declares a site.*: (.*) \(.*\); (.*) \(.*\)\. ", out)
        assert said == ([("ranks 0, 1", "ranks 2, 3")] if site == "auto" else [])
    assert border["auto"] < 1.1 * border[None]
    assert border[""] > 1.5 * border[None]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "expected a command after --"),
        (["--hosts", "1", "--", "true"], "--hosts: expected 2 to 26"),
        (["--hosts", "3", "--sites", "2", "--", "true"], "--sites: expected at least 2, and a div"),
        (["--uplink", "1gbit", "--", "true"], "--uplink: is for a site"),
        (["--rate", "20", "--", "true"], "rate: '20': expected a rate with its unit (kbit, mbit"),
        (["--delay", "20", "--", "true"], "delay: '20': expected a time with its unit (s, ms"),
        (["--script", "1s eth5 up", "--", "true"], "no network eth5; there are eth0"),
        (["--sysctl", "x", "--", "true"], "--sysctl: expected NAME=VALUE, got 'x'"),
        (["--", "no-such-program"], "no-such-program"),
    ],
)
def test_the_command_names_what_is_wrong(
    lab: NetworkLab, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert cli.main(["lab", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("torch-resilient lab: ")
    assert text in line
