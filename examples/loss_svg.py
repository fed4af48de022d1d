"""Draw loss curves as one SVG picture, in the manner of timeline_svg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from xml.sax.saxutils import escape

from timeline_svg import STYLE

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 30, 84, 48
COLOURS = ("#4f7be8", "#1a9c8c", "#f0a92e", "#d8453b", "#8a63d2", "#2f4fae", "#7a8499", "#4c9f54")


@dataclass(frozen=True)
class Curve:
    """A named run; losses in nats per byte, by step."""

    name: str
    losses: Sequence[float]


def render_losses(title: str, curves: Sequence[Curve]) -> str:
    """The picture as SVG text.

    Curves that lie on each other can all be seen: each is drawn thinner than the one below it.
    """
    steps = max(len(curve.losses) for curve in curves)
    low = floor(min(min(curve.losses) for curve in curves) * 2) / 2
    high = ceil(max(max(curve.losses) for curve in curves) * 2) / 2

    def x(step: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(steps - 1, 1)

    def y(loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / max(high - low, 0.5)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
        f'<text x="28" y="42" class="title ink">{escape(title)}</text>',
        f'<text x="{LEFT - 36}" y="{TOP - 14}" class="small soft">nats per byte</text>',
    ]
    halves = range(int(low * 2), int(high * 2) + 1)
    for half in halves:
        at = y(half / 2)
        out.append(
            f'<line x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}" class="grid"/>'
            f'<text x="{LEFT - 10}" y="{at + 4:.1f}" class="small soft" text-anchor="end">'
            f"{half / 2:.1f}</text>"
        )
    every = max(1, ceil(steps / 15))
    for step in range(0, steps, every):
        out.append(
            f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 22}" class="small soft" '
            f'text-anchor="middle">{step + 1}</text>'
        )
    for i, curve in enumerate(curves):
        width = 2 + 14 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in enumerate(curve.losses))
        colour = COLOURS[i % len(COLOURS)]
        out.append(
            f'<polyline class="curve" points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="{width:.1f}" stroke-linejoin="round" stroke-linecap="round">'
            f"<title>{escape(curve.name)}</title></polyline>"
        )
        row = TOP + 14 + 19 * i
        out.append(
            f'<line x1="{WIDTH / 2 - 62}" y1="{row - 4}" x2="{WIDTH / 2 - 38}" y2="{row - 4}" '
            f'stroke="{colour}" stroke-width="{min(width, 9):.1f}" stroke-linecap="round"/>'
            f'<text x="{WIDTH / 2 - 24}" y="{row}" class="small ink">{escape(curve.name)}</text>'
        )
    return "\n".join([*out, "</svg>\n"])
