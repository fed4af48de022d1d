"""The demonstration: one training run over four networks, and the proof that only time changed.

    python examples/run_demo.py

Trains a small pipeline over gloo and over the resilient backend: on a healthy network, with one
link 60 ms slower, and with a connection cut in the middle of a transfer. Checks that each fault
really happened, that every loss and every final weight is bitwise the same, and draws what the
ranks did. Exit code 0: all of that holds; 1: something does not, and the text says what.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console import Progress, sparkline
from loss_svg import Curve, render_losses
from timeline_svg import LinkFault, Panel, Section, panel_of, render

RANKS = 4
SLOW_MS = 60.0
# The demo's link: the middle one, which every schedule crosses in both directions.
LOW, HIGH = 1, 2
# What rank 1 sends to rank 2 in a step of 1F1B with the sizes of train_pipeline.py: 8 microbatches
# of 4 rows x 64 bytes x 128 floats. Schedules with two stages a rank send twice that.
SENT_PER_STEP_BYTES = 8 * 4 * 64 * 128 * 4
# A run takes 10 to 20 s; a machine too slow for this limit should lower --steps.
RUN_TIMEOUT_S = 180.0

# Two connections between each two ranks, so that there is a way left when one is cut.
COMMON_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_RESILIENT_PATHS_SAME_HOST": "2"}

Summary = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """One condition to train under.

    Attributes:
        key: short name, for files.
        title: name for people.
        backend: c10d backend.
        environment: variables that bring the fault about.
        evidence: says from a run's summary, and the healthy run's, what shows that the fault
            happened; raises DemoError if nothing does.
        which: the iteration worth drawing.
        fault: how to mark it in the picture.
    """

    key: str
    title: str
    backend: str
    environment: dict[str, str] = field(default_factory=dict)
    evidence: Callable[[Summary, Summary], str] | None = None
    which: str = "median"
    fault: LinkFault | None = None


def cut_after_bytes(steps: int) -> int:
    """When to cut: in the first third of the run, in the middle of a message.

    Bytes over one of two paths, which carry about half of the traffic each.
    """
    return int(0.15 * steps * SENT_PER_STEP_BYTES)


class DemoError(Exception):
    """A claim of the demonstration does not hold; the text says which and why."""


@dataclass(frozen=True)
class Run:
    """A finished run and what it left."""

    schedule: str
    network: Network
    summary: Summary
    timeline: dict[str, Any]
    evidence: str = ""


def paths_between(summary: Summary, rank: int, peer: int) -> list[dict[str, Any]]:
    """What `rank` knows of its paths to `peer`, from torch_resilient.stats().

    Raises:
        DemoError: the rank has no statistics of that peer.
    """
    stats = summary["stats"][rank]
    for entry in (stats or {}).get("peers", []):
        if entry["rank"] == peer:
            return list(entry["paths"])
    raise DemoError(f"rank {rank} has no statistics of its paths to rank {peer}")


def slow_link_evidence(summary: Summary, healthy: Summary) -> str:
    """The measured round trip of the slow link must show both delays."""

    def round_trip_ms(of: Summary) -> float:
        return max(
            1e3 * (path["round_trip_s"] or 0.0)
            for rank, peer in ((LOW, HIGH), (HIGH, LOW))
            for path in paths_between(of, rank, peer)
        )

    slow_ms, healthy_ms = round_trip_ms(summary), round_trip_ms(healthy)
    # A quarter less than twice the delay: the estimate is smoothed.
    if slow_ms < 1.5 * SLOW_MS or slow_ms < healthy_ms + SLOW_MS:
        raise DemoError(
            f"the link {LOW}-{HIGH} was to be {SLOW_MS:.0f} ms slower each way, but its measured "
            f"round trip is {slow_ms:.1f} ms (healthy: {healthy_ms:.1f} ms): no fault happened, "
            "so this run proves nothing. Is TORCH_RESILIENT_FAULTS honoured?"
        )
    return f"round trip {slow_ms:.0f} ms (was {healthy_ms:.1f} ms)"


def reconnects(summary: Summary) -> int:
    """Connections between the two ranks of the demo's link that were made again."""
    ends = ((LOW, HIGH), (HIGH, LOW))
    return max(
        sum(int(path["reconnects"]) for path in paths_between(summary, rank, peer))
        for rank, peer in ends
    )


def cut_evidence(summary: Summary, healthy: Summary) -> str:
    """The cut connection must have been lost and made again, and never in the healthy run."""
    count, before = reconnects(summary), reconnects(healthy)
    if count <= before:
        raise DemoError(
            f"a connection between ranks {LOW} and {HIGH} was to be cut "
            f"in mid-transfer, but {count} were re-established (healthy run: {before}): "
            "no fault happened, so this run proves nothing. Is TORCH_RESILIENT_FAULTS honoured?"
        )
    again = sum(
        path.get("chunks_retransmitted", 0)
        for rank, peer in ((LOW, HIGH), (HIGH, LOW))
        for path in paths_between(summary, rank, peer)
    )
    return f"{count} connection(s) re-established, {again} chunk(s) sent again"


def faulty_networks(steps: int) -> list[Network]:
    """The resilient backend on networks in trouble."""
    slow = "; ".join(
        f"delay rank={rank} peer={peer} ms={SLOW_MS:g}" for rank, peer in ((LOW, HIGH), (HIGH, LOW))
    )
    after_bytes = cut_after_bytes(steps)
    cut = f"cut rank={LOW} peer={HIGH} path=0 after_bytes={after_bytes} times=1"
    return [
        Network(
            "resilient-slow",
            f"resilient, link {LOW}-{HIGH} {SLOW_MS:.0f} ms slower each way",
            "resilient",
            {"TORCH_RESILIENT_FAULTS": slow},
            slow_link_evidence,
            fault=LinkFault(LOW, f"+{SLOW_MS:.0f} ms"),
        ),
        Network(
            "resilient-cut",
            f"resilient, a connection {LOW}-{HIGH} cut in mid-transfer",
            "resilient",
            {"TORCH_RESILIENT_FAULTS": cut},
            cut_evidence,
            which="slowest",
            fault=LinkFault(LOW, "cut"),
        ),
    ]


def networks(backends: Sequence[str], steps: int) -> list[Network]:
    """The conditions to run, the reference first; never one alone, with nothing to compare."""
    conditions: list[Network] = []
    for backend in backends:
        conditions.append(Network(backend, f"{backend}, healthy network", backend))
        if backend == "resilient":
            conditions += faulty_networks(steps)
    if len(conditions) == 1:
        conditions.append(Network(f"{backend}-again", f"{backend}, once more", backend))
    return conditions


def stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun and its ranks.

    Each rank has a session of its own, so only torchrun can end them all: it passes SIGTERM on
    and kills after 30 s what has not gone by then.
    """
    if process.poll() is None:
        process.terminate()
        process.wait(timeout=60)


def run_torchrun(
    arguments: Sequence[str], environment: dict[str, str], log: Path, timeout_s: float
) -> None:
    """Run a script with torchrun, its output in `log`.

    Raises:
        DemoError: it failed or took too long; the text ends with the end of the log.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **COMMON_ENVIRONMENT, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes to us only, and we stop it in order
        )
        try:
            process.wait(timeout=timeout_s)
            how = f"failed with exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            how = f"was not done after {timeout_s:.0f} s"
        finally:
            stop(process)
    if how != "failed with exit code 0":
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
        variables = " ".join(f'{name}="{value}"' for name, value in environment.items())
        raise DemoError(f"{variables} {' '.join(command)}\n{how}; the end of {log}:\n{tail}")


def run_training(schedule: str, network: Network, options: argparse.Namespace) -> Run:
    """One training run; its files go to the output folder."""
    stem = f"{schedule}-{network.key}"
    files = {kind: options.out / "runs" / f"{stem}.{kind}.json" for kind in ("run", "timeline")}
    script = Path(__file__).with_name("train_pipeline.py")
    run_torchrun(
        [
            f"--nproc-per-node={RANKS}",
            str(script),
            f"--backend={network.backend}",
            f"--schedule={schedule}",
            f"--steps={options.steps}",
            f"--pace-ms={options.pace_ms}",
            f"--json={files['run']}",
            f"--timeline={files['timeline']}",
        ],
        network.environment,
        options.out / "runs" / f"{stem}.log",
        RUN_TIMEOUT_S,
    )
    return Run(
        schedule,
        network,
        json.loads(files["run"].read_text()),
        json.loads(files["timeline"].read_text()),
    )


def check_equal(run: Run, reference: Run) -> None:
    """Raises DemoError unless losses and weights are bitwise those of the reference."""
    ours, theirs = run.summary["losses_hex"], reference.summary["losses_hex"]
    where = f"{run.schedule}, {run.network.title}"
    if len(ours) != len(theirs):
        raise DemoError(f"{where}: {len(ours)} steps, {reference.network.title}: {len(theirs)}")
    for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if one != other:
            raise DemoError(
                f"{where}: the loss of step {step} is {one}, over "
                f"{reference.network.title} it was {other}: a message was changed, lost or mixed up"
            )
    if run.summary["weights_sha256"] != reference.summary["weights_sha256"]:
        raise DemoError(
            f"{where}: all losses agree, but the weights after the last step are not those of "
            f"{reference.network.title}: a gradient was changed in the last step"
        )


def reference_of(runs: Sequence[Run], run: Run) -> Run:
    """The run that the others of its schedule are compared with."""
    return next(other for other in runs if other.schedule == run.schedule)


def healthy_of(runs: Sequence[Run], run: Run) -> Run:
    """The fault-free run of the same backend and schedule, which comes before it."""
    return next(
        other
        for other in runs
        if other.schedule == run.schedule
        and other.network.backend == run.network.backend
        and other.network.evidence is None
    )


def run_all(options: argparse.Namespace) -> list[Run]:
    """All runs, each checked as soon as it is done."""
    conditions = networks(options.backends, options.steps)
    plan = [(schedule, network) for schedule in options.schedules for network in conditions]
    progress = Progress(len(plan), "demo")
    runs: list[Run] = []
    for done, (schedule, network) in enumerate(plan):
        progress.update(done, f"{schedule}: {network.title}")
        run = run_training(schedule, network, options)
        check_equal(run, reference_of([*runs, run], run))
        if network.evidence is not None:
            evidence = network.evidence(run.summary, healthy_of(runs, run).summary)
            run = Run(run.schedule, run.network, run.summary, run.timeline, evidence)
        runs.append(run)
    progress.update(len(plan), "all runs done")
    progress.close()
    return runs


def table(runs: Sequence[Run]) -> str:
    """The runs, one a line."""
    equal = f"losses equal to {runs[0].network.backend}'s"
    head = ("schedule", "network", "iteration", "bubble", "tokens/s", equal, "reconnected")
    lines: list[tuple[str, ...]] = [head]
    for run in runs:
        is_resilient = run.summary["stats"][0] is not None
        lines.append(
            (
                run.schedule,
                run.network.title,
                f"{run.summary['iteration_median_s'] * 1e3:.0f} ms",
                f"{run.summary['bubble_fraction']:.0%}",
                f"{run.summary['tokens_per_s']:,.0f}",
                # run_all has let no other run through
                "(reference)" if run is reference_of(runs, run) else "yes, bitwise",
                str(reconnects(run.summary)) if is_resilient else "-",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for number, line in enumerate(lines):
        cells = [
            cell.rjust(width) if 2 <= i <= 4 or i == 6 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
        if number == 0 or (number < len(lines) - 1 and lines[number + 1][0] != line[0]):
            text.append("  ".join("─" * width for width in widths))
    return "\n".join(text)


def picture(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """The timelines of all runs."""
    sections: dict[str, list[Panel]] = {}
    for run in runs:
        notes = [
            f"median {run.summary['iteration_median_s'] * 1e3:.0f} ms",
            f"bubble {run.summary['bubble_fraction']:.0%}",
            "reference" if run is reference_of(runs, run) else "same losses",
        ]
        panel = panel_of(
            run.timeline, run.network.title, run.network.which, notes, run.network.fault
        )
        sections.setdefault(run.schedule, []).append(panel)
    summary = runs[0].summary
    pace = (
        f"Measured on one machine; a forward is paced to {options.pace_ms:g} ms, so that each "
        "rank has the steady speed of a device of its own. "
        if options.pace_ms
        else "Measured on one machine. "
    )
    return render(
        "One training iteration, four pipeline stages",
        f"Each number is a microbatch of {summary['microbatches']}. The network changes when "
        "things happen; losses and weights stay bitwise the same.",
        [Section(schedule, panels) for schedule, panels in sections.items()],
        footer=f"{pace}torch {summary['torch']}, {options.steps} steps a run.",
    )


def losses_picture(runs: Sequence[Run]) -> str:
    """The loss curves of all runs, which lie on top of each other."""
    return render_losses(
        "Loss by step: one curve, however it travelled",
        [Curve(f"{run.schedule}: {run.network.title}", run.summary["losses"]) for run in runs],
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; see --help."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--backends",
        nargs="+",
        default=["gloo", "resilient"],
        help="the first is the reference (default: gloo resilient)",
    )
    add(
        "--schedules",
        nargs="+",
        default=["1F1B", "InterleavedZeroBubble"],
        help="names that train_pipeline.py knows (default: 1F1B InterleavedZeroBubble)",
    )
    add("--steps", type=int, default=10, help="per run (default: 10)")
    add("--pace-ms", type=float, default=15.0, help="see train_pipeline.py (default: 15)")
    add("--out", type=Path, default=Path("demo_output"), help="(default: ./demo_output)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, prove, draw."""
    options = parse_arguments(arguments)
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    print(
        f"{RANKS} ranks train a byte-level GPT, split into pipeline stages, "
        f"{options.steps} steps a run.",
        flush=True,
    )
    try:
        runs = run_all(options)
    except DemoError as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    for name, svg in (
        ("demo_timeline.svg", picture(runs, options)),
        ("demo_losses.svg", losses_picture(runs)),
    ):
        (options.out / name).write_text(svg)
    losses = runs[0].summary["losses"]
    print(f"\n{table(runs)}\n")
    print(f"loss {losses[0]:.3f} {sparkline(losses)} {losses[-1]:.3f}")
    for run in runs:
        if run.evidence:
            print(f"{run.schedule}, {run.network.title}: {run.evidence}")
    print(
        f"PROVED: all {len(runs)} runs went through; within each schedule every loss and every "
        "final weight is bitwise the same."
    )
    print(f"pictures: {options.out}/demo_timeline.svg, {options.out}/demo_losses.svg")
    print(f"took {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
