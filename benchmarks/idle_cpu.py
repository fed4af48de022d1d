"""Processor time of a connected group with nothing to do: it must be below 1 % of a core."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from common import Report, Row, add_common_arguments, run_ranks, write_rows

ABOUT = """\
Each rank talks to all others once, which sets up all connections, waits until the work of
connecting has ended, and sleeps. The processor time of its process (all threads) meanwhile is the
cost of the backend's heartbeats and timers. The worst rank counts. Exit status 1 if resilient is
above the limit; gloo is shown for comparison.
"""

# A training process that waits for its data should leave the core to the data loader.
LIMIT = 0.01


def measure(rank: int, ranks: int, report: Report, backend: str, seconds: float) -> None:
    """Sleeps `seconds` in a connected group; reports processor time / time of the worst rank."""
    exchanged = torch.ones(2 * ranks)
    received = torch.empty_like(exchanged)
    dist.all_to_all_single(received, exchanged)
    dist.barrier()
    time.sleep(min(1.0, seconds / 4))  # what was started by this may end
    wall, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    used, wall = time.process_time() - used, time.monotonic() - wall
    share = torch.tensor([used / wall], dtype=torch.float64)
    dist.all_reduce(share, dist.ReduceOp.MAX)
    report(
        {
            "benchmark": "idle_cpu",
            "backend": backend,
            "ranks": ranks,
            "seconds": wall,
            "share": share.item(),
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each backend; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (default 4)")
    parser.add_argument("--seconds", type=float, help="how long (default 5, quick: 2)")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    seconds = options.seconds or (2.0 if options.quick else 5.0)
    rows: list[Row] = []
    for backend in ("gloo", "resilient"):
        for row in run_ranks(
            measure,
            options.ranks,
            backend,
            seconds,
            backend=backend,
            realtime=options.realtime,
        ):
            rows.append(row)
            print(
                f"idle {backend:<10} {row['ranks']} ranks, {row['seconds']:.0f} s: "
                f"{row['share']:.3%} of a core",
                flush=True,
            )
    write_rows(options.json, rows)
    good = rows[-1]["share"] < LIMIT
    print(f"{'ok' if good else 'FAILED'}: resilient must stay below {LIMIT:.0%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
