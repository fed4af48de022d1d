"""The demonstration of lossy links: one training between two sites, in three ways.

    python examples/demo_lossy.py

Two ranks train a small GPT with DDP on two emulated hosts, joined by a long link that loses 2 % of
all packets: over TCP; over datagrams with parity, exactly; and over datagrams with SMART's hook,
where small gradients may be dropped and come with the next step. Checks that packets were dropped,
that both ranks have the same parameters after every step, bit for bit, and that what is exact is
the same over TCP and datagrams; then compares and draws the times of the steps. Needs root and
/dev/net/tun for the hosts. Exit status 0: all of that holds; 1: something does not, and the text
says what; 2: this machine cannot make the hosts.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console import Progress, sparkline
from curves_svg import Curve, render_curves

from torch_resilient.testing import LabJob, NetworkLab, unavailable

DROP = 0.02
# Not counted: the backend opens connections and measures packet size and drop rate.
WARM_UP = 5
MIN_STEPS = WARM_UP + 5
STEP_TIMEOUT_S = 60.0
# One for each run, which follow one another closely on the same hosts.
FIRST_PORT = 29400


@dataclass(frozen=True)
class Way:
    """The transport of the gradients.

    Attributes:
        name: for people.
        datagrams: over datagrams; else over TCP, as by default.
        smart: with the hook; else DDP's all-reduce, which is exact.
    """

    name: str
    datagrams: bool
    smart: bool


WAYS = (
    Way("TCP", datagrams=False, smart=False),
    Way("datagrams, exact", datagrams=True, smart=False),
    Way("datagrams, SMART", datagrams=True, smart=True),
)


class DemoError(Exception):
    """A claim of the demonstration does not hold; the message names it and the reason."""


@dataclass
class Run:
    """The results of a training.

    Attributes:
        steps: by rank, then by step: the rows of train_ddp_lossy.py.
        results: by rank, its last row.
        dropped: packets that the link has dropped, of all kinds.
    """

    way: Way
    steps: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], []])
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    dropped: int = 0

    @property
    def times_s(self) -> list[float]:
        """The time of each step, on the rank that took longer."""
        return [max(row["taken_s"] for row in rows) for rows in zip(*self.steps, strict=True)]

    @property
    def losses(self) -> list[float]:
        """The loss of each step, nats per byte, the mean of both ranks."""
        return [float(row["loss"]) for row in self.steps[0]]

    def digests(self, rank: int) -> list[str]:
        """The digests of that rank's parameters, after each step."""
        return [row["digest"] for row in self.steps[rank]]

    def packets(self, name: str) -> int:
        """A counter of datagrams, summed over both ranks: dropped, recovered, zero_filled..."""
        counted = (
            path["datagrams"][name]
            for result in self.results.values()
            for path in result["paths"]
            if path["datagrams"]
        )
        return sum(counted)


def train(lab: NetworkLab, way: Way, steps: int, port: int) -> Run:
    """One training on the two hosts. Raises DemoError if it fails."""
    hosts = list(lab.hosts.values())
    link = lab.networks["eth0"]
    script = Path(__file__).with_name("train_ddp_lossy.py")
    command = [sys.executable, str(script), "--json", f"--steps={steps}", "--layers=2"]
    if way.smart:
        command.append("--smart")
    # The other network is for the store.
    environment = {"TORCH_RESILIENT_INTERFACE": "eth0"}
    if way.datagrams:
        environment["TORCH_RESILIENT_WAN"] = "udp"
    else:
        environment["TORCH_RESILIENT_WAN"] = "tcp"
    run = Run(way)
    before = link.counters().dropped.packets
    progress = Progress(steps, f"{way.name:<16}")
    control = lab.networks["control"]
    with LabJob(command, hosts, control, environment=environment, port=port) as job:
        try:
            while len(run.results) < len(hosts):
                row = job.until(lambda _: True, "row of a step", STEP_TIMEOUT_S)
                if row["kind"] == "result":
                    run.results[row["rank"]] = row
                    continue
                run.steps[row["rank"]].append(row)
                if row["rank"] == 0:
                    progress.update(row["step"] + 1, f"loss {row['loss']:.3f}")
        except RuntimeError as error:
            raise DemoError(f"{way.name}: {error}") from None
        progress.close()
        if any(statuses := job.wait(STEP_TIMEOUT_S)) or None in statuses:
            raise DemoError(f"{way.name}: the ranks ended with {statuses}")
    run.dropped = link.counters().dropped.packets - before
    return run


def check_replicas(run: Run) -> None:
    """Raises DemoError unless both ranks have the same parameters after every step."""
    for step, (one, other) in enumerate(zip(run.digests(0), run.digests(1), strict=True)):
        if one != other:
            raise DemoError(
                f"{run.way.name}: the parameters of the two ranks differ after step {step}"
            )


def check_exact(run: Run, reference: Run) -> None:
    """Raises DemoError unless both trainings are the same, step by step and bit by bit."""
    for step, (one, other) in enumerate(zip(run.digests(0), reference.digests(0), strict=True)):
        if one != other:
            raise DemoError(
                f"{run.way.name}: after step {step} the parameters are not those of "
                f"{reference.way.name}: a gradient was changed or lost"
            )


def check_packets_were_dropped(run: Run) -> None:
    """Raises DemoError unless the link has dropped packets and they were treated as they should."""
    name = run.way.name
    if run.dropped == 0:
        raise DemoError(f"{name}: the link has dropped nothing, so this run proves nothing")
    if not run.way.datagrams:
        return
    if run.packets("dropped") == 0:
        raise DemoError(f"{name}: no datagram was dropped: went everything over TCP?")
    if run.way.smart and run.packets("zero_filled") == 0:
        raise DemoError(f"{name}: nothing was zero-filled: the hook has tolerated no drop")
    if not run.way.smart and run.packets("zero_filled") > 0:
        raise DemoError(f"{name}: packets were zero-filled, though all was to be exact")


def p99(values: Sequence[float]) -> float:
    """The smallest value that 99 % do not exceed: of fewer than 100 the largest."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def table(runs: Sequence[Run]) -> str:
    """The runs, one a line."""
    head = ("gradients over", "mean ms", "p99 ms", "dropped", "recovered", "sent again")
    lines = [(*head, "zero-filled", "last loss")]
    for run in runs:
        times_ms = [1e3 * each for each in run.times_s[WARM_UP:]]
        # The kernel retransmits packets that TCP loses; the backend does not see this.
        names = ("dropped", "recovered", "retransmitted", "zero_filled")
        counts = [f"{run.packets(name):,}" if run.way.datagrams else "" for name in names]
        if not run.way.datagrams:
            counts[0] = f"{run.dropped:,}"
        lines.append(
            (
                run.way.name,
                f"{statistics.fmean(times_ms):.0f}",
                f"{p99(times_ms):.0f}",
                *counts,
                f"{run.losses[-1]:.4f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = []
    for number, line in enumerate(lines):
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        text.append("  ".join([line[0].ljust(widths[0]), *cells[1:]]))
        if number == 0:
            text.append("  ".join("─" * width for width in widths))
    return "\n".join(text)


def picture(runs: Sequence[Run], where: str) -> str:
    """The time of each step, in the three ways."""
    curves = []
    for run in runs:
        times_ms = [1e3 * each for each in run.times_s[WARM_UP:]]
        note = f"mean {statistics.fmean(times_ms):.0f} ms, longest {max(times_ms):.0f} ms"
        curves.append(Curve(run.way.name, times_ms, first=WARM_UP + 1, note=note))
    return render_curves(
        f"Training over a link that loses {100 * DROP:g} % of its packets",
        f"Time of each step, two DDP ranks, {where}. The parameters of both ranks are bitwise "
        "equal after every step.",
        "time of a step, ms",
        curves,
        from_zero=True,
        footer=why_smart_is_slower(runs),
    )


def why_smart_is_slower(runs: Sequence[Run]) -> list[str]:
    """Lines of text if SMART was slower than exact datagrams; else none."""
    means = {run.way.name: statistics.fmean(run.times_s[WARM_UP:]) for run in runs}
    exact, smart = (next(run for run in runs if run.way is way) for way in WAYS[1:])
    if means[smart.way.name] <= means[exact.way.name]:
        return []
    return [
        "SMART is slower than exact datagrams here. Parity repairs nearly all drops: of "
        f"{exact.packets('dropped'):,} dropped packets {exact.packets('retransmitted'):,} were "
        "retransmitted.",
        "So the hook has little waiting to save, and takes a few milliseconds itself, with or "
        "without drops.",
    ]


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=30, help=f"of each run, at least {MIN_STEPS} (default: 30)")
    add("--rate-mbit", type=float, default=200.0, help="of the link (default: 200)")
    add("--delay-ms", type=float, default=20.0, help="of the link, one way (default: 20)")
    add("--seed", type=int, default=1, help="decides which packets are dropped (default: 1)")
    add("--out", type=Path, default=Path("demo_output"), help="(default: ./demo_output)")
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps: expected at least {MIN_STEPS}, got {options.steps}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, check, compare, draw."""
    options = parse_arguments(arguments)
    if (reason := unavailable()) is not None:
        print(
            f"This machine cannot make the two hosts: {reason}. On two real hosts: see "
            "examples/train_ddp_lossy.py.",
            file=sys.stderr,
        )
        return 2
    began_s = time.monotonic()
    where = f"{options.rate_mbit:g} Mbit/s, {options.delay_ms:g} ms one way"
    print(
        f"Two ranks train a byte-level GPT, {where}, {100 * DROP:g} % dropped packets.", flush=True
    )
    runs: list[Run] = []
    try:
        with NetworkLab(seed=options.seed) as lab:
            hosts = [lab.host("east"), lab.host("west")]
            lab.link(
                *hosts,
                delay_s=options.delay_ms / 1e3,
                rate_bytes_per_s=options.rate_mbit * 1e6 / 8,
                drop=DROP,
            )
            lab.link(*hosts, name="control")
            for number, way in enumerate(WAYS):
                run = train(lab, way, options.steps, FIRST_PORT + number)
                check_replicas(run)
                check_packets_were_dropped(run)
                if runs and not way.smart:
                    check_exact(run, runs[0])
                runs.append(run)
    except DemoError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    options.out.mkdir(parents=True, exist_ok=True)
    drawn = options.out / "demo_lossy.svg"
    drawn.write_text(picture(runs, where))
    print(f"\n{table(runs)}\n")
    for run in runs:
        losses = run.losses
        print(f"{run.way.name:<16}  loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}")
    print(
        "PROVED: after every step both ranks have the same parameters, bit for bit; what is exact "
        "is the same over TCP and over datagrams."
    )
    print(f"steps {WARM_UP + 1} to {options.steps} count; picture: {drawn}")
    print(f"took {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
