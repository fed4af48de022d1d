"""The cost of encryption: TCP over loopback in plaintext and with TLS, in turns."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

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

from torch_resilient import stats
from torch_resilient.cli.secret import write_secret

ABOUT = """\
Two pairs of processes, one in plaintext and one with TORCH_RESILIENT_ENCRYPTION=required, take
turns in one run. Shared memory is off: everything goes over TCP. In each pair one rank sends, and
the other one answers with one number when it has all.

  MB/s          from the call of send to that answer
  CPU s/GB      processor time of the sender, and of the receiver, for each GB
  us            half a round trip of a small message
  rate ratio    encrypted / plaintext
  more CPU      encrypted - plaintext, sender and receiver

Loopback is the worst case: no link is slower than the processor. A link needs more than the rate of
the encrypted pair to be limited by it. Every message is checked.
"""

PAIRS = ("plain", "encrypted")
SIZES = "64K,1M,16M,64M"


def transfer(pair_rank: int, ranks: list[int], data: torch.Tensor, group: dist.ProcessGroup) -> Row:
    """One message from the first rank of the pair to the second; what it took on this rank."""
    answer = torch.zeros(1, dtype=torch.int64)
    used, begun = time.process_time(), time.perf_counter()
    if pair_rank == 0:
        dist.send(data, ranks[1], group)
        dist.recv(answer, ranks[1], group)
    else:
        dist.recv(data, ranks[0], group)
        dist.send(answer, ranks[0], group)
    return {"s": time.perf_counter() - begun, "cpu_s": time.process_time() - used}


def measure(
    rank: int, ranks: int, report: Report, secret: str, sizes: Sequence[int], rounds: int
) -> None:
    """Rank 0 reports one row for each size."""
    mine, pair_rank = PAIRS[rank // 2], rank % 2
    os.environ["TORCH_RESILIENT_SHARED_MEMORY"] = "false"
    if mine == "encrypted":
        os.environ["TORCH_RESILIENT_SECRET_FILE"] = secret
        os.environ["TORCH_RESILIENT_ENCRYPTION"] = "required"
    groups = {
        pair: dist.new_group([2 * i, 2 * i + 1], backend="resilient")
        for i, pair in enumerate(PAIRS)
    }
    group = groups[mine]
    members = [rank - pair_rank, rank - pair_rank + 1]
    for size in sizes:
        data = torch.full((size,), 7 if pair_rank == 0 else 0, dtype=torch.uint8)
        repeats = max(1, (1 << 20) // size)  # a clock tick must not count
        taken: list[Row] = []
        for _ in range(rounds + 1):  # the first one warms up
            for pair in PAIRS:
                dist.barrier()
                if pair == mine:
                    if pair_rank == 1:
                        data.zero_()
                    each = [transfer(pair_rank, members, data, group) for _ in range(repeats)]
                    taken.append({k: sum(e[k] for e in each) / repeats for k in each[0]})
                    assert bool((data == 7).all())
        here = torch.tensor(
            [median([t[key] for t in taken[1:]]) for key in ("s", "cpu_s")], dtype=torch.float64
        )
        gathered = [torch.zeros_like(here) for _ in range(ranks)]
        dist.all_gather(gathered, here)
        row: Row = {"benchmark": "encryption", "size": size}
        for i, pair in enumerate(PAIRS):
            sender, receiver = gathered[2 * i].tolist(), gathered[2 * i + 1].tolist()
            row[pair] = {
                "s": sender[0],
                "bytes_per_s": size / sender[0],
                "sender_cpu_s_per_gb": sender[1] / size * 1e9,
                "receiver_cpu_s_per_gb": receiver[1] / size * 1e9,
            }
        report(row)
    encrypted = {path.encrypted for peer in stats(group).peers for path in peer.paths}
    assert encrypted == {mine == "encrypted"}, f"{mine}: {encrypted}"
    small(mine, pair_rank, members, group, report, rounds)


def small(
    mine: str,
    pair_rank: int,
    members: list[int],
    group: dist.ProcessGroup,
    report: Report,
    rounds: int,
) -> None:
    """Rank 0 reports half a round trip of 8 bytes."""
    ball = torch.zeros(1, dtype=torch.int64)
    halves: list[float] = []
    for _ in range(rounds + 1):
        for pair in PAIRS:
            dist.barrier()
            if pair != mine:
                continue
            for _ in range(100):
                begun = time.perf_counter()
                for side in (0, 1):
                    if pair_rank == side:
                        dist.send(ball, members[1 - pair_rank], group)
                    else:
                        dist.recv(ball, members[1 - pair_rank], group)
                halves.append((time.perf_counter() - begun) / 2)
    here = torch.tensor([median(halves[100:])], dtype=torch.float64)
    gathered = [torch.zeros_like(here) for _ in range(2 * len(PAIRS))]
    dist.all_gather(gathered, here)
    times = {pair: {"s": gathered[2 * i].item()} for i, pair in enumerate(PAIRS)}
    report({"benchmark": "encryption", "size": 8, **times})


def line(row: Row) -> str:
    """One row of the table."""
    plain, sealed = row["plain"], row["encrypted"]
    if row["size"] == 8:
        more = (sealed["s"] - plain["s"]) * 1e6
        return (
            f"half a round trip of 8 B: {plain['s'] * 1e6:.1f} us in plaintext, "
            f"{sealed['s'] * 1e6:.1f} us encrypted: {more:+.1f} us"
        )
    text = f"{format_size(row['size']):>9}"
    for each in (plain, sealed):
        text += f"  {each['bytes_per_s'] / 1e6:8.0f}"
        text += f"  {each['sender_cpu_s_per_gb']:5.2f} {each['receiver_cpu_s_per_gb']:5.2f}"
    text += f"  {sealed['bytes_per_s'] / plain['bytes_per_s']:10.2f}"
    for end in ("sender_cpu_s_per_gb", "receiver_cpu_s_per_gb"):
        text += f"  {sealed[end] - plain[end]:+.2f}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help=f"of the message (default {SIZES})")
    parser.add_argument("--rounds", type=int, help="samples (default 15, quick: 5)")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    sizes = [parse_size(text) for text in options.sizes.split(",")]
    rounds = options.rounds or (5 if options.quick else 15)
    print(f"{'':>9}  {'plain: MB/s, CPU s/GB':>21}  {'encrypted: the same':>21}", end="")
    print("  rate ratio  more CPU s/GB")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        secret = Path(folder) / "secret"
        write_secret(secret)
        for row in run_ranks(
            measure, 2 * len(PAIRS), str(secret), sizes, rounds, realtime=options.realtime
        ):
            rows.append(row)
            print(line(row), flush=True)
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
