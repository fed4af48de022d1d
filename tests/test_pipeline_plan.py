"""Planning of pipeline schedules: the paper's figures, and what must hold for every plan."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys

import pytest
from conftest import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_twins.local_search import Search

from torch_resilient.planning import orders
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules, generate, paper_schedule
from torch_resilient.planning.orders import OrderError, alternating, held_at_most
from torch_resilient.planning.planner import (
    POLICIES,
    Plan,
    disturbances,
    limits_of,
    lower_bound_s,
    plan_schedule,
)
from torch_resilient.planning.replay import replay
from torch_resilient.planning.slackness import (
    accumulated_delay_s,
    slackness,
    tolerated_delay_s,
    warmup_of,
)
from torch_resilient.planning.warmup import adapted_warmup, initial_warmup, require_warmup

sys.path.insert(0, str(ROOT / "benchmarks"))

import planner_quality

# As in the paper: t = 10 ms for all operations. Whole numbers, of any unit, are exact.
T = 10


def uniform(stages: int, delay: float = 0) -> PipelineCosts:
    return PipelineCosts.of(
        stages,
        forward_s=T,
        input_backward_s=T,
        weight_backward_s=T,
        delay_forward_s=delay,
    )


class Ticks:
    """A clock on which each look takes a fifth of a millisecond: the same on every machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.0002
        return self.now_s


# The paper's figures.


def test_figures_4_and_5() -> None:
    """One order, made without delay, under 0, 10 and 20 ms between the first two stages."""
    plan = paper_schedule(uniform(4), 12, [7, 5, 3, 1])
    times = [replay(plan, uniform(4).with_delay(0, delay)).iteration_s for delay in (0, 10, 20)]
    assert times == [390, 400, 440]
    # "Zero bubble": only stages start and end one after the other.
    timed = replay(plan, uniform(4))
    assert all(each.forward_s == each.backward_s == 0 for each in timed.bubbles)
    # W comes last, so each stage holds all microbatches.
    assert timed.peak_pending == (12, 12, 12, 12)


def test_figures_4_and_5_planned_anew() -> None:
    for delay, time, warmup in ((0, 390, [7, 5, 3, 1]), (10, 400, [7, 5, 3, 1])):
        costs = uniform(4).with_delay(0, delay)
        assert adapted_warmup(costs, 12) == warmup
        assert replay(paper_schedule(costs, 12), costs).iteration_s == time
    for delay, time in ((0, 390), (10, 400), (20, 410)):
        costs = uniform(4).with_delay(0, delay)
        plan = plan_schedule(costs, 12, clock=Ticks())
        assert plan.iteration_s == plan.lower_bound_s == time


def test_figure_8_knee() -> None:
    """30 microbatches: an order with slackness D bears a delay of (D - 1) t, and not t / 2 more."""
    for link_slackness in (1, 2, 3, 4, 5):
        plan = alternating([1 + link_slackness * (3 - stage) for stage in range(4)], 30)
        knee = (link_slackness - 1) * T
        assert tolerated_delay_s(uniform(4), 1, link_slackness) == knee
        times = [
            replay(plan, uniform(4).with_delay(1, delay)).iteration_s
            for delay in (0, knee, knee + T / 2)
        ]
        # Until there, it counts once in each direction.
        assert times[1] == times[0] + 2 * knee
        assert times[2] - times[1] >= 2 * T  # and not T


def test_theorem_1_growth() -> None:
    """Beyond the knee a delay counts once in each group of slackness + 1, both ways: ADAPTRA."""
    for link_slackness, link in itertools.product((1, 2, 3, 4, 5), (0, 1, 2)):
        plan = alternating([1 + link_slackness * (3 - stage) for stage in range(4)], 240)
        healthy, slow = (
            replay(plan, uniform(4).with_delay(link, delay)).iteration_s for delay in (0, 200)
        )
        costs = uniform(4).with_delay(link, 200)
        predicted = accumulated_delay_s(costs, link, link_slackness, 240)
        assert slow - healthy == pytest.approx(predicted, rel=0.08)


def test_figure_14() -> None:
    """7B model, 30 ms on the last of three links: 368, 579 and 398 ms in the paper.

    It gives neither the times of the operations nor the number of microbatches; 10 ms, 10 of them
    and a delay of 10 ms on every link come within 2.5 % of all three.
    """
    healthy = PipelineCosts.of(
        4,
        forward_s=0.010,
        input_backward_s=0.010,
        weight_backward_s=0.010,
        delay_forward_s=0.010,
    )
    slow = healthy.with_delay(2, 0.040)
    found = [
        replay(orders.zb_h2(4, 10), healthy).iteration_s,
        replay(orders.zb_h2(4, 10), slow).iteration_s,
        replay(paper_schedule(slow, 10), slow).iteration_s,
    ]
    assert found == pytest.approx([0.360, 0.580, 0.390])
    assert found == pytest.approx([0.368, 0.579, 0.398], rel=0.025)
    # Adapting leaves the delay itself, once.
    assert found[2] - found[0] == pytest.approx(0.030)


def test_figure_15() -> None:
    """60 ms on the last link of eight stages: 2.15 and 1.13 times as long in the paper.

    The number of microbatches, 16, and a delay of 5 ms on all links are not in the paper.
    """
    healthy = uniform(8, 5)
    slow = healthy.with_delay(6, 5 + 60)
    zero_bubble = orders.zb_h2(8, 16)
    fixed = replay(zero_bubble, slow).iteration_s / replay(zero_bubble, healthy).iteration_s
    assert fixed == pytest.approx(2.14, abs=0.005)
    adapted = (
        replay(paper_schedule(slow, 16), slow).iteration_s
        / replay(paper_schedule(healthy, 16), healthy).iteration_s
    )
    assert adapted == pytest.approx(1.13, abs=0.005)


# Slackness and warm-up.


def test_lemma_1() -> None:
    assert slackness([7, 5, 3, 1]) == [2, 2, 2]
    with pytest.raises(ValueError, match=r"warmup\[2\]: 4 is more than 3 of stage 1"):
        slackness([5, 3, 4])
    with pytest.raises(ValueError, match=r"warmup\[1\]: expected 1 to 4, got 0"):
        require_warmup([4, 0], 4)
    # And no order that breaks it runs.
    broken = [*alternating([2], 4), *alternating([3], 4)]
    with pytest.raises(OrderError, match="deadlock"):
        replay(broken, uniform(2))


def test_equation_1_with_unequal_times() -> None:
    costs = PipelineCosts.of(
        2, forward_s=[8, 12], input_backward_s=[9, 14], weight_backward_s=0, delay_forward_s=18
    )
    # 8 + 9 + 2c <= D (12 + 14)
    assert tolerated_delay_s(costs, 0, 2) == (2 * 26 - 17) / 2
    assert adapted_warmup(costs, 8) == [4, 1]  # (17 + 36) / 26 = 2.04, up to 3
    assert adapted_warmup(costs.with_delay(0, 17.5), 8) == [3, 1]  # 52 / 26 = 2 exactly
    # The two directions add up.
    assert adapted_warmup(costs.with_delay(0, 0, 35), 8) == [3, 1]
    assert adapted_warmup(costs.with_delay(0, 0, 35.1), 8) == [4, 1]
    with pytest.raises(ValueError, match="link: expected 0 to 0, got 1"):
        tolerated_delay_s(costs, 1, 2)
    with pytest.raises(ValueError, match="link_slackness"):
        accumulated_delay_s(costs, 0, -1, 8)


def test_algorithm_1() -> None:
    assert initial_warmup(4, 7) == [7, 5, 3, 1]
    assert initial_warmup(4, 9) == [9, 6, 3, 1]
    assert initial_warmup(4, 8) == [8, 5, 3, 1]
    assert initial_warmup(4, 2) == [2, 1, 1, 1]
    assert initial_warmup(1, 5) == [5]
    with pytest.raises(ValueError, match="max_activations"):
        initial_warmup(4, 0)
    for stages, most in itertools.product(range(2, 9), range(1, 30)):
        gaps = slackness(initial_warmup(stages, most))
        assert max(gaps) - min(gaps) <= 1
        assert sum(gaps) == most - 1


def test_algorithm_2_stays_within_the_microbatches() -> None:
    # Without the paper's clip to N - 2S, which would be -2 here.
    assert adapted_warmup(uniform(4), 6) == [6, 5, 3, 1]
    assert adapted_warmup(uniform(4).with_delay(2, 1000), 12) == [12, 12, 12, 1]
    assert adapted_warmup(uniform(1), 1) == [1]
    # Not 3 because 0.01 + 0.01 + 2 * 0.01 is not quite 0.04.
    costs = PipelineCosts.of(
        2, forward_s=0.01, input_backward_s=0.01, weight_backward_s=0, delay_forward_s=0.01
    )
    assert adapted_warmup(costs, 9) == [3, 1]
    free = PipelineCosts.of(2, forward_s=[1, 0], input_backward_s=[1, 0], weight_backward_s=1)
    assert adapted_warmup(free, 9) == [9, 1]


def test_a_rigid_order_keeps_the_slack_that_the_generator_gives_away() -> None:
    """Planned without delay, B before F, warm-ups with slackness 3 and 4 have the knee of 2."""
    for warmup in ([10, 7, 4, 1], [13, 9, 5, 1]):
        generated, rigid = (
            [replay(plan, uniform(4).with_delay(0, delay)).iteration_s for delay in (10, 20)]
            for plan in (paper_schedule(uniform(4), 24, warmup), alternating(warmup, 24))
        )
        assert generated[1] - generated[0] >= 8 * T
        assert rigid[1] - rigid[0] == 2 * T


# Limits and bounds.


def check(plan: Plan, costs: PipelineCosts, limits: Limits) -> None:
    """The plan is complete, free of deadlock, within its limits, and has the time it states."""
    timed = replay(plan.orders, costs)
    assert timed.iteration_s == plan.iteration_s
    assert (timed.bubble, timed.bubbles) == (plan.bubble, plan.bubbles)
    assert timed.peak_units == plan.peak_units
    assert plan.iteration_s >= plan.lower_bound_s * (1 - 1e-12)
    for stage, order in enumerate(plan.orders):
        assert len(order) == 3 * plan.num_microbatches
        for kind in "FBW":
            numbers = [microbatch for each, microbatch in order if each == kind]
            assert numbers == list(range(plan.num_microbatches))
        held, pending = held_at_most(order)
        assert held <= limits.activations[stage]
        assert pending <= limits.pending[stage]
        assert (held, pending) == (plan.peak_activations[stage], plan.peak_pending[stage])
    warmup = warmup_of(plan.orders)
    assert sorted(warmup, reverse=True) == warmup


@st.composite
def problems(draw: st.DrawFn) -> tuple[PipelineCosts, int, Limits]:
    stages = draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 12))
    whole = draw(st.booleans())
    numbers = st.integers(0, 9).map(float) if whole else st.floats(0, 10)

    def each(count: int) -> list[float]:
        return draw(st.lists(numbers, min_size=count, max_size=count))

    costs = PipelineCosts.of(
        stages,
        forward_s=each(stages),
        input_backward_s=each(stages),
        weight_backward_s=each(stages),
        delay_forward_s=[4 * delay for delay in each(stages - 1)],
        delay_backward_s=[4 * delay for delay in each(stages - 1)],
    )
    limit = st.none() | st.integers(1, 12)
    limit_each = limit | st.lists(st.integers(1, 12), min_size=stages, max_size=stages)
    return costs, microbatches, limits_of(stages, microbatches, draw(limit_each), draw(limit_each))


CLASSIC = {
    "1f1b": orders.one_f_one_b,
    "zb_h1": orders.zb_h1,
    "zb_h2": orders.zb_h2,
    "gpipe": orders.gpipe,
}


@settings(max_examples=120, deadline=None, print_blob=True)
@given(problems())
def test_every_plan_is_sound_and_no_worse_than_the_others(
    problem: tuple[PipelineCosts, int, Limits],
) -> None:
    costs, microbatches, limits = problem
    bounds = {
        "activation_limit": limits.activations,
        "weight_limit": limits.pending,
    }
    clock = Ticks()
    plan = plan_schedule(costs, microbatches, **bounds, budget_ms=20, clock=clock)
    check(plan, costs, limits)
    for policy in POLICIES[2:]:
        classic = CLASSIC.get(policy)
        if classic is not None:
            held = [held_at_most(order) for order in classic(costs.num_stages, microbatches)]
            if any(
                b > limits.activations[stage] or w > limits.pending[stage]
                for stage, (b, w) in enumerate(held)
            ):
                with pytest.raises(ValueError, match=f"policy: {policy} holds more"):
                    plan_schedule(costs, microbatches, **bounds, policy=policy)
                continue
        other = plan_schedule(costs, microbatches, **bounds, policy=policy)
        check(other, costs, limits)
        assert other.policy == policy
        if policy != "gpipe":
            assert plan.iteration_s <= other.iteration_s * (1 + 1e-9)


@st.composite
def rules_of(draw: st.DrawFn, stages: int, microbatches: int) -> Rules:
    counts = st.lists(st.integers(1, microbatches), min_size=stages, max_size=stages)
    return Rules(
        # Rising counts, too: what cannot be waited for must not be.
        tuple(draw(counts)),
        wait_for_warmup=draw(st.booleans()),
        gate=draw(st.booleans()),
        forward_first=draw(st.booleans()),
        weight_share=draw(st.sampled_from([0, 0.3, 0.5, 1])),
        max_weights=draw(st.none() | st.integers(1, 4)),
    )


@settings(max_examples=60, deadline=None, print_blob=True)
@given(problems(), st.data())
def test_every_set_of_rules_ends_within_the_limits(
    problem: tuple[PipelineCosts, int, Limits], data: st.DataObject
) -> None:
    costs, microbatches, limits = problem
    rules = data.draw(rules_of(costs.num_stages, microbatches))
    kinds, time_s = generate(costs, microbatches, rules, limits)
    assert all(limits.allow_stage(stage, each) for stage, each in enumerate(kinds))
    timed = replay([orders.from_kinds(each) for each in kinds], costs)
    # The generator keeps time like replay: no stage waits though what it does next has arrived.
    assert timed.iteration_s <= time_s * (1 + 1e-12)
    if rules.weight_share == 0 and not rules.wait_for_warmup:
        assert timed.iteration_s == pytest.approx(time_s)


def brute_force(costs: PipelineCosts, microbatches: int, limits: Limits) -> float:
    """The shortest iteration over all orders that run each kind in the order of microbatches."""

    def stage_orders(stage: int) -> list[orders.Kinds]:
        found = []
        for kinds in set(itertools.permutations([0, 1, 2] * microbatches)):
            if limits.allow_stage(stage, bytes(kinds)):
                found.append(bytes(kinds))
        return found

    best_s = math.inf
    for kinds in itertools.product(*(stage_orders(stage) for stage in range(costs.num_stages))):
        try:
            timed = replay([orders.from_kinds(each) for each in kinds], costs)
        except OrderError:
            continue
        best_s = min(best_s, timed.iteration_s)
    return best_s


SMALL = st.integers(1, 6).map(float)


@settings(max_examples=25, deadline=None, print_blob=True)
@given(st.data(), st.sampled_from([(2, 2), (3, 2), (1, 2), (2, 1), (2, 3)]))
def test_small_plans_against_all_orders(data: st.DataObject, size: tuple[int, int]) -> None:
    """The bound holds for the best of all orders, and the search finds that on such sizes."""
    stages, microbatches = size

    def each(count: int) -> list[float]:
        return data.draw(st.lists(SMALL, min_size=count, max_size=count))

    costs = PipelineCosts.of(
        stages,
        forward_s=each(stages),
        input_backward_s=each(stages),
        weight_backward_s=each(stages),
        delay_forward_s=each(stages - 1),
        delay_backward_s=each(stages - 1),
    )
    limit = data.draw(st.integers(1, microbatches))
    limits = limits_of(stages, microbatches, None, limit)
    best_s = brute_force(costs, microbatches, limits)
    assert lower_bound_s(costs, microbatches, limits) <= best_s
    plan = plan_schedule(costs, microbatches, weight_limit=limit, clock=Ticks())
    check(plan, costs, limits)
    assert best_s <= plan.iteration_s <= best_s * 1.0001


def test_memory_buys_time() -> None:
    """With less memory between F and W, the plan keeps to it and takes longer."""
    costs = uniform(4, 5).with_delay(1, 40)
    times = [
        plan_schedule(costs, 16, weight_limit=most, clock=Ticks()).iteration_s
        for most in (4, 6, 8, None)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.2 * times[-1]


def test_local_search_finds_what_the_rules_miss() -> None:
    costs = uniform(4).with_delay(0, 20)
    limits = limits_of(4, 12)
    plan = orders.one_f_one_b(4, 12)
    search = Search(orders.classic_kinds("1f1b", 4, 12), costs, limits, 410, 3)
    search.run(20_000)
    times = [time for time, _ in search.found]
    assert times == sorted(times)
    # With W after each B; the bound is 410.
    assert replay(plan, costs).iteration_s > 500
    assert times[0] <= 420
    for time, each in search.found:
        assert replay([orders.from_kinds(stage) for stage in each], costs).iteration_s == time


def test_the_plan_bears_a_slower_link_better() -> None:
    """Plans of equal time: the planner chooses the one that loses least if a link gets slower."""
    costs = uniform(4)
    plan = plan_schedule(costs, 24, weight_limit=10, policy="portfolio")
    alone = plan_schedule(costs, 24, weight_limit=10, policy="paper")
    assert plan.iteration_s == alone.iteration_s == plan.lower_bound_s
    assert plan.disturbed_s < 0.95 * alone.disturbed_s
    # Without any slow link, all of them are tried: half of F and B more on each.
    given_costs, *slower = disturbances(costs)
    assert given_costs == costs
    assert [each.delay_forward_s for each in slower] == [(10, 0, 0), (0, 10, 0), (0, 0, 10)]
    times = [replay(plan.orders, each).iteration_s for each in (costs, *slower)]
    assert plan.disturbed_s == pytest.approx(sum(times) / 4)
    # With slow links, those, and by a quarter of their delay.
    costs = uniform(4).with_delay(1, 20).with_delay(2, 80, 160)
    _, first, second = disturbances(costs)
    assert (first.delay_forward_s, first.delay_backward_s) == ((0, 20, 110), (0, 20, 190))
    assert (second.delay_forward_s, second.delay_backward_s) == ((0, 30, 80), (0, 30, 160))


def test_time_at_the_given_delays_comes_first() -> None:
    """Among the rules' plans here is one of 790 that bears other delays better."""
    costs = uniform(4, 5).with_delay(1, 0)
    plan = plan_schedule(costs, 24, weight_limit=5, policy="portfolio")
    assert plan.iteration_s == 770
    rules = Rules((5, 3, 3, 1), forward_first=True, max_weights=2)
    kinds, _ = generate(costs, 24, rules, limits_of(4, 24, None, 5))
    steady = [orders.from_kinds(stage) for stage in kinds]
    times = [replay(steady, each).iteration_s for each in disturbances(costs)]
    assert times[0] == 790
    assert sum(times) / len(times) < plan.disturbed_s


def test_plans_without_a_search_depend_on_the_arguments_only() -> None:
    costs = uniform(5, 3).with_delay(2, 37)
    first, second = (plan_schedule(costs, 10, 7, 9, policy="portfolio") for _ in range(2))
    assert first == second
    ticked = [plan_schedule(costs, 10, 7, 9, clock=Ticks()) for _ in range(2)]
    assert ticked[0] == ticked[1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_microbatches": 0}, "num_microbatches: expected at least 1, got 0"),
        ({"activation_limit": 0}, "activation_limit: expected integers of at least 1, got 0"),
        ({"weight_limit": [1, 2]}, "weight_limit: expected a number or 4 of them"),
        ({"policy": "magic"}, "policy: expected one of best, portfolio, paper"),
        ({"policy": "zb_h2", "weight_limit": 6}, "policy: zb_h2 holds more microbatches than"),
    ],
)
def test_planning_names_the_argument_that_is_wrong(arguments: dict[str, object], text: str) -> None:
    merged: dict[str, object] = {"num_microbatches": 12, **arguments}
    with pytest.raises(ValueError, match=f"^{text}"):
        plan_schedule(uniform(4), **merged)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None, print_blob=True)
@given(st.integers(2, 6), st.integers(1, 12), st.data())
def test_alternating_orders_run_for_every_falling_warmup(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(1, microbatches), min_size=stages, max_size=stages))
    warmup = sorted(counts, reverse=True)
    plan = alternating(warmup, microbatches)
    assert warmup_of(plan) == warmup
    replay(plan, uniform(stages, 7))
    assume(counts != warmup)
    with pytest.raises(ValueError, match="Lemma 1"):
        alternating(counts, microbatches)


@pytest.mark.parametrize("most", [-1.0, 100.0])
def test_the_benchmark_of_plans_fails_if_they_are_too_long(
    most: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner_quality, "LIMITS", {"no limit": most})
    monkeypatch.setattr(planner_quality, "WORST", 100.0)
    monkeypatch.setattr(planner_quality, "print_speed", lambda *_: None)
    monkeypatch.setattr(
        sys, "argv", ["bench", "--profiles", "1", "--budget-ms", "5", "--solve-s", "0.05"]
    )
    assert planner_quality.main() == (most < 0)
    assert ("missed: no limit" in capsys.readouterr().out) == (most < 0)


def test_figure_20_holds_in_the_mean_but_not_for_every_profile() -> None:
    """PIPEMORPH: "in all settings, the gap is less than 1 %". Here it is that to a lower bound of
    the optimum, which is a little more."""
    paper, best = [], []
    for number in range(40):
        drawn = planner_quality.draw(random.Random(f"20 {number}"), "no limit")
        of_paper = plan_schedule(drawn.costs, drawn.num_microbatches, policy="paper")
        of_best = plan_schedule(drawn.costs, drawn.num_microbatches, budget_ms=20)
        paper.append(of_paper.iteration_s / of_paper.lower_bound_s - 1)
        best.append(of_best.iteration_s / of_best.lower_bound_s - 1)
    assert statistics.median(paper) == pytest.approx(0, abs=1e-9)
    assert statistics.mean(paper) < 0.01
    # 30 % of these profiles are above, with up to 3.9 %.
    assert sum(gap < 0.01 for gap in paper) >= 0.65 * len(paper)
    assert 0.01 < max(paper) < 0.05
    # The portfolio is never worse, and with its search better somewhere.
    assert all(ours <= theirs + 1e-9 for ours, theirs in zip(best, paper, strict=True))
    assert statistics.mean(best) < statistics.mean(paper)
