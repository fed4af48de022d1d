"""Recent decisions and changes of this process, for people: the `events` of stats()."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

# Enough for hours of decisions; one is a few hundred bytes.
_KEPT = 256

_log = logging.getLogger("torch_resilient")
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that was decided or noticed in this process.

    Attributes:
        time_s: when, in seconds since the epoch.
        kind: "plan", "link_slower" and so on.
        text: a sentence for people.
        details: numbers and names that depend on the kind, fit for JSON.
    """

    time_s: float
    kind: str
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One flat dict, fit for JSON; the event's own fields win over details of the same name."""
        return {**self.details, "time_s": self.time_s, "kind": self.kind, "text": self.text}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict(). Raises KeyError for a missing field."""
        own = ("time_s", "kind", "text")
        details = {key: value for key, value in values.items() if key not in own}
        return cls(values["time_s"], values["kind"], values["text"], details)


_events: collections.deque[Event] = collections.deque(maxlen=_KEPT)


def record(kind: str, text: str, /, **details: Any) -> Event:
    """Adds an event and logs its text at level INFO; returns it.

    `details` must fit JSON. Any thread.
    """
    event = Event(time.time(), kind, text, details)
    with _lock:
        _events.append(event)
    _log.info("%s", text)
    return event


def recent() -> tuple[Event, ...]:
    """The last events, oldest first."""
    with _lock:
        return tuple(_events)
