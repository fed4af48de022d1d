"""Draw the times of the steps of some runs as one SVG picture, in the manner of timeline_svg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from statistics import fmean
from xml.sax.saxutils import escape

from timeline_svg import STYLE

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 210, 92, 48
COLOURS = ("#d8453b", "#4f7be8", "#1a9c8c", "#f0a92e")
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass(frozen=True)
class Times:
    """A named run; seconds of each step, the number of the first."""

    name: str
    times_s: Sequence[float]
    first: int = 0


def render_times(title: str, subtitle: str, runs: Sequence[Times]) -> str:
    """The picture as SVG text: time over steps, on a logarithmic scale; beside it the means."""
    times_ms = [1e3 * each for run in runs for each in run.times_s]
    low = max((tick for tick in TICKS_MS if tick <= min(times_ms)), default=TICKS_MS[0])
    high = min((tick for tick in TICKS_MS if tick >= max(times_ms)), default=TICKS_MS[-1])
    first = min(run.first for run in runs)
    last = max(run.first + len(run.times_s) - 1 for run in runs)

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)

    def y(time_ms: float) -> float:
        part = (log10(time_ms) - log10(low)) / max(log10(high) - log10(low), 0.1)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text x="28" y="40" class="title ink">{escape(title)}</text>',
        f'<text x="28" y="61" class="small soft">{escape(subtitle)}</text>',
        f'<text x="{LEFT - 36}" y="{TOP - 10}" class="small soft">ms</text>',
    ]
    for tick in TICKS_MS:
        if low <= tick <= high:
            at = y(tick)
            out.append(
                f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" class="grid"/>'
                f'<text x="{LEFT - 10}" y="{at + 4:.1f}" class="small soft" text-anchor="end">'
                f"{tick}</text>"
            )
    every = max(1, -(-(last - first + 1) // 12))
    for step in range(first, last + 1, every):
        out.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 22}" class="small soft" '
            f'text-anchor="middle">{step + 1}</text>'
        )
    ends = [y(1e3 * run.times_s[-1]) for run in runs]
    for i, run in enumerate(runs):
        colour = COLOURS[i % len(COLOURS)]
        points = [
            (x(run.first + n), y(1e3 * time_s), time_s) for n, time_s in enumerate(run.times_s)
        ]
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top, _ in points)
        out.append(
            f'<polyline class="run" points="{line}" fill="none" stroke="{colour}" '
            'stroke-width="1.6" stroke-linejoin="round"/>'
        )
        for n, (left, top, time_s) in enumerate(points):
            tip = f"{run.name}, step {run.first + n + 1}: {1e3 * time_s:.0f} ms"
            out.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.6" fill="{colour}">'
                f"<title>{escape(tip)}</title></circle>"
            )
        mean_ms, most_ms = 1e3 * fmean(run.times_s), 1e3 * max(run.times_s)
        # Names stand in the order of the runs' ends, each with room for two lines.
        place = TOP + 18 + 52 * sorted(range(len(runs)), key=lambda k: ends[k]).index(i)
        left = WIDTH - RIGHT + 22
        out.append(
            f'<circle cx="{left}" cy="{place - 4}" r="5" fill="{colour}"/>'
            f'<text x="{left + 13}" y="{place}" class="panel-title ink">{escape(run.name)}</text>'
            f'<text x="{left + 13}" y="{place + 17}" class="small soft">mean {mean_ms:.0f} ms, '
            f"longest {most_ms:.0f} ms</text>"
        )
    return "\n".join([*out, "</svg>\n"])
