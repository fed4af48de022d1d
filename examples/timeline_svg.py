"""Draw timelines of pipeline iterations as one SVG picture, without any library.

    python examples/timeline_svg.py timeline.json --out timeline.svg

A picture has sections (one schedule each), a section has panels (one run each), a panel has a row
for each rank; all share one time scale. Hatched areas are idle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any
from xml.sax.saxutils import escape

from op_recorder import WAIT, Span, iteration_times

from torch_resilient.pipelining import picture

# Lengths are in SVG user units, which are pixels at the natural size.
WIDTH = picture.WIDTH
MARGIN = 36
LABELS = 150  # left of the rows: link badges and rank names
NOTES = 128  # right of the rows: how long it took
ROW = 22
ROW_GAP = 4
PANEL_HEAD = 34
PANEL_GAP = 18
PLOT_LEFT = MARGIN + LABELS
PLOT_WIDTH = WIDTH - 2 * MARGIN - LABELS - NOTES

# For each kind, the colour of the rank's first stage, and of its second one.
COLOURS = {
    "F": (picture.PAINTS["F"].colour, "#2f4fae"),
    "B": ("#4c9f54", "#2f7038"),
    "I": (picture.PAINTS["B"].colour, "#0f6b62"),
    "W": (picture.PAINTS["W"].colour, "#c47d12"),
    "O": (picture.PAINTS["overhead"].colour,) * 2,
}
MEANINGS = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward of inputs",
    "W": "backward of weights",
    "O": "optimizer",
}

STYLE = (
    picture.STYLE
    + """
.hatch { stroke: #d3dae8 } .fault { stroke: #d8453b } .fault-badge { fill: #d8453b }
@media (prefers-color-scheme: dark) { .hatch { stroke: #2b3446 } }
"""
)


@dataclass(frozen=True)
class LinkFault:
    """A mark between the rows of two neighbouring ranks."""

    low_rank: int
    text: str


@dataclass(frozen=True)
class Panel:
    """One iteration of one run.

    Attributes:
        title: what ran over what.
        subtitle: which iteration this is, in soft ink after the title.
        ranks: spans by rank, of this iteration only, in seconds from its beginning.
        notes: short lines at the end of the rows; the first is the large one.
        fault: the link that was in trouble.
    """

    title: str
    ranks: Sequence[Sequence[Span]]
    subtitle: str = ""
    notes: Sequence[str] = ()
    fault: LinkFault | None = None

    @property
    def length_s(self) -> float:
        """The time from the first operation to the end of the last."""
        return max(span.end_s for spans in self.ranks for span in spans)


@dataclass(frozen=True)
class Section:
    """Panels to compare with each other."""

    title: str
    panels: Sequence[Panel]
    subtitle: str = ""


@dataclass
class _Canvas:
    """The elements so far, and how far down the page they reach."""

    y: float = 0.0
    elements: list[str] = field(default_factory=list)

    def add(self, element: str) -> None:
        self.elements.append(element)

    def text(self, x: float, y: float, text: str, classes: str, anchor: str = "start") -> None:
        self.add(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, classes: str) -> None:
        self.add(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{classes}"/>'
        )


@dataclass(frozen=True)
class _Scale:
    """Seconds to pixels, the same for all panels of a picture."""

    length_s: float

    def x(self, time_s: float) -> float:
        return PLOT_LEFT + PLOT_WIDTH * time_s / self.length_s

    def ticks_ms(self) -> Iterator[int]:
        wanted_ms = self.length_s * 1e3 / 8
        step = next(
            (s for s in (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000) if s >= wanted_ms),
            2000,
        )
        yield from range(0, int(self.length_s * 1e3) + 1, step)


def _lightest_stage(spans: Iterable[Span]) -> int:
    return min((span.stage for span in spans if span.stage >= 0), default=0)


def _operation(
    canvas: _Canvas, scale: _Scale, span: Span, rank: int, second: bool, y: float
) -> None:
    left, right = scale.x(span.start_s), scale.x(span.end_s)
    # A hair of background keeps neighbours apart.
    width = max(right - left - 0.8, 0.0)
    if width < 0.4:
        return
    of_microbatch = f" of microbatch {span.microbatch}" if span.microbatch >= 0 else ""
    at_stage = f", stage {span.stage}" if span.stage >= 0 else ""
    tip = (
        f"rank {rank}{at_stage}: {MEANINGS[span.kind]}{of_microbatch}, "
        f"{(span.end_s - span.start_s) * 1e3:.1f} ms"
    )
    canvas.add(
        f'<g><title>{escape(tip)}</title><rect x="{left:.2f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{ROW}" rx="2" fill="{COLOURS[span.kind][second]}"/>'
    )
    number = str(span.microbatch) if span.microbatch >= 0 else ""
    classes = picture.number_classes(number, width)
    if classes:
        canvas.add(
            f'<text x="{left + width / 2:.2f}" y="{y + ROW / 2 + 3.8:.1f}" '
            f'class="{classes}">{number}</text>'
        )
    canvas.add("</g>")


def _fault_mark(canvas: _Canvas, fault: LinkFault, top: float) -> None:
    above = top + fault.low_rank * (ROW + ROW_GAP) + ROW / 2
    below = above + ROW + ROW_GAP
    right = PLOT_LEFT - 54
    canvas.add(
        f'<path d="M{right} {above} C{right - 13} {above}, {right - 13} {below}, {right} {below}" '
        'class="fault" fill="none" stroke-width="2"/>'
    )
    middle = (above + below) / 2
    width = 7.0 * len(fault.text) + 12
    left = right - 14 - width
    canvas.add(
        f'<rect x="{left:.1f}" y="{middle - 9:.1f}" width="{width:.1f}" height="18" rx="9" '
        'class="fault-badge"/>'
    )
    canvas.add(
        f'<text x="{left + width / 2:.1f}" y="{middle + 3.8:.1f}" class="number">'
        f"{escape(fault.text)}</text>"
    )


def _panel(canvas: _Canvas, panel: Panel, scale: _Scale) -> None:
    canvas.add('<g class="panel">')
    canvas.add(
        f'<text x="{PLOT_LEFT}" y="{canvas.y + 19:.1f}" class="strong ink">'
        f"{escape(panel.title)}"
        f'<tspan class="small soft" font-weight="400" dx="10">{escape(panel.subtitle)}</tspan>'
        "</text>"
    )
    top = canvas.y + PANEL_HEAD
    bottom = top + len(panel.ranks) * (ROW + ROW_GAP) - ROW_GAP
    end = scale.x(panel.length_s)
    for tick_ms in scale.ticks_ms():
        x = scale.x(tick_ms / 1e3)
        canvas.line(x, top - 4, x, bottom + 4, "grid")
    for rank, spans in enumerate(panel.ranks):
        y = top + rank * (ROW + ROW_GAP)
        canvas.add(f'<g class="rank" data-rank="{rank}">')
        canvas.text(PLOT_LEFT - 10, y + ROW / 2 + 4, f"rank {rank}", "small soft", "end")
        for paint in ('class="track"', 'fill="url(#idle)"'):
            canvas.add(
                f'<rect x="{PLOT_LEFT}" y="{y:.1f}" width="{end - PLOT_LEFT:.2f}" '
                f'height="{ROW}" rx="3" {paint}/>'
            )
        first_stage = _lightest_stage(spans)
        for span in spans:
            if span.kind != WAIT:
                _operation(canvas, scale, span, rank, span.stage > first_stage, y)
        canvas.add("</g>")
    canvas.line(end + 0.5, top - 5, end + 0.5, bottom + 5, "end")
    for i, note in enumerate(panel.notes):
        canvas.text(end + 9, top + 16 + 17 * i, note, "small soft" if i else "big ink")
    if panel.fault is not None:
        _fault_mark(canvas, panel.fault, top)
    canvas.add("</g>")
    canvas.y = bottom + PANEL_GAP


def _axis(canvas: _Canvas, scale: _Scale) -> None:
    y = canvas.y - 4
    canvas.line(PLOT_LEFT, y, PLOT_LEFT + PLOT_WIDTH, y, "rule")
    for tick_ms in scale.ticks_ms():
        x = scale.x(tick_ms / 1e3)
        canvas.line(x, y, x, y + 5, "rule")
        canvas.text(x, y + 18, f"{tick_ms}", "small soft", "middle")
    canvas.text(PLOT_LEFT - 10, y + 18, "ms", "small soft", "end")
    canvas.y += 34


def _legend(canvas: _Canvas, sections: Sequence[Section], y: float) -> None:
    spans = [s for section in sections for p in section.panels for r in p.ranks for s in r]
    kinds = [kind for kind in MEANINGS if any(span.kind == kind for span in spans)]
    two_stages = any(
        len({s.stage for s in row if s.stage >= 0}) > 1
        for section in sections
        for panel in section.panels
        for row in panel.ranks
    )
    x = float(PLOT_LEFT)
    for kind in kinds:
        colours = COLOURS[kind]
        for i in range(2 if two_stages and colours[0] != colours[1] and kind != "B" else 1):
            canvas.add(
                f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="13" height="13" rx="2" '
                f'fill="{colours[i]}"/>'
            )
            x += 14
        canvas.text(x + 5, y + 1, MEANINGS[kind], "small soft")
        x += 5 + 6.6 * len(MEANINGS[kind]) + 18
    for paint in ('class="track"', 'fill="url(#idle)"'):
        canvas.add(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="20" height="13" rx="2" {paint}/>')
    canvas.text(x + 26, y + 1, "idle", "small soft")
    if two_stages:
        canvas.text(WIDTH - MARGIN, y + 1, "dark: the rank's second stage", "small soft", "end")


def render(title: str, subtitle: str, sections: Sequence[Section], footer: str = "") -> str:
    """The whole picture as SVG text."""
    canvas = _Canvas(y=MARGIN)
    canvas.text(MARGIN, canvas.y + 14, title, "title ink")
    canvas.text(MARGIN, canvas.y + 38, subtitle, "small soft")
    _legend(canvas, sections, canvas.y + 68)
    canvas.y += 84
    scale = _Scale(max(panel.length_s for section in sections for panel in section.panels))
    for section in sections:
        canvas.y += 14
        canvas.add(
            f'<text x="{MARGIN}" y="{canvas.y + 16:.1f}" class="section ink">'
            f"{escape(section.title)}"
            f'<tspan class="small soft" font-weight="400" dx="12">{escape(section.subtitle)}'
            "</tspan></text>"
        )
        canvas.line(MARGIN, canvas.y + 27, WIDTH - MARGIN, canvas.y + 27, "rule")
        canvas.y += 32
        for panel in section.panels:
            _panel(canvas, panel, scale)
        _axis(canvas, scale)
    if footer:
        canvas.text(MARGIN, canvas.y + 8, footer, "small soft")
        canvas.y += 16
    height = canvas.y + MARGIN / 2
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="hatch" '
            'stroke-width="2"/></pattern></defs>',
            f'<rect class="page" width="{WIDTH}" height="{height:.0f}" rx="10"/>',
            *canvas.elements,
            "</svg>\n",
        ]
    )


def spans_of(timeline: dict[str, Any]) -> list[list[Span]]:
    """The spans of a --timeline file, by rank."""
    return [[Span(*span) for span in spans] for spans in timeline["ranks"]]


def pick_iteration(ranks: Sequence[Sequence[Span]], which: str) -> int:
    """The step with the "median" or the "slowest" iteration, the first step left out."""
    times = iteration_times(ranks)
    steady = list(zip(times.iteration_s, times.steps, strict=True))
    steady = steady[1:] or steady
    length_s = (
        max(steady)[0] if which == "slowest" else median_low([length for length, _ in steady])
    )
    return next(step for length, step in steady if length == length_s)


def one_iteration(ranks: Sequence[Sequence[Span]], step: int) -> list[list[Span]]:
    """The spans of one step, in seconds from its first operation.

    Raises:
        ValueError: the step is not in the timeline.
    """
    starts = [s.start_s for row in ranks for s in row if s.step == step and s.kind != WAIT]
    if not starts:
        raise ValueError(f"step {step} is not in this timeline")
    origin_s = min(starts)
    return [
        [
            span._replace(start_s=span.start_s - origin_s, end_s=span.end_s - origin_s)
            for span in row
            if span.step == step and span.kind != WAIT
        ]
        for row in ranks
    ]


def panel_of(
    timeline: dict[str, Any],
    title: str,
    which: str = "median",
    notes: Sequence[str] = (),
    fault: LinkFault | None = None,
) -> Panel:
    """A panel with one iteration of a --timeline file; `which` as for pick_iteration."""
    ranks = spans_of(timeline)
    step = pick_iteration(ranks, which)
    spans = one_iteration(ranks, step)
    length_s = max(span.end_s for row in spans for span in row)
    return Panel(
        title,
        spans,
        subtitle=f"step {step + 1}, the {which} iteration",
        notes=[f"{length_s * 1e3:.0f} ms", *notes],
        fault=fault,
    )


def main() -> int:
    """Draw the timelines named on the command line, each in a panel."""
    parser = argparse.ArgumentParser(description="Draw timelines of train_pipeline.py as SVG.")
    parser.add_argument("timelines", nargs="+", type=Path, metavar="TIMELINE_JSON")
    parser.add_argument("--out", type=Path, default=Path("timeline.svg"))
    parser.add_argument("--which", choices=("median", "slowest"), default="median")
    arguments = parser.parse_args()
    sections: dict[str, list[Panel]] = {}
    for path in arguments.timelines:
        timeline = json.loads(path.read_text())
        panel = panel_of(timeline, f"{path.stem} over {timeline['backend']}", arguments.which)
        sections.setdefault(timeline["schedule"], []).append(panel)
    text = render(
        "What each rank does in one training iteration",
        "numbers are microbatches",
        [Section(schedule, panels) for schedule, panels in sections.items()],
    )
    arguments.out.write_text(text)
    print(f"wrote {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
