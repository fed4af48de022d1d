"""Starts what watches this process, if its environment asks: metrics, records. Else nothing."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch_resilient import _process_end

if TYPE_CHECKING:
    from torch_resilient._observe.endpoint import Endpoint
    from torch_resilient._observe.recorder import Recorder

# The names are repeated here to avoid importing a module that is not used; a test compares them.
_METRICS = "TORCH_RESILIENT_METRICS"
_RECORD = "TORCH_RESILIENT_RECORD_DIR"

# The process that the watchers below belong to: threads do not survive a fork.
_pid = 0
_endpoint: Endpoint | None = None
_recorder: Recorder | None = None


def asked_for() -> bool:
    """Whether the environment asks for anything."""
    return bool(os.environ.get(_METRICS) or os.environ.get(_RECORD))


def check() -> None:
    """Raises ValueError, with what is expected, if a variable cannot be understood."""
    where = os.environ.get(_METRICS, "")
    if where and "/" not in where:
        from torch_resilient._observe.endpoint import parse_tcp

        parse_tcp(where)


def begin(rank: int, start_s: tuple[float, float]) -> None:
    """Called when a group has been made; what cannot be started becomes a warning.

    `rank` is that of the default group; `start_s` are two moments between which the first group,
    hence the engine, was made.

    Raises ValueError for a value that cannot be used.
    """
    global _pid, _endpoint, _recorder
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    _endpoint = _recorder = None  # those of the parent process, if this is a fork
    if where := os.environ.get(_METRICS, ""):
        from torch_resilient._observe.endpoint import Endpoint

        local_rank = os.environ.get("LOCAL_RANK", "0")
        local = int(local_rank) if local_rank.isdecimal() else 0
        _endpoint = _started(f"{_METRICS}={where}", lambda: Endpoint(where, rank, local))
    if folder := os.environ.get(_RECORD, ""):
        from torch_resilient._observe.recorder import Recorder

        _recorder = _started(f"{_RECORD}={folder}", lambda: Recorder(folder, rank, start_s))
    # After the engine's, so that it runs before it.
    _process_end.run_at_end(_end, _process_end.OBSERVERS_ORDER)


def _started(what: str, start: Callable[[], Any]) -> Any:
    try:
        return start()
    except OSError as error:
        warnings.warn(f"{what}: {error}; the job goes on without it", stacklevel=4)
        return None


def step(number: int) -> None:
    """The program begins training step `number`."""
    if _recorder is not None and _pid == os.getpid():
        _recorder.step(number)


def _end() -> None:
    global _endpoint, _recorder
    ending = (_endpoint, _recorder)
    _endpoint = _recorder = None
    for watcher in ending:
        if watcher is not None:
            watcher.close()
