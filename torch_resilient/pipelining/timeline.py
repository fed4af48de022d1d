"""Pictures of a replayed iteration: text, Chrome trace, SVG."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from torch_resilient.pipelining.replay import Replay

# The colours of examples/timeline_svg.py, which has the same letters except for I, our B.
COLOURS = {"F": "#4f7be8", "B": "#1a9c8c", "W": "#f0a92e"}
MEANINGS = {"F": "forward", "B": "backward of inputs", "W": "backward of weights"}

# Lengths are in SVG user units, which are pixels at the natural size.
_WIDTH = 1280
_MARGIN = 36
_LEFT = 100
_RIGHT = _WIDTH - 120
_ROW = 22
_ROW_GAP = 4

_STYLE = """
text { font-family: Inter, "Segoe UI", "Helvetica Neue", Helvetica, Arial, sans-serif }
.page { fill: #ffffff } .ink { fill: #1b2333 } .soft { fill: #667089 }
.track { fill: #eff2f8 } .hatch { stroke: #d3dae8 } .grid { stroke: #e3e8f1 }
.end { stroke: #1b2333 }
.title { font-size: 20px; font-weight: 700 } .small { font-size: 11px }
.big { font-size: 15px; font-weight: 700 }
.number { font-size: 10.5px; fill: #ffffff; text-anchor: middle; font-weight: 600 }
@media (prefers-color-scheme: dark) {
  .page { fill: #11151d } .ink { fill: #e8ecf5 } .soft { fill: #98a2b8 }
  .track { fill: #1c2230 } .hatch { stroke: #2b3446 } .grid { stroke: #262e3e }
  .end { stroke: #e8ecf5 }
}
"""


def text_grid(replay: Replay, width: int = 110) -> str:
    """One line per stage; time runs to the right over `width` columns, a dot is idle.

    An operation fills its columns with its letter, and begins with letter and microbatch where
    that fits. One too short for a column of its own is not shown.
    """
    if replay.iteration_s <= 0:
        return "nothing takes any time\n"
    columns_per_s = width / replay.iteration_s
    lines = []
    for stage, spans in enumerate(replay.stages):
        row = ["."] * width
        for operation, start_s, end_s in spans:
            left, right = round(start_s * columns_per_s), round(end_s * columns_per_s)
            text = str(operation)
            text = text if len(text) <= right - left else ""
            for i in range(left, right):
                row[i] = text[i - left] if i - left < len(text) else operation.kind.lower()
        idle = replay.bubbles[stage].total_s / replay.iteration_s
        lines.append(f"stage {stage:<3}|{''.join(row)}| {100 * idle:3.0f} % idle")
    lines.append(f"{'':9}0{replay.iteration_s * 1e3:>{width}.6g} ms")
    return "\n".join(lines) + "\n"


def chrome_trace(replay: Replay) -> dict[str, Any]:
    """For chrome://tracing and Perfetto: a thread per stage, an arrow per message."""
    events: list[dict[str, Any]] = []
    for stage, spans in enumerate(replay.stages):
        events.append(
            {
                "name": "thread_name",
                "ph": "M",
                "pid": 0,
                "tid": stage,
                "args": {"name": f"stage {stage}"},
            }
        )
        for operation, start_s, end_s in spans:
            events.append(
                {
                    "name": str(operation),
                    "cat": MEANINGS[operation.kind],
                    "ph": "X",
                    "pid": 0,
                    "tid": stage,
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                }
            )
    for number, message in enumerate(replay.messages):
        common = {"name": str(message.operation), "cat": "message", "pid": 0, "id": number}
        events.append({**common, "ph": "s", "tid": message.source, "ts": message.start_s * 1e6})
        events.append(
            {**common, "ph": "f", "bp": "e", "tid": message.destination, "ts": message.end_s * 1e6}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _tick_s(length_s: float) -> float:
    """1, 2 or 5 times a power of ten that parts the length into 5 to 12."""
    tick = 1e-9
    while True:
        for factor in (1, 2, 5):
            if length_s / (tick * factor) <= 12:
                return tick * factor
        tick *= 10


def svg(replay: Replay, title: str) -> str:
    """A picture with one row per stage; what is hatched is idle. Needs no library."""
    length_s = replay.iteration_s or 1.0
    scale = (_RIGHT - _LEFT) / length_s
    top = _MARGIN + 62
    bottom = top + len(replay.stages) * (_ROW + _ROW_GAP)
    height = bottom + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><line x1="0" y1="0" x2="0" y2="6" class="hatch" '
        'stroke-width="2"/></pattern></defs>',
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="10"/>',
        f'<text x="{_MARGIN}" y="{_MARGIN + 12}" class="title ink">{escape(title)}</text>',
    ]
    x = float(_LEFT)
    for kind, meaning in MEANINGS.items():
        parts.append(
            f'<rect x="{x:.1f}" y="{top - 30}" width="13" height="13" rx="2" '
            f'fill="{COLOURS[kind]}"/>'
            f'<text x="{x + 19:.1f}" y="{top - 19}" class="small soft">{meaning}</text>'
        )
        x += 37 + 6.6 * len(meaning)
    for stage, spans in enumerate(replay.stages):
        y = top + stage * (_ROW + _ROW_GAP)
        parts.append(
            f'<text x="{_LEFT - 10}" y="{y + _ROW / 2 + 4}" class="small soft" '
            f'text-anchor="end">stage {stage}</text>'
        )
        for paint in ('class="track"', 'fill="url(#idle)"'):
            parts.append(
                f'<rect x="{_LEFT}" y="{y}" width="{replay.iteration_s * scale:.2f}" '
                f'height="{_ROW}" rx="3" {paint}/>'
            )
        for operation, start_s, end_s in spans:
            left = _LEFT + start_s * scale
            # A hair of background keeps neighbours apart.
            wide = max((end_s - start_s) * scale - 0.8, 0.0)
            if wide < 0.4:
                continue
            tip = (
                f"stage {stage}: {MEANINGS[operation.kind]} of microbatch "
                f"{operation.microbatch}, {start_s * 1e3:.6g} to {end_s * 1e3:.6g} ms"
            )
            parts.append(
                f'<g><title>{tip}</title><rect x="{left:.2f}" y="{y}" width="{wide:.2f}" '
                f'height="{_ROW}" rx="2" fill="{COLOURS[operation.kind]}"/>'
            )
            number = str(operation.microbatch)
            if wide >= 6.5 * len(number):
                parts.append(
                    f'<text x="{left + wide / 2:.2f}" y="{y + _ROW / 2 + 3.8:.1f}" '
                    f'class="number">{number}</text>'
                )
            parts.append("</g>")
    tick_s = _tick_s(length_s)
    for i in range(int(length_s / tick_s + 1e-9) + 1):
        x = _LEFT + i * tick_s * scale
        parts.append(
            f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" class="grid"/>'
            f'<text x="{x:.1f}" y="{bottom + 18}" class="small soft" text-anchor="middle">'
            f"{i * tick_s * 1e3:.6g}</text>"
        )
    end = _LEFT + replay.iteration_s * scale
    parts += [
        f'<line x1="{end + 0.5:.1f}" y1="{top - 5}" x2="{end + 0.5:.1f}" y2="{bottom}" '
        'class="end"/>',
        f'<text x="{end + 9:.1f}" y="{top + 16}" class="big ink">'
        f"{replay.iteration_s * 1e3:.6g} ms</text>",
        f'<text x="{end + 9:.1f}" y="{top + 33}" class="small soft">'
        f"{100 * replay.bubble:.1f} % idle</text>",
        f'<text x="{_LEFT - 10}" y="{bottom + 18}" class="small soft" text-anchor="end">ms</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)
