"""Typed values for the backend's knowledge about a group.

This is the only module that reads the dicts of the compiled module. Everything else reads
attributes; `to_dict()` gives JSON where a value leaves the process, and `from_dict()` reads it
back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from torch_resilient import _groups, _native
from torch_resilient._reports import events as event_log
from torch_resilient._reports.events import Event

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "DatagramStats",
    "GroupCounts",
    "GroupStats",
    "ListenerStats",
    "PathKind",
    "PathState",
    "PathStats",
    "PeerState",
    "PeerStats",
    "RdmaStats",
    "Record",
    "TrustFaults",
    "TrustStats",
    "stats",
]

PathKind = Literal["tcp", "shm", "udp", "rdma", "relay"]
PathState = Literal[
    "up", "reserve", "suspect", "stalled", "proving", "connecting", "down", "unused"
]
Encryption = Literal["off", "between_hosts", "always"]
PeerState = Literal["unconnected", "up", "suspect", "dead", "left"]


def _to_json(value: Any) -> Any:
    if isinstance(value, Record | Event):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_to_json(each) for each in value]
    return value


@dataclass(frozen=True, slots=True)
class Record:
    """Base of the values below: attributes for programs, a dict for JSON."""

    # The type of each field that holds another record, or a tuple of them.
    nested: ClassVar[Mapping[str, type[Record | Event]]] = {}

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, nested values included, fit for JSON."""
        return {each.name: _to_json(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict(). Ignores unknown keys.

        Raises KeyError for a missing field, TypeError for a nested value that is no dict.
        """
        return cls(
            **{
                each.name: _from_json(values[each.name], cls.nested.get(each.name))
                for each in fields(cls)
            }
        )


def _from_json(value: Any, record: type[Record | Event] | None) -> Any:
    if isinstance(value, list):
        return tuple(value if record is None else map(record.from_dict, value))
    return value if record is None or value is None else record.from_dict(value)


@dataclass(frozen=True, slots=True)
class DatagramStats(Record):
    """Packet counters of a UDP path since it was made.

    Attributes:
        packet_bytes: payload of a full packet.
        packets: packets sent, of any kind.
        bytes: bytes of these packets, with all headers.
        parity: of these packets, those that carry parity.
        retransmitted: of these packets, retransmissions.
        dropped: of these packets, those that the peer reports as not received.
        drop_rate: fraction of packets dropped lately.
        burst_packets: mean length of a recent burst of drops, in packets.
        pace_bytes_per_s: the rate at which packets may leave.
        carries_up_to_bytes: messages in bursts of up to this size go as datagrams, larger ones over
            the connections: 0 for none of them, 2**64 - 1 for all.
        recovered: received packets that parity has restored.
        zero_filled: received packets that were replaced by zeros within a tolerance.
        duplicates: packets received more than once.
        forged: datagrams discarded because the peer had not sealed them.
    """

    packet_bytes: int
    packets: int
    bytes: int
    parity: int
    retransmitted: int
    dropped: int
    drop_rate: float
    burst_packets: float
    pace_bytes_per_s: float
    carries_up_to_bytes: int
    recovered: int
    zero_filled: int
    duplicates: int
    forged: int


@dataclass(frozen=True, slots=True)
class RdmaStats(Record):
    """Queue pairs of an RDMA path. Counters are sums over all queue pairs that it has had.

    Attributes:
        device, remote_device: of this end and of the peer, such as "mlx5_0"; empty if there has
            been no queue pair.
        port: of this end's device, from 1.
        queue_pair: number at this end; 0 if there is none now.
        mtu_bytes: payload of a full packet; the smaller one of both ends.
        completed: requests that were completed.
        failed: requests that ended their path: no answer after all retries, refused, or flushed
            because the queue pair had failed. Those flushed behind them are not counted.
        sends, receives, reads: requests posted.
        copied_bytes: bytes of frames copied into and out of the path's memory.
        read_bytes: payload that this end has read from tensors of the peer.
        placed_bytes: of these bytes, those that were read straight into tensors.
    """

    device: str
    remote_device: str
    port: int
    queue_pair: int
    mtu_bytes: int
    completed: int
    failed: int
    sends: int
    receives: int
    reads: int
    copied_bytes: int
    read_bytes: int
    placed_bytes: int


@dataclass(frozen=True, slots=True)
class RelayStats(Record):
    """A path over a third rank.

    Attributes:
        rank: of the relay, in the default group; -1 while unknown.
        host: host name of the relay.
        ours: this rank has opened the path, over a rank of its own site.
        window_bytes: what may be on the way to the relay or wait there.
    """

    rank: int
    host: str
    ours: bool
    window_bytes: int


@dataclass(frozen=True, slots=True)
class PathStats(Record):
    """One path to a peer.

    Attributes:
        kind: "tcp" (a connection), "shm" (memory shared with a rank of the same host), "udp"
            (datagrams), "rdma" or "relay" (over another rank).
        index: its number among the peer's paths of this kind, from 0.
        state: "up"; "reserve" (works, not needed now); "suspect" (silent, other paths have taken
            over); "stalled" (silent, and no other path is left); "proving" (back, on probation);
            "connecting"; "down"; "unused".
        nic, remote_nic: interface names; empty where the system chooses.
        local_address, remote_address: "host:port".
        encrypted: what it sends is encrypted and authenticated on the network. False also for
            "shm", which never leaves the host. "relay": from end to end.
        cipher: how, such as "TLS_AES_128_GCM_SHA256"; empty if it is not.
        forward_secret: who records it, and learns the job's secret later, can read none of it.
        bytes_sent, bytes_received: of messages; sent bytes include retransmissions.
        chunks_sent, chunks_retransmitted: chunks of messages.
        times_suspect: how often it was silent for too long.
        reconnects: how often the connection was made again.
        round_trip_s: smoothed, 0 while unknown.
        round_trip_min_s: minimum over the last one to two seconds, 0 while unknown.
        round_trips: how many round trips were measured.
        round_trips_s: the last 32 of them, oldest first.
        goodput_bytes_per_s: smoothed rate of acknowledged bytes.
        capacity_bytes_per_s: estimate of what the path could carry, 0 while unknown.
        last_error: why it broke last, or an empty string.
        datagrams: packet counters of a UDP path, None of any other.
        rdma: queue pair and counters of an RDMA path, None of any other.
        relay: the rank that passes the messages on, None of any other path.
    """

    kind: PathKind
    index: int
    state: PathState
    nic: str
    remote_nic: str
    local_address: str
    remote_address: str
    encrypted: bool
    cipher: str
    forward_secret: bool
    bytes_sent: int
    bytes_received: int
    chunks_sent: int
    chunks_retransmitted: int
    times_suspect: int
    reconnects: int
    round_trip_s: float
    round_trip_min_s: float
    round_trips: int
    round_trips_s: tuple[float, ...]
    goodput_bytes_per_s: float
    capacity_bytes_per_s: float
    last_error: str
    datagrams: DatagramStats | None
    rdma: RdmaStats | None
    relay: RelayStats | None

    nested: ClassVar = {"datagrams": DatagramStats, "rdma": RdmaStats, "relay": RelayStats}

    @property
    def key(self) -> tuple[PathKind, int]:
        """Identifies the path among those of its peer."""
        return self.kind, self.index

    @property
    def name(self) -> str:
        """ "tcp 0", "udp 1" or "shm", for people."""
        return self.kind if self.kind == "shm" else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class PeerStats(Record):
    """One other rank of a group.

    Attributes:
        rank: in the group; in a Snapshot, in the default group.
        host: its host name.
        state: "unconnected", "up", "suspect", "dead" or "left".
        messages_sent: messages that the peer has acknowledged completely.
        messages_received: messages received completely.
        bytes_sent, bytes_received: of messages, each byte counted once.
        deliveries: how many point-to-point messages were timed from the call to the
            acknowledgement of the last byte; at least all large ones.
        deliveries_s: the last 32 of these times, oldest first.
        last_heard_seconds_ago: None before the first sign of life.
        last_error: the last error of any of its paths, or an empty string.
        paths: all paths to it.
    """

    rank: int
    host: str
    state: PeerState
    messages_sent: int
    messages_received: int
    bytes_sent: int
    bytes_received: int
    deliveries: int
    deliveries_s: tuple[float, ...]
    last_heard_seconds_ago: float | None
    last_error: str
    paths: tuple[PathStats, ...]

    nested: ClassVar = {"paths": PathStats}


@dataclass(frozen=True, slots=True)
class ListenerStats(Record):
    """Callers at this process's listening port.

    Any number but `admitted` points at strangers, or at ranks with other settings; the log has
    more.

    Attributes:
        accepted: connections accepted.
        admitted: of these, callers that proved that they belong to the job.
        refused: wrong proof, version or bytes, or not expected.
        timed_out: callers that did not finish the handshake in time.
        broken_off: connections closed by the caller.
        dropped: closed because there were too many callers at a time.
        pending: handshakes in progress now.
    """

    accepted: int
    admitted: int
    refused: int
    timed_out: int
    broken_off: int
    dropped: int
    pending: int


@dataclass(frozen=True, slots=True)
class RelayCounts(Record):
    """Counts of what this process passes on between other ranks.

    Attributes:
        flows: pairs of ranks that have a path over this rank now, each path counted.
        messages: parts of messages passed on.
        bytes: their bytes, with headers.
        held_bytes: bytes in memory now, also of what others have passed on to this rank.
        held_max_bytes: the most that these have been so far.
        refused: messages and flows that were refused: unknown, forged, or beyond `relay_bytes`.
    """

    flows: int
    messages: int
    bytes: int
    held_bytes: int
    held_max_bytes: int
    refused: int


@dataclass(frozen=True, slots=True)
class TrustFaults(Record):
    """Why this process and another one have not become sure of each other, by number of times.

    Both directions: callers at our port, and our own connections.

    Attributes:
        wrong_secret: the other end has another secret, or none.
        plaintext: it came, or wanted us, in plaintext where encryption is required.
        tls: an alert of TLS, or bytes that are none.
        certificate: one of both ends has refused the certificate of the other.
        version: another version of the protocol.
        malformed: no message of a handshake; a port scanner, or a health check.
        timed_out: it was connected, and did not end the handshake.
        record: after the handshake, an encrypted connection was changed or cut on its way. A peer
            that dies may look the same.
    """

    wrong_secret: int
    plaintext: int
    tls: int
    certificate: int
    version: int
    malformed: int
    timed_out: int
    record: int


@dataclass(frozen=True, slots=True)
class TrustStats(Record):
    """How this process protects what it sends (docs/security.md).

    Attributes:
        encryption: which connections are encrypted: "off", "between_hosts" or "always".
        own_secret: a secret was given to the job. Else the store has made one, which it tells to
            everybody who can reach it.
        certificates: in TLS, hosts prove themselves by certificates.
        encrypted, plaintext: handshakes that have ended well, of both directions.
        faults: the others.
    """

    encryption: Encryption
    own_secret: bool
    certificates: bool
    encrypted: int
    plaintext: int
    faults: TrustFaults

    nested: ClassVar = {"faults": TrustFaults}


@dataclass(frozen=True, slots=True)
class GroupCounts(Record):
    """A group as this process sees it, without its peers.

    Attributes:
        group: its name.
        rank, size: of this process, and how many ranks there are.
        collectives: how many were started.
        operations_pending: operations that have begun and not ended.
    """

    group: str
    rank: int
    size: int
    collectives: int
    operations_pending: int


@dataclass(frozen=True, slots=True)
class GroupStats(GroupCounts):
    """All that the backend knows about one group.

    Attributes:
        group, rank, size, collectives, operations_pending: see GroupCounts.
        peers: one entry for each other rank, in order of rank.
        listener: of the process; all its groups share it.
        relay, trust: likewise.
        events: recent decisions and changes of this process, oldest first.
    """

    peers: tuple[PeerStats, ...]
    listener: ListenerStats
    relay: RelayCounts
    trust: TrustStats
    events: tuple[Event, ...]

    nested: ClassVar = {
        "peers": PeerStats,
        "listener": ListenerStats,
        "relay": RelayCounts,
        "trust": TrustStats,
        "events": Event,
    }

    @property
    def counts(self) -> GroupCounts:
        """The same without peers, listener, relay, trust and events."""
        return GroupCounts(*(getattr(self, each.name) for each in fields(GroupCounts)))


def _path(native: dict[str, Any]) -> PathStats:
    round_trips_s, datagrams = tuple(native.pop("round_trips_s")), native.pop("datagrams")
    rdma, relay = native.pop("rdma"), native.pop("relay")
    return PathStats(
        **native,
        round_trips_s=round_trips_s,
        datagrams=None if datagrams is None else DatagramStats(**datagrams),
        rdma=None if rdma is None else RdmaStats(**rdma),
        relay=None if relay is None else RelayStats(**relay),
    )


def _peer(native: dict[str, Any]) -> PeerStats:
    deliveries_s, paths = tuple(native.pop("deliveries_s")), native.pop("paths")
    return PeerStats(**native, deliveries_s=deliveries_s, paths=tuple(map(_path, paths)))


def stats(group: ProcessGroup | None = None) -> GroupStats:
    """A snapshot of what the backend knows about `group` (None: the default group).

    Counters belong to the process's one engine: groups with the same ranks share them.

    Raises ValueError if the group does not use this backend, if this process is no member of it,
    or if no group has been initialized; RuntimeError in a child of fork().
    """
    native: dict[str, Any] = _native.load().stats(_groups.find_backend(group))
    peers, listener = native.pop("peers"), native.pop("listener")
    relay, trust = native.pop("relay"), native.pop("trust")
    faults = TrustFaults(**trust.pop("faults"))
    return GroupStats(
        **native,
        peers=tuple(map(_peer, peers)),
        listener=ListenerStats(**listener),
        relay=RelayCounts(**relay),
        trust=TrustStats(**trust, faults=faults),
        events=event_log.recent(),
    )
