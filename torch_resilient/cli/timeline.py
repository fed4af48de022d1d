"""`torch-resilient timeline`: the measurements of a run's ranks, as text, picture or trace."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from torch_resilient.cli.errors import bad_input
from torch_resilient.cli.pictures import write_picture
from torch_resilient.pipelining import run_timeline
from torch_resilient.pipelining.measured import CAUSES, MeasuredRun
from torch_resilient.pipelining.timeline_files import read_run

ABOUT = f"""\
RUN_DIR contains a file rank<NNNNN>.jsonl of each rank. Without an option the command prints text:
- for each iteration, its time and the idle part of all stages' time, in total and by cause;
- for each link, how long stages waited for its messages, how much of that time the messages were in
  flight (the rest is the sender's), how much of it another operation could have used, and how long
  all its messages took;
- events.

causes of idle time:
{chr(10).join(f"  {cause.replace('_', '-'):11}{meaning}" for cause, meaning in CAUSES.items())}

exit status: 0, or 2 if the run cannot be read; then one line on stderr names the file and line.
"""

_STEPS = re.compile(r"(\d*):(\d*)")


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "timeline",
        help="show when all ranks of a run worked, and why they idled",
        description=__doc__,
        epilog=ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="only steps A to B - 1; either may be omitted. By default a picture shows the steps "
        "around a change of plan, and other output shows all",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the run as .svg; as .png with matplotlib"
    )
    parser.add_argument(
        "--chrome-trace",
        type=Path,
        metavar="FILE",
        help="write a trace for Perfetto, chrome://tracing",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(run=run)


def _range(text: str | None) -> tuple[int, int | None]:
    """First step and the one after the last; raises ValueError."""
    if text is None:
        return 0, None
    match = _STEPS.fullmatch(text)
    if match is None or text == ":":
        raise ValueError(f"--steps: expected A:B, A: or :B, got {text!r}")
    first, stop = int(match[1] or 0), int(match[2]) if match[2] else None
    if stop is not None and stop <= first:
        raise ValueError(f"--steps: {text} holds no step")
    return first, stop


def _write_pictures(options: argparse.Namespace, run: MeasuredRun) -> list[str]:
    """Returns a line for each file written. Raises ValueError, OSError."""
    written = []
    if options.picture:
        if options.steps:
            steps, why = list(run.steps), "as asked"
        else:
            steps, why = run_timeline.choose_steps(run)
        shown = f"steps {steps[0].step} to {steps[-1].step}"
        picture = run_timeline.picture_of(run.only(steps), f"{run.folder.resolve().name}: {shown}")
        write_picture(options.picture, picture)
        whole = f"{run.steps[0].step} to {run.steps[-1].step}"
        written.append(f"{options.picture}: {shown} of {whole}: {why}")
    if options.chrome_trace:
        trace = json.dumps(run_timeline.chrome_trace(run))
        options.chrome_trace.write_text(trace, encoding="utf-8")
        written.append(f"{options.chrome_trace}: {len(run.steps)} steps")
    return written


def _milliseconds(seconds: float) -> float:
    # Nanoseconds; further digits are rounding errors.
    return round(seconds * 1e3, 6)


def _output(run: MeasuredRun) -> dict[str, Any]:
    waiting = run_timeline.waiting_of(run.steps)
    return {
        "stages": run.num_stages,
        "ranks": [
            info and {"rank": info.rank, "stage": info.stage, "host": info.host, "torn": info.torn}
            for info in run.ranks
        ],
        "warnings": run_timeline.warnings_of(run),
        "steps": [
            {
                "step": step.step,
                "plans": step.plans,
                "stages": [each.stage for each in step.present],
                "start_ms": _milliseconds(step.start_s - run.start_s),
                "iteration_ms": _milliseconds(step.iteration_s),
                "bubble": round(step.bubble, 9),
                "idle": {cause: round(part, 9) for cause, part in step.idle.items()},
            }
            for step in run.steps
        ],
        "links": [
            {
                "from": link[0],
                "to": link[1],
                "waited_ms": _milliseconds(each.waited_s),
                "transit_ms": _milliseconds(each.transit_s),
                "order_ms": _milliseconds(each.order_s),
            }
            for link, each in waiting.items()
        ],
        "events": [
            {
                "step": event.step,
                "time_ms": _milliseconds(event.time_s - run.start_s),
                "stage": event.stage,
                "event": event.text,
                "numbers": event.numbers,
            }
            for event in run.events
        ],
    }


def run(options: argparse.Namespace) -> int:
    """Prints the requested output; returns the exit status."""
    try:
        run = read_run(options.run_dir, *_range(options.steps))
        if not run.steps:
            raise ValueError(f"{options.run_dir}: no such step has been written")
        written = _write_pictures(options, run)
    except (ValueError, OSError) as error:
        return bad_input("timeline", error)
    if options.json:
        print(json.dumps(_output(run)))
    elif written:
        print("\n".join([*written, *run_timeline.warnings_of(run)]))
    else:
        print(run_timeline.text_table(run), end="")
        print("".join(f"{line}\n" for line in run_timeline.warnings_of(run)), end="")
    return 0
