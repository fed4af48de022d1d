"""Files of what each rank of a pipeline measured: written as it runs, read together afterwards.

A run is a folder with a file `rank<NNNNN>.jsonl` for each rank. Each line is a JSON object: first a
header, then one for each iteration, each event, each newer measurement of the clock. Times are
seconds on the rank's own monotonic clock; the reader puts them on that of stage 0.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeGuard

from torch_resilient._files import create_private
from torch_resilient.pipelining.measured import (
    FilledSpan,
    MeasuredRun,
    MeasuredStep,
    RankInfo,
    RunEvent,
    StageStep,
    idle_of,
    without,
)
from torch_resilient.planning.orders import Operation
from torch_resilient.planning.replay import Span

FORMAT = 1
_WAIT = "wait"
# Digits after the point: a tenth of a microsecond.
_DIGITS = 7


class TimelineError(ValueError):
    """Files that cannot be used; the text is one line that names the file and the line."""


def clock_offset_s(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The remote clock minus this clock, and the largest error of that; seconds.

    Each sample is (t0, remote, t1): when a question was sent and its answer received by this clock,
    and what the remote clock said in between. The sample with the shortest round trip counts, as in
    NTP: if both ways take as long, it is exact; else it is off by at most half of the round trip,
    which is the second number.

    Raises ValueError if there is no sample, or one has t1 before t0 or a number that is not finite.
    """
    if not samples:
        raise ValueError("samples: expected at least one, got none")
    for sample in samples:
        if not all(map(math.isfinite, sample)) or sample[2] < sample[0]:
            raise ValueError(f"samples: expected finite (t0, remote, t1), t0 <= t1, got {sample}")
    before_s, remote_s, after_s = min(samples, key=lambda each: each[2] - each[0])
    return remote_s - (before_s + after_s) / 2, (after_s - before_s) / 2


class TimelineWriter:
    """Writes what one rank measures to `<folder>/rank<NNNNN>.jsonl`; makes the folder.

    A file of an earlier run is replaced. Every line is with the system when the call that made it
    returns, so a run that is killed leaves a file that can be read.

    Args:
        folder: of the run; all ranks of one pipeline share it, or their files are put together.
        rank, stage, num_stages, host: who writes.
        clock_offset_s: what to add to this rank's clock to get that of stage 0.
        clock: what tells the time of events; that of the spans.

    Raises OSError, which names the file, if it cannot be made or written; after that the file is
    closed. Thread: one at a time.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int,
        stage: int,
        num_stages: int,
        host: str,
        clock_offset_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(folder) / f"rank{rank:05}.jsonl"
        self._clock = clock
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Without a buffer: a line that could not be written must not follow later.
            self._file = os.fdopen(create_private(self.path), "wb", buffering=0)
        except OSError as error:
            raise self._named(error) from error
        self._write(
            {
                "format": FORMAT,
                "rank": rank,
                "stage": stage,
                "num_stages": num_stages,
                "host": host,
                "clock_offset_s": round(clock_offset_s, _DIGITS),
                "time_s": round(clock(), _DIGITS),
                "pid": os.getpid(),
            }
        )

    def add(
        self,
        step: int,
        plan: int,
        spans: Iterable[tuple[str, int, float, float]],
        arrivals: Iterable[tuple[str, int, float]],
        start_s: float,
        end_s: float,
        filled: Iterable[tuple[str, float, float]] = (),
    ) -> None:
        """Appends an iteration; steps must increase.

        Args:
            step: its number.
            plan: epoch of the plan in use.
            spans: (kind, microbatch, start_s, end_s), kind "F", "B", "W" or "wait", as
                `recorder.MeasuredSpan`.
            arrivals: (kind, microbatch, when): the message that this F or B needed was there. Those
                that are not known are left out, so is what needs no message.
            start_s, end_s: of the call of the schedule.
            filled: (name, start_s, end_s) of chunks of other work since the last call.
        """
        chunks = [
            (name, round(begin_s, _DIGITS), round(finish_s, _DIGITS))
            for name, begin_s, finish_s in filled
        ]
        self._write(
            {
                "step": step,
                "plan": plan,
                "start_s": round(start_s, _DIGITS),
                "end_s": round(end_s, _DIGITS),
                "spans": [
                    (kind, microbatch, round(begin_s, _DIGITS), round(finish_s, _DIGITS))
                    for kind, microbatch, begin_s, finish_s in spans
                ],
                "arrivals": [
                    (kind, microbatch, round(there_s, _DIGITS))
                    for kind, microbatch, there_s in arrivals
                ],
            }
            | ({"filled": chunks} if chunks else {})
        )

    def event(self, step: int, text: str, **numbers: float) -> None:
        """Appends that something happened now, such as a change of plan."""
        now_s = round(self._clock(), _DIGITS)
        self._write({"event": text, "step": step, "time_s": now_s, "numbers": numbers})

    def clock_offset(self, offset_s: float) -> None:
        """Appends what the offset of the clocks is now; between two, the reader interpolates.

        Clocks of two hosts drift apart by some 10 µs per second, which is 36 ms in an hour.
        """
        now_s = round(self._clock(), _DIGITS)
        self._write({"clock_offset_s": round(offset_s, _DIGITS), "time_s": now_s})

    def close(self) -> None:
        """Nothing can be written after this; may be called again."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n"
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Part of a line may be there, which is no harm at the end of a file.
            self._file.close()
            raise self._named(error) from error

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, f"timeline: cannot write: {error.strerror}", str(self.path))


@dataclass
class _RankFile:
    """One file, as it is read: times are still the rank's own, where no other is said."""

    path: Path
    info: RankInfo
    num_stages: int
    # The offsets of the clock: (own time, what to add).
    offsets: list[tuple[float, float]]
    steps: list[StageStep] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    filled: list[FilledSpan] = field(default_factory=list)

    def aligned(self, time_s: float) -> float:
        """This time on the clock of stage 0."""
        i = bisect.bisect(self.offsets, (time_s, math.inf))
        if i in (0, len(self.offsets)):
            return time_s + self.offsets[max(i - 1, 0)][1]
        (before_s, offset_s), (after_s, later_s) = self.offsets[i - 1 : i + 1]
        return time_s + offset_s + (later_s - offset_s) * (time_s - before_s) / (after_s - before_s)


def _is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a finite number; as an integer it may be too large for math.isfinite."""
    most = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def _number(line: Mapping[str, Any], name: str) -> float:
    value = line.get(name)
    if not _is_finite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r:.40}")
    return float(value)


def _count(line: Mapping[str, Any], name: str) -> int:
    value = line.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: expected an integer, not negative, got {value!r:.40}")
    return value


def _text(line: Mapping[str, Any], name: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a text, got {value!r:.40}")
    return value


def _rows(line: Mapping[str, Any], name: str, kinds: Sequence[str], times: int) -> list[list[Any]]:
    """Reads a list of [kind, microbatch, time, ...] with `times` times."""
    value = line.get(name)
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list, got {value!r:.40}")
    for i, row in enumerate(value):
        if (
            not isinstance(row, list)
            or len(row) != 2 + times
            or row[0] not in kinds
            or type(row[1]) is not int
            or row[1] < (-1 if row[0] == _WAIT else 0)
            or not all(map(_is_finite, row[2:]))
            or row[2:] != sorted(row[2:])
        ):
            wanted = f"[{' or '.join(kinds)}, microbatch{', seconds' * times}]"
            raise ValueError(f"{name}[{i}]: expected {wanted}, times in order, got {row!r:.60}")
    return value


def _filled(line: Mapping[str, Any]) -> list[FilledSpan]:
    value = line.get("filled", [])
    if not isinstance(value, list):
        raise ValueError(f"filled: expected a list, got {value!r:.40}")
    for i, row in enumerate(value):
        if (
            not isinstance(row, list)
            or len(row) != 3
            or not isinstance(row[0], str)
            or not all(map(_is_finite, row[1:]))
            or row[1] > row[2]
        ):
            raise ValueError(
                f"filled[{i}]: expected [name, seconds, seconds], times in order, got {row!r:.60}"
            )
    return [FilledSpan(*row) for row in value]


def _operations(rows: Iterable[list[Any]], name: str) -> dict[Operation, list[float]]:
    found: dict[Operation, list[float]] = {}
    for kind, microbatch, *times in rows:
        operation = Operation(kind, microbatch)
        if operation in found:
            raise ValueError(f"{name}: {operation} comes twice")
        found[operation] = times
    return found


def _header(path: Path, line: Mapping[str, Any]) -> _RankFile:
    if (version := line.get("format")) != FORMAT:
        raise ValueError(f"format: expected {FORMAT}, got {version!r:.40}")
    num_stages = _count(line, "num_stages")
    stage = _count(line, "stage")
    if stage >= num_stages:
        raise ValueError(f"stage: expected one of {num_stages}, got {stage}")
    info = RankInfo(_count(line, "rank"), stage, _text(line, "host"), _count(line, "pid"), False)
    offset = (_number(line, "time_s"), _number(line, "clock_offset_s"))
    return _RankFile(path, info, num_stages, [offset])


def _step(file: _RankFile, line: Mapping[str, Any]) -> StageStep:
    step = _count(line, "step")
    if file.steps and step <= file.steps[-1].step:
        raise ValueError(f"step: {step} comes after {file.steps[-1].step}")
    start_s, end_s = _number(line, "start_s"), _number(line, "end_s")
    if end_s < start_s:
        raise ValueError(f"end_s: {end_s} is before start_s, {start_s}")
    rows = _rows(line, "spans", ("F", "B", "W", _WAIT), 2)
    timed = _operations((row for row in rows if row[0] != _WAIT), "spans")
    spans = sorted((Span(operation, *times) for operation, times in timed.items()), key=_by_start)
    arrived = _operations(_rows(line, "arrivals", ("F", "B"), 1), "arrivals")
    file.filled += _filled(line)
    stage = file.info.stage
    for operation in arrived:
        if stage == (0 if operation.kind == "F" else file.num_stages - 1):
            raise ValueError(f"arrivals: {operation} of stage {stage} needs no message")
    return StageStep(
        stage,
        step,
        _count(line, "plan"),
        start_s,
        end_s,
        end_s,
        tuple(spans),
        tuple((row[2], row[3]) for row in rows if row[0] == _WAIT),
        {operation: times[0] for operation, times in arrived.items()},
    )


def _by_start(span: Span) -> tuple[float, float]:
    return span.start_s, span.end_s


def _event(file: _RankFile, line: Mapping[str, Any]) -> RunEvent:
    numbers = line.get("numbers", {})
    if not isinstance(numbers, dict):
        raise ValueError(f"numbers: expected an object, got {numbers!r:.40}")
    return RunEvent(
        _count(line, "step"),
        _number(line, "time_s"),
        file.info.stage,
        file.info.rank,
        _text(line, "event"),
        {name: _number(numbers, name) for name in numbers},
    )


def _clock(file: _RankFile, line: Mapping[str, Any]) -> tuple[float, float]:
    time_s = _number(line, "time_s")
    if time_s <= file.offsets[-1][0]:
        raise ValueError(f"time_s: expected more than {file.offsets[-1][0]}, got {time_s}")
    return time_s, _number(line, "clock_offset_s")


def _object(text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(line, dict):
        raise ValueError(f"expected a JSON object, got {line!r:.40}")
    return line


def _read_file(path: Path) -> _RankFile | None:
    """None if not even its first line is whole: then nothing is known of it."""
    *whole, rest = path.read_bytes().split(b"\n")
    file: _RankFile | None = None
    for number, text in enumerate(whole, 1):
        try:
            line = _object(text)
            if file is None:
                file = _header(path, line)
            elif "event" in line:
                file.events.append(_event(file, line))
            elif "clock_offset_s" in line:
                file.offsets.append(_clock(file, line))
            else:
                file.steps.append(_step(file, line))
        except ValueError as error:
            raise TimelineError(f"{path}:{number}: {error}") from None
    if file is not None and rest:
        file.info = replace(file.info, torn=True)
    return file


def _align(file: _RankFile, step: StageStep) -> StageStep:
    move = file.aligned
    return replace(
        step,
        start_s=move(step.start_s),
        end_s=move(step.end_s),
        spans=tuple(
            Span(each.operation, move(each.start_s), move(each.end_s)) for each in step.spans
        ),
        waits=tuple((move(start_s), move(end_s)) for start_s, end_s in step.waits),
        arrivals={operation: move(there_s) for operation, there_s in step.arrivals.items()},
    )


def _close(
    step: StageStep, until_s: float, num_stages: int, chunks: Sequence[FilledSpan]
) -> StageStep:
    """The same with the end of its time, and why it idled until then without `chunks`."""
    idle = idle_of(step.stage, num_stages, step.spans, step.arrivals, step.start_s, until_s)
    filled = tuple(each for each in chunks if step.start_s <= each.start_s < until_s)
    return replace(step, until_s=until_s, idle=without(idle, filled), filled=filled)


def _steps(files: Sequence[_RankFile], first: int, stop: float) -> list[MeasuredStep]:
    num_stages = files[0].num_stages
    found: dict[int, list[StageStep | None]] = {}
    chunks: dict[int, list[FilledSpan]] = {}
    for file in files:
        chunks[file.info.stage] = [
            each._replace(start_s=file.aligned(each.start_s), end_s=file.aligned(each.end_s))
            for each in file.filled
        ]
        for step in file.steps:
            # One more than is wanted: where it starts, the one before it ends.
            if first <= step.step <= stop:
                row = found.setdefault(step.step, [None] * num_stages)
                row[step.stage] = _align(file, step)
    steps = []
    for number in sorted(found):
        if number >= stop:
            continue
        row = found[number]
        followers = found.get(number + 1, [None] * num_stages)
        last_s = max(each.end_s for each in row if each is not None)
        stages = [
            None
            if each is None
            else _close(
                each, follower.start_s if follower else last_s, num_stages, chunks[each.stage]
            )
            for each, follower in zip(row, followers, strict=True)
        ]
        steps.append(MeasuredStep(number, tuple(stages)))
    return steps


def read_run(
    folder: str | os.PathLike[str], first: int = 0, stop: int | None = None
) -> MeasuredRun:
    """The measurements of all ranks, on the clock of stage 0.

    Args:
        folder: of the run.
        first, stop: only the steps from `first` to `stop` - 1; None is all.

    A last line that is not whole is left out, and so is a stage without a file; `RankInfo.torn` and
    `MeasuredRun.missing` tell.

    Raises TimelineError for anything else that `TimelineWriter` would not have written, OSError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise TimelineError(f"{folder}: no such folder")
    files = [file for path in sorted(folder.glob("rank*.jsonl")) if (file := _read_file(path))]
    if not files:
        text = f"{folder}: no file rank*.jsonl with a whole line: not a run's folder"
        if runs := sorted({path.parent.name for path in folder.glob("*/rank*.jsonl")}):
            text += f"; those of its pipelines are {', '.join(runs)} in it"
        raise TimelineError(text)
    num_stages = files[0].num_stages
    by_stage: dict[int, _RankFile] = {}
    for file in files:
        if file.num_stages != num_stages:
            raise TimelineError(
                f"{file.path}:1: num_stages: {file.num_stages}, but {num_stages} in "
                f"{files[0].path.name}"
            )
        other = by_stage.setdefault(file.info.stage, file)
        if other is not file:
            raise TimelineError(
                f"{file.path}:1: stage: {file.info.stage}, like {other.path.name}; each pipeline "
                "needs a folder of its own"
            )
    steps = _steps(files, first, math.inf if stop is None else stop)
    events = [
        replace(event, time_s=file.aligned(event.time_s))
        for file in files
        for event in file.events
        if first <= event.step and (stop is None or event.step < stop)
    ]
    infos = tuple(by_stage[i].info if i in by_stage else None for i in range(num_stages))
    return MeasuredRun(folder, infos, tuple(steps), tuple(sorted(events, key=lambda e: e.time_s)))
