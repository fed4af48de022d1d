"""The part of `torch-resilient doctor` about RDMA: facts from /sys, /dev and libibverbs; checks.

Hosts without RDMA devices have neither facts nor findings here.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_resilient.cli.doctor_checks import Facts, Finding, Link, Rdma, RdmaGpu, RdmaPort

if TYPE_CHECKING:
    from torch_resilient import _C

# As in csrc/transport/verbs_end.cpp: the memory of one queue pair.
_MEMORY_BYTES = 5 << 20
_MIB = 1 << 20
_CAP_IPC_LOCK = 14
_WORKS = ("up", "reserve", "proving")
_DEVICE_RULES = (
    "of a container: `docker run --device=/dev/infiniband ...`, or the RDMA device plugin of "
    "Kubernetes (a mount of the files gives no right to them); of a service: "
    "`DeviceAllow=char-infiniband_verbs rw`"
)
_LOCK_MORE = (
    "`ulimit -l unlimited`, or `* - memlock unlimited` in /etc/security/limits.conf; of a "
    "container: `docker run --ulimit memlock=-1`; of a service: LimitMEMLOCK=infinity"
)
_INSTALL = "`apt install libibverbs1 ibverbs-providers`"
# By a part of the text of csrc/verbs and csrc/transport/verbs_system.cpp; a test compares.
_REMEDIES = (
    ("RLIMIT_MEMLOCK", _LOCK_MORE),
    ("access to /dev/infiniband", _DEVICE_RULES),
    ("built without them", "`apt install libibverbs-dev`, and build torch_resilient again"),
    ("of another build", "build and install torch_resilient again"),
    ("libibverbs", f"{_INSTALL}, or what the text names"),
)
# The answer of the other end to an offer; as in csrc/delegate/connect_verbs.cpp.
_FAR_END = "the far end: "


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # an empty entry of a table of addresses is an error, too
        return ""


def _address(gid: str) -> str:
    """The text of a GID as an IP address; an IPv4 address as such."""
    try:
        address = ipaddress.IPv6Address(gid)
    except ValueError:
        return gid
    return str(address.ipv4_mapped or address)


def _port(folder: Path, device: str, firmware: str) -> RdmaPort:
    found = RdmaPort(
        device,
        int(folder.name),
        state=_read(folder / "state").partition(": ")[2] or "unknown",
        link_layer=_read(folder / "link_layer"),
        firmware=firmware,
    )
    entries = [entry for entry in (folder / "gids").iterdir() if entry.name.isdecimal()]
    for entry in sorted(entries, key=lambda each: int(each.name)):
        kind = _read(folder / "gid_attrs" / "types" / entry.name)
        if not kind:
            continue  # an empty entry
        found.nic = found.nic or _read(folder / "gid_attrs" / "ndevs" / entry.name)
        found.gids.append(f"{entry.name}: {kind} {_address(_read(entry))}")
    return found


def _error_of_open(node: Path) -> int:
    """The errno of opening a device file; 0 if it opens. The rights of root and of the file say
    nothing about the device rules of a container."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.errno or 0
    return 0


def _holds_capability(number: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", _read(Path("/proc/self/status")), re.MULTILINE)
    return match is not None and int(match[1], 16) >> number & 1 == 1


def collect(root: Path = Path("/")) -> Rdma | None:
    """The RDMA devices of this host and what a process needs for them; None without a device."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        return None
    nodes = sorted((root / "dev/infiniband").glob("uverbs*"))
    errors = {node.name: _error_of_open(node) for node in nodes}
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Rdma(
        ports=[
            _port(folder, device.name, _read(device / "fw_ver"))
            for device in devices
            for folder in sorted((device / "ports").glob("*"))
        ],
        has_module=(root / "sys/class/infiniband_verbs").exists(),
        nodes=[node.name for node in nodes],
        denied=[name for name, error in errors.items() if error == errno.EACCES],
        refused=[name for name, error in errors.items() if error == errno.EPERM],
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        may_lock=_holds_capability(_CAP_IPC_LOCK),
    )


def look(rdma: Rdma, ports: Sequence[_C.RdmaPort], why: str) -> None:
    """Adds what the backend itself sees: `ports` and `why` of rdma_ports()."""
    rdma.verbs_error = why
    for port in rdma.ports:
        for each in ports:
            if (port.device, port.port) == (each["device"], each["port"]):
                port.mtu_bytes = each["mtu_bytes"]
                port.is_seen = True


def look_at_gpus(
    rdma: Rdma, tensors: Mapping[int, int], way: Callable[[str, int, int], tuple[str, str]]
) -> None:
    """Adds the pairs of devices and GPUs.

    `tensors`: an address on each GPU; `way`: rdma_gpu_way() of the extension.
    """
    devices = dict.fromkeys(port.device for port in rdma.ports if port.is_seen)
    rdma.gpus = [
        RdmaGpu(device, gpu, *way(device, gpu, address))
        for device in devices
        for gpu, address in tensors.items()
    ]


def _about_gpu(pair: RdmaGpu) -> str:
    because = f" ({pair.why})" if pair.why else ""
    if pair.way == "staging":
        found = f"its memory cannot be registered{because}"
    else:
        found = f"its memory can be registered by {pair.way}{because}, which is not used yet"
    return (
        f"RDMA {pair.device} and GPU {pair.gpu}: {found}; tensors are copied through pinned "
        "host memory"
    )


def about(facts: Facts) -> list[str]:
    """One line for each port, and for each pair of a device and a GPU."""
    gpus = facts.rdma.gpus if facts.rdma is not None else []
    return [
        f"{facts.where}: RDMA {port.device} port {port.port} on {port.nic or 'no interface'}: "
        f"{port.state}, {port.link_layer or 'unknown link'}, "
        f"MTU {port.mtu_bytes or 'unknown'}, firmware {port.firmware or 'unknown'}; "
        f"addresses {', '.join(port.gids) or 'none'}"
        for port in (facts.rdma.ports if facts.rdma is not None else ())
    ] + [f"{facts.where}: {_about_gpu(pair)}" for pair in gpus]


def check_rdma(facts: Facts) -> Iterator[Finding]:
    """The reasons that keep this process from the devices of its host."""
    rdma = facts.rdma
    if rdma is None or facts.environment.get("TORCH_RESILIENT_RDMA") == "off":
        return
    unused = "RDMA is not used; connections carry everything"
    names = ", ".join(dict.fromkeys(port.device for port in rdma.ports))
    if not rdma.has_module:
        seen, remedy = "but the module ib_uverbs is not loaded", "`modprobe ib_uverbs`"
    elif not rdma.nodes:
        seen = "but there is no /dev/infiniband/uverbs*"
        remedy = (
            "`docker run --device=/dev/infiniband ...`; outside of a container `modprobe ib_uverbs`"
        )
    elif rdma.denied:
        seen = f"but this user may not open /dev/infiniband/{rdma.denied[0]}"
        remedy = '`chmod 666 /dev/infiniband/uverbs*`, or a udev rule with MODE="0666"'
    elif rdma.refused:
        seen = f"but the kernel refuses to open /dev/infiniband/{rdma.refused[0]} (EPERM)"
        remedy = _DEVICE_RULES
    elif rdma.verbs_error:
        seen = f"but: {rdma.verbs_error}"
        remedy = _remedy_of(rdma.verbs_error)
    else:
        yield from _check_ports(facts, rdma)
        yield from _check_memlock(facts, rdma)
        return
    yield Finding("rdma", facts.where, f"this host has {names}, {seen}", unused, remedy)


def _remedy_of(error: str) -> str:
    """The remedy for an error of the backend about RDMA on one host."""
    return next(
        (remedy for part, remedy in _REMEDIES if part in error),
        "the text names the cause; `dmesg` and `rdma link show` may say more",
    )


def _check_ports(facts: Facts, rdma: Rdma) -> Iterator[Finding]:
    for port in rdma.ports:
        interface = facts.interface(port.nic)
        name = f"port {port.port} of {port.device}"
        if port.link_layer != "Ethernet" or interface is None or not interface.up:
            continue
        if port.state != "ACTIVE":
            yield Finding(
                "rdma-port",
                facts.where,
                f"{name} is {port.state}, although its interface {port.nic} is up",
                "RDMA is not used there; connections carry everything",
                f"`rdma link show {port.device}/{port.port}` and `dmesg`; "
                f"`ip link set {port.nic} down` and `up` begins anew",
            )
        elif port.gids and not any("v2" in gid for gid in port.gids):
            yield Finding(
                "rdma-gid",
                facts.where,
                f"{name} has addresses of RoCE v1 only",
                "RoCE v1 crosses no router, and the backend does not use it",
                f"`cma_roce_mode -d {port.device} -p {port.port} -m 2`, and an IP address on "
                f"{port.nic}",
            )


def _check_memlock(facts: Facts, rdma: Rdma) -> Iterator[Finding]:
    ports = sum(port.is_seen and port.state == "ACTIVE" for port in rdma.ports)
    local = facts.environment.get("LOCAL_WORLD_SIZE", "")
    on_host = int(local) if local.isdecimal() else 1
    peers = max(1, facts.world_size - on_host)
    need = _MEMORY_BYTES * ports * peers
    limit = rdma.memlock_bytes
    if limit is not None and limit < need and not rdma.may_lock:
        yield Finding(
            "memlock",
            facts.where,
            f"this process may lock {limit / _MIB:.1f} MiB of memory, and RDMA with {peers} other "
            f"ranks on {ports} ports takes {need / _MIB:.0f} MiB",
            "registration fails beyond the limit: connections carry everything for those ranks",
            _LOCK_MORE,
        )


def check_pairs(all_facts: Sequence[Facts]) -> Iterator[Finding]:
    """RDMA between the ranks of a job: paths that do not work, and MTUs that differ."""
    by_rank = {facts.rank: facts for facts in all_facts}
    told = set()
    for facts in all_facts:
        for link in facts.links:
            other = by_rank.get(link.peer)
            ends = {(facts.host_key, link.nic)}
            if other is None or link.kind != "rdma":
                continue
            ends.add((other.host_key, link.remote_nic))
            finding = _pair_finding(facts, other, link)
            if finding is not None and frozenset(ends) not in told:
                told.add(frozenset(ends))
                yield finding


def _remedy_of_pair(facts: Facts, other: Facts, link: Link) -> str:
    """The remedy for a path of RDMA that does not work, by the reason that this end knows."""
    is_far = link.last_error.startswith(_FAR_END)
    host, nic = (other, link.remote_nic) if is_far else (facts, link.nic)
    if "uses no RDMA" in link.last_error:
        if host.environment.get("TORCH_RESILIENT_RDMA") == "off":
            return f"`unset TORCH_RESILIENT_RDMA` on {host.where}"
        if host.rdma is None:
            return (
                f"{host.where} has no RDMA device: give it one, or set TORCH_RESILIENT_RDMA=off on "
                "all ranks. If it is a container on a host with one: `docker run "
                "--device=/dev/infiniband ...`"
            )
        return f"see what `torch-resilient doctor` says of RDMA on {host.where}"
    if "has the address of this route" in link.last_error:
        nics = ",".join(
            dict.fromkeys(port.nic for port in (host.rdma.ports if host.rdma else ()) if port.nic)
        )
        choose = f"`export TORCH_RESILIENT_INTERFACE={nics}` there, or " if nics else ""
        return (
            f"{host.where} has no RDMA device on {nic}: {choose}"
            "`export TORCH_RESILIENT_RDMA=off` on all ranks"
        )
    if "the port of " in link.last_error:
        return f"`rdma link show` and `dmesg` on {host.where}; `ip link set {nic} up`"
    for part, remedy in _REMEDIES:
        if part in link.last_error:
            return f"on {host.where}: {remedy}"
    return (
        "`iptables -I INPUT -p udp --dport 4791 -j ACCEPT` on both hosts (RoCE v2); check that "
        "the switches carry it: PFC and ECN cannot be seen from here"
    )


def _pair_finding(facts: Facts, other: Facts, link: Link) -> Finding | None:
    where = f"{facts.where} {link.nic} - {other.where} {link.remote_nic}"
    if link.state not in _WORKS:
        if not link.last_error:
            return None  # an end without a device
        return Finding(
            "rdma-pair",
            where,
            link.last_error,
            "RDMA does not work between these interfaces; connections carry everything",
            _remedy_of_pair(facts, other, link),
        )
    mtus = [
        port.mtu_bytes
        for each, nic in ((facts, link.nic), (other, link.remote_nic))
        for port in (each.rdma.ports if each.rdma is not None else ())
        if port.nic == nic and port.mtu_bytes
    ]
    if len(mtus) == 2 and mtus[0] != mtus[1]:
        return Finding(
            "rdma-mtu",
            where,
            f"the MTUs of the RDMA ports are {mtus[0]} and {mtus[1]} bytes",
            f"packets have {min(mtus)} bytes; larger ones cost less",
            f"the same MTU on both interfaces: `ip link set dev {link.nic} mtu 4200`, where the "
            "switches carry it",
        )
    return None
