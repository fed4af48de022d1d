"""The delays between all ranks of a group, measured over the backend."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from torch_resilient._groups import carried_device
from torch_resilient._reports.stats import stats
from torch_resilient.control.link_monitor import RoundTrips

# The backend measures a path's round trip at most this often where little is sent.
_BETWEEN_S = 0.012
_TAG = 78
# With one every 12 ms, time for round trips of a second and more.
_MORE_ROUNDS = 200


def measure_delays(group: dist.ProcessGroup | None = None, rounds: int = 5) -> list[list[float]]:
    """Seconds of one way between any two ranks of `group`, by [from][to]; 0 on the diagonal.

    This is the input that `propose_layout` needs. Every rank of the group calls it. In each round
    every rank sends one number to every other; half of the least round trip that is measured
    meanwhile is taken for one way, so both directions of a link come out much alike. A round takes
    about 12 ms plus the longest round trip.

    Raises ValueError if the group does not use the resilient backend, or rounds is below 1;
    RuntimeError, which names the rank, if a link gives no round trip in 200 more rounds.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    device = carried_device(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    others = [other for other in range(size) if other != rank]
    monitors = {other: RoundTrips() for other in others}
    min_s = dict.fromkeys(others, math.inf)

    def look() -> None:
        for peer in stats(group).peers:
            new = monitors[peer.rank].update(peer)
            min_s[peer.rank] = min([min_s[peer.rank], *new])

    look()
    min_s = dict.fromkeys(others, math.inf)  # what was measured before may be long ago
    for number in range(rounds + _MORE_ROUNDS):
        time.sleep(_BETWEEN_S)
        incoming = [torch.zeros(1, device=device) for _ in others]
        outgoing = torch.zeros(1, device=device)
        works = [
            dist.irecv(tensor, group=group, group_src=other, tag=_TAG)
            for other, tensor in zip(others, incoming, strict=True)
        ]
        works += [dist.isend(outgoing, group=group, group_dst=o, tag=_TAG) for o in others]
        for work in works:
            assert work is not None
            work.wait()
        look()
        if number + 1 >= rounds:
            # New connections are not measured at once, and acknowledgements may still be on their
            # way: all ranks go on until the last one knows all of its links.
            unknown = torch.tensor(float(math.inf in min_s.values()), device=device)
            dist.all_reduce(unknown, dist.ReduceOp.MAX, group=group)
            if not unknown:
                break
    else:
        silent = [other for other, each in min_s.items() if each == math.inf]
        raise RuntimeError(
            f"links of rank {rank} without a round trip after {rounds + _MORE_ROUNDS} rounds: to "
            f"ranks {silent} of the group; see their paths in torch_resilient.stats().peers"
        )
    mine = [min_s[other] / 2 if other != rank else 0.0 for other in range(size)]
    rows: list[list[float]] = [[]] * size
    dist.all_gather_object(rows, mine, group=group)
    return rows
