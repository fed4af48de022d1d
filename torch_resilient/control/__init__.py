"""Reacts to slow links: finds them, and decides who does what.

`DelayDetector` says which link has changed; `propose_layout` says which ranks should change places
to minimize the harm of a slow link. `torch_resilient.pipelining.ScheduleAdaptiveZB` uses this
package to re-plan a pipeline while it runs. `torch_resilient.control.migrate` moves ranks; it needs
torch and is not imported here.
"""

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

__all__ = [
    "DelayChange",
    "DelayDetector",
    "Layout",
    "LayoutCosts",
    "LayoutProposal",
    "Place",
    "Prediction",
    "predict",
    "propose_layout",
]
