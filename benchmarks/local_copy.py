"""Large messages within one host against what the machine can copy."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from common import (
    Report,
    Row,
    add_common_arguments,
    format_size,
    median,
    parse_size,
    run_ranks,
    write_rows,
)

ABOUT = """\
Rank 0 gets a tensor of rank 1 in four ways, which take turns in one run:

  memcpy      rank 0 copies a tensor of its own: one processor, no other process. The limit
  one copy    process_vm_readv: rank 0 copies out of rank 1's memory, by the kernel
  resilient   send and recv, through the ring of shared memory: rank 1 copies in, rank 0 out
  gloo        send and recv

In the ring two processors copy at a time, and the data between them stays in their caches. Two
copies there can therefore be faster than one. The column of process_vm_readv is empty if the
system forbids it (it needs the right to trace the other process). Every copy is checked.

  share = resilient's rate / memcpy's
"""

WAYS = ("memcpy", "one_copy", "resilient", "gloo")
SIZES = "1M,4M,16M,64M,256M"


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


def read_memory(pid: int, theirs: int, mine: int, size: int) -> bool:
    """Copies `size` bytes at address `theirs` of process `pid`; False if that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = 0
    while done < size:
        here = _Piece(mine + done, size - done)
        there = _Piece(theirs + done, size - done)
        count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            return False
        done += count
    return True


def measure(rank: int, ranks: int, report: Report, sizes: Sequence[int], rounds: int) -> None:
    """Rank 0 reports one row for each size."""
    groups = {"resilient": dist.new_group(backend="resilient"), "gloo": dist.group.WORLD}
    for size in sizes:
        data = torch.full((size,), 6 + rank, dtype=torch.uint8)
        place = torch.zeros(size, dtype=torch.uint8)
        where = [torch.zeros(2, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(where, torch.tensor([os.getpid(), data.data_ptr()]))
        pid, address = where[1].tolist()
        seconds: dict[str, list[float]] = {
            "memcpy": [],
            "one_copy": [],
            "resilient": [],
            "gloo": [],
        }
        for _ in range(rounds + 1):  # the first one warms up
            for way, group in groups.items():
                dist.barrier()
                if rank == 1:
                    dist.send(data, 0, group)
                else:
                    place.zero_()
                    begun = time.perf_counter()
                    dist.recv(place, 1, group)
                    seconds[way].append(time.perf_counter() - begun)
                    assert bool((place == 7).all())
            if rank == 0:
                begun = time.perf_counter()
                place.copy_(data)
                seconds["memcpy"].append(time.perf_counter() - begun)
                place.zero_()
                begun = time.perf_counter()
                if read_memory(pid, address, place.data_ptr(), size):
                    seconds["one_copy"].append(time.perf_counter() - begun)
                    assert bool((place == 7).all())
        dist.barrier()
        if rank == 0:
            rates = {way: size / median(s[1:]) if s else None for way, s in seconds.items()}
            report({"benchmark": "local_copy", "size": size, "bytes_per_s": rates})


def line(row: Row) -> str:
    """One row of the table."""
    rates = row["bytes_per_s"]
    text = f"{format_size(row['size']):>9}"
    for way in WAYS:
        text += f"  {rates[way] / 1e9:9.2f}" if rates[way] else f"  {'-':>9}"
    return text + f"  {rates['resilient'] / rates['memcpy']:6.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help=f"of the tensor (default {SIZES})")
    parser.add_argument("--rounds", type=int, help="samples (default 15, quick: 5)")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    rounds = options.rounds or (5 if options.quick else 15)
    print(f"{'GB/s':>9}     memcpy   one copy  resilient       gloo   share")
    rows: list[Row] = []

    def show(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)

    for row in run_ranks(measure, 2, sizes, rounds, realtime=options.realtime):
        show(row)
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
