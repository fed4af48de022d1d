"""The cost of memory safety of RDMA paths while nothing fails, against trust in completions.

    make -C csrc safety-cost
    python benchmarks/verbs_safety.py

Two builds of csrc/tests/verbs/safety_cost.cpp run in turn: the code as it is, and one that takes
the completion of a send for an acknowledgement, and lets receives end while devices may write to
them (csrc/base/trusted_completions.h). Both send messages between two channels in one thread, over
RDMA devices in memory that complete at once. So all time is that of the code: both ends, the
devices, and their copies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from common import Row, add_common_arguments, format_size, median, quantile, write_rows

ABOUT = """\
Times are those of the thread, so that other work on the machine counts less. Each run with trust
lies between two without; the cost is the median of the differences, and "noise" that of the two.
"point" are point-to-point messages, "collective" those of collectives, whose senders wait for the
acknowledgement; in "read" the far end's device reads them. Frames are those with data.
Instructions are counted by valgrind, if it is there, without those of copies: caches and other work
do not change them. The times also hold what else differs by chance: the two builds free memory at
other moments, and the larger messages only move through caches, at 10 (64 KiB) to 60 GB/s (read).
With less than an idle machine, differences of single per cents say nothing.

Limits: 50 ns a frame for messages below 64 KiB, 1 % of the throughput for larger ones. Exit status
1 if one is missed.
"""

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "core-release"
PROGRAMS = {"safe": BUILD / "verbs_safety", "trusting": BUILD / "verbs_safety_trusting"}
MAX_NS = 50.0
MAX_SHARE = 0.01
LARGE_BYTES = 64 << 10
ROUNDS = 1  # after one that warms up
LIMIT_S = 120.0
# Under valgrind, rounds are this part as long.
COUNTED_PART = 20
COUNTED_ROUNDS = 5
CACHEGRIND = ("valgrind", "--tool=cachegrind", "--cache-sim=no")
COPIES = re.compile("mem(cpy|move)")
COUNT_LINE = re.compile(r"\d+ (\d+)")


class Case(NamedTuple):
    """Messages of one kind and size."""

    kind: str
    size: int
    frames: int  # of a run: about 0.1 s


CASES = (
    Case("point", 8, 50_000),
    Case("point", 4096, 50_000),
    Case("collective", 64 << 10, 5_000),
    Case("collective", 1 << 20, 1_000),
    Case("read", 1 << 20, 4_000),
)


def run(program: Path, case: Case) -> float:
    """Nanoseconds of the thread for each frame."""
    command = [program, case.kind, str(case.size), str(case.frames), str(ROUNDS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} {case.kind} {case.size}: {done.stderr.strip()}")
    return float(done.stdout.split()[0])


def instructions(program: Path, case: Case) -> float | None:
    """Instructions for each frame but for copies, by cachegrind; None without valgrind."""
    if shutil.which("valgrind") is None:
        return None
    frames = case.frames // COUNTED_PART
    counts = [count_instructions(program, case, frames, n) for n in (1, 1 + COUNTED_ROUNDS)]
    return (counts[1] - counts[0]) / (frames * COUNTED_ROUNDS)


def count_instructions(program: Path, case: Case, frames: int, rounds: int) -> int:
    """Those of a whole run."""
    with tempfile.NamedTemporaryFile() as out:
        words = [program, case.kind, str(case.size), str(frames), str(rounds)]
        command = [*CACHEGRIND, f"--cachegrind-out-file={out.name}", *map(str, words)]
        subprocess.run(command, capture_output=True, check=True)
        return sum_instructions(Path(out.name).read_text(encoding="utf-8", errors="replace"))


def sum_instructions(counts: str) -> int:
    """Adds up the lines "LINE COUNT" of all functions but those that copy."""
    total, copies = 0, False
    for line in counts.splitlines():
        if line.startswith("fn="):
            copies = COPIES.search(line) is not None
        elif not copies and (found := COUNT_LINE.fullmatch(line)):
            total += int(found[1])
    return total


def compare(case: Case, runs: int) -> Row:
    """Runs both builds in turn, so that changes of the machine's speed cancel out."""
    safe, trusting, costs_ns, noises_ns = [], [], [], []
    for _ in range(runs):
        before = run(PROGRAMS["safe"], case)
        trusted = run(PROGRAMS["trusting"], case)
        after = run(PROGRAMS["safe"], case)
        safe += [before, after]
        trusting.append(trusted)
        costs_ns.append((before + after) / 2 - trusted)
        noises_ns.append(before - after)
    cost_ns, noise_ns = median(costs_ns), median(noises_ns)
    share = cost_ns / median(safe)
    large = case.size >= LARGE_BYTES
    return {
        "benchmark": "verbs_safety",
        "kind": case.kind,
        "bytes": case.size,
        "safe_ns": safe,
        "trusting_ns": trusting,
        "cost_ns": cost_ns,
        "noise_ns": noise_ns,
        "quartiles_ns": [quantile(costs_ns, 0.25), quantile(costs_ns, 0.75)],
        "less_throughput": share,
        "instructions": {name: instructions(program, case) for name, program in PROGRAMS.items()},
        "met": share <= MAX_SHARE if large else cost_ns < MAX_NS,
    }


def describe_row(row: Row) -> str:
    """One line for people."""
    low, high = row["quartiles_ns"]
    safe, trusting = row["instructions"].values()
    counted = "" if safe is None else f", {safe - trusting:+.0f} of {safe:.0f} instructions"
    return (
        f"{row['kind']:<10} {format_size(row['bytes']):>7}: {median(row['safe_ns']):9.1f} ns a "
        f"frame, with trust {median(row['trusting_ns']):9.1f}: {row['cost_ns']:+7.1f} ns, "
        f"{-row['less_throughput']:+.2%} of the throughput; quartiles {low:+.1f} and {high:+.1f}, "
        f"noise {row['noise_ns']:+.1f}{counted}: "
        f"{'met' if row['met'] else 'MISSED'}"
    )


def measure(quick: bool) -> Iterator[Row]:
    """All rows, as they come."""
    for case in CASES:
        yield compare(case, 5 if quick else 60)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each case; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    for name, program in PROGRAMS.items():
        if not program.exists():
            parser.error(f"{program} is not built: make -C csrc safety-cost")
        said = subprocess.run([program, "--trusts"], capture_output=True, text=True, check=True)
        if (said.stdout.strip() == "yes") != (name == "trusting"):
            parser.error(f"{program} is the wrong build: make -C csrc safety-cost")
    rows = []
    for row in measure(options.quick):
        rows.append(row)
        print(describe_row(row), flush=True)
    write_rows(options.json, rows)
    return int(not all(row["met"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
