"""Plans that a running pipeline follows, and when another one pays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.dispatch import Gates, gates_for, predicted_s
from torch_resilient.planning.generator import Limits
from torch_resilient.planning.orders import Operation, Order, held_at_most
from torch_resilient.planning.planner import disturbances, plan_schedule
from torch_resilient.planning.replay import replay
from torch_resilient.planning.slackness import tolerated_delay_s
from torch_resilient.planning.warmup import MIN_SLACKNESS, adapted_warmup, initial_warmup

# A plan must promise this much to be worth a switch, or the pipeline would follow the noise.
MIN_GAIN = 0.01
# A plan that holds this much less memory and is as fast is worth a switch, too.
MIN_SAVING = 0.1
# As fast: within this.
_EQUAL = 0.005
# This number of iterations in a row must agree, unless a detector has found a change.
PATIENCE = 3
# Costs that differ by less than this part, or these seconds, are those of before.
_SAME_RATIO = 0.03
_SAME_S = 0.0002


class PlanId(NamedTuple):
    """The identity of a plan; the larger is the newer."""

    epoch: int
    planner: int


@dataclass(frozen=True)
class AdaptivePlan:
    """The plan that all ranks of a pipeline follow from some iteration on.

    Attributes:
        epoch: its number, from 0; a larger one replaces it.
        gates: for live dispatch.
        orders: for a fixed order, one per stage.
        predicted_s: of an iteration; 0 if the costs were not known.
        reason: why it was made, for people.
        planner: the stage that made it; where two planned at once, both may have the same epoch.
    """

    epoch: int
    gates: Gates
    orders: tuple[tuple[str, ...], ...]
    predicted_s: float
    reason: str
    planner: int = 0

    @property
    def id(self) -> PlanId:
        return PlanId(self.epoch, self.planner)

    def to_json(self) -> str:
        """As text, for the store."""
        gates = [self.gates.warmup, self.gates.activations, self.gates.pending]
        numbers = [self.epoch, gates, self.orders, self.predicted_s, self.reason, self.planner]
        return json.dumps(numbers)

    @classmethod
    def from_json(cls, text: str) -> AdaptivePlan:
        """The inverse of to_json(). Raises ValueError for anything else."""
        try:
            epoch, gates, orders, predicted, reason, planner = json.loads(text)
            return cls(
                int(epoch),
                Gates(*(tuple(int(each) for each in row) for row in gates)),
                tuple(tuple(str(each) for each in row) for row in orders),
                float(predicted),
                str(reason),
                int(planner),
            )
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"not a plan ({error}): {text[:80]!r}") from None

    def order_of(self, stage: int) -> Order:
        return [Operation.parse(each) for each in self.orders[stage]]


def _texts(orders: Sequence[Order]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(str(each) for each in order) for order in orders)


def initial_plan(
    num_stages: int, num_microbatches: int, limits: Limits, fixed: bool
) -> AdaptivePlan:
    """The plan before anything is known: the same slack on every link (Algorithm 1)."""
    # Paper: PIPEMORPH §4.2, initial planning; §6, step 2
    costs = unit_costs(num_stages)
    most = min(2 * num_stages - 1, num_microbatches, limits.activations[0], limits.pending[0])
    warmup = [max(each, 1) for each in initial_warmup(num_stages, most)]
    gates = gates_for(costs, num_microbatches, limits, warmup)
    orders = (
        plan_schedule(
            costs, num_microbatches, limits.activations, gates.pending, policy="paper"
        ).orders
        if fixed
        else []
    )
    return AdaptivePlan(0, gates, _texts(orders), 0.0, "nothing measured yet")


def unit_costs(num_stages: int) -> PipelineCosts:
    """All operations alike, no delay; on the first stage W is the whole backward."""
    return PipelineCosts.of(
        num_stages,
        forward_s=1.0,
        input_backward_s=[0.0] + [1.0] * (num_stages - 1),
        weight_backward_s=[2.0] + [1.0] * (num_stages - 1),
    )


class Decider:
    """Decides, iteration by iteration, whether another plan pays.

    Args:
        num_microbatches: of an iteration.
        limits: of memory.
        fixed: whether stages follow orders instead of gates.
        budget_ms: for the search of an order.
    """

    def __init__(
        self, num_microbatches: int, limits: Limits, fixed: bool, budget_ms: float = 100.0
    ) -> None:
        self._num_microbatches = num_microbatches
        self._given = self._limits = limits
        self._fixed = fixed
        self._budget_ms = budget_ms
        self._agreeing = 0
        # With these costs the plan of this epoch was found good enough.
        self._content: tuple[int, PipelineCosts] | None = None

    def consider(
        self,
        costs: PipelineCosts,
        current: AdaptivePlan,
        changed: bool,
        rooms: Sequence[float] | None = None,
        links_known: bool = True,
    ) -> AdaptivePlan | None:
        """A better plan than `current` for these costs, or None.

        Args:
            costs: as measured.
            current: the plan in force.
            changed: a detector has found a change since the last call; then one opinion is enough.
            rooms: how many microbatches each stage can hold between F and W, as measured.
            links_known: whether the delays in `costs` are measured. If not, plans keep slack, as
                the first one does: they are made for links as slow as a slackness of 2 bears.
        """
        # Paper: PIPEMORPH §6, step 5: the pipeline scheduler adapts the schedule
        if rooms is not None:
            self._limits = _within(self._given, rooms)
        if not links_known:
            costs = _with_slack(costs)
        first = current.epoch == 0
        crowded = self._holds_too_much(current)
        if not (changed or first or crowded) and self._content is not None:
            epoch, before = self._content
            if epoch == current.epoch and alike(costs, before):
                return None
        self._content = None
        now_s = self._expected_s(costs, current)
        candidate = self._candidate(costs, current.epoch + 1)
        gain = 1 - candidate.predicted_s / now_s if now_s > 0 else 0.0
        saving = 1 - sum(candidate.gates.pending) / sum(current.gates.pending)
        faster = gain >= MIN_GAIN
        leaner = not self._fixed and gain >= -_EQUAL and saving >= MIN_SAVING
        if not (faster or leaner or first or crowded):
            self._agreeing = 0
            self._content = (current.epoch, costs)
            return None
        self._agreeing += 1
        if self._agreeing < PATIENCE and not (changed or first or crowded):
            return None
        self._agreeing = 0
        if crowded:
            why = "what fits in memory"
        else:
            why = "first measurements" if first else ("faster" if faster else "less memory")
        links = f"slowest link {_slowest(costs)}" if links_known else "no link measured: with slack"
        text = f"{why}: {1e3 * now_s:.1f} -> {1e3 * candidate.predicted_s:.1f} ms expected, {links}"
        return replace(candidate, reason=text)

    def _holds_too_much(self, plan: AdaptivePlan) -> bool:
        """Whether the plan needs more memory than there is."""
        if self._fixed:
            stages = range(len(plan.orders))
            pending = [held_at_most(plan.order_of(stage))[1] for stage in stages]
        else:
            pending = list(plan.gates.pending)
        return any(held > most for held, most in zip(pending, self._limits.pending, strict=True))

    def _expected_s(self, costs: PipelineCosts, plan: AdaptivePlan) -> float:
        if self._fixed:
            orders = [plan.order_of(stage) for stage in range(costs.num_stages)]
            return replay(orders, costs).iteration_s
        return self._mean_s(costs, plan.gates)

    def _mean_s(self, costs: PipelineCosts, gates: Gates) -> float:
        """Over the costs and some that are a bit worse: a plan must not break at once."""
        times = [predicted_s(each, self._num_microbatches, gates) for each in disturbances(costs)]
        return sum(times) / len(times)

    def _candidate(self, costs: PipelineCosts, epoch: int) -> AdaptivePlan:
        n = self._num_microbatches
        if self._fixed:
            gates = gates_for(costs, n, self._limits)
            # Orders have the bound of live dispatch: more between F and W gains next to nothing.
            plan = plan_schedule(
                costs, n, self._limits.activations, gates.pending, budget_ms=self._budget_ms
            )
            return AdaptivePlan(epoch, gates, _texts(plan.orders), plan.iteration_s, plan.policy)
        stages = costs.num_stages
        slower = replace(
            costs,
            delay_forward_s=tuple(1.5 * each for each in costs.delay_forward_s),
            delay_backward_s=tuple(1.5 * each for each in costs.delay_backward_s),
        )
        one_f_one_b = [min(stages - stage, n) for stage in range(stages)]
        options = [
            gates_for(costs, n, self._limits, warmup)
            for warmup in (one_f_one_b, adapted_warmup(costs, n), adapted_warmup(slower, n))
        ]
        timed = [(self._mean_s(costs, gates), gates) for gates in options]
        best_s = min(each[0] for each in timed)
        # The first that is as fast as the best: they are in order of memory.
        time_s, gates = next(each for each in timed if each[0] <= best_s * (1 + _EQUAL))
        return AdaptivePlan(epoch, gates, (), time_s, "")


def _with_slack(costs: PipelineCosts) -> PipelineCosts:
    """The same with every link as slow as Algorithm 2's least slackness bears (Equation 1)."""
    for link in range(costs.num_stages - 1):
        costs = costs.with_delay(link, max(tolerated_delay_s(costs, link, MIN_SLACKNESS), 0.0))
    return costs


def alike(costs: PipelineCosts, before: PipelineCosts) -> bool:
    """Whether these are the same costs except for noise."""
    rows = (
        (costs.forward_s, before.forward_s),
        (costs.input_backward_s, before.input_backward_s),
        (costs.weight_backward_s, before.weight_backward_s),
        (costs.delay_forward_s, before.delay_forward_s),
        (costs.delay_backward_s, before.delay_backward_s),
    )
    return all(
        abs(now - then) <= max(_SAME_RATIO * then, _SAME_S)
        for ours, theirs in rows
        for now, then in zip(ours, theirs, strict=True)
    )


def _within(limits: Limits, rooms: Sequence[float]) -> Limits:
    """The limits, tightened to the rooms of the stages."""
    pending = [max(int(min(pair)), 1) for pair in zip(limits.pending, rooms, strict=True)]
    activations = [min(pair) for pair in zip(limits.activations, pending, strict=True)]
    return Limits(tuple(activations), tuple(pending))


def _slowest(costs: PipelineCosts) -> str:
    links = list(zip(costs.delay_forward_s, costs.delay_backward_s, strict=True))
    if not links:
        return "none"
    link = max(range(len(links)), key=lambda i: sum(links[i]))
    forward_s, backward_s = links[link]
    one, other = 1e3 * forward_s, 1e3 * backward_s
    return f"{link}-{link + 1} ({one:.1f} ms forward, {other:.1f} ms backward)"
