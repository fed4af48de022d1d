"""examples/demo_lossy.py: trains over a lossy link; fails if anything it claims does not hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from torch_resilient.testing import NetworkLab

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo_lossy  # noqa: E402
from curves_svg import Curve, render_curves  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
TCP, EXACT, SMART = demo_lossy.WAYS


def made_up(way: demo_lossy.Way, **counts: int) -> demo_lossy.Run:
    """A run of ten steps that take 10, 20, 30... ms, on rank 1 one more."""
    run = demo_lossy.Run(way, dropped=7)
    for rank in (0, 1):
        for step in range(10):
            taken_s = 0.01 * (step + 1) + 0.001 * rank
            run.steps[rank].append({"loss": 5.0 - step, "taken_s": taken_s, "digest": str(step)})
        names = ("dropped", "recovered", "retransmitted", "zero_filled")
        datagrams = {name: counts.get(name, 0) for name in names} if way.datagrams else None
        run.results[rank] = {"paths": [{"datagrams": None}, {"datagrams": datagrams}]}
    return run


def test_it_fails_if_replicas_differ() -> None:
    run = made_up(SMART)
    demo_lossy.check_replicas(run)
    run.steps[1][6]["digest"] = "other"
    with pytest.raises(demo_lossy.DemoError, match=r"SMART: .* ranks differ after step 6"):
        demo_lossy.check_replicas(run)


def test_it_fails_if_exact_gradients_were_changed() -> None:
    run, reference = made_up(EXACT), made_up(TCP)
    demo_lossy.check_exact(run, reference)
    for rank in (0, 1):
        run.steps[rank][3]["digest"] = "other"
    with pytest.raises(demo_lossy.DemoError, match=r"after step 3 .* not those of TCP"):
        demo_lossy.check_exact(run, reference)


def test_it_fails_if_nothing_was_dropped() -> None:
    demo_lossy.check_packets_were_dropped(made_up(TCP))
    demo_lossy.check_packets_were_dropped(made_up(EXACT, dropped=5))
    demo_lossy.check_packets_were_dropped(made_up(SMART, dropped=5, zero_filled=2))
    for run, why in (
        (made_up(EXACT), "no datagram was dropped"),
        (made_up(EXACT, dropped=5, zero_filled=1), "though all was to be exact"),
        (made_up(SMART, dropped=5), "tolerated no drop"),
    ):
        with pytest.raises(demo_lossy.DemoError, match=why):
            demo_lossy.check_packets_were_dropped(run)
    healthy = made_up(TCP)
    healthy.dropped = 0
    with pytest.raises(demo_lossy.DemoError, match="the link has dropped nothing"):
        demo_lossy.check_packets_were_dropped(healthy)


def test_the_table_counts_what_comes_after_the_warm_up() -> None:
    runs = [made_up(TCP), made_up(SMART, dropped=1000, recovered=3, zero_filled=2)]
    _, _, tcp, smart = demo_lossy.table(runs).splitlines()
    # Steps 5 to 9, of the slower rank.
    assert re.split(r"\s{2,}", tcp) == ["TCP", "81", "101", "7", "-4.0000"]
    cells = ["datagrams, SMART", "81", "101", "2,000", "6", "0", "4", "-4.0000"]
    assert re.split(r"\s{2,}", smart) == cells


def test_p99_is_the_nearest_rank() -> None:
    assert demo_lossy.p99(range(1, 101)) == 99
    assert demo_lossy.p99([3, 1, 2]) == 3


def test_the_curves_show_every_value_and_name_the_axes() -> None:
    curves = [
        Curve("<a>", [100, 900, 200], first=6, note="mean 400"),
        Curve("b", [50, 60, 70], first=6),
    ]
    text = render_curves("t", "s", "time of a step, ms", curves, from_zero=True, footer=["why"])
    picture = ElementTree.fromstring(text)
    assert len(picture.findall(f".//{SVG}polyline")) == 2
    tips = [title.text for title in picture.iter(f"{SVG}title")]
    assert tips[1:4] == ["<a>", "<a>, step 6: 100", "<a>, step 7: 900"]
    texts = ["".join(text.itertext()) for text in picture.iter(f"{SVG}text")]
    assert {"t", "s", "time of a step, ms", "step", "<a>", "mean 400", "why"} <= set(texts)
    # The vertical axis is linear and begins at 0.
    heights = [float(circle.attrib["cy"]) for circle in picture.iter(f"{SVG}circle")]
    assert heights[0] - heights[1] == pytest.approx(8 * (heights[0] - heights[2]), rel=0.05)
    (bottom,) = [
        float(line.attrib["y1"]) for line in picture.findall(f".//{SVG}line[@class='rule']")
    ]
    assert bottom - heights[1] == pytest.approx(9 * (bottom - heights[0]), rel=0.05)
    for circle in picture.iter(f"{SVG}circle"):
        assert 0 < float(circle.attrib["cx"]) < 860
        assert 0 < float(circle.attrib["cy"]) < 440


@pytest.mark.parametrize("slower", [True, False])
def test_the_picture_says_why_smart_is_slower(slower: bool) -> None:
    exact = made_up(EXACT, dropped=1000, retransmitted=4)
    smart = made_up(SMART, dropped=1000)
    for row in [row for rank in (0, 1) for row in (smart if slower else exact).steps[rank]]:
        row["taken_s"] += 0.02
    picture = demo_lossy.picture([made_up(TCP), exact, smart], "somewhere")
    why = "slower than exact datagrams here. Parity repairs nearly all drops: of 2,000 dropped"
    assert (why in picture) == slower


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_lossy, "unavailable", lambda: "it needs root")
    assert demo_lossy.main([f"--out={tmp_path}"]) == 2
    assert "cannot make the two hosts: it needs root" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        demo_lossy.parse_arguments([f"--steps={demo_lossy.MIN_STEPS - 1}"])


# Datagrams slow down where the hosts' processes hardly get a processor.
@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.lab
def test_the_demo_proves_what_it_says(
    lab: NetworkLab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The fixture `lab` checks that a lab is possible; the demo creates its own."""
    assert (
        demo_lossy.main([f"--steps={demo_lossy.MIN_STEPS}", "--delay-ms=5", f"--out={tmp_path}"])
        == 0
    )
    output = capsys.readouterr().out
    assert "PROVED: after every step both ranks have the same parameters" in output
    assert re.search(r"^datagrams, SMART  .*\d$", output, re.MULTILINE)
    picture = ElementTree.parse(tmp_path / "demo_lossy.svg")
    assert len(picture.findall(f".//{SVG}polyline")) == 3


@pytest.mark.slow
def test_the_program_runs_under_torchrun_too() -> None:
    """Runs on one host, where no packet is dropped."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = str(EXAMPLES / "train_ddp_lossy.py")
    options = ["--smart", "--json", "--steps=3", "--layers=2", "--width=32"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", script, *options],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    digests = [[row["digest"] for row in rows if row.get("step") == step] for step in range(3)]
    assert all(len(each) == 2 and each[0] == each[1] for each in digests)
    assert len({each[0] for each in digests}) == 3
    results = [row["smart"] for row in rows if row["kind"] == "result"]
    assert [each["steps"] for each in results] == [3, 3]
    assert all(each["bytes_zero_filled"] == 0 for each in results)
