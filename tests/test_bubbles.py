"""Other work in idle time: when chunks run, what they cannot change, the timeline."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_schedules import MICROBATCHES, Part, loss_of, make, train_with
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient.pipelining import ScheduleAdaptiveZB, bubbles, picture
from torch_resilient.pipelining.bubbles import (
    MIN_GUARD_S,
    Bubbles,
    BubbleWork,
    Chunk,
    DueTimes,
    Errors,
)
from torch_resilient.pipelining.measured import FORWARD, FilledSpan, Idle, without
from torch_resilient.pipelining.run_timeline import chrome_trace, picture_of, text_table
from torch_resilient.pipelining.timeline_files import read_run

MS = 1e-3


class Clock:
    """Virtual time, and messages as works: each is the moment when it comes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(bubbles, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(bubbles, "_native", SimpleNamespace(load=lambda: self))

    def wait_any(self, works: list[float], timeout_s: float | None = None) -> int | None:
        first = min(range(len(works)), key=works.__getitem__)
        end_s = works[first] if timeout_s is None else min(works[first], self.now_s + timeout_s)
        self.now_s = max(self.now_s, end_s)
        return first if works[first] <= self.now_s else None

    def ended_at(self, work: float) -> float:
        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Sleeper(BubbleWork):
    """Chunks of `predicted_s` that take `took_s`."""

    def __init__(self, clock: Clock, predicted_s: float, took_s: float | None = None) -> None:
        self.clock = clock
        self.predicted_s = predicted_s
        self.took_s = predicted_s if took_s is None else took_s
        self.ran: list[float] = []
        self.stopped: list[str] = []
        self.error: Exception | None = None
        self.left = 10**9

    def next_chunk(self, end_s: float) -> Chunk | None:
        return Chunk(self.predicted_s, self.run) if self.left else None

    def run(self) -> None:
        if self.error is not None:
            raise self.error
        self.left -= 1
        self.ran.append(self.clock.now_s)
        self.clock.now_s += self.took_s

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


def wait(made: Bubbles, clock: Clock, length_s: float, place: str = "here") -> float:
    """A wait of that length; returns when it began."""
    began_s = clock.now_s
    made.wait([began_s + length_s], place)  # type: ignore[list-item]
    return began_s


def known(made: Bubbles, clock: Clock, length_s: float) -> None:
    """Two waits of that length, after which the next one is predicted."""
    for _ in range(2):
        wait(made, clock, length_s)


def test_a_wait_is_predicted_by_those_at_its_place() -> None:
    due = DueTimes()
    due.observe("a", 0.5)
    assert due.predicted_s("a") is None
    due.observe("a", 0.4)
    assert due.predicted_s("a") == 0.4
    for _ in range(3):
        due.observe("a", 0.6)
    assert due.predicted_s("a") == 0.6
    assert due.predicted_s("b") is None
    due.observe("a", 0.1)  # the bubble has vanished
    assert due.predicted_s("a") == 0.1
    due.observe("a", 0.6)
    assert due.predicted_s("a") == 0.6
    due.forget()
    assert due.predicted_s("a") is None


def test_the_guard_is_three_sigma_and_at_least_a_millisecond() -> None:
    made = Bubbles(0)
    assert made.guard_s == MIN_GUARD_S
    rng = random.Random(1)
    errors = Errors()
    for _ in range(1000):
        errors.add(rng.gauss(0, 0.002))
    assert errors.sigma_s == pytest.approx(0.002, rel=0.5)
    errors = Errors()
    for _ in range(100):
        errors.add(-1.0)  # a message that is late, a chunk that is short: no harm
    assert errors.sigma_s == 0


def test_a_chunk_only_runs_if_it_ends_a_guard_before_the_message(clock: Clock) -> None:
    """Paper: BUBBLETEA §5.1, prefill ends before the training job resumes."""
    made, work = Bubbles(0), Sleeper(clock, 4 * MS)
    made.add(work)
    known(made, clock, 25.01 * MS)
    assert work.ran == []
    began_s = wait(made, clock, 25.01 * MS)
    # Six chunks end at 24 ms, just before the guard.
    expected = [began_s + i * 4 * MS for i in range(6)]
    assert work.ran == pytest.approx(expected)
    assert clock.now_s == pytest.approx(began_s + 25.01 * MS)
    work.ran.clear()
    known(made, clock, 24.9 * MS)
    work.ran.clear()
    wait(made, clock, 24.9 * MS)
    assert len(work.ran) == 5
    assert made.stats().late == 0


def test_a_message_that_comes_early_waits_for_one_chunk_and_widens_the_guard(clock: Clock) -> None:
    made, work = Bubbles(0), Sleeper(clock, 4 * MS)
    made.add(work)
    known(made, clock, 40 * MS)
    began_s = wait(made, clock, 10 * MS)
    assert len(work.ran) == 3
    assert clock.now_s == pytest.approx(began_s + 12 * MS)
    found = made.stats()
    assert (found.late, found.late_s) == (1, pytest.approx(2 * MS))
    # Three times the square root of twice 30 ms squared: longer than the next wait.
    assert found.guard_s == pytest.approx(3 * 2**0.5 * 30 * MS)
    work.ran.clear()
    wait(made, clock, 40 * MS)
    assert work.ran == []


@pytest.mark.parametrize("wait_s", [25 * MS, 200 * MS])
def test_a_hiccup_that_leaves_no_room_for_chunks_is_forgotten(clock: Clock, wait_s: float) -> None:
    """The guard is longer than the wait, or than what a chunk leaves of it."""
    made, work = Bubbles(0), Sleeper(clock, 4 * MS)
    made.add(work)
    known(made, clock, wait_s)
    made.begin_iteration()
    work.took_s, work.left = 45 * MS, 1
    wait(made, clock, wait_s)
    assert made.guard_s == pytest.approx(3 * 2**0.5 * 41 * MS)
    assert len(work.ran) == 1
    work.predicted_s, work.took_s, work.left = 30 * MS, 30 * MS, 10**9
    if wait_s < made.guard_s:
        work.predicted_s = work.took_s = 4 * MS
    ran = []
    for _ in range(3):
        made.begin_iteration()
        work.ran.clear()
        wait(made, clock, wait_s)
        ran.append(len(work.ran))
    assert ran == [0, 5, 5] if wait_s < 0.1 else ran == [0, 6, 6]
    # A chunk that is longer than the wait says nothing about the guard.
    work.predicted_s = work.took_s = 1.0
    for _ in range(3):
        made.begin_iteration()
        wait(made, clock, wait_s)
    assert len(made._chunk_errors._squares) == sum(ran)


def test_waits_that_are_too_short_say_nothing_without_work(clock: Clock) -> None:
    made, work = Bubbles(0), Sleeper(clock, 4 * MS, 6 * MS)
    made.add(work)
    for _ in range(2):
        wait(made, clock, 200 * MS, "long")
        wait(made, clock, 5 * MS, "short")
    made.begin_iteration()
    wait(made, clock, 200 * MS, "long")
    guard_s = made.guard_s
    assert guard_s == pytest.approx(3 * 2**0.5 * 2 * MS)
    work.left = 0
    for _ in range(5):
        made.begin_iteration()
        wait(made, clock, 200 * MS, "long")
        wait(made, clock, 5 * MS, "short")
    assert made.guard_s == guard_s


def test_work_that_comes_during_a_wait_begins_at_once(clock: Clock) -> None:
    made, work = Bubbles(0), Sleeper(clock, 4 * MS)
    made.add(work)
    work.left = 0
    known(made, clock, 40 * MS)
    arrived_s = clock.now_s + 17 * MS
    original = work.next_chunk

    def next_chunk(end_s: float) -> Chunk | None:
        if clock.now_s >= arrived_s:
            work.left = 1
        return original(end_s) if not work.ran else None

    work.next_chunk = next_chunk  # type: ignore[method-assign]
    wait(made, clock, 40 * MS)
    (ran_s,) = work.ran
    assert 0 <= ran_s - arrived_s <= 2 * MS


def test_work_added_first_goes_first(clock: Clock) -> None:
    made, first, second = Bubbles(0), Sleeper(clock, 8 * MS), Sleeper(clock, 2 * MS)
    made.add(first)
    made.add(second)
    known(made, clock, 21.01 * MS)
    began_s = wait(made, clock, 21.01 * MS)
    assert [round(1e3 * (t - began_s)) for t in first.ran] == [0, 8]
    assert [round(1e3 * (t - began_s)) for t in second.ran] == [16, 18]


@pytest.mark.parametrize(
    ("error", "took_s", "reason"),
    [
        (ValueError("a bug"), 0.0, "ValueError: a bug"),
        (None, 90 * MS, "a chunk took 90.0 ms instead of 8.0 ms"),
    ],
)
def test_work_that_raises_or_takes_ten_times_as_long_is_suspended(
    clock: Clock, error: Exception | None, took_s: float, reason: str
) -> None:
    made, bad, good = Bubbles(100), Sleeper(clock, 8 * MS, took_s), Sleeper(clock, 8 * MS)
    bad.name, bad.memory_bytes, bad.error = "bad", 60, error
    made.add(bad)
    known(made, clock, 50 * MS)
    made.add(good)
    wait(made, clock, 50 * MS)
    wait(made, clock, 50 * MS)
    assert len(bad.ran) == (error is None)
    assert made.suspended == {"bad": reason}
    assert bad.stopped == [f"suspended: {reason}"]
    assert made.memory.used_bytes == 0
    event = stats_events()[-1]
    assert (event.kind, event.details["work"]) == ("bubble_work_suspended", "bad")
    assert reason in event.text
    if error is not None:
        assert good.ran  # the rest goes on


def test_a_chunk_of_nine_times_its_prediction_is_no_reason(clock: Clock) -> None:
    made, work = Bubbles(0), Sleeper(clock, 8 * MS, 72 * MS)
    made.add(work)
    known(made, clock, 50 * MS)
    wait(made, clock, 50 * MS)
    assert work.ran
    assert not made.suspended


def test_work_that_fails_when_it_is_stopped_does_no_harm(clock: Clock) -> None:
    class Bad(Sleeper):
        def next_chunk(self, end_s: float) -> Chunk | None:
            raise KeyError("no prompt")

        def stop(self, reason: str) -> None:
            raise RuntimeError("twice")

    made = Bubbles(0)
    made.add(Bad(clock, MS))
    known(made, clock, 50 * MS)
    wait(made, clock, 50 * MS)
    assert list(made.suspended) == ["work"]


def test_memory_is_refused_if_it_does_not_fit(clock: Clock) -> None:
    made, large, small = Bubbles(100), Sleeper(clock, MS), Sleeper(clock, MS)
    large.memory_bytes, small.memory_bytes = 101, 60
    with pytest.raises(ValueError, match="work needs 101 bytes, and 0 of the 100"):
        made.add(large)
    made.add(small)
    assert not made.memory.take(41)
    assert made.memory.take(40)
    made.memory.give_back(40)
    made.close()
    made.close()
    assert small.stopped == ["the training has ended"]
    assert made.memory.used_bytes == 0


def test_the_last_iteration_is_a_signal(clock: Clock) -> None:
    made = Bubbles(0)
    made.begin_iteration()
    began_s = clock.now_s
    clock.now_s += 5 * MS
    wait(made, clock, 20 * MS)
    assert made.last_iteration is None
    clock.now_s += 75 * MS
    made.begin_iteration()
    assert made.last_iteration is not None
    assert made.last_iteration.start_s == began_s
    assert made.last_iteration.period_s == pytest.approx(100 * MS)
    ((offset_s, length_s),) = made.last_iteration.windows
    assert (offset_s, length_s) == (pytest.approx(5 * MS), pytest.approx(20 * MS))


def stats_events() -> Any:
    from torch_resilient._reports import events

    return events.recent()


# In real trainings.


class Nasty(BubbleWork):
    """Does in each chunk what could change a training."""

    name = "nasty"

    def __init__(self) -> None:
        self.chunks = 0
        self.seen: set[tuple[bool, bool]] = set()
        self.model = nn.Linear(8, 8)

    def next_chunk(self, end_s: float) -> Chunk | None:
        return Chunk(0.1, self.run)

    def run(self) -> None:
        self.chunks += 1
        self.seen.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        torch.manual_seed(self.chunks)
        torch.rand(3)
        torch.set_grad_enabled(self.chunks % 2 == 0)
        self.model(torch.ones(8))


class WithDropout(Part):
    """Slow in the first stage: without that, no rank needs to wait on a busy machine."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.pause_s = 0.01 if index == 0 else 0.0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        time.sleep(self.pause_s)
        return nn.functional.dropout(super().forward(x, scale), 0.2)


def train_with_work(rank: int, name: str, work: bool) -> Any:
    """Some steps of training, with or without nasty work in its bubbles."""
    torch.manual_seed(rank)
    module = WithDropout(rank)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = (
        ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of)
        if name == "adaptive"
        else make(name, stage, rank)
    )
    nasty, made = Nasty(), Bubbles(0)
    made.add(nasty)
    # So that chunks run in every wait from the first one on, however short it is.
    made._due.predicted_s = lambda place: 10.0
    if work and name.startswith("torch"):
        made.attach(schedule)
    elif work:
        schedule.bubbles = made
    result = [train_with(schedule, module, stage), train_with(schedule, module, stage)]
    assert not made.suspended
    return result, nasty.chunks, nasty.seen, made.stats(), torch.rand(2).tolist()


@pytest.mark.parametrize("name", ["live", "zb_h1", "adaptive", "torch 1F1B"])
def test_training_has_the_same_bits_with_work_in_its_bubbles(name: str) -> None:
    plain = run_ranks(train_with_work, name, False, world_size=3)
    busy = run_ranks(train_with_work, name, True, world_size=3)
    assert [each[0] for each in plain] == [each[0] for each in busy]
    assert [each[4] for each in plain] == [each[4] for each in busy]
    assert sum(each[1] for each in busy) > 0
    for _, chunks, seen, found, _ in busy:
        assert seen <= {(False, False)}
        assert found.chunks == chunks


def attach_what_is_wrong(rank: int) -> Any:
    """The errors of attach()."""
    stage = PipelineStage(Part(rank), rank, 2, torch.device("cpu"))
    errors = []
    for name in ("live", "torch 1F1B"):
        try:
            Bubbles(0).attach(make(name, stage, rank))
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_attach_takes_only_torchs_own_schedules_over_this_backend() -> None:
    for errors in run_ranks(attach_what_is_wrong, world_size=2):
        assert len(errors) == 1
        assert "ScheduleLive" in errors[0]
    for errors in run_ranks(attach_what_is_wrong, world_size=2, backend="gloo"):
        assert len(errors) == 2
        assert "resilient" in errors[1]


def program_wait(rank: int) -> Any:
    """A wait of the program itself, for an all-reduce."""
    made, nasty = Bubbles(0), Nasty()
    made.add(nasty)
    values = []
    for i in range(4):
        value = torch.full((3,), float(i + rank))
        if rank == 1:
            dist.recv(torch.empty(1), 0)  # rank 0 waits already
        work = dist.all_reduce(value, async_op=True)
        if rank == 0:
            dist.send(torch.ones(1), 1)
        made.wait([work], "all-reduce")
        work.wait()
        values.append(value.tolist())
    return values, made.stats().waits


def test_a_program_fills_its_own_waits() -> None:
    for values, waits in run_ranks(program_wait):
        assert values == [[2.0 * i + 1] * 3 for i in range(4)]
        assert waits == 4


# In the timeline.


def test_idle_time_is_what_work_leaves() -> None:
    idle = [Idle(FORWARD, 1.0, 2.0), Idle(FORWARD, 3.0, 4.0)]
    filled = [FilledSpan("w", 1.2, 1.4), FilledSpan("w", 1.4, 1.5), FilledSpan("w", 2.9, 5.0)]
    left = [(each.start_s, each.end_s) for each in without(idle, filled)]
    assert left == [(1.0, 1.2), (1.5, 2.0)]
    assert without(idle, []) == tuple(idle)


def record_run(rank: int, folder: str) -> int:
    module = Part(rank)
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of, timeline_dir=folder)
    schedule.bubbles = Bubbles(0)
    schedule.bubbles.add(Nasty())
    schedule.bubbles._due.predicted_s = lambda place: 10.0  # type: ignore[method-assign]
    train_with(schedule, module, stage)
    return schedule.bubbles.stats().chunks


def test_the_timeline_shows_the_chunks(tmp_path: Path) -> None:
    chunks = run_ranks(record_run, str(tmp_path), world_size=2)
    run = read_run(tmp_path)
    shown = [
        sum(len(each.filled) for step in run.steps if (each := step.stages[stage]) is not None)
        for stage in range(2)
    ]
    assert shown == chunks
    assert sum(chunks) > 0
    assert any(step.filled > 0 for step in run.steps)
    assert "filled %" in text_table(run)
    drawn = picture_of(run, "a run")
    boxes = [box for row in drawn.rows for box in row.boxes if box.paint == "prefill"]
    assert len(boxes) == sum(chunks)
    assert "other work" in picture.svg(drawn)
    names = [each["name"] for each in chrome_trace(run)["traceEvents"]]
    assert names.count("nasty") == sum(chunks)
