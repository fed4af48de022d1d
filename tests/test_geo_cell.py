"""Schedules of cells: valid, as good as the paper's and better, and the same from both twins."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_resilient import _planning
from torch_resilient.geo import cell_rules
from torch_resilient.geo.cell import Cell, lower_bound_ms
from torch_resilient.geo.cell_policies import POLICIES, cell_time_ms, plan_cell
from torch_resilient.geo.cell_replay import faults_of, replay
from torch_resilient.geo.cell_rules import Rules


def uniform(
    pipelines: int, microbatches: int, sites: str, hop_ms: float, relays: int | None = None
) -> Cell:
    """One letter of `sites` for each stage; F, R, B = 1, 1, 2 ms, as in the paper's Figure 6."""
    stages = len(sites)
    crosses = [a != b for a, b in itertools.pairwise(sites)]
    return Cell(
        pipelines=pipelines,
        microbatches=microbatches,
        sites=tuple(sites),
        forward_ms=(1.0,) * stages,
        recompute_ms=(1.0,) * (stages - 1) + (0.0,),
        backward_ms=(2.0,) * stages,
        weight_ms=(0.0,) * stages,
        split=False,
        hop_ms=tuple((hop_ms, hop_ms) if each else (0.0, 0.0) for each in crosses),
        latency_ms=((0.0, 0.0),) * (stages - 1),
        sharing="temporal",
        relays=relays or pipelines,
        caps=(microbatches,) * stages,
    )


FIGURE_6 = uniform(2, 4, "aabbcc", 2.0)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Uneven stages, asymmetric hops, latencies, relays, limits, with and without W."""
    pipelines = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 6))
    # Whole numbers make many things happen at once.
    times = draw(st.sampled_from([st.integers(0, 4).map(float), st.floats(0, 4)]))
    sites = [0]
    for _ in range(stages - 1):
        sites.append(sites[-1] + draw(st.integers(0, 1)))

    def by_stage() -> tuple[float, ...]:
        return tuple(draw(times) for _ in range(stages))

    def by_hop() -> tuple[tuple[float, float], ...]:
        return tuple((draw(times), draw(times)) for _ in range(stages - 1))

    split = draw(st.booleans())
    return Cell(
        pipelines=pipelines,
        microbatches=microbatches,
        sites=tuple(f"site {each}" for each in sites),
        forward_ms=by_stage(),
        recompute_ms=(*by_stage()[:-1], 0.0),
        backward_ms=by_stage(),
        weight_ms=by_stage() if split else (0.0,) * stages,
        split=split,
        hop_ms=by_hop(),
        latency_ms=by_hop(),
        sharing=draw(st.sampled_from(["temporal", "spatial"])),
        relays=draw(st.integers(1, 6)),
        caps=tuple(draw(st.integers(1, microbatches)) for _ in range(stages)),
    )


def rules_of(draw: st.DrawFn, cell: Cell) -> Rules:
    alternate = draw(st.booleans())
    warmup: list[int] = []
    if alternate or draw(st.booleans()):
        most = cell.microbatches
        for cap in cell.caps:
            most = min(most, cap, draw(st.integers(1, cell.microbatches)))
            warmup.append(most)
    return Rules(
        priority="WBRF" if alternate else "".join(draw(st.permutations("FRBW"))),
        turn=draw(st.integers(0, cell.microbatches)),
        reserve=draw(st.booleans()),
        spatial=draw(st.booleans()),
        early=draw(st.booleans()),
        warmup=tuple(warmup),
        alternate=alternate,
    )


@settings(max_examples=300, deadline=None, print_blob=True)
@given(cells(), st.data())
def test_both_twins_give_the_same(cell: Cell, data: st.DataObject) -> None:
    rules = data.draw(st.composite(rules_of)(cell))
    plain = cell_rules.schedule(cell, rules)
    assert _planning.schedule_cell(cell, rules) == (
        plain.kinds,
        plain.starts_ms,
        plain.sent,
        plain.iteration_ms,
    )
    assert _planning.time_cell(cell, rules) == plain.iteration_ms


@settings(max_examples=150, deadline=None, print_blob=True)
@given(cells())
def test_every_policy_gives_valid_schedules(cell: Cell) -> None:
    time_ms = {}
    for policy in POLICIES:
        if policy == "gpipe" and min(cell.caps) < cell.microbatches:
            continue
        plan = plan_cell(cell, policy)
        assert faults_of(cell, plan) == []
        assert plan.lower_bound_ms <= plan.iteration_ms
        assert 0 <= plan.utilisation <= 1 + 1e-9
        assert cell_time_ms(cell, policy) == plan.iteration_ms
        time_ms[policy] = plan.iteration_ms
        # The same orders, as soon as possible.
        assert faults_of(cell, replay(cell, plan.orders)) == []
    assert time_ms["best"] <= time_ms["paper"]


@settings(max_examples=100, deadline=None, print_blob=True)
@given(cells())
def test_replay_is_never_later_than_the_plan(cell: Cell) -> None:
    plan = plan_cell(cell, "paper")
    again = replay(cell, plan.orders, plan.transfers)
    assert again.iteration_ms <= plan.iteration_ms * (1 + 1e-9)
    assert faults_of(cell, again) == []


def test_figure_6() -> None:
    """Paper: ATLAS, Figure 6: 38 slots with Varuna, 36 with ATLAS, starts in slots 1 and 5."""
    spatial = replace(FIGURE_6, sharing="spatial")
    assert plan_cell(spatial, "varuna").iteration_ms == 38
    paper = plan_cell(FIGURE_6, "paper")
    assert paper.iteration_ms == 36
    assert [row[0][0] for row in paper.starts_ms] == [0, 4]
    assert plan_cell(FIGURE_6).iteration_ms <= 34
    # Proven optimal with spatial sharing.
    assert plan_cell(spatial).iteration_ms == 37


@pytest.mark.parametrize(
    ("pipelines", "relays", "most_ms"),
    [(2, None, 424), (4, None, 471), (2, 24, 415), (4, 48, 415)],
)
def test_sixty_stages_over_five_sites(pipelines: int, relays: int | None, most_ms: float) -> None:
    sites = "".join(12 * each for each in "abcde")
    cell = uniform(pipelines, 60, sites, pipelines, relays)
    assert cell_time_ms(cell) <= most_ms


def test_waiting_costs_time_and_memory_limits_hold() -> None:
    narrow = replace(FIGURE_6, caps=(1, 2, 2, 2, 2, 2))
    plan = plan_cell(narrow)
    assert faults_of(narrow, plan) == []
    assert plan.iteration_ms > plan_cell(FIGURE_6).iteration_ms
    with pytest.raises(ValueError, match="policy: gpipe holds all 4 microbatches"):
        plan_cell(narrow, "gpipe")
    far = replace(FIGURE_6, latency_ms=((5.0, 5.0),) * 5)
    assert plan_cell(far).iteration_ms >= plan_cell(FIGURE_6).iteration_ms + 20


def test_a_larger_budget_is_never_worse() -> None:
    cell = replace(uniform(3, 8, "aabbbc", 2.5), latency_ms=((3.0, 3.0),) * 5)
    times = [cell_time_ms(cell, budget_ms=budget_ms) for budget_ms in (0, 1, 5, 100)]
    assert times == sorted(times, reverse=True)


def test_pipelines_that_do_not_meet_are_planned_once() -> None:
    cell = replace(FIGURE_6, pipelines=5, sharing="spatial")
    plan = plan_cell(cell)
    assert faults_of(cell, plan) == []
    assert plan.iteration_ms == plan_cell(replace(FIGURE_6, sharing="spatial")).iteration_ms
    assert all(row == plan.starts_ms[0] for row in plan.starts_ms)


def test_utilisation() -> None:
    plan = plan_cell(FIGURE_6, "paper")
    assert plan.utilisation == pytest.approx(4 * (6 + 5 + 12) / (6 * 36))
    # Nothing takes any time.
    still = replace(
        uniform(1, 1, "a", 0), forward_ms=(0.0,), recompute_ms=(0.0,), backward_ms=(0.0,)
    )
    assert (plan_cell(still).iteration_ms, plan_cell(still).utilisation) == (0, 0)


def test_the_bound_counts_the_transfers_of_all_pipelines() -> None:
    sites = "".join(12 * each for each in "abcde")
    assert lower_bound_ms(uniform(4, 60, sites, 4)) == 427
    assert lower_bound_ms(uniform(2, 60, sites, 2)) == 422


CHANGES: list[tuple[str, Any, str]] = [
    ("starts_ms", lambda plan: [[[0.0] * len(o) for o in row] for row in plan.orders], "before"),
    ("orders", lambda plan: [row[:-1] for row in plan.orders], "expected 2 pipelines of 6 stages"),
    (
        "orders",
        lambda plan: [[order[::-1] for order in row] for row in plan.orders],
        "comes before",
    ),
    ("orders", lambda plan: [[order[1:] for order in row] for row in plan.orders], "comes before"),
    (
        "orders",
        lambda plan: [[[*order, "F0"] for order in row] for row in plan.orders],
        "F0 is unknown or there twice",
    ),
    ("transfers", lambda plan: plan.transfers[1:], "is not sent"),
    ("transfers", lambda plan: [*plan.transfers, plan.transfers[0]], "one is there twice"),
    (
        "transfers",
        lambda plan: [each._replace(end_ms=each.start_ms + 0.5) for each in plan.transfers],
        "is too fast",
    ),
    (
        "transfers",
        lambda plan: [each._replace(start_ms=each.start_ms - 1) for each in plan.transfers],
        "starts before F0 has ended",
    ),
    (
        "transfers",
        lambda plan: [each._replace(end_ms=each.end_ms + 1) for each in plan.transfers],
        "4 of 2 nodes in use",
    ),
    (
        "transfers",
        lambda plan: [each._replace(nodes=3) for each in plan.transfers],
        "uses 3 nodes",
    ),
    (
        "transfers",
        lambda plan: [each._replace(hop=0) for each in plan.transfers],
        "the hop is within a site",
    ),
    ("iteration_ms", lambda plan: plan.iteration_ms - 1, "ends after the iteration"),
]


@pytest.mark.parametrize(("field", "change", "text"), CHANGES)
def test_the_check_finds(field: str, change: Any, text: str) -> None:
    plan = plan_cell(FIGURE_6)
    changed = replace(plan, **{field: change(plan)})
    assert any(text in fault for fault in faults_of(FIGURE_6, changed))


def test_the_check_finds_exceeded_limits() -> None:
    plan = plan_cell(FIGURE_6)
    narrow = replace(FIGURE_6, caps=(1,) * 6)
    assert any("exceeds the cap of 1" in fault for fault in faults_of(narrow, plan))


def test_orders_that_wait_for_each_other_are_refused() -> None:
    cell = uniform(1, 2, "ab", 1)
    orders = [[["F0", "R0", "B0", "F1", "R1", "B1"], ["F0", "F1", "B0", "B1"]]]
    with pytest.raises(ValueError, match=r"orders\[0\]\[0\]: B0 waits for ever"):
        replay(cell, orders)
    with pytest.raises(ValueError, match=r"orders\[0\]\[1\]: expected 4 operations"):
        replay(cell, [[orders[0][0], ["F0", "B0"]]])


def test_the_compiled_twin_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="recompute_ms: expected 6 values, got 2"):
        _planning.time_cell(replace(FIGURE_6, recompute_ms=(1.0, 1.0)), Rules())
    with pytest.raises(ValueError, match="expected at least one pipeline"):
        _planning.time_cell(replace(FIGURE_6, pipelines=0), Rules())
    with pytest.raises(ValueError, match="relays and caps of at least 1"):
        _planning.time_cell(replace(FIGURE_6, relays=0), Rules())
    with pytest.raises(ValueError, match="priority: expected F, R, B and W, each once"):
        _planning.time_cell(FIGURE_6, Rules("BFR"))
    for rules in (Rules(alternate=True), Rules(warmup=(1, 1))):
        with pytest.raises(ValueError, match="warmup: expected a count per stage"):
            _planning.time_cell(FIGURE_6, rules)
