"""`torch-resilient chaos`: the script, the records of a job, and the report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from harness import run_ranks, wait_until
from stats_doubles import path_stats, peer_stats, process_snapshot

from torch_resilient import _native, cli, faults
from torch_resilient._observe import recorder
from torch_resilient.cli import chaos, fault_report
from torch_resilient.cli.fault_report import make_report, read_records
from torch_resilient.cli.fault_script import (
    KINDS,
    PlannedFault,
    ScriptSettings,
    environment,
    make_script,
    ring,
)

SETTINGS = ScriptSettings(ranks=3, paths=2, links=ring(3), kinds=KINDS, duration_s=60)


# ---- the script ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_script() -> None:
    script = make_script(7, SETTINGS)
    assert script == make_script(7, SETTINGS)
    assert script != make_script(8, SETTINGS)
    # These never change, on any machine: a reported seed reproduces its faults.
    assert environment(script[:3], 7) == (
        "stall rank=0 peer=1 path=0 from_s=4 until_s=4.9; "
        "cut rank=2 peer=1 path=0 at_s=7; "
        "drop rank=1 peer=2 path=0 from_s=10 until_s=10.6; seed=7"
    )


@pytest.mark.parametrize("seed", range(20))
def test_scripts_keep_to_their_settings(seed: int) -> None:
    script = make_script(seed, SETTINGS)
    assert [fault.at_s for fault in script] == [4 + 3 * i for i in range(18)]
    # Each kind once before any comes again.
    for i in range(0, 15, 5):
        assert {fault.kind for fault in script[i : i + 5]} == set(KINDS)
    for fault in script:
        assert tuple(sorted((fault.rank, fault.peer))) in {(0, 1), (1, 2), (0, 2)}
        assert fault.path in (0, 1, None)
        assert (fault.path is None) == (fault.kind in ("delay", "rate"))
        assert (fault.kind == "cut") == (fault.for_s == 0)
        assert fault.for_s <= 1.5
        # The backend understands it.
        faults.inject(fault.rule).clear()
    assert {fault.rank for fault in make_script(seed, SETTINGS)} == {0, 1, 2}


def test_scripts_of_long_jobs_are_as_exact() -> None:
    long = dataclasses.replace(SETTINGS, first_s=200_000.5, duration_s=200_060)
    for fault in make_script(7, long):
        # Rounded to whole seconds, faults would end when they begin.
        faults.inject(fault.rule).clear()
        began = re.search(r"(?:from|at)_s=([\d.]+)", fault.rule)
        assert began is not None
        assert float(began[1]) == fault.at_s


def test_scripts_by_step() -> None:
    settings = ScriptSettings(3, 2, ring(3), ("cut", "delay"), steps=(5, 40), every_steps=10)
    script = make_script(1, settings)
    assert [fault.step for fault in script] == [5, 15, 25, 35]
    for fault in script:
        if fault.kind == "cut":
            assert fault.rule.endswith(f"at_step={fault.step}")
        else:
            assert fault.rule.endswith(f"from_step={fault.step} until_step={fault.step + 5}")
        assert "_s=" not in fault.rule
        faults.inject(fault.rule).clear()


def test_all_paths() -> None:
    settings = ScriptSettings(2, 2, ring(2), KINDS, all_paths=True)
    assert all("path=" not in fault.rule for fault in make_script(3, settings))


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 2 train.py", 2),
        ("torchrun --nproc_per_node=4 --nnodes=2 train.py", 8),
        ("torchrun --nnodes 2 --nproc-per-node=2 train.py", 4),
        ("torchrun --nproc-per-node=gpu train.py", None),
        ("torchrun --nproc-per-node=2 --nnodes=1:4 train.py", None),
        ("python train.py", None),
    ],
)
def test_the_number_of_ranks_comes_from_torchrun(command: str, ranks: int | None) -> None:
    assert chaos.ranks_of(command.split()) == ranks


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--", "true"], "--ranks: missing, and the command does not say --nproc-per-node"),
        (["--ranks", "1", "--", "true"], "--ranks: between 1 ranks there is no link"),
        (["--ranks", "2"], "no command: write what to run after --"),
        (["--ranks", "2", "--", "no-such-program"], "no-such-program: no such program"),
        (["--ranks", "2", "--duration", "5", "--", "true"], "--duration 5: no fault fits in"),
        (["--ranks", "2", "--every", "nan", "--", "true"], "--every: expected seconds"),
        (["--ranks", "2", "--links", "0-2", "--", "true"], "--links 0-2: expected"),
        (["--ranks", "2", "--links", "1-1", "--", "true"], "--links 1-1: expected"),
        (["--ranks", "2", "--paths", "0", "--", "true"], "--paths: expected 1 to 64, got 0"),
        # The backend would not understand them.
        (["--ranks", "2", "--seed", "-1", "--", "true"], "--seed: expected 0 to 2^64 - 1, got -1"),
        (["--ranks", "2", "--seed", f"{2**64}", "--", "true"], "--seed: expected 0 to 2^64 - 1"),
        (["--ranks", "2", "--kinds", "cut,bang", "--", "true"], "--kinds: expected some of"),
        (["--ranks", "2", "--steps", "5:5", "--", "true"], "--steps 5:5: expected A:B"),
        (
            ["--ranks", "2", "--steps", "1:50", "--kinds", "stall", "--", "true"],
            "--kinds: expected some of cut,delay,rate, got 'stall': by steps, silence could last",
        ),
    ],
)
def test_bad_input_is_named_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chaos", *arguments]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"torch-resilient chaos: {text}")


def test_a_report_that_cannot_be_written_is_told_before_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, told = tmp_path / "ran", tmp_path / "none" / "report.json"
    job = ["touch", str(ran)]
    assert cli.main(["chaos", "--ranks", "2", "--json", str(told), "--", *job]) == 2
    assert "report.json" in capsys.readouterr().err
    assert not ran.exists()


@pytest.mark.parametrize("name", ["TORCH_RESILIENT_FAULTS", "TORCH_RESILIENT_RECORD_DIR"])
def test_it_does_not_override_the_environment(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    assert cli.main(["chaos", "--ranks", "2", "--", "true"]) == 2
    assert f"{name} is set in the environment: unset it" in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, "5"])
def test_there_is_another_way_between_two_ranks(
    given: str | None, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["TORCH_RESILIENT_PATHS_SAME_HOST", "TORCH_RESILIENT_WAN_CONNECTIONS"]
    for name in names:
        if given is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, given)
    cli.main(["chaos", "--ranks", "2", "--paths", "3", "--", "printenv", *names])
    assert capfd.readouterr().out.split()[:2] == [given or "3"] * 2


def test_the_script_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["chaos", "--script", "--seed", "7", "--ranks", "3", "--duration", "60"]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.strip() == environment(make_script(7, SETTINGS), 7)


# ---- the recorder -------------------------------------------------------------------------

NOW = datetime(2026, 11, 21, 12, 0, 1)
LINES = [
    "#{id} 12:00:00.250 group 0 send to 1 tag 3 float32[8] 32 bytes: done in 0.000500 s",
    "#{id} 12:00:00.500 group 0 collective 12 all_reduce(float32[8], SUM) 32 bytes: pending",
    "#{id} 12:00:00.750 group a b collective 3 barrier 0 bytes: failed after 1.500000 s: no: why?",
    "#{id} 12:00:00.750 group 0 recv from any tag 0 uint8[1] 1 bytes: done in 0.000000 s",
]


def dump_of(first: int, *lines: str) -> str:
    return "".join(line.format(id=first + i) + "\n" for i, line in enumerate(lines))


def test_lines_of_the_dump_are_read() -> None:
    send, pending, failed, received = (
        recorder.parse_operation(line, NOW) for line in dump_of(1, *LINES).splitlines()
    )
    assert send is not None
    assert pending is not None
    assert failed is not None
    assert received is not None
    assert send.began_s == datetime(2026, 11, 21, 12, 0, 0, 250000).timestamp()
    assert (send.text, send.took_s) == ("send to 1 tag 3 float32[8]", 0.0005)
    assert pending.took_s is None
    assert pending.name == "collective #12 all_reduce(float32[8], SUM)"
    assert pending.text == "all_reduce(float32[8], SUM)"
    assert (failed.text, failed.error) == ("barrier of group a b", "no: why?")
    assert received.text == "recv from any tag 0 uint8[1]"
    assert recorder.parse_operation("#1 something else", NOW) is None
    # Yesterday, just before midnight.
    early = datetime(2026, 11, 21, 0, 0, 1)
    late = recorder.parse_operation(LINES[0].format(id=1).replace("12:00", "23:59"), early)
    assert late is not None
    assert late.began_s == datetime(2026, 11, 20, 23, 59, 0, 250000).timestamp()


def test_the_hour_that_comes_twice_is_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    try:
        line = LINES[0].format(id=1).replace("12:00", "02:30")
        for utc_hour in (0, 1):  # 2:30 both times
            end_s = datetime(2026, 10, 25, utc_hour, 30, 1, tzinfo=UTC).timestamp()
            operation = recorder.parse_operation(line, datetime.fromtimestamp(end_s))
            assert operation is not None
            assert operation.began_s == end_s - 0.75
    finally:
        monkeypatch.undo()
        time.tzset()


def test_every_operation_is_given_once() -> None:
    log = recorder.OperationLog()
    done, pending = LINES[0], LINES[1]

    def take(dump: str, last: bool = False) -> list[int]:
        return [operation.id for operation in log.take(dump, NOW, last)]

    assert take("") == []
    assert take(dump_of(1, done, pending, done)) == [1, 3]
    assert take(dump_of(1, done, pending, done)) == []
    assert take(dump_of(1, done, done, done, pending)) == [2]
    assert log.missed == 0
    # The ring continues: 4 and 5 are overwritten before they were seen.
    assert take(dump_of(6, done, pending)) == [6]
    assert log.missed == 2
    assert take(dump_of(6, done, pending), last=True) == [7]
    # Errors of devices have more lines.
    failed = LINES[2].replace("why?", "CUDA error\nException raised from x:\n\n#0: y")
    assert take(dump_of(8, failed, done)) == [8, 9]
    # Another engine in the same process counts from 1 again.
    assert take(dump_of(1, done)) == [1]
    assert log.missed == 2


def test_a_record_is_for_its_owner_only(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "records" / f"rank00003.{os.getpid()}.jsonl"
    path.parent.mkdir()
    path.symlink_to(victim)  # by another user who may write there
    for _ in range(2):  # also replaces its previous one
        recorder.Recorder(str(path.parent), 3, (0.0, 0.0)).close()
        assert victim.read_text() == "mine"
        assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert '"rank": 3' in path.read_text()


def test_what_tells_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_PERIOD_S", 3600.0)  # the test looks itself

    def look(time_s: float, **values: Any) -> None:
        path = path_stats(index=2, bytes_sent=int(1e6 * time_s), **values)
        seen = process_snapshot(peer_stats(path), time_s=time_s)
        monkeypatch.setattr(recorder, "snapshot", lambda: seen)
        writer._look()

    writer = recorder.Recorder(str(tmp_path), 0, (0.0, 0.0))
    look(1.00)
    look(1.01)  # only bytes changed: reported every tenth of a second
    look(1.02, state="suspect", times_suspect=1)
    look(1.03, times_suspect=1)
    look(1.04, times_suspect=1)
    look(1.14, times_suspect=1)
    writer.close()
    ((key, rows),) = read_records(tmp_path)[0].paths.items()
    assert key == (1, "tcp", 2)
    assert [each.time_s for each in rows] == [1.00, 1.02, 1.03, 1.14]
    assert [each.state for each in rows] == ["up", "suspect", "up", "up"]


def work_and_cut(rank: int) -> None:
    faults.step(1)
    for i in range(20):
        dist.all_reduce(torch.ones(1 << 16))
        if i == 10 and rank == 0:
            faults.cut(peer=1)
    faults.step(2)

    def recorded() -> bool:
        mine = [each for each in read_records(folder_of_records()) if each.rank == rank]
        rows = [row for record in mine for path in record.paths.values() for row in path]
        # More than once if both ends connect at the same time, and one replaces the other's.
        again = max((row.reconnects for row in rows), default=0)
        return again >= 1 and len(mine[0].operations) == 20

    wait_until(recorded, "all is written down")
    dist.barrier()


def folder_of_records() -> Path:
    return Path(os.environ[recorder.VARIABLE])


def test_a_process_leaves_a_true_record(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    run_ranks(work_and_cut, env={"TORCH_RESILIENT_RECORD_DIR": str(folder)})
    records = read_records(folder)
    assert [record.rank for record in records] == [0, 1]
    for record in records:
        assert [step for _, step in record.steps] == [1, 2]
        assert record.missed == 0
        reduces = record.operations[:20]
        assert {each.text for each in reduces} == {"all_reduce(float32[65536], SUM)"}
        assert all(0 <= each.took_s < 5 for each in reduces)
        begins = [each.began_s for each in reduces]
        assert begins == sorted(begins)
        assert record.start_s[0] <= record.start_s[1] <= record.steps[0][0]
        assert record.end_s is not None


# ---- the report ---------------------------------------------------------------------------

START = 1000.0


def write_record(folder: Path, rank: int, lines: list[dict[str, Any]], **begin: Any) -> Path:
    head = {"kind": "begin", "rank": rank, "host": "a", "pid": rank, "period_s": 0.01, **begin}
    head.setdefault("start_s", [START, START + 0.005])
    path = folder / f"rank{rank:05}.{rank}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    return path


def row(time_s: float, index: int = 0, peer: int = 1, **values: Any) -> dict[str, Any]:
    return {
        "kind": "path",
        "time_s": START + time_s,
        "peer": peer,
        "path_kind": "tcp",
        "path_index": index,
        "state": "up",
        "chunks_retransmitted": 0,
        "reconnects": 0,
        "times_suspect": 0,
        "bytes_sent": int(time_s * 50e6),
        "bytes_received": 0,
        "round_trip_s": 0.001,
        "goodput_bytes_per_s": 0.0,
        "last_error": "",
        **values,
    }


def operation(number: int, began_s: float, took_s: float | None, error: str = "") -> dict[str, Any]:
    return {
        "kind": "operation",
        "id": number,
        "began_s": START + began_s,
        "took_s": took_s,
        "text": "all_reduce",
        "name": f"collective #{number} all_reduce",
        "error": error,
    }


def calm(until_s: float) -> list[dict[str, Any]]:
    """An operation of 20 ms every 100 ms."""
    return [operation(i, i / 10, 0.02) for i in range(int(until_s * 10))]


def outcome_of(
    folder: Path, fault: PlannedFault, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> fault_report.Outcome:
    write_record(folder, 0, ours)
    write_record(folder, 1, theirs)
    (outcome,) = make_report([fault], read_records(folder)).outcomes
    return outcome


def drop(at_s: float = 5.0) -> PlannedFault:
    return PlannedFault("drop", 0, 1, 0, at_s, 0.5)


def test_the_report_tells_the_pause_and_what_it_took(tmp_path: Path) -> None:
    operations = calm(10)
    operations[50]["took_s"] = 0.320  # the one at 5 s, of rank 1
    ours = [row(1), row(1, index=1), row(5.0625, state="suspect", times_suspect=1)]
    ours += [row(5.07, index=1, chunks_retransmitted=4), row(6.5, reconnects=1, times_suspect=1)]
    theirs = [row(1, peer=0), row(6.5, peer=0, reconnects=1)]
    outcome = outcome_of(tmp_path, drop(), [*ours, *calm(10)], [*theirs, *operations])
    assert outcome.state == "seen"
    assert outcome.at_s == pytest.approx(5.0)
    assert outcome.noticed_s == pytest.approx(0.0625)
    assert outcome.how == "rank 0: path 0 suspect"
    assert outcome.chunks_retransmitted == 4
    assert outcome.reconnects == 1
    pause = outcome.pause
    assert pause is not None
    assert (pause.rank, pause.operation) == (1, "collective #50 all_reduce")
    assert (pause.took_s, pause.usual_s) == (0.320, 0.02)
    assert pause.extra_s == pytest.approx(0.3)
    text = chaos.report_text(make_report([drop()], read_records(tmp_path)), 0, 12.0, "again")
    assert "62 ms, rank 0: path 0 suspect" in text
    assert "320 ms (usually 20 ms): rank 1, collective #50 all_reduce" in text
    assert "1 of 1 faults left a trace, 0 of 200 operations failed" in text


def test_a_pause_of_another_time_is_not_the_faults(tmp_path: Path) -> None:
    operations = calm(10)
    operations[80]["took_s"] = 0.5
    lines = [row(1), row(5.05, state="suspect", times_suspect=1), row(5.6, times_suspect=1)]
    write_record(tmp_path, 0, [*lines, *operations])
    report = make_report([drop()], read_records(tmp_path))
    assert report.outcomes[0].pause is not None
    assert report.outcomes[0].pause.extra_s == pytest.approx(0)
    # The noise is reported, too.
    assert report.noise is not None
    assert report.noise.extra_s == pytest.approx(0.48)


def test_no_fault_counts_as_calm(tmp_path: Path) -> None:
    """The usual time of an operation and the noise without faults exclude all faults."""
    operations = calm(10)
    operations[50]["took_s"] = operations[80]["took_s"] = 0.4
    lines = [row(1)]
    for i, time_s in enumerate((5.05, 8.05)):
        lines += [row(time_s, state="suspect", times_suspect=i + 1)]
        lines += [row(time_s + 0.4, times_suspect=i + 1)]
    write_record(tmp_path, 0, [*lines, *operations])
    report = make_report([drop(5.0), drop(8.0)], read_records(tmp_path))
    pauses = [each.pause.extra_s for each in report.outcomes if each.pause]
    assert pauses == pytest.approx([0.38, 0.38])
    assert report.noise is not None
    assert report.noise.extra_s == pytest.approx(0)


def test_ranks_that_start_later_have_their_faults_later(tmp_path: Path) -> None:
    operations = calm(14)
    operations[115]["took_s"] = 0.4
    write_record(tmp_path, 0, [row(1), row(8.1, times_suspect=1), *operations])
    theirs = [row(7, peer=0), row(11.51, peer=0, reconnects=1), row(14, peer=0, reconnects=1)]
    write_record(tmp_path, 1, theirs, start_s=[START + 6, START + 6])
    script = [PlannedFault("cut", 1, 0, 0, 5.5, 0.0), drop(8.0)]
    report = make_report(script, read_records(tmp_path))
    cut, dropped = report.outcomes
    assert (cut.at_s, dropped.at_s) == (pytest.approx(11.5), pytest.approx(8.0))
    assert cut.pause is not None
    assert cut.pause.took_s == 0.4
    assert dropped.pause is not None
    assert dropped.pause.extra_s == pytest.approx(0)
    assert report.noise is not None
    assert report.noise.extra_s == pytest.approx(0)


def test_without_a_trace_nothing_is_claimed(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, drop(), [row(1), *calm(10)], [row(1, peer=0), *calm(10)])
    assert (outcome.state, outcome.noticed_s) == ("not seen", None)


def test_other_paths_and_ranks_are_not_counted(tmp_path: Path) -> None:
    ours = [row(1), row(1, index=1), row(1, peer=2), row(5.1, index=1, reconnects=1)]
    ours += [row(5.1, peer=2, reconnects=1, state="down"), *calm(10)]
    outcome = outcome_of(tmp_path, drop(), ours, [row(1, peer=0)])
    assert (outcome.state, outcome.reconnects) == ("not seen", 0)


def test_a_fault_after_the_end_was_not_reached(tmp_path: Path) -> None:
    outcome = outcome_of(tmp_path, drop(20), [row(1), *calm(10)], [row(1, peer=0)])
    assert outcome.state == "not reached"


def test_a_fault_of_another_hosts_rank_is_that_hosts_to_tell(tmp_path: Path) -> None:
    operations = calm(10)
    operations[70]["took_s"] = 0.4  # by the other one's fault
    write_record(tmp_path, 0, [row(1), row(5.05, reconnects=1), *operations])
    report = make_report([drop(), PlannedFault("cut", 1, 0, 0, 7.0, 0.0)], read_records(tmp_path))
    assert [outcome.state for outcome in report.outcomes] == ["seen", "no record"]
    assert report.noise is None
    text = chaos.report_text(report, 0, 12.0, "again")
    assert "rank 1 has left no record here" in text
    assert "1 of 1 faults left a trace" in text


def test_a_fault_before_the_connection_hits_nothing(tmp_path: Path) -> None:
    lines = [row(6), row(6.2, reconnects=1), *calm(10)]
    assert outcome_of(tmp_path, drop(), lines, []).state == "no connection"


def test_slow_links_are_told_by_what_was_measured(tmp_path: Path) -> None:
    delay = PlannedFault("delay", 0, 1, None, 5.0, 1.0, delay_s=0.05)
    lines = [row(1), row(5.2, round_trip_s=0.02), row(5.4, round_trip_s=0.04), *calm(10)]
    outcome = outcome_of(tmp_path, delay, lines, [])
    assert outcome.noticed_s == pytest.approx(0.4)
    assert outcome.how == "rank 0: path 0 has a round trip of 40 ms"
    rate = PlannedFault("rate", 0, 1, None, 5.0, 1.0, bytes_per_s=4e6)
    sent = {4.0: 0, 4.9: 45_000_000, 5.1: 45_500_000, 5.9: 48_700_000}
    limited = [row(time_s, bytes_sent=number) for time_s, number in sent.items()]
    outcome = outcome_of(tmp_path, rate, [*limited, *calm(10)], [])
    assert (outcome.state, outcome.how) == ("seen", "path 0: from 50.0 to 4.0 MB/s")
    # The same rate as before: the limit was not felt.
    outcome = outcome_of(tmp_path, rate, [row(t / 10) for t in range(10, 90)] + calm(10), [])
    assert outcome.state == "not seen"


def test_steps_are_where_the_program_said(tmp_path: Path) -> None:
    fault = PlannedFault("cut", 0, 1, 0, None, 0.0, step=7)
    steps = [{"kind": "step", "time_s": START + 3 + i, "step": 5 + i} for i in range(5)]
    lines = [row(1), *steps, row(5.002, reconnects=1), *calm(10)]
    outcome = outcome_of(tmp_path, fault, lines, [])
    assert outcome.at_s == pytest.approx(5.0)
    assert outcome.noticed_s == pytest.approx(0.002)
    slow = PlannedFault("delay", 0, 1, None, None, 0.0, step=7, for_steps=2, delay_s=0.05)
    lines = [row(1), *steps, row(6.9, round_trip_s=0.05), *calm(10)]
    assert outcome_of(tmp_path, slow, lines, []).noticed_s == pytest.approx(1.9)
    never = PlannedFault("cut", 0, 1, 0, None, 0.0, step=70)
    assert outcome_of(tmp_path, never, lines, []).state == "not reached"


def test_broken_ends_are_told(tmp_path: Path) -> None:
    path = write_record(tmp_path, 0, [row(1), operation(1, 4.9, None), operation(2, 6, 1, "oh")])
    with path.open("a") as file:
        file.write('{"kind": "path", "ti')  # killed while writing
    (tmp_path / "rank00000.7.jsonl").write_text(
        path.read_text().splitlines()[0].replace("1000.0", "2000.0") + "\n"
    )
    report = make_report([drop()], read_records(tmp_path))
    assert report.failed == ["rank 0: collective #2 all_reduce: oh"]
    assert report.killed == [0, 0]
    assert report.restarted == [0]
    text = chaos.report_text(report, 1, 12.0, "again")
    assert "ended without a word: ranks 0" in text
    assert "started again: ranks 0" in text
    path.write_text("[]\n")
    with pytest.raises(ValueError, match=r"rank00000\.0\.jsonl: no record of torch_resilient"):
        read_records(tmp_path)


# ---- a job --------------------------------------------------------------------------------

# Runs until the last fault has ended, and reports wrong sums by its exit status.
PROGRAM = """
import sys, time
import torch, torch.distributed as dist
dist.init_process_group("resilient")
began, step, going = time.monotonic(), 0, torch.ones(1)
while going.item():
    x = torch.full((1 << 17,), float(step % 100))
    dist.all_reduce(x)
    assert (x == 2 * (step % 100)).all()
    step += 1
    going = torch.full((1,), float(time.monotonic() - began < float(sys.argv[1])))
    dist.broadcast(going, 0)
dist.destroy_process_group()
"""


def run_chaos(tmp_path: Path, seconds: float, *options: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    job = [*torchrun, str(program), str(seconds)]
    command = [sys.executable, "-m", "torch_resilient.cli", "chaos", *options, "--", *job]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_job_under_faults(tmp_path: Path) -> None:
    kept, told = tmp_path / "kept", tmp_path / "report.json"
    options = ["--seed=3", "--first=1.5", "--every=1.2", "--duration=4", "--kinds=cut,drop"]
    done = run_chaos(tmp_path, 5.5, *options, f"--json={told}", f"--keep={kept}")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(told.read_text())
    assert report["status"] == 0
    outcomes = report["outcomes"]
    assert sorted(outcome["fault"]["kind"] for outcome in outcomes) == ["cut", "drop"]
    assert f"TORCH_RESILIENT_FAULTS='{report['script']}'" in done.stdout
    for outcome in outcomes:
        assert outcome["state"] == "seen", done.stdout
        assert outcome["noticed_s"] < 1.0
        assert outcome["pause"]["took_s"] >= outcome["pause"]["extra_s"] >= 0
    (cut,) = (outcome for outcome in outcomes if outcome["fault"]["kind"] == "cut")
    assert cut["reconnects"] == 1
    assert report["failed"] == []
    assert report["ranks"] == [0, 1]
    assert sorted(path.name[:9] for path in kept.iterdir()) == ["rank00000", "rank00001"]
    # Every operation is there once, or counted as missed.
    ids = [each.id for each in read_records(kept)[0].operations]
    assert len(ids) == len(set(ids))
    assert len(ids) + report["missed"] >= ids[-1]


def test_a_job_gives_its_status_and_one_without_faults_is_no_proof(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["chaos", "--ranks", "2", "--", "sh", "-c", "exit 3"]) == 3
    output, errors = capfd.readouterr()
    assert "the job ended with status 3" in output
    assert "proves nothing" not in errors
    job = ["sh", "-c", 'test -d "$TORCH_RESILIENT_RECORD_DIR"']
    assert cli.main(["chaos", "--ranks", "2", "--", *job]) == 1
    output, errors = capfd.readouterr()
    assert "the job ended with status 0" in output
    assert "rank 0 has left no record here" in output
    assert "no fault left a trace, so this run proves nothing" in errors


def test_the_same_faults_come_again_with_what_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    """The number of paths is printed, too: without it the same rules would hit nothing."""
    before = {f"{name}={value}" for name, value in os.environ.items()}
    cli.main(["chaos", "--ranks", "2", "--", "sh", "-c", "env | grep ^TORCH_RESILIENT_"])
    lines = capfd.readouterr().out.splitlines()
    given = {line for line in lines if line.startswith("TORCH_RESILIENT_")} - before
    (again,) = (line for line in lines if line.startswith("the same faults again: "))
    said = set(shlex.split(again.partition(": ")[2]))
    assert {each.partition("=")[0] for each in given - said} == {"TORCH_RESILIENT_RECORD_DIR"}
    assert said < given


def test_no_time_is_told_as_zero() -> None:
    times = [chaos.duration_text(seconds) for seconds in (0.0, 2e-5, 1e-4, 0.0023, 0.32)]
    assert times == ["0.0 ms", "20 us", "0.1 ms", "2.3 ms", "320 ms"]


def test_statuses_are_those_of_a_shell() -> None:
    assert chaos.run_job(["sh", "-c", "exit 5"], {}) == 5
    assert chaos.run_job(["sh", "-c", "kill -9 $$"], {}) == 137
    assert chaos.run_job(["sh", "-c", 'exit "$A"'], {"A": "7"}) == 7


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("bench", "chaos", "doctor", "top"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        output = capsys.readouterr().out
        assert "example" in output
        assert "exit status: " in output
        assert f"torch-resilient {command}" in output
    assert _native.load()
