"""Re-planning while training: reports, plans, the orchestrator, and ScheduleAdaptiveZB itself."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from stats_doubles import path_stats, peer_stats
from test_schedules import (
    MICROBATCHES,
    WIDTH,
    Part,
    loss_of,
    same_numbers,
    train,
    train_with,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient import PeerStats, faults, stats
from torch_resilient.control import agreement
from torch_resilient.control.agreement import PLANNER_PATIENCE_S
from torch_resilient.control.link_monitor import RoundTrips, Transfers
from torch_resilient.control.orchestrator import Orchestrator
from torch_resilient.control.plan import PATIENCE, AdaptivePlan, Decider, PlanId, initial_plan
from torch_resilient.control.report import StageReport, costs_of, links_measured
from torch_resilient.pipelining import PipelineCosts, ScheduleAdaptiveZB, offload
from torch_resilient.pipelining.offload import MemoryRoom
from torch_resilient.pipelining.schedule import checked_orders
from torch_resilient.pipelining.timeline_files import read_run
from torch_resilient.planning.dispatch import predicted_s
from torch_resilient.planning.generator import Limits
from torch_resilient.planning.orders import held_at_most
from torch_resilient.planning.replay import replay

COUNT = 12
NO_LIMITS = Limits((COUNT,) * 4, (COUNT,) * 4)


def healthy_costs() -> PipelineCosts:
    return PipelineCosts.of(
        4,
        forward_s=0.01,
        input_backward_s=[0, 0.01, 0.01, 0.01],
        weight_backward_s=[0.02, 0.01, 0.01, 0.01],
        delay_forward_s=0.001,
    )


def reports_of(costs: PipelineCosts, **more: float) -> list[StageReport]:
    """The measurements of the ranks of such a pipeline."""
    reports = []
    for stage in range(costs.num_stages):
        links = {}
        if stage < costs.num_stages - 1:
            trip_s = costs.delay_forward_s[stage] + costs.delay_backward_s[stage]
            links |= {"round_trip_next_s": trip_s, "round_trip_next_min_s": trip_s}
        if stage:
            trip_s = costs.delay_forward_s[stage - 1] + costs.delay_backward_s[stage - 1]
            links |= {"round_trip_previous_s": trip_s, "round_trip_previous_min_s": trip_s}
        reports.append(
            StageReport(
                forward_s=costs.forward_s[stage],
                input_backward_s=costs.input_backward_s[stage],
                weight_backward_s=costs.weight_backward_s[stage],
                **links,
                **more,
            )
        )
    return reports


def test_reports_travel_as_numbers() -> None:
    (report, *_) = reports_of(healthy_costs(), epoch=3.0)
    again = StageReport.decode(report.encode())
    assert again.epoch == 3
    assert again.forward_s == report.forward_s
    assert math.isnan(again.round_trip_previous_s)


def test_costs_from_reports() -> None:
    costs = healthy_costs().with_delay(1, 0.06)
    found = costs_of(reports_of(costs))
    assert found is not None
    assert found.forward_s == costs.forward_s
    assert found.delay_forward_s == pytest.approx(costs.delay_forward_s)
    assert found.delay_backward_s == pytest.approx(costs.delay_backward_s)
    # One way is full of our own data: its round trips are longer, the least is not.
    reports = reports_of(costs)
    reports[1] = replace(reports[1], round_trip_next_s=0.3)
    found = costs_of(reports)
    assert found is not None
    assert found.delay_forward_s[1] == pytest.approx(0.24)
    assert found.delay_backward_s[1] == pytest.approx(0.06)
    # Large messages on a thin link.
    reports[1] = replace(reports_of(costs)[1], transfer_next_s=0.1)
    reports[2] = replace(reports[2], transfer_previous_s=0.2)
    found = costs_of(reports)
    assert found is not None
    assert found.delay_forward_s[1] == pytest.approx(0.16)
    assert found.delay_backward_s[1] == pytest.approx(0.26)
    # One stage without a measurement leaves the whole pipeline unknown.
    assert costs_of([StageReport(), *reports[1:]]) is None


def peer(count: int, samples: list[float]) -> PeerStats:
    return peer_stats(path_stats(round_trips=count, round_trips_s=tuple(samples)))


def test_round_trips_are_seen_once() -> None:
    monitor = RoundTrips()
    assert math.isnan(monitor.typical_s)
    assert monitor.update(peer(2, [1.0, 3.0])) == [1.0, 3.0]
    assert monitor.update(peer(2, [1.0, 3.0])) == []
    assert monitor.update(peer(3, [1.0, 3.0, 8.0])) == [8.0]
    assert (monitor.typical_s, monitor.min_s) == (3.0, 1.0)
    # Another connection counts from the beginning.
    assert monitor.update(peer(1, [5.0])) == [5.0]
    # Enough later samples replace what was before.
    new = [20.0] * 16
    assert monitor.update(peer(17, [5.0, *new])) == new
    assert (monitor.typical_s, monitor.min_s) == (20.0, 20.0)
    # More than a snapshot holds: the last ones.
    assert monitor.update(peer(1000, [7.0] * 32)) == [7.0] * 32


def test_transfers_are_what_messages_take_beyond_a_round_trip() -> None:
    transfers = Transfers()
    assert transfers.typical_s == 0
    transfers.update(
        peer_stats(deliveries=1, deliveries_s=(0.5,)), math.nan
    )  # nothing to compare with
    assert transfers.typical_s == 0
    transfers.update(peer_stats(deliveries=4, deliveries_s=(0.5, 0.5, 0.3, 0.4)), 0.1)
    assert transfers.typical_s == pytest.approx(0.3)
    transfers.update(peer_stats(deliveries=4, deliveries_s=(0.5, 0.5, 0.3, 0.4)), 0.1)
    assert transfers.typical_s == pytest.approx(0.3)
    # A link that heals: its last messages were slow, its round trips no longer are.
    healed = peer_stats(deliveries=20, deliveries_s=(0.5,) * 16)
    transfers.forget(healed)
    transfers.update(healed, 0.01)
    assert transfers.typical_s == 0
    # More messages than a snapshot holds; and none is faster than its link.
    transfers.update(peer_stats(deliveries=90, deliveries_s=(0.09,) * 32), 0.1)
    assert transfers.typical_s == 0


def test_after_a_change_only_new_round_trips_count() -> None:
    monitor = RoundTrips()
    for i in range(4):
        monitor.update(peer(8 * (i + 1), [1.0] * 8))
    monitor.update(peer(40, [1.0] * 5 + [9.0] * 3))
    assert (monitor.typical_s, monitor.min_s) == (1.0, 1.0)
    monitor.forget_all_but(3)
    assert (monitor.typical_s, monitor.min_s) == (9.0, 9.0)
    # Few samples in each iteration: those of the last two count.
    for i in range(2):
        monitor.update(peer(48 + 8 * i, [2.0] * 8))
    assert (monitor.typical_s, monitor.min_s) == (2.0, 2.0)
    monitor.forget_all_but(0)
    assert math.isnan(monitor.typical_s)


@pytest.mark.parametrize("fixed", [False, True])
def test_plans_as_text(fixed: bool) -> None:
    plan = initial_plan(4, COUNT, NO_LIMITS, fixed)
    assert AdaptivePlan.from_json(plan.to_json()) == plan
    if fixed:
        checked_orders(plan.orders, 4, COUNT)
    huge = plan.to_json().replace("[0, ", "[1e999, ", 1)
    for text in ("", huge, "[]", "[1, 2, 3, 4, 5]", '{"a": 1}', plan.to_json()[:-9]):
        with pytest.raises(ValueError, match="not a plan"):
            AdaptivePlan.from_json(text)


@pytest.mark.parametrize("fixed", [False, True])
def test_a_slow_link_is_worth_a_plan_and_noise_is_not(fixed: bool) -> None:
    decider = Decider(COUNT, NO_LIMITS, fixed)
    first = decider.consider(healthy_costs(), initial_plan(4, COUNT, NO_LIMITS, fixed), False)
    assert first is not None
    assert first.epoch == 1
    assert first.reason.startswith("first measurements")
    for factor in (1.02, 0.98, 1.01, 1.0, 0.99):
        noisy = replace(
            healthy_costs(), forward_s=tuple(factor * each for each in healthy_costs().forward_s)
        )
        assert decider.consider(noisy, first, False) is None
    slow = healthy_costs().with_delay(2, 0.03)
    opinions = [decider.consider(slow, first, False) for _ in range(PATIENCE)]
    assert opinions[:-1] == [None] * (PATIENCE - 1)
    assert opinions[-1] is not None
    assert opinions[-1].epoch == 2
    assert "faster" in opinions[-1].reason
    assert "2-3 (30.0 ms forward, 30.0 ms backward)" in opinions[-1].reason
    # A detector's finding makes one opinion enough.
    assert decider.consider(slow, first, True) is not None
    if not fixed:
        # Healed: as fast with less memory.
        back = [decider.consider(healthy_costs(), opinions[-1], False) for _ in range(PATIENCE)][-1]
        assert back is not None
        assert "less memory" in back.reason
        assert sum(back.gates.pending) < sum(opinions[-1].gates.pending)


def test_orders_hold_no_more_than_live_dispatch_may() -> None:
    stages, count = 4, 40
    decider = Decider(count, Limits((count,) * stages, (count,) * stages), True, budget_ms=20)
    plan = initial_plan(stages, count, Limits((count,) * stages, (count,) * stages), True)
    found = [plan]
    for costs in (healthy_costs(), healthy_costs().with_delay(1, 0.03)):
        better = decider.consider(costs, plan, True)
        assert better is not None
        found.append(better)
    for each in found:
        assert each.gates.pending[0] < count
        held = [held_at_most(each.order_of(stage))[1] for stage in range(stages)]
        assert all(h <= most for h, most in zip(held, each.gates.pending, strict=True)), held
    assert plan.gates.pending == (4 * stages - 1,) * stages


@pytest.mark.parametrize("fixed", [False, True])
def test_plans_for_links_that_nothing_measures_keep_slack(fixed: bool) -> None:
    even = PipelineCosts.of(4, forward_s=0.01, input_backward_s=0.01, weight_backward_s=0.01)
    slow = replace(even, delay_forward_s=(0.02,) * 3, delay_backward_s=(0.02,) * 3)

    def iteration_s(links_known: bool, costs: PipelineCosts) -> float:
        decider = Decider(COUNT, NO_LIMITS, fixed, budget_ms=1000)
        initial = initial_plan(4, COUNT, NO_LIMITS, fixed)
        plan = decider.consider(even, initial, False, links_known=links_known)
        assert plan is not None
        assert ("no link measured" in plan.reason) is not links_known
        if fixed:
            return replay([plan.order_of(stage) for stage in range(4)], costs).iteration_s
        return predicted_s(costs, COUNT, plan.gates)

    # Without delays it is as fast; delays cost one way through the pipeline.
    assert iteration_s(False, even) < 1.01 * iteration_s(True, even)
    assert iteration_s(False, slow) < iteration_s(False, even) + 3 * 0.02 + 0.005
    # This does not hold if links are known to have no delay.
    assert iteration_s(True, slow) > iteration_s(True, even) + 3 * 0.02 + 0.05


def test_the_planner_is_told_whether_links_are_measured() -> None:
    reports = reports_of(healthy_costs())
    assert links_measured(reports)
    blind = [
        replace(each, round_trip_next_s=math.nan, round_trip_previous_s=math.nan)
        for each in reports
    ]
    assert not links_measured(blind)
    ranks = make_orchestrators(MemoryStore())
    ranks[0].consume(blind, 0)
    settle(ranks)
    assert "no link measured" in ranks[0]._plans[PlanId(1, 0)].reason
    for each in ranks:
        each.close()


class MemoryStore:
    """A store in this process; `fail` makes it fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.fail = False

    def set(self, key: str, value: str) -> None:
        if self.fail:
            raise RuntimeError("the store is gone")
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        if self.fail:
            raise RuntimeError("the store is gone")
        return self.values[key]


def settle(orchestrators: list[Orchestrator]) -> None:
    """Waits until the threads have finished their jobs."""
    for each in orchestrators:
        for worker in (each._planning, each._fetching):
            if worker.job is not None:
                worker.job.result(20)


def make_orchestrators(
    store: MemoryStore, clock: Callable[[], float] = time.monotonic
) -> list[Orchestrator]:
    initial = initial_plan(4, COUNT, NO_LIMITS, False)
    return [
        Orchestrator(stage, Decider(COUNT, NO_LIMITS, False), initial, store, "plan", clock)
        for stage in range(4)
    ]


def one_step(orchestrators: list[Orchestrator], costs: PipelineCosts, step: int) -> list[bool]:
    reports = [
        replace(
            report,
            epoch=float(each.newest.epoch),
            planner=float(each.newest.planner),
            published=float(each.published),
            late_s=each.late_s,
        )
        for report, each in zip(reports_of(costs), orchestrators, strict=True)
    ]
    return [each.consume(reports, step) for each in orchestrators]


def test_all_ranks_switch_at_the_same_step() -> None:
    store = MemoryStore()
    ranks = make_orchestrators(store)
    switches = []
    for step in range(8):
        switches.append(one_step(ranks, healthy_costs(), step))
        settle(ranks)
    assert [True] * 4 in switches
    assert all(each in ([True] * 4, [False] * 4) for each in switches)
    assert len({each.current for each in ranks}) == 1
    assert ranks[0].current.epoch == 1
    for each in ranks:
        each.close()


def test_a_rank_that_cannot_fetch_keeps_all_on_the_old_plan() -> None:
    store, dead = MemoryStore(), MemoryStore()
    dead.fail = True
    ranks = make_orchestrators(store)
    ranks[2] = Orchestrator(
        2, Decider(COUNT, NO_LIMITS, False), initial_plan(4, COUNT, NO_LIMITS, False), dead, "plan"
    )
    for step in range(6):
        assert not any(one_step(ranks, healthy_costs(), step))
        settle(ranks)
    assert ranks[0].published == 1
    assert {each.current.epoch for each in ranks} == {0}
    # It comes back, and the others continue.
    dead.fail = False
    dead.values = store.values
    found = []
    for step in range(6, 10):
        found += one_step(ranks, healthy_costs(), step)
        settle(ranks)
    assert sum(found) == 4
    assert {each.current.epoch for each in ranks} == {1}


def held_back(orchestrator: Orchestrator) -> tuple[threading.Event, threading.Event]:
    """Makes its planner wait: (set when it has begun, to be set to let it continue)."""
    begun, go_on = threading.Event(), threading.Event()
    decide = orchestrator._decider.consider

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return decide(*arguments)

    orchestrator._decider.consider = slow  # type: ignore[method-assign]
    return begun, go_on


def plan_ids(orchestrators: list[Orchestrator]) -> set[PlanId]:
    return {each.current.id for each in orchestrators}


def test_a_planner_that_is_slow_stops_nobody() -> None:
    ranks = make_orchestrators(MemoryStore())
    begun, go_on = held_back(ranks[0])
    for step in range(5):
        assert not any(one_step(ranks, healthy_costs(), step))
        assert begun.wait(20)
    assert {each.planner for each in ranks} == {0}  # it has time
    go_on.set()
    settle(ranks)
    for step in range(5, 8):
        one_step(ranks, healthy_costs(), step)
        settle(ranks)
    assert plan_ids(ranks) == {PlanId(1, 0)}


def test_the_next_stage_plans_while_the_planner_is_late() -> None:
    now_s = 0.0
    ranks = make_orchestrators(MemoryStore(), lambda: now_s)
    begun, go_on = held_back(ranks[0])
    one_step(ranks, healthy_costs(), 0)
    assert begun.wait(20)
    now_s = PLANNER_PATIENCE_S + 1
    switches = []
    for step in range(1, 5):
        switches.append(one_step(ranks, healthy_costs(), step))
        settle(ranks[1:])
    assert {each.planner for each in ranks} == {1}
    assert [True] * 4 in switches
    assert all(each in ([True] * 4, [False] * 4) for each in switches)
    assert plan_ids(ranks) == {PlanId(1, 1)}
    # It wakes up, publishes a plan that no rank needs, and plans again.
    go_on.set()
    settle(ranks)
    assert ranks[0].published == 1
    slow = healthy_costs().with_delay(1, 0.05)
    for step in range(5, 12):
        one_step(ranks, slow, step)
        settle(ranks)
    assert {each.planner for each in ranks} == {0}
    assert plan_ids(ranks) == {PlanId(2, 0)}


def test_plans_of_two_planners_at_once() -> None:
    """Plans of one epoch stay distinct, and all ranks end with the same one."""
    now_s = 0.0
    ranks = make_orchestrators(MemoryStore(), lambda: now_s)
    first, go_on_first = held_back(ranks[0])
    second, go_on_second = held_back(ranks[1])
    one_step(ranks, healthy_costs(), 0)
    assert first.wait(20)
    now_s = PLANNER_PATIENCE_S + 1
    one_step(ranks, healthy_costs(), 1)
    assert second.wait(20)
    go_on_first.set()
    settle(ranks[:1])
    one_step(ranks, healthy_costs(), 2)  # some fetch this one
    go_on_second.set()
    settle(ranks)
    for step in range(3, 6):
        one_step(ranks, healthy_costs(), step)
        settle(ranks)
    assert plan_ids(ranks) == {PlanId(1, 1)}


def test_a_planner_that_fails_is_replaced_and_comes_back() -> None:
    now_s = 0.0
    store, dead = MemoryStore(), MemoryStore()
    dead.fail = True
    ranks = make_orchestrators(store, lambda: now_s)
    ranks[0]._store = dead  # it cannot publish
    for step in range(3):
        one_step(ranks, healthy_costs(), step)
        settle(ranks)
    assert {each.planner for each in ranks} == {1}
    assert plan_ids(ranks) == {PlanId(0, 0)}  # nor fetch: the plan in force stays
    dead.fail = False
    dead.values = store.values
    now_s = 60.0
    for step in range(3, 8):
        one_step(ranks, healthy_costs(), step)
        settle(ranks)
    assert {each.planner for each in ranks} == {0}
    assert len(plan_ids(ranks)) == 1
    assert min(plan_ids(ranks)) >= PlanId(1, 0)


def adaptive(rank: int, dispatch: str) -> dict[str, Any]:
    """The training of test_schedules."""
    stages = dist.get_world_size()
    module = Part(rank)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of, dispatch=dispatch)
    result = train_with(schedule, module, stage)
    result["stats"] = schedule.stats()
    return result


@pytest.mark.parametrize("dispatch", ["live", "fixed"])
def test_same_bits_as_torch(dispatch: str) -> None:
    want = run_ranks(train, "torch 1F1B", world_size=3, backend="gloo")
    got = run_ranks(adaptive, dispatch, world_size=3)
    same_numbers(got, want)
    assert all(rank["stats"].dispatch == dispatch for rank in got)


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo,cuda:resilient"])
def test_without_the_backend_it_follows_the_papers_way(backend: str) -> None:
    """Also if the backend carries tensors of another device than the stage's."""
    want = run_ranks(train, "torch 1F1B", world_size=3, backend="gloo")
    got = run_ranks(adaptive, "live", world_size=3, backend=backend)
    same_numbers(got, want)
    assert all(rank["stats"].dispatch == "fixed" for rank in got)
    assert not any(rank["stats"].links_measured for rank in got)


class Paced(torch.autograd.Function):
    """Multiplies; forward and backward take 3 ms each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        time.sleep(0.003)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        time.sleep(0.003)
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class PacedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Paced.apply(x, self.weight)


# Steps before the link becomes slow; and at most with the slow link, and with the healed one: a
# busy machine delays messages as well, and the detector waits until that is no doubt.
HEALTHY, AT_MOST = 14, 80


def one_link_becomes_slow(rank: int, dispatch: str, folder: str) -> dict[str, Any]:
    stages = dist.get_world_size()
    stage = PipelineStage(PacedPart(), rank, stages, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, COUNT, loss_of, dispatch=dispatch, timeline_dir=folder)
    x = torch.ones(COUNT, WIDTH)
    epochs, delays, patiences = [], [], [schedule._patience]

    def run_step() -> None:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == 2 else {}))
        found = schedule.stats()
        epochs.append(found.plan.epoch)
        delays.append(found.costs.delay_forward_s[1] if found.costs else None)
        if schedule._patience is not patiences[-1]:
            patiences.append(schedule._patience)

    def run_until(over: Callable[[], bool]) -> int:
        """The number of all steps, once it is over for every rank or has taken too long."""
        for _ in range(AT_MOST):
            run_step()
            all_over = torch.tensor(int(over()))
            dist.all_reduce(all_over, dist.ReduceOp.MIN)
            if all_over:
                break
        return len(epochs)

    def found(kind: str) -> bool:
        """The changed link was found, unless it is none of this rank's."""
        texts = [each.text for each in stats().events if each.kind == f"link_{kind}"]
        return rank == 0 or any(f"link {rank} -> {3 - rank} is {kind}" in each for each in texts)

    for _ in range(HEALTHY):
        run_step()
    before = epochs[-1]
    fault = faults.delay(0.02, peer=3 - rank) if rank else None  # the last link, both ways
    healed_from = run_until(lambda: found("slower") and epochs[-1] > before and delays[-1] > 0.015)
    if fault is not None:
        fault.clear()
    end = run_until(lambda: found("faster") and delays[-1] < 0.01)
    # A new plan resets the patience that was learned from the old plan's messages.
    assert len(patiences) == len({0, *epochs})
    return {
        "epochs": epochs,
        "delays": delays,
        "healed_from": healed_from,
        "end": end,
        "events": [(each.kind, each.text) for each in stats().events],
        "links_measured": schedule.stats().links_measured,
    }


@pytest.mark.parametrize("dispatch", ["live", "fixed"])
def test_a_link_that_becomes_slow_and_heals(dispatch: str, tmp_path: Path) -> None:
    got = run_ranks(one_link_becomes_slow, dispatch, str(tmp_path), world_size=3)
    healed_from, end = got[0]["healed_from"], got[0]["end"]
    # Every rank was on the same plan at every step.
    epochs = got[0]["epochs"]
    assert got[1]["epochs"] == got[2]["epochs"] == epochs
    assert epochs[0] == 0
    events = [each for rank in got for each in rank["events"]]
    assert epochs[healed_from - 1] > epochs[HEALTHY - 1], (epochs, events)
    for kind in ("slower", "faster"):
        texts = [text for each, text in events if each == f"link_{kind}"]
        trip = "half of the round trip between the stages: link"
        assert any(text.startswith(f"{trip} 1 -> 2 is {kind}") for text in texts), events
        assert any(text.startswith(f"{trip} 2 -> 1 is {kind}") for text in texts), events
    assert 0.015 < got[0]["delays"][healed_from - 1] < 0.04
    assert got[0]["delays"][-1] < 0.01
    assert all(rank["links_measured"] for rank in got)
    run = read_run(tmp_path)
    assert [step.step for step in run.steps] == list(range(end))
    # Messages over the slow link took as long as the delay; the clocks agree that well.
    late = [
        message.end_s - message.start_s
        for step in run.steps[HEALTHY + 1 : healed_from - 1]
        for message in step.messages
        if {message.source, message.destination} == {1, 2}
    ]
    assert min(late) > 0.018


THIN_BYTES_PER_S = 20e6
LARGE = 1 << 18  # numbers: 52 ms on such a link; a round trip of a few bytes takes no time there


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(LARGE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def large_messages(rank: int) -> list[float]:
    """Delays of both directions, as planned with, over a thin link."""
    stage = PipelineStage(Wide(), rank, 2, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, 4, loss_of)
    x = torch.ones(4, LARGE)
    with faults.limit(THIN_BYTES_PER_S, peer=1 - rank):
        for _ in range(4):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
    costs = schedule.stats().costs
    return [costs.delay_forward_s[0], costs.delay_backward_s[0]]


def test_bytes_need_time_too() -> None:
    for delays in run_ranks(large_messages, world_size=2):
        print(delays)
        assert min(delays) > 0.8 * 4 * LARGE / THIN_BYTES_PER_S


def recorded_by_one(rank: int, folder: str) -> list[str]:
    """Only rank 1 has the variable; returns the warnings."""
    if rank == 1:
        os.environ["TORCH_RESILIENT_TIMELINE"] = folder
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, COUNT, loss_of)
    x = torch.ones(COUNT, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank else {}))
    assert schedule.recording is None
    return [str(each.message) for each in caught if "timeline" in str(each.message)]


def test_a_timeline_that_only_some_ranks_want_is_not_written(tmp_path: Path) -> None:
    for texts in run_ranks(recorded_by_one, str(tmp_path)):
        (text,) = texts
        assert "1 of the 2 ranks" in text
        assert "TORCH_RESILIENT_TIMELINE" in text
    assert list(tmp_path.iterdir()) == []


def several_recorded(rank: int, folder: str) -> None:
    """Two ranks run a schedule of their own, then three ranks run two, one after the other."""
    pair = dist.new_group([0, 1])
    cpu = torch.device("cpu")
    made = [(pair, 2)] * (rank < 2) + [(None, 3)] * 2
    x = torch.ones(COUNT, WIDTH)
    for steps, (group, stages) in enumerate(made, 3 - len(made) + 1):
        stage = PipelineStage(Part(rank), rank, stages, cpu, group=group)
        schedule = ScheduleAdaptiveZB(stage, COUNT, loss_of, timeline_dir=folder)
        last = rank == stages - 1
        for _ in range(steps):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if last else {}))


def test_schedules_of_one_process_keep_their_files_apart(tmp_path: Path) -> None:
    run_ranks(several_recorded, str(tmp_path), world_size=3)
    for name, stages, steps in (("pipeline00000", 2, 1), ("", 3, 2), ("schedule2", 3, 3)):
        run = read_run(tmp_path / name)
        assert [len(step.stages) for step in run.steps] == [stages] * steps, name
        assert None not in run.ranks, name
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "pipeline00000",
        "rank00000.jsonl",
        "rank00001.jsonl",
        "rank00002.jsonl",
        "schedule2",
    ]


def several_groups(rank: int) -> list[int]:
    """Ranks 0 and 1 run a separate pipeline before the one of all three."""
    pair = dist.new_group([0, 1])
    cpu = torch.device("cpu")
    if rank < 2:
        ScheduleAdaptiveZB(PipelineStage(Part(rank), rank, 2, cpu, group=pair), 4, loss_of)
    first = ScheduleAdaptiveZB(PipelineStage(Part(rank), rank, 3, cpu), COUNT, loss_of)
    second = ScheduleAdaptiveZB(PipelineStage(Part(rank), rank, 3, cpu), COUNT, loss_of)
    x = torch.ones(COUNT, WIDTH)
    everywhere = torch.zeros(())
    for _ in range(200):
        for schedule in (first, second):
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == 2 else {}))
        everywhere.fill_(min(each.stats().plan.epoch for each in (first, second)))
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        if everywhere >= 1:
            break
    return [schedule.stats().plan.epoch for schedule in (first, second)]


def test_plans_find_their_pipeline() -> None:
    for epochs in run_ranks(several_groups, world_size=3):
        assert min(epochs) >= 1


def without_its_planner(rank: int) -> list[tuple[int, int]]:
    """The planner of the first stage hangs and later recovers. Returns the rank that planned, and
    how often all ranks had switched by then."""
    agreement.PLANNER_PATIENCE_S = 0.1
    stage = PipelineStage(Part(rank), rank, 3, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, COUNT, loss_of, device_microbatches=COUNT)
    orchestrator = schedule._orchestrator
    go_on = held_back(orchestrator)[1] if rank == 0 else threading.Event()
    x = torch.ones(COUNT, WIDTH)
    found = []
    for planner in (1, 0):
        if planner == 0:
            go_on.set()
            orchestrator._decider = Eager(orchestrator._decider)  # type: ignore[assignment]
        before = orchestrator.current.epoch
        done = torch.zeros(())
        deadline = time.monotonic() + 30
        while not done and time.monotonic() < deadline:
            schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == 2 else {}))
            current = orchestrator.current
            done.fill_(current.epoch > before and current.planner == planner)
            dist.all_reduce(done, dist.ReduceOp.MIN)
        found.append((orchestrator.planner, orchestrator.current.planner))
    return found


class Eager:
    """Always finds another plan."""

    def __init__(self, decider: Decider) -> None:
        self._decider = decider

    def consider(self, costs: PipelineCosts, current: AdaptivePlan, *_: Any) -> AdaptivePlan:
        return self._decider._candidate(costs, current.epoch + 1)


def test_a_pipeline_whose_planner_hangs_goes_on_adapting() -> None:
    for found in run_ranks(without_its_planner, world_size=3):
        assert found == [(1, 1), (0, 0)]


def test_torchrun_restarts_a_pipeline_whose_rank_0_is_killed(tmp_path: Path) -> None:
    """It resumes from the checkpoint, with the same bits as an undisturbed run."""
    results = []
    for name, killed_at in (("whole", -1), ("killed", 6)):
        folder = tmp_path / name
        folder.mkdir()
        program = Path(__file__).with_name("restart_program.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run = subprocess.run(
            [*torchrun, "--nproc-per-node=2", "--max-restarts=1", program, folder, str(killed_at)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        results.append([json.loads((folder / f"result{i}.json").read_text()) for i in range(2)])
    for whole, killed in zip(*results, strict=True):
        assert (whole["life"], whole["begin"]) == (0, 0)
        assert (killed["life"], killed["begin"]) == (1, 4)
        assert killed["losses"] == whole["losses"]
        assert killed["parameters"] == whole["parameters"]


def refused(rank: int) -> None:
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="dispatch: expected one of live, fixed, got 'greedy'"):
        ScheduleAdaptiveZB(stage, 4, loss_of, dispatch="greedy")
    with pytest.raises(ValueError, match="weight_limit"):
        ScheduleAdaptiveZB(stage, 4, loss_of, weight_limit=0)
    with pytest.raises(ValueError, match="n_microbatches: expected at least 1, got 0"):
        ScheduleAdaptiveZB(stage, 0, loss_of)
    looped = PipelineStage(Part(rank), rank, 4, torch.device("cpu"))
    with pytest.raises(ValueError, match="4 stages on 2 ranks"):
        ScheduleAdaptiveZB(looped, 4, loss_of)


def test_bad_arguments_are_refused() -> None:
    run_ranks(refused)


def limited(rank: int) -> tuple[int, int]:
    """The most microbatches held, as measured, under limits."""
    stages = dist.get_world_size()
    module = Part(rank)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, 9, loss_of, activation_limit=2, weight_limit=[4, 3, 2])
    x = torch.randn(9, WIDTH)
    most = [0, 0]
    for _ in range(4):
        schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == 2 else {}))
        held = pending = 0
        for span in schedule.last_spans:
            held += {"F": 1, "B": -1}.get(span.kind, 0)
            pending += {"F": 1, "W": -1}.get(span.kind, 0)
            most = [max(most[0], held), max(most[1], pending)]
    return (most[0], most[1])


def test_limits_are_kept() -> None:
    for rank, (held, pending) in enumerate(run_ranks(limited, world_size=3)):
        assert held <= 2
        assert pending <= [4, 3, 2][rank]


def test_room_for_activations() -> None:
    room = MemoryRoom(
        activation_bytes=100, device_bytes=450, host_bytes=1000, copy_bytes_per_s=30_000
    )
    assert room.on_device() == 4
    # Three copies of a microbatch take 10 ms.
    # Two of the four places on the device are for those that come back.
    assert room.in_all(microbatch_s=0.011) == 12
    assert replace(room, host_bytes=100).in_all(microbatch_s=0.011) == 4
    assert room.in_all(microbatch_s=0.009) == 4
    assert replace(room, device_bytes=5).on_device() == 1
    assert replace(room, activation_bytes=0).in_all(1.0) > 1 << 20
    assert offload.free_host_bytes() > 0


def test_plans_keep_to_the_room_that_was_measured() -> None:
    decider = Decider(COUNT, NO_LIMITS, False)
    slow = healthy_costs().with_delay(2, 0.06)
    current = initial_plan(4, COUNT, NO_LIMITS, False)
    wide = decider.consider(slow, current, True, [math.inf] * 4)
    tight = decider.consider(slow, current, True, [5.0, 9.0, 9.0, 9.0])
    assert wide is not None
    assert tight is not None
    assert max(wide.gates.pending) > 9
    assert tight.gates.pending[0] == 5
    assert max(tight.gates.pending[1:]) <= 9
    assert tight.predicted_s > wide.predicted_s


@pytest.mark.parametrize("fixed", [False, True])
def test_a_plan_that_does_not_fit_is_replaced_though_it_is_faster(fixed: bool) -> None:
    decider = Decider(COUNT, NO_LIMITS, fixed)
    costs = healthy_costs().with_delay(0, 0.03)
    wide = decider.consider(costs, initial_plan(4, COUNT, NO_LIMITS, fixed), False)
    assert wide is not None
    tight = decider.consider(costs, wide, False, [4.0] * 4)
    assert tight is not None
    assert tight.epoch == 2
    assert tight.predicted_s > wide.predicted_s
    assert tight.reason.startswith("what fits in memory")
    if fixed:
        held = [held_at_most(tight.order_of(stage))[1] for stage in range(4)]
        assert max(held) <= 4
    else:
        assert max(tight.gates.pending) <= 4
    assert decider.consider(costs, tight, False, [4.0] * 4) is None


def test_the_same_costs_are_looked_at_once() -> None:
    decider = Decider(COUNT, NO_LIMITS, False)
    first = decider.consider(healthy_costs(), initial_plan(4, COUNT, NO_LIMITS, False), False)
    assert first is not None
    looks = []
    candidate = decider._candidate

    def counted(*arguments: Any) -> AdaptivePlan:
        looks.append(arguments)
        return candidate(*arguments)

    decider._candidate = counted  # type: ignore[method-assign]
    for factor in (1.0, 1.01, 0.99, 1.0):
        forward_s = tuple(factor * each for each in healthy_costs().forward_s)
        assert decider.consider(replace(healthy_costs(), forward_s=forward_s), first, False) is None
    assert len(looks) == 1
    decider.consider(healthy_costs(), first, True)  # a link has changed
    decider.consider(healthy_costs().with_delay(0, 0.003), first, False)
    assert len(looks) == 3


def offloading(rank: int, most: int | None) -> dict[str, Any]:
    offload._MIN_BYTES = 1  # the tensors of this test are small
    module = Part(rank)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of, device_microbatches=most)
    result = train_with(schedule, module, stage)
    result["bytes"] = schedule.stats().offloaded_bytes
    result["ahead"] = schedule._offload.fetched_ahead_bytes
    return result


def test_offloading_changes_no_bit() -> None:
    want = run_ranks(train, "torch 1F1B", world_size=3, backend="gloo")
    for most in (1, 2, 3):
        got = run_ranks(offloading, most, world_size=3)
        same_numbers(got, want)
        # The first stage holds several.
        assert got[0]["bytes"] > 10_000
        assert (got[0]["ahead"] > 0) == (most > 1)
    kept = run_ranks(offloading, None, world_size=3)
    same_numbers(kept, want)
    assert [rank["bytes"] for rank in kept] == [0, 0, 0]


class Watched(Part):
    """Keeps weak references to outputs that operations save for their backward."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        saved = torch.tanh(super().forward(x, scale))
        self.seen.append(weakref.ref(saved))
        return saved + x


def watched(rank: int, measures: bool) -> int:
    """How many of them are left after some steps; they are too small to be moved."""
    module = Watched(rank)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of, device_microbatches=1)
    found: list[int] = []
    mover = schedule._offload

    def around(kind: str, _: int) -> contextlib.AbstractContextManager[None]:
        if kind != "F":
            return contextlib.nullcontext()
        return mover.measuring(found) if measures else mover.offloading()

    schedule.around_operation = around
    train_with(schedule, module, stage)
    gc.collect()
    assert len(module.seen) >= 3 * MICROBATCHES
    return sum(each() is not None for each in module.seen)


@pytest.mark.parametrize("measures", [False, True])
def test_what_f_saves_is_freed_when_it_is_offloaded_or_measured(measures: bool) -> None:
    assert run_ranks(watched, measures) == [0, 0]


def test_what_f_saves_is_measured() -> None:
    module = nn.Linear(64, 64)
    x = torch.ones(32, 64, requires_grad=True)
    mover = offload.HostOffload(torch.device("cpu"), module)
    found: list[int] = []
    with mover.measuring(found):
        y = torch.tanh(module(x))
    # The input and the output of tanh; not the weight.
    assert found == [2 * 32 * 64 * 4]
    with mover.offloading():
        moved = torch.tanh(module(x))
    assert mover.offloaded_bytes == 0  # all below the least size
    x = torch.ones(256, 64, requires_grad=True)
    with mover.offloading():
        moved = torch.tanh(module(x))
    assert mover.offloaded_bytes == 2 * 256 * 64 * 4
    moved.sum().backward()
    assert x.grad is not None
    assert y.requires_grad
