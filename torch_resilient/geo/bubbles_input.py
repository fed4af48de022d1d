"""Prefills in bubbles as JSON: the input and output of `torch-resilient geo bubbles`. Times are
milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch_resilient.geo.bubbles import BubbleJob, BubblePlan, PrefillTimes, Request, serve
from torch_resilient.geo.cell_input import MAX_NODES, cell_output, read_cell
from torch_resilient.geo.cell_policies import plan_cell
from torch_resilient.geo.idle import gather_idle
from torch_resilient.planning.fields import MAX_MS, number, require_fields, whole, without

REQUIRED = ("cell", "requests", "prefill")
OPTIONAL = ("cells", "depth", "period_extra_ms", "guard_ms", "max_wait_ms", "site")
# Fields of the output. They are ignored in the input, which may be an earlier output.
ADDED = (
    "schedule",
    "period_ms",
    "placements",
    "rejected",
    "utilisation_training",
    "utilisation",
    "lookup_p50_us",
    "lookup_p99_us",
)
PREFILL = ("base_ms", "per_token_ms", "per_token2_ms", "hop_ms")
# With errors of 1 % in the times of prefills and bubbles, 0.03 % of the prefills then delay the
# training. Without a guard, 0.7 % do.
DEFAULT_GUARD_MS = 5.0
# The wait of the paper's simulation (BUBBLETEA §6.5).
DEFAULT_MAX_WAIT_MS = 8.0
# This many take some seconds.
MAX_REQUESTS = 300_000
MAX_TOKENS = 1_000_000_000
# Three years. Later times would be rounded to more than a nanosecond.
MAX_ARRIVAL_MS = 1e11
MAX_PERIODS = 1_000_000_000
# A request with a longer wait would be compared with too many windows that are full.
MAX_WAIT_PERIODS = 1000


def _read_prefill(value: object) -> PrefillTimes:
    try:
        require_fields(value, ("per_token_ms",), PREFILL)
        assert isinstance(value, dict)
        times = PrefillTimes(*(number(name, value.get(name, 0), MAX_MS) for name in PREFILL))
    except ValueError as error:
        text = str(error)
        if text.startswith("input:"):
            raise ValueError(f"prefill: expected an object, got {value!r:.40}") from None
        raise ValueError(f"prefill.{text}") from None
    if times.stage_ms(1, 1) <= 0:
        raise ValueError("prefill: a prefill would take no time")
    return times


def _read_requests(value: object) -> tuple[Request, ...]:
    if not isinstance(value, list):
        raise ValueError(f"requests: expected a list of [arrival_ms, tokens], got {value!r:.40}")
    if len(value) > MAX_REQUESTS:
        raise ValueError(f"requests: expected at most {MAX_REQUESTS}, got {len(value)}")
    requests = []
    for i, each in enumerate(value):
        where = f"requests[{i}]"
        if not isinstance(each, list) or len(each) != 2:
            raise ValueError(f"{where}: expected [arrival_ms, tokens], got {each!r:.40}")
        arrival_ms = number(f"{where}[0]", each[0], MAX_ARRIVAL_MS)
        requests.append(Request(arrival_ms, whole(f"{where}[1]", each[1], maximum=MAX_TOKENS)))
    return tuple(requests)


def read_bubbles(given: object) -> BubbleJob:
    """Reads the input of `geo bubbles` and plans its cell.

    Raises ValueError with a text that begins with the field.
    """
    require_fields(given, REQUIRED, (*OPTIONAL, *ADDED))
    assert isinstance(given, dict)
    requests = _read_requests(given["requests"])
    prefill = _read_prefill(given["prefill"])
    cells = whole("cells", given.get("cells", 1), maximum=MAX_NODES)
    depth = whole("depth", given.get("depth", 1), maximum=cells)
    extra_ms = number("period_extra_ms", given.get("period_extra_ms", 0), MAX_MS)
    guard_ms = number("guard_ms", given.get("guard_ms", DEFAULT_GUARD_MS), MAX_MS)
    max_wait_ms = number("max_wait_ms", given.get("max_wait_ms", DEFAULT_MAX_WAIT_MS), MAX_MS)
    try:
        asked = read_cell(given["cell"])
        plan = plan_cell(*asked)
    except ValueError as error:
        text = str(error)
        raise ValueError(f"cell: {text}" if text.startswith("input:") else f"cell.{text}") from None
    site = given.get("site")
    if site is not None and (not isinstance(site, str) or site not in asked.cell.sites):
        raise ValueError(f"site: no such site: {site!r:.40}")
    period_ms = plan.iteration_ms + extra_ms
    if period_ms <= 0:
        raise ValueError("period_extra_ms: expected more than 0, since the iteration takes no time")
    if max_wait_ms > MAX_WAIT_PERIODS * period_ms:
        raise ValueError(f"max_wait_ms: expected at most {MAX_WAIT_PERIODS} periods")
    for i, each in enumerate(requests):
        if each.arrival_ms > MAX_PERIODS * period_ms:
            raise ValueError(f"requests[{i}][0]: expected at most {MAX_PERIODS} periods")
    return BubbleJob(
        cell=asked.cell,
        plan=gather_idle(asked.cell, plan, period_ms),
        cells=cells,
        depth=depth,
        period_ms=period_ms,
        site=site,
        requests=requests,
        prefill=prefill,
        guard_ms=guard_ms,
        max_wait_ms=max_wait_ms,
    )


class _Lookups(NamedTuple):
    p50_us: float | None
    p99_us: float | None


def _lookups(found: BubblePlan) -> _Lookups:
    """Median and 99th percentile; null without requests."""
    times_us = sorted(found.lookups_us)
    if not times_us:
        return _Lookups(None, None)
    return _Lookups(*(times_us[(len(times_us) - 1) * part // 100] for part in (50, 99)))


def bubbles_output(given: Mapping[str, Any], job: BubbleJob, found: BubblePlan) -> dict[str, Any]:
    """The input with the results, which can be input again. Times are not rounded."""
    lookups = _lookups(found)
    return {
        **without(given, ADDED),
        "schedule": cell_output(given["cell"], job.plan),
        "period_ms": job.period_ms,
        "placements": [
            {
                "request": i,
                "gpus": [[cell, place.pipe, place.stage] for cell in place.cells],
                "start_ms": place.start_ms,
            }
            for i, place in enumerate(found.places)
            if place is not None
        ],
        "rejected": [i for i, place in enumerate(found.places) if place is None],
        "utilisation_training": found.utilisation_training,
        "utilisation": found.utilisation,
        "lookup_p50_us": lookups.p50_us,
        "lookup_p99_us": lookups.p99_us,
    }


def solve_bubbles(given: object) -> tuple[dict[str, Any], BubbleJob, BubblePlan]:
    """The output of `geo bubbles` for its input. Raises ValueError as `read_bubbles`."""
    job = read_bubbles(given)
    assert isinstance(given, dict)
    found = serve(job)
    return bubbles_output(given, job, found), job, found
