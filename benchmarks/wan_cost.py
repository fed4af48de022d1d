"""Measures what a stream between two sites costs, in the lab: processor time and memory.

    python benchmarks/wan_cost.py

Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Row, add_common_arguments, median, show_rows
from lab_job import say, start_job

from torch_resilient.testing import LabJob, NetworkLab

ABOUT = """\
Two hosts with one rank each, and a link of 1 Gbit/s and 20 ms between them. Rank 0 sends messages
of 16 MiB one after the other. Jobs with these settings take turns on the same link:

  tcp       connections, as many as raise the goodput
  tcp8      eight connections
  udp       datagrams for everything, encrypted as always
  gloo      torch's own backend

Printed for each: the rate, the processor time of each end for 1e9 bytes (all threads of the rank,
in user mode and in the kernel), and by how much its memory has grown from before the first message
to the end. What the kernel does when a packet arrives counts for the process that carries the link:
so the figures of connections, which send when an acknowledgement arrives, are a little too low.

Exit status 1 if datagrams take more than 1.5 CPU-seconds for 1e9 bytes at an end.
"""

CONTENDERS: dict[str, dict[str, str]] = {
    "tcp": {"TORCH_RESILIENT_WAN": "tcp"},
    "tcp8": {"TORCH_RESILIENT_WAN": "tcp", "TORCH_RESILIENT_WAN_CONNECTIONS": "8"},
    "udp": {"TORCH_RESILIENT_WAN": "udp"},
    "gloo": {},
}
DELAY_S, BYTES_PER_S = 0.02, 125e6
MESSAGE_BYTES = 16 << 20
CPU_MAX_S_PER_GB = 1.5
FIRST_PORT = 29400
LIMIT_S = 120.0


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def worker(job: dict[str, Any]) -> None:
    """One rank; each line of its input is a number of messages."""
    if job["realtime"]:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    dist.init_process_group("gloo" if job["name"] == "gloo" else "resilient")
    rank = dist.get_rank()
    data = torch.ones(MESSAGE_BYTES // 4)
    before = resident_bytes()
    say("ready")
    for line in sys.stdin:
        count = int(line)
        dist.barrier()
        begun, cpu = time.monotonic(), os.times()
        for _ in range(count):
            if rank == 0:
                dist.send(data, 1)
            else:
                dist.recv(data, 0)
        dist.barrier()  # a send may end before it has arrived
        took_s, now = time.monotonic() - begun, os.times()
        say(
            "end",
            rank=rank,
            took_s=took_s,
            cpu_s=now.user + now.system - cpu.user - cpu.system,
            more_bytes=resident_bytes() - before,
        )


def turn(job: LabJob, count: int) -> Row:
    """One stream of `count` messages; figures of rank 0 and rank 1."""
    job.tell(str(count))
    ends = sorted((job.row("end", LIMIT_S) for _ in range(2)), key=lambda row: int(row["rank"]))
    sent = count * MESSAGE_BYTES
    return {
        "bytes_per_s": sent / max(end["took_s"] for end in ends),
        "sender_cpu_s_per_gb": ends[0]["cpu_s"] / sent * 1e9,
        "receiver_cpu_s_per_gb": ends[1]["cpu_s"] / sent * 1e9,
        "sender_more_bytes": ends[0]["more_bytes"],
        "receiver_more_bytes": ends[1]["more_bytes"],
    }


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """One row for each contender."""
    with NetworkLab() as lab, contextlib.ExitStack() as stack:
        hosts = [lab.host("a"), lab.host("b")]
        link = lab.link(*hosts, delay_s=DELAY_S, rate_bytes_per_s=BYTES_PER_S)
        jobs = {
            name: stack.enter_context(
                start_job(
                    __file__,
                    hosts,
                    link,
                    {"name": name, "realtime": options.realtime},
                    environment=environment,
                    port=FIRST_PORT + k,
                )
            )
            for k, (name, environment) in enumerate(CONTENDERS.items())
        }
        for job in jobs.values():
            for _ in range(2):
                job.row("ready", LIMIT_S)
        count, rounds = (8, 2) if options.quick else (30, 5)
        turns: dict[str, list[Row]] = {name: [] for name in jobs}
        for _ in range(rounds + 1):  # the first one opens connections and touches memory
            for name, job in jobs.items():
                turns[name].append(turn(job, count))
    for name, rows in turns.items():
        figures = {key: median([row[key] for row in rows[1:]]) for key in rows[0]}
        figures |= {key: rows[-1][key] for key in figures if key.endswith("_more_bytes")}
        cpu = max(figures["sender_cpu_s_per_gb"], figures["receiver_cpu_s_per_gb"])
        yield {
            "contender": name,
            "delay_ms": DELAY_S * 1e3,
            "rate_mbit": BYTES_PER_S * 8e-6,
            "message_bytes": MESSAGE_BYTES,
            "messages": count,
            "rounds": rounds,
            **figures,
            "cpu_max_s_per_gb": CPU_MAX_S_PER_GB if name == "udp" else None,
            "met": name != "udp" or cpu <= CPU_MAX_S_PER_GB,
        }


def describe_row(row: Row) -> str:
    """One line for people."""
    return (
        f"{row['contender']:<5} {row['bytes_per_s'] * 8e-6:4.0f} Mbit/s  CPU s/GB: sender "
        f"{row['sender_cpu_s_per_gb']:.2f}, receiver {row['receiver_cpu_s_per_gb']:.2f}  "
        f"more memory: {row['sender_more_bytes'] / 2**20:.0f} and "
        f"{row['receiver_more_bytes'] / 2**20:.0f} MiB{'' if row['met'] else '  MISSED'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each contender; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    return show_rows(options, "wan_cost", measure(options), describe_row)


if __name__ == "__main__":
    sys.exit(main())
