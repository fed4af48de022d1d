"""Settings of a link, and its counters: plain values."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

# The minimum default queue: a few bursts of TCP. The default is the data in flight during one round
# trip, as in a router of the Internet.
QUEUE_BYTES_MIN = 512 * 1024


@dataclass(frozen=True)
class LinkSettings:
    """One direction between two NICs. Bytes are those of IP packets, headers included."""

    delay_s: float = 0.0
    """One way. Packets on their way when it changes get the new one; their order stays."""
    jitter_s: float = 0.0
    """Added to the delay, uniform between 0 and this; the order stays."""
    rate_bytes_per_s: float | None = None
    """None: as fast as the machine can."""
    queue_bytes: float | None = None
    """In front of the rate; more is dropped. None: one round trip's worth, at least 512 KiB."""
    udp_rate_bytes_per_s: float | None = None
    """A policer drops UDP beyond it, after 32 KiB at once. None: UDP is like the rest."""
    drop: float = 0.0
    """Share of packets dropped at random, 0 to 1. Dropped packets still use the link's time."""
    burst_packets: float | None = None
    """Mean length of bursts of dropped packets (Gilbert's model); None: independent drops."""
    duplicate: float = 0.0
    """Share of packets that arrive twice."""
    corrupt: float = 0.0
    """Share of packets with one bit wrong, which the receiver's checksum shows."""
    reorder: float = 0.0
    """Share of packets that arrive reorder_delay_s late, after packets that were sent later."""
    reorder_delay_s: float = 0.001

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{field.name}: expected a number, got {value!r}")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name}: expected a finite number >= 0, got {value!r}")
        for name in ("drop", "duplicate", "corrupt", "reorder"):
            if getattr(self, name) > 1:
                raise ValueError(
                    f"{name}: expected a share of packets, 0 to 1, got {getattr(self, name)!r}"
                )
        for name in ("rate_bytes_per_s", "queue_bytes", "udp_rate_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value!r}; None for no limit")
        if self.burst_packets is not None:
            if self.burst_packets < 1:
                raise ValueError(f"burst_packets: expected at least 1, got {self.burst_packets!r}")
            # Between bursts at least one packet arrives.
            most = self.burst_packets / (self.burst_packets + 1)
            if most < self.drop < 1:
                raise ValueError(
                    f"drop: {self.drop!r} is too much for bursts of {self.burst_packets!r} packets "
                    f"with one between them; at most {most:.3g}"
                )

    def queue_limit_bytes(self) -> int:
        """The limit of the queue, with the default filled in."""
        if self.queue_bytes is not None:
            return int(self.queue_bytes)
        return max(QUEUE_BYTES_MIN, int((self.rate_bytes_per_s or 0) * 2 * self.delay_s))


@dataclass(frozen=True)
class Amount:
    """Packets as on the wire, and their IP bytes."""

    packets: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.packets + other.packets, self.bytes + other.bytes)


@dataclass(frozen=True)
class Counters:
    """Counts of the packets of one or more directions since the lab began."""

    entered: Amount = Amount()
    delivered: Amount = Amount()
    """With duplicates."""
    dropped: Amount = Amount()
    """By chance."""
    queue_full: Amount = Amount()
    outage: Amount = Amount()
    overrun: Amount = Amount()
    """Dropped since more than 256 MiB were on their way: more than the lab holds."""
    refused: Amount = Amount()
    """By the receiving NIC."""
    duplicated: Amount = Amount()
    corrupted: Amount = Amount()
    reordered: Amount = Amount()
    in_flight_bytes: int = 0

    def __add__(self, other: Counters) -> Counters:
        sums: dict[str, Any] = {
            field.name: getattr(self, field.name) + getattr(other, field.name)
            for field in dataclasses.fields(Counters)
        }
        return Counters(**sums)

    @staticmethod
    def parse(line: str) -> Counters:
        """From the carrier's numbers."""
        numbers = [int(word) for word in line.split()]
        names = [field.name for field in dataclasses.fields(Counters)][:-1]
        pairs = zip(numbers[:-1:2], numbers[1:-1:2], strict=True)
        amounts = zip(names, (Amount(*pair) for pair in pairs), strict=True)
        values: dict[str, Any] = dict(amounts)
        return Counters(**values, in_flight_bytes=numbers[-1])
