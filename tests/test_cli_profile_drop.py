"""`torch-resilient profile-drop`: real runs of small scripts, and what is concluded from runs."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from harness import wait_until

from torch_resilient import cli
from torch_resilient.cli import profile_drop

# The output is the input: only the activations carry information.
SCRIPT = """\
import sys
import torch
from torch import nn
import helper

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

model = helper.wrap(Model())
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
told = []
for step in range(int(sys.argv[1])):
    losses = []
    for half in range(2):
        x = torch.randn(64, 64)
        losses.append((model(x) - x).square().mean())
        scaler.scale(losses[-1]).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    told.append(sum(float(loss) for loss in losses) / 2)
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
print("told", sum(told[-4:]) / 4, file=open(sys.argv[2], "a"))
"""

STAGES = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

dist.init_process_group("gloo")
stages = [
    PipelineStage(nn.Linear(64, 64), i, 3, torch.device("cpu")) for i in range(3)
]
schedule = ScheduleInterleavedZeroBubble(
    stages, 2, loss_fn=lambda output, target: (output - target).square().mean()
)
optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.1) for stage in stages]
for step in range(100):
    x = torch.randn(128, 64)
    schedule.step(x, target=x)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""


def profile(
    capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0
) -> tuple[str, str]:
    """Runs the command; returns what it prints to stdout and to stderr."""
    assert cli.main(["profile-drop", *map(str, arguments)]) == status
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "train.py"
    path.write_text(text)
    (tmp_path / "helper.py").write_text("def wrap(model):\n    return model\n")
    return path


def test_lost_activations_do_harm_and_the_scripts_losses_are_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(tmp_path, SCRIPT)
    options = ["--fractions=0,1", "--exact-below=0", "--seeds=2", "--tolerate=1%", "--json"]
    output, progress = profile(capsys, *options, train, 20, tmp_path / "told")
    found = json.loads(output)
    assert (found["steps"], found["last"], found["activation_bound"]) == (20, 4, [0.0])
    # In the order of runs: two seeds without drops, two with.
    told = [float(line.split()[1]) for line in (tmp_path / "told").read_text().splitlines()]
    assert found["loss"] == pytest.approx(told[:2], rel=1e-5)
    assert found["loss"][0] != found["loss"][1]
    (boundary,) = found["boundaries"]
    assert (boundary["name"], boundary["message_bytes"]) == ("blocks.0", 64 * 64 * 4)
    (harm,) = boundary["harm"]
    assert harm["by_seed"] == pytest.approx([told[2] - told[0], told[3] - told[1]], rel=1e-4)
    # 11 of 12 packets are dropped, and with them nearly all of the information.
    assert min(harm["by_seed"]) > 0.5
    assert progress.count("\n") == 4
    assert "run 4 of 4: 1 of blocks.0 dropped, seed 1: loss " in progress


def test_stages_of_a_pipeline_are_its_boundaries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(tmp_path, STAGES)
    options = [
        "--nproc-per-node=1",
        "--exact-below=0",
        "--direction=both",
        "--fractions=0.5",
        "--seeds=1",
        "--tolerate=1000%",
    ]
    output, _ = profile(capsys, *options, "--steps=3", "--boundary=stage1", train)
    lines = output.splitlines()
    assert lines[0] == "1 boundary: the script's 3 pipeline stages"
    # Half of 128 rows of 64 floats.
    assert lines[1] == "  behind stage1: messages of up to 16,384 bytes, 12 packets"
    assert lines[2].startswith("loss of the last 1 of 3 steps, 1 seed: ")
    assert lines[-1] == "SmartOptions(activation_bound=(0.5,))"


def test_a_script_that_raises_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = script(tmp_path, "def main():\n    raise KeyError('tokens')\nmain()\n")
    output, errors = profile(capsys, train, status=1)
    assert output == ""
    *said, line = errors.splitlines()
    assert said[-1] == "| KeyError: 'tokens'"
    assert any("line 2, in main" in each for each in said)
    assert line == (
        f"torch-resilient profile-drop: {train} failed with exit status 1, without drops, seed 0; "
        "its last words are above"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_training_too(number: signal.Signals, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    train = script(
        tmp_path,
        "import os, pathlib, signal\n"
        f"path = pathlib.Path({str(tmp_path / 'new')!r})\n"
        "path.write_text(str(os.getpid()))\n"
        f"path.rename({str(told)!r})\n"
        "signal.pause()\n",
    )
    command = [sys.executable, "-m", "torch_resilient.cli", "profile-drop", str(train)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def heed() -> None:  # it may be ignored here, as under nohup
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(command, cwd=ROOT, env=environment, preexec_fn=heed) as process:
        wait_until(told.exists, "the training runs", 60)
        training = int(told.read_text())
        process.send_signal(number)
        status = process.wait(60)
    with pytest.raises(ProcessLookupError):
        os.kill(training, signal.SIGKILL)
    assert status == 128 + number
    assert not list(tmp_path.glob("profile-drop-*"))


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (
            "nn.Linear(4, 4)",
            [],
            "no boundary: the model has no ModuleList, ModuleDict or Sequential of two or more",
        ),
        (
            "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))",
            ["--boundary=blocks.1"],
            "--boundary blocks.1: no module of this name is trained; there are 0, 1...",
        ),
    ],
)
def test_without_a_boundary_there_is_nothing_to_profile(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    options: Sequence[str],
    text: str,
) -> None:
    program = (
        f"import torch\nfrom torch import nn\nmodel = {model}\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "while True:\n    model(torch.ones(4, 4)).sum().backward()\n    optimizer.step()\n"
    )
    train = script(tmp_path, program)
    output, errors = profile(capsys, "--steps=2", *options, train, status=2)
    assert (output, errors.count("\n")) == ("", 1)
    assert text in errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py"], "none.py: no such file"),
        (["--fractions=0.1,x", "-m", "m"], "--fractions: expected fractions, 0 to 1, got 'x'"),
        (["--fractions=2", "-m", "m"], "--fractions: expected fractions, 0 to 1, got '2'"),
        (["--fractions=0", "-m", "m"], "--fractions: expected one above 0"),
        (["--tolerate=much", "-m", "m"], "--tolerate: expected limits such as 1sd or 1%"),
        (["--stages=1", "-m", "m"], "--stages: expected at least 2, got 1"),
        (["--exact-below=-1", "-m", "m"], "--exact-below: expected at least 0, got -1"),
        (["--seeds=0", "-m", "m"], "--seeds: expected at least 1, got 0"),
        (["--boundary=a", "--boundary=a", "-m", "m"], "--boundary: a name comes twice"),
        (["--nproc-per-node=0", "-m", "m"], "--nproc-per-node: expected at least 1, got 0"),
    ],
)
def test_bad_input_is_named_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output, errors = profile(capsys, *arguments, status=2)
    assert (output, errors.count("\n")) == ("", 1)
    assert errors.startswith(f"torch-resilient profile-drop: {text}")


# ---- what is concluded, from made-up runs -----------------------------------------------------

Losses = Callable[[Mapping[str, float], int], float]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[[Losses], list[dict[str, float]]]:
    """Runs with losses as a function of bounds and seed; returns the bounds of each run."""

    def pretend(losses: Losses) -> list[dict[str, float]]:
        runs: list[dict[str, float]] = []

        def run_once(request: Any, names: Any, bounds: Mapping[str, float], seed: int) -> Any:
            runs.append(dict(bounds))
            seen = {
                "forward": {"messages": 4, "largest_bytes": 200_000, "packets": 600},
                "may_miss": [int(fraction * 145) for fraction in request.fractions],
            }
            return profile_drop.Outcome(
                [9.0, losses(bounds, seed)], {"early": seen, "late": seen}, "", ["early", "late"]
            )

        monkeypatch.setattr(profile_drop, "run_once", run_once)
        return runs

    return pretend


def command(*options: str) -> list[str]:
    return ["--last=1", "--fractions=0.001,0.01,0.02,0.05", *options, "-m", "train"]


def test_a_bound_is_the_largest_fraction_without_harm(
    pretend: Callable[[Losses], list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(bounds: Mapping[str, float], seed: int) -> float:
        early, late = bounds.get("early", 0), bounds.get("late", 0)
        # Seeds: 2.0, 2.1, 2.2, a standard deviation of 0.1. At 0.05 early looks fine again.
        return 2 + 0.1 * seed + (0.3 if early == 0.02 else 0) + 1.5 * late

    runs = pretend(losses)
    output, _ = profile(capsys, *command("--tolerate=1sd,10%"))
    # 0.001 drops no packet of this small message: not tried, and not suggested.
    assert len(runs) == 3 * (1 + 2 * 3) + 3
    assert runs[-1] == {"early": 0.01, "late": 0.05}
    lines = output.splitlines()
    assert "tolerated: 0.1000 more (1sd)" in lines
    rows = [re.split(r"\s{2,}", line) for line in lines if line.startswith(("early", "late"))]
    none = "+0.0000 ± 0.0000"
    assert rows[0] == ["early", "exact", none, "+0.3000 ± 0.0000", none, "0.01"]
    assert rows[1][-1] == "0.05"
    assert lines[-4] == "all at once, (0.01, 0.05): +0.0750 ± 0.0000: tolerated"
    assert lines[-2] == "SmartOptions(activation_bound=(0.01, 0.05))"
    # The first of three stages is more than a quarter.
    assert lines[-1].endswith("what is behind the first quarter: activation_bound=0.01")


def test_bounds_are_lowered_if_together_they_do_too_much(
    pretend: Callable[[Losses], list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(bounds: Mapping[str, float], seed: int) -> float:
        return 1 + sum(bounds.values())

    runs = pretend(losses)
    output, _ = profile(capsys, *command("--seeds=1", "--tolerate=5.5%", "--json"))
    assert runs[-2:] == [{"early": 0.05, "late": 0.05}, {"early": 0.02, "late": 0.02}]
    found = json.loads(output)
    assert found["activation_bound"] == [0.02, 0.02]
    assert [each["bounds"] for each in found["together"]] == [[0.05, 0.05], [0.02, 0.02]]


def test_a_training_that_diverges_is_harmed(
    pretend: Callable[[Losses], list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(bounds: Mapping[str, float], seed: int) -> float:
        return math.nan if bounds and seed == 1 else 1.0

    pretend(losses)
    output, _ = profile(capsys, *command("--tolerate=1%"))
    assert output.count("diverged") == 6
    assert "SmartOptions(activation_bound=(0.0, 0.0))" in output
    output, _ = profile(capsys, *command("--tolerate=1%", "--json"))
    assert json.loads(output)["boundaries"][0]["harm"][0]["mean"] is None


def test_the_spread_of_seeds_must_be_known(
    pretend: Callable[[Losses], list[dict[str, float]]], capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(lambda bounds, seed: 1.0 + sum(bounds.values()))
    _, errors = profile(capsys, *command("--tolerate=1sd"), status=2)
    assert "all seeds have the same loss (does the script set its own seed?)" in errors
    # The other limit does.
    output, _ = profile(capsys, *command())
    assert "tolerated: 0.0100 more (1%)" in output
