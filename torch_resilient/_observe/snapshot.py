"""All that one process knows of its groups and peers: for watchers of a running job."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass, replace
from typing import ClassVar

from torch_resilient import _groups
from torch_resilient._reports import events as event_log
from torch_resilient._reports.events import Event
from torch_resilient._reports.stats import (
    GroupCounts,
    ListenerStats,
    PeerStats,
    Record,
    RelayCounts,
    TrustStats,
    stats,
)
from torch_resilient._version import __version__

__all__ = ["Snapshot", "snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot(Record):
    """One process with all its groups, as `/stats` and `torch-resilient top --json` give it.

    Attributes:
        version: of torch_resilient.
        time_s: when it was taken, in seconds since the epoch.
        host, pid: of the process.
        rank, world_size: of the default group; None while there is none.
        groups: all groups of this backend.
        peers: one entry for each other rank, with its rank in the default group.
        listener, relay, trust: None while there is no group.
        events: recent decisions and changes, oldest first.
    """

    version: str
    time_s: float
    host: str
    pid: int
    rank: int | None
    world_size: int | None
    groups: tuple[GroupCounts, ...]
    peers: tuple[PeerStats, ...]
    listener: ListenerStats | None
    relay: RelayCounts | None
    trust: TrustStats | None
    events: tuple[Event, ...]

    nested: ClassVar = {
        "groups": GroupCounts,
        "peers": PeerStats,
        "listener": ListenerStats,
        "relay": RelayCounts,
        "trust": TrustStats,
        "events": Event,
    }


def snapshot() -> Snapshot:
    """The state of this process. Any thread. Groups of other backends are left out."""
    import torch.distributed as dist

    groups: list[GroupCounts] = []
    peers: dict[int, PeerStats] = {}
    listener, relay, trust = None, None, None
    for group in _groups.all_groups():
        try:
            found = stats(group)
            ranks = dist.get_process_group_ranks(group)
        except (ValueError, RuntimeError, KeyError):
            continue  # of another backend, or destroyed meanwhile
        listener, relay, trust = found.listener, found.relay, found.trust
        groups.append(found.counts)
        for peer in found.peers:
            rank = ranks[peer.rank]
            # Groups share the engine's counters; a group that has not used a peer yet has none.
            if rank not in peers or not peers[rank].paths:
                peers[rank] = replace(peer, rank=rank)
    own: tuple[int | None, int | None] = (None, None)
    with contextlib.suppress(ValueError, RuntimeError):  # not yet, or destroyed meanwhile
        own = dist.get_rank(), dist.get_world_size()
    return Snapshot(
        version=__version__,
        time_s=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=own[0],
        world_size=own[1],
        groups=tuple(groups),
        peers=tuple(peers[rank] for rank in sorted(peers)),
        listener=listener,
        relay=relay,
        trust=trust,
        events=event_log.recent(),
    )
