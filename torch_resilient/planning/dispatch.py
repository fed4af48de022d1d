"""Live dispatch: which operation a stage runs next, chosen from what has arrived.

The paper re-plans at iteration boundaries and leaves deciding within an iteration to future work.
Here each stage decides for itself, operation by operation. No message between ranks is needed: each
direction of a link carries its messages in microbatch order whatever the stages choose.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch_resilient.planning.core import evaluate, generate
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules
from torch_resilient.planning.orders import KINDS, Kinds
from torch_resilient.planning.warmup import adapted_warmup

# Stages times microbatches up to which several orders are compared: it takes some milliseconds.
_MAX_VARIED = 2048


@dataclass(frozen=True)
class StageGates:
    """The limits of one stage, all in microbatches.

    Attributes:
        warmup: F comes before B while fewer than these are between F and B: x_i of the paper, which
            keeps the slack of slow links.
        activations: F waits while this many are between F and B.
        pending: F waits while this many are between F and W; with torch's split backward nothing
            is freed before W, so this one bounds memory.
    """

    warmup: int
    activations: int
    pending: int

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.activations < 1 or self.pending < 1:
            raise ValueError(f"{self}: expected a warm-up of at least 0 and limits of at least 1")


@dataclass(frozen=True)
class Gates:
    """The gates of all stages."""

    warmup: tuple[int, ...]
    activations: tuple[int, ...]
    pending: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.warmup) == len(self.activations) == len(self.pending) >= 1:
            raise ValueError(f"{self}: expected as many counts of each kind, one per stage")
        for stage in range(len(self.warmup)):
            self.of_stage(stage)

    def of_stage(self, stage: int) -> StageGates:
        return StageGates(self.warmup[stage], self.activations[stage], self.pending[stage])

    @property
    def num_stages(self) -> int:
        return len(self.warmup)


class Progress:
    """How many F, B and W a stage has started in this iteration, each in microbatch order."""

    __slots__ = ("backwards", "forwards", "num_microbatches", "weights")

    def __init__(self, num_microbatches: int) -> None:
        self.num_microbatches = num_microbatches
        self.forwards = self.backwards = self.weights = 0

    def forward_allowed(self, gates: StageGates) -> bool:
        """Whether there is an F left for which the gates have room."""
        return (
            self.forwards < self.num_microbatches
            and self.forwards - self.backwards < gates.activations
            and self.forwards - self.weights < gates.pending
        )

    @property
    def finished(self) -> bool:
        return self.weights == self.num_microbatches

    def next_of(self, kind: str) -> int:
        """The microbatch of the next operation of this kind."""
        return {"F": self.forwards, "B": self.backwards, "W": self.weights}[kind]

    def count(self, kind: str) -> int:
        """Counts the next operation of this kind; returns its microbatch."""
        if kind == "F":
            self.forwards += 1
            return self.forwards - 1
        if kind == "B":
            self.backwards += 1
            return self.backwards - 1
        self.weights += 1
        return self.weights - 1


def choose(
    progress: Progress, gates: StageGates, input_arrived: bool, gradient_arrived: bool
) -> str | None:
    """The kind of operation to run now: "F", "B" or "W"; None if none can run.

    `input_arrived` and `gradient_arrived`: whether what the next F and the next B need is there.
    B comes before F before W, but F before B while less than the warm-up is held. Stages with any
    gates work together without deadlock: the oldest microbatch that is not finished passes every
    gate, since those before it hold nothing, and a W that a gate waits for can always run.
    """
    forward = input_arrived and progress.forward_allowed(gates)
    held = progress.forwards - progress.backwards
    if gradient_arrived and not (forward and held < gates.warmup):
        return "B"
    if forward:
        return "F"
    if progress.weights < progress.backwards:
        return "W"
    return None


class Expectation:
    """The next operation of a stage if no message is late, in one iteration of a plan.

    The first operation of `order`, kinds such as "FFBW", that has not run, whatever has run ahead
    of it. An empty order expects nothing.
    """

    def __init__(self, order: str) -> None:
        counts = dict.fromkeys("FBW", 0)
        self._order: list[tuple[str, int]] = []
        for kind in order:
            self._order.append((kind, counts[kind]))
            counts[kind] += 1
        self._next = 0

    def next_kind(self, progress: Progress) -> str | None:
        """Its kind; None if nothing is expected any more. Ask with growing progress only."""
        while self._next < len(self._order):
            kind, number = self._order[self._next]
            if number >= progress.next_of(kind):
                return kind
            self._next += 1
        return None


def worth_holding(
    progress: Progress,
    gates: StageGates,
    expected: str | None,
    input_arrived: bool,
    gradient_arrived: bool,
) -> bool:
    """Whether an F or B that is `expected` next lacks only its message: if it came, `choose` would
    pick that and nothing else."""
    if expected == "F" and not input_arrived:
        input_arrived = True
    elif expected == "B" and not gradient_arrived and progress.backwards < progress.forwards:
        gradient_arrived = True
    else:
        return False
    return choose(progress, gates, input_arrived, gradient_arrived) == expected


class Patience:
    """For how long a stage holds an operation back because a message is due that the plan has
    before it.

    Begun a little before that message, the operation would delay all that hangs on the message by
    nearly its own length, and plans leave no slack for that where a link is slow. Waiting for a
    message that is much later than planned does not pay: after a wait in vain the next one for that
    message of an iteration is half as long, after a wait that paid twice as long. In the exact
    model with some percent of noise, that saves up to 2 % of an iteration where a link is slow, and
    changes next to nothing over the traces of PIPEMORPH's Figure 18.
    """

    MOST = 0.4
    LEAST = 0.02

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], float] = {}

    def share(self, awaited: str, microbatch: int) -> float:
        """For which part of its own time an operation may be held back for what this F or B
        needs."""
        return self._shares.get((awaited, microbatch), self.MOST)

    def on_held(self, awaited: str, microbatch: int, came: bool) -> None:
        """An operation was held back for that; whether it came meanwhile."""
        share = self.share(awaited, microbatch)
        share = min(2 * share, self.MOST) if came else max(share / 2, self.LEAST)
        self._shares[awaited, microbatch] = share


def gates_for(
    costs: PipelineCosts,
    num_microbatches: int,
    limits: Limits | None = None,
    warmup: Sequence[int] | None = None,
) -> Gates:
    """Gates for these costs: the warm-up of Algorithm 2, and room above it for jitter.

    Each stage may hold 1.5 times its warm-up between F and B, and twice the first stage's warm-up
    between F and W, as far as `limits` allow. Over the traces of PIPEMORPH's Figure 18 that is as
    fast as no gates at all, give or take 0.4 %, while the warm-up itself as the gate between F and
    B costs 3 to 8 %, and as that between F and W, too, 14 to 21 % (benchmarks/live_dispatch.py).

    Args:
        costs: of the pipeline.
        num_microbatches: of one iteration.
        limits: of memory; None for none.
        warmup: the counts x_i if not those of Algorithm 2.
    """
    n = num_microbatches
    quotas = list(adapted_warmup(costs, n) if warmup is None else warmup)
    activations = [min(n, 3 * each // 2 + 1) for each in quotas]
    pending = [min(n, 2 * quotas[0] + 1)] * len(quotas)
    if limits is not None:
        pending = [min(pair) for pair in zip(pending, limits.pending, strict=True)]
        activations = [min(pair) for pair in zip(activations, limits.activations, strict=True)]
    activations = [min(pair) for pair in zip(activations, pending, strict=True)]
    quotas = [min(pair) for pair in zip(quotas, activations, strict=True)]
    return Gates(tuple(quotas), tuple(activations), tuple(pending))


def predicted_s(costs: PipelineCosts, num_microbatches: int, gates: Gates) -> float:
    """Seconds of an iteration with live dispatch under these gates, if the costs are constant."""
    rules = Rules(gates.warmup, forward_first=True)
    return generate(costs, num_microbatches, rules, Limits(gates.activations, gates.pending))[1]


def predicted_orders(costs: PipelineCosts, num_microbatches: int, gates: Gates) -> tuple[str, ...]:
    """Returns the best order of each stage with live dispatch, as kinds: "FFBW...".

    Costs that are measured are a little off, and then live dispatch, too, begins a W right before
    the message that was to come first. So here a W only runs if a fifth of it fits before that. And
    where two messages come at nearly the same time, which one is first is chance, but may cost an
    operation's time at the end: so of the orders for costs that differ a little from the given
    ones, these are the fastest for the given ones. All ranks find the same.
    """
    rules = Rules(gates.warmup, forward_first=True, weight_share=0.2)
    limits = Limits(gates.activations, gates.pending)
    few = costs.num_stages * num_microbatches <= _MAX_VARIED
    best: tuple[float, list[Kinds]] | None = None
    for each in _variants(costs) if few else [costs]:
        orders, _ = generate(each, num_microbatches, rules, limits)
        time_s = max(end_s for *_, end_s in evaluate(orders, costs))
        if best is None or time_s < best[0]:
            best = time_s, orders
    assert best is not None
    return tuple("".join(KINDS[kind] for kind in order) for order in best[1])


def _variants(costs: PipelineCosts) -> list[PipelineCosts]:
    """The given costs, and some that differ from them by up to two percent."""
    rng = random.Random(0)

    def varied(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * rng.uniform(0.98, 1.02) for value in values)

    others = [
        replace(
            costs,
            forward_s=varied(costs.forward_s),
            input_backward_s=varied(costs.input_backward_s),
            weight_backward_s=varied(costs.weight_backward_s),
            delay_forward_s=varied(costs.delay_forward_s),
            delay_backward_s=varied(costs.delay_backward_s),
        )
        for _ in range(3)
    ]
    return [costs, *others]
