"""`torch-resilient plan`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from torch_resilient import cli
from torch_resilient.planning.costs import PipelineCosts
from torch_resilient.planning.orders import Operation
from torch_resilient.planning.replay import replay

# Figure 5 of PIPEMORPH, 20 ms on the first link.
INPUT: dict[str, Any] = {
    "stages": 4,
    "microbatches": 12,
    "tF": 10,
    "tB": 10,
    "tW": 10,
    "c": [20, 0, 0],
    "cap": None,
    "mem": None,
    "policy": "best",
    "budget_ms": 20,
}


def run(
    given: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command in this process."""
    source = tmp_path / "input.json"
    source.write_text(given if isinstance(given, str) else json.dumps(given))
    status = cli.main(["plan", "--json", str(source), *options])
    output, errors = capsys.readouterr()
    return status, output, errors


def test_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, errors = run(INPUT, tmp_path, capsys)
    assert (status, errors) == (0, "")
    plan = json.loads(output)
    assert {name: plan[name] for name in INPUT} == INPUT
    assert plan["iteration_ms"] == plan["lower_bound_ms"] == 410
    assert plan["bubble"] == pytest.approx(1 - 360 / 410)
    orders = [[Operation.parse(text) for text in order] for order in plan["orders"]]
    costs = PipelineCosts.of(
        4,
        forward_s=10,
        input_backward_s=10,
        weight_backward_s=10,
        delay_forward_s=INPUT["c"],
    )
    timed = replay(orders, costs)
    assert timed.iteration_s == 410
    assert plan["peak"]["F-B"] == list(timed.peak_activations)
    assert plan["peak"]["F-W"] == list(timed.peak_pending)
    assert plan["bubbles_ms"][0]["backward"] == pytest.approx(timed.bubbles[0].backward_s)
    # The output may be the input again.
    status, again, errors = run(output, tmp_path, capsys)
    assert (status, errors) == (0, "")
    assert json.loads(again)["iteration_ms"] == 410


def test_limits_and_directions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**INPUT, "cf": [20, 0, 0], "cb": 5, "cap": [6, 5, 4, 3], "mem": 7}
    del given["c"]
    status, output, errors = run(given, tmp_path, capsys)
    assert (status, errors) == (0, "")
    peak = json.loads(output)["peak"]
    assert all(held <= most for held, most in zip(peak["F-B"], given["cap"], strict=True))
    assert max(peak["F-W"]) <= 7


@pytest.mark.parametrize("policy", ["paper", "1f1b", "zb_h1", "zb_h2", "gpipe", "portfolio"])
def test_policies(policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, output, _ = run({**INPUT, "policy": policy}, tmp_path, capsys)
    assert status == 0
    plan = json.loads(output)
    assert plan["policy"] == policy
    if policy != "portfolio":
        assert plan["chosen"] == policy


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, trace = tmp_path / "plan.svg", tmp_path / "trace.json"
    status, output, errors = run(
        INPUT,
        tmp_path,
        capsys,
        "--grid",
        "--picture",
        str(picture),
        "--chrome-trace",
        str(trace),
    )
    assert status == 0
    assert json.loads(output)["iteration_ms"] == 410
    assert [line[:7] for line in errors.splitlines()[:4]] == [f"stage {i}" for i in range(4)]
    assert xml.etree.ElementTree.parse(picture).getroot().tag.endswith("svg")
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 12 * 3


@pytest.mark.parametrize("installed", [True, False])
def test_a_png_needs_matplotlib(
    installed: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = tmp_path / "plan.png"
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, output, errors = run(INPUT, tmp_path, capsys, "--picture", str(picture))
    if installed:
        assert status == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert (status, output) == (2, "")
        assert "--picture" in errors
        assert "pip install matplotlib); .svg needs nothing" in errors


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    """`torch-resilient plan ... | head`."""
    path = tmp_path / "in.json"
    path.write_text(json.dumps(INPUT))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_resilient.cli", "plan", "--json", str(path)]
    with os.fdopen(writer, "wb") as output:
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_another_broken_pipe_is_not_hidden(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError("a connection")

    monkeypatch.setattr("torch_resilient.cli.plan.run", broken)
    with pytest.raises(BrokenPipeError, match="a connection"):
        run(INPUT, tmp_path, capsys)


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in INPUT.items() if key != name}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("{", "input: not JSON: "),
        ('{"stages": NaN}', "input: not JSON: NaN is no JSON"),
        ([1], "input: expected a JSON object, got list"),
        (without("tB"), "tB: missing"),
        ({**INPUT, "tb": 1}, "tb: no such field"),
        ({**INPUT, "\x1b[2J\x9b\u202ea\n": 1}, "\\x1b[2J\\x9b\\u202ea : no such field"),
        ({**INPUT, "stages": 0}, "stages: expected at least 1, got 0"),
        ({**INPUT, "stages": 4.0}, "stages: expected an integer, got 4.0"),
        ({**INPUT, "microbatches": True}, "microbatches: expected an integer, got True"),
        ({**INPUT, "stages": 10**7}, "stages: "),
        ({**INPUT, "tF": [1, 2]}, "tF: expected a number or 4 of them, one per stage, got 2"),
        ({**INPUT, "tW": [1, 2, "x", 4]}, "tW[2]: expected a number, got 'x'"),
        ({**INPUT, "tB": -1}, "tB: expected a finite number, not negative, got -1"),
        ({**INPUT, "tB": 10**400}, "tB: expected a finite number, not negative, got 1000"),
        ({**INPUT, "tB": None}, "tB: expected a number or one per stage, got None"),
        ({**INPUT, "tF": 1e308}, "tF: expected at most 1e+15 ms, got 1e+308"),
        ({**INPUT, "c": [0, 2e15, 0]}, "c: expected at most 1e+15 ms, got 2e+15"),
        ({**INPUT, "c": [1, 2, 3, 4]}, "c: expected a number or 3 of them, one per link, got 4"),
        ({**INPUT, "cf": 1}, "c: give either c, or cf and cb"),
        ({**without("c"), "cf": 1}, "cb: missing, but cf is there"),
        ({**INPUT, "cap": 0}, "cap: expected at least 1, got 0"),
        ({**INPUT, "mem": [1, 2, 3, 0.5]}, "mem[3]: expected an integer, got 0.5"),
        ({**INPUT, "mem": [1, 2]}, "mem: expected a number or 4 of them"),
        ({**INPUT, "policy": "zb"}, "policy: expected one of best, "),
        ({**INPUT, "policy": ["best"]}, "policy: expected one of best, "),
        ({**INPUT, "policy": "zb_h2", "mem": 6}, "policy: zb_h2 holds more microbatches"),
        ({**INPUT, "budget_ms": -1}, "budget_ms: expected a finite number, not negative"),
        ({**INPUT, "budget_ms": "1"}, "budget_ms: expected a number, got '1'"),
        ({**INPUT, "budget_ms": 10**400}, "budget_ms: expected a finite number, not negative"),
    ],
)
def test_bad_input_is_named_in_one_line(
    given: object, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = run(given, tmp_path, capsys)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith(f"torch-resilient plan: {text}")


def test_files_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--json", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
    status, output, errors = run(INPUT, tmp_path, capsys, "--picture", str(tmp_path / "plan.gif"))
    assert (status, output) == (2, "")
    assert "--picture: expected a name in .svg or .png" in errors
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff")
    assert cli.main(["plan", "--json", str(binary)]) == 2
    assert "plan: input: not JSON: 'utf-8' codec" in capsys.readouterr().err


@pytest.mark.parametrize(("closed", "status"), [("<&-", 2), (">&-", 0)])
def test_standard_streams_that_are_closed(closed: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "input.json").write_text(json.dumps(INPUT))
    source = "-" if status else str(tmp_path / "input.json")
    command = [sys.executable, "-m", "torch_resilient.cli", "plan", "--json", source]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {closed}', "sh", *command],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == status, done.stderr
    told = "torch-resilient plan: --json -: standard input is closed\n" if status else ""
    assert (done.stdout, done.stderr) == ("", told)


def test_the_longest_times_are_still_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    long = {**INPUT, "tF": 1e15, "tB": 1e15, "tW": 1e15, "c": 1e15}
    status, output, errors = run(long, tmp_path, capsys, "--chrome-trace", str(trace))
    assert (status, errors) == (0, "")
    for text in (output, trace.read_text()):
        json.loads(text, parse_constant=pytest.fail)


def test_it_runs_as_a_program_without_torch() -> None:
    """It reads standard input, in a process where an import of torch would fail."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import torch_resilient.cli as cli\n"
        "status = cli.main(['plan', '--json', '-'])\n"
        "assert sys.modules['torch'] is None\n"
        "sys.exit(status)\n"
    )
    for arguments in (["-c", program], ["-m", "torch_resilient.cli", "plan", "--json", "-"]):
        done = subprocess.run(
            [sys.executable, *arguments],
            input=json.dumps(INPUT),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=ROOT,
            # With 0, importing the package imports torch.
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["iteration_ms"] == 410


def test_the_package_exports_what_it_promises() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import torch_resilient.pipelining as p\n"
        "costs = p.PipelineCosts.of(2, forward_s=1, input_backward_s=1, weight_backward_s=1)\n"
        "plan = p.plan_schedule(costs, 3, policy='portfolio')\n"
        "assert p.replay(plan.orders, costs).iteration_s == plan.iteration_s\n"
        "needs_torch = [name for name in p.__all__ if name.startswith('Schedule')]\n"
        "assert all(hasattr(p, name) for name in p.__all__ if name not in needs_torch)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
