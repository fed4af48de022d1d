"""Pipeline schedules that adapt to slow links: costs, exact replay, the papers' rules, a planner.

`plan_schedule` makes a schedule for given `PipelineCosts`; `replay` tells exactly what any schedule
does with them. Nothing of this imports torch. `ScheduleAdaptiveZB`, `SchedulePlanned` and
`ScheduleLive` run a stage of torch's, and are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.dispatch import Gates, StageGates, gates_for
from torch_resilient.planning.generator import paper_schedule
from torch_resilient.planning.orders import (
    Operation,
    OrderError,
    gpipe,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from torch_resilient.planning.planner import POLICIES, Plan, plan_schedule
from torch_resilient.planning.replay import Replay, replay
from torch_resilient.planning.slackness import tolerated_delay_s
from torch_resilient.planning.warmup import adapted_warmup, initial_warmup

if TYPE_CHECKING:
    from torch_resilient.pipelining.adaptive import ScheduleAdaptiveZB
    from torch_resilient.pipelining.schedule import ScheduleLive, SchedulePlanned

__all__ = [
    "POLICIES",
    "Gates",
    "Operation",
    "OrderError",
    "PipelineCosts",
    "Plan",
    "Replay",
    "ScheduleAdaptiveZB",
    "ScheduleLive",
    "SchedulePlanned",
    "StageGates",
    "adapted_warmup",
    "gates_for",
    "gpipe",
    "initial_warmup",
    "one_f_one_b",
    "paper_schedule",
    "plan_schedule",
    "replay",
    "tolerated_delay_s",
    "zb_h1",
    "zb_h2",
]

if not TYPE_CHECKING:  # it would hide misspelled names from type checkers

    def __getattr__(name: str) -> Any:
        """The schedule classes, which need torch."""
        if name == "ScheduleAdaptiveZB":
            from torch_resilient.pipelining.adaptive import ScheduleAdaptiveZB

            return ScheduleAdaptiveZB
        if name in ("ScheduleLive", "SchedulePlanned"):
            from torch_resilient.pipelining import schedule

            return getattr(schedule, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
