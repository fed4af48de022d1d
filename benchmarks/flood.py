"""The rate of a training under a flood of handshakes, in the lab."""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import Row, add_common_arguments, median, show_rows
from lab_job import ROOT, say, start_job, two_hosts

ABOUT = """\
Two hosts, 50 ms apart, 200 Mbit/s (needs root). Two ranks average 2 MiB again and again. On each
host a stranger calls the rank's port all the time, in every second window of some seconds:

  nothing   connects and says nothing
  hello     says a whole hello that names the job's secret, and proves nothing
  tls       says a recorded beginning of a member's encrypted handshake
  certified the same, in a job with certificates (ECDSA, P-256)

  steps/s   in quiet windows and under flood, the median of all windows
  ratio     flooded / quiet; the limit is 0.95
  A/A       one half of the quiet windows / the other half: the noise
  calls/s   that the strangers have really made, at each host
  us/call   processor time of a rank for each of these calls, beyond that of quiet windows

The strangers would have a machine of their own: here they take only processor time that the ranks
leave them (nice), but with few processors their part of the kernel's work still costs the ranks
something. Every average is checked.

Exit status 1 if a limit is missed or a step is wrong.
"""

ATTACK = ROOT / "tests" / "flood_attack.py"
PORT = 29511
SECRET = "the secret of the job that is flooded"
FLOODS = [(1500, "none"), (1500, "tls"), (10_000, "none"), (10_000, "whole")]
CERTIFIED_FLOODS = [(1500, "certified")]
NAMES = {"none": "nothing", "whole": "hello", "tls": "tls", "certified": "certified"}
SOURCES = 5000
ELEMENTS = 1 << 19
WINDOW_S = 4.0
# Until the listeners are full of strangers, or empty again.
SETTLE_S = 1.0
RATIO_MIN = 0.95
LIMIT_S = 60.0


def worker() -> None:
    """Runs one rank until it is killed."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    rank, step = dist.get_rank(), 0
    while True:
        data = torch.full((ELEMENTS,), float(rank + step))
        dist.all_reduce(data)
        wrong = not bool((data == 2 * step + 1).all())
        say("step", rank=rank, time_s=time.monotonic(), cpu_s=time.process_time(), wrong=wrong)
        step = (step + 1) % 1000


def window(job: Any) -> Row:
    """Steps of rank 0 for a while, and its processor time."""
    while not job.rows.empty():
        job.rows.get()
    rows: list[Row] = []

    def over(row: Row) -> bool:
        if row.get("rank") == 0:
            rows.append(row)
        return len(rows) > 1 and rows[-1]["time_s"] - rows[0]["time_s"] >= WINDOW_S

    job.until(over, "steps", LIMIT_S)
    took = rows[-1]["time_s"] - rows[0]["time_s"]
    return {
        "steps_per_s": (len(rows) - 1) / took,
        "cpu": (rows[-1]["cpu_s"] - rows[0]["cpu_s"]) / took,
        "wrong": sum(row["wrong"] for row in rows),
    }


def measure(windows: int, seed: int) -> Iterator[Row]:
    """One row for each flood."""
    sys.path.insert(0, str(ROOT / "tests"))
    from authority import Authority

    link = {"delay_s": 0.05, "rate_bytes_per_s": 25e6}
    environment = {
        "TORCH_RESILIENT_LISTEN_PORT": str(PORT),
        "TORCH_RESILIENT_SECRET": SECRET,
        "TORCH_RESILIENT_INTERFACE": "eth0",
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        two_hosts([link], seed=seed) as (_, hosts, (data,), control),
    ):
        authority = Authority(Path(folder) / "authority")
        certificates = authority.issue("host", names="DNS:a,DNS:b")
        for added, floods in (({}, FLOODS), (certificates, CERTIFIED_FLOODS)):
            job = start_job(__file__, hosts, control, {}, environment={**environment, **added})
            with job:
                window(job)
                for rate, kind in floods:
                    calls = [
                        [data.address(host), PORT, rate, *attack_words(kind)] for host in hosts
                    ]
                    yield summary(rate, kind, seed, *flooded_windows(job, hosts, calls, windows))


def attack_words(kind: str) -> list[object]:
    """The last arguments of a stranger of this kind."""
    from handshake_client import certified_hello, client_hello, key_id_of

    secret = SECRET.encode()
    hello = certified_hello(secret) if kind == "certified" else client_hello(secret)
    words = "tls" if kind == "certified" else kind
    return [words, SOURCES, key_id_of(secret).hex(), hello.hex()]


def flooded_windows(
    job: Any, hosts: Sequence[Any], calls: Sequence[Sequence[object]], windows: int
) -> tuple[list[Row], list[Row], list[float]]:
    """Windows without and with strangers, in turns, and the calls of these a second."""
    quiet: list[Row] = []
    flooded: list[Row] = []
    made: list[float] = []
    for _ in range(windows):
        time.sleep(SETTLE_S)
        quiet.append(window(job))
        attacks = [
            host.popen(
                ["nice", "-n", "19", sys.executable, *map(str, [ATTACK, *call])],
                stdout=subprocess.PIPE,
                text=True,
            )
            for host, call in zip(hosts, calls, strict=True)
        ]
        time.sleep(SETTLE_S)
        flooded.append(window(job))
        for attack in attacks:
            attack.kill()
            last = json.loads(attack.communicate()[0].splitlines()[-1])
            made.append(last["calls"] / last["second"])
    return quiet, flooded, made


def summary(
    rate: int,
    kind: str,
    seed: int,
    quiet: Sequence[Row],
    flooded: Sequence[Row],
    calls: Sequence[float],
) -> Row:
    """One row of the table."""
    shuffled = random.Random(seed).sample([row["steps_per_s"] for row in quiet], len(quiet))
    half = len(quiet) // 2
    quiet_rate, flooded_rate = (
        median([row["steps_per_s"] for row in rows]) for rows in (quiet, flooded)
    )
    cpu = median([row["cpu"] for row in flooded]) - median([row["cpu"] for row in quiet])
    ratio = flooded_rate / quiet_rate
    wrong = sum(row["wrong"] for row in (*quiet, *flooded))
    return {
        "flood": NAMES[kind],
        "rate_per_s": rate,
        "seed": seed,
        "windows": len(quiet),
        "quiet_steps_per_s": quiet_rate,
        "flooded_steps_per_s": flooded_rate,
        "ratio": ratio,
        "same_ratio": median(shuffled[:half]) / median(shuffled[half:]),
        "calls_per_s": median(calls),
        "cpu_us_per_call": cpu / median(calls) * 1e6,
        "wrong": wrong,
        "met": ratio >= RATIO_MIN and wrong == 0,
    }


def describe_row(row: Row) -> str:
    """One line for people."""
    return (
        f"{row['rate_per_s']:>6} calls/s, {row['flood']:<9}: {row['quiet_steps_per_s']:.2f} "
        f"steps/s quiet, {row['flooded_steps_per_s']:.2f} flooded, ratio {row['ratio']:.3f} (A/A "
        f"{row['same_ratio']:.3f}); {row['calls_per_s']:.0f} calls/s, "
        f"{row['cpu_us_per_call']:.0f} us/call; wrong {row['wrong']}: "
        f"{'met' if row['met'] else 'MISSED'}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each flood; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_arguments(parser)
    parser.add_argument("--seed", type=int, default=1, help="of the lab")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        worker()
        return 0
    rows = measure(2 if options.quick else 6, options.seed)
    return show_rows(options, "flood", rows, describe_row)


if __name__ == "__main__":
    sys.exit(main())
