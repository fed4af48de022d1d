"""The verbs lab: boot, import, perftest between guests, and how soon each fault is detected.

    python benchmarks/verbs_lab.py

Needs root, perftest, and what `make verbs-lab` builds. Rates and latencies are those of this
machine's processor: Soft-RoCE handles each packet in software. Compare a transport with perftest in
the same lab, never with TCP, which hands over many packets at a time.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from common import Row, add_common_arguments, write_rows

from torch_resilient.testing import Guest, LabJob, LabUnavailable, Network, VerbsLab
from torch_resilient.testing.job import Row as JobRow

PROBE = Path(__file__).resolve().parent.parent / "build" / "verbs-lab" / "verbs_probe"
# The unit of a queue pair's timeout, as InfiniBand defines it.
TIMEOUT_UNIT_S = 4.096e-6
# Bound of every wait.
LIMIT_S = 60.0
TRIES = 100
# How much longer than the formula an error is waited for.
PATIENCE_S = 3.0

ports = itertools.count(29400)
# Put before a command if --realtime is given.
real_time: list[str] = []


def formula_s(timeout: int, retries: int) -> float:
    """After how long a queue pair gives up."""
    return (retries + 1) * TIMEOUT_UNIT_S * float(2**timeout)


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.monotonic()
    function()
    return time.monotonic() - start


def boots(count: int) -> Row:
    """Start and end of labs of two guests."""
    start_s, stop_s = [], []
    for _ in range(count):
        begin = time.monotonic()
        lab = VerbsLab()
        start_s.append(time.monotonic() - begin)
        stop_s.append(timed(lab.close))
    return {"table": "boot", "guests": 2, "boot_s": start_s, "stop_s": stop_s}


def imports(count: int) -> Row:
    """Programs that import torch: once in each guest, afresh, and in a fork that has it."""
    program = [sys.executable, "-c", "import torch; torch.ones(1)"]
    with VerbsLab(preload=["torch"]) as lab:
        guests = list(lab.guests.values())
        preload_s = timed(lambda: [guest.wait_for_preload() for guest in guests])
        warm_s = [timed(lambda: guests[0].run(program, check=True)) for _ in range(count)]
        fresh = [program[0], "-u", *program[1:]]  # an option: not in a fork
        fresh_s = [timed(lambda: guests[0].run(fresh, check=True)) for _ in range(count)]
    return {"table": "import", "both_guests_s": preload_s, "fresh_s": fresh_s, "fork_s": warm_s}


def perftest(lab: VerbsLab, program: str, *options: str, before: Sequence[str] = ()) -> list[float]:
    """The row of numbers that a perftest program prints.

    before: put before the command of the client, which is on the second guest; numbers on its last
    line of standard error are added.
    """
    a, b = lab.guests.values()
    # Never at real-time priority: it polls, and the guest's kernel would wait for it.
    command = [program, "-d", "rxe0", *options]
    for _ in range(TRIES):
        port = ["-p", str(next(ports))]
        client = [*before, *command, *port, lab.control.address(a)]
        with a.popen(
            [*command, *port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as server:
            try:
                for _ in range(TRIES):  # the server may not listen yet
                    done = b.run(client, capture_output=True, text=True, timeout=LIMIT_S)
                    if "Couldn't connect" not in done.stdout + done.stderr:
                        break
            finally:
                server.kill()
        numbers = numbers_of(program, done, timed=bool(before))
        if numbers is not None:
            return numbers
    raise RuntimeError(f"{program}: no times; the machine is too busy")


def numbers_of(
    program: str, done: subprocess.CompletedProcess[str], *, timed: bool
) -> list[float] | None:
    """The row of numbers that the client has printed, and those that `timed` has added.

    None: it has no times. On a busy machine it cannot always find out the processor's frequency.
    """
    said = done.stdout + done.stderr
    if " inf " in said or "Can't produce a report" in said:
        return None
    rows = [line.split() for line in done.stdout.splitlines()]
    row = next((row for row in reversed(rows) if row and row[0].isdigit()), None)
    if done.returncode != 0 or row is None:
        raise RuntimeError(f"{program}: {said}")
    added = done.stderr.splitlines()[-1].split() if timed else []
    return [float(word) for word in (*row, *added)]


def speeds(lab: VerbsLab, quick: bool) -> Iterator[Row]:
    """Rates and latencies of perftest."""
    for size, iterations in ((65536, 1000), (1 << 20, 150)):
        for program in ("ib_write_bw", "ib_send_bw", "ib_read_bw"):
            options = ["-s", str(size), "-n", str(iterations // (5 if quick else 1))]
            rates = [perftest(lab, program, *options)[3] for _ in range(1 if quick else 3)]
            yield {"table": "rate", "program": program, "size_bytes": size, "mb_per_s": rates}
    for program in ("ib_write_lat", "ib_send_lat"):
        numbers = perftest(lab, program, "-s", "8", "-n", "300" if quick else "3000")
        yield {
            "table": "latency",
            "program": program,
            "size_bytes": 8,
            "median_us": numbers[4],
            "p99_us": numbers[7],
        }


class Probe:
    """A job that writes from b to a all the time (csrc/tests/verbs/probe.cpp)."""

    def __init__(self, lab: VerbsLab, timeout: int, retries: int) -> None:
        command = [*real_time, str(PROBE), "rxe0", f"timeout={timeout}", f"retries={retries}"]
        self.job = LabJob(command, list(lab.hosts.values()), lab.control, port=next(ports))
        self.carries()

    def carries(self) -> None:
        """Waits until writes complete that were posted after now."""
        first = self.job.until(lambda row: "completed" in row, "progress", LIMIT_S)["completed"]
        self.job.until(lambda row: row.get("completed", 0) > first + 20, "progress", LIMIT_S)

    def watch(self, fault: Callable[[], object], limit_s: float, wants_event: bool) -> Row:
        """The signs of a fault at both ends: the failure at the sender, the event at either."""
        seen: Row = {"after_s": None, "status": None, "event_s": None, "event_rank": None}
        start = time.monotonic()
        fault()

        def enough(row: JobRow) -> bool:
            if row["kind"] == "failed":
                seen.update(after_s=row["after_s"], status=row["status"])
            elif row["kind"] == "event" and row["type"] == "port error":
                seen.update(event_s=time.monotonic() - start, event_rank=row["rank"])
            over = time.monotonic() > start + limit_s
            has_event = seen["event_s"] is not None or not wants_event
            return over or (seen["after_s"] is not None and has_event)

        self.job.until(enough, "row", limit_s + LIMIT_S)
        return seen


def retries(lab: VerbsLab, count: int) -> Iterator[Row]:
    """Error completions in a black hole against the formula."""
    network = lab.networks["eth0"]
    for timeout, retry in ((14, 0), (14, 2), (15, 3), (16, 3), (14, 7)):
        limit_s = formula_s(timeout, retry) + PATIENCE_S
        found = []
        for _ in range(1 if retry == 7 else count):
            probe = Probe(lab, timeout, retry)
            with probe.job:
                found.append(probe.watch(network.down, limit_s, False)["after_s"])
            network.up()
        yield {
            "table": "retries",
            "timeout": timeout,
            "retries": retry,
            "formula_s": formula_s(timeout, retry),
            "after_s": [each for each in found if each is not None],
            "no_error": found.count(None),
        }


def faults(lab: VerbsLab, count: int) -> Iterator[Row]:
    """Each kind of fault at each end; b sends."""
    a, b = lab.guests.values()
    network = lab.networks["eth0"]
    timeout, retry = 14, 2
    kinds: list[tuple[str, Callable[[], object], bool]] = [
        ("switch drops all", network.down, False),
        ("only data lost", lambda: network.down(direction="b->a"), False),
        ("only ACKs lost", lambda: network.down(direction="a->b"), False),
        ("carrier of the sender", lambda: network.down("carrier", end=b), True),
        ("carrier of the receiver", lambda: network.down("carrier", end=a), True),
        ("NIC of the sender down", lambda: network.down("admin", end=b), True),
        ("NIC of the receiver down", lambda: network.down("admin", end=a), True),
        ("receiver frozen", a.freeze, False),
    ]
    for name, fault, has_event in kinds:
        found = [one_fault(lab, network, a, fault, has_event, timeout, retry) for _ in range(count)]
        yield {
            "table": "faults",
            "fault": name,
            "formula_s": formula_s(timeout, retry),
            "after_s": [row["after_s"] for row in found if row["after_s"] is not None],
            "no_error": sum(row["after_s"] is None for row in found),
            "status": sorted({row["status"] for row in found if row["status"]}),
            "event_s": [row["event_s"] for row in found if row["event_s"] is not None],
            "event_rank": sorted({row["event_rank"] for row in found} - {None}),
        }


def one_fault(
    lab: VerbsLab,
    network: Network,
    frozen: Guest,
    fault: Callable[[], object],
    has_event: bool,
    timeout: int,
    retry: int,
) -> Row:
    """One fault in a fresh job, and its end."""
    probe = Probe(lab, timeout, retry)
    with probe.job:
        seen = probe.watch(fault, formula_s(timeout, retry) + PATIENCE_S, has_event)
        frozen.thaw()
        network.up()
        probe.job.tell("reconnect")
        probe.carries()
    return seen


def measure(quick: bool) -> Iterator[Row]:
    """All rows, as they come."""
    count = 2 if quick else 10
    yield boots(count)
    yield imports(2 if quick else 5)
    with VerbsLab() as lab:
        yield from speeds(lab, quick)
        yield from retries(lab, 2 if quick else 5)
        yield from faults(lab, count)


def spread(values: Sequence[float], factor: float = 1) -> str:
    """Median and range."""
    ordered = sorted(value * factor for value in values)
    if not ordered:
        return "never"
    return f"{ordered[len(ordered) // 2]:.3g} ({ordered[0]:.3g} to {ordered[-1]:.3g})"


def describe_row(row: Row) -> str:
    """One line for people."""
    match row["table"]:
        case "boot":
            return f"boot of two guests: {spread(row['boot_s'])} s; end {spread(row['stop_s'])} s"
        case "import":
            return (
                f"torch: imported in both guests after {row['both_guests_s']:.1f} s; a program "
                f"{spread(row['fresh_s'])} s, in a fork {spread(row['fork_s'])} s"
            )
        case "rate":
            return (
                f"{row['program']:<12} {row['size_bytes'] // 1024:>5} KiB: "
                f"{spread(row['mb_per_s'])} MB/s"
            )
        case "latency":
            return (
                f"{row['program']:<12} {row['size_bytes']} B: median {row['median_us']:.0f} us, "
                f"p99 {row['p99_us']:.0f}"
            )
        case "retries":
            return (
                f"timeout {row['timeout']}, {row['retries']} retries: formula "
                f"{row['formula_s']:.3f} s, error after {spread(row['after_s'])} s, "
                f"{row['no_error']} without an error"
            )
        case _:
            ranks = {0: "receiver", 1: "sender"}
            where = " ".join(ranks[rank] for rank in row["event_rank"]) or "no end"
            return (
                f"{row['fault']:<24}: error after {spread(row['after_s'])} s "
                f"({', '.join(row['status'])}), {row['no_error']} without; port error at {where} "
                f"after {spread(row['event_s'], 1000)} ms"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each measurement; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    options = parser.parse_args(arguments)
    if not PROBE.exists():
        parser.error(f"there is no {PROBE}; `make verbs-lab` builds it")
    if options.realtime:
        real_time.extend(["chrt", "--rr", "1"])
    rows: list[Row] = []
    try:
        for row in measure(options.quick):
            rows.append({"benchmark": "verbs_lab", **row})
            print(describe_row(row), flush=True)
    except LabUnavailable as error:
        parser.error(str(error))
    write_rows(options.json, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
