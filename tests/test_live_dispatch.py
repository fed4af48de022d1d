"""The exact model of benchmarks/live_dispatch.py: no faster and no slower than the package's."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from torch_resilient.pipelining import PipelineCosts, adapted_warmup, gates_for, replay
from torch_resilient.planning.dispatch import predicted_s
from torch_resilient.planning.generator import no_limits
from torch_resilient.planning.orders import WEIGHT_BACKWARD, orders_from_kinds

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from live_dispatch import (  # noqa: E402
    START_MS,
    Problem,
    Times,
    hindsight_ms,
    live,
    policies,
    problems,
    search,
    within,
)


def constant(stages: int, count: int) -> Problem:
    """All links of 30 ms at any time, which is the mean of the traces."""
    links = [[30.0] * 20_000] * (stages - 1)
    return Problem(stages, count, 10, links, links, no_limits(stages, count))


@pytest.mark.parametrize(("stages", "count"), [(1, 3), (2, 5), (4, 12), (6, 9)])
def test_constant_delays_give_what_the_package_predicts(stages: int, count: int) -> None:
    problem = constant(stages, count)
    # One "second" for each ms: all times are whole numbers, and simultaneous events stay so.
    costs = PipelineCosts.of(
        stages, forward_s=10, input_backward_s=10, weight_backward_s=10, delay_forward_s=30
    )
    gates = gates_for(costs, count)
    orders = live(problem, gates)
    found_ms = Times(problem, orders).iteration_ms
    assert found_ms == predicted_s(costs, count, gates)
    assert found_ms == replay(orders_from_kinds(orders), costs).iteration_s


@pytest.mark.parametrize("memory", ["none", "1.5S"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_change_gives_what_the_whole_order_gives(memory: str, apart: bool) -> None:
    rng = random.Random(1)
    for _, problem in problems("A", memory, [(4, 12, 10)], 2, apart):
        times = Times(problem, policies(problem)["at F-W"])
        before_ms = times.objective_ms
        for _ in range(20):
            times = search(times, 50, rng)
            whole = Times(problem, times.orders)
            assert times.starts_ms == whole.starts_ms
            assert times.arrivals_ms == whole.arrivals_ms
            for stage, order in enumerate(times.orders):
                assert problem.limits.allow_stage(stage, order)
        assert times.objective_ms < before_ms


def test_a_change_that_waits_for_itself_is_none() -> None:
    problem = constant(2, 2)
    times = Times(problem, live(problem, within(problem.limits, (2, 1))))
    order = times.orders[0]
    assert order[-1] == WEIGHT_BACKWARD
    backwards_first = bytes(sorted(order, key=lambda kind: kind != 1))
    assert times.changed(0, 0, backwards_first) is None


def test_hindsight_is_no_later_than_any_policy_and_not_without_the_work() -> None:
    for seed, problem in problems("B", "2S", [(4, 12, 30)], 2, apart=False):
        orders = policies(problem)
        best_ms, before_ms = hindsight_ms(problem, list(orders.values()), 300, random.Random(seed))
        times_ms = [Times(problem, each).iteration_ms for each in orders.values()]
        assert 3 * problem.count * problem.operation_ms <= best_ms <= before_ms <= min(times_ms)
        assert all(Times(problem, each).starts_ms[0][0] == START_MS for each in orders.values())


def test_live_dispatch_with_foresight_runs_everything() -> None:
    for _, problem in problems("C", "none", [(4, 12, 10)], 1, apart=True):
        warmup = adapted_warmup(problem.costs(), problem.count)
        orders = live(problem, within(problem.limits, warmup), weight_share=1.0)
        assert [sorted(order) for order in orders] == [sorted(b"\0\1\2" * 12)] * 4
        assert orders != live(problem, within(problem.limits, warmup))
