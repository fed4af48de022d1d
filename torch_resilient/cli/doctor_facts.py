"""Collects the facts of `torch-resilient doctor` about its host. Changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import ipaddress
import os
import platform
import resource
import socket
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

from torch_resilient._version import __version__
from torch_resilient.cli import doctor_rdma, third_party
from torch_resilient.cli.doctor_checks import Facts, Interface, Target

_CONNECT_TIMEOUT_S = 5.0
_SYSCTL = (
    "net.core.rmem_max",
    "net.core.wmem_max",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_wmem",
    "net.ipv4.tcp_moderate_rcvbuf",
    "net.ipv4.tcp_mtu_probing",
    "net.ipv4.tcp_slow_start_after_idle",
    "net.ipv4.tcp_available_congestion_control",
    "net.ipv4.tcp_allowed_congestion_control",
)
# Reported with all variables of this package; the values of secrets are omitted.
_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "LOCAL_WORLD_SIZE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
)
# Versions that are checked against third_party/versions.toml.
_SUPPORTED = ("python", "torch")
_IFF_UP, _IFF_RUNNING = 0x1, 0x40
_SIOCGIFADDR = 0x8915
_SO_SNDBUFFORCE = 32
_TRIAL_S = 20.0
_GPU_TRIAL_BYTES = 2 << 20


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def interfaces() -> list[Interface]:
    """Those of this network namespace, loopback included."""
    found = []
    for _, name in socket.if_nameindex():
        folder = f"/sys/class/net/{name}"
        flags, mtu, speed = (_read(f"{folder}/{each}") for each in ("flags", "mtu", "speed"))
        if not mtu:
            continue  # gone meanwhile, or a /sys of another namespace
        bits = int(flags or "0", 16)
        # Virtual interfaces report -1 or similar.
        known = speed.isdecimal() and int(speed) > 0
        found.append(
            Interface(
                name,
                up=bits & _IFF_UP != 0 and _read(f"{folder}/carrier") != "0",
                mtu_bytes=int(mtu),
                speed_bits_per_s=float(speed) * 1e6 if known else None,
            )
        )
    return found


def interface_of(address: str) -> str:
    """The name of the interface that has the address, or "?"."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6:
        for line in _read("/proc/net/if_inet6").splitlines():
            words = line.split()
            if len(words) == 6 and int(words[0], 16) == int(ip):
                return words[5]
        return "?"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if answer[20:24] == ip.packed:
                    return name
    return "?"


def addresses_of(name: str) -> list[str]:
    """The addresses of a name; empty if it does not resolve."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def toward(host: str) -> tuple[str, str] | None:
    """(interface, address) that packets to `host` leave from; sends nothing."""
    for address in addresses_of(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # Also fails if the kernel lacks the address family.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            local = str(probe.getsockname()[0])
            return interface_of(local), local
    return None


def reverse_lookup_s(address: str) -> float:
    """How long torch's store takes to look up the name of a peer at `address`, in seconds."""
    with contextlib.suppress(ValueError):
        if isinstance(ipaddress.ip_address(address), ipaddress.IPv4Address):
            address = f"::ffff:{address}"  # as a dual-stack socket has it
    begun = time.monotonic()
    with contextlib.suppress(OSError):
        socket.getnameinfo((address, 0), 0)
    return time.monotonic() - begun


def hosts_line(name: str) -> str:
    """The line of /etc/hosts that gives `name` an address of loopback, if any."""
    for line in _read("/etc/hosts").splitlines():
        words = line.partition("#")[0].split()
        if len(words) > 1 and name in words[1:] and words[0].startswith("127."):
            return " ".join(words)
    return ""


def is_remote_name(host: str | None) -> bool:
    """Whether the name is meant for a host that others can reach."""
    if host is None or host == "localhost":
        return False
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return True


def host_key() -> str:
    """Equal for processes that share the machine, the network namespace and the host name."""
    try:
        namespace = os.stat("/proc/self/ns/net")
        where = f"{namespace.st_dev}:{namespace.st_ino}"
    except OSError:
        where = ""
    return " ".join((socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), where))


def collect(master: str = "") -> Facts:
    """Facts that need no trial; `master`: MASTER_ADDR, if it is set."""
    name = socket.gethostname()
    environment = {
        key: "(set)" if "SECRET" in key else value
        for key, value in os.environ.items()
        if (key.startswith("TORCH_RESILIENT_") or key in _VARIABLES) and value
    }
    shm_bytes = None
    with contextlib.suppress(OSError):
        shm = os.statvfs("/dev/shm")
        shm_bytes = shm.f_frsize * shm.f_blocks
    sysctl = {each: _read("/proc/sys/" + each.replace(".", "/")) for each in _SYSCTL}
    master_addresses = addresses_of(master) if master else []
    facts = Facts(
        host=name,
        host_key=host_key(),
        versions={"python": platform.python_version(), "torch_resilient": __version__},
        name_addresses=addresses_of(name),
        hosts_line=hosts_line(master or name),
        master=master,
        master_addresses=master_addresses,
        # In a job on one host, ranks look up only the name of that host.
        reverse_lookups_s={
            each: reverse_lookup_s(each) for each in master_addresses if is_remote_name(each)
        },
        toward_master=toward(master) if master else None,
        interfaces=interfaces(),
        environment=environment,
        sysctl={key: value for key, value in sysctl.items() if value},
        shm_bytes=shm_bytes,
        nofile=resource.getrlimit(resource.RLIMIT_NOFILE),
        buffers_forced=_may_force_buffers(),
        rdma=doctor_rdma.collect(),
    )
    with contextlib.suppress(FileNotFoundError):  # installed without the list
        listed = third_party.table()
        facts.supported = {name: listed[name].versions for name in _SUPPORTED}
    _look_at_build(facts)
    return facts


def _may_force_buffers() -> bool:
    """Whether buffers may be larger than net.core.rmem_max and wmem_max: with CAP_NET_ADMIN."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 1 << 20)
        except OSError:
            return False
    return True


def _look_at_build(facts: Facts) -> None:
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        facts.torch_error = f"torch cannot be imported: {error}"
        return
    facts.versions["torch"] = str(torch.__version__)
    if not dist.is_available():
        facts.torch_error = f"torch {torch.__version__} was built without torch.distributed"
        return
    with contextlib.suppress(ModuleNotFoundError):
        built = importlib.import_module("torch_resilient._build_info")
        facts.built_for = str(built.TORCH_VERSION)
    from torch_resilient import _native
    from torch_resilient._observe import endpoint, recorder
    from torch_resilient.pipelining import recording

    try:
        native = _native.load()
    except ImportError as error:
        facts.torch_error = str(error)
        return
    facts.known_variables = [
        *(row["variable"] for row in native.option_table()),
        *(module.VARIABLE for module in (endpoint, recorder, recording)),
        "TORCH_RESILIENT_CUDA",  # setup.py
        "TORCH_RESILIENT_VERBS",
    ]
    if facts.rdma is not None:
        doctor_rdma.look(facts.rdma, *native.rdma_ports())
        if any(port.is_seen for port in facts.rdma.ports):
            tensors = _tensors_on_gpus()
            addresses = {gpu: tensor.data_ptr() for gpu, tensor in tensors.items()}
            doctor_rdma.look_at_gpus(facts.rdma, addresses, native.rdma_gpu_way)
    with contextlib.suppress(ValueError):  # the trial reports it
        options = native.Options()
        facts.socket_buffer_bytes = options.socket_buffer_bytes
        facts.wan_connections = options.wan_connections


def _tensors_on_gpus() -> dict[int, torch.Tensor]:
    """A tensor on each GPU that has room; in a torchrun job on that of this rank only."""
    import torch

    if not torch.cuda.is_available():
        return {}
    count = torch.cuda.device_count()
    local = os.environ.get("LOCAL_RANK", "")
    found = {}
    for gpu in [int(local) % count] if local.isdecimal() else range(count):
        with contextlib.suppress(RuntimeError):  # no memory is left
            found[gpu] = torch.empty(_GPU_TRIAL_BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
    return found


def start_no_watchers() -> None:
    """Keeps trials from leaving records and sockets in the job's folders.

    Raises ValueError, as the job would, if the variables that enable them are invalid.
    """
    from torch_resilient._observe import endpoint, observers, recorder

    observers.check()
    for module in (endpoint, recorder):
        os.environ.pop(module.VARIABLE, None)


def try_backend(facts: Facts) -> None:
    """Starts the backend in this process alone, with the environment's settings, and ends it."""
    if facts.torch_error:
        return
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    try:
        start_no_watchers()
        dist.init_process_group(
            "resilient",
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timedelta(seconds=_TRIAL_S),
        )
        dist.all_reduce(torch.ones(1))
    except (RuntimeError, ValueError) as error:
        facts.backend_error = first_line(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def first_line(error: Exception) -> str:
    """The first line of its text, without the stacks that torch adds."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def try_target(host: str, port: int) -> Target:
    """Connects to each address of `host`, in the resolver's order."""
    target = Target(host, port)
    began_s = time.monotonic()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        target.resolve_error = error.strerror or str(error)
        return target
    for family, kind, protocol, _, address in found:
        text = ""
        try:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(_CONNECT_TIMEOUT_S)
                connection.connect(address)
        except TimeoutError:
            text = f"no answer in {_CONNECT_TIMEOUT_S:g} s"
        except OSError as error:
            text = error.strerror or str(error)
        target.tries.append((str(address[0]), text))
    target.took_s = time.monotonic() - began_s
    return target
