"""Shared by the benchmarks: ranks as processes, sizes, quantiles and self-describing results.

All ranks run on this machine and talk over the loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_resilient
from torch_resilient.testing import LabUnavailable

Row = dict[str, Any]
Report = Callable[[Row], None]

# A rank that is stuck for this long fails the run; the slowest single operation takes seconds.
TIMEOUT = timedelta(seconds=120)


def parse_size(text: str) -> int:
    """Bytes from "8", "64K" or "1M" (powers of 1024). Raises ArgumentTypeError."""
    units = {"K": 1024, "M": 1024**2, "G": 1024**3}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected bytes such as 8, 64K or 1M")
    return int(number) * unit


def format_size(size: int) -> str:
    """The opposite of parse_size, for tables."""
    for unit, suffix in ((1024**3, " GiB"), (1024**2, " MiB"), (1024, " KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{suffix}"
    return f"{size} B"


def quantile(values: Sequence[float], part: float) -> float:
    """The value below which `part` (0 to 1) of `values` lie, interpolated."""
    ordered = sorted(values)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    """The middle of `values`."""
    return quantile(values, 0.5)


def describe() -> Row:
    """The circumstances of a result: code, versions, machine, command, load."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    processor = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {
        "commit": git("rev-parse", "HEAD") or "unknown",
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "torch": torch.__version__,
        "torch_resilient": torch_resilient.__version__,
        "machine": {
            "processor": processor,
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release().partition("-")[0],
        },
        "environment": {
            key: value
            for key, value in os.environ.items()
            if key.startswith(("TORCH_RESILIENT_", "GLOO_")) and "SECRET" not in key
        },
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "load": os.getloadavg()[0],
    }


def write_rows(path: Path | None, rows: Sequence[Row]) -> None:
    """Appends one line of JSON for each row, with describe() in it; None: nowhere.

    Call it once, when all is measured. run.py takes a file without rows for a benchmark that
    broke off, and a file with rows and exit status 1 for one that misses its limits.
    """
    if path is None:
        return
    about = describe()
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**row, **about}) + "\n" for row in rows)


def show_rows(
    options: argparse.Namespace, name: str, rows: Iterable[Row], describe_row: Callable[[Row], str]
) -> int:
    """Prints one line for each row as it comes, and writes all; returns the exit status.

    It is 1 if a row is not "met" or there is none, and 2, without rows, where the lab cannot run.
    """
    kept: list[Row] = []
    try:
        for row in rows:
            kept.append({"benchmark": name, **row})
            print(describe_row(kept[-1]), flush=True)
    except LabUnavailable as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    write_rows(options.json, kept)
    return int(not kept or not all(row["met"] for row in kept))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that all benchmarks have."""
    parser.add_argument("--quick", action="store_true", help="a smoke run: coarse numbers, soon")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append one self-describing line per row"
    )
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run the ranks at real-time priority (SCHED_RR; needs the right to), which keeps "
        "other processes of a shared machine out of the numbers",
    )


def _rank_main(
    function: Callable[..., None],
    rank: int,
    ranks: int,
    backend: str,
    store: str,
    realtime: bool,
    pipe: multiprocessing.connection.Connection,
    arguments: tuple[Any, ...],
) -> None:
    if realtime:  # before any thread exists: they inherit it
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        function(rank, ranks, pipe.send if rank == 0 else lambda row: None, *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(
    function: Callable[..., None],
    ranks: int,
    *arguments: Any,
    backend: str = "gloo",
    realtime: bool = False,
) -> Iterator[Row]:
    """Runs `function(rank, ranks, report, *arguments)` in `ranks` processes of one `backend`.

    Yields what rank 0 reports, as it comes. Raises RuntimeError if a rank fails; then, and if
    the caller stops early, all ranks are ended.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_RESILIENT_INTERFACE", "lo")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        receive, send = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, ranks, backend, f"{folder}/store", realtime, send, arguments),
            )
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            send.close()
            running = {process.sentinel: rank for rank, process in enumerate(processes)}
            pipes = [receive]  # until every rank has closed its end
            while pipes or running:
                for ready in multiprocessing.connection.wait([*pipes, *running]):
                    if ready is receive:
                        try:
                            row = receive.recv()
                        except EOFError:
                            pipes.clear()
                        else:
                            yield row
                    elif isinstance(ready, int):
                        rank = running.pop(ready)
                        processes[rank].join()
                        code = processes[rank].exitcode
                        if code != 0:
                            raise RuntimeError(
                                f"rank {rank} of {ranks} ended with {code}; see its message above"
                            )
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            receive.close()
