"""The delays between all ranks of a group, measured over the backend."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

from torch_resilient import _stats

# The backend measures a path's round trip at most this often where little is sent.
_BETWEEN_S = 0.012
_TAG = 78


def measure_delays(group: dist.ProcessGroup | None = None, rounds: int = 5) -> list[list[float]]:
    """Seconds of one way between any two ranks of `group`, by [from][to]; 0 on the diagonal.

    What `propose_layout` wants to know. Every rank of the group calls it. In each round every rank
    sends one number to every other; half of the least round trip that was seen then, or just before
    in the training, is taken for one way, so both directions of a link come out alike. Takes about
    12 ms a round and the longest round trip.

    Raises ValueError if the group does not use the resilient backend, or rounds is below 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected at least 1, got {rounds}")
    _stats.find_backend(group)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    others = [other for other in range(size) if other != rank]
    for _ in range(rounds):
        time.sleep(_BETWEEN_S)
        incoming = [torch.zeros(1) for _ in others]
        works = [
            dist.irecv(tensor, group=group, group_src=other, tag=_TAG)
            for other, tensor in zip(others, incoming, strict=True)
        ]
        works += [dist.isend(torch.zeros(1), group=group, group_dst=o, tag=_TAG) for o in others]
        for work in works:
            assert work is not None
            work.wait()
    # Acknowledgements of the last round may still be on their way.
    dist.barrier(group)
    time.sleep(_BETWEEN_S)
    mine = [0.0] * size
    for peer in _stats.stats(group)["peers"]:
        samples = [sample for path in peer["paths"] for sample in path["round_trips_s"]]
        mine[peer["rank"]] = min(samples[-rounds:], default=math.nan) / 2
    rows: list[list[float]] = [[]] * size
    dist.all_gather_object(rows, mine, group=group)
    # What one end has not measured, the other has.
    for i, row in enumerate(rows):
        for j, delay_s in enumerate(row):
            if math.isnan(delay_s):
                row[j] = 0.0 if math.isnan(rows[j][i]) else rows[j][i]
    return rows
