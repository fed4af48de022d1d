"""A cell as JSON: the input and output of `torch-resilient geo cell`. Times are milliseconds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_resilient.geo.cell import SHARINGS, Cell, CellPlan
from torch_resilient.geo.cell_policies import DEFAULT_BUDGET_MS, POLICIES, plan_cell
from torch_resilient.planning.fields import (
    MAX_MS,
    counts,
    number,
    one_of,
    require_fields,
    times_ms,
    whole,
    without,
)

REQUIRED = ("pipelines", "stages", "microbatches", "tF", "tR", "tB", "sites")
OPTIONAL = (
    "tW",
    "wan_ms",
    "latency_ms",
    "intra_ms",
    "sharing",
    "relays",
    "cap",
    "policy",
    "budget_ms",
)
# Fields of the output. They are ignored in the input, which may be an earlier output.
ADDED = (
    "iteration_ms",
    "lower_bound_ms",
    "utilisation",
    "chosen",
    "orders",
    "starts_ms",
    "transfers",
)
# The maximum of pipelines * stages * microbatches. Schedules of that many take some seconds.
MAX_MICROBATCHES = 300_000
MAX_NODES = 1_000_000

_HOP = re.compile(r"(\d{1,6})-(\d{1,6})")


class Times(NamedTuple):
    """The operation times of each stage, as `Cell` has them."""

    forward_ms: tuple[float, ...]
    recompute_ms: tuple[float, ...]
    backward_ms: tuple[float, ...]
    weight_ms: tuple[float, ...]
    split: bool


class CellInput(NamedTuple):
    """The input of `geo cell`."""

    cell: Cell
    policy: str
    budget_ms: float


def require_size(name: str, pipelines: int, stages: int, microbatches: int) -> None:
    """Raises ValueError for a cell that is too large to plan."""
    if pipelines * stages * microbatches > MAX_MICROBATCHES:
        raise ValueError(
            f"{name}: {pipelines} pipelines of {stages} stages and {microbatches} microbatches are "
            f"too large: their product may be at most {MAX_MICROBATCHES}"
        )


def read_times(given: Mapping[str, Any], stages: int) -> Times:
    """Reads tF, tR, tB and tW. Raises ValueError, which names the field."""
    forward, recompute, backward = (
        times_ms(name, given[name], stages, "stage") for name in ("tF", "tR", "tB")
    )
    split = given.get("tW") is not None
    weight = times_ms("tW", given["tW"], stages, "stage") if split else (0.0,) * stages
    # The last stage runs B right after F, and has freed nothing.
    return Times(forward, (*recompute[:-1], 0.0), backward, weight, split)


def read_caps(given: Mapping[str, Any], stages: int, microbatches: int) -> tuple[int, ...]:
    """Reads cap. Raises ValueError."""
    cap = counts("cap", given.get("cap"), stages)
    each = cap if isinstance(cap, list) else [cap or microbatches] * stages
    return tuple(min(limit, microbatches) for limit in each)


def _both(name: str, value: object) -> tuple[float, float]:
    """A time for both directions, or [activation, gradient]."""
    if isinstance(value, list):
        if len(value) != 2:
            raise ValueError(f"{name}: expected [activation, gradient], got {len(value)} values")
        there, back = (number(f"{name}[{i}]", each, MAX_MS) for i, each in enumerate(value))
        return there, back
    time_ms = number(name, value, MAX_MS)
    return time_ms, time_ms


def _hop_times(
    name: str, value: object, needed: Sequence[bool], default: float | None
) -> list[tuple[float, float]]:
    """By hop and direction; 0 where none is needed. Raises ValueError if a needed one is missing.

    Args:
        value: a number, or a table by hop such as {"1-2": 3, "default": [1, 2]}; None if not given.
        default: for None.
    """
    if value is None:
        if default is None and any(needed):
            raise ValueError(f"{name}: missing")
        return [(default or 0.0,) * 2 if each else (0.0, 0.0) for each in needed]
    if not isinstance(value, dict):
        time_ms = number(name, value, MAX_MS)
        return [(time_ms, time_ms) if each else (0.0, 0.0) for each in needed]
    found: dict[int, tuple[float, float]] = {}
    otherwise = _both(f"{name}.default", value["default"]) if "default" in value else None
    for key, each in value.items():
        if key == "default":
            continue
        match = _HOP.fullmatch(key)
        if not match or int(match[2]) != int(match[1]) + 1 or int(match[1]) >= len(needed):
            known = f'"0-1" to "{len(needed) - 1}-{len(needed)}" or ' if needed else ""
            raise ValueError(f'{name}: no such hop: {key}; expected {known}"default"')
        found[int(match[1])] = _both(f"{name}.{key}", each)
    result = []
    for hop, is_needed in enumerate(needed):
        times = found.get(hop, otherwise)
        if times is None and is_needed:
            raise ValueError(f"{name}: no value for hop {hop}-{hop + 1}, and no default")
        result.append(times if is_needed and times else (0.0, 0.0))
    return result


def _read_sites(value: object, stages: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) != stages:
        raise ValueError(f"sites: expected the names of {stages} sites, one per stage")
    for i, name in enumerate(value):
        if not isinstance(name, str) or not name:
            raise ValueError(f"sites[{i}]: expected a name, got {name!r}")
    return tuple(value)


def read_cell(given: object) -> CellInput:
    """Reads the input of `geo cell`. Raises ValueError with a text that begins with the field."""
    require_fields(given, REQUIRED, (*OPTIONAL, *ADDED))
    assert isinstance(given, dict)
    pipelines = whole("pipelines", given["pipelines"])
    stages = whole("stages", given["stages"])
    microbatches = whole("microbatches", given["microbatches"])
    require_size("stages", pipelines, stages, microbatches)
    sites = _read_sites(given["sites"], stages)
    times = read_times(given, stages)
    crosses = [a != b for a, b in itertools.pairwise(sites)]
    within = [not each for each in crosses]
    wan_ms = _hop_times("wan_ms", given.get("wan_ms"), crosses, None)
    intra_ms = _hop_times("intra_ms", given.get("intra_ms"), within, 0.0)
    latency_ms = _hop_times("latency_ms", given.get("latency_ms"), crosses, 0.0)
    relays = given.get("relays")
    cell = Cell(
        pipelines=pipelines,
        microbatches=microbatches,
        sites=sites,
        **times._asdict(),
        hop_ms=tuple(w if c else i for w, i, c in zip(wan_ms, intra_ms, crosses, strict=True)),
        latency_ms=tuple(latency_ms),
        sharing=one_of("sharing", given.get("sharing", "temporal"), SHARINGS),
        relays=pipelines if relays is None else whole("relays", relays, maximum=MAX_NODES),
        caps=read_caps(given, stages, microbatches),
    )
    policy = one_of("policy", given.get("policy", "best"), POLICIES)
    budget_ms = number("budget_ms", given.get("budget_ms", DEFAULT_BUDGET_MS))
    return CellInput(cell, policy, budget_ms)


def cell_output(given: Mapping[str, Any], plan: CellPlan) -> dict[str, Any]:
    """The input with the results, which can be input again.

    Times are not rounded: a program that adds them up gets the same sums.
    """
    return {
        **without(given, ADDED),
        "iteration_ms": plan.iteration_ms,
        "lower_bound_ms": plan.lower_bound_ms,
        "utilisation": plan.utilisation,
        "chosen": plan.chosen,
        "orders": plan.orders,
        "starts_ms": plan.starts_ms,
        "transfers": [each._asdict() for each in plan.transfers],
    }


def solve_cell(given: object) -> tuple[dict[str, Any], Cell, CellPlan]:
    """The output of `geo cell` for its input. Raises ValueError as `read_cell` and `plan_cell`."""
    asked = read_cell(given)
    assert isinstance(given, dict)
    plan = plan_cell(*asked)
    return cell_output(given, plan), asked.cell, plan
