"""Chooses a schedule for measured costs, within limits of memory and of planning time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch_resilient.planning.core import Search, evaluate, generate, memory_peaks
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules, paper_rules
from torch_resilient.planning.orders import (
    Kinds,
    Order,
    classic_kinds,
    orders_from_kinds,
    require_microbatches,
)
from torch_resilient.planning.replay import Bubble
from torch_resilient.planning.warmup import adapted_warmup, initial_warmup

# "best": all of the below and a local search; "portfolio": all rules, no search, any time it takes;
# the others: one alone.
POLICIES = ("best", "portfolio", "paper", "1f1b", "zb_h1", "zb_h2", "gpipe")

# The best plan is never worse than any of these that keeps to the limits. GPipe never helps.
_BASELINES = ("1f1b", "zb_h1", "zb_h2")

# How much longer than the best a plan may take at the given delays to be chosen because it bears
# other delays better. Delays are known to a few percent at most, so this is below what they tell.
NOMINAL_TOLERANCE = 0.002
# How many slow links are made slower, one at a time, to see what a plan bears; each costs one
# evaluation for each plan that is left.
_DISTURBED_LINKS = 4
# Each is made slower by this share of its delay, at least by half a forward and input backward.
_DISTURBANCE = 0.25
# Parts of the budget: for rules, and for the choice among plans of nearly the same length. The
# search gets the rest, and the time that the rules do not need; it gains more once several rules
# have run.
_RULES_SHARE = 0.4
_CHOICE_SHARE = 0.1
# The search tries that many of the best orders in a part of its time, and goes on with the best.
_STARTS = 3
_TRIAL_SHARE = 0.4
# Between two looks at the clock, the search evaluates about that many operations: 0.1 ms compiled,
# some milliseconds in Python.
_SEARCHED_AT_ONCE = 20_000
_SEARCHED = " +search"


@dataclass(frozen=True)
class Plan:
    """A schedule, and what `replay` says of it with the costs it was made for.

    Attributes:
        orders: the operations of each stage; F, B and W each in the order of the microbatches.
        num_microbatches: how many.
        policy: what made the orders: a name of POLICIES, or rules of the portfolio in words; with
            "+search" if a search has changed them.
        iteration_s: from the first start to the last end.
        disturbed_s: the mean iteration time over the given delays and those with one link slower.
        lower_bound_s: no schedule within the limits is shorter.
        bubble: the idle part of all stages' time, 0 to 1.
        bubbles: idle time of each stage by cause.
        peak_activations, peak_pending, peak_units: as in Replay.
    """

    orders: list[Order]
    num_microbatches: int
    policy: str
    iteration_s: float
    disturbed_s: float
    lower_bound_s: float
    bubble: float
    bubbles: tuple[Bubble, ...]
    peak_activations: tuple[int, ...]
    peak_pending: tuple[int, ...]
    peak_units: tuple[float, ...]


@dataclass(frozen=True)
class _Candidate:
    time_s: float
    kinds: list[Kinds]
    name: str


def _time_s(candidate: _Candidate) -> float:
    return candidate.time_s


def _limit(field: str, value: int | Sequence[int] | None, stages: int, count: int) -> list[int]:
    if value is None:
        return [count] * stages
    values = list(value) if isinstance(value, Sequence) else [value] * stages
    if len(values) != stages:
        raise ValueError(
            f"{field}: expected a number or {stages} of them, one per stage, got {len(values)}"
        )
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int) or each < 1:
            raise ValueError(f"{field}: expected integers of at least 1, got {each!r}")
    return [min(each, count) for each in values]


def limits_of(
    stages: int,
    num_microbatches: int,
    activation_limit: int | Sequence[int] | None = None,
    weight_limit: int | Sequence[int] | None = None,
) -> Limits:
    """The limits, one per stage; None for no limit. Raises ValueError, which names the argument."""
    activations = _limit("activation_limit", activation_limit, stages, num_microbatches)
    pending = _limit("weight_limit", weight_limit, stages, num_microbatches)
    # A microbatch between F and B is also between F and W.
    activations = [min(a, p) for a, p in zip(activations, pending, strict=True)]
    return Limits(tuple(activations), tuple(pending))


def lower_bound_s(costs: PipelineCosts, num_microbatches: int, limits: Limits) -> float:
    """A time in seconds that no schedule within `limits` is shorter than.

    It is the largest of these, over all stages i and all stages k up to i. A stage's first F starts
    after the warm-up chain: the F and delays of the stages before it. Its first B starts after the
    round trip of a microbatch to the last stage and back. Its operations take their time one after
    the other. After its last B, the gradient goes to stage k, which runs B and W; after its last F,
    the microbatch goes to the last stage and from there to stage k. With K microbatches at most
    between F and B, each K of them take a round trip; with K between F and W, that and a W.

    The part about limits holds for orders in which the microbatches take turns, as in all of ours.
    """
    n = num_microbatches
    stages = costs.num_stages
    forward, backward, weight = (
        costs.forward_s,
        costs.input_backward_s,
        costs.weight_backward_s,
    )
    head = [0.0] * stages  # until the first F of the stage
    for i in range(1, stages):
        head[i] = head[i - 1] + forward[i - 1] + costs.delay_forward_s[i - 1]
    # From the start of F on the stage to the start of its B.
    answer = [0.0] * stages
    answer[-1] = forward[-1]
    for i in range(stages - 2, -1, -1):
        answer[i] = (
            forward[i]
            + costs.delay_forward_s[i]
            + answer[i + 1]
            + backward[i + 1]
            + costs.delay_backward_s[i]
        )
    # From the end of B on the stage to the last W of that microbatch on the stages up to it.
    tail = [weight[0]] * stages
    for i in range(1, stages):
        tail[i] = max(weight[i], costs.delay_backward_s[i - 1] + backward[i - 1] + tail[i - 1])
    bound = 0.0
    for i in range(stages):
        first_backward = head[i] + answer[i]
        last_backward = max(
            head[i] + n * (forward[i] + backward[i]),
            first_backward + n * backward[i],
            # The last F, there and back.
            head[i] + (n - 1) * forward[i] + answer[i] + backward[i],
        )
        for most, cycle in (
            (limits.activations[i], answer[i] + backward[i]),
            (limits.pending[i], answer[i] + backward[i] + weight[i]),
        ):
            rounds = (n - 1) // most
            rest = n - rounds * most
            last_backward = max(
                last_backward, head[i] + rounds * cycle + answer[i] + rest * backward[i]
            )
        bound = max(
            bound,
            last_backward + tail[i],
            head[i] + n * (forward[i] + backward[i] + weight[i]),
            first_backward + n * (backward[i] + weight[i]),
        )
    return bound


def _quotas(costs: PipelineCosts, num_microbatches: int, limits: Limits) -> dict[str, list[int]]:
    """Counts per stage for Rules.warmup, by name."""
    n = num_microbatches
    inflated = replace(
        costs,
        delay_forward_s=tuple(1.5 * each for each in costs.delay_forward_s),
        delay_backward_s=tuple(1.5 * each for each in costs.delay_backward_s),
    )
    quotas = {
        "adapted": adapted_warmup(costs, n),
        "inflated": adapted_warmup(inflated, n),
        "balanced": initial_warmup(costs.num_stages, limits.activations[0]),
        "1f1b": list(range(costs.num_stages, 0, -1)),
    }
    # As many as leave a stage during the round trip of one, if the slowest stage sets the pace;
    # times a factor, since on their way they queue.
    cycle_s = max(
        sum(times)
        for times in zip(
            costs.forward_s, costs.input_backward_s, costs.weight_backward_s, strict=True
        )
    )
    trips_s = []
    trip_s = 0.0
    for stage in reversed(range(costs.num_stages)):
        trip_s += costs.forward_s[stage] + costs.input_backward_s[stage]
        if stage < costs.num_stages - 1:
            trip_s += costs.delay_forward_s[stage] + costs.delay_backward_s[stage]
        trips_s.append(trip_s)
    trips_s.reverse()
    for factor in (1, 1.25, 1.5, 1.8, 2.2, 3):
        quotas[f"trip*{factor}"] = [
            max(1, math.ceil(min(factor * trip_s / cycle_s, n))) if cycle_s else n
            for trip_s in trips_s
        ]
    return quotas


# (quota, gate, forward_first, weight_share, max_weights), in the order of their additional gain
# over those before, over random profiles without a limit, with one on F-B and with one on F-W
# (benchmarks/planner_quality.py draws such). -1 stands for as many W as stages.
_RULES: tuple[tuple[str, bool, bool, float, int | None], ...] = (
    ("adapted", False, True, 0.0, None),
    ("inflated", True, True, 0.5, None),
    ("adapted", True, False, 0.0, None),
    ("trip*1.25", True, True, 1.0, None),
    ("trip*3", True, True, 0.0, 2),
    ("trip*1.8", True, True, 0.0, -1),
    ("1f1b", False, True, 0.5, None),
    ("trip*1.8", True, False, 1.0, None),
    ("trip*1.25", True, False, 0.5, 4),
    ("inflated", True, True, 0.0, None),
    ("trip*1.8", True, True, 0.5, None),
    ("adapted", True, True, 0.5, -1),
    ("trip*1", True, True, 1.0, None),
    ("trip*1.25", False, True, 0.0, 2),
    ("trip*1.5", True, True, 0.0, None),
    ("trip*1.5", True, True, 0.5, None),
    ("trip*1.25", True, False, 0.0, None),
    ("trip*2.2", True, False, 0.0, None),
    ("trip*3", True, False, 0.0, None),
    ("balanced", True, False, 0.5, None),
    ("adapted", False, True, 1.0, None),
    ("trip*1.8", True, True, 0.0, 2),
    ("trip*1.25", False, True, 0.5, None),
    ("adapted", False, True, 0.5, 4),
)


def _portfolio(
    costs: PipelineCosts, num_microbatches: int, limits: Limits
) -> Iterator[tuple[str, Rules]]:
    quotas = _quotas(costs, num_microbatches, limits)
    for quota, gate, forward_first, share, most in _RULES:
        name = quota + " gate" * gate + " forward-first" * forward_first
        if share:
            name += f" w{share:g}"
        if most is not None:
            name += f" pending{most if most > 0 else 'S'}"
        yield (
            name,
            Rules(
                tuple(quotas[quota]),
                gate=gate,
                forward_first=forward_first,
                weight_share=share,
                max_weights=costs.num_stages if most == -1 else most,
            ),
        )


def _iteration_s(kinds: list[Kinds], costs: PipelineCosts) -> float:
    return max(end_s for _, _, _, end_s in evaluate(kinds, costs))


def _paper_candidate(costs: PipelineCosts, num_microbatches: int, limits: Limits) -> _Candidate:
    rules = paper_rules(adapted_warmup(costs, num_microbatches))
    kinds, _ = generate(costs, num_microbatches, rules, limits)
    return _Candidate(_iteration_s(kinds, costs), kinds, "paper")


def _classic_candidate(
    name: str, costs: PipelineCosts, num_microbatches: int, limits: Limits
) -> _Candidate | None:
    """None if it does not keep to the limits."""
    kinds = classic_kinds(name, costs.num_stages, num_microbatches)
    for stage, (held, pending, _) in enumerate(memory_peaks(kinds, costs)):
        if held > limits.activations[stage] or pending > limits.pending[stage]:
            return None
    return _Candidate(_iteration_s(kinds, costs), kinds, name)


def disturbances(costs: PipelineCosts) -> list[PipelineCosts]:
    """The given costs, and for each of the slowest links the same with that link slower.

    A quarter of its delay is added in each direction, at least half of the mean F and B. Links
    without delay count only if no link has any.
    """
    links = range(costs.num_stages - 1)
    sums = [costs.delay_forward_s[i] + costs.delay_backward_s[i] for i in links]
    slow = [i for i in links if sums[i] > 0] or list(links)
    slow.sort(key=lambda i: -sums[i])
    operations_s = sum(costs.forward_s) + sum(costs.input_backward_s)
    min_s = operations_s / costs.num_stages / 2
    found = [costs]
    for i in slow[:_DISTURBED_LINKS]:
        added_s = max(_DISTURBANCE * sums[i] / 2, min_s)
        found.append(
            costs.with_delay(
                i, costs.delay_forward_s[i] + added_s, costs.delay_backward_s[i] + added_s
            )
        )
    return found


def _mean_s(kinds: list[Kinds], cases: Sequence[PipelineCosts]) -> float:
    return sum(_iteration_s(kinds, costs) for costs in cases) / len(cases)


def plan_schedule(
    costs: PipelineCosts,
    num_microbatches: int,
    activation_limit: int | Sequence[int] | None = None,
    weight_limit: int | Sequence[int] | None = None,
    policy: str = "best",
    budget_ms: float = 100.0,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The shortest schedule found for these costs.

    Args:
        costs: times and delays.
        num_microbatches: of one iteration.
        activation_limit: the most microbatches between F and B, one for all stages or one each.
        weight_limit: the same between F and W. With torch's split backward, nothing is freed
            before W: this is the one that bounds memory.
        policy: "best" tries the paper's rules, 1F1B, ZB-H1 and ZB-H2 where the limits allow them,
            then other rules, then changes the best of them step by step. "portfolio" does without
            the search and without a budget, and its result depends on the arguments only. The
            names of single schedules give these.
        budget_ms: time for "best", by `clock`. The paper's rules and the classic orders are tried
            in any case, and what is running at the end of the budget still ends.
        seed: of the search.
        clock: seconds from anywhere.

    The plan is not longer than the paper's, 1F1B, ZB-H1 or ZB-H2 under the same limits. Among the
    orders found within 0.2 % of the shortest, the one with the least mean iteration time over
    `disturbances(costs)` is taken: a plan must not break when a slow link gets a bit slower.

    Raises ValueError for a limit below 1, an unknown policy, or a single schedule that does not
    keep to the limits; the text begins with the argument's name.
    """
    begin_s = clock()
    require_microbatches(num_microbatches)
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    stages = costs.num_stages
    limits = limits_of(stages, num_microbatches, activation_limit, weight_limit)
    bound_s = lower_bound_s(costs, num_microbatches, limits)
    candidates: list[_Candidate] = []
    if policy in ("best", "portfolio", "paper"):
        candidates.append(_paper_candidate(costs, num_microbatches, limits))
    for name in _BASELINES if policy in ("best", "portfolio") else (policy,):
        if name != "paper":
            candidate = _classic_candidate(name, costs, num_microbatches, limits)
            if candidate is not None:
                candidates.append(candidate)
    if not candidates:
        raise ValueError(f"policy: {policy} holds more microbatches than the limits allow")
    ceiling_s = min(candidate.time_s for candidate in candidates)
    budget_s = budget_ms / 1e3 if policy == "best" else math.inf
    if policy in ("best", "portfolio"):
        best_s = ceiling_s
        for name, rules in _portfolio(costs, num_microbatches, limits):
            # Even a plan as short as the bound may bear other delays worse than another one; it
            # leaves the search nothing to do.
            share = _RULES_SHARE if best_s > bound_s * (1 + 1e-9) else 1 - _CHOICE_SHARE
            if clock() >= begin_s + share * budget_s:
                break
            kinds, time_s = generate(costs, num_microbatches, rules, limits)
            candidates.append(_Candidate(time_s, kinds, name))
            best_s = min(best_s, time_s)
        if policy == "best":
            candidates += _search(
                costs,
                num_microbatches,
                limits,
                candidates,
                bound_s,
                seed,
                begin_s + (1 - _CHOICE_SHARE) * budget_s,
                clock,
            )
    best_s = min(candidate.time_s for candidate in candidates)
    # Sums in another order may differ in the last digit; that is no reason to drop a plan.
    tolerated_s = max(min(best_s * (1 + NOMINAL_TOLERANCE), ceiling_s), best_s * (1 + 1e-12))
    distinct: list[_Candidate] = []
    for candidate in sorted(candidates, key=_time_s):
        if candidate.time_s > tolerated_s:
            break
        if all(candidate.kinds != other.kinds for other in distinct):
            distinct.append(candidate)
    cases = disturbances(costs)
    chosen, disturbed_s = distinct[0], math.inf
    for candidate in distinct:
        if disturbed_s < math.inf and clock() >= begin_s + budget_s:
            break
        mean_s = _mean_s(candidate.kinds, cases)
        if mean_s < disturbed_s:
            chosen, disturbed_s = candidate, mean_s
    return _plan(chosen, costs, num_microbatches, disturbed_s, bound_s)


def _plan(
    chosen: _Candidate,
    costs: PipelineCosts,
    num_microbatches: int,
    disturbed_s: float,
    bound_s: float,
) -> Plan:
    timed = evaluate(chosen.kinds, costs)
    held = memory_peaks(chosen.kinds, costs)
    iteration_s = max(end_s for _, _, _, end_s in timed)
    bubbles = tuple(
        Bubble(begin_s, forward_s, backward_s, iteration_s - end_s)
        for begin_s, forward_s, backward_s, end_s in timed
    )
    whole_s = iteration_s * costs.num_stages
    return Plan(
        orders=orders_from_kinds(chosen.kinds),
        num_microbatches=num_microbatches,
        policy=chosen.name,
        iteration_s=iteration_s,
        disturbed_s=disturbed_s,
        lower_bound_s=bound_s,
        bubble=sum(each.total_s for each in bubbles) / whole_s if whole_s else 0.0,
        bubbles=bubbles,
        peak_activations=tuple(activations for activations, _, _ in held),
        peak_pending=tuple(pending for _, pending, _ in held),
        peak_units=tuple(units for _, _, units in held),
    )


def _search(
    costs: PipelineCosts,
    num_microbatches: int,
    limits: Limits,
    candidates: Sequence[_Candidate],
    bound_s: float,
    seed: int,
    end_s: float,
    clock: Callable[[], float],
) -> list[_Candidate]:
    """Runs a local search on each of the best candidates for a while, then on the best of them."""
    starts: list[_Candidate] = []
    for candidate in sorted(candidates, key=_time_s):
        if all(candidate.kinds != other.kinds for other in starts):
            starts.append(candidate)
        if len(starts) == _STARTS:
            break
    found: list[_Candidate] = []
    at_once = max(1, _SEARCHED_AT_ONCE // (3 * num_microbatches * costs.num_stages))

    def search(start: _Candidate, number: int, stop_s: float) -> _Candidate:
        name = start.name.removesuffix(_SEARCHED) + _SEARCHED
        changes = Search(start.kinds, costs, limits, bound_s, (seed + number) % 2**64)
        while clock() < stop_s and changes.run(at_once):
            pass
        better = [_Candidate(*each, name) for each in changes.found if each[0] < start.time_s]
        found.extend(better)
        return better[0] if better else start

    enough_s = bound_s * (1 + 1e-9)
    best = starts[0]
    if best.time_s <= enough_s:
        return []
    now_s = clock()
    each_s = max(end_s - now_s, 0.0) * _TRIAL_SHARE / len(starts)
    for number, start in enumerate(starts):
        best = min(best, search(start, number, now_s + (number + 1) * each_s), key=_time_s)
        if best.time_s <= enough_s:
            return found
    search(best, len(starts), end_s)
    return found
