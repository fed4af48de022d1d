"""`torch-resilient chaos`: runs a job under a seeded script of network faults, and reports.

The command after `--` starts your unchanged job. Faults act on the connections of the "resilient"
backend inside its processes; they need no root and affect nothing else on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input
from torch_resilient.cli.fault_report import Outcome, Pause, Report, make_report, read_records
from torch_resilient.cli.fault_script import (
    KINDS,
    STEP_KINDS,
    PlannedFault,
    ScriptSettings,
    environment,
    make_script,
    ring,
)

ABOUT = """\
example:
  torch-resilient chaos --seed 7 --duration 30 -- torchrun --standalone --nproc-per-node 2 train.py

kinds of faults:
  cut    a connection breaks, possibly in the middle of a message
  stall  a connection sends nothing for a while; it still reads incoming data
  drop   a connection neither sends nor reads for a while, as with a pulled cable
  delay  data from one rank to another arrives later for a while
  rate   the path from one rank to another is slower for a while

The report has a line for each fault: the time until it was noticed on its path, the operation that
it delayed the most with the usual duration of that operation, chunks retransmitted, reconnects.
All values are measured in the job; the report says if a fault left no trace.

The command sets TORCH_RESILIENT_FAULTS and TORCH_RESILIENT_RECORD_DIR for the job. It also sets
TORCH_RESILIENT_PATHS_SAME_HOST=2 and TORCH_RESILIENT_WAN_CONNECTIONS=2, unless you have set them:
two ranks then have a second path. If you start it on several hosts at the same time with the same
options and seed, each host reports its own ranks.

exit status: that of the job; 1 if it was 0 but no fault left a trace; 2 for bad input.
"""

# They set the number of connections, and the script refers to connections by index.
_CONNECTIONS = ("TORCH_RESILIENT_PATHS_SAME_HOST", "TORCH_RESILIENT_WAN_CONNECTIONS")
_PER_NODE = re.compile(r"--nproc[-_]per[-_]node(?:=(.+))?")
_NODES = re.compile(r"--nnodes(?:=(.+))?")


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "chaos",
        help="run a job under network faults and report the effects",
        description=__doc__,
        epilog=ABOUT,
        usage="torch-resilient chaos [OPTIONS] -- COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the script (default: 1)")
    parser.add_argument(
        "--duration",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds with faults, from the job's first group (default: 30)",
    )
    parser.add_argument(
        "--first", type=float, default=4.0, metavar="S", help="time of the first fault (default: 4)"
    )
    parser.add_argument(
        "--every", type=float, default=3.0, metavar="S", help="time between faults (default: 3)"
    )
    parser.add_argument(
        "--steps",
        metavar="A:B[:N]",
        help="faults at every N-th step (default: 10th) from A to B, not by time; for a program "
        "that calls torch_resilient.faults.step()",
    )
    parser.add_argument(
        "--kinds",
        help=f"separated by commas (default: {','.join(KINDS)}; with --steps no stall, drop)",
    )
    parser.add_argument(
        "--ranks", type=int, help="number of ranks (default: from the torchrun command)"
    )
    parser.add_argument(
        "--links",
        default="ring",
        help='which pairs of ranks: "ring" (each with the next, the default), "all", or such as '
        "0-1,2-3",
    )
    parser.add_argument(
        "--paths",
        type=int,
        default=2,
        help="number of connections between two ranks that may fail (default: 2)",
    )
    parser.add_argument(
        "--all-paths",
        action="store_true",
        help="cut and silence all paths of a link together; no path can take over",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the ranks' records in DIR")
    parser.add_argument(
        "--script", action="store_true", help="print TORCH_RESILIENT_FAULTS without running COMMAND"
    )
    parser.add_argument("job", nargs=argparse.REMAINDER, metavar="COMMAND", help="the job")
    parser.set_defaults(run=run)


def ranks_of(command: Sequence[str]) -> int | None:
    """How many ranks a torchrun command starts, if it says so in numbers."""

    def value(pattern: re.Pattern[str]) -> str | None:
        for i, word in enumerate(command):
            if match := pattern.fullmatch(word):
                return match[1] or (command[i + 1] if i + 1 < len(command) else None)
        return None

    per_node, nodes = value(_PER_NODE), value(_NODES) or "1"
    if per_node is None or not per_node.isdecimal() or not nodes.isdecimal():
        return None
    return int(per_node) * int(nodes)


def _links(text: str, ranks: int) -> list[tuple[int, int]]:
    """Raises ValueError."""
    if text == "ring":
        return ring(ranks)
    if text == "all":
        return [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    links = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)-(\d+)\s*", item)
        if not match or match[1] == match[2] or max(int(match[1]), int(match[2])) >= ranks:
            raise ValueError(
                f'--links {text}: expected "ring", "all", or pairs such as 0-1,2-3 of ranks below '
                f"{ranks}"
            )
        links.append((int(match[1]), int(match[2])))
    return links


def settings_of(options: argparse.Namespace, command: Sequence[str]) -> ScriptSettings:
    """Raises ValueError, which names the option."""
    ranks = options.ranks or ranks_of(command)
    if ranks is None:
        raise ValueError(
            "--ranks: missing, and the command does not say --nproc-per-node in numbers"
        )
    if ranks < 2:
        raise ValueError(f"--ranks: between {ranks} ranks there is no link; at least 2 are needed")
    for name in ("first", "every", "duration"):
        seconds = getattr(options, name)
        if not 0.1 <= seconds <= 1e6:
            raise ValueError(f"--{name}: expected seconds from 0.1 to 1e6, got {seconds:g}")
    if not 0 <= options.seed < 2**64:
        raise ValueError(f"--seed: expected 0 to 2^64 - 1, got {options.seed}")
    if not 1 <= options.paths <= 64:
        raise ValueError(f"--paths: expected 1 to 64, got {options.paths}")
    steps, every_steps = None, 10
    if options.steps is not None:
        match = re.fullmatch(r"(\d+):(\d+)(?::(\d+))?", options.steps)
        if not match or int(match[1]) >= int(match[2]) or match[3] == "0":
            raise ValueError(f"--steps {options.steps}: expected A:B or A:B:N with A below B")
        steps, every_steps = (int(match[1]), int(match[2])), int(match[3] or every_steps)
    allowed = KINDS if steps is None else STEP_KINDS
    kinds = [kind.strip() for kind in options.kinds.split(",")] if options.kinds else list(allowed)
    for kind in kinds:
        if kind not in allowed:
            more = "" if kind not in KINDS else ": by steps, silence could last for ever"
            raise ValueError(f"--kinds: expected some of {','.join(allowed)}, got {kind!r}{more}")
    return ScriptSettings(
        ranks=ranks,
        paths=options.paths,
        links=_links(options.links, ranks),
        kinds=kinds,
        all_paths=options.all_paths,
        first_s=options.first,
        every_s=options.every,
        duration_s=options.duration,
        steps=steps,
        every_steps=every_steps,
    )


def duration_text(seconds: float) -> str:
    """In milliseconds, or in microseconds where those would be 0.0."""
    if 0 < seconds < 1e-4:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.{0 if seconds >= 0.01 else 1}f} ms"


def _pause_text(pause: Pause | None) -> str:
    if pause is None:
        return "no operation at the time"
    usual = "nothing to compare with"
    if pause.usual_s is not None:
        usual = f"usually {duration_text(pause.usual_s)}"
    took = duration_text(pause.took_s)
    return f"{took} ({usual}): rank {pause.rank}, {pause.operation}"


def _line(outcome: Outcome) -> list[str]:
    fault = outcome.fault
    at = "-" if outcome.at_s is None else f"{outcome.at_s:.1f} s"
    if fault.step is not None:
        at += f", step {fault.step}"
    why = {
        "not reached": "the job was over",
        "no connection": "no connection then",
        "no record": f"rank {fault.rank} has left no record here",
    }.get(outcome.state)
    if why is not None:
        return [at, fault.what, "-", "-", "-", why]
    noticed = "no trace" if outcome.state == "not seen" else outcome.how or "-"
    if outcome.noticed_s is not None:
        noticed = f"{duration_text(outcome.noticed_s)}, {outcome.how}"
    return [
        at,
        fault.what,
        noticed,
        str(outcome.chunks_retransmitted),
        str(outcome.reconnects),
        _pause_text(outcome.pause),
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns of even width, two blanks apart; the last one is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def report_text(report: Report, status: int, took_s: float, again: str) -> str:
    """The report for people; `again`: the variables that repeat the script."""
    head = [
        "at",
        "fault",
        "noticed",
        "retransmitted",
        "reconnects",
        "longest operation at the time",
    ]
    seen = sum(outcome.state == "seen" for outcome in report.outcomes)
    known = sum(outcome.state != "no record" for outcome in report.outcomes)
    lines = [table([head, *map(_line, report.outcomes)]), ""]
    noise = report.noise
    if noise is not None:
        lines.append(
            f"away from faults, the slowest operation took {_pause_text(noise)}; pauses up to "
            f"{duration_text(noise.extra_s)} may have other reasons"
        )
    lines.append(
        f"{seen} of {known} faults left a trace, {len(report.failed)} of "
        f"{report.operations} operations failed; ranks "
        f"{', '.join(map(str, report.ranks)) or 'none'} on {', '.join(report.hosts) or 'no host'}, "
        f"looked at every {duration_text(report.resolution_s)}"
    )
    lines += [f"failed: {each}" for each in report.failed[:10]]
    if len(report.failed) > 10:
        lines.append(f"... and {len(report.failed) - 10} more")
    if report.missed:
        lines.append(f"{report.missed} operations went by too fast to be recorded")
    if report.killed:
        lines.append(f"ended without a word: ranks {', '.join(map(str, report.killed))}")
    if report.restarted:
        ranks = ", ".join(map(str, report.restarted))
        lines.append(f"started again: ranks {ranks}; the report is about their first run")
    lines.append(f"the job ended with status {status} after {took_s:.1f} s")
    lines.append(f"the same faults again: {again}")
    return "\n".join(lines)


@contextlib.contextmanager
def _record_dir(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.glob("rank*.jsonl")):
            raise ValueError(
                f"--keep {keep}: it holds records of another run; choose another folder"
            )
        yield keep.resolve()
        return
    folder = tempfile.mkdtemp(prefix="torch-resilient-chaos-")
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_job(command: Sequence[str], variables: dict[str, str]) -> int:
    """Runs the job to its end and forwards signals to it. Returns its exit status, as a shell
    does."""
    process = subprocess.Popen(command, env={**os.environ, **variables})

    def pass_on(number: int, frame: object) -> None:
        # A terminal sends Ctrl-C to the job, too.
        if number != signal.SIGINT or not os.isatty(0):
            process.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def _prepare(
    options: argparse.Namespace,
) -> tuple[list[str], list[PlannedFault], dict[str, str]]:
    """The job's command, the script, and the variables for it. Raises ValueError."""
    command = list(options.job)
    if command[:1] == ["--"]:
        del command[0]
    script = make_script(options.seed, settings_of(options, command))
    if not command and not options.script:
        raise ValueError("no command: write what to run after --, such as -- torchrun ... train.py")
    if command and shutil.which(command[0]) is None:
        raise ValueError(f"{command[0]}: no such program")
    variables = {"TORCH_RESILIENT_FAULTS": environment(script, options.seed)}
    for name in (*variables, "TORCH_RESILIENT_RECORD_DIR"):
        if os.environ.get(name):
            raise ValueError(f"{name} is set in the environment: unset it, chaos sets its own")
    for name in _CONNECTIONS:
        if not os.environ.get(name):
            variables[name] = str(options.paths)
    return command, script, variables


def run(options: argparse.Namespace) -> int:
    """Runs the job and prints the report; returns the exit status."""
    try:
        command, script, variables = _prepare(options)
        if options.script:
            print(variables["TORCH_RESILIENT_FAULTS"])
            return 0
        if options.json is not None:
            options.json.open("a", encoding="utf-8").close()  # fails before the job, not after it
        with _record_dir(options.keep) as folder:
            sys.stderr.write(
                f"chaos: seed {options.seed}, {len(script)} faults: {shlex.join(command)}\n"
            )
            began_s = time.monotonic()
            status = run_job(command, {**variables, "TORCH_RESILIENT_RECORD_DIR": str(folder)})
            took_s = time.monotonic() - began_s
            report = make_report(script, read_records(folder))
        if options.json is not None:
            told = {
                "seed": options.seed,
                "script": variables["TORCH_RESILIENT_FAULTS"],
                "command": command,
                "status": status,
                "took_s": took_s,
                **report.as_json(),
            }
            options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        return bad_input("chaos", error)
    sys.stdout.flush()
    again = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    print(f"\n{report_text(report, status, took_s, again)}", flush=True)
    if status == 0 and not any(outcome.state == "seen" for outcome in report.outcomes):
        sys.stderr.write(
            "torch-resilient chaos: no fault left a trace, so this run proves nothing: does the "
            'job use the backend "resilient", run long enough (--duration, --first), and are there '
            "such links (--links, --paths)?\n"
        )
        return 1
    return status
