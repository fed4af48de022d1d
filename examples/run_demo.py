"""The demonstration: a link slows down and recovers, schedules cope, and only time changes.

    python examples/run_demo.py

Trains a small pipeline over gloo, which is the reference, and with several schedules over the
resilient backend. There, a connection is cut in the middle of a transfer, and later its link is
60 ms slower each way for half of the run. Checks that the faults really happened, that every loss
and every final weight is bitwise the same, and draws what the ranks did. Exit code 0: all of that
holds; 1: something does not, and the text says what.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from console import Progress, sparkline
from curves_svg import Curve, render_curves
from stage_placement import ADAPTIVE, stages_of_rank
from timeline_svg import LinkFault, Panel, Section, panel_of, render

RANKS = 4
SLOW_MS = 60.0
# The demo's link: the last one, on which 1F1B has no slack at all.
LOW, HIGH = 2, 3
# Rank 2 sends this to rank 3 in a step of 1F1B with the sizes of train_pipeline.py: 8 microbatches
# of 4 rows x 64 bytes x 128 floats. Schedules with two stages a rank send twice that.
SENT_PER_STEP_BYTES = 8 * 4 * 64 * 128 * 4
# With fewer steps, a phase would have only its first step.
MIN_STEPS = 8
# A run takes 20 to 30 s; a machine too slow for this limit should lower --steps.
RUN_TIMEOUT_S = 180.0

# Two connections between each two ranks: one is left when the other is cut.
COMMON_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_RESILIENT_PATHS_SAME_HOST": "2"}

Summary = dict[str, Any]


@dataclass(frozen=True)
class Phases:
    """The parts of a run: step numbers, each up to the next.

    The slow phase has two halves, since an adaptive schedule needs a few steps to find out.
    """

    slow: int
    late: int
    healed: int
    end: int

    @classmethod
    def of(cls, steps: int) -> Phases:
        """A quarter healthy, two quarters slow, the rest healed."""
        return cls(steps // 4, steps // 2, 3 * steps // 4, steps)

    @property
    def ranges(self) -> dict[str, range]:
        """The steps of each phase without the first one, when conditions change."""
        ends = [0, self.slow, self.late, self.healed, self.end]
        names = ("healthy", "slow, early", "slow, late", "healed")
        return {
            name: range(ends[i] + (name != "slow, late"), ends[i + 1])
            for i, name in enumerate(names)
        }


@dataclass(frozen=True)
class Network:
    """One condition to train under.

    Attributes:
        key: short name, for files.
        title: name for people.
        backend: c10d backend.
        environment: variables that bring the faults about.
        evidence: says from a run's summary what shows that the faults happened; raises DemoError
            if nothing does.
    """

    key: str
    title: str
    backend: str
    environment: dict[str, str] = field(default_factory=dict)
    evidence: Callable[[Summary], str] | None = None


class DemoError(Exception):
    """A claim of the demonstration does not hold; the message names it and the reason."""


@dataclass(frozen=True)
class Run:
    """A finished run and what it left."""

    schedule: str
    network: Network
    summary: Summary
    timeline: dict[str, Any]
    evidence: str = ""


def paths_between(summary: Summary, rank: int, peer: int) -> list[dict[str, Any]]:
    """The paths of `rank` to `peer`, from torch_resilient.stats().

    Raises:
        DemoError: the rank has no statistics of that peer.
    """
    stats = summary["stats"][rank]
    for entry in (stats or {}).get("peers", []):
        if entry["rank"] == peer:
            return list(entry["paths"])
    raise DemoError(f"rank {rank} has no statistics of its paths to rank {peer}")


def round_trip_ms(summary: Summary, step: int) -> float:
    """The round trip of the demo's link, as measured at the end of that step.

    Raises:
        DemoError: nothing was measured.
    """
    ends = ((LOW, HIGH), (HIGH, LOW))
    try:
        measured = [summary["round_trips_s"][rank][step][str(peer)] for rank, peer in ends]
    except (IndexError, KeyError):
        raise DemoError(f"no round trip of the link {LOW}-{HIGH} in step {step}") from None
    return 1e3 * max(measured)


def slow_link_evidence(summary: Summary) -> str:
    """The measured round trip must show both delays in the slow phase, and nowhere else."""
    phases = Phases.of(len(summary["steps"]))
    last_steps = (phases.slow - 1, phases.healed - 1, phases.end - 1)
    healthy_ms, slow_ms, healed_ms = (round_trip_ms(summary, step) for step in last_steps)
    text = f"round trip {healthy_ms:.1f} ms, then {slow_ms:.0f} ms, at the end {healed_ms:.0f} ms"
    # A quarter less than twice the delay: the estimate is smoothed.
    if slow_ms < 1.5 * SLOW_MS or slow_ms < max(healthy_ms, healed_ms) + SLOW_MS:
        raise DemoError(
            f"the link {LOW}-{HIGH} was to be {SLOW_MS:.0f} ms slower each way for a time, but "
            f"this was measured: {text}: no fault happened, so this run proves nothing. Is "
            "TORCH_RESILIENT_FAULTS honoured?"
        )
    return text


def reconnects(summary: Summary, low: int = LOW, high: int = HIGH) -> int:
    """Connections between two ranks that were made again; without any, the demo's link."""
    return max(
        sum(int(path["reconnects"]) for path in paths_between(summary, rank, peer))
        for rank, peer in ((low, high), (high, low))
    )


def cut_evidence(summary: Summary) -> str:
    """The cut connection must have been lost and made again, and no other one."""
    count, elsewhere = reconnects(summary), reconnects(summary, LOW - 1, LOW)
    if count <= elsewhere:
        raise DemoError(
            f"a connection between ranks {LOW} and {HIGH} was to be cut "
            f"in mid-transfer, but {count} were re-established ({LOW - 1} to {LOW}: {elsewhere}): "
            "no fault happened, so this run proves nothing. Is TORCH_RESILIENT_FAULTS honoured?"
        )
    again = sum(
        path.get("chunks_retransmitted", 0)
        for rank, peer in ((LOW, HIGH), (HIGH, LOW))
        for path in paths_between(summary, rank, peer)
    )
    return f"{count} connection(s) re-established, {again} chunk(s) sent again"


def evidence(summary: Summary) -> str:
    """The evidence of both faults; raises DemoError if one did not happen."""
    return f"{cut_evidence(summary)}; {slow_link_evidence(summary)}"


def faulty_network(steps: int) -> Network:
    """The resilient backend on a network in trouble: a cut, a slow phase."""
    phases = Phases.of(steps)
    when = f"from_step={phases.slow} until_step={phases.healed}"
    rules = [
        f"delay rank={rank} peer={peer} ms={SLOW_MS:g} {when}"
        for rank, peer in ((LOW, HIGH), (HIGH, LOW))
    ]
    # One of two paths carries about half of the traffic, and surely between a fifth and all: the
    # cut is in the healthy phase, in the middle of a message.
    after_bytes = int(0.2 * phases.slow * SENT_PER_STEP_BYTES)
    rules.append(f"cut rank={LOW} peer={HIGH} path=0 after_bytes={after_bytes} times=1")
    return Network(
        "resilient-faults",
        "resilient, cut, slow, healed",
        "resilient",
        {"TORCH_RESILIENT_FAULTS": "; ".join(rules)},
        evidence,
    )


def networks(backends: Sequence[str], steps: int) -> list[Network]:
    """The conditions to run, the reference first; never one alone, with nothing to compare."""
    conditions = [Network(backends[0], f"{backends[0]}, healthy", backends[0])]
    for backend in backends:
        if backend == "resilient":
            conditions.append(faulty_network(steps))
        elif backend != backends[0]:
            conditions.append(Network(backend, f"{backend}, healthy", backend))
    if len(conditions) == 1:
        backend = backends[0]
        conditions.append(Network(f"{backend}-again", f"{backend}, once more", backend))
    return conditions


def plan_runs(schedules: Sequence[str], conditions: Sequence[Network]) -> list[tuple[str, Network]]:
    """Every schedule under every condition; the reference once for each placement of stages."""
    plan = []
    placements = []
    for schedule in schedules:
        placement = stages_of_rank(schedule, 0, RANKS)
        for network in conditions:
            if network is not conditions[0] or placement not in placements:
                plan.append((schedule, network))
        placements.append(placement)
    return plan


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


def run_folder(schedule: str, options: argparse.Namespace) -> Path:
    """The folder for the adaptive schedule's timeline of that run."""
    return options.out / "runs" / schedule


def run_training(schedule: str, network: Network, options: argparse.Namespace) -> Run:
    """One training run; its files go to the output folder."""
    stem = f"{schedule}-{network.key}"
    files = {kind: options.out / "runs" / f"{stem}.{kind}.json" for kind in ("run", "timeline")}
    script = Path(__file__).with_name("train_pipeline.py")
    measured = schedule == ADAPTIVE and network.evidence is not None
    more = [f"--timeline-dir={run_folder(schedule, options)}"] if measured else []
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
            *more,
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
    """The first run with the same stages on each rank: what others are compared with."""
    placement = stages_of_rank(run.schedule, 0, RANKS)
    return next(other for other in runs if stages_of_rank(other.schedule, 0, RANKS) == placement)


def run_all(options: argparse.Namespace) -> list[Run]:
    """All runs, each checked as soon as it is done."""
    plan = plan_runs(options.schedules, networks(options.backends, options.steps))
    progress = Progress(len(plan), "demo")
    runs: list[Run] = []
    for done, (schedule, network) in enumerate(plan):
        progress.update(done, f"{schedule}: {network.title}")
        run = run_training(schedule, network, options)
        check_equal(run, reference_of([*runs, run], run))
        if network.evidence is not None:
            run = replace(run, evidence=network.evidence(run.summary))
        runs.append(run)
    progress.update(len(plan), "all runs done")
    progress.close()
    return runs


def phase_times_s(summary: Summary) -> dict[str, float]:
    """The median iteration of each phase."""
    phases = Phases.of(len(summary["steps"]))
    return {
        name: statistics.median(summary["iteration_s"][step] for step in steps)
        for name, steps in phases.ranges.items()
    }


def table(runs: Sequence[Run]) -> str:
    """The runs, one a line; a network that never changes has phases, too, to compare with."""
    phases = list(phase_times_s(runs[0].summary))
    equal = f"losses equal to {runs[0].network.backend}'s"
    head = ("schedule", "network", *phases, equal, "reconnected")
    lines: list[tuple[str, ...]] = [head]
    for run in runs:
        is_resilient = run.summary["stats"][0] is not None
        lines.append(
            (
                run.schedule,
                run.network.title,
                *(f"{time_s * 1e3:.0f} ms" for time_s in phase_times_s(run.summary).values()),
                # run_all has let no other run through
                "(reference)" if run is reference_of(runs, run) else "yes, bitwise",
                str(reconnects(run.summary)) if is_resilient else "-",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = []
    for number, line in enumerate(lines):
        cells = [
            cell.ljust(width) if i in (0, 1, 2 + len(phases)) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text.append("  ".join(cells).rstrip())
        if number == 0:
            text.append("  ".join("─" * width for width in widths))
    return "\n".join(text)


def phase_panel(run: Run, phase: str) -> Panel:
    """The median iteration of a phase."""
    phases = Phases.of(len(run.summary["steps"]))
    steps = phases.ranges[phase]
    # panel_of leaves out the first step it is given.
    spans = [
        [span for span in rank if steps.start - 1 <= span[0] < steps.stop]
        for rank in run.timeline["ranks"]
    ]
    slow = phases.slow <= steps.start < phases.healed and run.network.evidence is not None
    return panel_of(
        {**run.timeline, "ranks": spans},
        f"{run.schedule} over {run.network.backend}",
        notes=["reference" if run.network.evidence is None else "same losses"],
        fault=LinkFault(LOW, f"+{SLOW_MS:.0f} ms") if slow else None,
    )


def picture(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """An iteration of each run, on a healthy network and with the slow link."""
    summary = runs[0].summary
    faulty = [run for run in runs if run.network.evidence is not None]
    sections = [Section("Healthy network", [phase_panel(run, "healthy") for run in runs])]
    if faulty:
        sections.append(
            Section(
                f"Link {LOW}-{HIGH} {SLOW_MS:.0f} ms slower each way",
                [phase_panel(run, "slow, late") for run in faulty],
            )
        )
    pace = (
        f"Measured on one machine; a forward is paced to {options.pace_ms:g} ms, so that each "
        "rank has the steady speed of a device of its own. "
        if options.pace_ms
        else "Measured on one machine. "
    )
    return render(
        "One training iteration, four pipeline stages",
        f"Each number is a microbatch of {summary['microbatches']}. Network and schedule change "
        "when things happen; losses and weights stay bitwise the same.",
        sections,
        footer=f"{pace}torch {summary['torch']}, {options.steps} steps a run.",
    )


def draw_plan_change(folder: Path, out: Path) -> str:
    """Draws the steps around a change of plan, with the package's own command.

    Returns the output of the command. Raises DemoError if it fails.
    """
    command = [sys.executable, "-m", "torch_resilient.cli", "timeline", str(folder)]
    done = subprocess.run(
        [*command, f"--picture={out}"], capture_output=True, text=True, timeout=RUN_TIMEOUT_S
    )
    if done.returncode != 0:
        raise DemoError(f"{' '.join(command)} failed: {done.stderr}")
    return done.stdout.strip()


def plans_of(run: Run) -> list[str]:
    """The changes of plan, as the first stage reports them."""
    events = (run.summary["stats"][0] or {}).get("events", [])
    return [event["text"] for event in events if event["kind"] == "plan"]


def losses_picture(runs: Sequence[Run]) -> str:
    """The loss curves of all runs, which lie on top of each other."""
    return render_curves(
        "Loss by step: one curve, however it travelled",
        "Each curve is drawn thinner than the one below it: all can be seen.",
        "loss, nats per byte",
        [Curve(run.schedule, run.summary["losses"], note=run.network.title) for run in runs],
        dots=False,
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
        default=["1F1B", "ZB1P", ADAPTIVE],
        help=f"names that train_pipeline.py knows (default: 1F1B ZB1P {ADAPTIVE})",
    )
    add(
        "--steps",
        type=int,
        default=20,
        help="per run: a quarter healthy, a half with the slow link, a quarter healed (default: "
        f"%(default)s, at least {MIN_STEPS})",
    )
    add("--pace-ms", type=float, default=15.0, help="see train_pipeline.py (default: 15)")
    add("--out", type=Path, default=Path("demo_output"), help="(default: ./demo_output)")
    options = parser.parse_args(arguments)
    if options.steps < MIN_STEPS:
        parser.error(f"--steps: expected at least {MIN_STEPS}, got {options.steps}")
    return options


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
    drawn = []
    try:
        runs = run_all(options)
        for run in runs:
            if run.schedule == ADAPTIVE and run.network.evidence is not None:
                folder = run_folder(run.schedule, options)
                drawn.append(draw_plan_change(folder, options.out / "demo_plan_change.svg"))
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
            print(f"{run.schedule}: {run.evidence}")
        for plan in plans_of(run):
            print(f"{run.schedule}: {plan}")
    print(
        f"PROVED: all {len(runs)} runs went through; with the same number of stages a rank, every "
        "loss and every final weight is bitwise the same."
    )
    print(f"pictures: {options.out}/demo_timeline.svg, {options.out}/demo_losses.svg")
    for line in drawn:
        print(line)
    print(f"took {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
