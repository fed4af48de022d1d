"""Replay of pipeline schedules: known figures, a dumb twin, and what cannot run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_twins.evaluator import Evaluator

from torch_resilient.pipelining import timeline
from torch_resilient.planning import orders
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import KINDS, Operation, Order, OrderError, to_kinds
from torch_resilient.planning.replay import replay
from torch_resilient.planning.slackness import warmup_of

# Figures 4 and 5 of the paper: 4 stages, 12 microbatches, all operations 10 ms. The unit does not
# matter, and whole numbers are exact.
PAPER = PipelineCosts.of(4, forward_s=10, input_backward_s=10, weight_backward_s=10)


def times(plan: Sequence[Order], costs: PipelineCosts) -> list[float]:
    """Iteration times with 0, 10 and 20 more on the first link."""
    return [replay(plan, costs.with_delay(0, delay)).iteration_s for delay in (0, 10, 20)]


def twin(plan: Sequence[Order], costs: PipelineCosts) -> list[dict[Operation, float]] | None:
    """When each operation ends, by relaxation: raise each time to what it needs until none moves.

    None if the times grow for ever, that is, if the stages wait for each other.
    """
    last = len(plan) - 1
    durations = {
        "F": costs.forward_s,
        "B": costs.input_backward_s,
        "W": costs.weight_backward_s,
    }
    ends = [dict.fromkeys(order, 0.0) for order in plan]
    for _ in range(sum(len(order) for order in plan) + 2):
        moved = False
        for stage, order in enumerate(plan):
            for i, operation in enumerate(order):
                kind, microbatch = operation
                needs = [0.0]
                if i:
                    needs.append(ends[stage][order[i - 1]])
                if kind == "F" and stage:
                    delay = costs.delay_forward_s[stage - 1]
                    needs.append(ends[stage - 1][operation] + delay)
                if kind == "B" and stage < last:
                    needs.append(ends[stage + 1][operation] + costs.delay_backward_s[stage])
                if kind == "B" and stage == last:
                    needs.append(ends[stage][Operation("F", microbatch)])
                end = max(needs) + durations[kind][stage]
                moved |= end > ends[stage][operation]
                ends[stage][operation] = end
        if not moved:
            return ends
    return None


def test_zero_bubble_schedules_of_the_literature() -> None:
    """With 0, 10 and 20 ms on the first link."""
    assert times(orders.zb_h2(4, 12), PAPER) == [390, 400, 420]
    assert times(orders.zb_h1(4, 12), PAPER) == [390, 460, 560]
    assert times(orders.one_f_one_b(4, 12), PAPER.fused()) == [450, 550, 650]
    assert replay(orders.gpipe(4, 12), PAPER.fused()).iteration_s == (12 + 3) * 30


def test_memory_of_the_classic_orders() -> None:
    h1 = replay(orders.zb_h1(4, 12), PAPER)
    assert h1.peak_activations == (4, 3, 2, 1)
    assert h1.peak_pending == (4, 4, 4, 4)
    # A microbatch that waits for its W weighs 1.6: stage i has put off i + 1 of them.
    assert h1.peak_units == pytest.approx((4.6, 5.2, 5.8, 6.4))
    h2 = replay(orders.zb_h2(4, 12), PAPER)
    assert h2.peak_activations == (7, 5, 3, 1)
    assert h2.peak_pending == (7, 7, 7, 7)
    assert replay(orders.one_f_one_b(4, 12), PAPER).peak_pending == (4, 3, 2, 1)
    assert replay(orders.gpipe(4, 12), PAPER).peak_activations == (12,) * 4


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_classic_orders_run_for_every_size(stages: int, microbatches: int) -> None:
    costs = PipelineCosts.of(stages, forward_s=1, input_backward_s=1, weight_backward_s=1)
    for make in (orders.gpipe, orders.one_f_one_b, orders.zb_h1, orders.zb_h2):
        plan = make(stages, microbatches)
        timed = replay(plan, costs)
        assert [len(order) for order in plan] == [3 * microbatches] * stages
        assert timed.iteration_s >= 3 * microbatches
        warmup = warmup_of(plan)
        assert sorted(warmup, reverse=True) == warmup
    one = replay(orders.one_f_one_b(stages, microbatches), costs)
    zero = replay(orders.zb_h1(stages, microbatches), costs)
    assert max(zero.peak_pending) <= max(one.peak_pending)
    assert zero.iteration_s <= one.iteration_s


def test_bubbles_by_cause() -> None:
    """Two stages, worked out by hand: F 2 and 1, B 1, W 1, 3 there and 5 back."""
    costs = PipelineCosts.of(
        2,
        forward_s=[2, 1],
        input_backward_s=1,
        weight_backward_s=1,
        delay_forward_s=3,
        delay_backward_s=5,
    )
    timed = replay(orders.one_f_one_b(2, 2), costs)
    # stage 0: F0 0-2, F1 2-4, B0 12-13, W0 13-14, B1 15-16 and W1; its gradients come at 12 and 15.
    # stage 1: F0 5-6, B0 6-7, W0 7-8, F1 8-9, B1 9-10, W1 10-11.
    assert [(str(op), start, end) for op, start, end in timed.stages[0]] == [
        ("F0", 0, 2),
        ("F1", 2, 4),
        ("B0", 12, 13),
        ("W0", 13, 14),
        ("B1", 15, 16),
        ("W1", 16, 17),
    ]
    first, second = timed.bubbles
    assert (first.warm_up_s, first.forward_s, first.backward_s, first.cool_down_s) == (0, 0, 9, 0)
    assert (second.warm_up_s, second.forward_s, second.backward_s) == (5, 0, 0)
    assert second.cool_down_s == 17 - 11
    assert timed.bubble == pytest.approx((9 + 5 + 6) / (2 * 17))
    assert [
        (str(message.operation), message.source, message.destination, message.end_s)
        for message in timed.messages
    ] == [("F0", 0, 1, 5), ("F1", 0, 1, 7), ("B0", 1, 0, 12), ("B1", 1, 0, 15)]


def parse(*lines: str) -> list[Order]:
    return [[Operation.parse(text) for text in line.split()] for line in lines]


@pytest.mark.parametrize(
    ("lines", "stage", "operation", "text"),
    [
        (("F0 B0 W0", "F0 B0"), 1, "W0", "stage 1: W0 is missing"),
        (("F0 B0 W0 F1 B1 W1", "F0 B0 W0"), 1, "F1", "stage 1: F1 is missing"),
        (("F0 F0 B0 W0", "F0 B0 W0"), 0, "F0", "stage 0: F0 comes twice"),
        (("F0 B0 W0", "B0 F0 W0"), 1, "B0", "stage 1: B0 comes before F0"),
        (("F0 W0 B0", "F0 B0 W0"), 0, "W0", "stage 0: W0 comes before B0"),
        (("F0 B0 W0", "F0 B0 W5"), 1, "W5", "stage 1: W5: expected microbatches 0 to 0"),
        # Increasing warm-ups: Lemma 1.
        (
            ("F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 B1 W1"),
            0,
            "B0",
            "deadlock: stage 0 waits to run B0 until stage 1 has run it; "
            "stage 1 waits to run F1 until stage 0 has run it",
        ),
        (("F0 B0 W0",), 1, None, "1 orders for 2 stages"),
        (("", ""), 0, None, "stage 0: no microbatch"),
    ],
)
def test_what_cannot_run_is_named(
    lines: tuple[str, ...], stage: int, operation: str | None, text: str
) -> None:
    costs = PipelineCosts.of(2, forward_s=1, input_backward_s=1, weight_backward_s=1)
    with pytest.raises(OrderError) as caught:
        replay(parse(*lines), costs)
    assert text in str(caught.value)
    assert caught.value.stage == stage
    found = caught.value.operation
    assert (None if found is None else str(found)) == operation


def test_an_unknown_kind_is_named() -> None:
    costs = PipelineCosts.of(1, forward_s=1, input_backward_s=1, weight_backward_s=1)
    with pytest.raises(OrderError, match="stage 0: I0: the kind is not F, B or W"):
        replay([[Operation("F", 0), Operation("I", 0), Operation("W", 0)]], costs)
    with pytest.raises(ValueError, match="operation 'I0'"):
        Operation.parse("I0")


@st.composite
def costs_of(draw: st.DrawFn, stages: int, least: int = 1) -> PipelineCosts:
    """Whole numbers. F and B take at least `least`: with 1, every circle of waiting grows."""

    def each(count: int, least: int = 0) -> list[float]:
        return draw(st.lists(st.integers(least, 5).map(float), min_size=count, max_size=count))

    return PipelineCosts.of(
        stages,
        forward_s=each(stages, least),
        input_backward_s=each(stages, least),
        weight_backward_s=each(stages),
        delay_forward_s=each(stages - 1),
        delay_backward_s=each(stages - 1),
    )


@st.composite
def any_order(draw: st.DrawFn, microbatches: int, in_turn: bool) -> Order:
    """Operations of one stage in any order that keeps F, B, W of each microbatch in sequence."""
    left = [list(KINDS) for _ in range(microbatches)]
    order = []
    while any(left):
        if in_turn:
            kind = draw(st.sampled_from(sorted({kinds[0] for kinds in left if kinds})))
            microbatch = next(i for i, kinds in enumerate(left) if kinds and kinds[0] == kind)
        else:
            microbatch = draw(st.sampled_from([i for i, kinds in enumerate(left) if kinds]))
        order.append(Operation(left[microbatch].pop(0), microbatch))
    return order


@settings(max_examples=150, deadline=None, print_blob=True)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_replay_agrees_with_a_relaxation(
    data: st.DataObject, stages: int, microbatches: int, in_turn: bool
) -> None:
    costs = data.draw(costs_of(stages))
    plan = [data.draw(any_order(microbatches, in_turn)) for _ in range(stages)]
    wanted = twin(plan, costs)
    kinds = [to_kinds("".join(operation.kind for operation in order)) for order in plan]
    evaluator = Evaluator(costs, microbatches)
    evaluated = evaluator.run(kinds)
    if wanted is None:
        with pytest.raises(OrderError, match="deadlock"):
            replay(plan, costs)
        if in_turn:
            assert evaluated is None
        return
    timed = replay(plan, costs)
    for spans, ends in zip(timed.stages, wanted, strict=True):
        assert {operation: end_s for operation, _, end_s in spans} == ends
    assert timed.iteration_s == max(end for ends in wanted for end in ends.values())
    if in_turn:
        assert evaluated == timed.iteration_s
        assert evaluator.starts == [[span.start_s for span in spans] for spans in timed.stages]
    # Idle and busy time make up the iteration.
    for stage, spans in enumerate(timed.stages):
        busy = sum(end_s - start_s for _, start_s, end_s in spans)
        assert busy + timed.bubbles[stage].total_s == pytest.approx(timed.iteration_s)
        assert timed.peak_activations[stage] <= timed.peak_pending[stage]


@settings(max_examples=50, deadline=None, print_blob=True)
@given(st.data(), st.integers(1, 4), st.integers(1, 5))
def test_operations_may_take_no_time(data: st.DataObject, stages: int, microbatches: int) -> None:
    costs = data.draw(costs_of(stages, least=0))
    timed = replay(orders.zb_h1(stages, microbatches), costs)
    ends = twin(orders.zb_h1(stages, microbatches), costs)
    assert ends is not None
    assert timed.iteration_s == max(end for each in ends for end in each.values())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"stages": 0}, "stages: expected an integer, at least 1, got 0"),
        ({"forward_s": [1, 2]}, "forward_s: expected a number or 3 of them, one per stage, got 2"),
        ({"delay_forward_s": [1, 2, 3]}, "delay_forward_s: expected a number or 2 of them"),
        ({"input_backward_s": -1}, "input_backward_s: expected a finite number, not negative"),
        ({"weight_backward_s": [1, float("nan"), 1]}, r"weight_backward_s\[1\]: expected a finite"),
        ({"delay_backward_s": float("inf")}, "delay_backward_s: expected a finite"),
        ({"forward_s": 10**400}, "forward_s: expected a finite number"),
        ({"forward_s": "1"}, "forward_s: expected a number or one per stage, got '1'"),
        ({"activation_units": [1, True, 1]}, r"activation_units\[1\]: expected a number, got True"),
        ({"weight_backward_units": None, "forward_s": None}, "forward_s: expected a number or one"),
    ],
)
def test_costs_name_the_field_that_is_wrong(change: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {
        "stages": 3,
        "forward_s": 1,
        "input_backward_s": 1,
        "weight_backward_s": 1,
    }
    with pytest.raises(ValueError, match=f"^{text}"):
        PipelineCosts.of(**{**arguments, **change})  # type: ignore[arg-type]


def test_costs_by_stage_and_link() -> None:
    costs = PipelineCosts.of(
        3, forward_s=[1, 2, 3], input_backward_s=4, weight_backward_s=5, delay_forward_s=6
    )
    assert costs.input_backward_s == (4, 4, 4)
    assert costs.delay_backward_s == (6, 6)
    assert costs.weight_backward_units == pytest.approx((1.6,) * 3)
    assert costs.with_delay(1, 7, 8).delay_forward_s == (6, 7)
    assert costs.with_delay(1, 7, 8).delay_backward_s == (6, 8)
    with pytest.raises(ValueError, match="link: expected 0 to 1, got 2"):
        costs.with_delay(2, 0)


def test_pictures() -> None:
    timed = replay(orders.zb_h1(4, 6), PAPER.with_delay(1, 15))
    grid = timeline.text_grid(timed, width=80)
    lines = grid.splitlines()
    assert len(lines) == 5
    assert lines[0].startswith("stage 0  |F0f")
    assert all(len(line.split("|")[1]) == 80 for line in lines[:4])
    assert lines[4].endswith(" ms")

    events = timeline.chrome_trace(timed)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 4 * 6 * 3
    assert max(event["ts"] + event["dur"] for event in slices) == timed.iteration_s * 1e6
    assert sum(event["ph"] == "s" for event in events) == len(timed.messages) == 2 * 3 * 6

    picture = timeline.svg(timed, "a < b")
    assert picture.startswith("<svg ")
    assert picture.endswith("</svg>\n")
    assert "a &lt; b" in picture
    assert picture.count("<g>") == 4 * 6 * 3
