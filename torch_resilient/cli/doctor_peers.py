"""The part of `torch-resilient doctor` that needs the other ranks of a torchrun job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch_resilient.cli import doctor_facts
from torch_resilient.cli.doctor_checks import Facts, Link, Relayed

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from torch_resilient._reports.stats import PathKind, PathStats

# A blocked path reports its failure after the timeout of connect(), 5 s.
_SETTLE_S = 12.0
# Timeout of one trial: a link that needs longer for 8 MB is too slow for training.
_TRIAL_S = 15.0
_LARGE_BYTES = 8 << 20
_PINGS = 8
_TAG = 80
# Twice the default time after which the engine closes a silent path.
_GIVEN_UP_S = 1.2
_WORKS = ("up", "reserve", "proving")


def examine() -> list[Facts] | None:
    """Examines this host and its paths to others; every rank calls it. Returns the facts of all
    ranks, by rank, on rank 0; None elsewhere.

    Raises RuntimeError if the ranks cannot reach the store.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    facts = doctor_facts.collect(os.environ.get("MASTER_ADDR", ""))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    facts.rank, facts.world_size = rank, size
    limit = timedelta(seconds=60 + size * size * 2 * _TRIAL_S)
    store: Store = next(iter(dist.rendezvous("env://", timeout=limit)))[0]  # type: ignore[attr-defined]
    store = dist.PrefixStore("torch_resilient/doctor", store)  # type: ignore[attr-defined]
    if not facts.torch_error:
        _start(facts, store)
    # Ranks publish whether their backend starts: no rank waits for one without a backend.
    store.set(f"host/{rank}", json.dumps([facts.host_key, not _broken(facts)]))
    hosts = [json.loads(store.get(f"host/{other}")) for other in range(size)]
    if not _broken(facts):
        able = [other for other in range(size) if hosts[other][1]]
        _settle([other for other in able if other != rank])
        for number, (a, b) in enumerate(_pairs([host for host, _ in hosts], able)):
            if rank in (a, b):
                _try_pair(facts, a, b)
            _meet(store, f"pair/{number}", len(able))
        local = {other for other in able if hosts[other][0] == facts.host_key}
        facts.links = _links(facts.links, local)
        facts.relayed = _relayed()
        _meet(store, "done", len(able))
        dist.destroy_process_group()
    store.set(f"facts/{rank}", json.dumps(facts.as_json()))
    if rank != 0:
        store.get("told")  # rank 0 may serve the store
        return None
    told = [Facts.from_json(json.loads(store.get(f"facts/{other}"))) for other in range(size)]
    store.set("told", "1")
    _wait_for_readers()
    return told


def _wait_for_readers() -> None:
    """The store may end with this process, while others still read their last key."""
    time.sleep(0.5)


def _broken(facts: Facts) -> bool:
    return bool(facts.torch_error or facts.backend_error)


def _start(facts: Facts, store: Store) -> None:
    import torch.distributed as dist

    from torch_resilient import _native

    try:
        doctor_facts.start_no_watchers()
        options = _native.load().Options()
        options.eager_connect = True
        dist.init_process_group(
            "resilient",
            store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
            rank=facts.rank or 0,
            world_size=facts.world_size,
            timeout=timedelta(seconds=_TRIAL_S),
            pg_options=options,
        )
    except (RuntimeError, ValueError) as error:
        facts.backend_error = doctor_facts.first_line(error)
        if dist.is_initialized():
            dist.destroy_process_group()


def _paths() -> list[tuple[int, PathStats]]:
    from torch_resilient._reports.stats import stats

    return [(peer.rank, path) for peer in stats().peers for path in peer.paths]


def _settle(others: list[int]) -> None:
    """Waits until every path to each of them is up or has reported its failure."""
    limit_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < limit_s:
        paths = _paths()
        known = {peer for peer, _ in paths}
        if known.issuperset(others) and all(
            path.state in (*_WORKS, "unused") or path.last_error
            for peer, path in paths
            if peer in others
        ):
            return
        time.sleep(0.05)


def _pairs(hosts: list[str], able: list[int]) -> list[tuple[int, int]]:
    """Pairs of ranks to try: the first ranks of all hosts with each other, the others with their
    host's first rank."""
    first: dict[str, int] = {}
    pairs = []
    for rank in able:
        leader = first.setdefault(hosts[rank], rank)
        if leader != rank:
            pairs.append((leader, rank))
    leaders = list(first.values())
    return pairs + [(a, b) for i, a in enumerate(leaders) for b in leaders[i + 1 :]]


def _meet(store: Store, key: str, count: int) -> None:
    """A barrier over the store, since the paths between the ranks are under test."""
    if store.add(f"{key}/count", 1) == count:
        store.set(f"{key}/all", "1")
    store.get(f"{key}/all")


def _try_pair(facts: Facts, a: int, b: int) -> None:
    peer = b if facts.rank == a else a
    try:
        _compare_clocks(facts, peer, asks=facts.rank == a)
    except RuntimeError as error:
        facts.peer_errors[peer] = doctor_facts.first_line(error)
        return
    # Small messages pass. A path that is up now should be up after large ones. The trial runs
    # twice, since a busy machine may lose a connection by chance.
    stalled = {path.key for rank, path in _paths() if rank == peer and path.state in _WORKS}
    for _ in range(2):
        before, suspected = _reconnects(peer), _suspicions(peer)
        error_text = _exchange_large(peer)
        if _suspicions(peer) != suspected:
            # Another path took over immediately; the engine closes and reopens this one later.
            time.sleep(_GIVEN_UP_S)
        after = _reconnects(peer)
        if error_text:
            facts.peer_errors[peer] = error_text
            if "Timed out" not in error_text:
                return
            break
        stalled &= {key for key in after if after[key] > before.get(key, 0)}
        if not stalled:
            return
    facts.links += [Link(peer, *key, "", "", "", large_stalled=True) for key in sorted(stalled)]


def _compare_clocks(facts: Facts, peer: int, asks: bool) -> None:
    import torch
    import torch.distributed as dist

    best_s = float("inf")
    theirs = torch.zeros(1, dtype=torch.float64)
    for _ in range(_PINGS):
        if not asks:
            dist.recv(theirs, peer, tag=_TAG)
            dist.send(torch.tensor([time.time()], dtype=torch.float64), peer, tag=_TAG)
            continue
        sent_s, began_s = time.time(), time.monotonic()
        dist.send(theirs, peer, tag=_TAG)
        dist.recv(theirs, peer, tag=_TAG)
        round_trip_s = time.monotonic() - began_s
        if round_trip_s < best_s:
            best_s = round_trip_s
            offset_s = theirs.item() - (sent_s + round_trip_s / 2)
            facts.clock_offsets_s[peer] = (offset_s, round_trip_s / 2)
            facts.round_trips_s[peer] = round_trip_s


def _reconnects(peer: int) -> dict[tuple[PathKind, int], int]:
    """How often each path to `peer` reconnected."""
    return {path.key: path.reconnects for rank, path in _paths() if rank == peer}


def _suspicions(peer: int) -> dict[tuple[PathKind, int], int]:
    """How often each path to `peer` was suspect."""
    return {path.key: path.times_suspect for rank, path in _paths() if rank == peer}


def _exchange_large(peer: int) -> str:
    """Exchanges large messages in both directions at once; returns the error, or ""."""
    import torch
    import torch.distributed as dist

    out = torch.zeros(_LARGE_BYTES, dtype=torch.uint8)
    into = torch.empty(_LARGE_BYTES, dtype=torch.uint8)
    try:
        works = [dist.irecv(into, peer, tag=_TAG + 1), dist.isend(out, peer, tag=_TAG + 1)]
        for work in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        return doctor_facts.first_line(error)
    return ""


def _relayed() -> Relayed:
    """Without what went over relays themselves: the connections to these have sent that."""
    from torch_resilient._reports.stats import stats

    told = stats().relay
    sent = sum(path.bytes_sent for _, path in _paths() if path.relay is None)
    return Relayed(told.bytes, sent, told.held_max_bytes, told.refused)


def _links(suspects: Sequence[Link], local: Collection[int]) -> list[Link]:
    """All paths as they are now; those of `suspects` do not carry large messages. `local`: the
    ranks on this host."""
    stalled = {(link.peer, link.kind, link.index) for link in suspects}
    return [
        Link(
            peer,
            path.kind,
            path.index,
            path.nic,
            path.remote_nic,
            path.state,
            path.last_error,
            large_stalled=(peer, *path.key) in stalled,
            relay=path.relay.rank if path.relay is not None else -1,
            cipher=path.cipher,
            forward_secret=path.forward_secret,
            local=peer in local,
        )
        for peer, path in _paths()
    ]
