"""Values of JSON input, checked. Errors are ValueErrors that begin with the name of the field."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch_resilient.planning.costs import per_place

# 30,000 years. Sums of longer times could become infinity, which JSON cannot express.
MAX_MS = 1e15


def require_fields(given: object, required: Iterable[str], optional: Iterable[str]) -> None:
    """Raises ValueError unless `given` is an object with the required fields and no unknown one."""
    if not isinstance(given, dict):
        raise ValueError(f"input: expected a JSON object, got {type(given).__name__}")
    required = tuple(required)
    known = {*required, *optional}
    for name in given:
        if name not in known:
            raise ValueError(f"{name}: no such field")
    for name in required:
        if name not in given:
            raise ValueError(f"{name}: missing")


def whole(name: str, value: object, minimum: int = 1, maximum: int | None = None) -> int:
    """`value` if it is an integer within the bounds; else raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value!r:.20}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name}: expected at most {maximum}, got {value!r:.20}")
    return value


def number(name: str, value: object, maximum: float = sys.float_info.max) -> float:
    """`value` if it is a finite number from 0 to `maximum`; else raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    # As an integer, it may be too large for isfinite and for a message.
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: expected a finite number, not negative, got {value!r:.20}")
    if value > maximum:
        raise ValueError(f"{name}: expected at most {maximum:g}, got {value:g}")
    return float(value)


def one_of(name: str, value: object, choices: Iterable[str]) -> str:
    """`value` if it is one of the choices; else raises ValueError."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r}")
    return value


def counts(name: str, value: object, stages: int) -> int | list[int] | None:
    """A count of at least 1, or one per stage; None stays None."""
    if value is None:
        return None
    if not isinstance(value, list):
        return whole(name, value)
    if len(value) != stages:
        raise ValueError(
            f"{name}: expected a number or {stages} of them, one per stage, got {len(value)}"
        )
    return [whole(f"{name}[{i}]", each) for i, each in enumerate(value)]


def times_ms(name: str, value: object, count: int, place: str) -> tuple[float, ...]:
    """`value` in milliseconds, a number or one for each of `count` places, as a tuple."""
    times = per_place(name, value, count, place)
    if (longest_ms := max(times, default=0.0)) > MAX_MS:
        raise ValueError(f"{name}: expected at most {MAX_MS:g} ms, got {longest_ms:g}")
    return times


def without(given: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The fields that are not among `names`."""
    dropped = set(names)
    return {name: value for name, value in given.items() if name not in dropped}
