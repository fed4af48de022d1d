"""Hosts, networks between them, and faults, on one machine.

Each host is a set of namespaces (network, host name, mounts) with a NIC, a TUN device, for each
network that it is on. A separate process, the carrier (csrc/lab), carries packets between the NICs
and applies the settings to them. The lab never uses `tc netem`, even where the kernel has it: the
carrier behaves the same on every kernel, and only one implementation needs tests.

The lab needs root. Nothing outlives the lab or the program that made it, even if the program is
killed: all processes are in one PID namespace; its first process is the carrier, which ends with
the program. Nothing has a name in the file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch_resilient.testing import namespaces
from torch_resilient.testing.carrier import Carrier, module_path
from torch_resilient.testing.script import Event, Player, parse_script
from torch_resilient.testing.settings import Counters, LinkSettings

_T = TypeVar("_T")

KINDS = ("blackhole", "carrier", "admin")
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,12}")
_NAMES_TAKEN = {"lo", "all", "default"}  # by the kernel, among devices
# Hosts and networks are numbered in the addresses, 10.77.<network>.<place>; readdress() counts down
# from here.
_LAST_PLACE = 254
_COUNT_MAX = 250
_TABLE = 1000
# Queue length in super-packets, at most 32 MB; the sender's kernel drops further packets.
_DEVICE_QUEUE_PACKETS = 500
# An answer of the carrier has at most 208 KiB (a kernel limit); a pipe's counters have up to 441
# bytes.
_PIPES_ASKED_MAX = 256
_HAS_V6 = os.path.exists("/proc/sys/net/ipv6")
_V6_LIMIT_S = 30.0  # far more than the kernel needs on a busy machine
_SYSCTLS = {
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.ipv6.conf.all.keep_addr_on_down": "1",
    "net.ipv6.conf.default.keep_addr_on_down": "1",
    # Without link-local addresses the kernel sends no packets of its own.
    "net.ipv6.conf.all.addr_gen_mode": "1",
    "net.ipv6.conf.default.addr_gen_mode": "1",
}


class LabUnavailable(RuntimeError):
    """This process cannot make a lab; the text says what is missing."""


def unavailable() -> str | None:
    """Why this process cannot make a lab, or None if it can."""
    if not os.path.exists("/dev/net/tun"):
        return "a lab needs the device /dev/net/tun: load the kernel's module tun"
    for program in ("ip", "mount"):
        if shutil.which(program) is None:
            return f"a lab needs the program {program}: install iproute2 and mount"
    try:
        namespaces.probe()
        module_path()
    except PermissionError as error:
        return f"a lab needs root, with the rights of CAP_SYS_ADMIN and CAP_NET_ADMIN ({error})"
    except OSError as error:
        return f"a lab cannot be made here: {error}"
    return None


def _digits(address: str) -> str:
    """An address in the carrier's format: 16 bytes, IPv4 mapped into IPv6."""
    number = ipaddress.ip_address(address)
    return f"{'0' * 20}ffff{int(number):08x}" if number.version == 4 else f"{int(number):032x}"


@dataclass(frozen=True)
class Nic:
    """A host's place on a network."""

    host: Host = dataclasses.field(repr=False)
    network: Network = dataclasses.field(repr=False)
    device: str
    address: str
    address_v6: str
    index: int = dataclasses.field(repr=False)  # the carrier's number
    mtu: int = dataclasses.field(default=1500, repr=False)

    @property
    def table(self) -> int:
        """The routing table for packets from this NIC's addresses."""
        return _TABLE + self.index

    def configure_routes(self) -> None:
        """Adds the routes that the kernel removes when a NIC is switched off. Raises OSError."""
        v4 = ipaddress.ip_interface(f"{self.address}/24").network
        self.host._ip(
            [f"route replace {v4} dev {self.device} src {self.address} table {self.table}"]
        )
        if _HAS_V6:
            v6 = ipaddress.ip_interface(f"{self.address_v6}/64").network
            self.host._ip([f"route replace {v6} dev {self.device} table {self.table}"], "-6")
            self._wait_for_v6()

    def _wait_for_v6(self) -> None:
        """The kernel makes the route to its own IPv6 address in the background, some time after the
        address; until then it drops what arrives. Raises OSError."""
        begin = f"{int(ipaddress.ip_address(self.address_v6)):032x} 80 "

        def there() -> bool:
            # /proc/net would show the namespace of the main thread instead of this thread's.
            with open("/proc/thread-self/net/ipv6_route", encoding="ascii") as routes:
                return any(line.startswith(begin) for line in routes)

        limit_s = time.monotonic() + _V6_LIMIT_S
        while not self.host.call(there):
            if time.monotonic() > limit_s:
                raise OSError(f"the kernel has made no route to {self.address_v6}")
            time.sleep(0.001)


class Host:
    """A machine of the lab. Made by NetworkLab.host()."""

    def __init__(self, lab: NetworkLab, name: str, spaces: namespaces.Namespaces) -> None:
        self.name = name
        self.nics: list[Nic] = []
        self._lab = lab
        self._spaces = spaces

    def __repr__(self) -> str:
        return f"Host({self.name!r})"

    @property
    def addresses(self) -> dict[str, str]:
        """The IPv4 address of each NIC by the name of its device."""
        return {nic.device: nic.address for nic in self.nics}

    @property
    def address(self) -> str:
        """The IPv4 address of the first NIC. Raises LookupError if there is none."""
        if not self.nics:
            raise LookupError(f"host {self.name} has no NIC yet: call lab.link() or lab.network()")
        return self.nics[0].address

    def nic(self, device: str) -> Nic:
        """The NIC that is called `device`. Raises LookupError."""
        for nic in self.nics:
            if nic.device == device:
                return nic
        names = ", ".join(nic.device for nic in self.nics) or "none"
        raise LookupError(f"host {self.name} has no NIC {device}; it has {names}")

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Like subprocess.Popen, on this host. The process dies with the lab at the latest.

        Inside the lab it has a different process id: os.getpid() differs from Popen.pid.
        """
        self._lab._check_open()
        process = self._spaces.popen(arguments, **options)
        self._lab._processes.append(process)
        return process

    def run(
        self,
        arguments: Sequence[str],
        *,
        input: Any = None,
        timeout: float | None = None,
        check: bool = False,
        capture_output: bool = False,
        **options: Any,
    ) -> subprocess.CompletedProcess[Any]:
        """Like subprocess.run, on this host."""
        if capture_output:
            options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if input is not None:
            options["stdin"] = subprocess.PIPE
        process = self.popen(arguments, **options)
        with process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Calls `function` in a thread of this process on this host; returns its result or raises.

        Sockets and threads that it makes stay on the host:
        `host.call(socket.create_server, (host.address, 0))`, or a TCPStore.
        """
        self._lab._check_open()
        return self._spaces.call(lambda: function(*arguments))

    def sysctl(self, name: str, value: object = None) -> str:
        """Reads a setting such as "net.ipv4.tcp_wmem", after writing `value` if it is given.

        Raises OSError.
        """
        path = "/proc/sys/" + name.replace(".", "/")

        def body() -> str:
            if value is not None:
                with open(path, "w", encoding="ascii") as file:
                    file.write(str(value))
            with open(path, encoding="ascii") as file:
                return file.read().strip()

        return self.call(body)

    def _ip(self, lines: Iterable[str], family: str = "-4") -> None:
        """Commands of `ip`, without that word, for one family of addresses."""
        text = "\n".join(lines)

        def body() -> subprocess.CompletedProcess[str]:
            command = ["ip", family, "-batch", "-"]
            return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

        done = self._spaces.call(body)
        if done.returncode != 0:
            raise OSError(f"host {self.name}: ip failed: {done.stderr.strip()}; it was to\n{text}")


class Network:
    """A subnet, with a direction (pipe) from each of its NICs to each other one.

    A link is a network of two NICs. Made by NetworkLab.link() and network().
    """

    def __init__(self, lab: NetworkLab, name: str, index: int) -> None:
        self.name = name
        self.nics: list[Nic] = []
        self._lab = lab
        self._index = index
        self._pipes: dict[tuple[int, int], int] = {}
        self._settings: dict[int, LinkSettings] = {}
        self._shared: dict[int, list[int]] = {}
        # Active faults: directions that drop all packets, NICs without carrier or down.
        self._blackholes: set[int] = set()
        self._faults: dict[int, set[str]] = {}
        self._readdressed = 0

    def __repr__(self) -> str:
        return f"Network({self.name!r}, {' '.join(nic.host.name for nic in self.nics)})"

    @property
    def hosts(self) -> list[Host]:
        """Its hosts in order, each once."""
        return list(dict.fromkeys(nic.host for nic in self.nics))

    def address(self, host: Host | str) -> str:
        """The IPv4 address of `host` here. Raises LookupError."""
        return self._nics_of(host)[0].address

    def device(self, host: Host | str) -> str:
        """The name of the NIC of `host` here. Raises LookupError."""
        return self._nics_of(host)[0].device

    def readdress(self, host: Host | str) -> str:
        """Replaces the IPv4 address of the NIC of `host`, as after a new DHCP lease; returns it.

        The hosts file keeps the old address. Raises LookupError, OSError.
        """
        with self._lab._lock:
            nic = self._nics_of(host)[0]
            # Differs from the addresses of the others after any number of calls.
            back = self._readdressed % (_LAST_PLACE - len(self.nics))
            new = f"10.77.{self._index}.{_LAST_PLACE - back}"
            self._readdressed += 1
            moved = dataclasses.replace(nic, address=new)
            self._replace_address(nic, moved)
            for nics in (self.nics, nic.host.nics):
                nics[nics.index(nic)] = moved
            return new

    def set(self, *, direction: str | None = None, **settings: Any) -> None:
        """Changes fields of LinkSettings, at once and together.

        direction: "a->b", from host a to host b; "a,b<->c,d" both ways between two groups;
        "*" stands for all hosts, "a/eth0" for one NIC; None for all directions. Raises
        TypeError, ValueError, LookupError, and then nothing has changed.
        """
        with self._lab._lock:
            chosen = self._directions(direction)
            changed = {
                pipe: dataclasses.replace(self._settings[pipe], **settings) for pipe in chosen
            }
            self._settings.update(changed)
            self._send(chosen)

    def settings(self, direction: str) -> LinkSettings:
        """The settings of the first pipe of `direction`."""
        return self._settings[self._directions(direction)[0]]

    def down(
        self,
        kind: str = "blackhole",
        *,
        end: Host | str | None = None,
        direction: str | None = None,
    ) -> None:
        """Takes the network down until up(). Packets on their way are dropped, too.

        kind: "blackhole", packets are dropped without an error; "carrier", the NICs lose their
        carrier, as when a cable is pulled; "admin", the NICs are switched off, and their routes
        are gone. end: only the NICs of this host, or one ("a/eth0"); None: all. direction: as in
        set(), for black holes only. Raises ValueError, LookupError.
        """
        if kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
        if direction is not None and (kind != "blackhole" or end is not None):
            raise ValueError(
                "direction: only a black hole has one, and it excludes end; leave it out"
            )
        with self._lab._lock:
            if kind == "blackhole":
                pipes = (
                    self._directions(direction)
                    if end is None
                    else self._touching(self._nics_of(end))
                )
                self._blackholes.update(pipes)
                self._send(pipes)
                return
            nics = self.nics if end is None else self._nics_of(end)
            for nic in nics:
                faults = self._faults.setdefault(nic.index, set())
                if kind not in faults:
                    faults.add(kind)
                    self._switch(nic, kind, False)
            self._send(self._touching(nics))

    def up(self, *, end: Host | str | None = None, direction: str | None = None) -> None:
        """Reverts down(): completely, or only for one host or one direction.

        Routes and addresses are as before.
        """
        with self._lab._lock:
            if direction is not None:
                if end is not None:
                    raise ValueError("direction: excludes end; leave one of them out")
                pipes = self._directions(direction)
                self._blackholes.difference_update(pipes)
                self._send(pipes)
                return
            nics = self.nics if end is None else self._nics_of(end)
            for nic in nics:
                for kind in sorted(self._faults.pop(nic.index, ())):
                    self._switch(nic, kind, True)
            pipes = self._touching(nics)
            self._blackholes.difference_update(pipes)
            self._send(pipes)

    def counters(self, direction: str | None = None) -> Counters:
        """Counts of packets so far, summed over all directions or those of `direction`."""
        return sum(self._lab._counters(self._directions(direction)), start=Counters())

    def share_rate(
        self,
        direction: str,
        rate_bytes_per_s: float,
        *,
        queue_bytes: float | None = None,
    ) -> SharedRate:
        """A rate limit that the pipes of `direction` share, after their own limits.

        "a,b->c,d" and "c,d->a,b", each with a rate, make the uplink of a site.
        """
        return self._lab.share_rate([(self, direction)], rate_bytes_per_s, queue_bytes=queue_bytes)

    def _nics_of(self, host: Host | str) -> list[Nic]:
        name, _, device = (host.name if isinstance(host, Host) else host).partition("/")
        found = [nic for nic in self.nics if nic.host.name == name and device in ("", nic.device)]
        if not found:
            names = ", ".join(f"{nic.host.name}/{nic.device}" for nic in self.nics)
            raise LookupError(f"{host} is not on {self.name}; there are {names}")
        return found

    def _directions(self, text: str | None) -> list[int]:
        """Pipes from the text of a direction; raises ValueError, LookupError."""
        if text is None:
            return list(self._pipes.values())
        match = re.fullmatch(r"\s*([^<>-][^<>]*?)\s*(<?->)\s*([^<>]+?)\s*", text)
        if match is None:
            raise ValueError(
                f"direction: expected a->b, or a,b<->c,d with * for all hosts, got {text!r}"
            )

        def group(names: str) -> set[int]:
            found: set[int] = set()
            for name in names.split(","):
                nics = self.nics if name.strip() == "*" else self._nics_of(name.strip())
                found.update(nic.index for nic in nics)
            return found

        left, right = group(match[1]), group(match[3])
        both = match[2] == "<->"
        pipes = [
            pipe
            for (source, target), pipe in self._pipes.items()
            if (source in left and target in right) or (both and source in right and target in left)
        ]
        if not pipes:
            raise ValueError(f"direction: {text!r} holds no two hosts of {self.name}")
        return pipes

    def _touching(self, nics: Iterable[Nic]) -> list[int]:
        chosen = {nic.index for nic in nics}
        return [pipe for ends, pipe in self._pipes.items() if chosen.intersection(ends)]

    def _send(self, pipes: Iterable[int]) -> None:
        """Sends the current settings of these pipes to the carrier."""
        ends = {pipe: pair for pair, pipe in self._pipes.items()}
        lines = []
        for pipe in pipes:
            s = self._settings[pipe]
            down = pipe in self._blackholes or any(self._faults.get(nic) for nic in ends[pipe])
            numbers = {
                "delay": s.delay_s,
                "jitter": s.jitter_s,
                "rate": s.rate_bytes_per_s or 0,
                "queue": s.queue_limit_bytes(),
                "udp_rate": s.udp_rate_bytes_per_s or 0,
                "loss": s.drop,
                "burst": s.burst_packets or 0,
                "duplicate": s.duplicate,
                "corrupt": s.corrupt,
                "reorder": s.reorder,
                "reorder_delay": s.reorder_delay_s,
                "down": down,
            }
            # float(): those of numpy tell their type.
            words = [f"{name}={float(value)!r}" for name, value in numbers.items()]
            shared = ",".join(map(str, self._shared.get(pipe, ())))
            lines.append(f"set {pipe} {' '.join(words)} shared={shared}")
        self._lab._carrier.ask(lines)

    def _replace_address(self, nic: Nic, moved: Nic) -> None:
        self._lab._carrier.ask([f"address {nic.index} {_digits(moved.address)}"])
        nic.host._ip(
            [
                f"rule delete from {nic.address} lookup {nic.table}",
                f"rule add from {moved.address} lookup {nic.table}",
                f"address delete {nic.address}/24 dev {nic.device}",
                f"address add {moved.address}/24 dev {nic.device}",
            ]
        )
        if "admin" not in self._faults.get(nic.index, ()):  # else up() will
            moved.configure_routes()

    def _switch(self, nic: Nic, kind: str, on: bool) -> None:
        if kind == "carrier":
            self._lab._carrier.ask([f"carrier {nic.index} {int(on)}"])
        else:
            nic.host.call(namespaces.set_device_up, nic.device, on)
            if on:
                nic.configure_routes()


@dataclass(frozen=True)
class SharedRate:
    """A rate limit that several directions share. Made by share_rate()."""

    _lab: NetworkLab = dataclasses.field(repr=False)
    _index: int

    def set(self, rate_bytes_per_s: float | None, *, queue_bytes: float | None = None) -> None:
        """Changes the rate immediately; None: no limit. Raises TypeError, ValueError."""
        settings = LinkSettings(rate_bytes_per_s=rate_bytes_per_s, queue_bytes=queue_bytes)
        rate, queue = float(settings.rate_bytes_per_s or 0), settings.queue_limit_bytes()
        self._lab._carrier.ask([f"limiter {self._index} {rate!r} {queue}"])


class NetworkLab:
    """Hosts and networks on this machine; a context manager.

        with NetworkLab() as lab:
            a, b = lab.host("a"), lab.host("b")
            wan = lab.link(a, b, delay_s=0.02, rate_bytes_per_s=125e6)
            job = a.popen(["ping", b.address])
            wan.down("blackhole")

    seed: decides which packets are dropped and so on, with the number of the direction.
    Raises LabUnavailable if unavailable() returns a reason. Usable from any thread.
    """

    def __init__(self, *, seed: int = 1) -> None:
        if (reason := unavailable()) is not None:
            raise LabUnavailable(reason)
        self.seed = seed
        self.hosts: dict[str, Host] = {}
        self.networks: dict[str, Network] = {}
        self._lock = threading.RLock()
        self._processes: list[subprocess.Popen[Any]] = []
        self._players: list[Player] = []
        self._nic_count = 0
        self._pipe_count = 0
        self._limiter_count = 0
        self._closed = False
        self._carrier = Carrier()

    def __enter__(self) -> NetworkLab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def host(self, name: str, *, sysctl: Mapping[str, object] | None = None) -> Host:
        """A new host. sysctl: settings of its network, such as {"net.ipv4.tcp_wmem": "..."}.

        Raises ValueError, OSError.
        """
        self._check_name("host", name, self.hosts)
        self._check_open()
        with self._lock:
            spaces = namespaces.Namespaces.create(name, self._carrier.pid_namespace)
            host = self.hosts[name] = Host(self, name, spaces)
            host._ip(["link set lo up"])
            for key, value in {**_SYSCTLS, **(sysctl or {})}.items():
                try:
                    host.sysctl(key, value)
                except OSError as error:
                    if error.errno == errno.ENOENT and key in _SYSCTLS:
                        continue  # a kernel without IPv6
                    raise OSError(f"host {name}: sysctl {key}={value}: {error}") from error
            return host

    def link(
        self, one: Host, other: Host, *, name: str | None = None, mtu: int = 1500, **settings: Any
    ) -> Network:
        """A link between a NIC on each of two hosts, with the same LinkSettings both ways."""
        return self.network([one, other], name=name, mtu=mtu, **settings)

    def network(
        self,
        hosts: Sequence[Host],
        *,
        name: str | None = None,
        mtu: int = 1500,
        **settings: Any,
    ) -> Network:
        """A subnet with a NIC for each host; one that is named twice gets two.

        name: also that of the devices (of a second NIC on the same host with "b", then "c");
        None: the next of "eth0", "eth1"... mtu: bytes. settings: LinkSettings of all directions.
        Raises TypeError, ValueError, OSError.
        """
        self._check_open()
        with self._lock:
            index = len(self.networks)
            if name is None:
                name = next(n for k in range(index + 1) if (n := f"eth{k}") not in self.networks)
            self._check_name("network", name, {*self.networks, *_NAMES_TAKEN})
            first = LinkSettings(**settings)
            if len(hosts) < 2:
                raise ValueError(f"network {name}: expected at least two hosts")
            if max(len(hosts), index + 1) > _COUNT_MAX:
                raise ValueError(f"network {name}: at most {_COUNT_MAX} networks and NICs in each")
            if any(each._lab is not self for each in hosts):
                raise ValueError(f"network {name}: a host of another lab")
            if not 1280 <= mtu <= 65535:
                raise ValueError(f"mtu: expected 1280 to 65535 bytes, got {mtu}")
            network = self.networks[name] = self._new_network(name, index)
            for place, host in enumerate(hosts, start=1):
                self._add_nic(network, host, place, mtu)
            lines = []
            for source in network.nics:
                for target in network.nics:
                    if source.host is not target.host:
                        pipe = network._pipes[source.index, target.index] = self._pipe_count
                        network._settings[pipe] = first
                        self._pipe_count += 1
                        seed = ((self.seed << 20) + pipe) % 2**64
                        lines.append(f"pipe {pipe} {source.index} {target.index} {seed}")
            self._carrier.ask(lines)
            network._send(network._pipes.values())
            self._write_hosts_files()
            return network

    def share_rate(
        self,
        directions: Sequence[tuple[Network, str]],
        rate_bytes_per_s: float,
        *,
        queue_bytes: float | None = None,
    ) -> SharedRate:
        """Like Network.share_rate, over several networks."""
        with self._lock:
            shared = SharedRate(self, self._limiter_count)
            shared.set(rate_bytes_per_s, queue_bytes=queue_bytes)
            self._limiter_count += 1
            for network, direction in directions:
                pipes = network._directions(direction)
                for pipe in pipes:
                    network._shared.setdefault(pipe, []).append(shared._index)
                network._send(pipes)
            return shared

    def play(
        self, script: str | Sequence[tuple[float, Callable[[], object]]], *, wait: bool = False
    ) -> Player:
        """Runs a script in a thread; its times count from now.

        script: text (torch_resilient/testing/script.py says which), or (seconds, function) pairs.
        wait: until its end. Raises ScriptError before anything is done.
        """
        self._check_open()
        if isinstance(script, str):
            events = self.parse(script)
        else:
            events = [Event(at_s, getattr(do, "__name__", "call"), do) for at_s, do in script]
        player = Player(events)
        self._players.append(player)
        if wait:
            player.wait()
        return player

    def parse(self, script: str) -> list[Event]:
        """The events of a script. Raises ScriptError."""
        return parse_script(script, self.networks)

    @property
    def is_real_time(self) -> bool:
        """Whether the carrier has real-time priority. Without it, delays depend on the load."""
        return "realtime=1" in self._carrier.ask(["counters"])

    @property
    def carrier_cpu_s(self) -> float:
        """Processor time that the carrier has used. Raises OSError after close()."""
        with open(f"/proc/{self._carrier.process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Kills all processes of the lab and removes its hosts and networks. May be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for player in self._players:
            player.cancel()
        self._carrier.kill()
        # Before the carrier: the kernel keeps the first process of the namespace until all others
        # are reaped.
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._carrier.wait()
        for host in self.hosts.values():
            host._spaces.close()

    def _new_network(self, name: str, index: int) -> Network:
        return Network(self, name, index)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this lab is closed")

    def _check_name(self, what: str, name: str, used: Container[str]) -> None:
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ValueError(
                f"{what} name: expected up to 13 of a-z, 0-9, '_', '.', '-', got {name!r}"
            )
        if name in used:
            raise ValueError(f"{what} name: {name!r} is taken")

    def _add_nic(self, network: Network, host: Host, place: int, mtu: int) -> None:
        before = sum(nic.host is host for nic in network.nics)
        device = network.name + ("" if before == 0 else chr(ord("a") + before))
        nic = Nic(
            host,
            network,
            device,
            f"10.77.{network._index}.{place}",
            str(ipaddress.ip_address(f"fd77:0:0:{network._index:x}::{place:x}")),
            self._nic_count,
            mtu,
        )
        self._attach(nic)
        self._nic_count += 1
        network.nics.append(nic)
        host.nics.append(nic)

    def _attach(self, nic: Nic) -> None:
        """Makes the device of a NIC, for its host and for the carrier."""
        host, network, device = nic.host, nic.network, nic.device
        tun = host.call(namespaces.open_tun, device)
        try:
            digits = [_digits(nic.address), _digits(nic.address_v6)]
            self._carrier.ask([f"nic {nic.index} {network._index} {' '.join(digits)}"], tun)
        finally:
            os.close(tun)
        # Packets from this NIC's address leave through this NIC, for every target.
        host._ip(
            [
                f"link set {device} mtu {nic.mtu} txqueuelen {_DEVICE_QUEUE_PACKETS} up",
                f"address add {nic.address}/24 dev {device}",
                f"rule add from {nic.address} lookup {nic.table}",
            ]
        )
        if _HAS_V6:
            host._ip(
                [
                    f"address add {nic.address_v6}/64 dev {device} nodad",
                    f"rule add from {nic.address_v6} lookup {nic.table}",
                ],
                "-6",
            )
        nic.configure_routes()

    def _write_hosts_files(self) -> None:
        """The name a resolves to the first NIC of host a; a-eth0 and so on to each NIC."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for host in self.hosts.values():
            for nic in host.nics:
                first = f"{host.name} " if nic is host.nics[0] else ""
                lines.append(f"{nic.address} {first}{host.name}-{nic.device}")
        for host in self.hosts.values():
            host._spaces.write_hosts_file("\n".join(lines) + "\n")

    def _counters(self, pipes: Sequence[int]) -> list[Counters]:
        found: list[Counters] = []
        for begin in range(0, len(pipes), _PIPES_ASKED_MAX):
            numbers = " ".join(map(str, pipes[begin : begin + _PIPES_ASKED_MAX]))
            lines = self._carrier.ask([f"counters {numbers}"]).splitlines()[1:]
            found += map(Counters.parse, lines)
        return found
