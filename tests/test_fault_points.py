"""Seeded fault points over real sockets: any operation, any byte, any k-1 of k paths, any kind."""

from __future__ import annotations

import random
import time

import pytest
import torch.distributed as dist
from harness import on_gloo, run_ranks, world_size
from test_faults import OPERATIONS, PAUSE_S, counters

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo has no faults to inject")

PATHS = 3


def fault_points(rank: int, seed: int, points: int) -> tuple[float, list[str], dict[str, int]]:
    """One random fault at one random place in each of `points` random operations.

    Every operation checks every byte it gets. Returns the longest of them in seconds, the rules,
    and what the paths counted.
    """
    from torch_resilient import faults

    common = random.Random(seed)
    longest = 0.0
    rules = []
    for point in range(points):
        operation = common.choice(OPERATIONS)
        numel = int(2 ** common.uniform(0, 18.5))
        kind = common.choice(["cut", "cut", "stall", "drop"])
        where = common.randrange(world_size())
        victims = common.sample(range(PATHS), common.randrange(1, PATHS))
        # On a log scale: headers and small frames are as interesting as payloads.
        after_bytes = int(2 ** common.uniform(0, 22))
        for_s = common.uniform(0.05, 0.8)
        what = f"after_bytes={after_bytes} times=1" if kind == "cut" else f"for_s={for_s:.3f}"
        chosen = [f"{kind} {what} path={path}" for path in victims]
        rules.append(f"{operation.__name__}({numel}) rank {where}: {'; '.join(chosen)}")
        began = time.monotonic()
        injected = [faults.inject(rule) for rule in chosen if rank == where]
        operation(rank, numel, 1000 * seed + point)
        took = time.monotonic() - began
        longest = max(longest, took)
        rules[-1] += f": {took:.3f} s"
        for fault in injected:
            fault.clear()
    dist.barrier()
    return longest, rules, counters()


def check(seed: int, points: int, size: int) -> None:
    print(f"seed {seed}, {points} points, {size} ranks")
    results = run_ranks(
        fault_points,
        seed,
        points,
        world_size=size,
        env={"TORCH_RESILIENT_PATHS_SAME_HOST": str(PATHS)},
    )
    for rule in results[0][1]:
        print(rule)
    total = {key: sum(c[key] for _, _, c in results) for key in results[0][2]}
    print(f"longest {max(t for t, _, _ in results):.3f} s, {total}")
    assert total["reconnects"] + total["times_suspect"] >= points // 4, "nothing has happened"
    assert total["chunks_retransmitted"] > 0, "no data was under way in any of them"
    assert max(t for t, _, _ in results) < PAUSE_S


@pytest.mark.parametrize(("seed", "size"), [(1, 2), (2, 3)])
def test_fifty_fault_points(seed: int, size: int) -> None:
    check(seed, 25, size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_thousand_fault_points(seed: int) -> None:
    check(seed, 50, 2 + seed % 3)
