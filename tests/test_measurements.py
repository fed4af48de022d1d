"""docs/measurements.md is what benchmarks/measurements.py makes of the recorded rows."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from torch_resilient.testing import LabUnavailable

sys.path.insert(0, str(ROOT / "benchmarks"))
import common
import measurements


def load_run() -> Any:
    """Loads benchmarks/run.py by its path, because other modules have that name, too."""
    path = ROOT / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("benchmarks_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


run = load_run()


def row(**values: Any) -> dict[str, Any]:
    """A row as common.write_rows() writes it."""
    return {
        "benchmark": "idle_cpu",
        **values,
        "commit": "0123456789abcdef",
        "changed": False,
        "torch": "2.13.0+cpu",
        "torch_resilient": "0.1.0",
        "machine": {
            "processor": "Some CPU",
            "cores": 2,
            "memory_bytes": 8 << 30,
            "kernel": "6.18.0",
        },
        "environment": {"TORCH_RESILIENT_INTERFACE": "lo"},
        "command": "idle_cpu.py --ranks 2 --json /tmp/rows.jsonl",
        "time": "2026-11-24T10:00:00Z",
        "load": 0.25,
    }


def test_the_document_is_up_to_date() -> None:
    expected = measurements.markdown(measurements.recorded_rows(), measurements.earlier_sections())
    assert measurements.DOCUMENT.read_text(encoding="utf-8") == expected, (
        "run `python benchmarks/measurements.py`"
    )


def test_a_section_names_commit_command_machine_and_date() -> None:
    lines = measurements.recorded_section("idle_cpu", [row(ranks=2, share=0.123456)])
    text = "\n".join(lines)
    assert (
        "Commit `0123456789ab`, 2026-11-24; `TORCH_RESILIENT_INTERFACE=lo idle_cpu.py --ranks 2`"
        in text
    )
    assert (
        "2 cores of Some CPU, 8 GiB, Linux 6.18.0, torch 2.13.0+cpu; load 0.2 at the end." in text
    )
    assert "| ranks | share |\n| --- | --- |\n| 2 | 0.1235 |" in text
    changed = measurements.circumstances({**row(), "changed": True})
    assert "Commit `0123456789ab` with local changes," in changed


def test_cells() -> None:
    nested = {"a": {"b": 1.23456, "c": None}, "d": [1, 2.5], "e": list(range(9)), "f": "x|y"}
    assert measurements.flat(nested) == {
        "a.b": "1.235",
        "a.c": "",
        "d": "1, 2.5",
        "e": "4 (0 to 8)",
        "f": "x\\|y",
    }


def test_rows_with_other_columns_begin_another_table() -> None:
    lines = measurements.table([row(a=1), row(a=2), row(b=3)])
    assert lines == ["| a |", "| --- |", "| 1 |", "| 2 |", "", "| b |", "| --- |", "| 3 |"]


def test_a_recorded_section_replaces_the_earlier_one_alone() -> None:
    fields = {"title": "T.", "commit": "abc1234", "date": "2026-11-20", "machine": "2 cores"}
    earlier = {"idle_cpu": (fields, "old idle"), "scale": (fields, "old scale")}
    before = measurements.markdown({}, earlier)
    assert "Recorded with commit abc1234, 2026-11-20; 2 cores." in before
    after = measurements.markdown({"idle_cpu": [row(ranks=2)]}, earlier)
    assert "old idle" not in after
    assert before.partition("## scale")[2] == after.partition("## scale")[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Benchmarks and their results in a folder, with what "idle_cpu.py" needs to be recorded."""
    (tmp_path / "results" / "earlier").mkdir(parents=True)
    earlier = "title: T.\ncommit: abc1234\ndate: 2026-11-20\nmachine: 2 cores\n\nold\n"
    (tmp_path / "results" / "earlier" / "idle_cpu.md").write_text(earlier)
    monkeypatch.setattr(measurements, "HERE", tmp_path)
    monkeypatch.setattr(measurements, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(measurements, "DOCUMENT", tmp_path / "measurements.md")
    monkeypatch.setattr(run, "HERE", tmp_path)
    return tmp_path


def benchmark(folder: Path, ending: str, rows: int = 1) -> None:
    """A benchmark that writes rows, if any, and then runs the statement `ending`."""
    text = '"""Processor time of an idle job."""\nimport sys\n'
    if rows:
        text += (
            "open(sys.argv[sys.argv.index('--json') + 1], 'w').write("
            f"{json.dumps(row(ranks=2))!r} + '\\n')\n"
        )
    (folder / "idle_cpu.py").write_text(text + ending)


def test_record_replaces_the_section_of_a_benchmark_that_succeeds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark(folder, "sys.exit(0)")
    monkeypatch.setattr(sys, "argv", ["run.py", "--record", "idle_cpu.py"])
    assert run.main() == 0
    text = (folder / "measurements.md").read_text()
    assert "Processor time of an idle job." in text
    assert "| 2 |" in text
    assert "old" not in text
    assert measurements.MISSED not in text
    assert not (folder / "results" / "earlier" / "idle_cpu.md").exists()


def test_record_says_that_a_benchmark_missed_a_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark(folder, "sys.exit(1)")
    monkeypatch.setattr(sys, "argv", ["run.py", "--record", "idle_cpu.py"])
    assert run.main() == 1
    text = (folder / "measurements.md").read_text()
    assert text.count(measurements.MISSED) == 1
    assert "| ranks |\n| --- |\n| 2 |" in text
    assert "old" not in text
    # Also when another section is recorded later.
    measurements.write()
    assert (folder / "measurements.md").read_text() == text


def test_each_command_of_a_benchmark_has_a_table(folder: Path) -> None:
    (folder / "idle_cpu.py").write_text('"""Processor time of an idle job."""\n')
    rows = folder / "rows.jsonl"

    def record(command: str, ranks: int) -> str:
        rows.write_text(json.dumps({**row(ranks=ranks), "command": command}) + "\n")
        measurements.record("idle_cpu", rows)
        return (folder / "measurements.md").read_text()

    record("idle_cpu.py --loss 0.1 --json /a/rows.jsonl", 3)
    both = record("idle_cpu.py --json /b/rows.jsonl", 2)
    assert both.index("| 2 |") < both.index("| 3 |")
    again = record("idle_cpu.py --loss 0.1 --realtime --json /c/rows.jsonl", 4)
    assert "| 2 |" in again
    assert "| 3 |" not in again
    assert "| 4 |" in again


def test_the_status_of_a_benchmark_is_that_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(json=tmp_path / "rows.jsonl")

    def status(*met: bool) -> int:
        rows: list[common.Row] = [{"met": each} for each in met]
        return common.show_rows(options, "some", rows, lambda row: f"row {row['met']}")

    assert status(True, True) == 0
    assert status(True, False) == 1
    assert status() == 1
    assert capsys.readouterr().out == "row True\nrow True\nrow True\nrow False\n"
    written = [json.loads(line) for line in options.json.read_text().splitlines()]
    assert [row["met"] for row in written] == [True, True, True, False]
    assert {row["benchmark"] for row in written} == {"some"}

    def without_a_lab() -> Iterator[common.Row]:
        yield {"met": True}
        raise LabUnavailable("no root")

    assert common.show_rows(options, "some", without_a_lab(), str) == 2
    assert "some: no root" in capsys.readouterr().err
    assert len(options.json.read_text().splitlines()) == 4


def test_arguments_of_a_benchmark_stand_behind_two_dashes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "idle_cpu.py").write_text("import sys\nsys.exit(sys.argv[1:] != ['--quick', '--x'])")
    monkeypatch.setattr(sys, "argv", ["run.py", "idle_cpu.py", "--", "--x"])
    assert run.main() == 0
    monkeypatch.setattr(sys, "argv", ["run.py", "--", "--x"])
    with pytest.raises(SystemExit):
        run.main()
    assert "name it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ending", "rows"), [("raise RuntimeError", 0), ("sys.exit(1)", 0), ("sys.exit(2)", 1)]
)
def test_record_keeps_the_section_of_a_benchmark_that_breaks_off(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ending: str, rows: int
) -> None:
    benchmark(folder, ending, rows)
    monkeypatch.setattr(sys, "argv", ["run.py", "--record", "idle_cpu.py"])
    assert run.main() == 1
    assert not (folder / "measurements.md").exists()
    assert not (folder / "results" / "idle_cpu.jsonl").exists()


def test_an_unknown_benchmark_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "no_such.py"])
    with pytest.raises(SystemExit):
        run.main()
    assert "unknown benchmark no_such.py" in capsys.readouterr().err
