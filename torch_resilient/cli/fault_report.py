"""The effects of faults on a job, from the records of its ranks (_observe/recorder.py)."""

from __future__ import annotations

import bisect
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_resilient._observe.recorder import OperationRow, PathRow
from torch_resilient._reports.stats import PathKind
from torch_resilient.cli.fault_script import PlannedFault

# Traces of a fault may appear this late: twice the time that detects a dead path.
_TRACES_S = 1.2
# An operation that begins this long after the path has recovered is not attributed to the fault.
_AFTER_S = 0.2
# The first operations include connecting and waiting for ranks that start later.
_WARM_UP_S = 1.0
_NOT_UP = ("suspect", "stalled", "down", "connecting")
_TROUBLE = (*_NOT_UP, "proving")

# A path of one rank: the peer, and its kind and index.
PathKey = tuple[int, PathKind, int]


@dataclass
class RankRecord:
    """The record of one process.

    Attributes:
        start_s: two moments between which its engine started, since the epoch.
        period_s: between two looks at the paths.
        paths: the rows of each path, oldest first.
        operations: those that began, oldest first.
        steps: (time, number) of faults.step().
        missed: operations that could not be read.
        end_s: when it ended; None if it was killed.
    """

    rank: int
    host: str
    start_s: tuple[float, float]
    period_s: float
    paths: dict[PathKey, list[PathRow]] = field(default_factory=dict)
    operations: list[OperationRow] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    missed: int = 0
    end_s: float | None = None
    last_s: float = 0.0

    def row_at(self, path: PathKey, time_s: float) -> PathRow | None:
        """The latest row of a path up to that time."""
        rows = self.paths.get(path, [])
        at = bisect.bisect_right(rows, time_s, key=lambda row: row.time_s)
        return rows[at - 1] if at else None

    def rows_between(self, path: PathKey, a_s: float, b_s: float) -> list[PathRow]:
        """The rows after `a_s`, up to `b_s`."""
        return [row for row in self.paths.get(path, []) if a_s < row.time_s <= b_s]


@dataclass(frozen=True)
class Pause:
    """The operation that a fault held up the most.

    `usual_s`: the median of the same operation on the same rank, away from faults; None without
    such operations.
    """

    rank: int
    operation: str
    took_s: float
    usual_s: float | None

    @property
    def extra_s(self) -> float:
        """Seconds longer than usual."""
        return max(0.0, self.took_s - (self.usual_s or 0.0))


@dataclass
class Outcome:
    """The observed effects of one fault.

    Attributes:
        state: "seen", "not seen" (nothing changed that was looked at), "not reached" (the job was
            over), "no connection" or "no record" (of the rank that applies it: it runs on another
            host).
        at_s: seconds after the first rank's start.
        noticed_s: from the fault to the first look that showed it on the path; None: never.
        how: what that look showed.
        chunks_retransmitted: between the two ranks.
        reconnects: of connections between them.
    """

    fault: PlannedFault
    state: str
    at_s: float | None = None
    noticed_s: float | None = None
    how: str = ""
    chunks_retransmitted: int = 0
    reconnects: int = 0
    pause: Pause | None = None


@dataclass
class Report:
    """The report of a whole job. `noise`: the operation away from faults that exceeded its usual
    time the most, for comparison with the pauses; None if the time of some fault is unknown."""

    outcomes: list[Outcome]
    ranks: list[int]
    hosts: list[str]
    operations: int
    missed: int
    failed: list[str]
    noise: Pause | None
    resolution_s: float
    killed: list[int]
    restarted: list[int]

    def as_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        told = asdict(self)
        for outcome, each in zip(told["outcomes"], self.outcomes, strict=True):
            outcome["rule"] = each.fault.rule
            if each.pause is not None:
                outcome["pause"]["extra_s"] = each.pause.extra_s
        return told


def read_records(folder: Path) -> list[RankRecord]:
    """All records of a folder, by rank and time. An incomplete last line is ignored.

    Raises ValueError, with the file, for one that is no record.
    """
    records = []
    for path in sorted(folder.glob("rank*.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n")[
            :-1
        ]  # the last part is empty or incomplete
        if lines:
            records.append(_read(path, lines))
    return sorted(records, key=lambda record: (record.rank, record.start_s))


def _read(path: Path, lines: Sequence[str]) -> RankRecord:
    try:
        first, *rows = map(json.loads, lines)
        record = RankRecord(
            first["rank"], first["host"], tuple(first["start_s"]), first["period_s"]
        )
        for row in rows:
            kind = row["kind"]
            if kind == "path":
                path_row = PathRow.from_dict(row)
                key = (path_row.peer, path_row.path_kind, path_row.path_index)
                record.paths.setdefault(key, []).append(path_row)
                record.last_s = path_row.time_s
            elif kind == "operation":
                operation = OperationRow.from_dict(row)
                record.operations.append(operation)
                record.last_s = max(record.last_s, operation.began_s + (operation.took_s or 0.0))
            elif kind == "step":
                record.steps.append((row["time_s"], row["step"]))
            elif kind == "missed":
                record.missed += row["operations"]
            elif kind == "end":
                record.end_s = row["time_s"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: no record of torch_resilient ({error!r})") from None
    record.operations.sort(key=lambda operation: operation.id)
    return record


@dataclass
class _Window:
    """The times of a fault: its begin, its end, and the recovery of its path."""

    fault: PlannedFault
    begin_s: float
    end_s: float
    well_s: float
    reached: bool


def _begin_of(fault: PlannedFault, record: RankRecord) -> tuple[float, float] | None:
    """When it began and ended; None if it never began."""
    if fault.step is None:
        assert fault.at_s is not None
        begin_s = record.start_s[0] + fault.at_s
        return begin_s, begin_s + fault.for_s
    begun = [time_s for time_s, step in record.steps if step >= fault.step]
    if not begun:
        return None
    until = fault.step + fault.for_steps
    later = [time_s for time_s, step in record.steps if time_s >= begun[0] and step >= until]
    return begun[0], later[0] if later else record.last_s


def _ends(fault: PlannedFault, ranks: Mapping[int, RankRecord]) -> list[tuple[RankRecord, int]]:
    """The records of both ends, each with the rank of the other."""
    pairs = ((fault.rank, fault.peer), (fault.peer, fault.rank))
    return [(ranks[rank], peer) for rank, peer in pairs if rank in ranks]


def _paths_of(fault: PlannedFault, record: RankRecord, peer: int) -> list[PathKey]:
    """The paths to `peer` that the fault reaches: faults do not reach shared memory."""
    return sorted(
        (other, kind, index)
        for other, kind, index in record.paths
        if other == peer and kind == "tcp" and fault.path in (None, index)
    )


def _windows(script: Sequence[PlannedFault], ranks: Mapping[int, RankRecord]) -> list[_Window]:
    windows = []
    for fault in script:
        record = ranks.get(fault.rank)
        times = _begin_of(fault, record) if record is not None else None
        there = times is not None and record is not None and times[0] < record.last_s
        begin_s, end_s = times if times is not None and there else (0.0, 0.0)
        windows.append(_Window(fault, begin_s, end_s, end_s, there))
    # The order may differ from the script's: each rank counts from its own start.
    reached = sorted((each for each in windows if each.reached), key=lambda each: each.begin_s)
    for window, following in zip(reached, [*reached[1:], None], strict=False):
        limit_s = following.begin_s if following else float("inf")
        for record, peer in _ends(window.fault, ranks):
            for path in _paths_of(window.fault, record, peer):
                until_s = min(limit_s, window.end_s + _TRACES_S)
                rows = record.rows_between(path, window.begin_s, until_s)
                for row, after in zip(rows, [*rows[1:], None], strict=False):
                    if row.state in _TROUBLE:
                        # The state lasts until the next row.
                        window.well_s = max(window.well_s, (after or row).time_s)
        window.well_s = min(limit_s, window.well_s)
    return windows


def _first_sign(window: _Window, ranks: Mapping[int, RankRecord]) -> tuple[float, str] | None:
    """When and how the fault first showed on its paths, at either end."""
    fault, signs = window.fault, []
    for record, peer in _ends(fault, ranks):
        for path in _paths_of(fault, record, peer):
            before = record.row_at(path, window.begin_s)
            if before is None:
                continue
            until_s = max(window.well_s, window.end_s + _TRACES_S)
            for row in record.rows_between(path, window.begin_s, until_s):
                how = _sign(fault, before, row)
                if how:
                    signs.append((row.time_s, f"rank {record.rank}: path {row.path_index} {how}"))
                    break
    return min(signs) if signs else None


def _sign(fault: PlannedFault, before: PathRow, row: PathRow) -> str:
    if row.reconnects > before.reconnects:
        return "reconnected"
    if row.state in _NOT_UP and row.state != before.state:
        return row.state
    if row.times_suspect > before.times_suspect:
        return "was suspect"
    if fault.kind == "delay" and row.round_trip_s > before.round_trip_s + fault.delay_s / 2:
        return f"has a round trip of {row.round_trip_s * 1e3:.0f} ms"
    return ""


def _rate(rows: Sequence[PathRow]) -> float | None:
    """Bytes per second that a path sent from the first to the last row; None: too few rows."""
    if len(rows) < 2:
        return None
    return (rows[-1].bytes_sent - rows[0].bytes_sent) / (rows[-1].time_s - rows[0].time_s)


def _limit_sign(window: _Window, record: RankRecord) -> str:
    """Whether paths carried what the limit allows, and much more before. The engine does not detect
    rate limits, so there is no time of detection."""
    fault = window.fault
    for path in _paths_of(fault, record, fault.peer):
        before_s = window.begin_s - _TRACES_S
        before = _rate(record.rows_between(path, before_s, window.begin_s))
        rate = _rate(record.rows_between(path, window.begin_s, window.end_s))
        # A little may still be queued below the limit when it begins.
        if before and rate and before > 2 * fault.bytes_per_s and rate < 1.5 * fault.bytes_per_s:
            return f"path {path[2]}: from {before / 1e6:.1f} to {rate / 1e6:.1f} MB/s"
    return ""


def _increase(
    count: Callable[[PathRow], int],
    window: _Window,
    ranks: Mapping[int, RankRecord],
    *,
    all_paths: bool,
) -> int:
    """The increase of a counter over a fault's window, summed over both ends, for the fault's paths
    or for all."""
    chosen = window.fault.path
    total = 0
    until_s = max(window.well_s, window.end_s + _AFTER_S)
    for record, peer in _ends(window.fault, ranks):
        for path in record.paths:
            reached = all_paths or chosen is None or path[1:] == ("tcp", chosen)
            if path[0] == peer and reached:
                before = record.row_at(path, window.begin_s)
                after = record.row_at(path, until_s)
                if after is not None:
                    total += count(after) - (count(before) if before is not None else 0)
    return total


class _Operations:
    """All operations of all ranks, with what is usual for each."""

    def __init__(self, ranks: Mapping[int, RankRecord], windows: Sequence[_Window]) -> None:
        self._ranks = ranks
        self._windows = [window for window in windows if window.reached]
        calm: dict[tuple[int, str], list[float]] = defaultdict(list)
        for record in ranks.values():
            for operation, took_s in self._calm(record):
                calm[record.rank, operation.text].append(took_s)
        self._usual_s = {key: statistics.median(times) for key, times in calm.items()}

    def _calm(self, record: RankRecord) -> Iterable[tuple[OperationRow, float]]:
        """The operations away from all faults and after the warm-up, with their durations."""
        for operation in record.operations:
            if operation.took_s is None or operation.error:
                continue
            if operation.began_s >= record.start_s[1] + _WARM_UP_S and not any(
                _overlap(operation, window.begin_s, window.well_s + _AFTER_S)
                for window in self._windows
            ):
                yield operation, operation.took_s

    def _pause(self, record: RankRecord, operation: OperationRow) -> Pause:
        took_s = operation.took_s
        if took_s is None:
            took_s = record.last_s - operation.began_s
        usual_s = self._usual_s.get((record.rank, operation.text))
        return Pause(record.rank, operation.name, took_s, usual_s)

    def worst_in(self, window: _Window) -> Pause | None:
        """The operation of all ranks that a fault's window delayed the most."""
        return max(
            (
                self._pause(record, operation)
                for record in self._ranks.values()
                for operation in record.operations
                if _overlap(operation, window.begin_s, window.well_s)
            ),
            key=lambda pause: pause.extra_s,
            default=None,
        )

    def worst_calm(self) -> Pause | None:
        """The operation that took the most time more than usual away from faults."""
        return max(
            (
                self._pause(r, operation)
                for r in self._ranks.values()
                for operation, _ in self._calm(r)
            ),
            key=lambda pause: pause.extra_s,
            default=None,
        )


def _overlap(operation: OperationRow, a_s: float, b_s: float) -> bool:
    took_s = operation.took_s
    end_s = float("inf") if took_s is None else operation.began_s + took_s
    return operation.began_s <= b_s and end_s >= a_s


def make_report(script: Sequence[PlannedFault], records: Sequence[RankRecord]) -> Report:
    """Makes the report from the records; for a restarted rank, from its first record."""
    ranks: dict[int, RankRecord] = {}
    restarted = []
    for record in records:
        if ranks.setdefault(record.rank, record) is not record:
            restarted.append(record.rank)
    windows = _windows(script, ranks)
    operations = _Operations(ranks, windows)
    first_s = min((record.start_s[0] for record in ranks.values()), default=0.0)
    outcomes = []
    for window in windows:
        known_rank = window.fault.rank in ranks
        outcome = Outcome(window.fault, "not reached" if known_rank else "no record")
        outcomes.append(outcome)
        if not window.reached:
            continue
        outcome.at_s = window.begin_s - first_s
        known = [
            record.row_at(path, window.begin_s)
            for record, peer in _ends(window.fault, ranks)
            for path in _paths_of(window.fault, record, peer)
        ]
        if not any(row and row.state not in ("unused", "down") for row in known):
            outcome.state = "no connection"
            continue
        sign = _first_sign(window, ranks)
        outcome.chunks_retransmitted = _increase(
            lambda row: row.chunks_retransmitted, window, ranks, all_paths=True
        )
        # Each end counts the same connection.
        reconnects = _increase(lambda row: row.reconnects, window, ranks, all_paths=False)
        outcome.reconnects = -(-reconnects // 2)
        outcome.pause = operations.worst_in(window)
        if window.fault.kind == "rate":
            outcome.how = _limit_sign(window, ranks[window.fault.rank])
        traced: object = sign or outcome.how
        outcome.state = (
            "seen" if traced or outcome.chunks_retransmitted or outcome.reconnects else "not seen"
        )
        if sign:
            outcome.noticed_s, outcome.how = max(0.0, sign[0] - window.begin_s), sign[1]
    return Report(
        outcomes=outcomes,
        ranks=sorted(ranks),
        hosts=sorted({record.host for record in ranks.values()}),
        operations=sum(len(record.operations) for record in records),
        missed=sum(record.missed for record in records),
        failed=[
            f"rank {record.rank}: {operation.name}: {operation.error}"
            for record in records
            for operation in record.operations
            if operation.error
        ],
        noise=operations.worst_calm() if all(fault.rank in ranks for fault in script) else None,
        resolution_s=max((record.period_s for record in records), default=0.0),
        killed=[record.rank for record in records if record.end_s is None],
        restarted=sorted(set(restarted)),
    )
