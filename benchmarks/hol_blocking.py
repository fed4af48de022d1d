"""Whether a slow peer delays the traffic to the others, and how long isend holds its caller."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from common import (
    Report,
    Row,
    add_common_arguments,
    median,
    quantile,
    run_ranks,
    write_rows,
)

from torch_resilient import faults

ABOUT = """\
Three ranks. Rank 0 streams to rank 1 over a good link; the link from rank 0 to rank 2 is 100 times
slower (an injected fault, on real connections).

  blocking     throughput 0 -> 1 while 64 MiB are under way to the slow peer, over the throughput
               without: with / mean(before, after), in every round. The next column, `A/A`, is after
               / before, both without: the noise of this machine. First with the links as fast as
               loopback, where the processor is the limit, then with the good link at 200 MB/s,
               where only waiting can show.
  isend        how long isend of 64 MiB holds the caller, the two backends taking turns; for
               resilient also with the slow peer as the target, over its slow link. The
               next column is the processor time of the calling thread: where it is far below the
               time, the caller had to wait, for the backend or for a core

gloo has no way to slow one of its links, so its throughput with a slow peer is not measured.
Exit status 1 if a limit is missed: the median ratio must be at least 0.95, the median and the
99th percentile of isend below 100 us.
"""

RATIO_MIN = 0.95
ISEND_MAX_S = 100e-6  # a small part of one step of a pipeline; a copy of 64 MiB takes 6000 us
SLOWER = 100
GOOD_LINK_BYTES_PER_S = 200e6
MESSAGE_BYTES = 1024**2
SLOW_BYTES = 64 * 1024**2  # more than the slow link carries in a phase, at any of the rates
PHASE_S = 0.3  # long against scheduling noise, short enough for many rounds


class Bench:
    """The measurements of one rank. All ranks call the same methods in the same order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.resilient = dist.new_group(backend="resilient")
        self.message = torch.ones(MESSAGE_BYTES // 4)
        self.large = torch.ones(SLOW_BYTES // 4)
        self.answer = torch.zeros(1)
        self.isend_slow_s: list[float] = []
        self.isend_slow_cpu_s: list[float] = []
        self._beat(1)  # connects, and faults the buffers in
        self._agree(0.0)

    def _agree(self, value: float) -> float:
        """Rank 0's value, on all ranks; also a barrier. Over gloo, the default group."""
        agreed = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(torch.zeros(1))
        dist.broadcast(agreed, 0)
        return float(agreed.item())

    def _beat(self, messages: int) -> float:
        """Streams 0 -> 1; bytes per second on rank 0, 0 on the others."""
        start = time.perf_counter()
        if self.rank == 0:
            works = [dist.isend(self.message, 1, self.resilient) for _ in range(messages)]
            dist.recv(self.answer, 1, self.resilient)
            for work in works:
                assert work is not None
                work.wait()
            return messages * MESSAGE_BYTES / (time.perf_counter() - start)
        if self.rank == 1:
            for _ in range(messages):
                dist.recv(self.message, 0, self.resilient)
            dist.send(self.answer, 0, self.resilient)
        return 0.0

    def _beside_slow(self, messages: int, slow_bytes_per_s: float) -> float:
        """Measures as _beat does, while rank 2 receives over the slow link all the time."""
        work = fault = None
        if self.rank == 0:
            fault = faults.limit(slow_bytes_per_s, peer=2)
            cpu, start = time.thread_time(), time.perf_counter()
            work = dist.isend(self.large, 2, self.resilient)
            self.isend_slow_s.append(time.perf_counter() - start)
            self.isend_slow_cpu_s.append(time.thread_time() - cpu)
        elif self.rank == 2:
            work = dist.irecv(self.large, 0, self.resilient)
        self._agree(0.0)
        speed = self._beat(messages)
        if self.rank == 2:
            # The phase ends on rank 0; only then is this a valid sample.
            dist.recv(self.answer, 0)
            assert work is not None
            if work.is_completed():
                raise RuntimeError("the slow transfer ended within the phase: nothing was measured")
        elif self.rank == 0:
            dist.send(self.answer, 2)
            assert fault is not None
            fault.clear()
        if work is not None:
            work.wait()
        self._agree(0.0)
        return speed

    def blocking(self, good_bytes_per_s: float | None, rounds: int) -> Row:
        """Throughput to rank 1 without, with and again without traffic to rank 2."""
        fault = None
        if self.rank == 0 and good_bytes_per_s:
            fault = faults.limit(good_bytes_per_s, peer=1)
        pilot = [self._beat(32) for _ in range(4)]  # rises while the connection warms up
        full = self._agree(median(pilot[1:]))
        messages = max(4, round(full * PHASE_S / MESSAGE_BYTES))
        samples = []
        for _ in range(rounds):
            before = self._beat(messages)
            self._agree(0.0)
            beside = self._beside_slow(messages, full / SLOWER)
            samples.append((before, beside, self._beat(messages)))
            self._agree(0.0)
        if fault:
            fault.clear()
        if self.rank != 0:
            return {}
        ratios = [beside / ((before + after) / 2) for before, beside, after in samples]
        noise = [after / before for before, _, after in samples]
        return {
            "benchmark": "hol_blocking",
            "good_link": good_bytes_per_s or "loopback",
            "slow_bytes_per_s": full / SLOWER,
            "without_bytes_per_s": median([s for a, _, b in samples for s in (a, b)]),
            "with_bytes_per_s": median([beside for _, beside, _ in samples]),
            "ratio": median(ratios),
            "ratio_p10": quantile(ratios, 0.1),
            "ratio_p90": quantile(ratios, 0.9),
            "noise_p10": quantile(noise, 0.1),
            "noise": median(noise),
            "noise_p90": quantile(noise, 0.9),
            "samples_bytes_per_s": samples,
        }

    def isend(self, repetitions: int) -> list[Row]:
        """How long isend of 64 MiB takes to return."""
        groups = {"gloo": dist.group.WORLD, "resilient": self.resilient}
        samples: dict[str, list[float]] = {backend: [] for backend in groups}
        used: dict[str, list[float]] = {backend: [] for backend in groups}
        for i in range(repetitions):
            for backend in ("gloo", "resilient") if i % 2 else ("resilient", "gloo"):
                if self.rank == 0:
                    cpu, start = time.thread_time(), time.perf_counter()
                    work = dist.isend(self.large, 1, groups[backend])
                    samples[backend].append(time.perf_counter() - start)
                    used[backend].append(time.thread_time() - cpu)
                    dist.recv(self.answer, 1, groups[backend])
                    assert work is not None
                    work.wait()
                elif self.rank == 1:
                    dist.recv(self.large, 0, groups[backend])
                    dist.send(self.answer, 0, groups[backend])
        self._agree(0.0)
        if self.rank != 0:
            return []
        return [
            {
                "benchmark": "isend_return",
                "backend": backend,
                "target": target,
                "bytes": SLOW_BYTES,
                "median_us": median(times) * 1e6,
                "p99_us": quantile(times, 0.99) * 1e6,
                "median_cpu_us": median(cpu) * 1e6,
                "samples_us": [time_s * 1e6 for time_s in times],
            }
            for (backend, target), (times, cpu) in {
                ("gloo", "good"): (samples["gloo"], used["gloo"]),
                ("resilient", "good"): (samples["resilient"], used["resilient"]),
                ("resilient", "slow"): (self.isend_slow_s, self.isend_slow_cpu_s),
            }.items()
        ]


def measure(rank: int, _: int, report: Report, rounds: int, repetitions: int) -> None:
    """Runs all measurements; rank 0 reports."""
    bench = Bench(rank)
    for limit in (None, GOOD_LINK_BYTES_PER_S):
        report(bench.blocking(limit, rounds))
    for row in bench.isend(repetitions):
        report(row)


def verdict(row: Row) -> tuple[str, bool]:
    """One line for people, and whether the row keeps its limit."""
    if row["benchmark"] == "hol_blocking":
        link = row["good_link"]
        good = row["ratio"] >= RATIO_MIN
        return (
            f"blocking, {link if isinstance(link, str) else f'{link / 1e6:.0f} MB/s'}: "
            f"{row['without_bytes_per_s'] / 1e6:.0f} MB/s without, "
            f"{row['with_bytes_per_s'] / 1e6:.0f} beside a peer at "
            f"{row['slow_bytes_per_s'] / 1e6:.1f} MB/s; ratio {row['ratio']:.3f} "
            f"({row['ratio_p10']:.2f} - {row['ratio_p90']:.2f}), A/A {row['noise']:.3f} "
            f"({row['noise_p10']:.2f} - {row['noise_p90']:.2f})",
            good,
        )
    good = row["backend"] != "resilient" or row["p99_us"] < ISEND_MAX_S * 1e6
    return (
        f"isend 64 MiB, {row['backend']}, {row['target']} peer: "
        f"median {row['median_us']:.1f} us, p99 {row['p99_us']:.1f} us, "
        f"of its own processor time {row['median_cpu_us']:.1f} us, {len(row['samples_us'])} calls",
        good,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each measurement; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, help="of blocking (default 20, quick: 5)")
    parser.add_argument("--repetitions", type=int, help="of isend (default 200, quick: 50)")
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    rounds = options.rounds or (5 if options.quick else 20)
    repetitions = options.repetitions or (50 if options.quick else 200)
    kept = True
    rows: list[Row] = []
    for row in run_ranks(measure, 3, rounds, repetitions, realtime=options.realtime):
        text, good = verdict(row)
        print(f"{'ok    ' if good else 'FAILED'} {text}", flush=True)
        rows.append(row)
        kept = kept and good
    write_rows(options.json, rows)
    print("gloo cannot slow one of its links: its throughput beside a slow peer is not measured")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
