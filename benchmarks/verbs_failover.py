"""How long a stream over RDMA pauses at each kind of failure, in the verbs lab.

    python benchmarks/verbs_failover.py
    torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        benchmarks/verbs_failover.py --job idle

Needs root and what `make verbs-lab` builds. As the program of a job of two ranks, it only needs
hosts with RDMA devices: make the failures yourself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from common import Row, add_common_arguments, median, quantile, show_rows
from lab_job import say, start_job

from torch_resilient.testing import LabJob, VerbsLab

ABOUT = """\
Two guests with two RDMA devices each. Rank 1 sends to rank 0 without end: 8 B every 2 ms ("idle":
a path has at most one message) or 1 MiB at a time ("loaded": a fault is in mid-message). Every few
seconds the network that carries fails for a while. The order is random, from --seed.

  pause   the longest time between two messages at the receiver from the beginning of the fault
          until it has ended
  base    the same in as long a time without a fault, just before: what the machine adds
  silent  how often a path was replaced because nothing completed
  lost    how often a path was replaced at all, in the repetition with the most
  wrong   messages with wrong bytes

A path that is lost again and again waits longer before it returns, up to hold_down_max_s. Single
failures are measured with 0.5 s, so that the next one finds the path there; flapping with the
default, and a path may be lost five times.

With --job it streams between the two ranks of the job without end, and rank 0 prints once a second
the longest pause, how many RDMA paths carry ("up"), and these counts. Switch interfaces off and on.

Median and 99th percentile are compared with the limits; with few repetitions, the latter is the
maximum. Exit status 1 if one is missed or a message is wrong.
"""

SUSPECT_S = 0.040
LIMIT_S = 90.0
FAULT_S = 0.7
FLAP_S = 30.0
HOLD_DOWN_MAX_S = 0.5
TICK_S = 0.05
JOB_TICK_S = 1.0
NICS = ("eth0", "eth1")
SIZES = {"idle": 8, "loaded": 1 << 20}
PERIODS_S = {"idle": 0.002, "loaded": 0.0}
ports = itertools.count(29400)


@dataclass(frozen=True)
class Case:
    """A kind of failure, as the first words of a script's event, and its limits."""

    name: str
    begin: str
    median_max_s: float
    p99_max_s: float
    fault_s: float = FAULT_S
    lost_max: int | None = None


SILENCE = (SUSPECT_S + 0.060, SUSPECT_S + 0.200)
CASES = [
    Case("NIC of the sender off", "{nic} down admin b", 0.060, 0.150),
    Case("NIC of the receiver off", "{nic} down admin a", 0.060, 0.150),
    Case("cable of the sender out", "{nic} down carrier b", 0.060, 0.150),
    Case("cable of the receiver out", "{nic} down carrier a", 0.060, 0.150),
    Case("switch drops all", "{nic} down", *SILENCE),
    Case("only data lost", "{nic} b->a down", *SILENCE),
    Case("only ACKs lost", "{nic} a->b down", *SILENCE),
    Case("flapping 200 ms", "{nic} flap blackhole 200ms {end}s", 0.500, 0.500, FLAP_S, 5),
]


# ---- in a guest


def settings_of(load: str, tick_s: float) -> dict[str, Any]:
    """Of worker()."""
    return {"bytes": SIZES[load], "period_s": PERIODS_S[load], "tick_s": tick_s}


def worker(settings: dict[str, Any]) -> None:
    """A rank: the sender, or the receiver, which reports every `tick_s`."""
    import torch
    import torch.distributed as dist

    import torch_resilient

    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    pattern = torch.arange(settings["bytes"] // 8, dtype=torch.int64)
    message = torch.zeros_like(pattern)
    number = wrong = 0
    longest_s, last_s = 0.0, time.monotonic()
    told_s = last_s
    while True:
        if dist.get_rank() == 1:
            dist.send(pattern + number, 0)
            time.sleep(settings["period_s"])
        else:
            dist.recv(message, 1)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
            wrong += not torch.equal(message, pattern + number)
            if now_s > told_s + settings["tick_s"]:
                paths = [p for p in torch_resilient.stats().peers[0].paths if p.kind == "rdma"]
                silent = sum(p.times_suspect for p in paths)
                lost = silent + sum(p.reconnects for p in paths)
                up = sum(p.state == "up" for p in paths)
                say("tick", pause_s=longest_s, up=up, silent=silent, lost=lost, wrong=wrong)
                longest_s, told_s = 0.0, now_s
        number += 1


# ---- on the host


class Stream:
    """The job, and what its receiver reports."""

    def __init__(self, lab: VerbsLab, load: str, *, flapping: bool) -> None:
        self.lab = lab
        environment = {"TORCH_RESILIENT_INTERFACE": "eth0,eth1"}
        if not flapping:
            environment["TORCH_RESILIENT_HOLD_DOWN_MAX_S"] = str(HOLD_DOWN_MAX_S)
        self.job: LabJob = start_job(
            __file__,
            list(lab.guests.values()),
            lab.control,
            settings_of(load, TICK_S),
            environment=environment,
            port=next(ports),
        )
        self.settle()

    def settle(self) -> Row:
        """Waits until both paths carry."""
        return self.job.until(lambda row: row.get("up") == 2, "two RDMA paths", LIMIT_S)

    def longest(self, duration_s: float) -> Row:
        """The longest pause from now on, until a message comes after `duration_s`."""
        while not self.job.rows.empty():
            self.job.rows.get()
        end = time.monotonic() + duration_s
        pauses: list[float] = []

        def over(row: Row) -> bool:
            pauses.append(row["pause_s"])
            return time.monotonic() > end

        return {**self.job.until(over, "message", LIMIT_S), "pause_s": max(pauses)}


def carried(lab: VerbsLab) -> dict[str, int]:
    """Bytes from the sender that each data network has delivered."""
    return {nic: int(lab.networks[nic].counters("b->a").delivered.bytes) for nic in NICS}


def one_case(stream: Stream, case: Case) -> Row:
    """A fault of the network that carries, and as long a time without."""
    stream.settle()
    then = carried(stream.lab)
    before = stream.longest(min(case.fault_s, 2.0))
    now = carried(stream.lab)
    nic = max(NICS, key=lambda each: now[each] - then[each])
    network = stream.lab.networks[nic]
    script = "0s " + case.begin.format(nic=nic, end=f"{case.fault_s:.2f}")
    player = stream.lab.play(script)
    try:
        after = stream.longest(case.fault_s)
    finally:
        player.cancel()
        network.up()
    player.check()
    return {
        "pause_s": after["pause_s"],
        "base_s": before["pause_s"],
        "silent": after["silent"] - before["silent"],
        "lost": after["lost"] - before["lost"],
        "wrong": after["wrong"],
    }


def measure(quick: bool, seed: int) -> Iterator[Row]:
    """All rows, as they come."""
    count = 2 if quick else 10
    chance = random.Random(seed)
    with VerbsLab(seed=seed, preload=["torch", "torch_resilient"]) as lab:
        for guest in lab.guests.values():
            guest.wait_for_preload()
        for load in SIZES:
            single = [case for case in CASES if case.lost_max is None]
            flapping = [case for case in CASES if case.lost_max is not None]
            found: dict[Case, list[Row]] = {case: [] for case in CASES}
            stream = Stream(lab, load, flapping=False)
            for case in chance.sample(single * count, len(single) * count):
                found[case].append(one_case(stream, case))
            stream.job.close()
            # Long, and each has 75 outages. A new job: no path has been lost there yet.
            for case in flapping * max(1, count // 5):
                stream = Stream(lab, load, flapping=True)
                found[case].append(one_case(stream, case))
                stream.job.close()
            for case, rows in found.items():
                yield summary(case, load, seed, rows)


def summary(case: Case, stream: str, seed: int, rows: Sequence[Row]) -> Row:
    """One row of the table."""
    pauses = [row["pause_s"] for row in rows]
    middle, high = median(pauses), quantile(pauses, 0.99)
    wrong = max(row["wrong"] for row in rows)
    few = case.lost_max is None or all(row["lost"] <= case.lost_max for row in rows)
    return {
        "fault": case.name,
        "stream": stream,
        "seed": seed,
        "repetitions": len(rows),
        "median_s": middle,
        "p99_s": high,
        "median_max_s": case.median_max_s,
        "p99_max_s": case.p99_max_s,
        "base_s": median([row["base_s"] for row in rows]),
        "silent": sum(row["silent"] for row in rows),
        "lost": max(row["lost"] for row in rows),
        "lost_max": case.lost_max,
        "wrong": wrong,
        "met": middle <= case.median_max_s and high <= case.p99_max_s and few and wrong == 0,
    }


def describe_row(row: Row) -> str:
    """One line for people."""
    return (
        f"{row['fault']:<25} {row['stream']:<6} x {row['repetitions']:<2}: pause median "
        f"{row['median_s'] * 1e3:4.0f} ms (limit {row['median_max_s'] * 1e3:.0f}), p99 "
        f"{row['p99_s'] * 1e3:4.0f} (limit {row['p99_max_s'] * 1e3:.0f}); without a fault "
        f"{row['base_s'] * 1e3:3.0f}; silent {row['silent']}, lost {row['lost']}, "
        f"wrong {row['wrong']}: "
        f"{'met' if row['met'] else 'MISSED'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each kind of failure; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--seed", type=int, default=1, help="of the order")
    parser.add_argument(
        "--job", choices=list(SIZES), help="this is a rank of a job: stream, and report pauses"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.job:
        worker(settings_of(options.job, JOB_TICK_S))
        return 0
    if options.worker:
        worker(json.loads(options.worker))
        return 0
    rows = measure(options.quick, options.seed)
    return show_rows(options, "verbs_failover", rows, describe_row)


if __name__ == "__main__":
    sys.exit(main())
