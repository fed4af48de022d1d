"""What one process knows of its groups and peers, in one dict: for watchers of a running job."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from torch_resilient import _events, _native
from torch_resilient._stats import find_backend
from torch_resilient._version import __version__

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["groups", "snapshot"]


def groups() -> list[ProcessGroup]:
    """All groups that this process is a member of, the default one first."""
    import torch.distributed as dist

    # torch has no public list of them.
    world = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", {}))


def snapshot() -> dict[str, Any]:
    """The state of this process, fit for JSON.

    `version`, `time_s` (since the epoch), `host`, `pid`, `rank` and `world_size` (None while there
    is no default group), `groups` (each with `group`, `rank`, `size`, `collectives`,
    `operations_pending`), `peers` (as in stats(), but `rank` counts in the default group and each
    rank stands there once), `listener` (or None) and `events`. Any thread. Groups of other backends
    are left out.
    """
    import torch.distributed as dist

    told: list[dict[str, Any]] = []
    peers: dict[int, dict[str, Any]] = {}
    listener = None
    for group in groups():
        try:
            stats = _native.load().stats(find_backend(group))
            ranks = dist.get_process_group_ranks(group)
        except (ValueError, RuntimeError, KeyError):
            continue  # of another backend, or destroyed meanwhile
        listener = stats.pop("listener")
        for peer in stats.pop("peers"):
            rank = ranks[peer["rank"]]
            # Groups share the engine's counters; a group that has not used a peer yet has none.
            if not peers.get(rank, {}).get("paths"):
                peers[rank] = {**peer, "rank": rank}
        told.append(stats)
    own: tuple[int | None, int | None] = (None, None)
    with contextlib.suppress(ValueError, RuntimeError):  # not yet, or destroyed meanwhile
        own = dist.get_rank(), dist.get_world_size()
    return {
        "version": __version__,
        "time_s": time.time(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": own[0],
        "world_size": own[1],
        "groups": told,
        "peers": [peers[rank] for rank in sorted(peers)],
        "listener": listener,
        "events": _events.recent(),
    }
