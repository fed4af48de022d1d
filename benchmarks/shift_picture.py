"""Draws the timelines of shift_lab.py: throughput through a fault, as in figure 7 of SHIFT."""

from __future__ import annotations

from collections.abc import Sequence

from common import Row

from torch_resilient.pipelining.picture import STYLE, escape, ticks

WIDTH, HEAD, FOOT = 960, 104, 34
LEFT, RIGHT, GAP = 76, 28, 26
PANEL_HEIGHT, PANEL_GAP = 132, 62
# Of a row's lines: its key, its meaning, and its look. The first lies below the others.
LINES = (
    ("without", "without the library", 'stroke="#8a93a8" stroke-width="4"'),
    ("default", "with it: default NICs", 'stroke="#4f7be8" stroke-width="1.8"'),
    ("backup", "with it: backup NICs", 'stroke="#f0a92e" stroke-width="1.8"'),
)


def _text(x: float, y: float, words: str, classes: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">'
        f"{escape(words)}</text>"
    )


def _series(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The values of each line of a panel, by key."""
    found = {}
    for row in rows:
        if row["library"]:
            found["default"] = row["default_mb_per_s"]
            found["backup"] = row["backup_mb_per_s"]
        else:
            found["without"] = [
                sum(pair)
                for pair in zip(row["default_mb_per_s"], row["backup_mb_per_s"], strict=True)
            ]
    return found


def _about(rows: Sequence[Row]) -> str:
    """The result with the library, in words."""
    for row in rows:
        if row["library"]:
            back = "never" if row["return_s"] is None else f"after {row['return_s']:.1f} s"
            return f"gap {row['gap_s'] * 1000:.0f} ms, default again: {back}"
    return ""


def _panel(rows: Sequence[Row], x: float, y: float, width: float, most: float) -> list[str]:
    """One program and one fault. `x`, `y`: the upper left corner of its axes."""
    bottom = y + PANEL_HEIGHT
    series = _series(rows)
    step_s = rows[0]["every_s"]
    length_s = step_s * max(len(values) for values in series.values())

    def place(time_s: float, value: float) -> tuple[float, float]:
        return x + width * time_s / length_s, bottom - PANEL_HEIGHT * value / most

    out = [
        _text(x, y - 22, f"{rows[0]['program']}, {rows[0]['fault']}", "strong ink"),
        _text(x, y - 8, _about(rows), "small soft"),
    ]
    for value in ticks(most):
        height = place(0, value)[1]
        out.append(
            f'<line x1="{x:.1f}" y1="{height:.1f}" x2="{x + width:.1f}" y2="{height:.1f}" '
            f'class="{"rule" if value == 0 else "grid"}"/>'
        )
    for moment in (rows[0]["fault_s"], rows[0]["back_s"]):
        middle = place(moment, 0)[0]
        out.append(
            f'<line x1="{middle:.1f}" y1="{y:.1f}" x2="{middle:.1f}" y2="{bottom:.1f}" '
            'class="step" stroke-dasharray="2 3"/>'
        )
        out.append(_text(middle, bottom + 15, f"{moment:g} s", "small soft", "middle"))
    for key, meaning, look in LINES:
        if key in series:
            corners = (place((i + 0.5) * step_s, each) for i, each in enumerate(series[key]))
            line = " ".join(f"{left:.1f},{top:.1f}" for left, top in corners)
            out.append(
                f'<polyline points="{line}" fill="none" {look} stroke-linejoin="round">'
                f"<title>{escape(meaning)}</title></polyline>"
            )
    return out


def render(rows: Sequence[Row]) -> str:
    """The picture as SVG text: a row of panels for each program, a column for each fault."""
    programs = list(dict.fromkeys(row["program"] for row in rows))
    faults = list(dict.fromkeys(row["fault"] for row in rows))
    height = HEAD + len(programs) * (PANEL_HEIGHT + PANEL_GAP) + FOOT
    width = (WIDTH - LEFT - RIGHT - GAP * (len(faults) - 1)) / len(faults)
    title = "Throughput of perftest through the failure of a NIC"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
        _text(28, 40, title, "title ink"),
    ]
    left = 28.0
    for _, meaning, look in LINES:
        out.append(f'<line x1="{left}" y1="60" x2="{left + 18}" y2="60" {look}/>')
        out.append(_text(left + 24, 64, meaning, "small soft"))
        left += 190
    for i, program in enumerate(programs):
        of_program = [row for row in rows if row["program"] == program]
        # One scale for each program, with room above the highest value.
        most = 1.05 * max(
            max(values, default=0.0) for row in of_program for values in _series([row]).values()
        )
        y = HEAD + i * (PANEL_HEIGHT + PANEL_GAP) + 26
        for value in ticks(most or 1.0):
            top = y + PANEL_HEIGHT * (1 - value / (most or 1.0))
            out.append(_text(LEFT - 8, top + 4, f"{value:.4g}", "small soft", "end"))
        out.append(_text(28, y - 8, "MB/s", "small soft"))
        for k, fault in enumerate(faults):
            panel = [row for row in of_program if row["fault"] == fault]
            if panel:
                out += _panel(panel, LEFT + k * (width + GAP), y, width, most or 1.0)
    out.append(
        _text(
            28, height - 16, "Soft-RoCE in two guests. Dotted: the fault and its end.", "small soft"
        )
    )
    return "\n".join([*out, "</svg>\n"])
