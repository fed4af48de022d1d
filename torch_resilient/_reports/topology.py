"""The location of the ranks of a group: hosts and sites, as declared or as measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_resilient import _native
from torch_resilient._groups import carried_device, find_backend
from torch_resilient._reports.stats import Record, stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Topology", "clusters", "group_by_round_trip", "topology"]

# Messages that are exchanged before the round trips are read: the first ones open connections.
_ROUNDS = 5
_TAG = 0x7E57  # of these messages


@dataclass(frozen=True, slots=True)
class Topology(Record):
    """The location of the ranks of a group.

    Attributes:
        sites: by rank, the name of its site; empty strings if none is known.
        declared: whether TORCH_RESILIENT_SITE names the sites. If not, they are inferred from
            round trips.
        hosts: by rank, a number; ranks with the same number share a host.
        algorithm: the option collective_algorithm.
    """

    sites: tuple[str, ...]
    declared: bool
    hosts: tuple[int, ...]
    algorithm: str


def topology(group: ProcessGroup | None = None) -> Topology:
    """Returns the location of the ranks of `group` (None: the default group), as all of them agree.

    Waits, at most for the group's timeout, until all ranks have joined. Raises ValueError as
    stats() does, and if the ranks' options do not go together (some have a site, others have
    none); RuntimeError if not all have joined in time.
    """
    return Topology.from_dict(_native.load().topology(find_backend(group)))


def clusters(round_trips_s: Sequence[Sequence[float]], site_s: float) -> list[int]:
    """Groups of what is connected by round trips below `site_s`, directly or over others.

    `round_trips_s[i][j]` is what i measured to j, in seconds; of the two measurements of a pair
    the lower one counts. Returns the number of each one's group, counted in order of appearance.
    """
    count = len(round_trips_s)
    label = list(range(count))
    for i in range(count):
        for j in range(i):
            if min(round_trips_s[i][j], round_trips_s[j][i]) < site_s and label[i] != label[j]:
                low, high = sorted((label[i], label[j]))
                label = [low if x == high else x for x in label]
    order = {x: n for n, x in enumerate(dict.fromkeys(label))}
    return [order[x] for x in label]


def group_by_round_trip(
    group: ProcessGroup | None = None, *, site_s: float = 0.003, every_rank: bool = False
) -> list[str]:
    """Measures round trips and regroups: hosts less than `site_s` seconds apart are one site.

    This is for jobs without declared sites (TORCH_RESILIENT_SITE); declared sites are not changed.
    Sites that were inferred at the start, from round trips to the store only, are replaced.
    All ranks of `group` (None: the default group) must call it at the same point of the program:
    it is a collective. The grouping is computed from all measurements, so it is the same on all
    ranks, and holds for the collectives of this group that are called later. Groups made from it
    must be measured by themselves.

    One rank of each host measures; with `every_rank`, all do, whatever their hosts, as is right
    where one host stands for several, with delays that are injected.

    Returns the site of each rank: "site0", "site1", ..., or empty strings if all are at one.
    Raises ValueError for a `site_s` that is no positive number, and as topology() does;
    RuntimeError if a round trip cannot be measured.
    """
    import torch
    import torch.distributed as dist

    if not (math.isfinite(site_s) and site_s > 0):
        raise ValueError(f"group_by_round_trip: site_s={site_s}: expected a number above 0")
    backend, device = find_backend(group), carried_device(group)
    known = topology(group)
    if known.declared:
        return list(known.sites)
    rank, size = backend.rank(), backend.size()
    places = list(range(size)) if every_rank else known.hosts
    first = {place: r for r, place in reversed(list(enumerate(places)))}
    leaders = sorted(first.values())
    measured = torch.full((size,), math.inf, dtype=torch.float64)
    if rank in leaders:
        peers = [r for r in leaders if r != rank]
        empty = torch.zeros(1, device=device)
        for _ in range(_ROUNDS):
            # Acknowledgements of these messages are what is measured.
            got = [torch.empty_like(empty) for _ in peers]
            works = [
                dist.irecv(tensor, group=group, group_src=r, tag=_TAG)
                for r, tensor in zip(peers, got, strict=True)
            ]
            works += [dist.isend(empty, group=group, group_dst=r, tag=_TAG) for r in peers]
            for work in works:
                if work is not None:
                    work.wait()
        for peer in stats(group).peers:
            times = [p.round_trip_min_s for p in peer.paths if p.round_trip_min_s > 0]
            if peer.rank in peers and times:
                measured[peer.rank] = min(times)
    table = torch.empty(size, size, dtype=torch.float64, device=device)
    dist.all_gather(list(table), measured.to(device), group=group)
    table = table.cpu()
    rows = [[float(table[i, j]) for j in leaders] for i in leaders]
    for i, one in enumerate(leaders):
        for j, other in enumerate(leaders[:i]):
            if math.isinf(min(rows[i][j], rows[j][i])):
                raise RuntimeError(
                    f"group_by_round_trip: the round trip between ranks {other} and {one} could "
                    "not be measured; set TORCH_RESILIENT_SITE on all ranks instead"
                )
    labels = dict(zip(leaders, clusters(rows, site_s), strict=True))
    sites = [""] * size
    if len(set(labels.values())) > 1:
        sites = [f"site{labels[first[place]]}" for place in places]
    if sites != list(known.sites):
        _native.load().set_topology(backend, sites, known.algorithm)
    return sites
