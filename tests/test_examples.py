"""The examples run, give the same losses as over gloo, resume exactly, and draw what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import run_demo  # noqa: E402
import train_pipeline  # noqa: E402
from loss_svg import Curve, render_losses  # noqa: E402
from op_recorder import Span, bubble_fraction, iteration_times  # noqa: E402
from text_data import batch, load_text  # noqa: E402
from timeline_svg import LinkFault, Section, panel_of, pick_iteration, render  # noqa: E402

BACKEND = os.environ.get("RESILIENT_TEST_BACKEND", "resilient")
RANKS = 2
SVG = "{http://www.w3.org/2000/svg}"
SMALL = (
    "--steps=4",
    "--microbatches=4",
    "--rows=2",
    "--context=16",
    "--width=32",
    "--layers=4",
)

Torchrun = Callable[..., str]


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Torchrun:
    """Runs an example on two ranks and returns what it prints; fails the test if it fails."""
    folder = tmp_path_factory.mktemp("torchrun")

    def run(example: str, *arguments: str) -> str:
        log = folder / "log"
        command = ["--standalone", f"--nproc-per-node={RANKS}", str(EXAMPLES / example)]
        run_demo.run_torchrun([*command, *arguments], {}, log, timeout_s=90)
        return log.read_text()

    return run


def train(torchrun: Torchrun, folder: Path, *arguments: str) -> tuple[dict[str, Any], Any]:
    """One run of train_pipeline.py: its --json and --timeline, with the defaults above."""
    run, timeline = folder / "run.json", folder / "timeline.json"
    torchrun("train_pipeline.py", *SMALL, f"--json={run}", f"--timeline={timeline}", *arguments)
    return json.loads(run.read_text()), json.loads(timeline.read_text())


@pytest.fixture(scope="module")
def gloo_run(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reference: a zero-bubble schedule over gloo."""
    folder = tmp_path_factory.mktemp("gloo")
    return train(torchrun, folder, "--backend=gloo", "--schedule=ZBVZeroBubble")[0]


@pytest.fixture(scope="module")
def checkpoint(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two steps leave behind, split over four stages on two ranks."""
    folder = tmp_path_factory.mktemp("checkpoint")
    arguments = (f"--backend={BACKEND}", "--schedule=ZBVZeroBubble", "--steps=2")
    train(torchrun, folder, *arguments, f"--checkpoint={folder / 'state'}")
    return folder / "state"


@pytest.mark.slow
def test_a_pipeline_learns_the_same_over_any_backend(
    torchrun: Torchrun, gloo_run: dict[str, Any], tmp_path: Path
) -> None:
    arguments = (f"--backend={BACKEND}", "--schedule=ZBVZeroBubble")
    ours, timeline = train(torchrun, tmp_path, *arguments)
    assert len(ours["losses_hex"]) == 4
    assert ours["losses_hex"] == gloo_run["losses_hex"]
    assert ours["weights_sha256"] == gloo_run["weights_sha256"]
    assert ours["losses"][-1] < ours["losses"][0]
    assert 0 < ours["bubble_fraction"] < 1
    assert all(seconds > 0 for seconds in ours["iteration_s"])
    # Each of 4 stages runs F, I and W of each of 4 microbatches in each of 4 steps.
    spans = [Span(*span) for spans in timeline["ranks"] for span in spans]
    for kind in "FIW":
        assert sum(span.kind == kind for span in spans) == 4 * 4 * 4
    picture = ElementTree.fromstring(render("", "", [Section("", [panel_of(timeline, "run")])]))
    assert len(picture.findall(f".//{SVG}g[@class='rank']")) == RANKS


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_never_interrupted(
    torchrun: Torchrun, gloo_run: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """Also when the model is split differently: four stages wrote, two read."""
    arguments = (f"--backend={BACKEND}", "--schedule=1F1B")
    resumed, _ = train(torchrun, tmp_path, *arguments, f"--checkpoint={checkpoint}", "--resume")
    assert resumed["steps"] == [2, 3]
    assert resumed["losses_hex"] == gloo_run["losses_hex"][2:]


@pytest.mark.slow
@pytest.mark.parametrize("example", ["train_ddp.py", "train_fsdp2.py"])
def test_ordinary_programs_learn_the_same_over_any_backend(
    torchrun: Torchrun, example: str
) -> None:
    def losses(backend: str) -> list[str]:
        printed = torchrun(example, f"--backend={backend}", "--steps=3")
        return re.findall(r"^step \d+ loss [\d.]+ (\S+)$", printed, re.MULTILINE)

    reference = losses("gloo")
    assert len(reference) == 3
    assert float.fromhex(reference[-1]) < float.fromhex(reference[0])
    assert losses(BACKEND) == reference


def test_help_teaches_and_needs_no_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_pipeline.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for schedule in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        assert re.search(rf"^  {schedule} +\S", done.stdout, re.MULTILINE)
    assert "torchrun --standalone" in done.stdout


def test_stages_are_spread_as_the_schedules_want() -> None:
    def stages(schedule: str) -> list[list[int]]:
        return [train_pipeline.stages_of_rank(schedule, rank, 3)[0] for rank in range(3)]

    assert stages("1F1B") == [[0], [1], [2]]
    assert stages("Interleaved1F1B") == [[0, 3], [1, 4], [2, 5]]
    assert stages("ZBVZeroBubble") == [[0, 5], [1, 4], [2, 3]]


def test_batches_depend_on_seed_and_step_only(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(bytes(range(128, 256)))
    (tmp_path / "a.txt").write_bytes(bytes(range(128)))
    text = load_text(tmp_path)
    assert text.tolist() == list(range(256))
    inputs, targets = batch(text, seed=1, step=2, rows=3, length=5)
    assert inputs.shape == targets.shape == (3, 5)
    assert (targets == inputs + 1).all()
    again, _ = batch(text, seed=1, step=2, rows=3, length=5)
    other, _ = batch(text, seed=1, step=3, rows=3, length=5)
    assert (again == inputs).all()
    assert (other != inputs).any()
    with pytest.raises(ValueError, match="a row needs 257"):
        batch(text, seed=0, step=0, rows=1, length=256)
    with pytest.raises(FileNotFoundError, match="nothing"):
        load_text(tmp_path / "nothing")


def two_steps() -> list[list[Span]]:
    """Two ranks: a first step of 10 s, a second of 4 s in which 5 of 8 seconds are busy."""
    return [
        [Span(0, "F", 0, 0, 0, 9), Span(1, "F", 0, 0, 9, 11), Span(1, "wait", -1, -1, 11, 13)],
        [Span(0, "F", 1, 0, 9, 10), Span(1, "F", 1, 0, 11, 12), Span(1, "O", -1, -1, 12, 14)],
    ]


def test_times_of_an_iteration() -> None:
    times = iteration_times(two_steps())
    assert times.steps == [0, 1]
    assert times.iteration_s == [10, 4]
    assert times.window_s == [(0, 10), (9, 14)]
    assert bubble_fraction(times, ranks=2) == pytest.approx(1 - 5 / 8)
    assert pick_iteration(two_steps(), "slowest") == 1, "the first step does not count"


def timeline_of(spans: list[list[Span]]) -> dict[str, Any]:
    """What train_pipeline.py --timeline would have written."""
    return json.loads(json.dumps({"ranks": spans, "schedule": "1F1B", "backend": "gloo"}))


def test_the_picture_shows_every_rank_and_operation() -> None:
    panels = [
        panel_of(timeline_of(two_steps()), "<a> & b", notes=["slow"]),
        panel_of(timeline_of(two_steps()), "c", "slowest", fault=LinkFault(0, "+60 ms")),
    ]
    picture = ElementTree.fromstring(render("t", "s", [Section("1F1B", panels)], "footer"))
    assert len(picture.findall(f".//{SVG}g[@class='panel']")) == 2
    rows = picture.findall(f".//{SVG}g[@class='rank']")
    assert [row.get("data-rank") for row in rows] == ["0", "1", "0", "1"]
    tips = [title.text for title in rows[1].iter(f"{SVG}title")]
    assert tips == [
        "rank 1, stage 1: forward of microbatch 0, 1000.0 ms",
        "rank 1: optimizer, 2000.0 ms",
    ]
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    assert "<a> & bstep 2, the median iteration" in texts
    assert texts.count("5000 ms") == 2
    assert "+60 ms" in texts


def test_the_loss_picture_has_a_line_for_each_run() -> None:
    curves = [Curve("a", [5.5, 4.0]), Curve("b", [5.5, 4.0]), Curve("c", [3.0])]
    picture = ElementTree.fromstring(render_losses("t", curves))
    assert len(picture.findall(f".//{SVG}polyline")) == 3


def demo_run(losses: list[float], key: str = "gloo") -> run_demo.Run:
    """A run of the demonstration as far as check_equal looks at it."""
    summary = {
        "losses_hex": [loss.hex() for loss in losses],
        "weights_sha256": {"0": "a"},
    }
    return run_demo.Run("1F1B", run_demo.Network(key, key, key), summary, {})


def test_the_demo_fails_if_a_loss_differs_in_the_last_bit() -> None:
    reference = demo_run([5.5, 3.0])
    run_demo.check_equal(demo_run([5.5, 3.0], "other"), reference)
    with pytest.raises(run_demo.DemoError, match="other: the loss of step 1"):
        run_demo.check_equal(demo_run([5.5, 3.0000000000000004], "other"), reference)
    with pytest.raises(run_demo.DemoError, match="1 steps"):
        run_demo.check_equal(demo_run([5.5], "other"), reference)
    changed = demo_run([5.5, 3.0], "other")
    changed.summary["weights_sha256"]["0"] = "b"
    with pytest.raises(run_demo.DemoError, match="weights"):
        run_demo.check_equal(changed, reference)


def stats_of_four(round_trip_s: float = 1e-4, reconnects: int = 0) -> dict[str, Any]:
    """A summary with the statistics of four ranks; only the demo's link is as told."""

    def path(rank: int, peer: int) -> dict[str, Any]:
        faulty = {rank, peer} == {run_demo.LOW, run_demo.HIGH}
        return {
            "slot": 0,
            "round_trip_s": round_trip_s if faulty else 1e-4,
            "reconnects": reconnects if faulty else 0,
            "chunks_retransmitted": 3 * reconnects if faulty else 0,
        }

    return {
        "stats": [
            {"peers": [{"rank": p, "paths": [path(r, p)]} for p in range(4) if p != r]}
            for r in range(4)
        ]
    }


def test_the_demo_fails_if_the_link_was_never_slow() -> None:
    healthy = stats_of_four()
    evidence = run_demo.slow_link_evidence(stats_of_four(round_trip_s=0.121), healthy)
    assert evidence.startswith("round trip 121 ms")
    with pytest.raises(run_demo.DemoError, match="no fault happened"):
        run_demo.slow_link_evidence(stats_of_four(round_trip_s=0.061), healthy)
    slow_before = stats_of_four(round_trip_s=0.121)
    with pytest.raises(run_demo.DemoError, match="no fault happened"):
        run_demo.slow_link_evidence(stats_of_four(round_trip_s=0.121), slow_before)
    with pytest.raises(run_demo.DemoError, match="no statistics"):
        run_demo.slow_link_evidence({"stats": [None] * 4}, healthy)


def test_the_demo_fails_if_no_connection_was_cut() -> None:
    healthy = stats_of_four()
    assert run_demo.cut_evidence(stats_of_four(reconnects=1), healthy).startswith("1 connection")
    with pytest.raises(run_demo.DemoError, match="no fault happened"):
        run_demo.cut_evidence(stats_of_four(reconnects=0), healthy)
    with pytest.raises(run_demo.DemoError, match="no fault happened"):
        run_demo.cut_evidence(stats_of_four(reconnects=1), stats_of_four(reconnects=1))


def test_the_demo_always_has_something_to_compare() -> None:
    def keys(*backends: str) -> list[str]:
        return [network.key for network in run_demo.networks(backends, steps=10)]

    assert keys("gloo") == ["gloo", "gloo-again"]
    assert keys("gloo", "resilient") == ["gloo", "resilient", "resilient-slow", "resilient-cut"]
    assert keys("resilient") == ["resilient", "resilient-slow", "resilient-cut"]


@pytest.mark.slow
def test_a_hanging_run_is_ended_with_all_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "path = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "path.with_suffix('.new').write_text(str(os.getpid()))\n"
        "path.with_suffix('.new').rename(path)\n"
        "signal.pause()\n"
    )
    pids = [tmp_path / "0", tmp_path / "1"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*command, "--nproc-per-node=2", str(script), str(tmp_path)], stderr=subprocess.DEVNULL
    )
    try:
        limit_s = time.monotonic() + 60
        while not all(path.exists() for path in pids):
            assert time.monotonic() < limit_s, "torchrun did not start the ranks in 60 s"
            assert process.poll() is None, "torchrun ended before its ranks started"
            time.sleep(0.05)
    finally:
        run_demo.stop(process)
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)


def test_a_run_that_fails_or_takes_too_long_is_told_with_its_log(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import signal, sys\nprint('the reason')\nsys.exit(3)\n")
    log = tmp_path / "log"
    with pytest.raises(run_demo.DemoError, match=r"(?s)A=\"b\".*exit code 1.*the reason"):
        run_demo.run_torchrun([str(script)], {"A": "b"}, log, timeout_s=60)
    with pytest.raises(run_demo.DemoError, match="was not done after 0 s"):
        run_demo.run_torchrun([str(script)], {}, log, timeout_s=0.01)
