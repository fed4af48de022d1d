"""When a rank must send exactly: counts of what was sent and dropped, step by step."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch_resilient.smart.gradient_drop import ErrorMemory
from torch_resilient.smart.options import SmartOptions

_log = logging.getLogger("torch_resilient")


@dataclass(frozen=True)
class SmartStatistics:
    """The counts of one rank's SmartState so far; `error_norm` and so on are of this moment."""

    steps: int
    exact_steps: int  # of these, those in which this rank had to be exact throughout
    messages: int  # sent towards the rank that reduces them, other than within a site
    bytes_sent: int  # of these messages
    bytes_tolerant: int  # of those sent with a tolerance
    bytes_zero_filled: int  # of those, dropped
    mean_drop: float  # bytes zero-filled / bytes tolerant, over the last drop_window_steps
    error_elements: int  # in the error memory
    error_norm: float  # its Euclidean norm
    exact_reason: str  # why the state is exact for good; "": it is not


class Guard:
    """Decides for one rank whether it may tolerate drops, from what was dropped so far.

    A step ends when a parameter comes that was reduced in it already.

    Attributes:
        never: why nothing can be dropped here, whatever the program wants; "": it can.
        exact_next: the next step is to be exact.

    Thread: that of the buckets; the program's between two steps.
    """

    def __init__(self, options: SmartOptions, rank: int) -> None:
        self._options, self._rank = options, rank
        self.never = ""
        self.exact_next = False
        self._exact_reason = ""
        self._steps = self._exact_steps = self._messages = 0
        self._bytes_sent = self._bytes_tolerant = self._bytes_dropped = 0
        self._step_dropped = self._step_tolerant = 0
        self._step_exact = False
        self._window: deque[tuple[int, int]] = deque(maxlen=options.drop_window_steps)
        self._seen: set[str] = set()  # keys of this step
        self._said: set[str] = set()

    @property
    def exact(self) -> bool:
        """Whether all messages are exact from now on."""
        return bool(self.never or self._exact_reason)

    @property
    def exact_now(self) -> bool:
        """Whether all messages of this step are exact."""
        return self.exact or self._step_exact

    def set_exact(self, value: bool) -> None:
        """Sets what the program asks for. Allowing drops again does not end `never`."""
        self._exact_reason = "the program asked for it" if value else ""

    def make_exact(self, reason: str) -> None:
        """Ends all tolerance, unless it has ended already."""
        if not self.exact:
            self._exact_reason = reason
            self.say_once(f"all gradients are exact from now on: {reason}")

    def say_once(self, text: str) -> None:
        """Warns in the log, the first time only."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("rank %d: SmartState: %s", self._rank, text)

    def begins_step(self, keys: Collection[str]) -> bool:
        """Takes the parameters of the next bucket; returns whether it is the first of a step."""
        if self._steps and self._seen.isdisjoint(keys):
            self._seen.update(keys)
            return False
        if self._steps:
            self._exact_steps += 1 if self._step_exact else 0
            self._judge()
        self._seen = set(keys)
        self._steps += 1
        every = self._options.exact_every
        due = bool(every) and self._steps % every == 0
        self._step_exact = self.exact or self.exact_next or due
        self.exact_next = False
        return True

    def on_sent(self, messages: int, sent_bytes: int, tolerant: bool) -> None:
        """Counts messages towards the ranks that reduce them."""
        self._messages += messages
        self._bytes_sent += sent_bytes
        if tolerant:
            self._bytes_tolerant += sent_bytes
            self._step_tolerant += sent_bytes

    def on_dropped(self, dropped_bytes: int) -> None:
        """Counts what a receiver has zero-filled."""
        self._bytes_dropped += dropped_bytes
        self._step_dropped += dropped_bytes

    def _judge(self) -> None:
        """Notes the drops of the step that has ended; too many end all tolerance."""
        self._window.append((self._step_dropped, self._step_tolerant))
        self._step_dropped = self._step_tolerant = 0
        tolerant = sum(tolerant for _, tolerant in self._window)
        dropped = sum(dropped for dropped, _ in self._window)
        limit = self._options.max_mean_drop
        if (
            len(self._window) == self._window.maxlen
            and dropped > limit * tolerant
            and not self.exact
        ):
            self.make_exact(
                f"{dropped / tolerant:.1%} of the bytes were dropped in the last "
                f"{len(self._window)} steps, more than max_mean_drop={limit:.1%}"
            )

    def statistics(self, memory: ErrorMemory) -> SmartStatistics:
        """All counts so far, with those of the rank's error memory."""
        tolerant = self._step_tolerant + sum(tolerant for _, tolerant in self._window)
        dropped = self._step_dropped + sum(dropped for dropped, _ in self._window)
        return SmartStatistics(
            steps=self._steps,
            exact_steps=self._exact_steps + (1 if self._step_exact else 0),
            messages=self._messages,
            bytes_sent=self._bytes_sent,
            bytes_tolerant=self._bytes_tolerant,
            bytes_zero_filled=self._bytes_dropped,
            mean_drop=dropped / tolerant if tolerant else 0.0,
            error_elements=memory.elements(),
            error_norm=memory.norm(),
            exact_reason=self.never or self._exact_reason,
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the data for a checkpoint."""
        return {
            "steps": self._steps,
            "window": list(self._window),
            "unfinished_step": (self._step_dropped, self._step_tolerant),
            "exact_reason": self._exact_reason,
            "exact_next": self.exact_next,
        }

    def load_state_dict(self, state: Mapping[str, Any], keys: Collection[str]) -> None:
        """Goes on where state_dict() was taken; `keys` are those of all parameters."""
        self._steps = state["steps"]
        self._window = deque(state["window"], maxlen=self._options.drop_window_steps)
        self._step_dropped, self._step_tolerant = state["unfinished_step"]
        # All parameters belong to the step before, if there was one.
        self._seen = set(keys) if self._steps else set()
        self.exact_next = state["exact_next"]
        if state["exact_reason"]:
            self._exact_reason = state["exact_reason"]
            self.say_once(f"all gradients are exact from now on: {self._exact_reason}")
