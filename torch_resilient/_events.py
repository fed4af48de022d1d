"""What this process has decided or noticed, for people: the `events` of stats()."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Any

# Enough for hours of decisions; one is a few hundred bytes.
_KEPT = 256

_log = logging.getLogger("torch_resilient")
_lock = threading.Lock()
_events: collections.deque[dict[str, Any]] = collections.deque(maxlen=_KEPT)


def record(kind: str, text: str, /, **details: Any) -> dict[str, Any]:
    """Adds an event and logs its text at level INFO; returns it.

    `details` must fit JSON. Any thread.
    """
    event = {**details, "time_s": time.time(), "kind": kind, "text": text}
    with _lock:
        _events.append(event)
    _log.info("%s", text)
    return event


def recent() -> list[dict[str, Any]]:
    """The last events, oldest first."""
    with _lock:
        return list(_events)
