"""The start of many ranks and their small collectives, against gloo."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from common import TIMEOUT, Row, add_common_arguments, median, write_rows

ABOUT = """\
All ranks are processes of this host, forked from one that has imported torch. The two backends take
turns. Each figure is the time of the slowest rank, in milliseconds, as the median of the rounds:

  start             init_process_group and the first all_reduce. The ranks begin together, connected
                    to torch's TCPStore: how long that took (with name servers, see the doctor's
                    check "reverse-dns") is the same for both, and not part of it
  first_all_reduce  of 16 bytes, right after init_process_group
  barrier           the mean of ten, after the first
  all_reduce_1MiB   the mean of three, after the first

  ratio = gloo's time / resilient's

Limits: for 96 ranks, no start, first all_reduce or barrier
slower than gloo's.
"""

BACKENDS = ("resilient", "gloo")
FIGURES = ("start", "first_all_reduce", "barrier", "all_reduce_1MiB")
LIMITED_RANKS = 96
LIMITED = ("start", "first_all_reduce", "barrier")


def timed(function: Callable[[], object], times: int = 1) -> float:
    """Milliseconds of one of `times` calls, on average."""
    begun = time.monotonic()
    for _ in range(times):
        function()
    return (time.monotonic() - begun) / times * 1e3


def measure(rank: int, ranks: int, backend: str, port: int) -> dict[str, float]:
    """Runs in a rank; returns its times in ms."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, TIMEOUT, wait_for_workers=False)
    if store.add("here", 1) == ranks:
        store.set("go", "")
    store.wait(["go"])
    small, large = torch.ones(4), torch.ones(1 << 18)
    begun = time.monotonic()
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    first = timed(lambda: dist.all_reduce(small))
    start = (time.monotonic() - begun) * 1e3
    assert small.tolist() == [ranks] * 4, small
    dist.barrier()
    barrier = timed(dist.barrier, 10)
    dist.all_reduce(large)
    reduced = timed(lambda: dist.all_reduce(large), 3)
    dist.barrier()
    dist.destroy_process_group()
    return dict(zip(FIGURES, (start, first, barrier, reduced), strict=True))


def run_once(ranks: int, backend: str, realtime: bool) -> dict[str, float]:
    """One job. Returns the times of the slowest rank. Raises RuntimeError if a rank fails."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    pipes = []
    pids = []
    for rank in range(ranks):
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                if realtime:
                    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
                os.close(receive)
                os.write(send, json.dumps(measure(rank, ranks, backend, port)).encode())
                status = 0
            except BaseException as error:
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(status)
        os.close(send)
        pipes.append(receive)
        pids.append(pid)
    texts = []
    for pipe in pipes:
        with os.fdopen(pipe, "rb") as file:
            texts.append(file.read())
    failed = [rank for rank, pid in enumerate(pids) if os.waitpid(pid, 0)[1] != 0]
    if failed:
        raise RuntimeError(f"{backend}, {ranks} ranks: ranks {failed} failed; see their messages")
    rows = [json.loads(text) for text in texts]
    return {figure: max(row[figure] for row in rows) for figure in FIGURES}


def main() -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--ranks", default="8,32,96", help="numbers of ranks (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="of each backend (default: 5)")
    options = parser.parse_args()
    sizes = [8] if options.quick else [int(text) for text in options.ranks.split(",")]
    rounds = 2 if options.quick else options.rounds
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_RESILIENT_INTERFACE", "lo")
    rows: list[Row] = []
    missed = []
    print(f"{'ranks':>5} {'figure':18} {'resilient ms':>12} {'gloo ms':>9} {'ratio':>6}")
    for ranks in sizes:
        seen: dict[str, list[dict[str, float]]] = {backend: [] for backend in BACKENDS}
        for number in range(rounds):
            for backend in BACKENDS if number % 2 == 0 else reversed(BACKENDS):
                seen[backend].append(run_once(ranks, backend, options.realtime))
        for figure in FIGURES:
            ours, gloo = (median([one[figure] for one in seen[name]]) for name in BACKENDS)
            ratio = gloo / ours
            print(f"{ranks:5} {figure:18} {ours:12.2f} {gloo:9.2f} {ratio:6.2f}", flush=True)
            rows.append(
                {
                    "benchmark": "scale",
                    "ranks": ranks,
                    "figure": figure,
                    "resilient_ms": ours,
                    "gloo_ms": gloo,
                    "ratio": ratio,
                    "rounds": rounds,
                }
            )
            if ranks >= LIMITED_RANKS and figure in LIMITED and ratio < 1:
                missed.append(f"{figure} of {ranks} ranks is {1 / ratio:.2f} times gloo's")
    write_rows(options.json, rows)
    for text in missed:
        print(f"LIMIT MISSED: {text}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
