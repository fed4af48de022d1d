"""Orders made by simulating the pipeline and choosing, at each moment: Algorithms 3 and 4.

One compiled function, `core.generate`, serves the paper's policy and the others of the planner,
which differ in `Rules`. It works on compact orders (`orders.Kinds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_resilient.planning.core import generate
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import (
    FORWARD,
    INPUT_BACKWARD,
    Kinds,
    Order,
    from_kinds,
    require_microbatches,
)
from torch_resilient.planning.warmup import adapted_warmup, require_warmup


@dataclass(frozen=True)
class Limits:
    """The most microbatches a stage may hold, of each stage: the number of all means no limit.

    Attributes:
        activations: between F and B.
        pending: between F and W.
    """

    activations: tuple[int, ...]
    pending: tuple[int, ...]

    def allow_stage(self, stage: int, kinds: Kinds) -> bool:
        """Whether the stage's order keeps to them; False, too, if it has a B before its F."""
        held, pending = 0, 0
        max_held, max_pending = self.activations[stage], self.pending[stage]
        for kind in kinds:
            if kind == FORWARD:
                held += 1
                pending += 1
                if held > max_held or pending > max_pending:
                    return False
            elif kind == INPUT_BACKWARD:
                held -= 1
                if held < 0:
                    return False
            else:
                pending -= 1
                if pending < held:
                    return False
        return True


@dataclass(frozen=True)
class Rules:
    """How a stage chooses among the operations that could start now.

    B comes before F before W, but:

    Attributes:
        warmup: a count per stage, x_i of the paper.
        wait_for_warmup: before its first B, a stage runs its warm-up forwards and nothing else
            (Algorithm 3).
        gate: F waits while x_i microbatches are between F and B.
        forward_first: F before B as long as fewer than x_i are: keeps the slack of slow links.
        weight_share: W starts only if at least this share of it fits before the next message
            whose arrival is known; 0 for always.
        max_weights: with this many W ready, W comes before F.
    """

    warmup: tuple[int, ...]
    wait_for_warmup: bool = False
    gate: bool = False
    forward_first: bool = False
    weight_share: float = 0.0
    max_weights: int | None = None


def no_limits(num_stages: int, num_microbatches: int) -> Limits:
    """Limits that never bind."""
    all_of_them = (num_microbatches,) * num_stages
    return Limits(all_of_them, all_of_them)


def paper_rules(warmup: Sequence[int]) -> Rules:
    """Algorithm 3: the warm-up forwards first, then B before F before W."""
    # Paper: PIPEMORPH §4.3, Algorithm 3
    return Rules(tuple(warmup), wait_for_warmup=True)


def paper_schedule(
    costs: PipelineCosts, num_microbatches: int, warmup: Sequence[int] | None = None
) -> list[Order]:
    """The schedule of the paper: warm-up by Algorithm 2 if not given, then Algorithms 3 and 4.

    As printed, Algorithm 3 holds a stage to its warm-up only until that many forwards have run:
    while no B has arrived it goes on with F, so the counts are a floor and no limit of memory. For
    limits there is `planner.plan_schedule` with the policy "paper".

    Raises ValueError unless the warm-up falls along the stages, from 1 to num_microbatches.
    """
    require_microbatches(num_microbatches)
    if warmup is None:
        warmup = adapted_warmup(costs, num_microbatches)
    if len(warmup) != costs.num_stages:
        raise ValueError(
            f"warmup: expected {costs.num_stages} counts, one per stage, got {len(warmup)}"
        )
    require_warmup(warmup, num_microbatches)
    limits = no_limits(costs.num_stages, num_microbatches)
    kinds, _ = generate(costs, num_microbatches, paper_rules(warmup), limits)
    return [from_kinds(each) for each in kinds]
