"""The findings of a type checker in programs that use the package."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import torch_resilient
from torch_resilient import options

RIGHT = """
from torch import Tensor
from torch.futures import Future

import torch_resilient
from torch_resilient import control, ddp, pipelining

def hook(state: int, bucket: object) -> Future[Tensor]:
    return ddp.in_order(hook)(state, bucket)

options = torch_resilient.Options(wan_connections=8, chunk_bytes="4M")
chunk_bytes: int = options.chunk_bytes
stats: torch_resilient.GroupStats = torch_resilient.stats()
round_trips_s: list[float] = [path.round_trip_s for path in stats.peers[0].paths]
kinds = [path.index for peer in stats.peers for path in peer.paths if path.kind == "shm"]
sites: tuple[str, ...] = torch_resilient.topology().sites
text: str = stats.events[0].text + torch_resilient.dump()
plan = pipelining.plan_schedule
schedule = pipelining.ScheduleAdaptiveZB
detector = control.DelayDetector
"""
# Each line with the error code it must give.
WRONG = [
    ("torch_resilient.Optoins(wan_connections=8)", "attr-defined"),
    ("torch_resilient.Options(wan_conections=8)", "call-arg"),
    ("torch_resilient.Options(wan_connections=None)", "arg-type"),
    ("torch_resilient.Options().chunk_bytes = 1.5", "assignment"),
    ('torch_resilient.stats()["peers"]', "index"),
    ("torch_resilient.stats().peers[0].paths[0].slot", "attr-defined"),
    ('torch_resilient.stats().peers[0].paths[0].kind == "memory"', "comparison-overlap"),
    ("torch_resilient.stats().rank = 1", "misc"),
    ("torch_resilient.topology().site", "attr-defined"),
    ("pipelining.ScheduleAdaptativeZB", "attr-defined"),
    ("control.DelayDetectr", "attr-defined"),
    ("ddp.in_ordr", "attr-defined"),
    ("ddp.in_order(1)", "type-var"),
    ("ddp.in_order(print)", "type-var"),
]


def findings(program: Path) -> dict[int, str]:
    """The code of mypy's error on each line of a program, in strict mode."""
    pytest.importorskip("mypy")
    done = subprocess.run(
        # A separate cache, because the settings differ from those of the source's check.
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            str(program),
            "--no-error-summary",
            f"--cache-dir={ROOT}/build/mypy",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error: .* \[([\w-]+)\]$", done.stdout, re.MULTILINE)
    # By name: where the cache has an equal program, mypy prints the folder of that one.
    assert all(Path(path).name == program.name for path, _, _ in found), done.stdout
    assert len(found) == done.stdout.count(": error: "), done.stdout
    return {int(line): code for _, line, code in found}


def test_a_right_program_passes(tmp_path: Path) -> None:
    program = tmp_path / "right.py"
    program.write_text(RIGHT)
    assert findings(program) == {}


def test_each_mistake_is_found(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    head = "import torch_resilient\nfrom torch_resilient import control, ddp, pipelining\n"
    program.write_text(head + "".join(f"{line}\n" for line, _ in WRONG))
    assert findings(program) == {number: code for number, (_, code) in enumerate(WRONG, start=3)}


def test_types_and_names_are_those_of_run_time() -> None:
    for name in torch_resilient.__all__:
        assert getattr(torch_resilient, name) is not None
    lazy = set(torch_resilient._LAZY)
    assert lazy <= set(torch_resilient.__all__)
    text = (ROOT / "torch_resilient" / "__init__.py").read_text()
    typed = text.partition("if TYPE_CHECKING:")[2].partition("__all__")[0]
    assert {name for name in lazy if re.search(rf"\b{name}\b", typed)} == lazy


def test_the_stub_has_every_option() -> None:
    """Each is an attribute and an argument of Options(), and there are no others."""
    text = (ROOT / "torch_resilient" / "_C.pyi").read_text()
    text = text.partition("# The table in csrc/base/options.def.")[2]
    attributes, _, arguments = text.partition("def __init__(")
    names = [option.field for option in options.table()]
    assert re.findall(r"^    (\w+): ", attributes, re.MULTILINE) == names
    arguments = arguments.partition(") -> None")[0]
    assert re.findall(r"^        (\w+): .* = \.\.\.,$", arguments, re.MULTILINE) == names
