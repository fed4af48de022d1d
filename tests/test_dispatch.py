"""Live dispatch without torch: whatever the gates and the delays, every stage ends, within them."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_resilient.pipelining import (
    Gates,
    PipelineCosts,
    StageGates,
    adapted_warmup,
    gates_for,
    plan_schedule,
)
from torch_resilient.planning.dispatch import (
    Expectation,
    Patience,
    Progress,
    choose,
    predicted_orders,
    predicted_s,
    worth_holding,
)
from torch_resilient.planning.generator import Limits


def simulate(
    gates: list[StageGates],
    costs: PipelineCosts,
    count: int,
    rng: random.Random | None = None,
    factors: tuple[float, float] = (0, 3),
    expected: Sequence[str] = (),
    noise: float = 0.0,
) -> tuple[float, list[list[str]]]:
    """Simulates stages that `choose`, with the costs' delays; `rng` makes them random, `factors`
    times as long. Messages of a direction stay in order; operations take up to `noise` more. An
    operation that is not `expected` is held back, as in StageRun. Returns the end and the
    operations."""
    stages = costs.num_stages
    progress = [Progress(count) for _ in range(stages)]
    inputs: list[list[float]] = [[0.0] * count] + [[] for _ in range(stages - 1)]
    gradients: list[list[float]] = [[] for _ in range(stages)]
    free_s = [0.0] * stages
    ran: list[list[str]] = [[] for _ in range(stages)]
    events = [(0.0, stage) for stage in range(stages)]
    expectations = [Expectation(order) for order in expected]
    patience = [Patience() for _ in range(stages)]
    held: dict[tuple[int, int], float] = {}  # (stage, operations done): until when
    awaited: list[tuple[str, int] | None] = [None] * stages  # what something is held back for

    def deliver(to: list[float], now_s: float, delay_s: float, stage: int) -> None:
        factor = rng.uniform(*factors) if rng else 1.0
        to.append(max(now_s + factor * delay_s, to[-1] if to else 0.0))
        heapq.heappush(events, (to[-1], stage))

    while events:
        now_s, stage = heapq.heappop(events)
        mine = progress[stage]
        if free_s[stage] > now_s or mine.finished:
            continue
        forwards, backwards = mine.forwards, mine.backwards
        has_input = forwards < len(inputs[stage]) and inputs[stage][forwards] <= now_s
        has_gradient = backwards < len(gradients[stage]) and gradients[stage][backwards] <= now_s
        kind = choose(mine, gates[stage], has_input, has_gradient)
        if kind is None:
            continue
        times = {
            "F": costs.forward_s,
            "B": costs.input_backward_s,
            "W": costs.weight_backward_s,
        }
        expects = expectations[stage].next_kind(mine) if expected else None
        if kind != expects and worth_holding(mine, gates[stage], expects, has_input, has_gradient):
            each = (stage, mine.forwards + mine.backwards + mine.weights)
            if each not in held:
                message = awaited[stage] = expects, mine.next_of(expects)
                held[each] = now_s + patience[stage].share(*message) * times[kind][stage]
                heapq.heappush(events, (held[each], stage))
            if now_s < held[each]:
                continue
        if (message := awaited[stage]) is not None:
            patience[stage].on_held(*message, came=kind == message[0])
            awaited[stage] = None
        microbatch = mine.count(kind)
        ran[stage].append(f"{kind}{microbatch}")
        free_s[stage] = now_s + times[kind][stage] * (1 + (rng.uniform(0, noise) if rng else 0))
        heapq.heappush(events, (free_s[stage], stage))
        if kind == "F":
            if stage == stages - 1:
                gradients[stage].append(free_s[stage])
            else:
                delay_s = costs.delay_forward_s[stage]
                deliver(inputs[stage + 1], free_s[stage], delay_s, stage + 1)
        elif kind == "B" and stage:
            delay_s = costs.delay_backward_s[stage - 1]
            deliver(gradients[stage - 1], free_s[stage], delay_s, stage - 1)
    assert all(each.finished for each in progress), ran
    return max(free_s), ran


@st.composite
def pipelines(draw: Any) -> tuple[PipelineCosts, int, list[StageGates]]:
    stages = draw(st.integers(1, 5))
    count = draw(st.integers(1, 9))
    times = st.floats(0, 5)
    costs = PipelineCosts.of(
        stages,
        forward_s=[draw(times) for _ in range(stages)],
        input_backward_s=[draw(times) for _ in range(stages)],
        weight_backward_s=[draw(times) for _ in range(stages)],
        delay_forward_s=[draw(times) for _ in range(stages - 1)],
        delay_backward_s=[draw(times) for _ in range(stages - 1)],
    )
    numbers = st.integers(1, count)
    gates = [
        StageGates(draw(st.integers(0, count)), draw(numbers), draw(numbers)) for _ in range(stages)
    ]
    return costs, count, gates


@settings(max_examples=300, deadline=None)
@given(pipelines(), st.integers(0, 2**32))
def test_any_gates_on_any_stage_end_within_them(
    case: tuple[PipelineCosts, int, list[StageGates]], seed: int
) -> None:
    costs, count, gates = case
    _, ran = simulate(gates, costs, count, random.Random(seed))
    for stage, operations in enumerate(ran):
        for kind in "FBW":
            wanted = [f"{kind}{i}" for i in range(count)]
            assert [each for each in operations if each[0] == kind] == wanted
        held = pending = 0
        for each in operations:
            held += {"F": 1, "B": -1, "W": 0}[each[0]]
            pending += {"F": 1, "B": 0, "W": -1}[each[0]]
            assert 0 <= held <= gates[stage].activations
            assert held <= pending <= gates[stage].pending


def test_b_before_f_before_w_but_f_first_within_the_warm_up() -> None:
    progress = Progress(8)
    gates = StageGates(warmup=2, activations=3, pending=4)
    assert choose(progress, gates, False, False) is None
    assert choose(progress, gates, True, False) == "F"
    assert [progress.count("F"), progress.count("F")] == [0, 1]
    assert choose(progress, gates, True, True) == "B"  # the warm-up is complete
    assert choose(progress, gates, True, False) == "F"
    progress.count("F")
    assert choose(progress, gates, True, False) is None  # three are held
    progress.count("B")
    progress.count("B")
    assert choose(progress, gates, True, True) == "F"  # one is held
    progress.count("F")
    assert choose(progress, gates, True, False) == "W"  # four are between F and W
    progress.count("W")
    assert choose(progress, gates, False, False) == "W"
    assert choose(progress, gates, False, True) == "B"


@pytest.mark.parametrize(("stages", "count", "delay"), [(4, 12, 0.0), (4, 32, 3.0), (8, 32, 6.0)])
def test_the_gates_cost_nothing(stages: int, count: int, delay: float) -> None:
    costs = PipelineCosts.of(
        stages,
        forward_s=1,
        input_backward_s=1,
        weight_backward_s=1,
        delay_forward_s=delay,
    )
    warmup = adapted_warmup(costs, count)
    open_gates = [StageGates(each, count, count) for each in warmup]
    gates = gates_for(costs, count)
    with_gates = [gates.of_stage(stage) for stage in range(stages)]
    free_s, _ = simulate(open_gates, costs, count)
    gated_s, _ = simulate(with_gates, costs, count)
    assert gated_s <= free_s * 1.001
    assert max(gates.pending) <= 2 * warmup[0] + 1
    # Nor does deciding live cost much against the best order known.
    assert gated_s <= plan_schedule(costs, count, policy="portfolio").iteration_s * 1.04


def test_gates_keep_to_limits() -> None:
    costs = PipelineCosts.of(
        3, forward_s=1, input_backward_s=1, weight_backward_s=1, delay_forward_s=4
    )
    gates = gates_for(costs, 16, Limits((5, 4, 3), (6, 6, 2)))
    assert gates == Gates((5, 4, 1), (5, 4, 2), (6, 6, 2))
    assert predicted_s(costs, 16, gates) > predicted_s(costs, 16, gates_for(costs, 16))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_predictions_are_those_of_the_simulation(seed: int) -> None:
    rng = random.Random(seed)
    stages, count = rng.randint(1, 6), rng.randint(1, 16)
    costs = PipelineCosts.of(
        stages,
        forward_s=[rng.uniform(1, 3) for _ in range(stages)],
        input_backward_s=[rng.uniform(1, 3) for _ in range(stages)],
        weight_backward_s=[rng.uniform(1, 3) for _ in range(stages)],
        delay_forward_s=[rng.uniform(0, 9) for _ in range(stages - 1)],
    )
    gates = gates_for(costs, count)
    if list(gates.warmup) != sorted(gates.warmup, reverse=True):
        return  # the generator lets no stage ask for more than the one before it has
    simulated_s, _ = simulate([gates.of_stage(i) for i in range(stages)], costs, count)
    assert predicted_s(costs, count, gates) == pytest.approx(simulated_s)


def test_bad_gates_are_refused() -> None:
    with pytest.raises(ValueError, match="limits of at least 1"):
        StageGates(1, 0, 1)
    with pytest.raises(ValueError, match="limits of at least 1"):
        Gates((1, 1), (1, 1), (1, 0))
    with pytest.raises(ValueError, match="as many counts of each kind"):
        Gates((1, 1), (1,), (1, 1))


def test_what_is_expected_is_the_first_that_has_not_run() -> None:
    expectation, progress = Expectation("FFBWBW"), Progress(2)
    seen = []
    # B0 comes before F1, and W0 before B1, although they are behind them.
    for kind in ("", "F", "B", "F", "W", "B", "W"):
        if kind:
            progress.count(kind)
        seen.append(expectation.next_kind(progress))
    assert seen == ["F", "F", "F", "W", "B", "W", None]
    assert Expectation("").next_kind(Progress(1)) is None


@pytest.mark.parametrize("slow", [(0,), (0, 1), (6,)])
def test_a_moment_of_patience_keeps_noise_from_spoiling_a_plan(slow: tuple[int, ...]) -> None:
    """Without it, an operation that begins right before a message costs more than the noise."""
    stages, count = 8, 16
    costs = PipelineCosts.of(
        stages,
        forward_s=0.01,
        input_backward_s=[0.0] + [0.01] * 7,
        weight_backward_s=[0.02] + [0.01] * 7,
        delay_forward_s=[0.035 if link in slow else 0.005 for link in range(stages - 1)],
    )
    gates = gates_for(costs, count)
    each = [gates.of_stage(stage) for stage in range(stages)]
    planned_s = predicted_s(costs, count, gates)
    orders = predicted_orders(costs, count, gates)
    assert simulate(each, costs, count, expected=orders)[0] == pytest.approx(planned_s)

    # Measured, they are a little off.
    rng = random.Random(2)
    measured = replace(
        costs,
        forward_s=tuple(each * rng.uniform(0.995, 1.005) for each in costs.forward_s),
        weight_backward_s=tuple(
            each * rng.uniform(0.995, 1.005) for each in costs.weight_backward_s
        ),
        delay_forward_s=tuple(each * rng.uniform(1, 1.005) for each in costs.delay_forward_s),
    )
    orders = predicted_orders(measured, count, gates)

    def mean_s(expected: Sequence[str], noise: float) -> float:
        rng = random.Random(1)
        factors = (1.0, 1.02)
        ends = [simulate(each, costs, count, rng, factors, expected, noise)[0] for _ in range(30)]
        return statistics.fmean(ends)

    # Messages that take up to 2 % longer, and operations.
    assert mean_s(orders, 0.0) < mean_s((), 0.0) - 0.005 * planned_s
    saving = 0.01 if 0 in slow else 0.0
    assert mean_s(orders, 0.02) < mean_s((), 0.02) - saving * planned_s
    assert mean_s(orders, 0.02) < 1.015 * planned_s


def test_what_lacks_only_its_message_is_worth_a_moment() -> None:
    progress, gates = Progress(4), StageGates(warmup=1, activations=2, pending=4)
    assert not worth_holding(progress, gates, "B", True, False)  # no F has run
    assert worth_holding(progress, gates, "F", False, False)
    assert not worth_holding(progress, gates, "F", True, False)  # it is there
    assert not worth_holding(progress, gates, "W", False, False)
    assert not worth_holding(progress, gates, None, False, False)
    progress.count("F")
    assert worth_holding(progress, gates, "B", True, False)
    assert not worth_holding(progress, gates, "F", False, True)  # B would come first, still
    progress.count("F")
    assert not worth_holding(progress, gates, "F", False, False)  # behind a gate


def test_patience_follows_its_success() -> None:
    patience = Patience()
    assert patience.share("B", 3) == Patience.MOST
    for _ in range(20):
        patience.on_held("B", 3, came=False)
    assert patience.share("B", 3) == Patience.LEAST
    assert patience.share("F", 3) == patience.share("B", 4) == Patience.MOST
    patience.on_held("B", 3, came=True)
    assert patience.share("B", 3) == 2 * Patience.LEAST
    for _ in range(20):
        patience.on_held("B", 3, came=True)
    assert patience.share("B", 3) == Patience.MOST
