"""`torch-resilient profile-drop`: the tolerable rate of dropped activations, by boundary."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input

ABOUT = """\
Runs SCRIPT, an unchanged training, many times: without drops, and with a part of the messages over
one boundary between pipeline stages dropped and read as zeros. The training loss at the end shows
the cost, and so the bound that each boundary tolerates (SMART, Figure 1). Each run is a separate
process on this machine, with a fixed seed: runs with and without drops see the same data.

drops
  The output of a boundary's module goes through packets of 1376 bytes, as over datagrams. Each
  message drops the tried fraction of its packets, rounded down, but never the first packet. This is
  the maximum that a bound of this fraction allows. Messages too small to drop a packet, or below
  --exact-below, are marked "exact": profile with the batch size of the real training. Modules in
  evaluation mode drop nothing.
  --direction forward: activations, as SmartOptions.activation_bound allows. backward: their
  gradients. both: the same fraction of each.
  --packets random: any packets, as with activations. small: the packets of the smallest mean
  magnitude, as with gradients.

boundaries
  --boundary NAME puts a boundary after the module of that name, such as blocks.3; repeat it for
  each boundary, in order. By default, boundaries are between the script's own stages of
  torch.distributed.pipelining, called stage0, stage1... A script without stages gets boundaries
  after evenly spaced children of the longest list of modules, for --stages stages. With
  --nproc-per-node N the script runs under torchrun, which pipelines need.

output
  A step ends with optimizer.step(); its loss is the mean of the scalars on which the script called
  backward() before. "harm" is the increase of the loss of the last steps over a run without drops,
  with its mean and standard deviation over the seeds. The bound is the largest fraction that does
  no more harm than --tolerate, and all smaller fractions do no more either. The smallest limit of
  --tolerate applies, such as 1sd (of the losses of all seeds; without meaning if the script sets
  its own seed) and 1% (of the loss). At the end all bounds are tried at once, and lowered if they
  do too much harm together.

  The command runs (1 + boundaries * fractions) * seeds trainings: end each with --steps as soon as
  the loss is meaningful. Every run writes all output files of the script. torch.compile is off.

examples:
  torch-resilient profile-drop --steps 200 train.py --batch 32
  torch-resilient profile-drop --boundary blocks.3 --boundary blocks.7 --fractions 0.01,0.05 \\
      train.py
  torch-resilient profile-drop --nproc-per-node 4 train_pipeline.py --steps 50

exit status: 0; 1 if the script fails, with the end of its output; 2 for bad input.
"""

# The end of a script's output that is shown if it fails.
_LINES_SHOWN = 20
# torchrun kills its workers after 30 s if they do not end by themselves.
_END_S = 60.0
# SmartOptions.depth_ratio, by default.
_DEPTH_RATIO = 0.25
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)(sd|%)")


class ScriptError(Exception):
    """A run of the script failed; the text is one line."""


@dataclass(frozen=True)
class Limit:
    """The tolerated harm: a number of standard deviations, or a fraction of the loss."""

    text: str
    deviations: float = 0.0
    fraction: float = 0.0

    def nats(self, losses: Sequence[float]) -> float | None:
        """The limit in units of the loss; None if the losses of all seeds are equal."""
        if self.deviations:
            spread = _deviation(losses)
            return self.deviations * spread if spread > 0 else None
        return self.fraction * abs(statistics.fmean(losses))


@dataclass(frozen=True)
class Harm:
    """By how much the final loss exceeds that of the same seed without drops, by seed."""

    by_seed: Sequence[float]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.by_seed)

    @property
    def deviation(self) -> float:
        return _deviation(self.by_seed)

    def within(self, limit: float) -> bool:
        """False also where the training diverged."""
        return self.mean <= limit

    def __str__(self) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        return _spread(f"{self.mean:+.4f}", self.by_seed)


def _spread(mean: str, values: Sequence[float]) -> str:
    """The mean, with the standard deviation if there are several seeds."""
    return f"{mean} ± {_deviation(values):.4f}" if len(values) > 1 else mean


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 0.0
    return statistics.stdev(values)


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "profile-drop",
        help="find how many dropped activations a training tolerates at each pipeline boundary",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [-m] SCRIPT [ARGUMENT...]",
    )
    add = parser.add_argument
    add(
        "--boundary",
        action="append",
        default=[],
        metavar="NAME",
        help="a module that ends a stage; may be repeated",
    )
    add("--stages", type=int, default=4, metavar="N", help="number of stages; default: 4")
    add(
        "--fractions",
        default="0.005,0.01,0.02,0.05",
        metavar="LIST",
        help="fractions of each message to drop; default: %(default)s",
    )
    add("--direction", choices=("forward", "backward", "both"), default="forward")
    add("--packets", choices=("random", "small"), default="random")
    add(
        "--exact-below",
        type=int,
        default=65536,
        metavar="BYTES",
        help="smaller messages arrive whole (SmartOptions.exact_below_bytes); default: 65536",
    )
    add("--steps", type=int, metavar="N", help="steps of each run; default: until the script ends")
    add("--last", type=int, metavar="N", help="steps whose loss counts; default: a fifth of them")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each kind; default: 3")
    add("--tolerate", default="1sd,1%", metavar="LIST", help="limits; default: 1sd,1%%")
    add("--nproc-per-node", type=int, metavar="N", help="run SCRIPT under torchrun with N ranks")
    add("--json", action="store_true", help="print JSON instead of text")
    add("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    add("script", metavar="SCRIPT", help=argparse.SUPPRESS)
    add("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Request:
    """The command line, checked."""

    command: Sequence[str]  # settings and script are appended
    script: Sequence[str]
    names: Sequence[str] | None
    fractions: Sequence[float]
    limits: Sequence[Limit]
    seeds: Sequence[int]
    last: int | None
    settings: Mapping[str, Any]  # the same in all runs


def _request(options: argparse.Namespace) -> _Request:
    """Raises ValueError, naming the option."""
    fractions = []
    for text in options.fractions.split(","):
        try:
            fraction = float(text)
        except ValueError:
            fraction = math.nan
        if not 0 <= fraction <= 1:
            raise ValueError(f"--fractions: expected fractions, 0 to 1, got {text!r}")
        if fraction > 0:  # the run without drops is always made
            fractions.append(fraction)
    if not fractions:
        raise ValueError("--fractions: expected one above 0")
    limits = []
    for text in options.tolerate.split(","):
        match = _LIMIT.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"--tolerate: expected limits such as 1sd or 1%, got {text!r}")
        number = float(match[1])
        limits.append(
            Limit(match[0], deviations=number)
            if match[2] == "sd"
            else Limit(match[0], fraction=number / 100)
        )
    for name, least in (("stages", 2), ("seeds", 1), ("steps", 2), ("last", 1), ("exact_below", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option}: expected at least {least}, got {value}")
    if len(set(options.boundary)) < len(options.boundary):
        raise ValueError("--boundary: a name comes twice")
    ranks = options.nproc_per_node
    if ranks is not None and ranks < 1:
        raise ValueError(f"--nproc-per-node: expected at least 1, got {ranks}")
    if not options.module and not Path(options.script).is_file():
        raise ValueError(f"{options.script}: no such file")
    command = [sys.executable, "-m"]
    if ranks is not None:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    return _Request(
        command=[*command, "torch_resilient.cli.profile_run"],
        script=[options.script, *options.arguments],
        names=options.boundary or None,
        fractions=sorted(set(fractions)),
        limits=limits,
        seeds=range(options.seeds),
        last=options.last,
        settings={
            "stages": options.stages,
            "fractions": sorted(set(fractions)),
            "direction": options.direction,
            "packets": options.packets,
            "exact_below_bytes": options.exact_below,
            "steps": options.steps,
            "module": options.module,
        },
    )


@dataclass(frozen=True)
class Outcome:
    """The observations of a run, all ranks together.

    Attributes:
        losses: by step.
        boundaries: the messages across each boundary, by name; see Watcher.result().
        how: the origin of the boundaries; "": they were given.
        modules: some names of modules.
    """

    losses: Sequence[float]
    boundaries: Mapping[str, Mapping[str, Any]]
    how: str
    modules: Sequence[str]


@contextlib.contextmanager
def _process(command: Sequence[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs it and ends it on leaving the block, also after an error."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "TORCH_COMPILE_DISABLE": "1"}
    # Ctrl-C reaches only this process, which ends the others in order.
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run_once(
    request: _Request, names: Sequence[str] | None, bounds: Mapping[str, float], seed: int
) -> Outcome:
    """One training. If it fails, prints the end of its output and raises ScriptError."""
    with tempfile.TemporaryDirectory(prefix="profile-drop-") as folder:
        settings = {**request.settings, "out": folder, "names": names, "bounds": dict(bounds)}
        settings["seed"] = seed
        log = Path(folder, "log")
        with log.open("wb") as output:
            command = [*request.command, json.dumps(settings), *request.script]
            with _process(command, output) as process:
                status = process.wait()
        files = sorted(Path(folder).glob("rank*.json"))
        if status != 0 or not files:
            said = log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            sys.stderr.write("".join(f"| {line}\n" for line in said))
            what = "without drops" if not bounds else f"with {_told(bounds)} dropped"
            raise ScriptError(
                f"{request.script[0]} failed with exit status {status}, {what}, seed {seed}; its "
                "last words are above"
            )
        return _together([json.loads(path.read_text()) for path in files])


def _together(ranks: Sequence[Mapping[str, Any]]) -> Outcome:
    """The mean loss of those ranks that have one, by step; the boundaries of all."""
    losses = []
    for step in zip(*(rank["losses"] for rank in ranks), strict=False):
        known = [loss for loss in step if loss is not None]
        if known:
            losses.append(statistics.fmean(known))
    boundaries: dict[str, Mapping[str, Any]] = {}
    for rank in ranks:
        for name, seen in rank["boundaries"].items():
            boundaries.setdefault(name, seen)
    how = next((rank["how"] for rank in ranks if rank["how"]), "")
    if all(re.fullmatch(r"stage\d+", name) for name in boundaries):
        boundaries = dict(sorted(boundaries.items(), key=lambda item: int(item[0][5:])))
    return Outcome(losses, boundaries, how, ranks[0]["modules"])


def _told(bounds: Mapping[str, float]) -> str:
    return ", ".join(f"{fraction:.3g} of {name}" for name, fraction in bounds.items())


@dataclass
class Profile:
    """All results.

    Attributes:
        names: of the boundaries, in order.
        final: loss at the end by seed, without drops.
        harm: by boundary and fraction; without those that could lose nothing.
        bounds: suggested, by boundary.
        together: harm with all of them at once, as often as they were tried; the last counts. Empty
            if they are all 0.
    """

    request: _Request
    names: Sequence[str]
    first: Outcome
    final: Sequence[float]
    last: int
    limit: float
    limit_text: str
    harm: dict[str, dict[float, Harm]] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    together: list[tuple[dict[str, float], Harm]] = field(default_factory=list)

    def lowered(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """Each bound lowered to the next fraction that was tried, down to 0."""
        return {
            name: max((f for f in self.harm[name] if f < bound), default=0.0)
            for name, bound in bounds.items()
        }


class Progress:
    """A line on stderr for each run."""

    def __init__(self) -> None:
        self._done = 0
        self._began_s = time.monotonic()
        self.total = 0  # 0: not known yet

    def say(self, what: str, seed: int, loss: float) -> None:
        """A run has ended."""
        self._done += 1
        of = f" of {self.total}" if self._done <= self.total else ""
        taken_s = time.monotonic() - self._began_s
        left_s = taken_s / self._done * (self.total - self._done)
        left = f", {left_s:.0f} s left" if left_s > 0 else ""
        print(
            f"run {self._done}{of}: {what}, seed {seed}: loss {loss:.4f}{left}",
            file=sys.stderr,
            flush=True,
        )


def _check(first: Outcome, request: _Request) -> None:
    """Raises ValueError if the run without drops cannot be judged."""
    script = request.script[0]
    if len(first.losses) < 2:
        raise ValueError(
            f"{script}: {len(first.losses)} steps with a loss: expected at least two calls of "
            "optimizer.step(), each after backward() from a scalar"
        )
    some = ", ".join(first.modules) or "none was called in training"
    missing = [name for name in request.names or () if name not in first.boundaries]
    if missing:
        raise ValueError(
            f"--boundary {missing[0]}: no module of this name is trained; there are {some}..."
        )
    if not first.boundaries:
        raise ValueError(
            f"{script}: no boundary: the model has no ModuleList, ModuleDict or Sequential of two "
            f"or more; name modules with --boundary; there are {some}..."
        )
    for name, seen in first.boundaries.items():
        if not seen["forward"]["messages"]:
            raise ValueError(f"--boundary {name}: the script never called it in training")


def _limit(limits: Sequence[Limit], final: Sequence[float]) -> tuple[float, str]:
    """The smallest applicable limit, in units of the loss, and its text."""
    known = [(nats, each.text) for each in limits if (nats := each.nats(final)) is not None]
    if not known:
        raise ValueError(
            "--tolerate: all seeds have the same loss (does the script set its own seed?), so "
            "their standard deviation says nothing: give a limit such as 1%"
        )
    return min(known)


def profile(request: _Request) -> Profile:
    """Does all runs. Raises ScriptError, ValueError."""
    progress = Progress()
    first = run_once(request, request.names, {}, request.seeds[0])
    _check(first, request)
    names = request.names or list(first.boundaries)
    last = request.last or max(1, len(first.losses) // 5)
    if last > len(first.losses):
        raise ValueError(f"--last {last}: a run has {len(first.losses)} steps only")
    tried = {
        name: [
            fraction
            for fraction, packets in zip(
                request.fractions, first.boundaries[name]["may_miss"], strict=True
            )
            if packets
        ]
        for name in names
    }
    progress.total = len(request.seeds) * (1 + sum(len(each) for each in tried.values()))

    def final(outcome: Outcome) -> float:
        return statistics.fmean(outcome.losses[-last:])

    without = []
    for seed in request.seeds:
        outcome = first if seed == request.seeds[0] else run_once(request, names, {}, seed)
        without.append(final(outcome))
        progress.say("without drops", seed, without[-1])
    if not all(map(math.isfinite, without)):
        raise ValueError(f"{request.script[0]}: without any drop the training diverges: {without}")

    def harm_of(bounds: Mapping[str, float]) -> Harm:
        by_seed = []
        for seed, expected in zip(request.seeds, without, strict=True):
            loss = final(run_once(request, names, bounds, seed))
            progress.say(f"{_told(bounds)} dropped", seed, loss)
            by_seed.append(loss - expected if math.isfinite(loss) else math.inf)
        return Harm(by_seed)

    limit, text = _limit(request.limits, without)
    found = Profile(request, names, first, without, last, limit, text)
    for name in names:
        found.harm[name] = {fraction: harm_of({name: fraction}) for fraction in tried[name]}
        found.bounds[name] = 0.0
        for fraction, harm in found.harm[name].items():
            if not harm.within(limit):
                break
            found.bounds[name] = fraction
    while sum(bound > 0 for bound in found.bounds.values()) > 1:
        bounds = {name: bound for name, bound in found.bounds.items() if bound > 0}
        harm = harm_of(bounds)
        found.together.append((dict(found.bounds), harm))
        if harm.within(limit):
            break
        found.bounds = found.lowered(found.bounds)
    return found


def _bounds_text(bounds: Mapping[str, float]) -> str:
    values = ", ".join(repr(bound) for bound in bounds.values())
    return f"({values},)" if len(bounds) == 1 else f"({values})"


def table(found: Profile) -> str:
    """The profile for people."""
    first, fractions = found.first, found.request.fractions
    count, steps, seeds = len(found.names), len(first.losses), len(found.final)
    mean = f"{statistics.fmean(found.final):.4f}"
    how = f": {first.how}" if first.how else ""
    lines = [f"{count} {'boundary' if count == 1 else 'boundaries'}{how}"]
    for name in found.names:
        way = first.boundaries[name]["forward"]
        each = way["packets"] / way["messages"]
        lines.append(
            f"  behind {name}: messages of up to {way['largest_bytes']:,} bytes, {each:.0f} packets"
        )
    lines += [
        f"loss of the last {found.last} of {steps} steps, {seeds} "
        f"{'seed' if seeds == 1 else 'seeds'}: {_spread(mean, found.final)}",
        f"tolerated: {found.limit:.4f} more ({found.limit_text})",
        "",
    ]
    rows = [["harm", *(f"{100 * fraction:g} %" for fraction in fractions), "bound"]]
    for name in found.names:
        # The bound of this boundary alone, before all were tried at once.
        alone = (found.together[0][0] if found.together else found.bounds)[name]
        cells = [str(found.harm[name].get(fraction, "exact")) for fraction in fractions]
        rows.append([name, *cells, f"{alone:g}"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    for bounds, harm in found.together:
        verdict = "tolerated" if harm.within(found.limit) else "too much"
        lines.append(f"all at once, {_bounds_text(bounds)}: {harm}: {verdict}")
    lines += ["", f"SmartOptions(activation_bound={_bounds_text(found.bounds)})"]
    values = list(found.bounds.values())
    # Paper: SMART §3.1, Equation 2, as SmartOptions.activation_bound_of(): boundary i is behind
    # stage i + 1 of count + 1.
    late = [bound for i, bound in enumerate(values) if (i + 1) / (count + 1) > _DEPTH_RATIO]
    if count > 1 and late:
        lines.append(
            f"or one number, for what is behind the first quarter: activation_bound={min(late)}"
        )
    if not any(found.harm.values()):
        lines.append(
            "nothing was tried: at these fractions no message drops a packet; raise --fractions, "
            "or profile with larger batches"
        )
    return "\n".join(lines)


def _output(found: Profile) -> dict[str, Any]:
    def told(harm: Harm) -> dict[str, Any]:
        # JSON has no infinity: null stands for a training that diverged.
        by_seed = [each if math.isfinite(each) else None for each in harm.by_seed]
        finite = math.isfinite(harm.mean)
        mean, deviation = (harm.mean, harm.deviation) if finite else (None, None)
        return {"by_seed": by_seed, "mean": mean, "deviation": deviation}

    return {
        "script": list(found.request.script),
        **{name: found.request.settings[name] for name in ("direction", "packets")},
        "steps": len(found.first.losses),
        "last": found.last,
        "loss": list(found.final),
        "tolerated": found.limit,
        "boundaries": [
            {
                "name": name,
                "message_bytes": found.first.boundaries[name]["forward"]["largest_bytes"],
                "harm": [
                    {"fraction": fraction, **told(harm)}
                    for fraction, harm in found.harm[name].items()
                ],
                "bound": found.bounds[name],
            }
            for name in found.names
        ],
        "together": [
            {"bounds": list(bounds.values()), **told(harm)} for bounds, harm in found.together
        ],
        "activation_bound": list(found.bounds.values()),
    }


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Makes signals that end this process also end the training, which would otherwise continue in
    its own session."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    # Signals that are ignored, as under nohup, stay ignored.
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(options: argparse.Namespace) -> int:
    """Runs the profile and prints it; returns the exit status."""
    try:
        with _ends_in_order():
            found = profile(_request(options))
    except (ValueError, OSError) as error:
        return bad_input("profile-drop", error)
    except ScriptError as error:
        bad_input("profile-drop", error)
        return 1
    except KeyboardInterrupt:
        return 130
    print(json.dumps(_output(found)) if options.json else table(found))
    return 0
