"""The compiled module (csrc/backend/bindings.cpp)."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict, overload

from torch.distributed import ProcessGroup, Work

class OptionRow(TypedDict):
    kind: str
    name: str
    variable: str
    default: int | float | bool | str
    min: float
    max: float
    unit: str
    doc: str

class RdmaPort(TypedDict):
    device: str
    port: int
    gid_index: int
    gid: bytes
    nic: str
    mtu_bytes: int
    active: bool

class CallError(ValueError, RuntimeError):
    """The arguments of an operation cannot be used; nothing was sent."""

class _Bytes:
    """A size: set as a number or as text such as "64M", read as a number."""

    @overload
    def __get__(self, instance: None, owner: type[Options]) -> _Bytes: ...
    @overload
    def __get__(self, instance: Options, owner: type[Options]) -> int: ...
    def __set__(self, instance: Options, value: int | str) -> None: ...

class Options:
    """Settings of a group and, for the first one, of the process's engine."""

    # c10d's own
    @property
    def backend(self) -> str: ...
    _timeout: timedelta
    group_name: str

    # The table in csrc/base/options.def.
    listen_port: int
    interface: str
    site: str
    collective_algorithm: str
    paths_same_host: int
    shared_memory: bool
    shared_ring_bytes: _Bytes
    wan_connections: int | str
    wan_rate_limit: str
    wan_dscp: str
    wan_congestion_control: str
    wan: str
    wan_recovery: str
    wan_parity: str
    relay: str
    relays_per_peer: int
    relay_bytes: _Bytes
    rdma: str
    rdma_devices: str
    rdma_gid_index: str
    rdma_timeout: int
    rdma_retries: int
    rdma_zero_copy_from_bytes: _Bytes
    rdma_registered_bytes: _Bytes
    nic_policy: str
    nic_classes: str
    chunk_bytes: _Bytes
    starvation_bytes: _Bytes
    socket_buffer_bytes: _Bytes
    eager_bytes: _Bytes
    staging_bytes: _Bytes
    copy_bytes: _Bytes
    stage_after_s: float
    connect_timeout_s: float
    handshake_timeout_s: float
    max_pending_handshakes: int
    heartbeat_s: float
    suspect_after_s: float
    stall_timeout_s: float
    reconnect_min_s: float
    reconnect_max_s: float
    hold_down_max_s: float
    linger_s: float
    eager_connect: bool
    secret: str
    secret_file: str
    encryption: str
    tls_cert: str
    tls_key: str
    tls_ca: str
    log_level: str
    flight_recorder_entries: int
    dump_dir: str
    dump_on_sigusr1: bool
    faults: str

    def __init__(
        self,
        *,
        listen_port: int = ...,
        interface: str = ...,
        site: str = ...,
        collective_algorithm: str = ...,
        paths_same_host: int = ...,
        shared_memory: bool = ...,
        shared_ring_bytes: int | str = ...,
        wan_connections: int | str = ...,
        wan_rate_limit: str = ...,
        wan_dscp: str = ...,
        wan_congestion_control: str = ...,
        wan: str = ...,
        wan_recovery: str = ...,
        wan_parity: str = ...,
        relay: str = ...,
        relays_per_peer: int = ...,
        relay_bytes: int | str = ...,
        rdma: str = ...,
        rdma_devices: str = ...,
        rdma_gid_index: str = ...,
        rdma_timeout: int = ...,
        rdma_retries: int = ...,
        rdma_zero_copy_from_bytes: _Bytes = ...,
        rdma_registered_bytes: _Bytes = ...,
        nic_policy: str = ...,
        nic_classes: str = ...,
        chunk_bytes: int | str = ...,
        starvation_bytes: int | str = ...,
        socket_buffer_bytes: int | str = ...,
        eager_bytes: int | str = ...,
        staging_bytes: int | str = ...,
        copy_bytes: int | str = ...,
        stage_after_s: float = ...,
        connect_timeout_s: float = ...,
        handshake_timeout_s: float = ...,
        max_pending_handshakes: int = ...,
        heartbeat_s: float = ...,
        suspect_after_s: float = ...,
        stall_timeout_s: float = ...,
        reconnect_min_s: float = ...,
        reconnect_max_s: float = ...,
        hold_down_max_s: float = ...,
        linger_s: float = ...,
        eager_connect: bool = ...,
        secret: str = ...,
        secret_file: str = ...,
        encryption: str = ...,
        tls_cert: str = ...,
        tls_key: str = ...,
        tls_ca: str = ...,
        log_level: str = ...,
        flight_recorder_entries: int = ...,
        dump_dir: str = ...,
        dump_on_sigusr1: bool = ...,
        faults: str = ...,
    ) -> None: ...
    def __copy__(self) -> Options: ...
    def __deepcopy__(self, memo: dict[int, Any]) -> Options: ...
    def validate(self) -> None: ...

class ProcessGroupResilient:
    """One group, as torch.distributed's ProcessGroup holds it."""

    @property
    def options(self) -> Options: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def abort(self) -> None: ...
    def shutdown(self) -> None: ...

class RecordSeal:
    """Makes and checks the MAC of records in the store."""

    def protect(self, key: str, value: str) -> str: ...
    def open(self, key: str, record: str) -> str:
        """Raises ValueError if the record is not authentic."""

class OrderedHook:
    """The collectives of a hook that runs for one bucket after the other, on one thread."""

    def begin(self, stamp: int) -> None:
        """This thread runs the hook from now on for a bucket that was handed over at `stamp`."""
    @staticmethod
    def end() -> None: ...

def call_stamp() -> int: ...
def create(dist_opts: Any, options: Options | None = None) -> ProcessGroupResilient: ...
def stats(group: ProcessGroupResilient | ProcessGroup) -> dict[str, Any]: ...
def record_seal(group: ProcessGroupResilient | ProcessGroup) -> RecordSeal | None: ...
def topology(group: ProcessGroupResilient | ProcessGroup) -> dict[str, Any]: ...
def set_topology(
    group: ProcessGroupResilient | ProcessGroup, sites: Sequence[str], algorithm: str
) -> None: ...
def wait_any(works: Sequence[Work], timeout_s: float | None = None) -> int | None: ...
def ended_at(work: Work) -> float | None: ...
def dump() -> str: ...
def option_table() -> list[OptionRow]: ...
def rdma_ports() -> tuple[list[RdmaPort], str]: ...
def rdma_gpu_way(device: str, gpu: int, address: int) -> tuple[str, str]: ...
def set_traffic_class(traffic_class: int) -> int: ...
def set_tolerance(threshold: float, max_drop_fraction: float) -> tuple[float, float]: ...
def zero_filled(work: Work) -> list[tuple[int, int]]: ...
def set_log_level(level: str) -> None: ...
def add_fault(rule: str) -> int: ...
def remove_fault(fault: int) -> None: ...
def set_fault_step(step: int) -> None: ...
def engine_running() -> bool: ...
def end_process() -> None: ...
