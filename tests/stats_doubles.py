"""Values of stats() and of a process's snapshot, made up: a test gives what it looks at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch_resilient._observe.snapshot import Snapshot
from torch_resilient._reports.stats import (
    DatagramStats,
    GroupCounts,
    GroupStats,
    ListenerStats,
    PathStats,
    PeerStats,
    RdmaStats,
    RelayCounts,
    TrustFaults,
    TrustStats,
)

_LISTENER = ListenerStats(
    accepted=0, admitted=0, refused=0, timed_out=0, broken_off=0, dropped=0, pending=0
)
_FAULTS = TrustFaults(
    wrong_secret=0,
    plaintext=0,
    tls=0,
    certificate=0,
    version=0,
    malformed=0,
    timed_out=0,
    record=0,
)
_TRUST = TrustStats(
    encryption="off", own_secret=False, certificates=False, encrypted=0, plaintext=1, faults=_FAULTS
)
_RELAY = RelayCounts(flows=0, messages=0, bytes=0, held_bytes=0, held_max_bytes=0, refused=0)


def datagram_stats(**values: Any) -> DatagramStats:
    """The statistics of a UDP path that has carried nothing."""
    idle = DatagramStats(
        packet_bytes=1376,
        packets=0,
        bytes=0,
        parity=0,
        retransmitted=0,
        dropped=0,
        drop_rate=0.0,
        burst_packets=1.0,
        pace_bytes_per_s=0.0,
        carries_up_to_bytes=2**64 - 1,
        recovered=0,
        zero_filled=0,
        duplicates=0,
        forged=0,
    )
    return replace(idle, **values)


def rdma_stats(**values: Any) -> RdmaStats:
    """The statistics of an RDMA path that has carried nothing."""
    idle = RdmaStats(
        device="mlx5_0",
        remote_device="mlx5_1",
        port=1,
        queue_pair=17,
        mtu_bytes=4096,
        completed=0,
        failed=0,
        sends=0,
        receives=32,
        reads=0,
        copied_bytes=0,
        read_bytes=0,
        placed_bytes=0,
    )
    return replace(idle, **values)


def path_stats(**values: Any) -> PathStats:
    """The statistics of a connection that is up."""
    up = PathStats(
        kind="tcp",
        index=0,
        state="up",
        nic="eth0",
        remote_nic="eth0",
        local_address="10.0.0.1:1",
        remote_address="10.0.0.2:2",
        encrypted=False,
        cipher="",
        forward_secret=False,
        bytes_sent=1000,
        bytes_received=500,
        chunks_sent=3,
        chunks_retransmitted=0,
        times_suspect=0,
        reconnects=0,
        round_trip_s=0.002,
        round_trip_min_s=0.001,
        round_trips=0,
        round_trips_s=(),
        goodput_bytes_per_s=1e6,
        capacity_bytes_per_s=2e6,
        last_error="",
        datagrams=None,
        rdma=None,
        relay=None,
    )
    return replace(up, **values)


def peer_stats(*paths: PathStats, **values: Any) -> PeerStats:
    """The statistics of rank 1, which is up."""
    up = PeerStats(
        rank=1,
        host="b",
        state="up",
        messages_sent=1,
        messages_received=1,
        bytes_sent=1000,
        bytes_received=500,
        deliveries=0,
        deliveries_s=(),
        last_heard_seconds_ago=0.1,
        last_error="",
        paths=paths,
    )
    return replace(up, **values)


def group_stats(*peers: PeerStats) -> GroupStats:
    """The statistics of rank 0 in the default group."""
    return GroupStats(
        group="0",
        rank=0,
        size=len(peers) + 1,
        collectives=7,
        operations_pending=1,
        peers=peers,
        listener=_LISTENER,
        relay=_RELAY,
        trust=_TRUST,
        events=(),
    )


def process_snapshot(*peers: PeerStats, **values: Any) -> Snapshot:
    """The snapshot of rank 0 of 2."""
    running = Snapshot(
        version="0.1.0",
        time_s=100.0,
        host="a",
        pid=42,
        rank=0,
        world_size=2,
        groups=(GroupCounts(group="0", rank=0, size=2, collectives=7, operations_pending=1),),
        peers=peers,
        listener=_LISTENER,
        relay=_RELAY,
        trust=_TRUST,
        events=(),
    )
    return replace(running, **values)


def trust_stats(**faults: int) -> TrustStats:
    """The trust of a process that has these faults."""
    return replace(_TRUST, faults=replace(_FAULTS, **faults))
