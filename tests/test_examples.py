"""The examples run, give the same losses as over gloo, resume exactly, and draw what they say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import failover  # noqa: E402
import failover_verbs  # noqa: E402
import prefill_service  # noqa: E402
import run_demo  # noqa: E402
import train_pipeline  # noqa: E402
from curves_svg import Curve, render_curves  # noqa: E402
from op_recorder import Span, bubble_fraction, iteration_times  # noqa: E402
from stats_doubles import group_stats, path_stats, peer_stats  # noqa: E402
from text_data import batch, load_text  # noqa: E402
from timeline_svg import LinkFault, Section, panel_of, pick_iteration, render  # noqa: E402

from torch_resilient.pipelining.timeline_files import read_run  # noqa: E402
from torch_resilient.prefill import ModelPart, Prefilled, plain_prefill  # noqa: E402

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
    """Runs an example, on two ranks by default, and returns what it prints.

    It fails the test if the example fails.
    """
    folder = tmp_path_factory.mktemp("torchrun")

    def run(example: str, *arguments: str, ranks: int = RANKS) -> str:
        log = folder / "log"
        command = ["--standalone", f"--nproc-per-node={ranks}", str(EXAMPLES / example)]
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
    """The checkpoint of two steps, split over four stages on two ranks."""
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


@pytest.fixture(scope="module")
def plain_run(torchrun: Torchrun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reference with one stage a rank: 1F1B over gloo."""
    return train(torchrun, tmp_path_factory.mktemp("plain"), "--backend=gloo")[0]


@pytest.mark.slow
def test_the_adaptive_schedule_learns_the_same_and_tells_what_it_did(
    torchrun: Torchrun, plain_run: dict[str, Any], tmp_path: Path
) -> None:
    assert plain_run["schedule"] == "1F1B"
    assert plain_run["schedule_stats"] == [None] * RANKS
    folder = tmp_path / "measured"
    arguments = (f"--backend={BACKEND}", "--schedule=AdaptiveZB", f"--timeline-dir={folder}")
    ours, timeline = train(torchrun, tmp_path, *arguments, "--pace-ms=5")
    assert ours["losses_hex"] == plain_run["losses_hex"]
    assert ours["weights_sha256"] == plain_run["weights_sha256"]
    for told in ours["schedule_stats"]:
        assert told["steps"] == 4
        assert told["plan"]["reason"]
        assert set(told["waits"]) == {"blocked", "blocked_s", "while_ready", "held", "held_s"}
        assert told["dispatch"] == ("live" if BACKEND == "resilient" else "fixed")
        if told["dispatch"] == "live":
            assert told["waits"]["while_ready"] == 0
        # The measured times are the paced ones. On the first stage I is empty.
        assert min(told["costs"]["forward_s"]) >= 0.005
        assert told["costs"]["input_backward_s"][1] >= 0.005
        assert told["costs"]["weight_backward_s"][0] >= 0.010
        assert told["costs"]["weight_backward_s"][1] >= 0.005
    run = read_run(folder)
    assert [step.step for step in run.steps] == [0, 1, 2, 3]
    assert all(len(step.present) == RANKS for step in run.steps)
    switches = [event for event in run.events if event.text.startswith("plan ")]
    epochs = [told["plan"]["epoch"] for told in ours["schedule_stats"]]
    assert len(set(epochs)) == 1, "all ranks are at the same plan"
    assert len(switches) == sum(epochs)
    if BACKEND == "resilient":
        plans = [[event["kind"] for event in stats["events"]] for stats in ours["stats"]]
        assert [kinds.count("plan") for kinds in plans] == epochs
        assert all(list(step) == ["1"] for step in ours["round_trips_s"][0])
    spans = [Span(*span) for span in timeline["ranks"][0]]
    assert {span.kind for span in spans} == {"F", "I", "W", "O", "wait"}


@pytest.mark.slow
def test_torchs_zero_bubble_with_one_stage_a_rank_learns_the_same(
    torchrun: Torchrun, plain_run: dict[str, Any], tmp_path: Path
) -> None:
    ours, _ = train(torchrun, tmp_path, f"--backend={BACKEND}", "--schedule=ZB1P")
    assert ours["losses_hex"] == plain_run["losses_hex"]
    assert ours["weights_sha256"] == plain_run["weights_sha256"]


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_never_interrupted(
    torchrun: Torchrun, gloo_run: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """The checkpoint also fits another split of the model: four stages wrote, two read."""
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


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["hsdp", "pipeline"])
def test_each_dimension_of_a_mesh_may_have_its_backend(torchrun: Torchrun, plan: str) -> None:
    def run(backend: str) -> tuple[list[str], list[str]]:
        arguments = (f"--plan={plan}", f"--backend={backend}", "--steps=3")
        printed = torchrun("train_mesh.py", *arguments, ranks=4)
        losses = re.findall(r"^step \d+ loss [\d.]+ (\S+)$", printed, re.MULTILINE)
        return re.findall(r"^(?:across|within): (\w+)$", printed, re.MULTILINE), losses

    _, reference = run("gloo")
    assert len(reference) == 3
    assert float.fromhex(reference[-1]) < float.fromhex(reference[0])
    assert run(BACKEND) == ([BACKEND, "gloo"], reference)


@pytest.mark.slow
def test_the_failover_example_shows_faults_and_equal_losses() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "failover.py", "--steps=300", "--seed=7"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 300 losses are bitwise equal to those of the run without faults" in done.stdout
    assert re.search(r"[1-5] of 5 faults left a trace", done.stdout)
    assert "0 of" in done.stdout, "an operation failed"


def test_the_failover_example_fails_if_a_loss_differs_in_the_last_bit() -> None:
    output = "step 0 loss 1.0000 0x1.0p+0\nstep 1 loss 0.5000 0x1.0p-1\nnoise\n"
    losses = failover.losses_of(output, 2)
    failover.compare(losses, list(losses))
    with pytest.raises(failover.FailoverError, match="the loss of step 1 is 0x1"):
        failover.compare(losses, [losses[0], "0x1.0000000000001p-1"])
    with pytest.raises(failover.FailoverError, match="expected the losses of 3 steps, got 2"):
        failover.losses_of(output, 3)
    with pytest.raises(failover.FailoverError, match=r"failed with exit code 3:\nwhy"):
        failover.run(["sh", "-c", "echo why; exit 3"])


@pytest.mark.slow
def test_prefills_fill_the_bubbles_of_a_training_and_change_no_bit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Every rate is a part of the run: on a slow machine, some may have no step of their own.
    assert prefill_service.main(["--steps=20", "--rates", "5", "20", f"--out={tmp_path}"]) == 0
    text = capfd.readouterr().out
    assert "PROVED: all losses and weights of 20 steps are bitwise the same" in text
    assert "TTFT p50 / p99" in text
    boxes = ElementTree.parse(tmp_path / "demo_bubbles.svg").getroot().iter(f"{SVG}title")
    assert any("prefill" in (each.text or "") for each in boxes)


def test_the_prefill_example_fails_if_a_bit_differs_or_nothing_finished() -> None:
    alone = {"losses_hex": ["0x1p+0"], "weights_sha256": {"0": "a"}}
    prefill_service.check_training(alone, dict(alone))
    for name in alone:
        with pytest.raises(prefill_service.DemoError, match=name):
            prefill_service.check_training(alone, {**alone, name: "other"})
    phase = prefill_service.Phase(5)
    with pytest.raises(prefill_service.DemoError, match="no prefill finished"):
        prefill_service.check_prefills([phase])
    model = ModelPart(prefill_service.SHAPE, range(prefill_service.SHAPE.layers))
    prompt = torch.tensor([1, 2, 3])
    kv, logits = plain_prefill(model, prompt, prefill_service.CHUNK_TOKENS)
    future: Future[Prefilled] = Future()
    future.set_result(Prefilled(kv, logits, 0.1, 0.0))
    phase.prompts.append(prompt)
    phase.futures.append(future)
    assert prefill_service.check_prefills([phase]) == 1
    kv[0, 0, 0, 0, 0] += 1
    with pytest.raises(prefill_service.DemoError, match="a prefill of 3 tokens differs"):
        prefill_service.check_prefills([phase])


def test_the_failover_example_over_rdma_has_all_kinds_of_faults_at_both_ends() -> None:
    count = 2 * len(failover_verbs.KINDS)
    planned = list(failover_verbs.faults(7, count))
    assert planned == list(failover_verbs.faults(7, count))
    assert {kind for kind, _, _ in planned[: len(failover_verbs.KINDS)]} == {*failover_verbs.KINDS}
    scripts = "; ".join(script for _, script, _ in planned)
    for part in ("admin a", "admin b", "carrier a", "carrier b", "a->b", "b->a", "eth0", "eth1"):
        assert part in scripts
    with pytest.raises(failover_verbs.VerbsFailoverError, match="too short for every fault"):
        failover_verbs.tell_faults(planned[:3], 3.0)


def test_the_failover_example_over_rdma_fails_if_a_bit_differs_or_nothing_failed() -> None:
    def result(rank: int, loss: str, weights: str, silent: int, sent: int = 9) -> dict[str, Any]:
        path = {"kind": "rdma", "bytes_sent": sent, "times_suspect": silent}
        return {"rank": rank, "losses": ["0x1p0", loss], "weights": weights, "paths": [path]}

    def check(*faulty: dict[str, Any]) -> None:
        healthy = [result(rank, "0x1p0", "w", 0) for rank in range(2)]
        failover_verbs.check("ddp", healthy, list(faulty))

    good = result(1, "0x1p0", "w", 3)
    check(result(0, "0x1p0", "w", 0), good)
    for bad, why in (
        (result(0, "0x1.0000000000001p0", "w", 3), "loss of step 1"),
        (result(0, "0x1p0", "v", 3), "weights of guest a"),
    ):
        with pytest.raises(failover_verbs.VerbsFailoverError, match=why):
            check(bad, good)
    with pytest.raises(failover_verbs.VerbsFailoverError, match="no RDMA path has failed"):
        check(result(0, "0x1p0", "w", 0), result(1, "0x1p0", "w", 0))
    with pytest.raises(failover_verbs.VerbsFailoverError, match="RDMA carried nothing"):
        check(result(0, "0x1p0", "w", 1, 0), result(1, "0x1p0", "w", 1, 0))


def test_help_teaches_and_needs_no_torchrun() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "train_pipeline.py", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for schedule in (
        "AdaptiveZB",
        "1F1B",
        "ZB1P",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        assert re.search(rf"^  {schedule} +\S", done.stdout, re.MULTILINE)
    assert "torchrun --standalone" in done.stdout


def test_the_schedule_fits_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")

    def schedule(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["train_pipeline.py", *arguments])
        return str(train_pipeline.parse_arguments().schedule)

    assert schedule() == "AdaptiveZB"
    assert schedule("--backend=cpu:resilient,cuda:nccl") == "AdaptiveZB"
    assert schedule("--backend=gloo") == "1F1B"
    assert schedule("--backend=gloo", "--schedule=adaptivezb") == "AdaptiveZB"
    assert schedule("--schedule=1f1b") == "1F1B"
    with pytest.raises(SystemExit):
        schedule("--schedule=1F1B", "--timeline-dir=run")


def test_stages_are_spread_as_the_schedules_want() -> None:
    def stages(schedule: str) -> list[list[int]]:
        return [train_pipeline.stages_of_rank(schedule, rank, 3)[0] for rank in range(3)]

    assert stages("AdaptiveZB") == stages("ZB1P") == stages("1F1B")
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
    """Two ranks: a first step of 10 s, a second of 4 s with 5 of 8 seconds busy."""
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
    """The timeline as train_pipeline.py --timeline would have written it."""
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
    picture = ElementTree.fromstring(render_curves("t", "s", "nats", curves, dots=False))
    widths = [float(line.attrib["stroke-width"]) for line in picture.iter(f"{SVG}polyline")]
    assert widths == sorted(set(widths), reverse=True)
    assert len(picture.findall(f".//{SVG}polyline")) == 3


def test_the_round_trip_is_that_of_paths_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats(*paths: tuple[float, int]) -> Any:
        told = [
            path_stats(index=index, round_trip_s=seconds, round_trips=count)
            for index, (seconds, count) in enumerate(paths)
        ]
        return lambda: group_stats(peer_stats(*told, rank=3), peer_stats(rank=2))

    round_trips = train_pipeline.RoundTrips()
    for paths, expected_s in (
        (((0.1, 5), (0.2, 1)), 0.2),
        (((0.1, 6), (0.2, 1)), 0.1),
        (((0.1, 6), (0.2, 1)), 0.2),  # nothing new: whatever is known
        (((0.1, 6), (0.05, 2)), 0.05),
    ):
        monkeypatch.setattr(train_pipeline, "stats", stats(*paths))
        assert round_trips.look() == {"3": expected_s}


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


def faulty_summary(
    round_trips_ms: tuple[float, float, float] = (1.0, 121.0, 10.0),
    reconnects: int = 1,
    elsewhere: int = 0,
    steps: int = 8,
) -> dict[str, Any]:
    """A run of four ranks in the demo's network, as far as its functions look at it.

    `round_trips_ms`: of the demo's link in the healthy, slow and healed phase.
    """
    link = {run_demo.LOW, run_demo.HIGH}

    def round_trip_s(rank: int, peer: int, step: int) -> float:
        phase = 0 if step < steps // 4 else 1 if step < 3 * steps // 4 else 2
        return round_trips_ms[phase] / 1e3 if {rank, peer} == link else 1e-4

    def path(rank: int, peer: int) -> dict[str, Any]:
        count = reconnects if {rank, peer} == link else elsewhere
        return {"kind": "tcp", "index": 0, "reconnects": count, "chunks_retransmitted": 3 * count}

    return {
        "steps": list(range(steps)),
        # 100, 100, 200, 300, ...
        "iteration_s": [0.1, *(0.1 * step for step in range(1, steps))],
        "stats": [
            {
                "peers": [{"rank": p, "paths": [path(r, p)]} for p in range(4) if p != r],
                "events": [{"kind": "plan", "text": "plan 1"}, {"kind": "link", "text": "slower"}],
            }
            for r in range(4)
        ],
        "round_trips_s": [
            [
                {str(p): round_trip_s(r, p, step) for p in range(4) if p != r}
                for step in range(steps)
            ]
            for r in range(4)
        ],
    }


def test_the_demo_fails_if_the_link_was_never_slow() -> None:
    told = run_demo.slow_link_evidence(faulty_summary())
    assert told == "round trip 1.0 ms, then 121 ms, at the end 10 ms"
    for never in ((1.0, 61.0, 1.0), (70.0, 121.0, 1.0), (1.0, 121.0, 70.0)):
        with pytest.raises(run_demo.DemoError, match="no fault happened"):
            run_demo.slow_link_evidence(faulty_summary(never))
    unknown = faulty_summary() | {"round_trips_s": [[]] * 4}
    with pytest.raises(run_demo.DemoError, match="no round trip of the link 2-3 in step 1"):
        run_demo.slow_link_evidence(unknown)


def test_the_demo_fails_if_no_connection_was_cut() -> None:
    assert run_demo.cut_evidence(faulty_summary()).startswith("1 connection(s) re-established, 6")
    for count, elsewhere in ((0, 0), (1, 1)):
        summary = faulty_summary(reconnects=count, elsewhere=elsewhere)
        with pytest.raises(run_demo.DemoError, match="no fault happened"):
            run_demo.cut_evidence(summary)
    with pytest.raises(run_demo.DemoError, match="no statistics"):
        run_demo.cut_evidence(faulty_summary() | {"stats": [None] * 4})


def test_the_demo_always_has_something_to_compare() -> None:
    def keys(*backends: str) -> list[str]:
        return [network.key for network in run_demo.networks(backends, steps=20)]

    assert keys("gloo") == ["gloo", "gloo-again"]
    assert keys("gloo", "resilient") == ["gloo", "resilient-faults"]
    assert keys("resilient") == ["resilient", "resilient-faults"]
    assert keys("resilient", "gloo") == ["resilient", "resilient-faults", "gloo"]


def test_the_demo_runs_a_reference_for_each_placement_of_stages() -> None:
    conditions = run_demo.networks(["gloo", "resilient"], steps=20)
    schedules = ["1F1B", "AdaptiveZB", "InterleavedZeroBubble", "LoopedBFS"]
    assert [
        (schedule, network.key) for schedule, network in run_demo.plan_runs(schedules, conditions)
    ] == [
        ("1F1B", "gloo"),
        ("1F1B", "resilient-faults"),
        ("AdaptiveZB", "resilient-faults"),
        ("InterleavedZeroBubble", "gloo"),
        ("InterleavedZeroBubble", "resilient-faults"),
        ("LoopedBFS", "resilient-faults"),
    ]
    runs = [
        run_demo.Run(schedule, network, {}, {})
        for schedule, network in run_demo.plan_runs(schedules, conditions)
    ]
    assert [runs.index(run_demo.reference_of(runs, run)) for run in runs] == [0, 0, 0, 3, 3, 3]


def test_the_faults_of_the_demo_are_in_the_phases_that_its_table_tells() -> None:
    (_, faulty) = run_demo.networks(["gloo", "resilient"], steps=20)
    rules = faulty.environment["TORCH_RESILIENT_FAULTS"].split("; ")
    assert rules[0] == "delay rank=2 peer=3 ms=60 from_step=5 until_step=15"
    assert rules[1] == "delay rank=3 peer=2 ms=60 from_step=5 until_step=15"
    assert rules[2].startswith("cut rank=2 peer=3 path=0 after_bytes=")
    assert run_demo.Phases.of(20).ranges == {
        "healthy": range(1, 5),
        "slow, early": range(6, 10),
        "slow, late": range(10, 15),
        "healed": range(16, 20),
    }
    least = run_demo.Phases.of(run_demo.MIN_STEPS).ranges
    assert all(least.values()), "no phase is empty"
    with pytest.raises(SystemExit):
        run_demo.parse_arguments([f"--steps={run_demo.MIN_STEPS - 1}"])


def demo_runs() -> list[run_demo.Run]:
    """A reference and a run with faults, of 8 steps; a rank has one F in each."""
    steps = 8
    spans = [[[step, "F", rank, 0, step, step + 1.0] for step in range(steps)] for rank in range(4)]
    (healthy, faulty) = run_demo.networks(["gloo", "resilient"], steps)
    plain = faulty_summary() | {"stats": [None] * 4}
    more = {"microbatches": 1, "torch": "2", "losses": [1.0] * steps}
    return [
        run_demo.Run(
            schedule,
            network,
            summary | more,
            {"ranks": spans, "schedule": schedule, "backend": network.backend},
        )
        for schedule, network, summary in (
            ("1F1B", healthy, plain),
            ("AdaptiveZB", faulty, faulty_summary()),
        )
    ]


def test_the_table_of_the_demo_tells_the_time_of_each_phase() -> None:
    runs = demo_runs()
    assert run_demo.phase_times_s(runs[1].summary) == pytest.approx(
        {"healthy": 0.1, "slow, early": 0.3, "slow, late": 0.45, "healed": 0.7}
    )
    head, _, reference, adaptive = run_demo.table(runs).splitlines()
    assert re.split(r"\s{2,}", head)[2:6] == ["healthy", "slow, early", "slow, late", "healed"]
    cells = ["100 ms", "300 ms", "450 ms", "700 ms"]
    assert re.split(r"\s{2,}", reference)[2:] == [*cells, "(reference)", "-"]
    assert re.split(r"\s{2,}", adaptive)[2:] == [*cells, "yes, bitwise", "1"]
    assert run_demo.plans_of(runs[1]) == ["plan 1"]
    assert run_demo.plans_of(runs[0]) == []


def test_the_picture_of_the_demo_shows_the_slow_link_where_it_was_slow() -> None:
    options = run_demo.parse_arguments(["--steps=8"])
    picture = ElementTree.fromstring(run_demo.picture(demo_runs(), options))
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    assert len(picture.findall(f".//{SVG}g[@class='panel']")) == 3
    assert texts.count("+60 ms") == 1
    assert "AdaptiveZB over resilientstep 2, the median iteration" in texts
    assert any(re.fullmatch(r"AdaptiveZB over resilientstep [56], .*", text) for text in texts)


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
