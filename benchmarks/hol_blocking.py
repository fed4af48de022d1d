"""Head-of-line blocking: does a peer on a slow link slow down traffic to the others?

Rank 0 sends to rank 1 over loopback. Rank 2's link from rank 0 is limited to a hundredth of what
was measured to rank 1 (by fault injection, on the real socket). In turns, rank 0 sends to rank 1
alone, and with a backlog for rank 2; `kept` is the ratio of the two throughputs. Then the time
isend takes to return for a large message, in microseconds.

    python benchmarks/hol_blocking.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torch_resilient import faults, stats

MESSAGE = 4 << 20  # bytes
ISEND = 64 << 20


def stream(rank: int, data: torch.Tensor, count: int) -> float:
    """Bytes/s of `count` messages from rank 0 to rank 1, until the last one is confirmed."""
    answer = torch.zeros(1)
    start = time.perf_counter()
    if rank == 0:
        works = [dist.isend(data, 1, tag=1) for _ in range(count)]
        for work in works:
            assert work is not None
            work.wait()
        dist.recv(answer, 1, tag=2)
    elif rank == 1:
        for _ in range(count):
            dist.recv(data, 0, tag=1)
        dist.send(answer, 0, tag=2)
    return count * MESSAGE / (time.perf_counter() - start)


def acknowledged(peer: int) -> int:
    """Bytes that `peer` has confirmed."""
    return next(int(p["bytes_sent"]) for p in stats()["peers"] if p["rank"] == peer)


def rank_main(rank: int, store: str, out: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("resilient", init_method=f"file://{store}", rank=rank, world_size=3)
    data = torch.zeros(MESSAGE // 4)
    stream(rank, data, 4)
    speed = torch.tensor([statistics.median(stream(rank, data, 8) for _ in range(3))])
    dist.broadcast(speed, 0)
    slow = float(speed) / 100
    # About two messages of backlog per round at the slow speed; rank 2 takes all in the end.
    backlog = torch.zeros(MESSAGE // 4)
    alone: list[float] = []
    beside: list[float] = []
    count = 16
    for turn in range(2 * rounds):
        dist.barrier()
        with_slow = (turn // 2 + turn) % 2 == 1
        if not with_slow:
            value = stream(rank, data, count)
            alone.append(value)
            continue
        if rank == 0:
            with faults.limit(slow, peer=2):
                before = acknowledged(2)
                pending = [dist.isend(backlog, 2, tag=3) for _ in range(2)]
                beside.append(stream(rank, data, count))
                gone = acknowledged(2) - before
            # isend completes early (a copy is made), so this is what proves the backlog.
            assert gone < 2 * MESSAGE, "the slow link was not slow: its backlog went with the rest"
            for work in pending:
                assert work is not None
                work.wait()
        elif rank == 1:
            stream(rank, data, count)
        else:
            for _ in range(2):
                dist.recv(backlog, 0, tag=3)
    large = torch.zeros(ISEND // 4)
    returns: list[float] = []
    for _ in range(4 * rounds):
        dist.barrier()
        if rank == 0:
            start = time.perf_counter()
            work = dist.isend(large, 1)
            returns.append((time.perf_counter() - start) * 1e6)
            assert work is not None
            work.wait()
        elif rank == 1:
            dist.recv(large, 0)
    if rank == 0:
        ratios = [b / a for a, b in zip(alone, beside, strict=True)]
        returns.sort()
        result = {
            "alone_bytes_per_s": statistics.median(alone),
            "beside_slow_bytes_per_s": statistics.median(beside),
            "slow_link_bytes_per_s": slow,
            "kept": statistics.median(beside) / statistics.median(alone),
            "kept_pairs_p10": sorted(ratios)[len(ratios) // 10],
            "isend_median_us": statistics.median(returns),
            "isend_p99_us": returns[int(0.99 * (len(returns) - 1))],
        }
        Path(out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds instead of 25")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/result"
        mp.spawn(rank_main, (f"{folder}/store", out, 5 if arguments.quick else 25), nprocs=3)
        result = json.loads(Path(out).read_text())
    print(
        f"to rank 1 alone {result['alone_bytes_per_s'] / 1e9:.2f} GB/s, beside a peer limited to "
        f"{result['slow_link_bytes_per_s'] / 1e6:.0f} MB/s "
        f"{result['beside_slow_bytes_per_s'] / 1e9:.2f} GB/s: kept {result['kept']:.3f}\n"
        f"isend of {ISEND >> 20} MiB returns in {result['isend_median_us']:.0f} us (median), "
        f"{result['isend_p99_us']:.0f} us (p99)"
    )


if __name__ == "__main__":
    main()
