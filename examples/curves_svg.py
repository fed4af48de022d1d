"""Draw curves over steps as one SVG picture, in the style of the package's own pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from xml.sax.saxutils import escape

from torch_resilient.pipelining.picture import STYLE, ticks

WIDTH, HEIGHT = 860, 440
LEFT, RIGHT, TOP, BOTTOM = 76, 216, 84, 60
LINE = 16  # of the lines below the axis
COLOURS = ("#4f7be8", "#1a9c8c", "#f0a92e", "#d8453b", "#8a63d2", "#2f4fae", "#7a8499", "#4c9f54")


@dataclass(frozen=True)
class Curve:
    """A named run.

    Attributes:
        values: in the unit of the vertical axis.
        first: the number of the step of the first value, counted from 1.
        every: steps between two values.
        note: stands below the name.
    """

    name: str
    values: Sequence[float]
    first: int = 1
    every: int = 1
    note: str = ""

    @property
    def last(self) -> int:
        return self.first + self.every * (len(self.values) - 1)


def render_curves(
    title: str,
    subtitle: str,
    label: str,
    curves: Sequence[Curve],
    *,
    from_zero: bool = False,
    dots: bool = True,
    footer: Sequence[str] = (),
) -> str:
    """The picture as SVG text.

    Args:
        title, subtitle: above the plot.
        label: of the vertical axis, with its unit.
        curves: drawn in this order; where they lie on each other, each is thinner than the one
            below it.
        from_zero: begin the vertical axis at 0, for values to be compared by their ratio.
        dots: mark each value, with its number to point at.
        footer: lines below the plot.
    """
    lowest = min(min(curve.values) for curve in curves)
    highest = max(max(curve.values) for curve in curves)
    tick = ticks((highest - (0.0 if from_zero else lowest)) * 1.8 or 1.0)[1]
    low = 0.0 if from_zero else floor(lowest / tick) * tick
    high = max(ceil(highest / tick), round(low / tick) + 1) * tick
    first, last = min(c.first for c in curves), max(c.last for c in curves)
    height = HEIGHT + (LINE * len(footer) + 8 if footer else 0)
    bottom = HEIGHT - BOTTOM

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / max(last - first, 1)

    def y(value: float) -> float:
        return TOP + (bottom - TOP) * (high - value) / (high - low)

    def text(left: float, top: float, words: str, classes: str, anchor: str = "start") -> str:
        return (
            f'<text x="{left:.1f}" y="{top:.1f}" class="{classes}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
        text(28, 40, title, "title ink"),
        text(28, 61, subtitle, "small soft"),
        f'<text transform="translate(24 {(TOP + bottom) / 2}) rotate(-90)" class="small soft" '
        f'text-anchor="middle">{escape(label)}</text>',
        text((LEFT + WIDTH - RIGHT) / 2, bottom + 40, "step", "small soft", "middle"),
    ]
    for i in range(round((high - low) / tick) + 1):
        value = low + i * tick
        out += [
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}" '
            f'class="{"rule" if value == 0 else "grid"}"/>',
            text(LEFT - 10, y(value) + 4, f"{value:.6g}", "small soft", "end"),
        ]
    between = max(curve.every for curve in curves)
    between *= max(1, ceil((last - first + 1) / between / 12))
    for step in range(first, last + 1, between):
        out.append(text(x(step), bottom + 22, str(step), "small soft", "middle"))
    # Names stand in the order of the curves' ends, each with room for two lines.
    order = sorted(range(len(curves)), key=lambda i: y(curves[i].values[-1]))
    lines = 2 if any(curve.note for curve in curves) else 1
    for i, curve in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        thick = 1.6 if dots else 2 + 14 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        steps = range(curve.first, curve.last + 1, curve.every)
        points = [(x(step), y(value)) for step, value in zip(steps, curve.values, strict=True)]
        line = " ".join(f"{left:.1f},{top:.1f}" for left, top in points)
        out.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{thick:.1f}" '
            f'stroke-linejoin="round" stroke-linecap="round"><title>{escape(curve.name)}</title>'
            "</polyline>"
        )
        if dots:
            for step, value, (left, top) in zip(steps, curve.values, points, strict=True):
                tip = escape(f"{curve.name}, step {step}: {value:.4g}")
                out.append(
                    f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.6" fill="{colour}">'
                    f"<title>{tip}</title></circle>"
                )
        place = TOP + 18 + (11 + 17 * lines) * order.index(i)
        left = WIDTH - RIGHT + 22
        out += [
            f'<circle cx="{left}" cy="{place - 4}" r="5" fill="{colour}"/>',
            text(left + 13, place, curve.name, "strong ink"),
        ]
        if curve.note:
            out.append(text(left + 13, place + 17, curve.note, "small soft"))
    out += [text(28, HEIGHT + 8 + LINE * i, words, "small soft") for i, words in enumerate(footer)]
    return "\n".join([*out, "</svg>\n"])
