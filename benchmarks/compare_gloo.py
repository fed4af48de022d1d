"""resilient against gloo on one machine, interleaved in one run.

Both backends live in the same processes; every repetition runs one after the other, and the order
changes each time, so that what the machine does meanwhile hits both alike. A row is the median
over all repetitions of the slowest rank's time; `ratio` is gloo's time over resilient's (above 1:
resilient is faster), with the 10th and 90th percentile of the ratio of neighbouring repetitions.

    python benchmarks/compare_gloo.py                      # everything, some minutes
    python benchmarks/compare_gloo.py --quick              # a look, under a minute
    python benchmarks/compare_gloo.py --ops all_reduce --sizes 8,1M,64M --ranks 4
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20]
OPS = ["send_recv", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
OPS += ["barrier"]
# All ranks' buffers of one row together. Larger rows are left out, so that nothing swaps.
MEMORY_BYTES_MAX = 6 << 30


def parse_size(text: str) -> int:
    """`"64M"` as bytes."""
    units = {"K": 10, "M": 20, "G": 30}
    unit = text[-1].upper()
    return int(text[:-1]) << units[unit] if unit in units else int(text)


def size_text(size: int) -> str:
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def row_bytes(op: str, size: int, ranks: int) -> int:
    """Memory of one row: every operation has its input, some a copy of all ranks' inputs."""
    return ranks * size * (2 if op in ("send_recv", "all_reduce", "broadcast") else 3)


def operation(op: str, size: int, rank: int, ranks: int) -> Callable[[Any], None]:
    """The operation on `size` bytes a rank: input of all_gather: size / ranks; else all of it."""
    if op == "barrier":
        return lambda group: dist.barrier(group=group)
    count = max(size // 4, ranks)
    count -= count % ranks
    data = torch.ones(count)
    part = torch.ones(count // ranks)
    if op == "send_recv":
        # Ping-pong between neighbours; the row is half of a round trip.
        peer = rank ^ 1

        def ping_pong(group: Any) -> None:
            if rank % 2 == 0:
                dist.send(data, peer, group=group)
                dist.recv(data, peer, group=group)
            else:
                dist.recv(data, peer, group=group)
                dist.send(data, peer, group=group)

        return ping_pong
    if op == "all_reduce":
        return lambda group: dist.all_reduce(data, group=group)
    if op == "broadcast":
        return lambda group: dist.broadcast(data, 0, group=group)
    if op == "all_gather":
        return lambda group: dist.all_gather_into_tensor(data, part, group=group)
    if op == "reduce_scatter":
        return lambda group: dist.reduce_scatter_tensor(part, data, group=group)
    if op == "all_to_all":
        output = torch.empty_like(data)
        return lambda group: dist.all_to_all_single(output, data, group=group)
    raise ValueError(f"--ops {op}: choose from {', '.join(OPS)}")


def measure(
    body: Callable[[Any], None], groups: dict[str, Any], budget_s: float, least: int
) -> dict[str, list[float]]:
    """Seconds per repetition (the slowest rank's), by backend; collective over all ranks."""
    times: dict[str, list[float]] = {name: [] for name in groups}
    names = list(groups)
    for name in names:  # connections, caches
        body(groups[name])
        body(groups[name])
    began = time.perf_counter()
    repetition = 0
    # Rank 0 decides when the time is over; the flag travels over gloo, between repetitions.
    while True:
        for name in names if repetition % 2 == 0 else names[::-1]:
            dist.barrier(group=groups["gloo"])
            start = time.perf_counter()
            body(groups[name])
            times[name].append(time.perf_counter() - start)
        repetition += 1
        more = torch.tensor([repetition < least or time.perf_counter() - began < budget_s])
        if repetition % 8 == 0 or repetition >= least:
            dist.broadcast(more, 0, group=groups["gloo"])
            if not bool(more[0]):
                break
    for name in names:
        slowest = torch.tensor(times[name], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=groups["gloo"])
        times[name] = slowest.tolist()
    return times


def percentile(values: list[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


def rank_main(rank: int, ranks: int, arguments: argparse.Namespace, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "resilient": dist.new_group(backend="resilient")}
    with open(out, "a", encoding="utf-8") as file:
        for op in arguments.ops:
            for size in arguments.sizes if op != "barrier" else [0]:
                if row_bytes(op, size, ranks) > MEMORY_BYTES_MAX:
                    continue
                body = operation(op, size, rank, ranks)
                times = measure(body, groups, arguments.budget_s, arguments.least)
                if rank != 0:
                    continue
                half = 2 if op == "send_recv" else 1
                gloo = [t / half for t in times["gloo"]]
                ours = [t / half for t in times["resilient"]]
                pairs = [a / b for a, b in zip(gloo, ours, strict=True)]
                row = {
                    "op": op,
                    "ranks": ranks,
                    "bytes": size,
                    "gloo_us": statistics.median(gloo) * 1e6,
                    "resilient_us": statistics.median(ours) * 1e6,
                    "ratio": statistics.median(gloo) / statistics.median(ours),
                    "ratio_p10": percentile(pairs, 0.1),
                    "ratio_p90": percentile(pairs, 0.9),
                    "samples": len(ours),
                }
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(format_row(row), flush=True)
    dist.destroy_process_group()


def format_row(row: dict[str, Any]) -> str:
    size = size_text(row["bytes"]) if row["bytes"] else ""
    return (
        f"{row['op']:<15}{row['ranks']:>5}{size:>9}{row['gloo_us']:>13,.1f}"
        f"{row['resilient_us']:>15,.1f}{row['ratio']:>8.2f}"
        f"   {row['ratio_p10']:.2f} - {row['ratio_p90']:.2f}   {row['samples']}"
    )


def about() -> dict[str, Any]:
    """What a result needs to be understood later."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit,
        "torch": str(torch.__version__),
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", default=",".join(OPS), help="comma-separated: %(default)s")
    parser.add_argument("--sizes", help="bytes a rank, comma-separated, K, M, G allowed")
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks: %(default)s")
    parser.add_argument("--budget-s", type=float, default=4.0, help="seconds a row: %(default)s")
    parser.add_argument("--least", type=int, default=9, help="least repetitions: %(default)s")
    parser.add_argument("--quick", action="store_true", help="few sizes, half a second a row")
    parser.add_argument("--json", type=Path, help="write one JSON object a row into this file")
    arguments = parser.parse_args()
    arguments.ops = arguments.ops.split(",")
    if arguments.quick:
        arguments.sizes = arguments.sizes or "8,64K,4M"
        arguments.budget_s, arguments.least = 0.5, 5
    arguments.sizes = (
        [parse_size(s) for s in arguments.sizes.split(",")] if arguments.sizes else SIZES
    )
    for op in arguments.ops:
        if op not in OPS:
            parser.error(f"--ops {op}: choose from {', '.join(OPS)}")
    print(
        f"{'operation':<15}{'ranks':>5}{'size':>9}{'gloo us':>13}{'resilient us':>15}{'ratio':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/rows"
        for ranks in (int(r) for r in arguments.ranks.split(",")):
            store = f"{folder}/store{ranks}"
            mp.spawn(rank_main, (ranks, arguments, store, out), nprocs=ranks)
        rows = [json.loads(line) for line in Path(out).read_text().splitlines()]
    ratios = sorted(row["ratio"] for row in rows)
    slower = [row for row in rows if row["ratio"] < 1]
    worst = min(rows, key=lambda row: row["ratio"])
    print(
        f"\n{len(rows)} rows; median ratio {statistics.median(ratios):.2f}; "
        f"{len(slower)} below 1.0; worst {worst['ratio']:.2f} "
        f"({worst['op']}, {worst['ranks']} ranks, {size_text(worst['bytes'])})"
    )
    if arguments.json:
        described = [{**about(), **row} for row in rows]
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in described))


if __name__ == "__main__":
    main()
