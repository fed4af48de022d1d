"""Plans of many variants of one job: the effect of more GPUs, other prices or latencies."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from torch_resilient.geo import plan_input
from torch_resilient.geo.dc_selection import Known, Selection, select
from torch_resilient.planning.fields import require_fields, without

REQUIRED = ("base", "vary")
# Fields of the output that are ignored in the input.
ADDED = ("points",)
MAX_POINTS = 1000

_FIELD = re.compile(r"(\w+)((?:\[\d{1,6}\])*)(?:\.(.+))?", re.DOTALL)
_INDEX = re.compile(r"\[(\d+)\]")


class Point(NamedTuple):
    """One variant: the values of the varied fields, and its plan."""

    values: tuple[Any, ...]
    selection: Selection


def _place(where: str, field: object) -> list[str | int]:
    """The keys and indices that lead to a field such as "sites[1].gpus" or "egress_gb.a|b"."""
    match = _FIELD.fullmatch(field) if isinstance(field, str) else None
    if match is None:
        raise ValueError(f'{where}: expected a field such as "sites[1].gpus", got {field!r:.40}')
    place: list[str | int] = [match[1]]
    place += [int(index) for index in _INDEX.findall(match[2])]
    return place if match[3] is None else [*place, match[3]]


def _put(where: str, base: dict[str, Any], field: str, place: list[str | int], value: Any) -> None:
    """Changes a field of `base`. Raises ValueError if there is none."""
    holder: Any = base
    for key in place[:-1]:
        try:
            holder = holder[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"{where}: base has no {field}") from None
    last = place[-1]
    if isinstance(holder, dict) and isinstance(last, str):
        # A new field is allowed: the plan checks whether it exists.
        holder[last] = value
    elif isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        holder[last] = value
    else:
        raise ValueError(f"{where}: base has no {field}")


def _read_vary(vary: object) -> list[tuple[str, str, list[str | int], list[Any]]]:
    """(name in errors, field, place, values) of each varied field."""
    if not isinstance(vary, dict | list) or not vary:
        raise ValueError("vary: expected an object with field and values, or a list of them")
    result = []
    for i, each in enumerate(vary if isinstance(vary, list) else [vary]):
        where = f"vary[{i}]" if isinstance(vary, list) else "vary"
        if not isinstance(each, dict):
            raise ValueError(f"{where}: expected an object, got {each!r:.40}")
        try:
            require_fields(each, ("field", "values"), ())
        except ValueError as error:
            raise ValueError(f"{where}.{error}") from None
        values = each["values"]
        if not isinstance(values, list) or not values:
            raise ValueError(f"{where}.values: expected a list, got {values!r:.40}")
        result.append((where, each["field"], _place(f"{where}.field", each["field"]), values))
    return result


def what_if(base: object, vary: object) -> Iterator[Point]:
    """A point for each combination of values; the values of the last field change fastest.

    Raises ValueError with a text that begins with the field.
    """
    try:
        plan_input.read_job(base)
    except ValueError as error:
        raise ValueError(f"base.{error}") from None
    assert isinstance(base, dict)
    fields = _read_vary(vary)
    count = 1
    for *_, values in fields:
        count *= len(values)
    if count > MAX_POINTS:
        raise ValueError(f"vary: {count} combinations are more than {MAX_POINTS}")
    known: Known = {}
    for indices in itertools.product(*(range(len(values)) for *_, values in fields)):
        variant = copy.deepcopy(without(base, plan_input.ADDED))
        chosen = []
        for (where, field, place, values), index in zip(fields, indices, strict=True):
            _put(f"{where}.field", variant, field, place, values[index])
            chosen.append(values[index])
        try:
            selection = select(plan_input.read_job(variant), known)
        except ValueError as error:
            places = ", ".join(
                f"{where}.values[{i}]" for (where, *_), i in zip(fields, indices, strict=True)
            )
            raise ValueError(f"{places}: {error}") from None
        yield Point(tuple(chosen), selection)


def solve_what_if(given: object) -> tuple[dict[str, Any], list[Point]]:
    """The output of `geo what-if` for its input. Raises ValueError as `what_if`."""
    require_fields(given, REQUIRED, ADDED)
    assert isinstance(given, dict)
    points = list(what_if(given["base"], given["vary"]))
    return what_if_output(given, points), points


def what_if_output(given: Mapping[str, Any], points: list[Point]) -> dict[str, Any]:
    """The input with the results, which can be input again. `replicas` is null where it is not
    known."""
    return {
        **without(given, ADDED),
        "points": [
            {
                "values": list(point.values),
                "choice": None
                if point.selection.choice is None
                else asdict(point.selection.choice),
                "replicas": None
                if point.selection.replicas is None
                else [asdict(row) for row in point.selection.replicas],
            }
            for point in points
        ],
    }
