"""Delays of a pipeline's links, from the acknowledgements that the backend sees anyway."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

from torch_resilient._reports.stats import PathKind, PeerStats

# A typical round trip is the median of the samples of the last updates, an iteration or two: as
# many updates as it takes to have this number of samples.
_ENOUGH = 16
# Enough messages for a median, few enough to follow a change within an iteration or two.
_MESSAGES = 16


class RoundTrips:
    """The round trips to one neighbour, from snapshots of stats()."""

    def __init__(self) -> None:
        self._seen: dict[tuple[PathKind, int], int] = {}  # by path
        self._recent: deque[list[float]] = deque()  # by update, oldest first

    def update(self, peer: PeerStats) -> list[float]:
        """Takes one entry of stats().peers; returns the samples that are new, in seconds.

        A snapshot holds the last 32 of each path: those of a longer time between two snapshots are
        lost, which a median does not mind.
        """
        new: list[float] = []
        for path in peer.paths:
            count = path.round_trips
            seen = self._seen.get(path.key, 0)
            if count < seen:  # another connection with this index
                seen = 0
            self._seen[path.key] = count
            if count > seen:
                new += path.round_trips_s[-(count - seen) :]
        if new:
            self._recent.append(new)
            while sum(map(len, self._recent)) - len(self._recent[0]) >= _ENOUGH:
                self._recent.popleft()
        return new

    def forget_all_but(self, count: int) -> None:
        """Keeps the last `count` samples: those before were of another delay."""
        every = list(itertools.chain(*self._recent))
        kept = every[max(len(every) - count, 0) :]
        self._recent = deque([kept] if kept else [])

    @property
    def min_s(self) -> float:
        """The least of the last samples; NaN before the first."""
        return min(itertools.chain(*self._recent), default=math.nan)

    @property
    def typical_s(self) -> float:
        """The median of the last samples; NaN before the first."""
        return statistics.median(itertools.chain(*self._recent)) if self._recent else math.nan


class Transfers:
    """How much longer than a round trip the messages to one neighbour take: bytes need time, too.

    Only of messages that the backend asks an acknowledgement for, which are the large ones.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._excess_s: deque[float] = deque(maxlen=_MESSAGES)

    def update(self, peer: PeerStats, round_trip_s: float) -> None:
        """Takes one entry of stats().peers, and the typical round trip of that time."""
        new = min(peer.deliveries - self._seen, len(peer.deliveries_s))
        self._seen = peer.deliveries
        if new > 0 and not math.isnan(round_trip_s):
            self._excess_s += [each - round_trip_s for each in peer.deliveries_s[-new:]]

    def forget(self, peer: PeerStats) -> None:
        """The link has changed: samples from before this entry of stats().peers do not go with the
        round trips of now."""
        self._seen = peer.deliveries
        self._excess_s.clear()

    @property
    def typical_s(self) -> float:
        """The median over the last messages; 0 before the first."""
        return max(statistics.median(self._excess_s), 0.0) if self._excess_s else 0.0
