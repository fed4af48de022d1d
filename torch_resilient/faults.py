"""Faults on purpose: a slow, lossy or breaking network on one machine.

Each fault acts on the paths of the process that injects it, on real connections::

    from torch_resilient import faults

    with faults.delay(0.06, peer=2):  # 60 ms more on the way to rank 2
        train_one_step()

    faults.cut(peer=1, path=0)  # break one connection now

Ranks are those of the default group. The option `faults` (TORCH_RESILIENT_FAULTS) sets
rules for all ranks before the start, as text, separated by `;`. A rule has a kind with its own keys
and optional conditions, which must all hold:

    delay  ms, jitter_ms                bytes leave later; jitter is uniform, +-
    rate   bytes_per_s                  bytes leave no faster
    stall                               nothing is written
    drop                                nothing is written or read
    cut    after_bytes, times, every_s  the connection breaks; it may be made again

    where: rank (who applies it), peer, path; without them, all
    when:  from_s or at_s, until_s or for_s, counted from the start of the engine;
           from_step, until_step, at_step, as step() counts
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import final

from torch_resilient import _native
from torch_resilient._observe import observers

__all__ = ["Fault", "cut", "delay", "drop", "inject", "limit", "stall", "step"]


@final
class Fault:
    """A fault in force, until clear(); as a context manager, until the end of the block."""

    __slots__ = ("_id", "rule")

    def __init__(self, rule: str, fault: int) -> None:
        self.rule = rule
        self._id: int | None = fault

    def clear(self) -> None:
        """Ends the fault; a second call does nothing. Broken connections are not repaired."""
        if self._id is not None:
            _native.load().remove_fault(self._id)
            self._id = None

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def __repr__(self) -> str:
        return f"Fault({self.rule!r}{'' if self._id is not None else ', cleared'})"


def inject(rule: str) -> Fault:
    """Puts one rule into force, such as `"delay peer=2 ms=60 for_s=10"`.

    Raises ValueError, with what is allowed, if the rule cannot be read.
    """
    return Fault(rule, _native.load().add_fault(rule))


def step(number: int) -> None:
    """Tells rules with a step condition that training step `number` begins."""
    _native.load().set_fault_step(number)
    observers.step(number)


def _rule(
    kind: str,
    rank: int | None,
    peer: int | None,
    path: int | None,
    **values: float | None,
) -> str:
    words = [kind]
    places = {"rank": rank, "peer": peer, "path": path}
    for key, value in {**places, **values}.items():
        if value is None:
            continue
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"{kind}: {key}={value}: expected a finite number, 0 or more")
        # All digits, no exponent for whole numbers: exact, and readable in messages.
        whole = float(value).is_integer() and abs(value) < 2**53
        words.append(f"{key}={int(value) if whole else repr(float(value))}")
    return " ".join(words)


def delay(
    delay_s: float,
    *,
    jitter_s: float = 0.0,
    peer: int | None = None,
    path: int | None = None,
    rank: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Everything sent leaves `delay_s` seconds later, give or take up to `jitter_s`.

    `peer` (rank) and `path` (index of the connection, from 0) narrow it down, None means all; with
    `rank` the rule counts only if this process has that rank. It lasts `for_s` seconds, None: until
    cleared. Delays add up. Raises ValueError for a value that is out of range.
    """
    return inject(
        _rule(
            "delay",
            rank,
            peer,
            path,
            ms=delay_s * 1e3,
            jitter_ms=jitter_s * 1e3 if jitter_s else None,
            for_s=for_s,
        )
    )


def limit(
    bytes_per_s: float,
    *,
    peer: int | None = None,
    path: int | None = None,
    rank: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Each path sends no faster than `bytes_per_s`; the lowest of several limits counts.

    The other arguments and errors are those of delay().
    """
    return inject(_rule("rate", rank, peer, path, bytes_per_s=bytes_per_s, for_s=for_s))


def stall(
    *,
    peer: int | None = None,
    path: int | None = None,
    rank: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Nothing is sent, but connections stay open and are still read.

    The arguments and errors are those of delay().
    """
    return inject(_rule("stall", rank, peer, path, for_s=for_s))


def drop(
    *,
    peer: int | None = None,
    path: int | None = None,
    rank: int | None = None,
    for_s: float | None = None,
) -> Fault:
    """Simulates a failed NIC: nothing is sent or read, and no connection breaks.

    The arguments and errors are those of delay().
    """
    return inject(_rule("drop", rank, peer, path, for_s=for_s))


def cut(
    *,
    peer: int | None = None,
    path: int | None = None,
    rank: int | None = None,
    after_bytes: int | None = None,
    times: int | None = None,
) -> Fault:
    """Breaks connections; the engine opens them again.

    By default it breaks them once, immediately. With `after_bytes`, it breaks each connection after
    that many sent bytes, possibly in the middle of a message, at most `times` times for each path
    (None: always). Bytes sent before the call do not count. The other arguments and errors are
    those of delay().
    """
    if times is not None and after_bytes is None:
        raise ValueError("cut: times goes with after_bytes")
    return inject(_rule("cut", rank, peer, path, after_bytes=after_bytes, times=times))
