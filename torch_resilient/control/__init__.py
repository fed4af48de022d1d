"""Reacts to slow links: finds them, and re-plans who does what.

`DelayDetector` says which link has changed; `ScheduleAdaptiveZB` re-plans a pipeline while it runs;
`propose_layout` says which ranks should change places so that a slow link does the least harm.
`torch_resilient.control.migrate`, which is not imported here because it needs torch, carries that
out.
"""

from typing import TYPE_CHECKING, Any

from torch_resilient.control.detector import DelayChange, DelayDetector
from torch_resilient.control.layout import (
    Layout,
    LayoutCosts,
    LayoutProposal,
    Place,
    Prediction,
    predict,
    propose_layout,
)

if TYPE_CHECKING:
    from torch_resilient.control.adaptive import ScheduleAdaptiveZB

__all__ = [
    "DelayChange",
    "DelayDetector",
    "Layout",
    "LayoutCosts",
    "LayoutProposal",
    "Place",
    "Prediction",
    "ScheduleAdaptiveZB",
    "predict",
    "propose_layout",
]

if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        """What needs torch, on first use."""
        if name == "ScheduleAdaptiveZB":
            from torch_resilient.control.adaptive import ScheduleAdaptiveZB

            return ScheduleAdaptiveZB
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
