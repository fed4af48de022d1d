"""`torch-resilient geo`: what it prints, draws and refuses."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_geo_bubbles import bubble_faults
from test_geo_plan import SMALL, measured

from torch_resilient import cli
from torch_resilient.geo.cell import CellPlan, Transfer
from torch_resilient.geo.cell_input import read_cell
from torch_resilient.geo.cell_replay import faults_of

# Figure 6 of ATLAS.
CELL: dict[str, Any] = {
    "pipelines": 2,
    "stages": 6,
    "microbatches": 4,
    "tF": 1,
    "tR": 1,
    "tB": 2,
    "sites": ["a", "a", "b", "b", "c", "c"],
    "wan_ms": 2,
}
WHAT_IF: dict[str, Any] = {"base": SMALL, "vary": {"field": "sites[1].gpus", "values": [2, 6, 10]}}
BUBBLES: dict[str, Any] = {
    "cell": CELL,
    "cells": 2,
    "depth": 2,
    "requests": [[0, 4], [1.5, 2], [3, 1000]],
    "prefill": {"base_ms": 0.5, "per_token_ms": 0.25, "hop_ms": 0.125},
    "guard_ms": 0.5,
}
INPUTS = {"cell": CELL, "plan": SMALL, "what-if": WHAT_IF, "bubbles": BUBBLES}


def run(
    command: str,
    given: object,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command in this process."""
    source = tmp_path / "input.json"
    source.write_text(given if isinstance(given, str) else json.dumps(given))
    status = cli.main(["geo", command, "--json", str(source), *options])
    output, errors = capsys.readouterr()
    return status, output, errors


def answer(
    command: str, given: object, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, Any]:
    status, output, errors = run(command, given, tmp_path, capsys, *options)
    assert (status, errors) == (0, "")
    found: dict[str, Any] = json.loads(output, parse_constant=pytest.fail)
    return found


@pytest.mark.parametrize(
    ("fields", "time_ms"),
    [
        ({"policy": "varuna", "sharing": "spatial"}, 38),
        ({"policy": "paper"}, 36),
        ({}, 34),
        ({"wan_ms": {"1-2": [2, 2], "default": 2}, "intra_ms": {"default": 0}}, 34),
    ],
)
def test_a_cell(
    fields: dict[str, Any], time_ms: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**CELL, **fields}
    found = answer("cell", given, tmp_path, capsys)
    assert {name: found[name] for name in given} == given
    assert found["iteration_ms"] == time_ms
    assert found["lower_bound_ms"] <= time_ms
    assert 0 < found["utilisation"] < 1
    assert found["orders"][0][5][:4] == ["F0", "B0", "F1", "B1"]
    assert set(found["transfers"][0]) == {
        "pipe",
        "hop",
        "direction",
        "microbatch",
        "start_ms",
        "end_ms",
        "nodes",
    }
    assert {each["direction"] for each in found["transfers"]} == {"forward", "backward"}
    # The printed schedule is valid.
    plan = CellPlan(
        orders=found["orders"],
        starts_ms=found["starts_ms"],
        transfers=[Transfer(**each) for each in found["transfers"]],
        **{
            name: found[name]
            for name in ("chosen", "iteration_ms", "lower_bound_ms", "utilisation")
        },
    )
    assert faults_of(read_cell(given).cell, plan) == []
    # The output may be the input again.
    assert answer("cell", found, tmp_path, capsys) == found


def test_a_split_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {**CELL, "tB": 1, "tW": [1, 1, 1, 1, 1, 2], "cap": [4, 4, 4, 3, 3, 2]}
    found = answer("cell", given, tmp_path, capsys)
    assert {order[-1][0] for row in found["orders"] for order in row} == {"W"}
    assert found["iteration_ms"] <= 34


def test_a_plan_and_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("plan", SMALL, tmp_path, capsys)
    assert set(found) - set(SMALL) == {"rows", "choice", "order", "seconds"}
    assert found["choice"]["cells"] == 2
    again = answer("plan", found, tmp_path, capsys)
    again["seconds"] = found["seconds"]
    assert again == found
    varied = answer("what-if", {**WHAT_IF, "base": found}, tmp_path, capsys)
    assert [point["values"] for point in varied["points"]] == [[2], [6], [10]]
    assert varied["points"][2]["choice"] == found["choice"]
    assert answer("what-if", varied, tmp_path, capsys) == varied


def test_prefills_in_bubbles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer("bubbles", BUBBLES, tmp_path, capsys)
    assert set(found) - set(BUBBLES) == {
        "schedule",
        "period_ms",
        "placements",
        "rejected",
        "utilisation_training",
        "utilisation",
        "lookup_p50_us",
        "lookup_p99_us",
    }
    planned = answer("cell", CELL, tmp_path, capsys)
    assert set(found["schedule"]) == set(planned)
    # Idle time is gathered, and nothing else changes.
    for name in ("orders", "iteration_ms", "utilisation", "chosen"):
        assert found["schedule"][name] == planned[name]
    assert found["period_ms"] == found["schedule"]["iteration_ms"]
    assert found["rejected"] == [2]
    assert [set(each) for each in found["placements"]] == [{"request", "gpus", "start_ms"}] * 2
    assert [cell for cell, _, _ in found["placements"][0]["gpus"]] == [0, 1]
    assert bubble_faults(BUBBLES, found) == []
    # The output may be the input again, and so may the schedule.
    again = answer("bubbles", {**found, "cell": found["schedule"]}, tmp_path, capsys)
    assert again["placements"] == found["placements"]


def test_sites_from_a_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(measured([0, 0, 1, 1])))
    given = {key: SMALL[key] for key in ("cell", "microbatches", "tF", "tR", "tB", "parameters")}
    given.update(partitions=2, activation_bytes=1e6)
    found = answer("plan", given, tmp_path, capsys, "--bench", str(bench))
    assert [site["gpus"] for site in found["sites"]] == [2, 2]
    assert found["lan_gbps"] == 8
    assert len(found["replicas"]) == 2
    sites = [{"name": "x", "gpus": 50, "gpu_hour": 1}, {"name": "y", "gpus": 40}]
    given = {**given, "sites": sites, "lan_gbps": 100}
    found = answer("plan", given, tmp_path, capsys, "--bench", str(bench))
    assert (found["sites"], found["lan_gbps"]) == (sites, 100)
    assert found["latency_ms"] == {"x|y": 20, "y|x": 20}
    status, _, errors = run(
        "plan", given, tmp_path, capsys, "--bench", str(tmp_path / "input.json")
    )
    assert status == 2
    assert errors.startswith("torch-resilient geo plan: bench: expected the output of")


@pytest.mark.parametrize("command", INPUTS)
def test_pictures(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = copy.deepcopy(INPUTS[command])
    inner = given.get("base") or given.get("cell") if command != "plan" else given
    sites = (inner or given)["sites"]
    for i, site in enumerate(sites):
        if isinstance(site, dict):
            site["name"] = site["name"].replace("a", "<a>")
        else:
            sites[i] = site.replace("a", "<a>")
    text = json.dumps(given).replace('"a|b"', '"<a>|b"').replace('"b|a"', '"b|<a>"')
    drawn = tmp_path / "picture.svg"
    answer(command, text, tmp_path, capsys, "--picture", str(drawn))
    root = xml.etree.ElementTree.parse(drawn).getroot()
    assert root.tag.endswith("svg")
    # It needs nothing from elsewhere.
    assert "href" not in drawn.read_text()
    status, output, errors = run(
        command, INPUTS[command], tmp_path, capsys, "--picture", str(tmp_path / "picture.gif")
    )
    assert (status, output) == (2, "")
    assert errors.startswith(f"torch-resilient geo {command}: --picture: expected a name in .svg")


def test_pictures_of_plans_without_a_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "map.svg"
    few = {**SMALL, "sites": [{"name": "a", "gpus": 0}], "latency_ms": 0, "egress_gb": 0}
    found = answer("plan", few, tmp_path, capsys, "--picture", str(drawn))
    assert found["choice"] is None
    assert "no number of cells fits" in drawn.read_text()
    vary = [
        {"field": "policy", "values": ["best", "1f1b"]},
        {"field": "sharing", "values": ["temporal", "spatial"]},
    ]
    given = {"base": few, "vary": vary}
    answer("what-if", given, tmp_path, capsys, "--picture", str(drawn))
    xml.etree.ElementTree.parse(drawn)


def cell(**fields: Any) -> dict[str, Any]:
    return {**CELL, **fields}


def plan(**fields: Any) -> dict[str, Any]:
    return {**SMALL, **fields}


def bubbles(**fields: Any) -> dict[str, Any]:
    return {**BUBBLES, **fields}


def site(**fields: Any) -> dict[str, Any]:
    """The plan with another first site."""
    return {**SMALL, "sites": [{**SMALL["sites"][0], **fields}, SMALL["sites"][1]]}


def without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


THREE = [{"name": name, "gpus": 8} for name in "abc"]
NAN = float("nan")


@pytest.mark.parametrize(
    ("command", "given", "text"),
    [
        ("cell", "{", "input: not JSON: "),
        ("cell", [1], "input: expected a JSON object, got list"),
        ("cell", without(CELL, "tR"), "tR: missing"),
        ("cell", without(CELL, "wan_ms"), "wan_ms: missing"),
        ("cell", cell(tr=1), "tr: no such field"),
        ("cell", cell(stages=0), "stages: expected at least 1, got 0"),
        ("cell", cell(pipelines=2.5), "pipelines: expected an integer, got 2.5"),
        ("cell", cell(microbatches=10**9), "stages: 2 pipelines of 6 stages and 1000000000 micro"),
        ("cell", cell(tF=NAN), "tF: expected a finite number, not negative, got nan"),
        ("cell", cell(tB=-1), "tB: expected a finite number, not negative, got -1"),
        ("cell", cell(tW=[1, 2]), "tW: expected a number or 6 of them, one per stage, got 2"),
        ("cell", cell(tF=1e16), "tF: expected at most 1e+15 ms"),
        ("cell", cell(sites=["a"]), "sites: expected the names of 6 sites"),
        ("cell", cell(sites=["a", "a", "b", "b", "c", 3]), "sites[5]: expected a name, got 3"),
        ("cell", cell(wan_ms=float("inf")), "wan_ms: expected a finite number"),
        ("cell", cell(wan_ms={"1-2": 1}), "wan_ms: no value for hop 3-4, and no default"),
        ("cell", cell(wan_ms={"5-6": 1}), 'wan_ms: no such hop: 5-6; expected "0-1" to "4-5"'),
        ("cell", cell(wan_ms={"1-3": 1, "default": 1}), "wan_ms: no such hop: 1-3"),
        ("cell", cell(wan_ms={"1-2": [1], "default": 1}), "wan_ms.1-2: expected [activation, "),
        ("cell", cell(wan_ms={"1-2": [1, NAN], "default": 1}), "wan_ms.1-2[1]: expected a finite"),
        ("cell", cell(latency_ms="x"), "latency_ms: expected a number, got 'x'"),
        ("cell", cell(intra_ms={"0-1": 1}), "intra_ms: no value for hop 2-3, and no default"),
        ("cell", cell(sharing="fair"), "sharing: expected one of temporal, spatial, got 'fair'"),
        ("cell", cell(relays=0), "relays: expected at least 1, got 0"),
        ("cell", cell(relays=10**9), "relays: expected at most 1000000, got 1000000000"),
        ("cell", cell(cap=[1, 1]), "cap: expected a number or 6 of them"),
        ("cell", cell(policy="zb"), "policy: expected one of best, paper, varuna, 1f1b, gpipe"),
        ("cell", cell(policy="gpipe", cap=2), "policy: gpipe holds all 4 microbatches"),
        ("cell", cell(budget_ms=NAN), "budget_ms: expected a finite number"),
        ("plan", without(SMALL, "sites"), "sites: missing"),
        ("plan", without(SMALL, "wan_ms"), "node_gbps: missing, and so is wan_ms"),
        ("plan", plan(node_gbps=1), "wan_ms: give either wan_ms or node_gbps"),
        ("plan", plan(gpus=1), "gpus: no such field"),
        ("plan", plan(sites=[]), "sites: expected a list of sites"),
        ("plan", plan(sites=[3]), "sites[0]: expected an object, got 3"),
        ("plan", plan(sites=THREE * 30), "sites: expected at most 64, got 90"),
        ("plan", site(name="b"), "sites[1].name: b is there twice"),
        ("plan", site(name="a|c"), "sites[0].name: expected a name without |"),
        ("plan", site(gpus=-1), "sites[0].gpus: expected at least 0, got -1"),
        ("plan", site(gpus=10**12), "sites[0].gpus: expected at most 10000000"),
        ("plan", site(gpus=10**6), "sites: their GPUs are enough for 125001 cells"),
        ("plan", site(reserve=13), "sites[0].reserve: 13 of 12 GPUs"),
        ("plan", site(gpu_hour=-2), "sites[0].gpu_hour: expected a finite number, not negative"),
        ("plan", site(gpu_hour=NAN), "sites[0].gpu_hour: expected a finite number, not negative"),
        ("plan", site(price=1), "sites[0].price: no such field"),
        ("plan", plan(egress_gb=-1), "egress_gb: expected a finite number, not negative, got -1"),
        ("plan", plan(egress_gb={"a|x": 1}), "egress_gb.a|x: no such site: x"),
        ("plan", plan(egress_gb={"a|a": 1}), "egress_gb.a|a: expected two sites"),
        ("plan", plan(egress_gb={"a|b": -1}), "egress_gb.a|b: expected a finite number"),
        ("plan", without(SMALL, "activation_bytes"), "activation_bytes: missing, but egress_gb"),
        ("plan", plan(latency_ms={}), "latency_ms: no value for a|b, and no default"),
        (
            "plan",
            plan(sites=THREE, latency_ms={"a|b": 1, "c|a": 1}, egress_gb=0),
            "latency_ms: no value for b|c, and no default",
        ),
        ("plan", plan(wan_ms={"a|b": 1e16}), "wan_ms.a|b: expected at most 1e+15"),
        (
            "plan",
            {**without(SMALL, "wan_ms"), "node_gbps": 0},
            "node_gbps: expected a number above 0, got 0",
        ),
        (
            "plan",
            {**without(SMALL, "wan_ms"), "node_gbps": 1e-300},
            "node_gbps: a transfer from a to b would take",
        ),
        ("plan", without(SMALL, "lan_gbps"), "lan_gbps: missing, but parameters is there"),
        ("plan", plan(lan_gbps=0), "lan_gbps: expected a number above 0, got 0"),
        ("plan", plan(cell=0), "cell: expected at least 1, got 0"),
        ("plan", plan(partitions=10**6), "partitions: 2 pipelines of 1000000 stages"),
        ("plan", plan(order="size"), "order: expected one of given, gpus, search, got 'size'"),
        ("plan", plan(order=["a"]), "order: expected each of 2 sites once, got 1 names"),
        ("plan", plan(order=["a", "x"]), "order[1]: no such site: x"),
        (
            "plan",
            plan(
                sites=[{"name": str(i), "gpus": 1} for i in range(7)],
                order="search",
                latency_ms=0,
                egress_gb=0,
            ),
            "order: search compares the orders of at most 6 sites, got 7",
        ),
        ("plan", plan(tolerance=1.5), "tolerance: expected at most 1, got 1.5"),
        ("plan", plan(max_cells=0), "max_cells: expected at least 1, got 0"),
        ("plan", plan(policy="gpipe", cap=1), "policy: gpipe holds all 4 microbatches"),
        ("what-if", {"base": SMALL}, "vary: missing"),
        ("what-if", {**WHAT_IF, "base": plan(seconds=NAN)}, "input: NaN or infinity in a field"),
        ("what-if", {**WHAT_IF, "varies": 1}, "varies: no such field"),
        ("what-if", {**WHAT_IF, "base": plan(cell=0)}, "base.cell: expected at least 1, got 0"),
        ("what-if", {**WHAT_IF, "vary": []}, "vary: expected an object with field and values"),
        ("what-if", {**WHAT_IF, "vary": [1]}, "vary[0]: expected an object, got 1"),
        ("what-if", {**WHAT_IF, "vary": {"field": "cell"}}, "vary.values: missing"),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "cell", "values": 3}},
            "vary.values: expected a list, got 3",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "sites[2].gpus", "values": [1]}},
            "vary.field: base has no sites[2].gpus",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": [{"field": "wan_ms.a|b", "values": [1]}]},
            "vary[0].field: base has no wan_ms.a|b",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "", "values": [1]}},
            "vary.field: expected a field such as",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "cell", "values": [1, -1]}},
            "vary.values[1]: cell: expected at least 1, got -1",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "gpus", "values": [1]}},
            "vary.values[0]: gpus: no such field",
        ),
        (
            "what-if",
            {**WHAT_IF, "vary": {"field": "relays", "values": list(range(1, 1002))}},
            "vary: 1001 combinations are more than 1000",
        ),
        ("bubbles", [], "input: expected a JSON object, got list"),
        ("bubbles", without(BUBBLES, "cell"), "cell: missing"),
        ("bubbles", without(BUBBLES, "requests"), "requests: missing"),
        ("bubbles", without(BUBBLES, "prefill"), "prefill: missing"),
        ("bubbles", bubbles(guard=1), "guard: no such field"),
        ("bubbles", bubbles(cell=3), "cell: input: expected a JSON object, got int"),
        ("bubbles", bubbles(cell=cell(tF=-1)), "cell.tF: expected a finite number, not negative"),
        ("bubbles", bubbles(cell=cell(policy="gpipe", cap=2)), "cell.policy: gpipe holds all 4"),
        ("bubbles", bubbles(cells=0), "cells: expected at least 1, got 0"),
        ("bubbles", bubbles(cells=10**7), "cells: expected at most 1000000, got 10000000"),
        ("bubbles", bubbles(depth=0), "depth: expected at least 1, got 0"),
        ("bubbles", bubbles(depth=3), "depth: expected at most 2, got 3"),
        ("bubbles", bubbles(period_extra_ms=-1), "period_extra_ms: expected a finite number"),
        ("bubbles", bubbles(guard_ms=NAN), "guard_ms: expected a finite number"),
        ("bubbles", bubbles(max_wait_ms="8"), "max_wait_ms: expected a number, got '8'"),
        ("bubbles", bubbles(max_wait_ms=1e6), "max_wait_ms: expected at most 1000 periods"),
        ("bubbles", bubbles(site="d"), "site: no such site: 'd'"),
        ("bubbles", bubbles(site=["a"]), "site: no such site: ['a']"),
        ("bubbles", bubbles(requests={}), "requests: expected a list of [arrival_ms, tokens], got"),
        ("bubbles", bubbles(requests=[[1, 2], 3]), "requests[1]: expected [arrival_ms, tokens]"),
        ("bubbles", bubbles(requests=[[1]]), "requests[0]: expected [arrival_ms, tokens], got [1]"),
        ("bubbles", bubbles(requests=[[-1, 2]]), "requests[0][0]: expected a finite number, not"),
        ("bubbles", bubbles(requests=[[NAN, 2]]), "requests[0][0]: expected a finite number, not"),
        ("bubbles", bubbles(requests=[[1e12, 2]]), "requests[0][0]: expected at most 1e+11"),
        ("bubbles", bubbles(requests=[[1, 0]]), "requests[0][1]: expected at least 1, got 0"),
        ("bubbles", bubbles(requests=[[1, 2.5]]), "requests[0][1]: expected an integer, got 2.5"),
        ("bubbles", bubbles(requests=[[1, 2]] * 300_001), "requests: expected at most 300000, got"),
        ("bubbles", bubbles(prefill=3), "prefill: expected an object, got 3"),
        ("bubbles", bubbles(prefill={"base_ms": 1}), "prefill.per_token_ms: missing"),
        ("bubbles", bubbles(prefill={"per_token_ms": -1}), "prefill.per_token_ms: expected a fini"),
        ("bubbles", bubbles(prefill={"per_token_ms": 0}), "prefill: a prefill would take no time"),
        (
            "bubbles",
            bubbles(prefill={"per_token_ms": 1, "hops_ms": 1}),
            "prefill.hops_ms: no such field",
        ),
        (
            "bubbles",
            bubbles(cell=cell(tF=0, tR=0, tB=0, wan_ms=0), max_wait_ms=0),
            "period_extra_ms: expected more than 0",
        ),
        (
            "bubbles",
            bubbles(cell=cell(tF=1e-9, tR=0, tB=0, wan_ms=0), max_wait_ms=0, requests=[[90, 1]]),
            "requests[0][0]: expected at most 1000000000 periods",
        ),
    ],
)
def test_bad_input_is_named_in_one_line(
    command: str, given: object, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, output, errors = run(command, given, tmp_path, capsys)
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    assert errors.startswith(f"torch-resilient geo {command}: {text}")


def test_the_longest_times_are_still_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = cell(tF=1e15, tR=1e15, tB=1e15, wan_ms=1e15, latency_ms=1e15)
    answer("cell", long, tmp_path, capsys)
    nothing = cell(tF=0, tR=0, tB=0, wan_ms=0)
    assert answer("cell", nothing, tmp_path, capsys)["iteration_ms"] == 0
    answer("bubbles", bubbles(cell=long), tmp_path, capsys)
    free = plan(tF=0, tR=0, tB=0, wan_ms=0, latency_ms=0, parameters=0)
    answer("plan", free, tmp_path, capsys, "--picture", str(tmp_path / "map.svg"))


@pytest.mark.parametrize("command", INPUTS)
def test_it_runs_as_a_program_without_torch(command: str) -> None:
    """It reads standard input, in a process where an import of torch would fail."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import torch_resilient.geo, torch_resilient.geo.placement\n"
        "import torch_resilient.cli as cli\n"
        f"status = cli.main(['geo', {command!r}, '--json', '-'])\n"
        "assert sys.modules['torch'] is None\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(INPUTS[command]),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        # With 0, importing the package imports torch.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    json.loads(done.stdout)


def test_it_runs_where_nothing_is_compiled() -> None:
    """The same times, from the twin in Python."""
    program = (
        "import sys\n"
        "sys.modules['torch_resilient._planning'] = None\n"
        "import torch_resilient.cli as cli\n"
        "sys.exit(cli.main(['geo', 'cell', '--json', '-']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(CELL),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["iteration_ms"] == 34


@pytest.mark.parametrize("command", INPUTS)
def test_the_examples_run(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = {"plan": "geo_job"}.get(command, f"geo_{command.replace('-', '_')}")
    text = (ROOT / "examples" / f"{name}.json").read_text(encoding="utf-8")
    answer(command, text, tmp_path, capsys)


def test_the_document_shows_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The input, the table of rows, and the replicas."""
    document = (ROOT / "docs" / "geo.md").read_text(encoding="utf-8")
    job = json.loads((ROOT / "examples" / "geo_job.json").read_text(encoding="utf-8"))
    shown = document.partition("```json\n")[2].partition("```")[0]
    assert json.loads(shown) == job
    found = answer("plan", job, tmp_path, capsys)
    for row in found["rows"]:
        if not row["feasible"]:
            continue
        partitions = " + ".join(
            str(row["partitions"].get(each["name"], 0)) for each in job["sites"]
        )
        price = row["cost"] / (row["cells"] * job["cell"])
        line = (
            f"| {row['cells']} | {partitions} | {row['gpus']} | {row['total_ms']:.0f} | "
            f"{row['throughput'] * 1e3:.2f} | {price:.3f} |"
        )
        assert line in document
    assert found["choice"]["cells"] == 5
    assert f"{found['replicas'][-1]['throughput'] * 1e3:.2f} pipelines per second" in document
    base = json.loads((ROOT / "examples" / "geo_what_if.json").read_text(encoding="utf-8"))["base"]
    assert base == job


def test_the_document_shows_the_prefills(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = (ROOT / "docs" / "geo.md").read_text(encoding="utf-8")
    text = (ROOT / "examples" / "geo_bubbles.json").read_text(encoding="utf-8")
    found = answer("bubbles", text, tmp_path, capsys)
    before, after = found["utilisation_training"], found["utilisation"]
    line = (
        f"{len(found['placements'])} requests are placed, and `utilisation` grows from "
        f"{100 * before:.0f} to {100 * after:.0f} %."
    )
    assert line in document


@pytest.mark.parametrize("command", INPUTS)
def test_the_help_names_every_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["geo", command, "--help"])
    text = capsys.readouterr().out
    from torch_resilient.geo import bubbles_input, cell_input, plan_input, what_if

    module = {
        "bubbles": bubbles_input,
        "cell": cell_input,
        "plan": plan_input,
        "what-if": what_if,
    }[command]
    names = (
        *getattr(module, "PREFILL", ()),
        *module.REQUIRED,
        *getattr(module, "OPTIONAL", ()),
        *module.ADDED,
    )
    assert [name for name in names if name not in text] == []
