"""The program of `make gpu-test`, on the strict device: it passes there, and it finds faults."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from gpu_check import bandwidth, ops, program
from gpu_check.checks import Rank, Result, Row, together
from gpu_check.sections import SECTIONS, Section
from harness import on_gloo

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="the program is for one backend"),
    pytest.mark.usefixtures("strict_device"),
]

LINE = re.compile(r"^(PASS|FAIL|SKIP) (\w+): (.+)$", re.MULTILINE)
# Those that do not mostly start frameworks: the other tests of the device run those.
FAST = ("ops", "races", "special", "errors")


@pytest.fixture(autouse=True)
def own_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores the log level that the program sets for its ranks."""
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")


@pytest.mark.parametrize("name", FAST)
def test_fast_sections_pass_on_the_strict_device(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = program.main(["--device", "strict", "--only", name])
    text = capsys.readouterr().out
    lines = LINE.findall(text)
    assert status == 0, text
    assert {verdict for verdict, _, _ in lines} <= {"PASS", "SKIP"}, text
    assert {section for _, section, _ in lines} == {name}
    assert "PASS" in {verdict for verdict, _, _ in lines}
    for verdict, _, rest in lines:
        assert verdict == "PASS" or ": " in rest, "a SKIP has a reason"


def test_the_command() -> None:
    command = [sys.executable, ROOT / "tests" / "gpu_check", "--device", "strict"]
    done = subprocess.run(
        [*command, "--only", "graphs"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("PASS", "graphs", "operations after the refusal") in LINE.findall(done.stdout)
    assert "Traceback" not in done.stderr


def _wrong_all_reduce(rank: Rank) -> None:
    """The section `ops` with an all-reduce that spoils one element of device tensors of rank 1."""
    right = dist.all_reduce

    def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = right(tensor, *args, **options)
        if tensor.device.type != "cpu" and rank.number == 1:
            work.wait()
            tensor[-1, -1] += 1
        return work

    dist.all_reduce = wrong
    ops.reductions(rank, ["SUM", "MAX"], [torch.int32])
    dist.all_reduce = right
    ops.reductions(rank, ["MIN"], [torch.int32])


def _never_ends(rank: Rank) -> None:
    with rank.check("before"):
        pass
    if rank.number == 1:
        with rank.check("on one rank"):
            time.sleep(300)


def _raises(rank: Rank) -> None:
    with rank.check("raises"):
        raise ValueError("planted")
    with rank.check("skipped") as check:
        check.skip_if("a reason")
    raise OSError("outside a check")


def _run(section: Section, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[Any]]:
    status = program.main(["--device", "strict"], sections=[section])
    return status, LINE.findall(capsys.readouterr().out)


def test_a_wrong_result_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = _run(Section("wrong", "", 60, body=_wrong_all_reduce), capsys)
    assert status == 1
    fault = "rank 1: int32: results [0] differ from those of host tensors"
    assert lines == [
        ("FAIL", "wrong", f"all_reduce SUM, 1 types: {fault}"),
        ("FAIL", "wrong", f"all_reduce MAX, 1 types: {fault}"),
        ("PASS", "wrong", "all_reduce MIN, 1 types"),
    ]


def test_a_section_that_hangs_fails_with_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = _run(Section("hangs", "", 10, body=_never_ends), capsys)
    assert status == 1
    assert lines[-1] == ("FAIL", "hangs", "processes: not done in 10 s")


def test_exceptions_fail_a_check_or_the_section(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines = _run(Section("raises", "", 60, ranks=1, body=_raises), capsys)
    assert status == 1
    assert ("FAIL", "raises", "raises: rank 0: ValueError: planted") in lines
    assert ("SKIP", "raises", "skipped: a reason") in lines
    (outside,) = [text for _, _, text in lines if "OSError: outside a check" in text]
    assert outside.startswith("the section on rank 0: ")
    assert ("FAIL", "raises", "processes: rank 0 ended with 1") in lines


def test_the_result_of_all_ranks() -> None:
    good, bad = Result("a", "PASS", "remark"), Result("a", "FAIL", "wrong")
    skipped = Result("a", "SKIP", "no streams")
    assert together([good, good]) == good
    assert together([good, skipped]) == skipped
    assert together([skipped, bad]) == Result("a", "FAIL", "rank 1: wrong")
    assert together([good, None]) == Result("a", "FAIL", "rank 1: it did not come so far")


def test_without_a_gpu_the_default_device_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert program.main([]) == 1
    assert "finds no CUDA device" in capsys.readouterr().out


def test_all_limits_together_leave_time_for_the_start() -> None:
    assert program.LIMIT_S < 8 * 60
    assert all(section.limit_s < program.LIMIT_S / 2 for section in SECTIONS)


def test_the_document_names_its_circumstances(tmp_path: Path) -> None:
    about = {"device": "Some GPU", "torch": "2.13.0+cu130", "commit": "0123", "date": "2026-11-24"}
    rows = [Row({"size": bandwidth.format_size(size), "send, us": 1.5}) for size in (4096, 1 << 28)]
    text = program.document(about, {"bandwidth": rows})
    assert program.LEGENDS["bandwidth"] in text
    assert program.LEGENDS["prefill"] not in text
    for key, value in about.items():
        assert f"- {key}: {value}\n" in text
    assert "| size | send, us |\n| --- | --- |\n| 4 KiB | 1.5 |\n| 256 MiB | 1.5 |\n" in text


def test_the_document_of_the_source_is_written_by_the_program() -> None:
    assert program.TABLE.read_text(encoding="utf-8").startswith(program.HEAD)
