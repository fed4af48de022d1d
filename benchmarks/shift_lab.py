"""`torch-resilient shift` in the verbs lab: perftest through a fault, and the cost without one.

    python benchmarks/shift_lab.py [--picture FILE.svg]

Needs root, perftest, and what `make verbs-lab` builds. Run it on a machine without other work: the
programs of perftest spin, and Soft-RoCE handles each packet on the processors that they use.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import shift_picture
from common import Row, add_common_arguments, median, write_rows

from torch_resilient.cli import shift
from torch_resilient.testing import Guest, LabUnavailable, VerbsLab

ABOUT = """\
timeline  ib_send_bw, ib_write_bw and ib_read_bw, with a fault at 5 s that ends at 10 s (as in
          figure 7 of the paper), with and without the library. "gap" is the longest time after the
          fault without a delivered packet on either network, "return" the time from its end until
          the default network carries again.
overhead  ib_write_lat and the rates, with and without the library, in turn. "noise" compares two
          halves of the runs without it.
modify    the system calls that connect a queue pair, with and without the library, in turn.

--picture draws the timelines.
"""

ROOT = Path(__file__).resolve().parent.parent
CHECK = ROOT / "build" / "verbs-programs" / "shift_check"
PROGRAMS = ("ib_send_bw", "ib_write_bw", "ib_read_bw")
FAULTS = {"NIC of the receiver": "a", "NIC of the sender": "b", "switch": None}
FAULT_S, BACK_S, END_S = 5.0, 10.0, 15.0
TICK_S = 0.01
EVERY_S = 0.25
LIMIT_S = 120.0
TRIES = 100
STORE_PORT = 29700
SERVE = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); from torch_resilient import cli; "
    f"sys.exit(cli.main(['shift', '--serve', '{STORE_PORT}']))"
)

ports = itertools.count(30400)


@contextlib.contextmanager
def store(lab: VerbsLab) -> Iterator[dict[str, str]]:
    """Serves a store in the first guest; yields the environment of programs."""
    guest = lab.guests["a"]
    with guest.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            parser = argparse.ArgumentParser()
            shift.add_parser(parser.add_subparsers())
            address = f"{lab.control.address(guest)}:{STORE_PORT}"
            words = ["shift", "--store", address, "--backup", "rxe0=rxe1"]
            yield shift.environment(address, parser.parse_args(words))
        finally:
            process.kill()


def is_listening(guest: Guest, port: int) -> bool:
    """Whether a program waits for a connection at the port."""
    tables = ["/proc/net/tcp", "/proc/net/tcp6"]
    return guest.run(["grep", "-q", f":{port:04X} .* 0A ", *tables]).returncode == 0


@contextlib.contextmanager
def pair(
    lab: VerbsLab, command: Callable[[int], list[str]], env: dict[str, str] | None
) -> Iterator[subprocess.Popen[str]]:
    """A program as the server on a and as the client on b; yields the client."""
    a, b = lab.guests.values()
    port = next(ports)
    words = command(port)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env}
    with a.popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=env) as server:
        limit = time.monotonic() + LIMIT_S
        while not is_listening(a, port):
            if time.monotonic() > limit:
                raise RuntimeError(f"{words[0]} does not listen")
        with b.popen([*words, lab.control.address(a)], **pipes) as client:
            try:
                yield client
            finally:
                client.kill()
                server.kill()


def delivered(lab: VerbsLab) -> list[int]:
    """Bytes that each network has delivered, in both directions."""
    return [
        sum(network.counters(way).delivered.bytes for way in ("a->b", "b->a"))
        for network in lab.networks.values()
    ]


def timeline(lab: VerbsLab, env: dict[str, str] | None, program: str, fault: str) -> Row:
    """The throughput of each network over time, through a fault."""
    # -F: without it, perftest fails if it cannot measure the processor's frequency.
    command = [program, "-d", "rxe0", "-F", "-n", str(10_000_000), "-p"]
    network = lab.networks["eth0"]
    changes = [
        (FAULT_S, lambda: network.down("admin", end=FAULTS[fault]) if FAULTS[fault] else None),
        (FAULT_S, lambda: None if FAULTS[fault] else network.down()),
        (BACK_S, network.up),
    ]
    times, bytes_ = [], []
    with pair(lab, lambda port: [*command, str(port)], env):
        idle = delivered(lab)
        limit = time.monotonic() + LIMIT_S
        while delivered(lab)[0] - idle[0] < 1 << 20:
            if time.monotonic() > limit:
                raise RuntimeError(f"{program} does not begin")
        begin = time.monotonic()
        while (now := time.monotonic() - begin) < END_S:
            while changes and changes[0][0] <= now:
                changes.pop(0)[1]()
            times.append(now)
            bytes_.append(delivered(lab))
            time.sleep(TICK_S)
    default, backup = rates(times, bytes_)
    return {
        "table": "timeline",
        "program": program,
        "fault": fault,
        "library": env is not None,
        "fault_s": FAULT_S,
        "back_s": BACK_S,
        "every_s": EVERY_S,
        "default_mb_per_s": default,
        "backup_mb_per_s": backup,
        "gap_s": gap_s(times, bytes_),
        "return_s": return_s(times, bytes_),
    }


# Probes of the idle path are far below this.
MOVING_BYTES = 8192


def gap_s(times: Sequence[float], bytes_: Sequence[Sequence[int]]) -> float:
    """The longest time without data, between the fault and its end."""
    longest, last = 0.0, FAULT_S
    for i in range(1, len(times)):
        if FAULT_S <= times[i] < BACK_S and sum(bytes_[i]) - sum(bytes_[i - 1]) > MOVING_BYTES:
            longest, last = max(longest, times[i] - last), times[i]
    return max(longest, BACK_S - last)


def return_s(times: Sequence[float], bytes_: Sequence[Sequence[int]]) -> float | None:
    """How long after the end of the fault the default network carries again."""
    for i in range(1, len(times)):
        if times[i] >= BACK_S and bytes_[i][0] - bytes_[i - 1][0] > MOVING_BYTES:
            return times[i] - BACK_S
    return None


def rates(times: Sequence[float], bytes_: Sequence[Sequence[int]]) -> list[list[float]]:
    """MB/s of each network in each EVERY_S, from the beginning."""
    values: list[list[float]] = [[], []]
    begin = 0
    for i in range(1, len(times)):
        if times[i] >= EVERY_S * (len(values[0]) + 1):
            for k in (0, 1):
                moved = bytes_[i][k] - bytes_[begin][k]
                values[k].append(moved / (times[i] - times[begin]) / 1e6)
            begin = i
    return values


def number_of(program: str, said: str) -> float:
    """The median latency in us, or the average rate in MB/s, of perftest's report."""
    lines = [line.split() for line in said.splitlines()]
    found = [words for words in lines if words and words[0].isdigit() and len(words) >= 5]
    if not found:
        raise RuntimeError(f"{program}: {said}")
    return float(found[-1][4] if program.endswith("_lat") else found[-1][3])


def perftest(lab: VerbsLab, env: dict[str, str] | None, program: str, count: int) -> float:
    """One run to its end; again if perftest cannot measure the processor's frequency."""
    size = "8" if program.endswith("_lat") else "65536"
    command = [program, "-d", "rxe0", "-F", "-s", size, "-n", str(count), "-p"]
    for _ in range(TRIES):
        with pair(lab, lambda port: [*command, str(port)], env) as client:
            number = number_of(program, client.communicate(timeout=LIMIT_S)[0])
        if 0 < number < math.inf:
            return number
    raise RuntimeError(f"{program}: no figures; the machine is too busy")


def overhead(lab: VerbsLab, env: dict[str, str], quick: bool) -> Iterator[Row]:
    """The same program with and without the library, in turn."""
    for program, count in (("ib_write_lat", 2000), *((name, 2000) for name in PROGRAMS)):
        without, covered = [], []
        for _ in range(2 if quick else 20):
            without.append(perftest(lab, None, program, count))
            covered.append(perftest(lab, env, program, count))
            without.append(perftest(lab, None, program, count))
        noise = median(without[::2]) / median(without[1::2]) - 1
        change = median(covered) / median(without) - 1
        yield {
            "table": "overhead",
            "program": program,
            "without": without,
            "with": covered,
            "change": change,
            "noise": noise,
        }


def modify(lab: VerbsLab, env: dict[str, str], quick: bool) -> Row:
    """Microseconds of ibv_modify_qp to RTR and to RTS, medians of 32 queue pairs."""

    def command(port: int) -> list[str]:
        numbers = (1, port, 4, 32, 1, 1, 0)
        return [str(CHECK), "send", "rxe0", *map(str, numbers)]

    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(2 if quick else 20):
        for name, environment in (("without", None), ("with", env)):
            with pair(lab, command, environment) as client:
                said = client.communicate(timeout=LIMIT_S)[0]
            found = re.search(r"connect RTR ([\d.]+) us RTS ([\d.]+) us", said)
            if found is None:
                raise RuntimeError(f"shift_check: {said}")
            for state, value in zip(("RTR", "RTS"), found.groups(), strict=True):
                times.setdefault(state, {}).setdefault(name, []).append(float(value))
    return {"table": "modify", "us": times}


def describe_row(row: Row) -> str:
    """One line for people."""
    match row["table"]:
        case "timeline":
            back = "never" if row["return_s"] is None else f"{row['return_s']:.2f} s"
            gap = f"gap {row['gap_s'] * 1000:.0f} ms, return after {back}"
            library = "with" if row["library"] else "without"
            return f"{row['program']:<12} {row['fault']:<20}{library:>8}: {gap}"
        case "overhead":
            unit = "us" if row["program"].endswith("_lat") else "MB/s"
            return (
                f"{row['program']:<12}: without {median(row['without']):.1f} {unit}, with "
                f"{median(row['with']):.1f}: {row['change']:+.1%} (noise {row['noise']:+.1%})"
            )
        case _:
            parts = [
                f"{state} {median(each['without']):.0f} us, with the library "
                f"{median(each['with']):.0f}"
                for state, each in row["us"].items()
            ]
            return f"ibv_modify_qp: {'; '.join(parts)}"


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """All rows, as they come."""
    with VerbsLab(memory_bytes=256 << 20) as lab, store(lab) as env:
        if "timeline" in options.tables:
            for program in PROGRAMS[: 1 if options.quick else None]:
                for fault, library in itertools.product(FAULTS, (False, True)):
                    yield timeline(lab, env if library else None, program, fault)
                    lab.networks["eth0"].up()
                    time.sleep(1)  # until the address of a NIC that was down works again
        if "overhead" in options.tables:
            yield from overhead(lab, env, options.quick)
        if "modify" in options.tables:
            yield modify(lab, env, options.quick)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each measurement; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_common_arguments(parser)
    tables = ("timeline", "overhead", "modify")
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the timelines (.svg)")
    options = parser.parse_args(arguments)
    if options.picture is not None and (
        options.picture.suffix != ".svg" or "timeline" not in options.tables
    ):
        parser.error("--picture: expected a name in .svg, and the timelines among the tables")
    if shift.shared_object() is None or not CHECK.exists():
        parser.error("the library or shift_check is not built; see `make verbs-lab`")
    rows: list[Row] = []
    try:
        for row in measure(options):
            rows.append({"benchmark": "shift_lab", **row})
            print(describe_row(row), flush=True)
    except LabUnavailable as error:
        parser.error(str(error))
    write_rows(options.json, rows)
    if options.picture is not None:
        drawn = [row for row in rows if row["table"] == "timeline"]
        options.picture.write_text(shift_picture.render(drawn), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
