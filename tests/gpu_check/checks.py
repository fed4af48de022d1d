"""Checks: what a rank reports, and what the ranks together make of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from .device import Device

# A text that is longer fills the screen and not the reader's mind.
_REASON_MAX = 600


@dataclass(frozen=True)
class Result:
    """The result of one check, on one rank or on all."""

    name: str
    verdict: str  # "PASS", "FAIL" or "SKIP"
    reason: str = ""

    def line(self, section: str) -> str:
        """The line of output."""
        return f"{self.verdict} {section}: {self.name}" + (
            f": {self.reason}" if self.reason else ""
        )


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    cells: dict[str, float | str]


class _Skipped(Exception):
    """Ends a check that the device cannot do."""


@dataclass
class Check:
    """A check that is running."""

    faults: list[str] = field(default_factory=list)
    remark: str = ""

    def require(self, good: bool, fault: str) -> None:
        """Makes the check fail if not `good`. It goes on, because the other ranks do, too."""
        if not good:
            self.faults.append(fault)

    def skip_if(self, reason: str) -> None:
        """Ends the check as skipped if there is a `reason`, which must be one on all ranks."""
        if reason:
            raise _Skipped(reason)


class Rank:
    """A rank of a section.

    Attributes:
        number: its rank in the default group.
        device: the device under test.
    """

    def __init__(self, number: int, device: Device, report: Callable[[Result | Row], None]) -> None:
        self.number = number
        self.device = device
        self._report = report

    @property
    def peer(self) -> int:
        """The other rank of two."""
        return 1 - self.number

    def row(self, cells: dict[str, float | str]) -> None:
        """Adds a row to the table."""
        self._report(Row(cells))

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """Reports the body as one check, which has the same name on all ranks.

        An exception of the body fails the check and does not leave it.
        """
        check = Check()
        try:
            yield check
        except _Skipped as skipped:
            result = Result(name, "SKIP", str(skipped))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = Result(name, "FAIL", "; ".join([*check.faults, text])[:_REASON_MAX])
        else:
            verdict = "FAIL" if check.faults else "PASS"
            reason = "; ".join(check.faults) or check.remark
            result = Result(name, verdict, reason[:_REASON_MAX])
        self._report(result)


def together(results: Sequence[Result | None]) -> Result:
    """The result of all ranks from that of each; None: the rank did not come so far."""
    known = [result for result in results if result is not None]
    name = known[0].name
    faults = [
        f"rank {i}: {result.reason if result else 'it did not come so far'}"
        for i, result in enumerate(results)
        if result is None or result.verdict == "FAIL"
    ]
    if faults:
        return Result(name, "FAIL", " | ".join(faults))
    skipped = [result for result in known if result.verdict == "SKIP"]
    return (skipped or known)[0]
