"""stats() as typed values: what the compiled module gives, and what JSON carries."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from stats_doubles import datagram_stats, path_stats, peer_stats, process_snapshot, rdma_stats

from torch_resilient import (
    Event,
    GroupStats,
    PathStats,
    Topology,
    _groups,
    _native,
    stats,
    topology,
)
from torch_resilient._observe.snapshot import Snapshot
from torch_resilient._reports import events


def test_a_path_has_a_name() -> None:
    names = [path_stats(kind=kind, index=1).name for kind in ("tcp", "shm", "udp")]
    assert names == ["tcp 1", "shm", "udp 1"]
    assert path_stats(kind="udp", index=1).key == ("udp", 1)


def test_json_gives_the_same_values_back() -> None:
    udp = path_stats(
        kind="udp", round_trips_s=(0.1, 0.2), datagrams=datagram_stats(packets=3, drop_rate=0.5)
    )
    event = Event(1.5, "link_slower", "a link", {"kind": "slower", "after_s": 0.1})
    rdma = path_stats(kind="rdma", rdma=rdma_stats(failed=2))
    peer = peer_stats(path_stats(), udp, rdma, deliveries_s=(0.3,))
    before = process_snapshot(peer, events=(event,))
    text = json.dumps(before.to_dict())
    told = json.loads(text)
    path = told["peers"][0]["paths"][1]
    assert (path["kind"], path["index"], path["datagrams"]["drop_rate"]) == ("udp", 0, 0.5)
    assert told["peers"][0]["paths"][2]["rdma"]["failed"] == 2
    # An event is flat; its own fields win over details of the same name.
    assert told["events"] == [
        {"time_s": 1.5, "kind": "link_slower", "text": "a link", "after_s": 0.1}
    ]
    after = Snapshot.from_dict(told | {"of a later version": 1})
    assert after.to_dict() == before.to_dict()
    assert after.peers == before.peers
    assert (after.groups, after.listener) == (before.groups, before.listener)
    with pytest.raises(KeyError):
        Snapshot.from_dict({**told, "peers": [{}]})
    with pytest.raises(TypeError):
        Snapshot.from_dict({**told, "peers": [1]})


def test_values_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        path_stats().state = "down"  # type: ignore[misc]


def look(rank: int) -> tuple[GroupStats, Topology, dict[str, Any]]:
    dist.all_reduce(torch.ones(1000))
    events.record("test", f"rank {rank} looks", number=rank)
    found = stats()
    native = _native.load().stats(_groups.find_backend())
    dist.barrier()
    return found, topology(), native


def test_a_running_group_is_told_with_its_types() -> None:
    for rank, (found, where, native) in enumerate(run_ranks(look)):
        assert (found.rank, found.size, found.group) == (rank, 2, "0")
        (peer,) = found.peers
        assert peer.rank == 1 - rank
        assert all(isinstance(path, PathStats) for path in peer.paths)
        assert {path.kind for path in peer.paths} <= {"tcp", "shm"}
        event = found.events[-1]
        assert (event.kind, event.text) == ("test", f"rank {rank} looks")
        assert event.details == {"number": rank}
        assert where == Topology(("", ""), False, (0, 0), where.algorithm)
        # No value of the compiled module is lost.
        assert set(native) | {"events"} == set(found.to_dict())
        assert set(native["peers"][0]) == set(peer.to_dict())
        assert set(native["peers"][0]["paths"][0]) == set(peer.paths[0].to_dict())
