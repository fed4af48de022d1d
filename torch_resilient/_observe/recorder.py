"""Writes down how this process's paths and operations fare, if TORCH_RESILIENT_RECORD_DIR asks.

Each process writes one file, `rank<NNNNN>.<pid>.jsonl`. Every line is a dict with `kind`:

begin      `rank`, `host`, `pid`; `start_s`: two moments between which the engine started, from
           which rules of TORCH_RESILIENT_FAULTS count their seconds; `period_s`: between two looks
path       `time_s`, `peer`, `path_kind`, `path_index` and what stats() says of that path, whenever
           its state or a count changes, and every 0.1 s while bytes flow
operation  `id`, `began_s`, `took_s` (None: it had not ended), `text` (what it was, without its
           number), `name` (with it), `error`
missed     `operations`: the number that were overwritten before they could be read
step       `time_s`, `step`: what the program told faults.step()
end        `time_s`, `looks`, `longest_between_looks_s`: absent if the process was killed

Times are seconds since the epoch, ranks those of the default group. `torch-resilient chaos` reads
these files.
"""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from torch_resilient import _native
from torch_resilient._files import create_private
from torch_resilient._observe.snapshot import snapshot
from torch_resilient._reports.stats import PathKind, PathState, Record

VARIABLE = "TORCH_RESILIENT_RECORD_DIR"

# A pause that a user notices is ten times as long.
_PERIOD_S = 0.01
# The share of one processor. A look also takes the GIL: with hundreds of peers, looks are rarer.
_SHARE_MAX = 0.05
_FLOW_PERIOD_S = 0.1
# The engine remembers 2000 operations; this is often enough for 20 000 of them a second.
_OPERATIONS_PERIOD_S = 0.1


@dataclass(frozen=True, slots=True)
class PathRow(Record):
    """A row of kind "path": a path at one moment, with the fields of PathStats."""

    time_s: float
    peer: int
    path_kind: PathKind
    path_index: int
    state: PathState
    chunks_retransmitted: int
    reconnects: int
    times_suspect: int
    bytes_sent: int
    bytes_received: int
    round_trip_s: float
    goodput_bytes_per_s: float
    last_error: str

    def same_counts(self, before: PathRow) -> bool:
        """Whether only the flow of bytes has changed since, which is not written at once."""
        return (
            self.state == before.state
            and self.chunks_retransmitted == before.chunks_retransmitted
            and self.reconnects == before.reconnects
            and self.times_suspect == before.times_suspect
        )


@dataclass(frozen=True, slots=True)
class OperationRow(Record):
    """A row of kind "operation".

    Attributes:
        id: its number in the flight recorder.
        began_s: seconds since the epoch.
        took_s: seconds; None if it had not ended.
        text: the call, without its number.
        name: the call, with its number.
        error: why it failed, or an empty string.
    """

    id: int
    began_s: float
    took_s: float | None
    text: str
    name: str
    error: str


_OPERATION = re.compile(
    r"#(?P<id>\d+) (?P<at>\d\d:\d\d:\d\d\.\d{3}) group (?P<group>.*?) "
    r"(?P<what>(?:send to|recv from) \w+ tag \d+ \S+|collective (?P<number>\d+) .+?) "
    r"(?P<bytes>\d+) bytes: "
    r"(?:(?P<pending>pending)|(?:done in|failed after) (?P<took>[\d.]+) s)(?:: (?P<error>.*))?"
)
# Errors may have further lines: torch's hold stacks.
_FIRST_LINE = re.compile(r"^#\d+ .*", re.MULTILINE)


def _moment(at: str, now: datetime) -> float:
    """Seconds since the epoch of the time of day `at`, which is less than a day before `now`."""
    time_of_day = datetime.strptime(at, "%H:%M:%S.%f").time()
    # When summer time ends an hour comes twice: `now` knows which one it is.
    moment = datetime.combine(now.date(), time_of_day.replace(fold=now.fold))
    if moment > now + timedelta(minutes=1):
        moment -= timedelta(days=1)  # it began before midnight
    return moment.timestamp()


def parse_operation(line: str, now: datetime) -> OperationRow | None:
    """The operation in one line of torch_resilient.dump(); None if there is none.

    The dump has the time of day only; `now` is when it was made.
    """
    match = _OPERATION.fullmatch(line)
    if match is None:
        return None
    what, number = match["what"], match["number"]
    text = what if number is None else what.removeprefix(f"collective {number} ")
    where = (
        f" of group {match['group']}" if match["group"] != "0" else ""
    )  # torch's name of the default
    name = f"{text}{where}" if number is None else f"collective #{number} {text}{where}"
    return OperationRow(
        id=int(match["id"]),
        began_s=_moment(match["at"], now),
        took_s=None if match["pending"] else float(match["took"]),
        text=f"{text}{where}",
        name=name,
        error=match["error"] or "",
    )


class OperationLog:
    """Takes dumps, one after the other, and gives each operation once, when it has ended."""

    def __init__(self) -> None:
        self._done_to = 0  # all up to this have been given, or are lost
        self._given: set[int] = set()  # of those after it
        self.missed = 0

    def take(self, dump: str, now: datetime, last: bool = False) -> Iterator[OperationRow]:
        """The operations that have ended since the last call, in order of their beginnings.

        `last`: those that have not, too.
        """
        lines = _FIRST_LINE.findall(dump)
        if lines and int(lines[-1][1 : lines[-1].index(" ")]) < self._done_to:
            self._done_to, self._given = 0, set()  # a new engine counts from 1 again
        fresh = []
        for line in reversed(lines):
            # Cheap first: the newest dump repeats most of the one before.
            number = int(line[1 : line.index(" ")])
            if number <= self._done_to:
                break
            if number not in self._given:
                fresh.append((number, line))
        if not fresh:
            return
        fresh.reverse()
        oldest = int(dump[1 : dump.index(" ")])
        if oldest > self._done_to + 1:
            lost = [n for n in range(self._done_to + 1, oldest) if n not in self._given]
            self.missed += len(lost)
            self._done_to = oldest - 1
            self._given = {n for n in self._given if n >= oldest}
        for number, line in fresh:
            operation = parse_operation(line, now)
            if operation is None:
                self.missed += 1  # not ours to guess
            elif operation.took_s is None and not last:
                continue
            else:
                yield operation
            self._given.add(number)
        while self._done_to + 1 in self._given:
            self._done_to += 1
            self._given.remove(self._done_to)


class Recorder:
    """Looks and writes in a thread of its own, until close().

    Args:
        folder: is made if it is not there.
        rank: in the default group.
        start_s: two moments between which the engine started.

    Raises OSError if the file cannot be made.
    """

    def __init__(self, folder: str, rank: int, start_s: tuple[float, float]) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / f"rank{rank:05}.{os.getpid()}.jsonl"
        self._file: TextIO = os.fdopen(create_private(path), "w", encoding="utf-8")
        self._lock = threading.Lock()  # of the file
        self._stop = threading.Event()
        self._operations = OperationLog()
        self._seen: dict[tuple[int, PathKind, int], PathRow] = {}
        self._looks = 0
        self._longest_s = 0.0
        about = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self._write("begin", **about, start_s=start_s, period_s=_PERIOD_S)
        self._thread = threading.Thread(
            target=self._run, name="torch_resilient record", daemon=True
        )
        self._thread.start()

    def step(self, number: int) -> None:
        """The program begins step `number`."""
        self._write("step", time_s=time.time(), step=number)

    def close(self) -> None:
        """Writes the last and ends; before the engine does."""
        self._stop.set()
        self._thread.join()
        with self._lock:
            self._file.close()

    def _write(self, kind: str, /, **values: Any) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps({**values, "kind": kind}) + "\n")

    def _run(self) -> None:
        try:
            self._watch()
        except OSError as error:  # a full disk must not end the training
            import warnings

            warnings.warn(f"{VARIABLE}: the record ends here: {error}", stacklevel=1)

    def _watch(self) -> None:
        flushed = last = time.monotonic()
        pause_s = _PERIOD_S
        while not self._stop.wait(pause_s):
            now = time.monotonic()
            self._longest_s = max(self._longest_s, now - last)
            last = now
            cost_s = -time.thread_time()
            self._look()
            cost_s += time.thread_time()
            if now - flushed >= _OPERATIONS_PERIOD_S:
                self._write_operations(last=False)
                with self._lock:
                    self._file.flush()
                flushed = now
            pause_s = max(_PERIOD_S, cost_s / _SHARE_MAX)
        self._look()
        self._write_operations(last=True)
        self._write(
            "end",
            time_s=time.time(),
            looks=self._looks,
            longest_between_looks_s=self._longest_s,
        )

    def _look(self) -> None:
        self._looks += 1
        now = snapshot()
        for peer in now.peers:
            for path in peer.paths:
                row = PathRow(
                    time_s=now.time_s,
                    peer=peer.rank,
                    path_kind=path.kind,
                    path_index=path.index,
                    state=path.state,
                    chunks_retransmitted=path.chunks_retransmitted,
                    reconnects=path.reconnects,
                    times_suspect=path.times_suspect,
                    bytes_sent=path.bytes_sent,
                    bytes_received=path.bytes_received,
                    round_trip_s=path.round_trip_s,
                    goodput_bytes_per_s=path.goodput_bytes_per_s,
                    last_error=path.last_error,
                )
                key = (peer.rank, *path.key)
                before = self._seen.get(key)
                if before is not None and (
                    replace(row, time_s=before.time_s) == before
                    or (row.time_s - before.time_s < _FLOW_PERIOD_S and row.same_counts(before))
                ):
                    continue
                self._seen[key] = row
                self._write("path", **row.to_dict())

    def _write_operations(self, last: bool) -> None:
        missed = self._operations.missed
        for operation in self._operations.take(_native.load().dump(), datetime.now(), last):
            self._write("operation", **operation.to_dict())
        if self._operations.missed > missed:
            self._write("missed", operations=self._operations.missed - missed)
