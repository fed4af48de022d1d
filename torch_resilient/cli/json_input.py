"""The JSON input of commands: a file, or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def no_constant(name: str) -> float:
    """For `read_json`: refuses NaN and infinity, which are no JSON."""
    raise ValueError(f"{name} is no JSON")


def read_json(
    source: str, option: str = "--json", constant: Callable[[str], float] = no_constant
) -> Any:
    """The content of the file `source`, or of standard input if it is "-".

    `constant` makes a value of NaN, Infinity or -Infinity.

    Raises ValueError for text that is no JSON, OSError for a file that cannot be read.
    """
    if source == "-" and sys.stdin is None:
        raise ValueError(f"{option} -: standard input is closed")
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"input: not JSON: {error}") from None
