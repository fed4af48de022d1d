"""Shows the measurements of the ranks of a run: text, Chrome trace, picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from torch_resilient.pipelining.measured import (
    BACKWARD,
    CAUSES,
    FORWARD,
    ORDER,
    Idle,
    Link,
    MeasuredRun,
    MeasuredStep,
    RunEvent,
    StageStep,
    Waiting,
)
from torch_resilient.pipelining.picture import (
    PLOT_WIDTH,
    Arrow,
    Box,
    Flag,
    Heading,
    Picture,
    Row,
)
from torch_resilient.pipelining.timeline import MEANINGS, operation_box

# A picture of more iterations or operations is too dense to be read.
_MAX_STEPS = 6
_MAX_OPERATIONS = 12_000
# A typical operation has room for the number of its microbatch.
_OPERATION_PIXELS = 8
_ROW_GAP = 16
# The epoch of the plan before anything has been measured.
_INITIAL_PLAN = 0
_MAX_EVENTS = 8
# A cause that would be told as 0.0 % needs no legend.
_MIN_PART = 5e-4
# The paint of chunks of other work in idle time.
_FILLED = "prefill"


def choose_steps(run: MeasuredRun) -> tuple[list[MeasuredStep], str]:
    """Consecutive steps that are worth a picture, and why; all, if they are few.

    Those around a change of plan: the one before which an iteration took longest. The first plan
    that follows from measurements counts only if it is the only change: it tells nothing about the
    links. Without a change, those around the slowest iteration, except the first: there everything
    is new.
    """
    steps = list(run.steps)
    count = _steps_that_fit(steps)
    if len(steps) <= count:
        return steps, "all"
    changes = run.changes()
    if changes:
        measured = [i for i in changes if _INITIAL_PLAN not in steps[i - 1].plans]
        change = max(measured or changes, key=lambda i: steps[i - 1].iteration_s)
        first = change - count // 2
        before, after = (_plans(steps[i]) for i in (change - 1, change))
        why = f"around the change from plan {before} to {after} in step {steps[change].step}"
    else:
        slowest = max(range(1, len(steps)), key=lambda i: steps[i].iteration_s)
        first = slowest - count // 2
        why = f"around the slowest, step {steps[slowest].step}"
    first = min(max(first, 0), len(steps) - count)
    return steps[first : first + count], why


def _steps_that_fit(steps: Sequence[MeasuredStep]) -> int:
    """How many steps a picture of the usual width shows legibly; at least one before and one after
    a change, unless these are too many operations for any viewer."""
    operations = max((sum(len(s.spans) for s in each.present) for each in steps), default=0)
    most = max(1, min(_MAX_STEPS, _MAX_OPERATIONS // max(operations, 1)))
    times_s = [
        span.end_s - span.start_s for step in steps for each in step.present for span in each.spans
    ]
    typical_s = statistics.median(times_s) if times_s else 0.0
    if typical_s <= 0:
        return most
    step_s = statistics.median(step.iteration_s for step in steps)
    fit = PLOT_WIDTH * typical_s / _OPERATION_PIXELS / step_s
    return min(most, max(2, int(fit)))


def _plans(step: MeasuredStep) -> str:
    return "/".join(map(str, step.plans))


def waiting_of(steps: Sequence[MeasuredStep]) -> dict[Link, Waiting]:
    """How long stages waited for messages in these steps, by link and direction: (from, to)."""
    found: dict[Link, Waiting] = {}
    for step in steps:
        for link, each in step.waiting.items():
            found[link] = found.get(link, Waiting()) + each
    return dict(sorted(found.items(), key=lambda item: (min(item[0]), item[0])))


def transits_of(steps: Sequence[MeasuredStep]) -> dict[Link, list[float]]:
    """Seconds that each message was on its way, by link and direction: (from, to)."""
    found: dict[Link, list[float]] = {}
    for step in steps:
        for message in step.messages:
            link = (message.source, message.destination)
            found.setdefault(link, []).append(message.end_s - message.start_s)
    return dict(sorted(found.items(), key=lambda item: (min(item[0]), item[0])))


def warnings_of(run: MeasuredRun) -> list[str]:
    """Reasons to doubt the rest of the output."""
    found = [f"stage {stage}: no file" for stage in run.missing]
    for info in run.ranks:
        if info is not None and info.torn:
            found.append(f"stage {info.stage}: the last line of rank {info.rank} is not whole")
    for (source, destination), early_s in run.early_s().items():
        found.append(
            f"link {source} to {destination}: messages arrive up to {early_s * 1e3:.3g} ms before "
            "they leave; the clocks are off by at least that"
        )
    return found


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))


def event_lines(run: MeasuredRun) -> list[tuple[RunEvent, str]]:
    """A line of text for each event, those that several stages tell alike in one; by time."""
    groups: dict[tuple[int, str, str], list[RunEvent]] = {}
    for event in run.events:
        numbers = "".join(f" {name}={value:.6g}" for name, value in event.numbers.items())
        groups.setdefault((event.step, event.text, numbers), []).append(event)
    lines = []
    for (step, text, numbers), group in groups.items():
        stages = sorted({each.stage for each in group})
        who = f"stage {', '.join(map(str, stages))}"
        if 1 < len(stages) == run.num_stages - len(run.missing):
            who = "all stages"
        at_s = group[0].time_s - run.start_s
        lines.append((group[0], f"step {step}, {who}, at {at_s:.3f} s: {text}{numbers}"))
    return lines


def text_table(run: MeasuredRun) -> str:
    """A line per iteration, per link, per event."""
    filled = any(step.filled for step in run.steps)
    rows = [
        ["step", "plan", "ms", *(["filled %"] if filled else []), "idle %"]
        + [cause.replace("_", "-") for cause in CAUSES]
    ]
    partial = False
    for step in run.steps:
        whole = len(step.present) == run.num_stages - len(run.missing)
        partial |= not whole
        rows.append(
            [
                f"{step.step}{'' if whole else '*'}",
                _plans(step),
                f"{step.iteration_s * 1e3:.1f}",
                *([f"{100 * step.filled:.1f}"] if filled else []),
                f"{100 * step.bubble:.1f}",
                *(f"{100 * step.idle[cause]:.1f}" for cause in CAUSES),
            ]
        )
    lines = list(_columns(rows))
    if partial:
        lines.append("* not of all stages")
    waiting, transits = waiting_of(run.steps), transits_of(run.steps)
    rows = [["link", "waited ms", "in transit", "order", "messages", "median ms", "longest ms"]]
    for link in {**waiting, **transits}:
        times_s = transits.get(link, [])
        waited = waiting.get(link, Waiting())
        rows.append(
            [
                f"{link[0]} to {link[1]}",
                f"{waited.waited_s * 1e3:.1f}",
                f"{waited.transit_s * 1e3:.1f}",
                f"{waited.order_s * 1e3:.1f}",
                str(len(times_s)),
                f"{statistics.median(times_s) * 1e3:.3f}" if times_s else "",
                f"{max(times_s) * 1e3:.3f}" if times_s else "",
            ]
        )
    if len(rows) > 1:
        lines += ["", *_columns(rows)]
    if run.events:
        lines += ["", *(line for _, line in event_lines(run))]
    return "\n".join(lines) + "\n"


def _idle_tip(stage: int, idle: Idle) -> str:
    tip = f"stage {stage}: {CAUSES[idle.cause]}"
    if idle.awaited is not None and idle.link is not None:
        tip += f", {idle.awaited} over link {idle.link[0]} to {idle.link[1]}"
    if idle.possible is not None:
        tip += f"; {idle.possible} could run"
    return f"{tip}; {idle.duration_s * 1e3:.6g} ms"


def picture_of(run: MeasuredRun, title: str) -> Picture:
    """The run's steps side by side: one row per stage, idle time by its cause, messages between.

    Raises ValueError if the run has no step.
    """
    if not run.steps:
        raise ValueError("no step to draw")
    origin_s = run.start_s
    length_s = max(step.until_s for step in run.steps) - origin_s
    rows = [_row(run, stage, origin_s) for stage in range(run.num_stages)]
    arrows = [
        # If the clocks are off, a message is drawn as if it took no time.
        Arrow(
            message.operation.kind,
            message.source,
            message.destination,
            message.start_s - origin_s,
            max(message.end_s, message.start_s) - origin_s,
        )
        for step in run.steps
        for message in step.messages
    ]
    changes = set(run.changes())
    headings = [
        Heading(
            [None if each is None else each.start_s - origin_s for each in step.stages],
            f"step {step.step}",
            f"{step.iteration_s * 1e3:.4g} ms, {100 * step.bubble:.3g} % idle",
            f"plan {_plans(step)}" if i in changes else "",
        )
        for i, step in enumerate(run.steps)
    ]
    # A step's event may come just before the step begins.
    shown = [
        (min(max(event.time_s - origin_s, 0.0), length_s), line) for event, line in event_lines(run)
    ]
    footer = [line for _, line in shown[:_MAX_EVENTS]]
    if len(shown) > _MAX_EVENTS:
        footer.append(f"and {len(shown) - _MAX_EVENTS} more events")
    return Picture(
        title,
        rows,
        length_s,
        _legend(run.steps),
        subtitle=_subtitle(run),
        arrows=arrows,
        headings=headings,
        flags=[Flag(time_s, line) for time_s, line in shown],
        footer=[*footer, *warnings_of(run)],
        row_gap=_ROW_GAP,
    )


def _row(run: MeasuredRun, stage: int, origin_s: float) -> Row:
    info = run.ranks[stage]
    if info is None:
        return Row(f"stage {stage}: no file", [], 0.0)
    boxes = []
    until_s = 0.0
    for step in run.steps:
        each = step.stages[stage]
        if each is None:
            continue
        until_s = each.until_s - origin_s
        boxes += [operation_box(stage, span, origin_s) for span in each.spans]
        boxes += [
            Box(
                idle.cause,
                idle.start_s - origin_s,
                idle.end_s - origin_s,
                "",
                _idle_tip(stage, idle),
            )
            for idle in each.idle
        ]
        boxes += [
            Box(
                _FILLED,
                chunk.start_s - origin_s,
                chunk.end_s - origin_s,
                "",
                f"stage {stage}: {chunk.name}, {(chunk.end_s - chunk.start_s) * 1e3:.6g} ms",
            )
            for chunk in each.filled
        ]
    tip = f"stage {stage}: rank {info.rank} on {info.host}, process {info.pid}"
    return Row(f"stage {stage}", boxes, until_s, tip)


def _legend(steps: Sequence[MeasuredStep]) -> list[tuple[str, str]]:
    """Operations, and the causes with their part of all time."""
    length_s = sum(step.iteration_s for step in steps) or 1.0
    parts = {
        cause: sum(step.idle[cause] * step.iteration_s for step in steps) / length_s
        for cause in CAUSES
    }
    filled = sum(step.filled * step.iteration_s for step in steps) / length_s
    return [
        *MEANINGS.items(),
        *([(_FILLED, f"other work: {100 * filled:.1f} %")] if filled else []),
        *(
            (cause, f"{meaning}: {100 * parts[cause]:.1f} %")
            for cause, meaning in CAUSES.items()
            if parts[cause] >= _MIN_PART
        ),
    ]


def _subtitle(run: MeasuredRun) -> str:
    waiting = waiting_of(run.steps)
    worst = sorted(waiting.items(), key=lambda item: -item[1].transit_s)[:2]
    told = [
        f"{each.transit_s * 1e3:.4g} ms on link {link[0]} to {link[1]}"
        for link, each in worst
        if each.transit_s > 0
    ]
    return f"stages waited most for messages on their way: {', '.join(told)}" if told else ""


# Threads of each stage in a Chrome trace.
_OPERATIONS, _IDLE, _HOST, _WORK = range(4)


def chrome_trace(run: MeasuredRun) -> dict[str, Any]:
    """For chrome://tracing and Perfetto, on one clock that begins with the first step.

    A process per stage, with threads for its operations, for idle time by cause, and for when the
    host was blocked; one for links, with each message from when it left until it was there; one for
    steps and events. Arrows lead from the operation that sends to the one that needs the message.
    """
    origin_s = run.start_s
    links, whole = run.num_stages, run.num_stages + 1
    events: list[dict[str, Any]] = []
    for stage, info in enumerate(run.ranks):
        if info is not None:
            name = f"stage {stage} (rank {info.rank} on {info.host})"
            threads = {_OPERATIONS: "operations", _IDLE: "idle", _HOST: "host"}
            if any(each.filled for step in run.steps if (each := step.stages[stage])):
                threads[_WORK] = "other work"
            events += _names(stage, name, threads)
    events += _names(links, "links", {})
    events += _names(whole, "run", {0: "steps"})
    number = 0
    for step in run.steps:
        begin_s = step.present[0].start_s
        events.append(
            _slice(f"step {step.step}", "step", whole, 0, begin_s - origin_s, step.iteration_s)
            | {"args": {"plan": _plans(step), "idle": round(step.bubble, 6)}}
        )
        for each in step.present:
            events += _stage_slices(each, origin_s)
        starts_s = {
            (each.stage, span.operation): span.start_s
            for each in step.present
            for span in each.spans
        }
        for message in step.messages:
            number += 1
            name = f"{message.source} to {message.destination}"
            common = {"name": name, "cat": "message", "id": number}
            args = {"operation": str(message.operation)}
            sent_us, there_us = (
                _microseconds(t - origin_s) for t in (message.start_s, message.end_s)
            )
            there_us = max(there_us, sent_us)
            begin = common | {"pid": links, "tid": 0, "args": args}
            events.append(begin | {"ph": "b", "ts": sent_us})
            events.append(begin | {"ph": "e", "ts": there_us})
            # An arrow needs an operation at both ends, or it is not drawn.
            sender_s = starts_s[message.source, message.operation]
            needed_s = starts_s.get((message.destination, message.operation))
            if needed_s is not None:
                arrow = common | {"cat": "needs", "tid": _OPERATIONS}
                sender_us = _microseconds(sender_s - origin_s)
                needed_us = _microseconds(max(needed_s, sender_s) - origin_s)
                events.append(arrow | {"ph": "s", "pid": message.source, "ts": sender_us})
                events.append(
                    arrow | {"ph": "f", "bp": "e", "pid": message.destination, "ts": needed_us}
                )
    for event in run.events:
        events.append(
            {
                "name": event.text,
                "cat": "event",
                "ph": "i",
                "s": "g",
                "pid": whole,
                "tid": 0,
                "ts": _microseconds(event.time_s - origin_s),
                "args": {"step": event.step, "stage": event.stage, **event.numbers},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _names(process: int, name: str, threads: dict[int, str]) -> Iterator[dict[str, Any]]:
    common = {"ph": "M", "pid": process}
    yield common | {"name": "process_name", "args": {"name": name}}
    yield common | {"name": "process_sort_index", "args": {"sort_index": process}}
    for thread, text in threads.items():
        yield common | {"name": "thread_name", "tid": thread, "args": {"name": text}}


def _slice(
    name: str, category: str, process: int, thread: int, start_s: float, duration_s: float
) -> dict[str, Any]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": _microseconds(start_s),
        "dur": _microseconds(duration_s),
    }


def _stage_slices(each: StageStep, origin_s: float) -> Iterator[dict[str, Any]]:
    for operation, start_s, end_s in each.spans:
        yield _slice(
            str(operation),
            MEANINGS[operation.kind],
            each.stage,
            _OPERATIONS,
            start_s - origin_s,
            end_s - start_s,
        ) | {"args": {"step": each.step, "plan": each.plan}}
    for idle in each.idle:
        found = _slice(
            idle.cause, "idle", each.stage, _IDLE, idle.start_s - origin_s, idle.duration_s
        )
        args: dict[str, Any] = {"step": each.step}
        if idle.cause in (FORWARD, BACKWARD, ORDER):
            args["awaited"] = str(idle.awaited)
        if idle.possible is not None:
            args["possible"] = str(idle.possible)
        yield found | {"args": args}
    for start_s, end_s in each.waits:
        yield _slice("blocked", "host", each.stage, _HOST, start_s - origin_s, end_s - start_s)
    for chunk in each.filled:
        yield _slice(
            chunk.name,
            "work",
            each.stage,
            _WORK,
            chunk.start_s - origin_s,
            chunk.end_s - chunk.start_s,
        )
