"""Scripts of events: what happens to a lab's networks when.

One event a line (or between semicolons); `#` begins a comment:

    2s    eth0 down blackhole          # kinds: blackhole, carrier, admin
    2.5s  eth0 up
    3s    eth1 down carrier a          # only the NIC of host a
    4s    eth1 up a
    5s    wan set delay=40ms drop=1% rate=100mbit
    6s    wan a->b down                # one direction, as a black hole
    7s    wan a,b<->c,d set rate=none
    8s    eth0 flap blackhole 200ms 38s     # down and up every 200 ms, until 38 s; then up
    9s    a freeze                     # a host, if it is a guest of a verbs lab; also thaw, kill

Times count from the start of the script. Every number has a unit: s, ms, us; kbit, mbit, gbit
(bit/s) or kBps, MBps, GBps (bytes/s); kB, MB, GB, KiB, MiB; only shares are numbers or have a %.
`none` stands for no limit.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch_resilient.testing.settings import LinkSettings


class ScriptedNetwork(Protocol):
    """The operations of scripts on a network; `lab.Network` implements them."""

    def set(self, *, direction: str | None, **settings: Any) -> None: ...

    def settings(self, direction: str) -> LinkSettings: ...

    def down(self, kind: str, *, end: str | None, direction: str | None) -> None: ...

    def up(self, *, end: str | None, direction: str | None) -> None: ...

    def address(self, host: str) -> str: ...


class ScriptedHost(Protocol):
    """The operations of scripts on a host; `guest.Guest` implements them."""

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def kill(self) -> None: ...


class Units(NamedTuple):
    """The units of one kind of quantity with their factors, and the text of an error after
    "expected"."""

    factors: Mapping[str, float]
    expected: str


TIME = Units({"s": 1.0, "ms": 1e-3, "us": 1e-6}, "a time with its unit (s, ms or us), such as 20ms")
RATE = Units(
    {
        "bit": 1 / 8,
        "kbit": 1e3 / 8,
        "mbit": 1e6 / 8,
        "gbit": 1e9 / 8,
        "Bps": 1.0,
        "kBps": 1e3,
        "MBps": 1e6,
        "GBps": 1e9,
    },
    "a rate with its unit (kbit, mbit, gbit, kBps, MBps or GBps), such as 100mbit",
)
SIZE = Units(
    {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024.0, "MiB": 1024.0**2},
    "a size with its unit (B, kB, MB, GB, KiB or MiB), such as 512KiB",
)
SHARE = Units({"": 1.0, "%": 0.01}, "a share of packets, such as 0.5%")
COUNT = Units({"": 1.0}, "a number, such as 10")
# Name in a script -> (field of LinkSettings, its units, whether "none" is a value).
_FIELDS: dict[str, tuple[str, Units, bool]] = {
    "delay": ("delay_s", TIME, False),
    "jitter": ("jitter_s", TIME, False),
    "rate": ("rate_bytes_per_s", RATE, True),
    "queue": ("queue_bytes", SIZE, True),
    "udp-rate": ("udp_rate_bytes_per_s", RATE, True),
    "drop": ("drop", SHARE, False),
    "burst": ("burst_packets", COUNT, True),
    "duplicate": ("duplicate", SHARE, False),
    "corrupt": ("corrupt", SHARE, False),
    "reorder": ("reorder", SHARE, False),
    "reorder-delay": ("reorder_delay_s", TIME, False),
}
_KINDS = ("blackhole", "carrier", "admin")


class ScriptError(ValueError):
    """A script that cannot be understood; names the line and what was expected."""


@dataclass(frozen=True)
class Event:
    """Something to do at a time."""

    at_s: float
    text: str
    do: Callable[[], object]


def parse_quantity(text: str, units: Units) -> float:
    """`"40ms"` with TIME is 0.04. Raises ValueError, also where the unit is missing."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([A-Za-z%]*)", text)
    if match is None or match[2] not in units.factors:
        raise ValueError(f"{text!r}: expected {units.expected}")
    return float(match[1]) * units.factors[match[2]]


def parse_rate(text: str) -> float:
    """Bytes per second from `1gbit` and the like. Raises ValueError."""
    return parse_quantity(text, RATE)


def parse_settings(words: Sequence[str]) -> dict[str, float | None]:
    """Fields of LinkSettings from `delay=40ms` and so on. Raises ValueError."""
    fields: dict[str, float | None] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or name not in _FIELDS:
            raise ValueError(f"{word!r}: expected one of {', '.join(f'{n}=' for n in _FIELDS)}")
        field, units, may_be_none = _FIELDS[name]
        if value == "none" and may_be_none:
            fields[field] = None
        else:
            try:
                fields[field] = parse_quantity(value, units)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return fields


def parse_script(
    text: str,
    networks: Mapping[str, ScriptedNetwork],
    hosts: Mapping[str, ScriptedHost] = MappingProxyType({}),
) -> list[Event]:
    """Events of a script, in the order of their times. Raises ScriptError."""
    events: list[Event] = []
    for number, line in enumerate(text.splitlines(), start=1):
        for part in line.partition("#")[0].split(";"):
            words = part.replace(":", " ", 1).split()
            if not words:
                continue
            try:
                events += _events(words, networks, hosts)
            except (ValueError, LookupError, TypeError) as error:
                problem = error.args[0] if error.args else error
                raise ScriptError(f"line {number}, {part.strip()!r}: {problem}") from None
    return sorted(events, key=lambda event: event.at_s)


def _events(
    words: list[str],
    networks: Mapping[str, ScriptedNetwork],
    hosts: Mapping[str, ScriptedHost],
) -> list[Event]:
    if len(words) < 3:
        raise ValueError("expected TIME NETWORK ACTION")
    at_s = parse_quantity(words[0], TIME)
    if (host := hosts.get(words[1])) is not None:
        return [Event(at_s, " ".join(words[1:]), _host_action(host, words[2:]))]
    network = networks.get(words[1])
    if network is None:
        raise ValueError(f"no network {words[1]}; there are {', '.join(networks) or 'none'}")
    rest = words[2:]
    direction = rest.pop(0) if "->" in rest[0] else None
    if direction is not None:
        network.settings(direction)  # raises if there is no such direction
    if not rest:
        raise ValueError("expected an action after the direction: set, down, up or flap")
    action, *arguments = rest
    text = " ".join(words[1:])
    if action == "set":
        fields: dict[str, Any] = parse_settings(arguments)
        if not fields:
            raise ValueError("set: expected settings such as delay=40ms")
        LinkSettings(**fields)  # reports bad values now, not during the run
        return [Event(at_s, text, lambda: network.set(direction=direction, **fields))]
    if action in ("down", "up"):
        kind = arguments.pop(0) if action == "down" and arguments else "blackhole"
        down, up = _outage(network, kind, direction, arguments)
        return [Event(at_s, text, down if action == "down" else up)]
    if action == "flap":
        if len(arguments) < 3:
            raise ValueError("flap: expected KIND PERIOD END_TIME")
        kind, period, end, *others = arguments
        period_s, end_s = parse_quantity(period, TIME), parse_quantity(end, TIME)
        if period_s < 1e-3 or end_s <= at_s:
            raise ValueError("flap: expected a period of at least 1ms and an end after its start")
        down, up = _outage(network, kind, direction, others)
        events = []
        count = 0
        while at_s + count * period_s < end_s:
            events.append(Event(at_s + count * period_s, f"{text} #{count}", (down, up)[count % 2]))
            count += 1
        return [*events, Event(end_s, f"{text} ends", up)]
    raise ValueError(f"no action {action}; there are set, down, up, flap")


def _host_action(host: ScriptedHost, words: list[str]) -> Callable[[], object]:
    actions = {"freeze": host.freeze, "thaw": host.thaw, "kill": host.kill}
    if len(words) != 1 or words[0] not in actions:
        raise ValueError(f"{' '.join(words)!r}: expected one of {', '.join(actions)}")
    return actions[words[0]]


def _outage(
    network: ScriptedNetwork, kind: str, direction: str | None, arguments: list[str]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(what begins it, what ends it)."""
    if kind not in _KINDS:
        raise ValueError(f"{kind!r}: expected one of {', '.join(_KINDS)}")
    end = arguments.pop(0) if arguments else None
    if arguments:
        raise ValueError(f"{' '.join(arguments)!r}: expected nothing more")
    if direction is not None and (kind != "blackhole" or end is not None):
        raise ValueError("only a black hole has a direction, and then no host")
    if end is not None:
        network.address(end)
    return (
        lambda: network.down(kind, end=end, direction=direction),
        lambda: network.up(end=end, direction=direction),
    )


class Player:
    """Performs events at their times in its own thread. Made by NetworkLab.play()."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = sorted(events, key=lambda event: event.at_s)
        self._error: BaseException | None = None
        self._cancelled = threading.Event()
        self.done: list[tuple[float, str]] = []
        """Completed events: seconds since the start, and the event's text."""
        self._thread = threading.Thread(target=self._play, name="lab-script", daemon=True)
        self._thread.start()

    def _play(self) -> None:
        start = time.monotonic()
        try:
            for event in self._events:
                if self._cancelled.wait(max(0.0, start + event.at_s - time.monotonic())):
                    return
                self.done.append((time.monotonic() - start, event.text))
                event.do()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the last event; raises the exception of a failed event, or TimeoutError."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the script is not over after {timeout} s")
        self.check()

    def check(self) -> None:
        """Raises the exception of the event that failed, if any."""
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stops after the current event, if any."""
        self._cancelled.set()
        if self._thread is not threading.current_thread():  # an event may end the lab
            self._thread.join()
