"""The checks of `torch-resilient doctor`: from facts to findings. Pure functions without I/O.

A finding is a problem that will break or slow down a job, with its remedy. A merely unusual setting
is not a finding: a check reports nothing unless it is certain.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_resilient._reports.stats import PathKind

from torch_resilient.cli import third_party

# Interfaces of containers and virtual machines: as in csrc/transport/address.cpp; a test compares.
INWARD = (
    "docker",
    "br-",
    "virbr",
    "veth",
    "vnet",
    "vmnet",
    "lxc",
    "lxd",
    "cni",
    "cali",
    "cilium",
    "flannel",
    "kube",
    "podman",
    "dummy",
    "nerdctl",
)
# With less, a DataLoader with a few workers dies of SIGBUS. Docker's default is 64 MiB.
_SHM_MIN_BYTES = 512 << 20
# Users compare timelines and logs of several hosts.
_CLOCK_MAX_S = 0.5
# A name server in the same network answers in a few milliseconds.
_REVERSE_LOOKUP_MAX_S = 0.1
# Files, sockets and libraries of a training, apart from connections.
_OTHER_FILES = 200
# Descriptors for a rank on this host: its connection and shared memory.
_LOCAL_FILES = 4
# Maximum between two NICs with wan_connections=auto; equals the one in
# csrc/path/path_count.h.
CONNECTIONS_MAX = 16
# The goodput for which a long connection gets buffers, if the limits allow it; as in
# csrc/path/path_count.h and csrc/delegate/connect_tcp.cpp.
_ASSUMED_BYTES_PER_S = 5e9 / 8
_WINDOW_MAX_BYTES = 64 << 20
# Windows of the usual size never limit a connection with a shorter round trip.
_LONG_WAY_S = 0.005
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One problem and its remedy.

    Attributes:
        check: its name, such as "hosts-file".
        where: the host, and the rank in a job.
        seen: the observation.
        why: its effect on a job.
        remedy: the command or setting that fixes it.
    """

    check: str
    where: str
    seen: str
    why: str
    remedy: str

    def as_json(self) -> dict[str, str]:
        """Fit for JSON."""
        return asdict(self)


@dataclass
class Interface:
    """A network interface; `speed_bits_per_s` None: unknown."""

    name: str
    up: bool
    mtu_bytes: int
    speed_bits_per_s: float | None = None


@dataclass
class Link:
    """A path to another rank, in a job: what the backend says of it after a trial.

    `large_stalled`: small messages passed, but large ones did not, twice. `relay`: the rank that
    passes the messages on; -1 of any other kind. `cipher`: empty: it is not encrypted. `local`: it
    does not leave the host.
    """

    peer: int
    kind: PathKind
    index: int
    nic: str
    remote_nic: str
    state: str
    last_error: str = ""
    large_stalled: bool = False
    relay: int = -1
    cipher: str = ""
    forward_secret: bool = False
    local: bool = False


@dataclass
class Relayed:
    """The bytes that a rank has passed on for others, of all that it has sent."""

    bytes: int
    bytes_sent: int
    held_max_bytes: int
    refused: int


@dataclass
class RdmaPort:
    """A port of an RDMA device.

    `gids`: its addresses, as "index: type address". `mtu_bytes`, `is_seen`: by the backend; 0: not
    known.
    """

    device: str
    port: int
    state: str
    link_layer: str
    firmware: str = ""
    nic: str = ""
    gids: list[str] = field(default_factory=list)
    mtu_bytes: int = 0
    is_seen: bool = False


@dataclass
class RdmaGpu:
    """How an RDMA device can register the memory of a GPU.

    `way`: dmabuf, peermem or staging; `why`: the reason against the ways before it.
    """

    device: str
    gpu: int
    way: str
    why: str = ""


@dataclass
class Rdma:
    """The RDMA devices of a host, and what this process needs for them.

    Attributes:
        gpus: each pair of a device that the backend sees and a GPU that torch sees.
        has_module: ib_uverbs is loaded.
        nodes: the device files of /dev/infiniband; denied: those whose rights keep this process
            out; refused: those that rights would allow, but the kernel does not.
        memlock_bytes: the limit on locked memory, None without one; may_lock: it does not hold.
        verbs_error: why the backend cannot use them, or an empty string.
    """

    ports: list[RdmaPort] = field(default_factory=list)
    has_module: bool = True
    nodes: list[str] = field(default_factory=list)
    denied: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    memlock_bytes: int | None = None
    may_lock: bool = False
    verbs_error: str = ""
    gpus: list[RdmaGpu] = field(default_factory=list)


@dataclass
class Facts:
    """Observations on one host, by one rank in a job (else rank None).

    Attributes:
        supported: version ranges of third_party/versions.toml, by the names in versions.
        host_key: equal for ranks of one host and network namespace.
        name_addresses: the addresses to which the host's own name resolves on this host.
        hosts_line: the line of /etc/hosts that says so, if any.
        master: MASTER_ADDR; master_addresses: the addresses to which it resolves.
        toward_master: (interface, address) that packets to it leave from.
        reverse_lookups_s: by address of the store's host, how long its name took to look up.
        environment: the variables that matter.
        known_variables: of this package.
        backend_error: why the backend does not start; empty: it does.
        nofile: soft and hard limit on open files.
        buffers_forced: net.core.rmem_max and wmem_max do not hold for this process.
        rdma: None without an RDMA device.
        links: to other ranks; round_trips_s, clock_offsets_s: of peers, as far as they were tried;
            an offset is (theirs minus ours, its possible error).
        peer_errors: by rank, why a trial with it failed.
        relayed: None outside of a job.
    """

    host: str
    host_key: str = ""
    rank: int | None = None
    world_size: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    supported: dict[str, str] = field(default_factory=dict)
    built_for: str = ""
    torch_error: str = ""
    backend_error: str = ""
    name_addresses: list[str] = field(default_factory=list)
    hosts_line: str = ""
    master: str = ""
    master_addresses: list[str] = field(default_factory=list)
    toward_master: tuple[str, str] | None = None
    reverse_lookups_s: dict[str, float] = field(default_factory=dict)
    interfaces: list[Interface] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    known_variables: list[str] = field(default_factory=list)
    sysctl: dict[str, str] = field(default_factory=dict)
    shm_bytes: int | None = None
    nofile: tuple[int, int] = (1 << 20, 1 << 20)
    buffers_forced: bool = False
    socket_buffer_bytes: int = 0
    wan_connections: int = 0
    rdma: Rdma | None = None
    links: list[Link] = field(default_factory=list)
    round_trips_s: dict[int, float] = field(default_factory=dict)
    clock_offsets_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    peer_errors: dict[int, str] = field(default_factory=dict)
    relayed: Relayed | None = None

    @property
    def where(self) -> str:
        """For people."""
        return self.host if self.rank is None else f"rank {self.rank} ({self.host})"

    def as_json(self) -> dict[str, Any]:
        """Fit for JSON, and for from_json()."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Facts:
        """Restores the result of as_json(), directly or after JSON, which turns keys to text and
        tuples to lists."""
        values = dict(told)
        values["interfaces"] = [Interface(**each) for each in told["interfaces"]]
        if told["rdma"] is not None:
            ports = [RdmaPort(**each) for each in told["rdma"]["ports"]]
            gpus = [RdmaGpu(**each) for each in told["rdma"]["gpus"]]
            values["rdma"] = Rdma(**{**told["rdma"], "ports": ports, "gpus": gpus})
        values["links"] = [Link(**each) for each in told["links"]]
        values["relayed"] = Relayed(**told["relayed"]) if told["relayed"] else None
        values["nofile"] = tuple(told["nofile"])
        values["toward_master"] = tuple(told["toward_master"]) if told["toward_master"] else None
        values["round_trips_s"] = {int(k): v for k, v in told["round_trips_s"].items()}
        values["clock_offsets_s"] = {
            int(k): (v[0], v[1]) for k, v in told["clock_offsets_s"].items()
        }
        values["peer_errors"] = {int(k): v for k, v in told["peer_errors"].items()}
        return cls(**values)

    def interface(self, name: str) -> Interface | None:
        """By its name."""
        return next((each for each in self.interfaces if each.name == name), None)


def is_inward(interface: str) -> bool:
    """Whether its name is that of a network of containers on this host."""
    return interface.startswith(INWARD)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


# ---- one host --------------------------------------------------------------------------------


def check_torch(facts: Facts) -> Iterator[Finding]:
    """The extension fits torch, and the backend starts."""
    build = "pip install --no-build-isolation --no-deps --force-reinstall ."
    found = facts.versions.get("torch", "")
    if facts.torch_error:
        yield Finding(
            "torch",
            facts.where,
            facts.torch_error,
            "no process group can be made",
            f"`{build}` in the source of torch_resilient, with the Python of the job",
        )
    elif facts.built_for and _minor(facts.built_for) != _minor(found):
        yield Finding(
            "torch",
            facts.where,
            f"torch_resilient was built for torch {facts.built_for}, but torch {found} is here",
            "importing it with another torch can crash the process, so it refuses",
            f"`{build}` in its source, or `pip install torch=={facts.built_for.split('+')[0]}`",
        )
    elif facts.backend_error:
        yield Finding(
            "backend",
            facts.where,
            facts.backend_error,
            "init_process_group() will fail like that",
            _remedy_of_start(facts.backend_error),
        )


def _remedy_of_start(error: str) -> str:
    if "Address already in use" in error:
        return (
            "`unset TORCH_RESILIENT_LISTEN_PORT`, or give each process of a host its own, which "
            "torchrun numbers: `torchrun ... --no-python sh -c "
            "'TORCH_RESILIENT_LISTEN_PORT=$((29600 + LOCAL_RANK)) exec python train.py'`"
        )
    if "choose the addresses to listen on" in error:
        return "`unset TORCH_RESILIENT_INTERFACE`, or name an interface of the list"
    match = re.search(r'(TORCH_RESILIENT_\w+)="', error)
    if match:
        return f"`unset {match[1]}`, or give it what is expected"
    return "the text names the cause; `python -m torch_resilient.options` lists all settings"


def check_supported(facts: Facts) -> Iterator[Finding]:
    """Python and torch are in the ranges that third_party/versions.toml gives."""
    for name, versions in facts.supported.items():
        found = facts.versions.get(name, "")
        if not third_party.within(found, versions):
            yield Finding(
                "versions",
                facts.where,
                f"{name} {found} is outside the supported range {versions}",
                "torch_resilient has not been tested with it",
                f"install {name} {versions} and build torch_resilient again, or run its tests "
                "with this version: `make test` in its source",
            )


def check_variables(facts: Facts) -> Iterator[Finding]:
    """Settings that have no effect."""
    for name in sorted(facts.environment):
        if name.startswith("TORCH_RESILIENT_") and name not in facts.known_variables:
            similar = difflib.get_close_matches(name, facts.known_variables, n=1, cutoff=0.85)
            meant = f"; did you mean {similar[0]}?" if similar else ""
            yield Finding(
                "variable",
                facts.where,
                f"the environment sets {name}, which nothing reads{meant}",
                "the setting that was meant is not in force",
                f"`unset {name}`; `python -m torch_resilient.options` lists all names",
            )
    if facts.environment.get("TORCH_RESILIENT_INTERFACE"):
        return
    outward = [
        each.name
        for each in facts.interfaces
        if each.up and each.name != "lo" and not is_inward(each.name)
    ]
    name = "GLOO_SOCKET_IFNAME"
    wanted = [word.strip() for word in facts.environment.get(name, "").split(",") if word.strip()]
    if wanted and len(outward) > 1 and set(wanted) < set(outward):
        yield Finding(
            "interface",
            facts.where,
            f"{name}={','.join(wanted)} is set, TORCH_RESILIENT_INTERFACE is not",
            f"this backend does not read it, and uses all of {', '.join(outward)}",
            f"`export TORCH_RESILIENT_INTERFACE={','.join(wanted)}`",
        )


def check_shm(facts: Facts) -> Iterator[Finding]:
    """Room for torch's own shared memory."""
    if facts.shm_bytes is not None and facts.shm_bytes < _SHM_MIN_BYTES:
        yield Finding(
            "shm",
            facts.where,
            f"/dev/shm holds {facts.shm_bytes / _MIB:.0f} MiB",
            "DataLoader workers hand over batches in it, and die of SIGBUS when it is full",
            "`mount -o remount,size=8G /dev/shm`; of a container: `docker run --shm-size=8g` or "
            "`--ipc=host`",
        )


def check_files(facts: Facts) -> Iterator[Finding]:
    """Descriptors for all connections."""
    # As torchrun says; else all others may be on other hosts.
    local = facts.environment.get("LOCAL_WORLD_SIZE", "")
    local_peers = max(0, min(int(local) if local.isdecimal() else 1, facts.world_size) - 1)
    remote_peers = max(0, facts.world_size - 1 - local_peers)
    pairs: dict[int, set[tuple[str, str]]] = {}
    for link in facts.links:
        if link.kind == "tcp":
            pairs.setdefault(link.peer, set()).add((link.nic, link.remote_nic))
    routes = max(map(len, pairs.values()), default=1)
    remote = routes * (facts.wan_connections or CONNECTIONS_MAX)
    need = _OTHER_FILES + remote * remote_peers + _LOCAL_FILES * local_peers
    soft, hard = facts.nofile
    if soft < need:
        limit = max(65536, 2 * need)
        yield Finding(
            "open-files",
            facts.where,
            f"at most {soft} files may be open; {facts.world_size} ranks may need {need}",
            "connections fail with: no descriptor is left",
            f"`ulimit -n {limit}`"
            if hard >= limit
            else f"`ulimit -Hn {limit} && ulimit -n {limit}` as root, or `nofile {limit}` in "
            "/etc/security/limits.conf; of a container: "
            f"`docker run --ulimit nofile={limit}`",
        )


def check_buffer_option(facts: Facts) -> Iterator[Finding]:
    """The kernel silently limits explicitly requested buffer sizes."""
    for name in ("rmem_max", "wmem_max"):
        text = facts.sysctl.get(f"net.core.{name}", "")
        if text.isdecimal() and facts.socket_buffer_bytes > int(text):
            yield Finding(
                "socket-buffers",
                facts.where,
                f"TORCH_RESILIENT_SOCKET_BUFFER_BYTES={facts.socket_buffer_bytes}, but "
                f"net.core.{name} is {text}",
                "the kernel gives less than was asked for without a word, and its autotuning, "
                "which may give more, is off",
                f"`sysctl -w net.core.{name}={facts.socket_buffer_bytes}`, or "
                "`unset TORCH_RESILIENT_SOCKET_BUFFER_BYTES`",
            )


def check_autotuning(facts: Facts) -> Iterator[Finding]:
    """Without it, receive buffers stay at their first size."""
    if not facts.socket_buffer_bytes and facts.sysctl.get("net.ipv4.tcp_moderate_rcvbuf") == "0":
        yield Finding(
            "socket-buffers",
            facts.where,
            "net.ipv4.tcp_moderate_rcvbuf is 0",
            "receive buffers do not grow, so every connection over a long way is slow",
            "`sysctl -w net.ipv4.tcp_moderate_rcvbuf=1`",
        )


def check_master(facts: Facts, several_hosts: bool) -> Iterator[Finding]:
    """The addresses to which MASTER_ADDR resolves on this host."""
    if not facts.master:
        return
    if not facts.master_addresses:
        yield Finding(
            "master",
            facts.where,
            f"{facts.master}, the host of the store, leads nowhere on this host",
            "this rank cannot reach the store",
            f"`echo 'ADDRESS {facts.master}' >> /etc/hosts` with its address, or set MASTER_ADDR "
            "to a number",
        )
    elif several_hosts and all(map(_is_loopback, facts.master_addresses)):
        line = f', by the line "{facts.hosts_line}" of /etc/hosts' if facts.hosts_line else ""
        name = facts.master
        yield Finding(
            "hosts-file",
            facts.where,
            f"{name}, the host of the store, leads to {', '.join(facts.master_addresses)} on this "
            f"host{line}",
            "this host's ranks look for the store, and announce themselves first, at an address "
            "that means another host to all others",
            f"give all ranks its number in the job's network: `export MASTER_ADDR=ADDRESS`; or "
            f"`sed -i 's/^\\(127\\..*\\)\\b{re.escape(name)}\\b/\\1/' /etc/hosts; "
            f"echo 'ADDRESS {name}' >> /etc/hosts`",
        )
    if facts.toward_master is not None and not facts.environment.get("TORCH_RESILIENT_INTERFACE"):
        nic, address = facts.toward_master
        if is_inward(nic):
            better = [
                each.name
                for each in facts.interfaces
                if each.up and each.name != "lo" and not is_inward(each.name)
            ]
            yield Finding(
                "interface",
                facts.where,
                f"packets to {facts.master}, the host of the store, leave by {nic} ({address}), "
                "which leads to containers of this host",
                "that address is announced first, and no other host can reach it",
                f"`export TORCH_RESILIENT_INTERFACE={better[0] if better else 'eth0'}`, and "
                "MASTER_ADDR in a network that all hosts share",
            )


def check_reverse_dns(facts: Facts) -> Iterator[Finding]:
    """torch looks up the name of every connection's other end, on both ends."""
    slow = {
        address: seconds
        for address, seconds in facts.reverse_lookups_s.items()
        if seconds > _REVERSE_LOOKUP_MAX_S
    }
    if slow:
        address, seconds = max(slow.items(), key=lambda one: one[1])
        yield Finding(
            "reverse-dns",
            facts.where,
            f"looking up the name of {address}, the host of the store, took {seconds:.1f} s",
            "torch does so for each connection to the store, one after another in the process "
            "that serves it: a job starts in steps of that time",
            "repair the reverse zone or the name servers in /etc/resolv.conf, or add `options "
            "timeout:1 attempts:1` there on the host of the store",
        )


def check_host(facts: Facts, several_hosts: bool = False) -> list[Finding]:
    """All findings from the facts of one host alone."""
    return [
        *check_torch(facts),
        *check_supported(facts),
        *check_variables(facts),
        *check_master(facts, several_hosts),
        *check_reverse_dns(facts),
        *check_files(facts),
        *check_buffer_option(facts),
        *check_autotuning(facts),
        *check_shm(facts),
    ]


# ---- a job -----------------------------------------------------------------------------------


def check_versions(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """The same software everywhere."""
    remedies = {
        "torch_resilient": "build the same source on all hosts: `pip install "
        "--no-build-isolation --no-deps --force-reinstall .` in it",
        "torch": "`pip install torch==VERSION`, the same on all hosts, and build torch_resilient "
        "again where its minor version changes",
    }
    for name, remedy in remedies.items():
        found: dict[str, list[int]] = {}
        for facts in all_facts:
            found.setdefault(facts.versions.get(name, "none"), []).append(facts.rank or 0)
        if len(found) > 1:
            text = ", ".join(f"{version} on ranks {ranks}" for version, ranks in found.items())
            yield Finding(
                "versions",
                "the job",
                f"{name} differs: {text}",
                "ranks of different versions may not understand each other",
                remedy,
            )


def check_clocks(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Compares clocks between hosts; ranks on one host share a clock."""
    by_rank = {facts.rank: facts for facts in all_facts}
    told = set()
    for facts in all_facts:
        for peer, (offset_s, error_s) in facts.clock_offsets_s.items():
            other = by_rank.get(peer)
            if other is None or other.host_key == facts.host_key:
                continue
            hosts = frozenset((facts.host_key, other.host_key))
            if abs(offset_s) - error_s > _CLOCK_MAX_S and hosts not in told:
                told.add(hosts)
                ahead = "ahead of" if offset_s > 0 else "behind"
                yield Finding(
                    "clock",
                    other.where,
                    f"its clock is {abs(offset_s):.1f} s {ahead} that of {facts.where}",
                    "logs and records of the two hosts cannot be put side by side; certificates "
                    "and tokens may be refused",
                    "`timedatectl set-ntp true`, or `chronyc makestep`, on the host that is wrong",
                )


def _subnet_advice(links: Sequence[Link], broken: Link) -> str:
    """Advice that selects the working interfaces and leaves out a broken one."""
    good = []
    for link in links:
        works = link.kind != "relay" and link.state in ("up", "reserve", "proving")
        if works and link.nic != broken.nic:
            good += [link.nic] if link.nic not in good else []
    return ",".join(good)


def over_relays(links: Sequence[Link], peer: int) -> list[int]:
    """The ranks that can pass messages on to a peer."""
    return sorted(
        {
            link.relay
            for link in links
            if link.peer == peer and link.kind == "relay" and link.state in ("up", "reserve")
        }
    )


def check_links(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Firewalls, wrong interfaces, and problems that only large messages reveal."""
    by_rank = {facts.rank: facts for facts in all_facts}
    told: set[tuple[str, ...]] = set()
    for facts in all_facts:
        for peer, error in sorted(facts.peer_errors.items()):
            other = by_rank.get(peer)
            mine = [link for link in facts.links if link.peer == peer]
            if any(link.state in ("up", "reserve", "proving") for link in mine):
                if any(link.large_stalled for link in mine):
                    continue  # reported below
            elif mine and any(link.last_error for link in mine):
                continue  # reported below
            where = other.where if other is not None else f"rank {peer}"
            yield Finding(
                "link",
                f"{facts.where} - {where}",
                error,
                "operations between these two ranks fail",
                f"look at the log of rank {peer}; with `TORCH_RESILIENT_LOG_LEVEL=info` each end "
                "logs what it sees",
            )
        for link in facts.links:
            other = by_rank.get(link.peer)
            if other is None or link.kind in ("rdma", "relay"):  # see doctor_rdma.py
                continue
            # Several connections between two interfaces, and both ends, have one cause.
            ends = sorted([(facts.host_key, link.nic), (other.host_key, link.remote_nic)])
            works = link.state in ("up", "reserve", "proving")
            kind = "mtu" if link.large_stalled else link.kind
            key = (kind, *(f"{host}/{nic}" for host, nic in ends), "")
            if key in told or (works and not link.large_stalled):
                continue
            where = f"{facts.where} {link.nic} - {other.where} {link.remote_nic}"
            if link.large_stalled:
                told.add(key)
                yield _mtu_finding(where, facts, other, link)
            elif link.kind == "udp":
                if "UDP filtered" in link.last_error:
                    told.add(key)
                    yield _filtered_finding(where, link)
            elif link.last_error and link.state not in ("unused",):
                told.add(key)
                yield _blocked_finding(where, facts, other, link)


def _filtered_finding(where: str, link: Link) -> Finding:
    return Finding(
        "udp",
        where,
        link.last_error,
        "connections carry everything: bursts after a pause take longer, and several times as long "
        "if the link loses packets",
        "let UDP pass between the hosts, to all ports (`iptables -I INPUT -p udp -s OTHER-HOST -j "
        "ACCEPT` on both), or do without: `export TORCH_RESILIENT_WAN=tcp`",
    )


def _mtu_finding(where: str, facts: Facts, other: Facts, link: Link) -> Finding:
    ends = ((facts, link.nic), (other, link.remote_nic))
    found = [(each, nic, each.interface(nic)) for each, nic in ends]
    mtus = [interface.mtu_bytes for _, _, interface in found if interface is not None]
    seen = "small messages pass, large ones do not"
    least = 1280  # every IPv6 link carries that
    if mtus:
        seen += f" (MTU {' and '.join(map(str, mtus))})"
        least = min(mtus) if len(set(mtus)) > 1 else 1280
    hosts = [
        f"`ip link set dev {nic} mtu {least}` on {each.host}"
        for each, nic, interface in found
        if interface is None or interface.mtu_bytes > least
    ]
    return Finding(
        "mtu",
        where,
        seen,
        "something between them drops packets as large as the interface allows, and the messages "
        "that would tell the sender so",
        f"{', '.join(hosts) or 'an MTU below that of the way between them'}; or "
        "`sysctl -w net.ipv4.tcp_mtu_probing=1` on both",
    )


def _blocked_finding(where: str, facts: Facts, other: Facts, link: Link) -> Finding:
    others = [each for each in facts.links if each.peer == link.peer]
    keep = _subnet_advice(others, link)
    fixed = facts.environment.get("TORCH_RESILIENT_LISTEN_PORT", "")
    number = fixed or "29600"
    opened = (
        f"`iptables -I INPUT -p tcp --dport {number} -j ACCEPT` on both hosts"
        if fixed
        else f"`export TORCH_RESILIENT_LISTEN_PORT={number}` (each process of a host needs its "
        f"own) and `iptables -I INPUT -p tcp --dport {number} -j ACCEPT` on both hosts"
    )
    why = "this way is not used"
    relays = over_relays(others, link.peer)
    if not keep and relays:
        ranks = ", ".join(map(str, relays))
        why = (
            f"these two ranks reach each other only over rank {ranks}, whose NIC is shared, and "
            "which must not fail"
        )
    elif not keep:
        why = "no way is left between these two ranks: every operation between them fails"
    error = link.last_error
    if "no answer" in error or "timed out" in error.lower():
        cause = "packets are dropped: a firewall, or a network that the two hosts do not share"
        remedy = opened
    elif "refused" in error:
        cause = "nobody listens at that address: a firewall rejects, or the address is another's"
        remedy = opened
    elif "unreachable" in error.lower() or "No route" in error:
        cause = "there is no route to that address"
        remedy = (
            "a route between the two networks (`ip route get ADDRESS` shows what is tried), or one "
            "network that both hosts share: `export TORCH_RESILIENT_INTERFACE=...`"
        )
    else:
        cause = "see the text"
        remedy = "`TORCH_RESILIENT_LOG_LEVEL=info` on both: each end logs what it sees"
    if keep:
        remedy = (
            f"if it is not meant for this job: `export TORCH_RESILIENT_INTERFACE={keep}`; "
            f"otherwise {remedy}"
        )
    return Finding("firewall", where, error, f"{cause}; {why}", remedy)


def check_windows(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Whether the maximum in flight over all connections fills a long link."""
    by_rank = {facts.rank: facts for facts in all_facts}
    told = set()
    for facts in all_facts:
        if facts.socket_buffer_bytes:
            continue  # the user's choice
        for peer, round_trip_s in sorted(facts.round_trips_s.items()):
            other = by_rank.get(peer)
            if other is None or other.host_key == facts.host_key or round_trip_s < _LONG_WAY_S:
                continue
            # Datagrams, below path 0, have no windows.
            nics = {
                link.nic
                for link in facts.links
                if link.peer == peer and link.state == "up" and link.kind == "tcp"
            }
            for nic in sorted(nics):
                finding = _window_finding(facts, other, nic, round_trip_s)
                key = (facts.host_key, other.host_key, nic)
                if finding is not None and key not in told:
                    told.add(key)
                    yield finding


def check_slow_start(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """Whether connections to far hosts begin slowly again after each idle second."""
    by_rank = {facts.rank: facts for facts in all_facts}
    told = set()
    for facts in all_facts:
        # Root may use all that is available.
        allowed = "available" if facts.buffers_forced else "allowed"
        controls = facts.sysctl.get(f"net.ipv4.tcp_{allowed}_congestion_control", "").split()
        far = {
            peer: round_trip_s
            for peer, round_trip_s in facts.round_trips_s.items()
            if round_trip_s >= _LONG_WAY_S
            and peer in by_rank
            and by_rank[peer].host_key != facts.host_key
        }
        if (
            not far
            or "bbr" in controls
            or facts.sysctl.get("net.ipv4.tcp_slow_start_after_idle") != "1"
            or facts.host_key in told
        ):
            continue
        told.add(facts.host_key)
        peer, round_trip_s = max(far.items(), key=lambda each: each[1])
        yield Finding(
            "slow-start",
            f"{facts.where} - {by_rank[peer].where}",
            f"the round trip is {round_trip_s * 1e3:.0f} ms, "
            "net.ipv4.tcp_slow_start_after_idle is 1, and bbr may not be used",
            "after an idle second, operations of up to 4 MiB take 2 to 5 times as long as the link "
            "needs",
            "`sysctl -w net.ipv4.tcp_slow_start_after_idle=0` on both hosts; or `modprobe tcp_bbr` "
            'and `sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"`',
        )


def _max(facts: Facts, name: str) -> int | None:
    """The last of the three numbers of tcp_rmem or tcp_wmem."""
    words = facts.sysctl.get(f"net.ipv4.{name}", "").split()
    return int(words[2]) if len(words) == 3 and words[2].isdecimal() else None


def _raised(facts: Facts, limit: str, tuned: int, wanted: int) -> int:
    """The buffer of a connection for which the backend asks for `wanted` bytes."""
    most = facts.sysctl.get(f"net.core.{limit}", "")
    allowed = 2 * int(most) if most.isdecimal() else 0
    return max(tuned, wanted if facts.buffers_forced else min(wanted, allowed))


def _window_bytes(facts: Facts, other: Facts, round_trip_s: float) -> int | None:
    """Maximum bytes in flight on a connection; None if unknown."""
    sends, receives = _max(facts, "tcp_wmem"), _max(other, "tcp_rmem")
    if not sends or not receives:
        return None
    # About half of a receive buffer is window; packet headers take the rest.
    window = min(sends, receives // 2)
    if facts.wan_connections:
        return window  # explicit number: the system sizes the buffers
    wanted = min(_WINDOW_MAX_BYTES, int(_ASSUMED_BYTES_PER_S * round_trip_s))
    # The first packets fix the window scale.
    rmem_max = other.sysctl.get("net.core.rmem_max", "")
    scale = max(receives, int(rmem_max) if rmem_max.isdecimal() else 0).bit_length() - 16
    announced = 0xFFFF << min(max(scale, 0), 14)
    # As in csrc/transport/socket.cpp: packet headers take a fifth of a send buffer.
    return max(
        window,
        min(
            _raised(facts, "wmem_max", sends, wanted + wanted // 4) // 5 * 4,
            _raised(other, "rmem_max", receives, 2 * min(wanted, announced)) // 2,
        ),
    )


def _window_finding(facts: Facts, other: Facts, nic: str, round_trip_s: float) -> Finding | None:
    interface = facts.interface(nic)
    window = _window_bytes(facts, other, round_trip_s)
    if interface is None or interface.speed_bits_per_s is None or window is None:
        return None
    connections = facts.wan_connections or CONNECTIONS_MAX
    possible = 8 * connections * window / round_trip_s
    if possible >= 0.8 * interface.speed_bits_per_s:
        return None
    need = interface.speed_bits_per_s / 8 * round_trip_s / connections * 2
    size = min(2047, math.ceil(need / _MIB)) * _MIB
    return Finding(
        "socket-buffers",
        f"{facts.where} - {other.where}",
        f"{connections} connections with {window / _MIB:.1f} MiB in flight each carry at most "
        f"{possible / 1e9:.2f} Gbit/s over {round_trip_s * 1e3:.0f} ms; {nic} has "
        f"{interface.speed_bits_per_s / 1e9:.0f} Gbit/s",
        "the limits of TCP's buffers hold back this link",
        f'`sysctl -w net.ipv4.tcp_rmem="4096 131072 {size}" '
        f'net.ipv4.tcp_wmem="4096 16384 {size}"` on both hosts'
        + (
            "; or `unset TORCH_RESILIENT_WAN_CONNECTIONS`"
            if 0 < facts.wan_connections < CONNECTIONS_MAX
            else ""
        ),
    )


def check_job(all_facts: Sequence[Facts]) -> list[Finding]:
    """All findings of a job: each host's findings once, then those between hosts."""
    several_hosts = len({facts.host_key for facts in all_facts}) > 1
    findings = []
    hosts: set[tuple[str, str]] = set()
    for facts in all_facts:
        for finding in check_host(facts, several_hosts):
            # All ranks of a host see the same problems.
            key = (facts.host_key, finding.check + finding.seen)
            if key not in hosts:
                hosts.add(key)
                findings.append(finding)
    findings += check_versions(all_facts)
    findings += check_links(all_facts)
    findings += check_windows(all_facts)
    findings += check_slow_start(all_facts)
    findings += check_clocks(all_facts)
    return findings


# ---- a host and port ---------------------------------------------------------------------------


@dataclass
class Target:
    """The result of an attempt to connect to a host and port.

    `tries`: (address, error) in the order of the resolver; an empty error: connected.
    """

    host: str
    port: int
    resolve_error: str = ""
    tries: list[tuple[str, str]] = field(default_factory=list)
    took_s: float = 0.0


def check_target(facts: Facts, target: Target) -> list[Finding]:
    """Whether a process on this host could reach it."""
    where = f"{facts.host} - {target.host}:{target.port}"
    if target.resolve_error:
        return [
            Finding(
                "name",
                where,
                f"the name {target.host} leads nowhere: {target.resolve_error}",
                "no process of this host can find it",
                f"`echo 'ADDRESS {target.host}' >> /etc/hosts` with its address, or use that",
            )
        ]
    failed = [(address, error) for address, error in target.tries if error]
    if len(failed) < len(target.tries):
        # Each address family without an answer costs its timeout before the next is tried.
        dead = [address for address, error in failed if "no answer" in error]
        answers = [address for address, error in target.tries if not error]
        if dead:
            return [
                Finding(
                    "address-family",
                    where,
                    f"{target.host} leads to {', '.join(address for address, _ in target.tries)}, "
                    f"and {', '.join(dead)} does not answer",
                    "each attempt to connect waits for its time-out first",
                    f"`export MASTER_ADDR={answers[0]}`, the number that answers; or take the "
                    "other one out of the name server or /etc/hosts",
                )
            ]
        return []
    errors = "; ".join(f"{address}: {error}" for address, error in failed)
    refused = all("refused" in error for _, error in failed)
    return [
        Finding(
            "port",
            where,
            errors,
            "nobody listens there, or a firewall rejects"
            if refused
            else "packets are dropped by a firewall, or the host is not on this network",
            (
                f"start what should listen first (`ss -ltn 'sport = :{target.port}'` there); then "
                if refused
                else ""
            )
            + f"`iptables -I INPUT -p tcp --dport {target.port} -j ACCEPT` on {target.host}",
        )
    ]
