"""Timelines as pictures: rows of boxes over one axis of time, drawn as SVG without any library."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax import saxutils


class Paint(NamedTuple):
    """How a kind of box looks.

    Attributes:
        colour: fills operations; of idle time, the hatching and, weakly, the area behind it.
        hatch: the angle of the lines, since colour alone must not tell; none for operations.
        dark: the colour on a dark page, if another.
    """

    colour: str
    hatch: str = ""
    dark: str = ""


PAINTS = {
    "F": Paint("#4f7be8"),
    "B": Paint("#1a9c8c"),
    "W": Paint("#f0a92e"),
    "R": Paint("#8e6bd8"),
    "sent F": Paint("#7f9fe6"),
    "sent B": Paint("#58a79b"),
    "prefill": Paint("#d8453b"),
    "idle": Paint("#b9c3d6", "/", "#3d4961"),
    "warm_up": Paint("#b9c3d6", "|", "#4a5770"),
    "forward": Paint("#d8453b", "\\", "#f0655b"),
    "backward": Paint("#9b4fd0", "/", "#b878e8"),
    "order": Paint("#1b2333", "x", "#e8ecf5"),
    "overhead": Paint("#8a93a8", "."),
    "cool_down": Paint("#b9c3d6", "-", "#4a5770"),
}

# Lengths are in SVG user units, which are pixels at the natural size.
WIDTH = 1280
_MARGIN = 36
_LEFT = 100
_NOTES = 120  # right of the rows, if there is something to say
_ROW = 22
_FOOTER = 15
# The width of a character of small text, for text that has to fit.
_CHARACTER = 6.0
# The size of the hatching, which is finer than the shortest box that is worth looking at.
_TILE = 6
_CROSS_TILE = 9

# The width of the axis in a picture without notes.
PLOT_WIDTH = WIDTH - _LEFT - _MARGIN

# Not allowed in XML; names of files and hosts may hold them.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# The style sheet of all pictures, also of those of the examples, for light and dark pages.
STYLE = """
text { font-family: Inter, "Segoe UI", "Helvetica Neue", Helvetica, Arial, sans-serif }
.page { fill: #ffffff } .ink { fill: #1b2333 } .soft { fill: #667089 }
.track { fill: #eff2f8 } .grid { stroke: #e3e8f1 } .rule { stroke: #c9d1e0 }
.end { stroke: #1b2333 } .change { stroke: #1b2333; stroke-width: 2.5 }
.step { stroke: #667089; stroke-width: 1 } .badge { fill: #1b2333 } .on-badge { fill: #ffffff }
.title { font-size: 20px; font-weight: 700 } .section { font-size: 17px; font-weight: 700 }
.big { font-size: 15px; font-weight: 700 } .strong { font-size: 11.5px; font-weight: 700 }
.small { font-size: 11px }
.number { font-size: 10.5px; fill: #ffffff; text-anchor: middle; font-weight: 600 }
.tight { font-size: 8.5px }
@media (prefers-color-scheme: dark) {
  .page { fill: #11151d } .ink { fill: #e8ecf5 } .soft { fill: #98a2b8 }
  .track { fill: #1c2230 } .grid { stroke: #262e3e } .rule { stroke: #3a455b }
  .end { stroke: #e8ecf5 } .change { stroke: #e8ecf5 } .step { stroke: #98a2b8 }
  .badge { fill: #e8ecf5 } .on-badge { fill: #11151d }
}
"""


class Box(NamedTuple):
    """Something that takes time on a row; `paint` is a key of PAINTS."""

    paint: str
    start_s: float
    end_s: float
    label: str
    tip: str


class Row(NamedTuple):
    """One stage.

    Attributes:
        until_s: how far its track reaches.
        ground: a key of PAINTS for what no box covers; empty for nothing.
    """

    label: str
    boxes: Sequence[Box]
    until_s: float
    tip: str = ""
    ground: str = ""


class Arrow(NamedTuple):
    """A message, from a row to another; `paint` is that of its operation."""

    paint: str
    source: int
    destination: int
    start_s: float
    end_s: float


class Heading(NamedTuple):
    """Begins an iteration.

    Attributes:
        starts_s: when each row began it; None for a row that did not.
        title, text: what stands above it, the text where there is room.
        badge: for a change, drawn as a thick line; else empty.
    """

    starts_s: Sequence[float | None]
    title: str
    text: str = ""
    badge: str = ""


class Flag(NamedTuple):
    """Marks a moment above the rows."""

    time_s: float
    tip: str


@dataclass(frozen=True)
class Picture:
    """The content of a picture; times are seconds from the left edge.

    Attributes:
        legend: (paint, what it means).
        notes: right of the rows, the first one large.
        footer: lines below the axis.
        row_gap: pixels between rows, where messages are drawn.
    """

    title: str
    rows: Sequence[Row]
    length_s: float
    legend: Sequence[tuple[str, str]]
    subtitle: str = ""
    notes: Sequence[str] = ()
    arrows: Sequence[Arrow] = ()
    headings: Sequence[Heading] = ()
    flags: Sequence[Flag] = ()
    footer: Sequence[str] = ()
    row_gap: int = 4

    @property
    def right(self) -> int:
        """The right end of the axis."""
        return WIDTH - (_NOTES if self.notes else _MARGIN)

    @property
    def scale(self) -> float:
        """Pixels per second."""
        return (self.right - _LEFT) / (self.length_s or 1.0)

    @property
    def row_height(self) -> int:
        return _ROW + self.row_gap

    @property
    def bar_height(self) -> float:
        """The height of a row, as part of the row and the gap below it."""
        return _ROW / self.row_height

    def headings_that_fit(self) -> Iterator[tuple[float, Heading, str]]:
        """Each heading's start in seconds, and of its texts what its width has room for."""
        begins = [min(s for s in each.starts_s if s is not None) for each in self.headings]
        ends = [*begins, self.length_s][1:]
        for begin_s, end_s, heading in zip(begins, ends, self.headings, strict=True):
            room = (end_s - begin_s) * self.scale / _CHARACTER - 1
            yield begin_s, heading, heading.text if len(heading.text) <= room else ""


def ticks(length: float) -> list[float]:
    """The ticks of an axis from 0 to `length`, which divide it into 5 to 12 parts; each part is 1,
    2 or 5 times a power of ten."""
    power = 1e-9
    while length / (5 * power) > 12:
        power *= 10
    tick = next(power * factor for factor in (1, 2, 5) if length / (power * factor) <= 12)
    return [i * tick for i in range(int(length / tick + 1e-9) + 1)]


def number_classes(label: str, wide: float) -> str:
    """The CSS classes of a number in a box `wide` pixels wide; empty if it does not fit."""
    if not label or wide < 5.4 * len(label):
        return ""
    return "number" if wide >= 3 + 7 * len(label) else "number tight"


def escape(text: str) -> str:
    """The text as XML."""
    return saxutils.escape(_NO_XML.sub("\ufffd", text))


def _css() -> str:
    light = [
        f".i-{name} {{ fill: {p.colour}; stroke: {p.colour} }}"
        for name, p in PAINTS.items()
        if p.hatch
    ]
    dark = [
        f"  .i-{name} {{ fill: {p.dark}; stroke: {p.dark} }}"
        for name, p in PAINTS.items()
        if p.dark
    ]
    return (
        f"{STYLE}{chr(10).join(light)}\n"
        f"@media (prefers-color-scheme: dark) {{\n{chr(10).join(dark)}\n}}\n"
    )


def _pattern(name: str, paint: Paint) -> str:
    """An SVG pattern: lines of the paint's colour on a weak ground of it."""
    t = _CROSS_TILE if paint.hatch == "x" else _TILE
    lines = {
        "/": f"M0 {t}L{t} 0M-1 1L1 -1M{t - 1} {t + 1}L{t + 1} {t - 1}",
        "\\": f"M0 0L{t} {t}M-1 {t - 1}L1 {t + 1}M{t - 1} -1L{t + 1} 1",
        "x": f"M0 0L{t} {t}M0 {t}L{t} 0",
        "|": f"M{t / 2} 0V{t}",
        "-": f"M0 {t / 2}H{t}",
        ".": f"M{t / 2} {t / 2 - 1}V{t / 2 + 1}",
    }[paint.hatch]
    return (
        f'<pattern id="idle-{name}" width="{t}" height="{t}" patternUnits="userSpaceOnUse">'
        f'<rect width="{t}" height="{t}" class="i-{name}" stroke="none" fill-opacity="0.16"/>'
        f'<path d="{lines}" class="i-{name}" stroke-width="1.2"/></pattern>'
    )


def _fill(paint: str) -> str:
    return f"url(#idle-{paint})" if PAINTS[paint].hatch else PAINTS[paint].colour


class _Svg:
    """The elements of a picture, so far; y grows downwards."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._parts: list[str] = []
        self._top = 0.0

    def _x(self, time_s: float) -> float:
        return _LEFT + time_s * self._picture.scale

    def _y(self, row: int) -> float:
        return self._top + row * self._picture.row_height

    def _text(self, x: float, y: float, text: str, classes: str, anchor: str = "") -> None:
        if anchor:
            anchor = f' text-anchor="{anchor}"'
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}"{anchor}>{escape(text)}</text>'
        )

    def _head(self) -> None:
        picture = self._picture
        self._text(_MARGIN, _MARGIN + 12, picture.title, "title ink")
        y = _MARGIN + 32.0
        if picture.subtitle:
            self._text(_MARGIN, y, picture.subtitle, "small soft")
            y += 18
        x = float(_LEFT)
        for paint, meaning in picture.legend:
            wide = 37 + 6.2 * len(meaning)
            if x > _LEFT and x + wide > WIDTH:
                x, y = float(_LEFT), y + 20
            self._parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="13" height="13" rx="2" '
                f'fill="{_fill(paint)}"/>'
            )
            self._text(x + 19, y + 11, meaning, "small soft")
            x += wide
        self._top = y + 30 + (40 if picture.headings else 0)

    def _box(self, box: Box, y: float) -> None:
        left = self._x(box.start_s)
        # A hair of background keeps neighbours apart.
        wide = max((box.end_s - box.start_s) * self._picture.scale - 0.8, 0.0)
        if wide < 0.4:
            return
        self._parts.append(
            f'<g><title>{escape(box.tip)}</title><rect x="{left:.2f}" y="{y}" width="{wide:.2f}" '
            f'height="{_ROW}" rx="2" fill="{_fill(box.paint)}"/>'
        )
        classes = number_classes(box.label, wide)
        if classes:
            self._text(left + wide / 2, y + _ROW / 2 + 3.8, box.label, classes)
        self._parts.append("</g>")

    def _rows(self) -> None:
        for i, row in enumerate(self._picture.rows):
            y = self._y(i)
            self._parts.append(f'<g class="row" data-row="{i}">')
            if row.tip:
                self._parts.append(f"<title>{escape(row.tip)}</title>")
            self._text(_LEFT - 10, y + _ROW / 2 + 4, row.label, "small soft", "end")
            width = row.until_s * self._picture.scale
            grounds = ['class="track"']
            if row.ground:
                grounds.append(f'fill="{_fill(row.ground)}"')
            for ground in grounds:
                self._parts.append(
                    f'<rect x="{_LEFT}" y="{y}" width="{width:.2f}" height="{_ROW}" rx="3" '
                    f"{ground}/>"
                )
            for box in row.boxes:
                self._box(box, y)
            self._parts.append("</g>")

    def _arrows(self) -> None:
        for arrow in self._picture.arrows:
            down = arrow.destination > arrow.source
            begin = self._y(arrow.source) + (_ROW if down else 0)
            end = self._y(arrow.destination) + (0 if down else _ROW)
            self._parts.append(
                f'<line x1="{self._x(arrow.start_s):.2f}" y1="{begin}" '
                f'x2="{self._x(arrow.end_s):.2f}" y2="{end}" stroke="{PAINTS[arrow.paint].colour}" '
                'stroke-opacity="0.75" class="message"/>'
            )

    def _headings(self) -> None:
        half = self._picture.row_gap / 2
        for begin_s, heading, text in self._picture.headings_that_fit():
            classes = "change" if heading.badge else "step"
            x = self._x(begin_s)
            path = f"M{x:.1f} {self._top - 36:.1f}V{self._top - half:.1f}"
            for row, start_s in enumerate(heading.starts_s):
                if start_s is not None:
                    y = self._y(row)
                    path += f"H{self._x(start_s):.1f}V{y + _ROW + half:.1f}"
            self._parts.append(f'<path d="{path}" class="{classes}" fill="none"/>')
            y = self._top - 26
            self._text(x + 5, y, heading.title, "strong ink")
            self._text(x + 5, y + 13, text, "small soft")
            if heading.badge:
                wide = 6.6 * len(heading.badge) + 12
                left = x + 11 + 6.8 * len(heading.title)
                self._parts.append(
                    f'<rect x="{left:.1f}" y="{y - 12:.1f}" width="{wide:.1f}" height="15" '
                    'rx="7.5" class="badge"/>'
                )
                self._text(left + wide / 2, y - 0.5, heading.badge, "small on-badge", "middle")
        for flag in self._picture.flags:
            x, y = self._x(flag.time_s), self._top - 2
            self._parts.append(
                f'<path d="M{x:.1f} {y:.1f}l-4.5 -7h9z" class="ink flag"><title>{escape(flag.tip)}'
                "</title></path>"
            )

    def _axis(self, y: float) -> None:
        picture = self._picture
        for time_s in ticks(picture.length_s or 1.0):
            x = self._x(time_s)
            self._parts.append(
                f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}" class="rule"/>'
            )
            self._text(x, y + 18, f"{time_s * 1e3:.6g}", "small soft", "middle")
        self._text(_LEFT - 10, y + 18, "ms", "small soft", "end")
        if picture.notes:
            end = self._x(picture.length_s)
            self._parts.append(
                f'<line x1="{end + 0.5:.1f}" y1="{self._top - 5}" x2="{end + 0.5:.1f}" y2="{y}" '
                'class="end"/>'
            )
            for i, note in enumerate(picture.notes):
                classes = "small soft" if i else "big ink"
                self._text(end + 9, self._top + 16 + 17 * i, note, classes)

    def render(self) -> str:
        picture = self._picture
        self._head()
        self._rows()
        self._arrows()
        self._headings()
        bottom = self._y(len(picture.rows))
        self._axis(bottom)
        for i, line in enumerate(picture.footer):
            self._text(_LEFT, bottom + 42 + _FOOTER * i, line, "small soft")
        height = round(bottom + 42 + _FOOTER * len(picture.footer))
        used = {each for each, _ in picture.legend} | {row.ground for row in picture.rows}
        used.update(box.paint for row in picture.rows for box in row.boxes)
        patterns = [
            _pattern(name, paint) for name, paint in PAINTS.items() if name in used and paint.hatch
        ]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH}" height="{height}" role="img">',
                f"<title>{escape(picture.title)}</title>",
                f"<style>{_css()}</style>",
                f"<defs>{''.join(patterns)}</defs>",
                f'<rect class="page" width="{WIDTH}" height="{height}" rx="10"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def svg(picture: Picture) -> str:
    """The picture as SVG text, for light and dark pages."""
    return _Svg(picture).render()
