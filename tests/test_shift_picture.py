"""The timelines of benchmarks/shift_lab.py, and their picture."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import shift_lab
import shift_picture

SVG = "{http://www.w3.org/2000/svg}"


def moved(rates: list[tuple[float, int, int]]) -> tuple[list[float], list[list[int]]]:
    """Bytes of both networks each 10 ms; `rates`: from when on, and bytes in 10 ms of each."""
    times, bytes_ = [0.0], [[0, 0]]
    for i in range(1, 1500):
        now = i * shift_lab.TICK_S
        _, *step = [rate for rate in rates if rate[0] <= now][-1]
        times.append(now)
        bytes_.append([total + each for total, each in zip(bytes_[-1], step, strict=True)])
    return times, bytes_


def test_gap_and_return_of_a_fault_that_the_backup_covers() -> None:
    fast = 1_000_000
    times, bytes_ = moved(
        [(0.0, fast, 0), (5.0, 0, 0), (5.095, 0, fast), (10.0, 0, fast), (10.695, fast, 0)]
    )
    assert shift_lab.gap_s(times, bytes_) == pytest.approx(0.1)
    assert shift_lab.return_s(times, bytes_) == pytest.approx(0.7)
    default, backup = shift_lab.rates(times, bytes_)
    assert len(default) == len(backup) == 59
    assert default[:20] == pytest.approx([100.0] * 20, rel=0.05)
    assert default[20:42] == [0.0] * 22
    assert backup[:20] == [0.0] * 20
    assert backup[21:42] == pytest.approx([100.0] * 21)


def test_a_program_that_ends_has_a_gap_until_the_end_of_the_fault() -> None:
    times, bytes_ = moved([(0.0, 1_000_000, 0), (5.0, 0, 0)])
    assert shift_lab.gap_s(times, bytes_) == pytest.approx(5.0)
    assert shift_lab.return_s(times, bytes_) is None


def row(library: bool, **values: Any) -> dict[str, Any]:
    """A timeline of two seconds with its fault in the second one."""
    return {
        "program": "ib_send_bw",
        "fault": "switch",
        "library": library,
        "fault_s": 1.0,
        "back_s": 1.5,
        "every_s": 0.5,
        "default_mb_per_s": [100.0, 100.0, 0.0, 50.0 if library else 0.0],
        "backup_mb_per_s": [0.0, 0.0, 80.0 if library else 0.0, 0.0],
        "gap_s": 0.031,
        "return_s": 0.4 if library else None,
        **values,
    }


def test_the_picture_has_a_line_for_each_way_in_each_panel() -> None:
    rows = [row(library) for library in (False, True)]
    rows += [row(library, fault="NIC") for library in (False, True)]
    rows += [row(True, program="ib_read_bw", return_s=None)]
    page = ElementTree.fromstring(shift_picture.render(rows))
    lines = [each.findtext(f"{SVG}title") for each in page.iter(f"{SVG}polyline")]
    ways = [meaning for _, meaning, _ in shift_picture.LINES]
    assert lines == [*ways, *ways, *ways[1:]]
    texts = [each.text for each in page.iter(f"{SVG}text")]
    assert "ib_send_bw, switch" in texts
    assert texts.count("gap 31 ms, default again: after 0.4 s") == 2
    assert texts.count("gap 31 ms, default again: never") == 1
    # The highest value of a program is near the top of its panels, and 0 at the bottom.
    corners = [each.get("points", "").split() for each in page.iter(f"{SVG}polyline")]
    heights = [[float(corner.split(",")[1]) for corner in line] for line in corners]
    top, bottom = heights[0][0], heights[0][2]
    assert bottom - top == pytest.approx(shift_picture.PANEL_HEIGHT / 1.05, abs=0.2)
    assert heights[1][2] == bottom
