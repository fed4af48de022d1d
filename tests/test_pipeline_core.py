"""The planner's compiled inner loops against their Python twins: the same to the last bit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_twins import evaluator, generator, local_search
from test_pipeline_plan import problems, rules_of

from torch_resilient import _planning
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.generator import Limits, Rules, no_limits
from torch_resilient.planning.orders import classic_kinds, orders_from_kinds, to_kinds
from torch_resilient.planning.replay import replay

Problem = tuple[PipelineCosts, int, Limits]
COSTS = PipelineCosts.of(
    3, forward_s=0.01, input_backward_s=0.011, weight_backward_s=0.009, delay_forward_s=[0.05, 0]
)


@settings(max_examples=200, deadline=None, print_blob=True)
@given(problems(), st.data())
def test_generated_orders(problem: Problem, data: st.DataObject) -> None:
    costs, microbatches, limits = problem
    rules = data.draw(rules_of(costs.num_stages, microbatches))
    compiled = _planning.generate(costs, microbatches, rules, limits)
    assert compiled == generator.generate(costs, microbatches, rules, limits)


@settings(max_examples=100, deadline=None, print_blob=True)
@given(problems(), st.data())
def test_times_and_memory(problem: Problem, data: st.DataObject) -> None:
    costs, microbatches, limits = problem
    rules = data.draw(rules_of(costs.num_stages, microbatches))
    kinds, _ = generator.generate(costs, microbatches, rules, limits)
    times = _planning.evaluate(kinds, costs)
    assert times == evaluator.evaluate(kinds, costs)
    held = _planning.memory_peaks(kinds, costs)
    assert held == evaluator.memory_peaks(kinds, costs)
    # replay, the reference, gives the same result.
    timed = replay(orders_from_kinds(kinds), costs)
    assert max(end_s for _, _, _, end_s in times) == timed.iteration_s
    assert [(begin_s, forward_s, backward_s) for begin_s, forward_s, backward_s, _ in times] == [
        (each.warm_up_s, each.forward_s, each.backward_s) for each in timed.bubbles
    ]
    assert held == list(
        zip(timed.peak_activations, timed.peak_pending, timed.peak_units, strict=True)
    )


@settings(max_examples=60, deadline=None, print_blob=True)
@given(problems(), st.data(), st.integers(0, 2**64 - 1))
def test_searches(problem: Problem, data: st.DataObject, seed: int) -> None:
    costs, microbatches, limits = problem
    rules = data.draw(rules_of(costs.num_stages, microbatches))
    kinds, _ = generator.generate(costs, microbatches, rules, limits)
    compiled = _planning.Search(kinds, costs, limits, 0.0, seed)
    plain = local_search.Search(kinds, costs, limits, 0.0, seed)
    for _ in range(3):
        assert compiled.run(100) == plain.run(100)
        assert compiled.found == plain.found


def test_a_search_that_starts_anew() -> None:
    """Long enough for several rounds, until it gives up."""
    kinds = classic_kinds("zb_h1", 2, 3)
    costs = PipelineCosts.of(
        2, forward_s=3, input_backward_s=4, weight_backward_s=2, delay_forward_s=5
    )
    limits = no_limits(2, 3)
    compiled = _planning.Search(kinds, costs, limits, 0.0, 1)
    plain = local_search.Search(kinds, costs, limits, 0.0, 1)
    more = True
    while more:
        more = compiled.run(5000)
        assert plain.run(5000) == more
    assert compiled.found == plain.found
    assert compiled.found[0][0] < replay(orders_from_kinds(kinds), costs).iteration_s


def test_an_unbuilt_tree_says_what_to_do(run_python: Callable[..., str]) -> None:
    """The import succeeds, because `torch-resilient doctor` must be able to report it."""
    program = """
import sys
sys.modules["torch_resilient._planning"] = None  # makes the import fail
from torch_resilient.pipelining import PipelineCosts, plan_schedule
costs = PipelineCosts.of(2, forward_s=3, input_backward_s=4, weight_backward_s=2)
try:
    plan_schedule(costs, 4)
except ImportError as error:
    print(error)
"""
    text = run_python(program, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert text.startswith("torch_resilient._planning is missing")
    assert "pip install" in text


def test_large_pipelines() -> None:
    costs = PipelineCosts.of(
        33,
        forward_s=[0.01 + 0.0001 * (7 * i % 11) for i in range(33)],
        input_backward_s=0.012,
        weight_backward_s=[0.008 + 0.0001 * (5 * i % 13) for i in range(33)],
        delay_forward_s=[0.03 * (i % 9 == 4) for i in range(32)],
    )
    limits = no_limits(33, 70)
    for rules in (
        Rules(tuple(range(66, 0, -2)), gate=True, forward_first=True, weight_share=0.5),
        Rules((70,) * 33, wait_for_warmup=True),
    ):
        compiled = _planning.generate(costs, 70, rules, limits)
        assert compiled == generator.generate(costs, 70, rules, limits)
        search = _planning.Search(compiled[0], costs, limits, 0.0, 9)
        plain = local_search.Search(compiled[0], costs, limits, 0.0, 9)
        search.run(20)
        plain.run(20)
        assert search.found == plain.found


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ([], r"kinds: expected 3 orders, got 0"),
        ([b"", b"", b""], r"kinds\[0\]: expected 0, 1 and 2, each as often"),
        ([b"\0\1\2", b"\0\1\2", b"\0\1\3"], r"kinds\[2\]: expected 0, 1 and 2"),
        ([b"\0\1\2", b"\0\1\2" * 2, b"\0\1\2"], r"kinds\[1\]: expected 0, 1 and 2"),
        ([b"\0\1\2", b"\0\0\1", b"\0\1\2"], r"kinds\[1\]: expected 0, 1 and 2"),
        ([to_kinds("BFW")] * 3, "kinds: the stages wait for each other"),
    ],
)
def test_what_cannot_be_run_is_refused(kinds: list[bytes], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        _planning.evaluate(kinds, COSTS)
    with pytest.raises(ValueError, match=text):
        _planning.Search(kinds, COSTS, no_limits(3, 1), 0.0, 0)


def test_sizes_that_do_not_fit_are_refused() -> None:
    limits = no_limits(3, 4)
    with pytest.raises(ValueError, match="warmup: expected 3 values, got 2"):
        _planning.generate(COSTS, 4, Rules((1, 1)), limits)
    with pytest.raises(ValueError, match="activations: expected 3 values, got 4"):
        _planning.generate(COSTS, 4, Rules((1, 1, 1)), no_limits(4, 4))
    with pytest.raises(ValueError, match="num_microbatches: expected at least 1"):
        _planning.generate(COSTS, 0, Rules((1, 1, 1)), limits)


def test_other_threads_run_meanwhile() -> None:
    """The search gives the GIL away: a thread that waits for it gets on."""
    kinds = classic_kinds("1f1b", 3, 60)
    search = _planning.Search(kinds, COSTS, no_limits(3, 60), 0.0, 1)
    before = sys.getswitchinterval()
    # A thread that holds the GIL would now be asked for it after an hour only.
    sys.setswitchinterval(3600)
    try:
        running, seen = threading.Event(), threading.Event()

        def wait() -> None:
            running.wait(60)
            seen.set()

        thread = threading.Thread(target=wait)
        thread.start()
        running.set()
        tries = 0
        while not seen.is_set() and tries < 10_000:
            search.run(100)
            tries += 1
        thread.join(60)
        assert seen.is_set()
        assert tries < 10_000
    finally:
        sys.setswitchinterval(before)
