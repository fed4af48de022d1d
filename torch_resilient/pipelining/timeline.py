"""Pictures of a replayed iteration: text, Chrome trace, SVG."""

from __future__ import annotations

from typing import Any

from torch_resilient.pipelining import picture
from torch_resilient.pipelining.picture import Box, Picture, Row
from torch_resilient.planning.replay import Replay, Span

MEANINGS = {"F": "forward", "B": "backward of inputs", "W": "backward of weights"}


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


def operation_box(stage: int, span: Span, origin_s: float = 0.0) -> Box:
    """An operation, in seconds from `origin_s`."""
    start_s, end_s = span.start_s - origin_s, span.end_s - origin_s
    kind, microbatch = span.operation
    tip = (
        f"stage {stage}: {MEANINGS[kind]} of microbatch {microbatch}, "
        f"{start_s * 1e3:.6g} to {end_s * 1e3:.6g} ms"
    )
    return Box(kind, start_s, end_s, str(microbatch), tip)


def picture_of(replay: Replay, title: str) -> Picture:
    """A picture with one row per stage; what is hatched is idle."""
    rows = [
        Row(
            f"stage {stage}",
            [operation_box(stage, span) for span in spans],
            replay.iteration_s,
            ground="idle",
        )
        for stage, spans in enumerate(replay.stages)
    ]
    notes = [f"{replay.iteration_s * 1e3:.6g} ms", f"{100 * replay.bubble:.1f} % idle"]
    return Picture(title, rows, replay.iteration_s, list(MEANINGS.items()), notes=notes)


def svg(replay: Replay, title: str) -> str:
    """The picture as SVG text. Needs no library."""
    return picture.svg(picture_of(replay, title))
