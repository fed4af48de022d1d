"""All benchmarks, and one summary: quick by default (some minutes); --record keeps the results."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measurements

from torch_resilient.testing import unavailable

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "compare_gloo.py",
    "local_copy.py",
    "scale.py",
    "parity_codes.py",
    "hol_blocking.py",
    "idle_cpu.py",
    "live_dispatch.py",
    "dp_straggler.py",
    "wan_collectives.py",
    "smart_convergence.py",
)
# These need the lab; wan_collectives.py does with less.
LAB_SCRIPTS = (
    "failover_gap.py",
    "wan_connections.py",
    "wan_training.py",
    "smart_fct.py",
    "smart_training.py",
)
# Takes five minutes even if quick.
LONG_SCRIPTS = ("stragglers.py",)
# Run only if named.
NAMED_SCRIPTS = ("bubbles.py", "encryption.py", "geo_planning.py", "verbs_safety.py")
NAMED_LAB_SCRIPTS = (
    "flood.py",
    "geo_training.py",
    "lab_calibration.py",
    "relays.py",
    "shift_lab.py",
    "verbs_lab.py",
    "verbs_speed.py",
    "verbs_failover.py",
    "wan_bursts.py",
    "wan_cost.py",
)
ALL_SCRIPTS = SCRIPTS + LAB_SCRIPTS + LONG_SCRIPTS + NAMED_SCRIPTS + NAMED_LAB_SCRIPTS

ABOUT = """\
Runs compare_gloo.py, local_copy.py, scale.py, parity_codes.py, hol_blocking.py, idle_cpu.py,
live_dispatch.py, dp_straggler.py, wan_collectives.py, smart_convergence.py; in the lab (root; else
they are skipped, and it says so) failover_gap.py, wan_connections.py, wan_training.py, smart_fct.py
and smart_training.py; and, with --full, stragglers.py: one after the other. Each explains itself
with --help. local_copy.py and wan_training.py compare and have no limits of time, nor has
compare_gloo.py without --full; the others end with status 1 if they miss one, and then so does
this.

With --record each benchmark runs in full, and its rows become a table in its section of
docs/measurements.md, in place of that of the same command; all else stays. If it misses a limit
(status 1), the section says so. A benchmark that breaks off writes no rows, and keeps its section.
Record on a machine without other work.

Arguments behind -- go to the benchmark; with --record they make a table of their own in its
section: run.py --record wan_bursts.py -- --loss 0.01 --sizes 1M
"""


# The exit status of a benchmark that misses a limit; also of a Python program that breaks off.
MISSED = 1


def run(script: str, arguments: list[str], record: bool) -> int:
    """Runs one; keeps its rows if asked to and if it wrote any. Returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        rows = Path(folder) / "rows.jsonl"
        if record:
            arguments = [*arguments, "--json", str(rows)]
        command = [sys.executable, HERE / script, *arguments]
        status = subprocess.run(command, check=False).returncode
        if record and status in (0, MISSED) and rows.exists():
            measurements.record(Path(script).stem, rows, limits_missed=status == MISSED)
        return status


def main() -> int:
    """Runs them; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "scripts", nargs="*", metavar="SCRIPT", help="only these, such as compare_gloo.py"
    )
    parser.add_argument(
        "--record", action="store_true", help="as --full, and keep the rows in docs/measurements.md"
    )
    parser.add_argument("--full", action="store_true", help="the whole measurement, long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append all rows to this file")
    parser.add_argument("--realtime", action="store_true", help="at real-time priority")
    arguments = sys.argv[1:]
    own = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:own])
    if arguments[own:] and len(options.scripts) != 1:
        parser.error("arguments behind -- are for one benchmark: name it")
    if unknown := sorted(set(options.scripts) - set(ALL_SCRIPTS)):
        parser.error(f"unknown benchmark {unknown[0]}; there are {', '.join(ALL_SCRIPTS)}")
    if options.record and options.json:
        parser.error("--record keeps the rows in benchmarks/results; --json cannot name a file too")
    full = options.full or options.record
    common = [] if full else ["--quick"]
    if options.json:
        common += ["--json", str(options.json.resolve())]
    if options.realtime:
        common.append("--realtime")
    common += arguments[own + 1 :]

    results = []
    reason = unavailable()
    for script in options.scripts or SCRIPTS + LAB_SCRIPTS + (LONG_SCRIPTS if full else ()):
        if script in LAB_SCRIPTS + NAMED_LAB_SCRIPTS and reason is not None:
            results.append(f"{script:<18} skipped: {reason}")
            continue
        print(f"== {script}", flush=True)
        start = time.monotonic()
        status = run(script, common, options.record)
        result = "ok" if status == 0 else f"FAILED ({status})"
        results.append(f"{script:<18} {result}, {time.monotonic() - start:.0f} s")
        print(flush=True)
    print("\n".join(results))
    return int(any("FAILED" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
