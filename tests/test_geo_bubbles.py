"""Prefills in bubbles: nothing overlaps, each starts as early as possible, few are rejected."""

from __future__ import annotations

import copy
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_geo_cell import cells

from torch_resilient.geo import bubbles
from torch_resilient.geo.bubbles import Reservation, Table, Window, idle_windows
from torch_resilient.geo.bubbles_input import solve_bubbles
from torch_resilient.geo.cell import Cell, CellPlan, Transfer
from torch_resilient.geo.cell_input import read_cell
from torch_resilient.geo.cell_policies import plan_cell
from torch_resilient.geo.cell_replay import faults_of
from torch_resilient.geo.idle import gather_idle

Span = tuple[float, float]
Gpu = tuple[int, int, int]

# 12 GPUs as in Figure 13: three pipelines, four microbatches.
FIGURE_13: dict[str, Any] = {
    "pipelines": 3,
    "stages": 4,
    "microbatches": 4,
    "tF": 18,
    "tR": 18,
    "tB": 36,
    "sites": ["a", "b", "c", "c"],
    "wan_ms": 53.7,
    "latency_ms": 40,
}
# 55 ms for 512 tokens, as in Figure 14 with one GPU.
PREFILL = {"base_ms": 8, "per_token_ms": 0.0915, "per_token2_ms": 3e-6, "hop_ms": 1.5}
# Prompts of a code assistant: part of the prompts, and the maximum of their tokens.
PROMPTS = ((0, 20), (0.1, 300), (0.25, 930), (0.5, 1930), (0.75, 3350), (0.9, 6100), (1, 7700))


def prompts(rate: float, seconds: float, seed: int) -> list[list[float]]:
    """Requests per second at random."""
    dice = random.Random(seed)
    found, now_ms = [], 0.0
    while (now_ms := now_ms + dice.expovariate(rate) * 1e3) < seconds * 1e3:
        part = dice.random()
        for (low, least), (high, most) in itertools.pairwise(PROMPTS):
            if low <= part <= high:
                tokens = int(least + (most - least) * (part - low) / (high - low))
                found.append([now_ms, tokens])
                break
    return found


def length_ms(asked: dict[str, Any], tokens: int) -> float:
    """The time of a part of a prefill."""
    times, depth = asked["prefill"], asked.get("depth", 1)
    whole = (
        times.get("base_ms", 0)
        + times["per_token_ms"] * tokens
        + times.get("per_token2_ms", 0) * tokens**2
    )
    return whole / depth + (times.get("hop_ms", 0) if depth > 1 else 0)


def training(found: dict[str, Any]) -> dict[tuple[int, int], list[Span]]:
    """By pipeline and stage, the operations of a period."""
    schedule, cell = found["schedule"], read_cell(found["cell"]).cell
    return {
        (pipe, stage): [
            (start_ms, start_ms + cell.duration_ms(operation[0], stage))
            for operation, start_ms in zip(
                schedule["orders"][pipe][stage], schedule["starts_ms"][pipe][stage], strict=True
            )
        ]
        for pipe in range(cell.pipelines)
        for stage in range(cell.stages)
    }


def meets_training(
    spans: list[Span], period_ms: float, start_ms: float, end_ms: float, slack_ms: float
) -> bool:
    """Whether an operation is in progress between two times, in any period."""
    for period in range(math.floor(start_ms / period_ms) - 1, math.floor(end_ms / period_ms) + 1):
        for from_ms, to_ms in spans:
            if (
                period * period_ms + from_ms < end_ms - slack_ms
                and period * period_ms + to_ms > start_ms + slack_ms
            ):
                return True
    return False


def bubble_faults(asked: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Breaches of the rules for placements. It reads the output only, and knows no windows."""
    cell = read_cell(asked["cell"]).cell
    depth, guard_ms = asked.get("depth", 1), asked.get("guard_ms", 5)
    period_ms = found["schedule"]["iteration_ms"] + asked.get("period_extra_ms", 0)
    faults = [] if found["period_ms"] == period_ms else ["period_ms"]
    operations = training(found)
    numbers = [each["request"] for each in found["placements"]] + found["rejected"]
    if sorted(numbers) != list(range(len(asked["requests"]))):
        faults.append("a request is neither placed nor rejected, or both")
    busy: dict[Gpu, list[Span]] = {}
    for each in found["placements"]:
        where = f"request {each['request']}"
        arrival_ms, tokens = asked["requests"][each["request"]]
        part_ms, gpus, start_ms = length_ms(asked, tokens), each["gpus"], each["start_ms"]
        slack_ms = 1e-12 * start_ms + 1e-9 * period_ms
        if not arrival_ms <= start_ms <= arrival_ms + asked.get("max_wait_ms", 8) + slack_ms:
            faults.append(f"{where} waits from {arrival_ms} to {start_ms}")
        if len({tuple(gpu[1:]) for gpu in gpus}) != 1 or not (
            len({gpu[0] for gpu in gpus}) == len(gpus) == depth
        ):
            faults.append(f"{where} uses {gpus}")
        for k, (number, pipe, stage) in enumerate(gpus):
            if not 0 <= number < asked.get("cells", 1):
                faults.append(f"{where}: no cell {number}")
            if asked.get("site") not in (None, cell.sites[stage]):
                faults.append(f"{where} is in another site")
            from_ms, to_ms = start_ms + k * part_ms, start_ms + (k + 1) * part_ms
            until_ms = to_ms + guard_ms
            if meets_training(operations[pipe, stage], period_ms, from_ms, until_ms, slack_ms):
                faults.append(f"{where} meets a training operation, or its guard")
            busy.setdefault((number, pipe, stage), []).append((from_ms, to_ms))
    for gpu, spans in busy.items():
        for before, after in itertools.pairwise(sorted(spans)):
            if after[0] < before[1] - 1e-9 * before[1]:
                faults.append(f"{gpu}: {after} starts before {before} has ended")
    return faults


class Reference:
    """A controller that tries everything: each GPU, group of cells and start that can be the
    earliest. It knows no windows: a start is good if nothing is in the way."""

    def __init__(self, asked: dict[str, Any], found: dict[str, Any]) -> None:
        self._asked = asked
        self._period_ms = found["period_ms"]
        self._operations = {
            place: spans
            for place, spans in training(found).items()
            if asked.get("site") in (None, asked["cell"]["sites"][place[1]])
        }
        depth, cells = asked.get("depth", 1), asked.get("cells", 1)
        self._choices = [
            range(first, first + depth) for first in range(0, cells - depth + 1, depth)
        ]
        self._busy: dict[Gpu, list[Span]] = {}

    def reserve(self, gpus: list[Gpu], start_ms: float, tokens: int) -> None:
        part_ms = length_ms(self._asked, tokens)
        for k, gpu in enumerate(gpus):
            span = start_ms + k * part_ms, start_ms + (k + 1) * part_ms
            self._busy.setdefault(gpu, []).append(span)

    def earliest(
        self, arrival_ms: float, tokens: int, margin_ms: float = 0.0
    ) -> tuple[float, list[Gpu]] | None:
        """Start and GPUs; everything takes `margin_ms` longer."""
        part_ms = length_ms(self._asked, tokens)
        latest_ms = arrival_ms + self._asked.get("max_wait_ms", 8) - margin_ms
        best: tuple[float, list[Gpu]] | None = None
        for (pipe, stage), spans in self._operations.items():
            first = math.floor(arrival_ms / self._period_ms) - 1
            ends_ms = [
                period * self._period_ms + to_ms
                for period in range(first, math.floor(latest_ms / self._period_ms) + 1)
                for _, to_ms in spans
            ]
            for choice in self._choices:
                gpus = [(number, pipe, stage) for number in choice]
                starts_ms = {arrival_ms, *ends_ms}
                for k, gpu in enumerate(gpus):
                    starts_ms |= {to_ms - k * part_ms for _, to_ms in self._busy.get(gpu, ())}
                for start_ms in sorted(starts_ms):
                    if start_ms > latest_ms or (best is not None and start_ms >= best[0]):
                        break
                    if start_ms >= arrival_ms - max(0.0, -margin_ms) and self._fits(
                        gpus, start_ms, part_ms, margin_ms
                    ):
                        best = start_ms, gpus
                        break
        return best

    def _fits(self, gpus: list[Gpu], start_ms: float, part_ms: float, margin_ms: float) -> bool:
        guard_ms = self._asked.get("guard_ms", 5) + margin_ms
        slack_ms = 1e-9 * self._period_ms
        for k, gpu in enumerate(gpus):
            from_ms, to_ms = start_ms + k * part_ms, start_ms + (k + 1) * part_ms
            if meets_training(
                self._operations[gpu[1:]], self._period_ms, from_ms, to_ms + guard_ms, slack_ms
            ):
                return False
            for other_ms, until_ms in self._busy.get(gpu, ()):
                if other_ms < to_ms - slack_ms and until_ms > from_ms + slack_ms:
                    return False
        return True

    def accepted(self) -> int:
        """How many requests it places by itself."""
        count = 0
        for arrival_ms, tokens in sorted(self._asked["requests"], key=lambda each: each[0]):
            found = self.earliest(arrival_ms, tokens)
            if found is not None:
                self.reserve(found[1], found[0], tokens)
                count += 1
        return count


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Small trainings with uneven stages, and bursts of requests in any order."""
    stages = draw(st.integers(1, 4))
    times = draw(st.sampled_from([st.integers(1, 6), st.floats(0.5, 6)]))
    sites = sorted(draw(st.lists(st.sampled_from("ab"), min_size=stages, max_size=stages)))
    number = draw(st.integers(1, 5))
    whole = draw(st.booleans())
    arrivals = st.integers(0, 120) if whole else st.floats(0, 120)
    return {
        "cell": {
            "pipelines": draw(st.integers(1, 3)),
            "stages": stages,
            "microbatches": draw(st.integers(1, 4)),
            "tF": [draw(times) for _ in range(stages)],
            "tR": draw(times),
            "tB": draw(times),
            "sites": sites,
            "wan_ms": draw(st.integers(0, 12)),
            "latency_ms": draw(st.integers(0, 12)),
        },
        "cells": number,
        "depth": draw(st.integers(1, number)),
        "period_extra_ms": draw(st.sampled_from([0, 0, 7, 12.5])),
        "requests": [
            [draw(arrivals), draw(st.integers(1, 30))] for _ in range(draw(st.integers(0, 40)))
        ],
        "prefill": {
            "base_ms": draw(st.sampled_from([0, 1, 2.5])),
            "per_token_ms": draw(st.sampled_from([0.25, 0.5, 1])),
            "per_token2_ms": draw(st.sampled_from([0, 0.01])),
            "hop_ms": draw(st.sampled_from([0, 0.5])),
        },
        "guard_ms": draw(st.sampled_from([0, 0.5, 2])),
        "max_wait_ms": draw(st.sampled_from([0, 3, 8, 40, 200])),
        "site": draw(st.sampled_from([None, sites[0], sites[-1]])),
    }


@settings(max_examples=300, deadline=None, print_blob=True)
@given(inputs())
def test_nothing_overlaps_and_every_request_is_decided(asked: dict[str, Any]) -> None:
    before = copy.deepcopy(asked)
    found, _, _ = solve_bubbles(asked)
    assert asked == before
    assert bubble_faults(asked, found) == []
    assert 0 < found["utilisation_training"] <= found["utilisation"] <= 1 + 1e-9
    plan = CellPlan(
        **{
            name: found["schedule"][name]
            for name in (
                "chosen",
                "orders",
                "starts_ms",
                "iteration_ms",
                "lower_bound_ms",
                "utilisation",
            )
        },
        transfers=[Transfer(**each) for each in found["schedule"]["transfers"]],
    )
    assert faults_of(read_cell(asked["cell"]).cell, plan) == []


@settings(max_examples=100, deadline=None, print_blob=True)
@given(inputs())
def test_each_request_starts_as_early_as_possible(asked: dict[str, Any]) -> None:
    """With the reservations of the earlier ones; and it is rejected only if nothing fits."""
    found, _, _ = solve_bubbles(asked)
    reference = Reference(asked, found)
    places = {each["request"]: each for each in found["placements"]}
    for number in sorted(range(len(asked["requests"])), key=lambda i: asked["requests"][i][0]):
        arrival_ms, tokens = asked["requests"][number]
        # Rounding decides about a prefill that just fits.
        least_ms, most_ms = (
            math.inf if best is None else best[0]
            for margin_ms in (-1e-6, 1e-6)
            for best in [reference.earliest(arrival_ms, tokens, margin_ms)]
        )
        place = places.get(number)
        start_ms = math.inf if place is None else place["start_ms"]
        assert least_ms <= start_ms + 1e-6
        assert start_ms <= most_ms + 1e-6
        if place is not None:
            gpus = [(cell, pipe, stage) for cell, pipe, stage in place["gpus"]]
            reference.reserve(gpus, place["start_ms"], tokens)


@pytest.mark.parametrize(
    ("cells", "depth", "rate"), [(1, 1, 40), (1, 1, 640), (4, 2, 100), (4, 4, 300), (6, 3, 300)]
)
def test_few_are_rejected_that_the_reference_accepts(cells: int, depth: int, rate: float) -> None:
    """The reference uses the same groups of cells. Without them, each GPU needs the whole model."""
    asked = {
        "cell": FIGURE_13,
        "cells": cells,
        "depth": depth,
        "requests": prompts(rate, 3, 1),
        "prefill": PREFILL,
    }
    found, _, _ = solve_bubbles(asked)
    assert bubble_faults(asked, found) == []
    reference = Reference(asked, found).accepted()
    assert len(found["placements"]) >= 0.97 * reference


def squares(cell: Cell, plan: CellPlan, period_ms: float) -> float:
    """The sum of squared idle windows: larger if the same time is in fewer of them."""
    return math.fsum(
        (each.end_ms - each.start_ms) ** 2 for each in idle_windows(cell, plan, period_ms, None)
    )


@settings(max_examples=200, deadline=None, print_blob=True)
@given(cells(), st.sampled_from(["best", "paper", "varuna"]), st.sampled_from([0.0, 5.0]))
def test_idle_time_is_gathered_in_a_valid_schedule(
    cell: Cell, policy: str, extra_ms: float
) -> None:
    plan = plan_cell(cell, policy)
    period_ms = plan.iteration_ms + extra_ms
    assume(period_ms > 0)
    found = gather_idle(cell, plan, period_ms)
    assert faults_of(cell, found) == []
    assert found == replace(plan, starts_ms=found.starts_ms, transfers=found.transfers)
    sent_ms = [each.start_ms for each in found.transfers]
    assert sent_ms == sorted(sent_ms)
    before, after = squares(cell, plan, period_ms), squares(cell, found, period_ms)
    assert after >= before * (1 - 1e-6) - 1e-6


def test_idle_time_of_figure_13_is_gathered() -> None:
    """Few windows are too short for a prompt of 512 tokens."""
    cell = read_cell(FIGURE_13).cell
    plan = plan_cell(cell)
    found = gather_idle(cell, plan, plan.iteration_ms)

    def short(plan: CellPlan) -> float:
        windows = idle_windows(cell, plan, plan.iteration_ms, None)
        lengths_ms = [each.end_ms - each.start_ms for each in windows]
        return sum(each for each in lengths_ms if each < 55) / (12 * plan.iteration_ms)

    assert short(plan) > 0.09
    assert short(found) < 0.07
    # A large cell keeps its starts.
    assert gather_idle(replace(cell, microbatches=10_000), plan, 1e9) is plan


def solved(**fields: Any) -> dict[str, Any]:
    """One pipeline of one stage: F from 0 to 10 ms, B to 30 ms, idle to 50 ms."""
    cell = {"pipelines": 1, "stages": 1, "microbatches": 1, "tF": 10, "tR": 0, "tB": 20}
    asked = {
        "cell": {**cell, "sites": ["a"]},
        "period_extra_ms": 20,
        "prefill": {"per_token_ms": 1},
        "guard_ms": 2,
        **fields,
    }
    found, _, _ = solve_bubbles(asked)
    assert bubble_faults(asked, found) == []
    return found


def starts(found: dict[str, Any]) -> dict[int, float]:
    return {each["request"]: each["start_ms"] for each in found["placements"]}


def test_the_guard_and_the_wait_at_their_limits() -> None:
    """18 ms fit between the operations with the guard; the wait is at most 8 ms."""
    assert starts(solved(requests=[[30, 18]])) == {0: 30}
    assert starts(solved(requests=[[30, 19]])) == {}
    assert starts(solved(requests=[[30.5, 18]])) == {}
    assert starts(solved(requests=[[22, 18]])) == {0: 30}
    assert starts(solved(requests=[[21.5, 18]])) == {}
    assert starts(solved(requests=[[21.5, 18]], max_wait_ms=8.5)) == {0: 30}
    # In a later period, and over the end of one.
    assert starts(solved(requests=[[1030, 18], [1080, 7]])) == {0: 1030, 1: 1080}
    # After other prefills there is no guard.
    assert starts(solved(requests=[[31, 8], [31, 9], [31, 1]])) == {0: 31, 1: 39}


def test_requests_are_served_in_the_order_of_arrival() -> None:
    found = solved(requests=[[36, 5], [30, 5], [30, 5]])
    assert starts(found) == {1: 30, 2: 35, 0: 40}
    assert [each["request"] for each in found["placements"]] == [0, 1, 2]
    assert found["rejected"] == []


def test_a_table_needs_the_order_of_arrival() -> None:
    table = Table([Window(0, 0, 10, 30)], 50, cells=3, depth=2, guard_ms=0)
    assert table.place(5, 2, 8) == Reservation(range(2), 0, 0, 10)
    assert table.place(5, 2, 8) == Reservation(range(2), 0, 0, 12)
    with pytest.raises(ValueError, match="arrival_ms: 4 comes after 5"):
        table.place(4, 2, 8)
    # The third cell belongs to no group.
    assert Table([Window(0, 0, 10, 30)], 50, cells=1, depth=2, guard_ms=0).place(5, 2, 8) is None


def test_a_table_forgets_what_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tiny limits, the result is the same."""
    asked = {"cell": FIGURE_13, "requests": prompts(100, 40, 2), "prefill": PREFILL}
    found, _, _ = solve_bubbles(asked)
    monkeypatch.setattr(bubbles, "_MAX_OPEN", 1)
    again, _, _ = solve_bubbles(asked)
    assert again["placements"] == found["placements"]
    assert bubble_faults(asked, found) == []


def test_parts_run_one_after_the_other_in_other_cells() -> None:
    """Paper: BUBBLETEA §5.1: a pipeline over GPUs of the same rank in several cells."""
    asked: dict[str, Any] = {"cells": 5, "depth": 2, "prefill": {"per_token_ms": 1, "hop_ms": 0.5}}
    found = solved(requests=[[30, 8], [30, 8], [30, 8]], **asked)
    assert [(each["gpus"], each["start_ms"]) for each in found["placements"]] == [
        ([[0, 0, 0], [1, 0, 0]], 30),
        ([[2, 0, 0], [3, 0, 0]], 30),
        # 4.5 ms later the first part of the first group is free.
        ([[0, 0, 0], [1, 0, 0]], 34.5),
    ]
    # 9 + 9 ms and the guard just fit; a shorter prefill waits for the last part of a longer one.
    found = solved(requests=[[30, 17], [30, 17], [31, 1]], **asked)
    assert starts(found) == {0: 30, 1: 30}
    found = solved(requests=[[30, 9], [30, 9], [31, 1]], **asked)
    assert starts(found) == {0: 30, 1: 30, 2: 39}


def test_the_shortest_window_is_taken_first() -> None:
    """Two stages are idle at 0: the second one for 10 ms, the first after its F for longer."""
    cell = {"pipelines": 1, "stages": 2, "microbatches": 1, "tF": 10, "tR": 0, "tB": 10}
    found = solved(cell={**cell, "sites": ["a", "a"]}, requests=[[10, 5]], period_extra_ms=50)
    # Stage 0 is idle from 10 to 30, when B starts. Stage 1 computes.
    assert found["placements"] == [{"request": 0, "gpus": [[0, 0, 0]], "start_ms": 10}]
    # At 45, stage 0 is idle until 90, and stage 1 until 100.
    found = solved(cell={**cell, "sites": ["a", "a"]}, requests=[[45, 5]], period_extra_ms=50)
    assert found["placements"] == [{"request": 0, "gpus": [[0, 0, 0]], "start_ms": 45}]


def test_one_site_only() -> None:
    cell = {**FIGURE_13, "microbatches": 2}
    for site, stages in (("a", {0}), ("c", {2, 3}), (None, {0, 1, 2, 3})):
        found = solved(cell=cell, site=site, prefill=PREFILL, requests=prompts(400, 2, 3))
        assert {each["gpus"][0][2] for each in found["placements"]} == stages
        assert found["utilisation"] > found["utilisation_training"]
    whole = solved(cell=cell, period_extra_ms=0, requests=[])
    assert whole["utilisation_training"] == pytest.approx(whole["schedule"]["utilisation"])


def test_utilisation_counts_whole_periods() -> None:
    """Training uses 30 of 50 ms."""
    found = solved(requests=[[30, 18]])
    assert found["utilisation_training"] == pytest.approx(0.6)
    assert found["utilisation"] == pytest.approx(0.96)
    # Two periods, from 30 to 130; what comes later does not count.
    found = solved(requests=[[30, 18], [80, 18], [130, 18]])
    assert found["utilisation"] == pytest.approx(0.96)
    found = solved(requests=[[30, 18], [130, 18]])
    assert found["utilisation"] == pytest.approx(0.78)
    found = solved(requests=[], cells=3)
    assert found["utilisation"] == found["utilisation_training"] == pytest.approx(0.6)
    assert (found["lookup_p50_us"], found["placements"], found["rejected"]) == (None, [], [])


def test_the_check_finds() -> None:
    asked = {"cell": FIGURE_13, "requests": prompts(640, 2, 5), "prefill": PREFILL}
    found, _, _ = solve_bubbles(asked)
    assert bubble_faults(asked, found) == []

    def faults(change: Any) -> str:
        changed = copy.deepcopy(found)
        change(changed)
        return "; ".join(bubble_faults(asked, changed))

    assert "neither placed nor" in faults(lambda each: each["rejected"].pop())
    assert "neither placed nor" in faults(lambda each: each["placements"].pop())
    assert "waits from" in faults(lambda each: each["placements"][0].update(start_ms=-1))
    assert "uses" in faults(lambda each: each["placements"][0]["gpus"].append([0, 1, 1]))
    assert "no cell 1" in faults(lambda each: each["placements"][0]["gpus"][0].__setitem__(0, 1))

    def crowd(each: dict[str, Any]) -> None:
        for place in each["placements"]:
            place["gpus"] = each["placements"][0]["gpus"]

    assert "before (" not in faults(lambda each: None)
    assert "has ended" in faults(crowd)
    assert "meets a training operation" in faults(crowd)
