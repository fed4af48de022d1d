"""`torch-resilient plan`: a pipeline schedule for given times, as JSON and as pictures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torch_resilient.cli import pictures
from torch_resilient.cli.errors import bad_input
from torch_resilient.cli.json_input import read_json
from torch_resilient.pipelining import timeline
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.fields import (
    counts,
    number,
    one_of,
    require_fields,
    times_ms,
    whole,
    without,
)
from torch_resilient.planning.planner import POLICIES, Plan, plan_schedule
from torch_resilient.planning.replay import replay

ABOUT = """\
input, a JSON object; times in milliseconds; all but the first five fields are optional:
  stages, microbatches   how many
  tF, tB, tW             forward, backward of inputs, backward of weights: a number or one per stage
  c                      delay of each link in both directions: a number or one per link; or
  cf, cb                 the delays of activations and of gradients
  cap                    maximum number of microbatches between F and B: a number or one per stage
  mem                    maximum number of microbatches between F and W: a number or one per stage
  policy                 """

ABOUT_OUTPUT = """
  budget_ms              for the search; 100

output: the same object with `orders`, `iteration_ms`, `lower_bound_ms`, `bubble` (the idle part of
all stages' time), `bubbles_ms` (by stage and cause), `peak` (for each stage the maximum number
of microbatches between F and B and between F and W, and its memory in activations), `chosen` (the
origin of the orders).

exit status: 0, or 2 if the input cannot be used; then one line on stderr names the field.
"""

# Maximum of the sum over all stages: 512 stages of 512 take ten seconds. A larger input is a
# mistake and would exhaust the memory.
_MAX_MICROBATCHES = 300_000
_REQUIRED = ("stages", "microbatches", "tF", "tB", "tW")
_OPTIONAL = ("c", "cf", "cb", "cap", "mem", "policy", "budget_ms")
# Fields that this command adds; it ignores them in its input, which may be an earlier output.
_ADDED = ("orders", "iteration_ms", "lower_bound_ms", "bubble", "bubbles_ms", "peak", "chosen")


def add_parser(commands: Any) -> None:
    """Adds this command to those of an argparse parser."""
    parser = commands.add_parser(
        "plan",
        help="compute a pipeline schedule for given times and delays",
        description=__doc__,
        epilog=ABOUT + ", ".join(POLICIES) + ABOUT_OUTPUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", required=True, metavar="FILE", help="the input; - for standard input"
    )
    parser.add_argument("--grid", action="store_true", help="draw the plan as text on stderr")
    parser.add_argument(
        "--chrome-trace", type=Path, metavar="FILE", help="write the plan for chrome://tracing"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw the plan as .svg; as .png with matplotlib",
    )
    parser.set_defaults(run=run)


def _seconds(name: str, value: object, count: int, place: str) -> list[float]:
    return [each / 1e3 for each in times_ms(name, value, count, place)]


def _costs(given: dict[str, Any], stages: int) -> PipelineCosts:
    if "c" in given and ("cf" in given or "cb" in given):
        raise ValueError("c: give either c, or cf and cb")
    if ("cf" in given) != ("cb" in given):
        missing, there = ("cb", "cf") if "cf" in given else ("cf", "cb")
        raise ValueError(f"{missing}: missing, but {there} is there")
    forward, backward = ("cf", "cb") if "cf" in given else ("c", "c")
    return PipelineCosts.of(
        stages,
        forward_s=_seconds("tF", given["tF"], stages, "stage"),
        input_backward_s=_seconds("tB", given["tB"], stages, "stage"),
        weight_backward_s=_seconds("tW", given["tW"], stages, "stage"),
        delay_forward_s=_seconds(forward, given.get(forward, 0), stages - 1, "link"),
        delay_backward_s=_seconds(backward, given.get(backward, 0), stages - 1, "link"),
    )


def _plan(given: object) -> tuple[Plan, PipelineCosts]:
    """Raises ValueError with a text that begins with the field's name."""
    require_fields(given, _REQUIRED, (*_OPTIONAL, *_ADDED))
    assert isinstance(given, dict)
    stages = whole("stages", given["stages"])
    microbatches = whole("microbatches", given["microbatches"])
    if stages * microbatches > _MAX_MICROBATCHES:
        raise ValueError(
            f"stages: {stages} times {microbatches} microbatches is more than "
            f"{_MAX_MICROBATCHES}, the most this command plans"
        )
    costs = _costs(given, stages)
    cap = counts("cap", given.get("cap"), stages)
    mem = counts("mem", given.get("mem"), stages)
    budget_ms = number("budget_ms", given.get("budget_ms", 100))
    policy = one_of("policy", given.get("policy", "best"), POLICIES)
    plan = plan_schedule(
        costs,
        microbatches,
        activation_limit=cap,
        weight_limit=mem,
        policy=policy,
        budget_ms=budget_ms,
    )
    return plan, costs


def _write_pictures(options: argparse.Namespace, plan: Plan, costs: PipelineCosts) -> None:
    """Raises ValueError for a picture that cannot be made, OSError for a file."""
    if not (options.grid or options.chrome_trace or options.picture):
        return
    timed = replay(plan.orders, costs)
    if options.grid:
        sys.stderr.write(timeline.text_grid(timed))
    if options.chrome_trace:
        options.chrome_trace.write_text(json.dumps(timeline.chrome_trace(timed)), encoding="utf-8")
    if options.picture:
        size = f"{costs.num_stages} stages, {plan.num_microbatches} microbatches"
        picture = timeline.picture_of(timed, f"{size}: {plan.policy}")
        pictures.write_picture(options.picture, picture)


def _milliseconds(seconds: float) -> float:
    # Nanoseconds; further digits are rounding errors.
    return round(seconds * 1e3, 6)


def _output(given: dict[str, Any], plan: Plan) -> dict[str, Any]:
    return {
        **without(given, _ADDED),
        "iteration_ms": _milliseconds(plan.iteration_s),
        "lower_bound_ms": _milliseconds(plan.lower_bound_s),
        "bubble": round(plan.bubble, 9),
        "bubbles_ms": [
            {
                "warm_up": _milliseconds(each.warm_up_s),
                "forward": _milliseconds(each.forward_s),
                "backward": _milliseconds(each.backward_s),
                "cool_down": _milliseconds(each.cool_down_s),
            }
            for each in plan.bubbles
        ],
        "peak": {
            "F-B": list(plan.peak_activations),
            "F-W": list(plan.peak_pending),
            "units": [round(each, 6) for each in plan.peak_units],
        },
        "chosen": plan.policy,
        "orders": [[str(operation) for operation in order] for order in plan.orders],
    }


def run(options: argparse.Namespace) -> int:
    """Prints the plan; returns the exit status."""
    try:
        given = read_json(options.json)
        plan, costs = _plan(given)
        _write_pictures(options, plan, costs)
    except (ValueError, OSError) as error:
        return bad_input("plan", error)
    print(json.dumps(_output(given, plan)))
    return 0
