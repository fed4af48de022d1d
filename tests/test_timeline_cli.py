"""`torch-resilient timeline`: runs made from exact replays are read, reported and drawn."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import resource
import stat
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from torch_resilient import cli
from torch_resilient.pipelining import run_timeline
from torch_resilient.pipelining.measured import CAUSES, MeasuredRun, Waiting
from torch_resilient.pipelining.timeline_files import (
    TimelineError,
    TimelineWriter,
    clock_offset_s,
    read_run,
)
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import Operation, Order, gpipe, one_f_one_b, zb_h1, zb_h2
from torch_resilient.planning.replay import Replay, replay

# Figures 4 and 5 of PIPEMORPH.
PAPER = PipelineCosts.of(4, forward_s=0.01, input_backward_s=0.01, weight_backward_s=0.01)
# The time on stage 0's clock when the first step begins.
ORIGIN_S = 5000.0
OPTIMIZER_S = 0.007
SVG = "{http://www.w3.org/2000/svg}"


def parsed(*orders: str) -> list[Order]:
    return [[Operation.parse(text) for text in order.split()] for order in orders]


@dataclass
class Iteration:
    """One iteration of a made-up run."""

    timed: Replay
    plan: int = 0
    events: Sequence[str] = ()


@dataclass
class Rank:
    """Writes one rank's file, by a clock that the test sets."""

    folder: Path
    stage: int
    num_stages: int
    offset_s: float = 0.0
    # The drift of the clock, in seconds per second.
    drift: float = 0.0
    now_s: float = ORIGIN_S
    writer: TimelineWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = TimelineWriter(
            self.folder,
            rank=10 + self.stage,
            stage=self.stage,
            num_stages=self.num_stages,
            host=f"host{self.stage}",
            clock_offset_s=self.offset_s,
            clock=lambda: self.own(self.now_s),
        )

    def own(self, time_s: float) -> float:
        """The time on this rank's clock."""
        return time_s - self.offset_now(time_s)

    def offset_now(self, time_s: float) -> float:
        return self.offset_s + self.drift * (time_s - ORIGIN_S)

    def add(self, step: int, iteration: Iteration, start_s: float, arrivals: bool = True) -> None:
        timed = iteration.timed
        self.now_s = start_s
        for text in iteration.events:
            self.writer.event(step, text, predicted_s=timed.iteration_s)
        spans = [
            (*span.operation, self.own(start_s + span.start_s), self.own(start_s + span.end_s))
            for span in timed.stages[self.stage]
        ]
        self.writer.add(
            step,
            iteration.plan,
            # A device reports its spans late: after a later wait of the host.
            [("wait", -1, spans[0][3], spans[1][2]), *reversed(spans)],
            [
                (*message.operation, self.own(start_s + message.end_s))
                for message in timed.messages
                if arrivals and message.destination == self.stage
            ],
            self.own(start_s),
            self.own(start_s + timed.iteration_s),
        )


def write_run(
    folder: Path,
    iterations: Sequence[Iteration],
    offsets_s: Sequence[float] = (),
    arrivals: bool = True,
) -> list[float]:
    """Makes the files; returns when each iteration starts."""
    stages = len(iterations[0].timed.stages)
    ranks = [Rank(folder, i, stages, offsets_s[i] if offsets_s else 0.0) for i in range(stages)]
    starts_s = []
    now_s = ORIGIN_S
    for step, iteration in enumerate(iterations):
        starts_s.append(now_s)
        for rank in ranks:
            rank.add(step, iteration, now_s, arrivals)
        now_s += iteration.timed.iteration_s + OPTIMIZER_S
    for rank in ranks:
        rank.writer.close()
    return starts_s


def causes_of(run: MeasuredRun, step: int, stage: int) -> dict[str, float]:
    """Idle seconds of a stage in a step, by cause."""
    measured = run.steps[step].stages[stage]
    assert measured is not None
    found = dict.fromkeys(CAUSES, 0.0)
    for idle in measured.idle:
        found[idle.cause] += idle.duration_s
    return found


def path_of(folder: Path, stage: int) -> Path:
    return folder / f"rank{10 + stage:05}.jsonl"


def slow(link: int, delay_s: float, orders: list[Order] | None = None) -> Replay:
    return replay(orders or zb_h1(4, 6), PAPER.with_delay(link, delay_s))


def three_plans() -> list[Iteration]:
    """A link gets slow in step 4; the plan changes in step 6 and, back, in step 10. Before, there
    was the first plan that follows from measurements."""
    fast, slowed = slow(1, 0.001), slow(1, 0.050)
    adapted = slow(1, 0.050, zb_h2(4, 6))
    iterations = [Iteration(fast, plan=1)] * 4 + [Iteration(slowed, plan=1)] * 2
    iterations += [Iteration(adapted, plan=2)] * 4 + [Iteration(fast, plan=3)] * 2
    iterations[6] = Iteration(adapted, plan=2, events=["a new plan: link 1 to 2 is slow"])
    return iterations


@pytest.mark.parametrize("seed", range(20))
def test_the_causes_are_those_of_the_replay(seed: int, tmp_path: Path) -> None:
    """Checks random pipelines with large clock offsets."""
    rng = random.Random(seed)
    stages, microbatches = rng.randint(1, 5), rng.randint(1, 8)
    make = rng.choice([gpipe, one_f_one_b, zb_h1, zb_h2])
    costs = PipelineCosts.of(
        stages,
        forward_s=[rng.uniform(0.001, 0.02) for _ in range(stages)],
        input_backward_s=[rng.uniform(0.001, 0.02) for _ in range(stages)],
        weight_backward_s=[rng.uniform(0.001, 0.02) for _ in range(stages)],
        delay_forward_s=[rng.choice([0, 0.03]) for _ in range(stages - 1)],
        delay_backward_s=[rng.choice([0, 0.03]) for _ in range(stages - 1)],
    )
    timed = replay(make(stages, microbatches), costs)
    offsets_s = [0.0, *(rng.uniform(-1e5, 1e5) for _ in range(stages - 1))]
    starts_s = write_run(tmp_path, [Iteration(timed), Iteration(timed)], offsets_s)
    run = read_run(tmp_path)
    assert run.num_stages == stages
    assert run.missing == []
    assert [step.step for step in run.steps] == [0, 1]
    # Between iterations is the optimizer; the last one ends where its last stage does.
    for i, (step, after_s) in enumerate(zip(run.steps, (OPTIMIZER_S, 0.0), strict=True)):
        assert step.start_s == pytest.approx(starts_s[i], abs=1e-6)
        assert step.iteration_s == pytest.approx(timed.iteration_s + after_s, abs=1e-6)
        assert len(step.messages) == len(timed.messages)
        idle_s = sum(each.total_s for each in timed.bubbles) + after_s * stages
        assert step.bubble == pytest.approx(idle_s / stages / step.iteration_s, abs=1e-6)
        for stage, bubble in enumerate(timed.bubbles):
            measured = step.stages[stage]
            assert measured is not None
            found = causes_of(run, i, stage)
            waits = {"F": 0.0, "B": 0.0}
            for idle in measured.idle:
                if idle.link is not None and idle.awaited is not None and idle.cause != "warm_up":
                    assert idle.link == (stage + {"F": -1, "B": 1}[idle.awaited.kind], stage)
                    waits[idle.awaited.kind] += idle.duration_s
                    cause = {"F": "forward", "B": "backward"}[idle.awaited.kind]
                    assert idle.cause == ("order" if idle.possible else cause)
            assert waits["F"] == pytest.approx(bubble.forward_s, abs=1e-5)
            assert waits["B"] == pytest.approx(bubble.backward_s, abs=1e-5)
            assert found["warm_up"] == pytest.approx(bubble.warm_up_s, abs=1e-5)
            assert found["cool_down"] == pytest.approx(bubble.cool_down_s + after_s, abs=1e-5)
            # A replay has no overhead; the remainder is rounding.
            assert found["overhead"] == pytest.approx(0, abs=1e-5)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    timed = slow(0, 0.015)
    starts_s = write_run(tmp_path, [Iteration(timed, plan=3)], [0.0, 77.25, -3.5, 1e4])
    run = read_run(tmp_path)
    (step,) = run.steps
    assert step.plans == (3,)
    for stage, spans in enumerate(timed.stages):
        info, measured = run.ranks[stage], step.stages[stage]
        assert info is not None
        assert measured is not None
        assert (info.rank, info.stage, info.host, info.torn) == (
            10 + stage,
            stage,
            f"host{stage}",
            False,
        )
        assert info.pid == os.getpid()
        assert [span.operation for span in measured.spans] == [span.operation for span in spans]
        for found, wanted in zip(measured.spans, spans, strict=True):
            assert found.start_s == pytest.approx(starts_s[0] + wanted.start_s, abs=1e-6)
            assert found.end_s == pytest.approx(starts_s[0] + wanted.end_s, abs=1e-6)
        wait_s = (spans[0].end_s + starts_s[0], spans[1].start_s + starts_s[0])
        assert measured.waits == (pytest.approx(wait_s, abs=1e-6),)
    key = [(m.operation, m.source, m.destination) for m in timed.messages]
    assert [(m.operation, m.source, m.destination) for m in step.messages] == key
    for found, wanted in zip(step.messages, timed.messages, strict=True):
        assert found.start_s - starts_s[0] == pytest.approx(wanted.start_s, abs=1e-6)
        assert found.end_s - starts_s[0] == pytest.approx(wanted.end_s, abs=1e-6)


def test_spans_of_the_recorder_can_be_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch_resilient.pipelining.recorder import Recorder

    recorder = Recorder(torch.device("cpu"))
    recorder.begin(0)
    for kind in "FBW":
        with recorder.operation(kind, 0):
            pass
    with recorder.wait():
        pass
    spans = recorder.end()
    rank = Rank(tmp_path, 0, 1)
    rank.writer.add(0, 0, spans, [], recorder.start_s, spans[-1].end_s)
    measured = read_run(tmp_path).steps[0].stages[0]
    assert measured is not None
    assert [str(span.operation) for span in measured.spans] == ["F0", "B0", "W0"]
    assert measured.waits == (pytest.approx((spans[-1].start_s, spans[-1].end_s), abs=1e-6),)
    rank.writer.close()


def test_what_else_could_run_is_told(tmp_path: Path) -> None:
    """Stage 1 waits for F1 while W0 could run, from the start; stage 0 for B0 while it could not
    run F1 without holding more; then for B1, with nothing left to do."""
    costs = PipelineCosts.of(
        2, forward_s=1, input_backward_s=1, weight_backward_s=1, delay_forward_s=2
    )
    orders = parsed("F0 B0 W0 F1 B1 W1", "F0 B0 F1 W0 B1 W1")
    write_run(tmp_path, [Iteration(replay(orders, costs))])
    run = read_run(tmp_path)
    first, second = (step for step in run.steps[0].stages if step)
    told = [
        (idle.cause, str(idle.awaited), str(idle.possible), round(idle.duration_s, 5))
        for idle in second.idle
        if idle.duration_s > 1e-3
    ]
    # B0 ends at 5 and is at stage 0 at 7, which sends F1 at 10.
    assert told == [
        ("warm_up", "F0", "None", 3.0),
        ("order", "F1", "W0", 7.0),
        ("cool_down", "None", "None", 3.0),
    ]
    assert [idle.cause for idle in first.idle if idle.duration_s > 1e-3] == [
        "backward",
        "backward",
    ]
    waiting = run.steps[0].waiting
    assert waiting[0, 1].waited_s == pytest.approx(10)
    assert waiting[0, 1].order_s == pytest.approx(7)
    # Each of the two messages was on its way for 2 s; before, stage 0 had not sent it.
    assert waiting[0, 1].transit_s == pytest.approx(4)


def test_an_arrival_parts_a_wait(tmp_path: Path) -> None:
    """Waiting, then waiting though something else has come, then nothing awaited."""
    first, last = Rank(tmp_path, 0, 2), Rank(tmp_path, 1, 2)
    spans = [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 9, 10), ("W", 0, 10, 11)]
    spans += [("B", 1, 11, 12), ("W", 1, 12, 13)]
    first.writer.add(0, 0, spans, [("B", 0, 7), ("B", 1, 10)], 0, 13)
    spans = [("F", 0, 2, 3), ("B", 0, 3, 4), ("F", 1, 9, 10), ("B", 1, 10, 11), ("W", 0, 11, 12)]
    last.writer.add(0, 0, [*spans, ("W", 1, 12, 13)], [("F", 0, 2), ("F", 1, 8)], 0, 13)
    run = read_run(tmp_path)
    told = [
        [(idle.cause, idle.start_s, idle.end_s) for idle in stage.idle]
        for stage in run.steps[0].stages
        if stage
    ]
    assert told[0] == [("backward", 2, 7), ("overhead", 7, 9)]
    # W0 could run all the time.
    assert told[1] == [("warm_up", 0, 2), ("order", 4, 8), ("overhead", 8, 9)]
    # B0 left when it ended, at 4: until then, and from 2 on, it was stage 1 that was late.
    assert run.steps[0].waiting[1, 0] == Waiting(5, 3, 0)


def test_without_arrivals_a_wait_lasts_until_the_operation(tmp_path: Path) -> None:
    timed = slow(1, 0.03)
    write_run(tmp_path, [Iteration(timed)], arrivals=False)
    run = read_run(tmp_path)
    assert run.steps[0].messages == ()
    for stage, bubble in enumerate(timed.bubbles):
        found = causes_of(run, 0, stage)
        waited_s = found["forward"] + found["backward"] + found["order"]
        assert waited_s == pytest.approx(bubble.forward_s + bubble.backward_s, abs=1e-5)


def test_only_forwards(tmp_path: Path) -> None:
    """Runs forwards only, as `eval()` of a schedule does."""
    rank = Rank(tmp_path, 0, 1)
    rank.writer.add(0, 0, [("F", 0, 1, 2), ("F", 1, 4, 5)], [], 0, 6)
    rank.writer.add(1, 0, [], [], 8, 9)
    run = read_run(tmp_path)
    assert causes_of(run, 0, 0) == {
        **dict.fromkeys(CAUSES, 0.0),
        "warm_up": 1,
        "overhead": 2,
        "cool_down": 3,
    }
    assert causes_of(run, 1, 0)["cool_down"] == 1


@given(
    offset_s=st.floats(-1e6, 1e6),
    min_s=st.floats(1e-5, 0.1),
    extra_s=st.lists(
        st.tuples(st.floats(0, 20), st.floats(0.11, 1), st.floats(0.11, 1)), max_size=5
    ),
    split=st.floats(0, 1),
)
def test_clock_offsets(
    offset_s: float, min_s: float, extra_s: list[tuple[float, float, float]], split: float
) -> None:
    samples = [
        (at_s, at_s + there_s + offset_s, at_s + there_s + back_s)
        for at_s, there_s, back_s in extra_s
    ]
    samples.insert(len(samples) // 2, (9.0, 9.0 + min_s * split + offset_s, 9.0 + min_s))
    found_s, uncertainty_s = clock_offset_s(samples)
    assert uncertainty_s == pytest.approx(min_s / 2, abs=1e-9)
    assert abs(found_s - offset_s) <= uncertainty_s + 1e-8


@pytest.mark.parametrize("samples", [[], [(2.0, 5.0, 1.0)], [(0.0, float("nan"), 1.0)]])
def test_clock_samples_that_cannot_be(samples: list[tuple[float, float, float]]) -> None:
    with pytest.raises(ValueError, match="samples: expected"):
        clock_offset_s(samples)


def test_a_clock_that_drifts(tmp_path: Path) -> None:
    """Between two measurements the reader interpolates; one alone would be 0.1 s wrong."""
    timed = slow(0, 0.01, zb_h1(4, 2))
    steps = 50
    ranks = [Rank(tmp_path, stage, 4, 10.0 * stage, 2e-2 * stage) for stage in range(4)]
    for step in range(steps):
        start_s = ORIGIN_S + step * timed.iteration_s
        for rank in ranks:
            rank.add(step, Iteration(timed), start_s)
            if step in (20, steps - 1):
                rank.now_s = start_s + timed.iteration_s
                rank.writer.clock_offset(rank.offset_now(rank.now_s))
    run = read_run(tmp_path)
    for step in run.steps:
        expected_s = ORIGIN_S + step.step * timed.iteration_s
        for stage, spans in enumerate(timed.stages):
            measured = step.stages[stage]
            assert measured is not None
            for found, wanted in zip(measured.spans, spans, strict=True):
                assert found.start_s == pytest.approx(expected_s + wanted.start_s, abs=1e-4)
    assert max(run.early_s().values(), default=0) < 1e-4


def test_clocks_that_are_off_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, [Iteration(slow(0, 0))], [0.0, 0.5, 0.0, 0.0])
    path = path_of(tmp_path, 1)
    path.write_text(path.read_text().replace('"clock_offset_s":0.5', '"clock_offset_s":0.496'))
    assert cli.main(["timeline", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "link 0 to 1: messages arrive up to 4 ms before they leave; the clocks are off" in text
    assert "link 2 to 1: messages" in text


def test_a_torn_last_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = slow(0, 0.01)
    write_run(tmp_path, [Iteration(timed), Iteration(timed)])
    path = path_of(tmp_path, 2)
    whole = path.read_bytes()
    last = whole[: whole.rstrip().rindex(b"\n") + 1]
    for torn in (whole[:-1], whole[:-9], last + b"{"):
        path.write_bytes(torn)
        run = read_run(tmp_path)
        assert [info.torn for info in run.ranks if info] == [False, False, True, False]
        assert [[each.stage for each in step.present] for step in run.steps] == [
            [0, 1, 2, 3],
            [0, 1, 3],
        ]
    assert cli.main(["timeline", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "\n  1*" in text
    assert "* not of all stages\n" in text
    assert text.endswith("stage 2: the last line of rank 12 is not whole\n")
    # Cut anywhere, the rest of the run can be read; what comes after the cut is lost.
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        run = read_run(tmp_path)
        lines = whole[:length].count(b"\n")
        assert run.missing == ([] if lines else [2])
        assert sum(step.stages[2] is not None for step in run.steps) == max(lines - 1, 0)


def test_missing_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = slow(1, 0.01)
    write_run(tmp_path, [Iteration(timed)])
    path_of(tmp_path, 1).unlink()
    run = read_run(tmp_path)
    assert run.missing == [1]
    assert {(m.source, m.destination) for m in run.steps[0].messages} == {(2, 3), (3, 2)}
    # The message that stage 0 waited for is known; the time of its send is not.
    assert run.steps[0].waiting[1, 0].waited_s > 0
    assert run.steps[0].waiting[1, 0].transit_s == 0
    picture, trace = tmp_path / "run.svg", tmp_path / "trace.json"
    assert (
        cli.main(
            ["timeline", str(tmp_path), "--picture", str(picture), "--chrome-trace", str(trace)]
        )
        == 0
    )
    assert "stage 1: no file" in capsys.readouterr().out
    assert "stage 1: no file" in picture.read_text()
    assert cli.main(["timeline", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "*" not in text
    assert text.endswith("stage 1: no file\n")


HEADER: dict[str, Any] = {
    "format": 1,
    "rank": 0,
    "stage": 0,
    "num_stages": 2,
    "host": "a",
    "clock_offset_s": 0.0,
    "time_s": 0.0,
    "pid": 1,
}
STEP: dict[str, Any] = {
    "step": 4,
    "plan": 0,
    "start_s": 0,
    "end_s": 9,
    "spans": [["F", 0, 1, 2], ["wait", -1, 2, 3], ["B", 0, 3, 4]],
    "arrivals": [["B", 0, 3]],
}
EVENT: dict[str, Any] = {"event": "x", "step": 4, "time_s": 1.0, "numbers": {"a": 1}}
CLOCK: dict[str, Any] = {"clock_offset_s": 1.0, "time_s": 5.0}


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{"], "1: not JSON"),
        ([[1]], "1: expected a JSON object, got [1]"),
        ([{**HEADER, "format": 2}], "1: format: expected 1, got 2"),
        ([STEP], "1: format: expected 1, got None"),
        ([{**HEADER, "stage": 2}], "1: stage: expected one of 2, got 2"),
        ([{**HEADER, "rank": -1}], "1: rank: expected an integer, not negative, got -1"),
        ([{**HEADER, "pid": True}], "1: pid: expected an integer, not negative, got True"),
        ([{**HEADER, "host": None}], "1: host: expected a text, got None"),
        (
            [{**HEADER, "clock_offset_s": "0"}],
            "1: clock_offset_s: expected a finite number, got '0'",
        ),
        ([HEADER, STEP, "x", STEP], "3: not JSON"),
        ([HEADER, "\udcff"], "2: not JSON"),
        ([HEADER, STEP, STEP], "3: step: 4 comes after 4"),
        ([HEADER, {**STEP, "plan": 1.5}], "2: plan: expected an integer, not negative, got 1.5"),
        ([HEADER, {**STEP, "end_s": -1}], "2: end_s: -1.0 is before start_s, 0.0"),
        ([HEADER, {**STEP, "start_s": float("inf")}], "2: start_s: expected a finite number, got"),
        ([HEADER, {**STEP, "end_s": 10**400}], "2: end_s: expected a finite number, got 1000"),
        ([HEADER, {**STEP, "spans": [["F", 0, 1, 10**400]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": 3}], "2: spans: expected a list, got 3"),
        (
            [HEADER, {**STEP, "spans": [["G", 0, 1, 2]]}],
            "2: spans[0]: expected [F or B or W or wait",
        ),
        ([HEADER, {**STEP, "spans": [["F", 0, 2, 1]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": [["F", -1, 1, 2]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": [["F", True, 1, 2]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": [["F", 0, 1]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": [["F", 0, 1, None]]}], "2: spans[0]: expected"),
        ([HEADER, {**STEP, "spans": [["F", 0, 1, 2]] * 2}], "2: spans: F0 comes twice"),
        ([HEADER, {**STEP, "arrivals": [["W", 0, 1]]}], "2: arrivals[0]: expected [F or B, "),
        ([HEADER, {**STEP, "arrivals": [["B", 0, 1]] * 2}], "2: arrivals: B0 comes twice"),
        (
            [HEADER, {**STEP, "arrivals": [["F", 0, 1]]}],
            "2: arrivals: F0 of stage 0 needs no message",
        ),
        ([HEADER, {**EVENT, "event": 1}], "2: event: expected a text, got 1"),
        ([HEADER, {**EVENT, "numbers": []}], "2: numbers: expected an object, got []"),
        ([HEADER, {**EVENT, "numbers": {"b": "1"}}], "2: b: expected a finite number, got '1'"),
        ([HEADER, CLOCK, CLOCK], "3: time_s: expected more than 5.0, got 5.0"),
    ],
)
def test_bad_files_are_named_in_one_line(
    lines: list[Any], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "rank00001.jsonl"
    good.write_text(json.dumps({**HEADER, "rank": 1, "stage": 1}) + "\n")
    bad = tmp_path / "rank00000.jsonl"
    content = [each if isinstance(each, str) else json.dumps(each) for each in lines]
    bad.write_bytes("".join(f"{line}\n" for line in content).encode(errors="surrogateescape"))
    assert cli.main(["timeline", str(tmp_path)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith(f"torch-resilient timeline: {bad}:{text}")


def test_the_good_lines_of_those_tests_are_good(tmp_path: Path) -> None:
    path = tmp_path / "rank00000.jsonl"
    lines = [HEADER, STEP, EVENT, CLOCK, {**STEP, "step": 9}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert [step.step for step in run.steps] == [4, 9]
    assert run.events[0].numbers == {"a": 1}
    assert run.events[0].time_s == pytest.approx(1.2)  # a fifth of the way to the newer offset


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    first, second = tmp_path / "rank00000.jsonl", tmp_path / "rank00001.jsonl"
    first.write_text(json.dumps(HEADER) + "\n")
    second.write_text(json.dumps({**HEADER, "rank": 1}) + "\n")
    with pytest.raises(TimelineError, match=r"rank00001.jsonl:1: stage: 0, like rank00000.jsonl; "):
        read_run(tmp_path)
    second.write_text(json.dumps({**HEADER, "rank": 1, "stage": 1, "num_stages": 3}) + "\n")
    with pytest.raises(TimelineError, match=r"rank00001.jsonl:1: num_stages: 3, but 2 in rank"):
        read_run(tmp_path)


def test_folders_and_options_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: str) -> str:
        assert cli.main(["timeline", *arguments]) == 2
        output, errors = capsys.readouterr()
        assert (output, errors.count("\n")) == ("", 1)
        return errors.removeprefix("torch-resilient timeline: ")

    assert error(str(tmp_path / "none")) == f"{tmp_path / 'none'}: no such folder\n"
    assert "no file rank*.jsonl" in error(str(tmp_path))
    for pipeline in ("pipeline00002", "pipeline00000"):
        write_run(tmp_path / "jobs" / pipeline, [Iteration(slow(0, 0))])
    assert error(str(tmp_path / "jobs")).endswith("are pipeline00000, pipeline00002 in it\n")
    write_run(tmp_path, [Iteration(slow(0, 0))] * 3)
    run = str(tmp_path)
    for text in ("3", "a:b", ":", "-1:2", "1:2:3"):
        assert error(run, f"--steps={text}").startswith("--steps: expected A:B, A: or :B, got ")
    assert error(run, "--steps", "2:2") == "--steps: 2:2 holds no step\n"
    assert "no such step has been written" in error(run, "--steps", "3:")
    assert "expected a name in .svg or .png" in error(run, "--picture", "run.gif")
    assert "nowhere" in error(run, "--chrome-trace", str(tmp_path / "nowhere" / "a.json"))


def test_the_writer_says_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"timeline: cannot write: .*file"):
            Rank(folder, 0, 1)
    rank = Rank(tmp_path / "run", 0, 1)
    with pytest.raises(ValueError, match="not JSON compliant"):
        rank.writer.add(0, 0, [("F", 0, float("nan"), 1)], [], 0, 1)
    rank.writer.add(0, 0, [("F", 0, 0, 1)], [], 0, 1)
    rank.writer.close()
    rank.writer.close()
    with pytest.raises(ValueError, match="closed file"):
        rank.writer.event(1, "too late")
    assert len(read_run(tmp_path / "run").steps) == 1
    # A new run in the same folder starts from scratch.
    Rank(tmp_path / "run", 0, 1).writer.close()
    assert read_run(tmp_path / "run").steps == ()


def test_a_file_is_for_its_owner_only(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    path = path_of(tmp_path / "run", 0)
    path.symlink_to(victim)
    Rank(tmp_path / "run", 0, 1).writer.close()
    assert victim.read_text() == "mine"
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    assert read_run(tmp_path / "run").steps == ()


def test_a_write_that_fails_ends_the_file(tmp_path: Path) -> None:
    rank = Rank(tmp_path, 0, 1)
    rank.writer.add(0, 0, [("F", 0, 0, 1)], [], 0, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for a part of the next line.
    resource.setrlimit(resource.RLIMIT_FSIZE, (rank.writer.path.stat().st_size + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=r"timeline: cannot write: .*rank00010.jsonl"):
            rank.writer.add(1, 0, [("F", 0, 0, 1)], [], 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(ValueError, match="closed file"):
        rank.writer.add(2, 0, [("F", 0, 0, 1)], [], 0, 1)
    run = read_run(tmp_path)
    assert [step.step for step in run.steps] == [0]
    assert run.ranks[0] is not None
    assert run.ranks[0].torn


def test_each_line_is_whole_when_the_call_returns(tmp_path: Path) -> None:
    """A process that ends without any clean-up leaves all that it has written."""
    program = (
        "import os, sys\n"
        "from torch_resilient.pipelining.timeline_files import TimelineWriter\n"
        "writer = TimelineWriter(sys.argv[1], rank=0, stage=0, num_stages=1, host='a',\n"
        "                        clock_offset_s=0)\n"
        "writer.add(0, 0, [('F', 0, 0.0, 1.0)], [], 0.0, 1.0)\n"
        "writer.event(0, 'the end')\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False, timeout=60
    )
    assert done.returncode == 0
    run = read_run(tmp_path)
    assert (len(run.steps), [event.text for event in run.events]) == (1, ["the end"])
    assert run.ranks[0] is not None
    assert not run.ranks[0].torn


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    iterations = three_plans()
    write_run(tmp_path, iterations)
    assert cli.main(["timeline", str(tmp_path)]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    table, links, events = output.split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    heading = "step plan ms idle % warm-up forward backward order overhead cool-down"
    assert rows[0] == heading.split()
    assert len(rows) == 1 + 12
    assert [int(row[1]) for row in rows[1:]] == [1] * 6 + [2] * 4 + [3] * 2
    for row, iteration in zip(rows[1:12], iterations, strict=False):
        timed = iteration.timed
        assert float(row[2]) == pytest.approx((timed.iteration_s + OPTIMIZER_S) * 1e3, abs=0.06)
        assert float(row[3]) == pytest.approx(sum(map(float, row[4:])), abs=0.4)
    # The slow link stands out by the time for which stages waited for what was on its way.
    waited = {" ".join(row[:3]): float(row[4]) for row in map(str.split, links.splitlines()[1:])}
    assert set(sorted(waited, key=waited.__getitem__)[-2:]) == {"1 to 2", "2 to 1"}
    assert "50.000" in next(line for line in links.splitlines() if "1 to 2" in line)
    at_s = 4 * iterations[0].timed.iteration_s + 2 * iterations[4].timed.iteration_s
    # All stages tell of it.
    assert events == (
        f"step 6, all stages, at {at_s + 6 * OPTIMIZER_S:.3f} s: a new plan: link 1 to 2 is slow "
        f"predicted_s={iterations[6].timed.iteration_s:.6g}\n"
    )

    assert cli.main(["timeline", str(tmp_path), "--steps", "6:8"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n\n")[0].splitlines()]
    assert [row[0] for row in rows] == ["step", "6", "7"]
    # The step after the last one is still there to tell where that ended.
    assert rows[1][2] == rows[2][2]


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, three_plans())
    assert cli.main(["timeline", str(tmp_path), "--json", "--steps", ":7"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["stages"] == 4
    assert [rank["host"] for rank in told["ranks"]] == [f"host{i}" for i in range(4)]
    assert [step["plans"] for step in told["steps"]] == [[1]] * 6 + [[2]]
    for step in told["steps"]:
        assert step["bubble"] == pytest.approx(sum(step["idle"].values()))
    assert {(link["from"], link["to"]) for link in told["links"]} >= {(1, 2), (2, 1)}
    assert [event["step"] for event in told["events"]] == [6] * 4
    assert told["warnings"] == []


def elements(picture: Path, tag: str, classes: str = "") -> list[xml.etree.ElementTree.Element]:
    found = xml.etree.ElementTree.parse(picture).getroot().iter(SVG + tag)
    return [each for each in found if each.get("class", "") == classes or not classes]


def left_of(path: xml.etree.ElementTree.Element) -> float:
    """The x coordinate of the start of a path."""
    match = re.match(r"M([\d.]+) ", path.get("d", ""))
    assert match is not None
    return float(match[1])


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    iterations = three_plans()
    write_run(tmp_path, iterations)
    picture = tmp_path / "run.svg"
    assert cli.main(["timeline", str(tmp_path), "--picture", str(picture)]) == 0
    # The picture shows the change that came after slow iterations, not the other one.
    assert capsys.readouterr().out == (
        f"{picture}: steps 4 to 7 of 0 to 11: around the change from plan 1 to 2 in step 6\n"
    )
    text = picture.read_text()
    assert "prefers-color-scheme: dark" in text
    assert 'width="1280"' in text
    texts = ["".join(each.itertext()) for each in elements(picture, "text")]
    assert [each for each in texts if each.startswith("stage ") and "wait" not in each] == [
        f"stage {i}" for i in range(4)
    ]
    assert [each for each in texts if each.startswith("step ") and len(each) < 8] == [
        f"step {i}" for i in range(4, 8)
    ]
    # A thick line where the plan changes, thin ones where not.
    (change,) = elements(picture, "path", "change")
    others = elements(picture, "path", "step")
    assert len(others) == 3
    # They go through all rows.
    assert {each.get("d", "").count("H") for each in [*others, change]} == {4}
    assert texts.count("plan 2") == 1
    assert len(elements(picture, "rect", "badge")) == 1
    shown = iterations[4:8]
    lengths_s = [each.timed.iteration_s + OPTIMIZER_S for each in shown]
    lefts = sorted(map(left_of, [*others, change]))
    scale = (lefts[-1] - lefts[0]) / sum(lengths_s[:3])
    assert left_of(change) == pytest.approx(lefts[0] + sum(lengths_s[:2]) * scale, abs=0.2)
    # Every operation has its box, every message its line.
    tips = [str(each.text) for each in elements(picture, "title")]
    operations = [tip for tip in tips if " of microbatch " in tip]
    assert len(operations) == len(shown) * 4 * 6 * 3
    assert "stage 0: forward of microbatch 0, 0 to 10 ms" in operations
    assert len(elements(picture, "line", "message")) == len(shown) * len(shown[0].timed.messages)
    assert any(
        re.fullmatch(r"stage \d: waits for a gradient, B\d over link 2 to 1; .* ms", tip)
        for tip in tips
    )
    # The legend shows the causes that occur, with a pattern for each.
    fills = set(re.findall(r'fill="url\(#idle-(\w+)\)"', text))
    assert fills >= {"warm_up", "backward", "cool_down"}
    assert "idle" not in fills
    for cause in fills:
        assert f'<pattern id="idle-{cause}"' in text
        assert any(each.startswith(f"{CAUSES[cause]}: ") for each in texts)
    assert len(elements(picture, "path", "ink flag")) == 1
    assert any("a new plan: link 1 to 2 is slow" in each for each in texts)
    assert any("ms on link 2 to 1" in each for each in texts)


def test_names_that_xml_cannot_hold(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"l\xe4ufe\x1b")
    write_run(folder, three_plans())
    picture = tmp_path / "run.svg"
    assert cli.main(["timeline", str(folder), "--picture", str(picture)]) == 0
    assert any("l\ufffdufe\ufffd: steps 4" in str(each.text) for each in elements(picture, "text"))


def test_the_picture_of_chosen_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, three_plans())
    picture = tmp_path / "run.svg"
    arguments = ["timeline", str(tmp_path), "--picture", str(picture), "--steps"]
    assert cli.main([*arguments, "9:"]) == 0
    assert "steps 9 to 11 of 9 to 11: as asked" in capsys.readouterr().out
    assert len(elements(picture, "path", "change")) == 1
    assert cli.main([*arguments, "1:3"]) == 0
    assert elements(picture, "path", "change") == []
    assert elements(picture, "path", "ink flag") == []


def test_which_steps_are_worth_a_picture(tmp_path: Path) -> None:
    fast, slowed = Iteration(slow(1, 0)), Iteration(slow(1, 0.08))

    def chosen(name: str, iterations: Sequence[Iteration]) -> tuple[list[int], str]:
        write_run(tmp_path / name, iterations)
        steps, why = run_timeline.choose_steps(read_run(tmp_path / name))
        return [step.step for step in steps], why

    assert chosen("few", [fast] * 6) == (list(range(6)), "all")
    iterations = [slowed] + [fast] * 11
    iterations[8] = slowed
    # The first one is always slow.
    assert chosen("slow", iterations) == (list(range(5, 11)), "around the slowest, step 8")
    late = [fast] * 11 + [Iteration(fast.timed, plan=1)]
    assert chosen("late", late)[0] == list(range(6, 12))
    # The first plan is made from the first measurements, whatever they are.
    first = [Iteration(slowed.timed, plan=0)] * 2 + [Iteration(fast.timed, plan=1)] * 6
    assert chosen("first", first) == (
        list(range(6)),
        "around the change from plan 0 to 1 in step 2",
    )
    second = [*first, *[Iteration(fast.timed, plan=2)] * 6]
    assert chosen("second", second) == (
        list(range(5, 11)),
        "around the change from plan 1 to 2 in step 8",
    )
    # So few that the microbatches' numbers can be read.
    busy = Iteration(replay(zb_h1(4, 24), PAPER))
    assert chosen("busy", [busy] * 4 + [Iteration(busy.timed, plan=2)] * 4)[0] == [3, 4]
    # An iteration with this many operations fills the picture.
    many = Iteration(replay(zb_h1(4, 520), PAPER))
    assert chosen("many", [many] * 3) == ([1], "around the slowest, step 1")


@pytest.mark.parametrize("installed", [True, False])
def test_a_png_of_a_run_needs_matplotlib(
    installed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_run(tmp_path, three_plans())
    path_of(tmp_path, 3).unlink()
    picture = tmp_path / "run.png"
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    status = cli.main(["timeline", str(tmp_path), "--picture", str(picture)])
    output, errors = capsys.readouterr()
    if installed:
        assert status == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert (status, output) == (2, "")
        assert "pip install matplotlib); .svg needs nothing" in errors


def test_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timed = slow(1, 0.03)
    offsets_s = [0.0, 1e4, -1e4, 5.0]
    write_run(tmp_path, [Iteration(timed), Iteration(timed, 1, ["changed"])], offsets_s)
    trace = tmp_path / "trace.json"
    assert cli.main(["timeline", str(tmp_path), "--chrome-trace", str(trace)]) == 0
    assert capsys.readouterr().out == f"{trace}: 2 steps\n"
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names[2] == "stage 2 (rank 12 on host2)"
    assert (names[4], names[5]) == ("links", "run")
    slices = [event for event in events if event["ph"] == "X"]
    done = [e for e in slices if e["pid"] < 4 and e["tid"] == 0]
    assert len(done) == 2 * 4 * 6 * 3
    # All times are on one clock, from the first operation of the first step.
    for stage, spans in enumerate(timed.stages):
        row = [e for e in done if e["pid"] == stage and e["args"]["step"] == 0]
        assert [e["name"] for e in row] == [str(span.operation) for span in spans]
        assert [e["ts"] for e in row] == pytest.approx([s.start_s * 1e6 for s in spans], abs=1)
        assert [e["dur"] for e in row] == pytest.approx(
            [(s.end_s - s.start_s) * 1e6 for s in spans], abs=1
        )
    # Slices of a thread do not overlap.
    for thread in {(e["pid"], e["tid"]) for e in slices}:
        row = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread
        )
        assert all(one[1] <= next_[0] + 1 for one, next_ in itertools.pairwise(row)), thread
    idle_s = sum(e["dur"] for e in slices if e["pid"] < 4 and e["tid"] == 1) / 1e6
    whole_s = sum(each.total_s for each in timed.bubbles)
    assert idle_s == pytest.approx(2 * whole_s + 4 * OPTIMIZER_S, abs=1e-3)
    steps = [e for e in slices if e["pid"] == 5]
    assert [(e["name"], e["args"]["plan"]) for e in steps] == [("step 0", "0"), ("step 1", "1")]
    # Each message: when it left and was there, and an arrow between two operations.
    by_phase = {p: [e for e in events if e["ph"] == p] for p in "besfi"}
    for phase in "besf":
        assert len(by_phase[phase]) == 2 * len(timed.messages)
        assert len({e["id"] for e in by_phase[phase]}) == 2 * len(timed.messages)
    for begin, end, message in zip(by_phase["b"], by_phase["e"], timed.messages, strict=False):
        assert begin["name"] == f"{message.source} to {message.destination}"
        assert begin["args"] == {"operation": str(message.operation)}
        assert begin["ts"] == pytest.approx(message.start_s * 1e6, abs=1)
        assert end["ts"] == pytest.approx(message.end_s * 1e6, abs=1)
    starts = {(e["pid"], e["ts"]) for e in done}
    assert all((e["pid"], e["ts"]) in starts for e in by_phase["s"] + by_phase["f"])
    told = {(e["name"], e["args"]["step"], e["args"]["stage"]) for e in by_phase["i"]}
    assert told == {("changed", 1, stage) for stage in range(4)}


def test_it_runs_as_a_program_without_torch(tmp_path: Path) -> None:
    write_run(tmp_path, [Iteration(slow(0, 0.01))])
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import torch_resilient.cli as cli\n"
        "status = cli.main(['timeline', sys.argv[1]])\n"
        "assert sys.modules['torch'] is None\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        # With 0, importing the package imports torch.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step  plan ")
