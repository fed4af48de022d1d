"""A small transformer under DDP over a lossy link: what tolerated drops do to its loss."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from common import Row, add_common_arguments, write_rows
from lab_job import two_hosts

from torch_resilient.testing import Host, LabJob, Network, unavailable

ABOUT = """\
examples/train_ddp_lossy.py, a GPT of two layers on Python's sources, on two hosts in a lab of
network namespaces (needs root) with 200 Mbit/s and 20 ms one way between them, over datagrams:
exactly, and with SMART's hook, seed by seed. A seed fixes weights and batches. The loss is the mean
of the last fifth of the steps, in nats per byte. (Paper: SMART §4.2, there in one process.)

Exit status 1 if the two ranks' parameters differ after any step, if nothing was dropped, or if the
mean difference of the losses is above one standard deviation of the seeds' exact losses.
"""

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_ddp_lossy.py"
TIMEOUT_S = 120.0


def train(
    hosts: list[Host], control: Network, seed: int, steps: int, smart: bool, port: int
) -> tuple[float, int]:
    """The loss at the end, and bytes that were zero-filled."""
    command = [sys.executable, str(SCRIPT), "--json", "--layers=2"]
    command += [f"--seed={seed}", f"--steps={steps}", *(["--smart"] if smart else [])]
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0", "TORCH_RESILIENT_WAN": "udp"}
    digests: list[list[str]] = [[], []]
    losses: list[float] = []
    results: dict[int, Any] = {}
    with LabJob(command, hosts, control, environment=environment, port=port) as job:
        while len(results) < len(hosts):
            row = job.until(lambda _: True, "row of a step", TIMEOUT_S)
            if row["kind"] == "result":
                results[row["rank"]] = row
                continue
            digests[row["rank"]].append(row["digest"])
            if row["rank"] == 0:
                losses.append(row["loss"])
        job.wait(TIMEOUT_S)
    if digests[0] != digests[1]:
        raise RuntimeError(f"seed {seed}: the parameters of the two ranks differ")
    for row in results.values():
        if row["smart"] and row["smart"]["exact_reason"]:
            raise RuntimeError(f"seed {seed}: not tolerant to the end: {row['smart']}")
    dropped = sum(row["smart"]["bytes_zero_filled"] for row in results.values() if row["smart"])
    return statistics.fmean(losses[-max(steps // 5, 1) :]), dropped


def main() -> int:
    """One row for each drop rate."""
    parser = argparse.ArgumentParser(
        description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument(
        "--drop", default="", metavar="LIST", help="in percent; default 2,5; quick 5"
    )
    parser.add_argument("--seeds", type=int, help="default 3, quick 2")
    parser.add_argument("--steps", type=int, help="default 60, quick 10")
    arguments = parser.parse_args()
    if reason := unavailable():
        parser.error(reason)
    rates = [float(x) for x in (arguments.drop or ("5" if arguments.quick else "2,5")).split(",")]
    seeds = arguments.seeds or (2 if arguments.quick else 3)
    steps = arguments.steps or (10 if arguments.quick else 60)
    if seeds < 2:
        parser.error("--seeds: expected 2 or more, to compare with what seeds do")
    rows: list[Row] = []
    missed = []
    port = 29400
    link = {"delay_s": 0.02, "rate_bytes_per_s": 25e6}
    print(f"{'drops':>6}{'exact':>18}{'smart':>18}{'difference':>20}{'zero-filled':>14}")
    with two_hosts([link]) as (_, hosts, (network,), control):
        for rate in rates:
            network.set(drop=rate / 100)
            exact, smart, dropped = [], [], 0
            for seed in range(seeds):
                exact.append(train(hosts, control, seed, steps, False, port)[0])
                loss, zero_filled = train(hosts, control, seed, steps, True, port + 1)
                smart.append(loss)
                dropped += zero_filled
                port += 2
            differences = [a - b for a, b in zip(smart, exact, strict=True)]
            mean, spread = statistics.fmean(differences), statistics.stdev(exact)
            cells = [
                f"{statistics.fmean(each):.4f} ± {statistics.stdev(each):.4f}"
                for each in (exact, smart)
            ]
            cells.append(f"{mean:+.4f} ± {statistics.stdev(differences):.4f}")
            print(
                f"{rate:4g} %{cells[0]:>18}{cells[1]:>18}{cells[2]:>20}{dropped:>12,} B", flush=True
            )
            rows.append(
                {
                    "benchmark": "smart_training",
                    "drop": rate / 100,
                    "steps": steps,
                    "exact_nats": exact,
                    "smart_nats": smart,
                    "bytes_zero_filled": dropped,
                }
            )
            if dropped == 0:
                missed.append(f"{rate:g} %: nothing was zero-filled")
            if mean > spread:
                missed.append(f"{rate:g} %: worse by {mean:.4f}, the seeds spread {spread:.4f}")
    write_rows(arguments.json, rows)
    print("\n" + ("\n".join(missed) if missed else "all limits kept"))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
