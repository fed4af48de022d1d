"""Pipeline schedules that adapt to slow links: costs, exact replay, the papers' rules, a planner.

`plan_schedule` makes a schedule for given `PipelineCosts`; `replay` tells exactly what any schedule
does with them. Nothing here imports torch.
"""

from torch_resilient.pipelining.costs import PipelineCosts
from torch_resilient.pipelining.generator import paper_schedule
from torch_resilient.pipelining.orders import (
    Operation,
    OrderError,
    gpipe,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from torch_resilient.pipelining.planner import POLICIES, Plan, plan_schedule
from torch_resilient.pipelining.replay import Replay, replay
from torch_resilient.pipelining.slackness import tolerated_delay_s
from torch_resilient.pipelining.warmup import adapted_warmup, initial_warmup

__all__ = [
    "POLICIES",
    "Operation",
    "OrderError",
    "PipelineCosts",
    "Plan",
    "Replay",
    "adapted_warmup",
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
