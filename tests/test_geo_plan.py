"""The choice of sites: Algorithm 1, replicas, prices, variants, and what `bench` measured."""

from __future__ import annotations

import copy
import itertools
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_resilient.geo.cell_input import read_cell
from torch_resilient.geo.cell_policies import cell_time_ms
from torch_resilient.geo.dc_selection import Row, assign, cell_of, choose, select
from torch_resilient.geo.plan_input import read_job, solve_plan
from torch_resilient.geo.sites import Site, sites_from_bench
from torch_resilient.geo.what_if import solve_what_if

# GPT-A of the paper: 412 M parameters and 32 MiB of activations per partition, at 5 Gbit/s.
ACTIVATION_BYTES = 32 * 2**20
TRANSFER_MS = ACTIVATION_BYTES * 8 / 5e9 * 1e3


def gpt_a(pipelines: int, *gpus: int, **fields: Any) -> dict[str, Any]:
    """60 partitions whose forward takes 1/C of a transfer, as in the paper's simulations."""
    forward_ms = TRANSFER_MS / pipelines
    return {
        "sites": [
            {"name": "abcdefgh"[i], "gpus": count, "gpu_hour": 2} for i, count in enumerate(gpus)
        ],
        "cell": pipelines,
        "partitions": 60,
        "microbatches": 60,
        "tF": forward_ms,
        "tR": forward_ms,
        "tB": 2 * forward_ms,
        "activation_bytes": ACTIVATION_BYTES,
        "parameters": 412e6,
        "lan_gbps": 100,
        "node_gbps": 5,
        "latency_ms": 20,
        "egress_gb": 0.02,
        **fields,
    }


SMALL: dict[str, Any] = {
    "sites": [
        {"name": "a", "gpus": 12, "gpu_hour": 2},
        {"name": "b", "gpus": 10, "reserve": 2, "gpu_hour": 1},
    ],
    "cell": 2,
    "partitions": 4,
    "microbatches": 4,
    "tF": 10,
    "tR": 10,
    "tB": 20,
    "activation_bytes": 1e9,
    "parameters": 1e9,
    "lan_gbps": 80,
    "wan_ms": 20,
    "latency_ms": {"a|b": 5},
    "egress_gb": {"a|b": 0.1, "b|a": 0.3},
}


def literal(sites: list[tuple[str, int]], d: int, c: int, p: int) -> dict[str, int] | None:
    """Algorithm 1 of the paper, line by line; None where the time is infinite."""
    part_left, partitions = p, {}
    for dc, num_gpu in sites:
        pp_gpu = num_gpu // (d * c)
        part_assigned = min(part_left, pp_gpu)
        partitions[dc] = part_assigned
        part_left -= part_assigned
        if part_left == 0:
            break
    return None if part_left > 0 else {dc: n for dc, n in partitions.items() if n}


@settings(max_examples=200, deadline=None, print_blob=True)
@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=5),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_sites_are_filled_as_in_algorithm_1(
    gpus: list[int], cells: int, pipelines: int, partitions: int
) -> None:
    """Paper: ATLAS §4.5, Algorithm 1."""
    sites = [Site(f"site {i}", count) for i, count in enumerate(gpus)]
    found = assign(sites, cells * pipelines, partitions)
    expected = literal([(s.name, s.gpus) for s in sites], cells, pipelines, partitions)
    if expected is None:
        assert sum(found.values()) < partitions
    else:
        assert found == expected


def test_a_plan_in_numbers() -> None:
    output, job, selection = solve_plan(SMALL)
    assert [row["cells"] for row in output["rows"]] == [1, 2]
    one, two = output["rows"]
    # Site a, which is larger, holds one cell alone.
    assert (one["partitions"], one["wan_hops"], one["gpus"], one["stranded"]) == (
        {"a": 4},
        0,
        8,
        12,
    )
    assert one["cost"] == pytest.approx(8 * 2 * one["total_ms"] / 3.6e6)
    assert (two["partitions"], two["wan_hops"]) == ({"a": 3, "b": 1}, 1)
    assert (two["gpus"], two["stranded"]) == (16, 4)
    # 4 P (N - 1) / (N BW), with 10 GB/s.
    assert [row["allreduce_ms"] for row in output["rows"]] == [
        pytest.approx(4e9 * (n - 1) / (n * 1e10) * 1e3) for n in (2, 4)
    ]
    for row in output["rows"]:
        assert row["total_ms"] == row["pipeline_ms"] + row["allreduce_ms"]
        assert row["throughput"] == row["cells"] * 2 / row["total_ms"]
    # Four pipelines send four microbatches of 1 GB each way.
    assert two["egress_bytes"] == 2 * 4 * 4 * 1e9
    assert two["cost"] == pytest.approx(
        (12 * 2 + 4 * 1) * two["total_ms"] / 3.6e6 + 16 * (0.1 + 0.3)
    )
    assert output["choice"] == two
    assert output["order"] == ["a", "b"]
    assert "replicas" not in output  # node_gbps is not known
    assert {name: output[name] for name in SMALL if name != "order"} == SMALL
    # The time is that of a schedule of `geo cell`.
    row = selection.rows[1]
    asked = read_cell(
        {
            "pipelines": 2,
            "stages": 4,
            "microbatches": 4,
            "tF": 10,
            "tR": 10,
            "tB": 20,
            "sites": ["a", "a", "a", "b"],
            "wan_ms": 20,
            "latency_ms": 5,
        }
    )
    assert asked.cell == cell_of(job, row)
    assert cell_time_ms(*asked) == row.pipeline_ms
    # The output can be input again.
    again, _, _ = solve_plan(output)
    assert (again["rows"], again["order"]) == (output["rows"], output["order"])


def test_rows_that_do_not_fit() -> None:
    sites = [{"name": name, "gpus": 7} for name in "abc"]
    output, _, _ = solve_plan({**SMALL, "sites": sites, "latency_ms": 0, "egress_gb": 0})
    # 21 GPUs are enough for two cells of 8, but every site loses three of them.
    assert [row["feasible"] for row in output["rows"]] == [True, False]
    assert output["rows"][1] == asdict(Row(2, False, {"a": 1, "b": 1, "c": 1}, stranded=21))
    few, _, _ = solve_plan(
        {**SMALL, "sites": [{"name": "a", "gpus": 7}], "latency_ms": 0, "egress_gb": 0}
    )
    assert (len(few["rows"]), few["choice"]) == (1, None)


def test_the_fewest_cells_within_the_tolerance() -> None:
    rows = [Row(i + 1, True, {}, throughput=each) for i, each in enumerate((1.0, 1.97, 2.0, 2.0))]
    assert choose(rows, 0) == rows[2]
    assert choose(rows, 0.02) == rows[1]
    assert choose(rows, 1) == rows[0]
    assert choose([Row(1, False, {})], 0) is None


@pytest.mark.parametrize("policy", ["best", "paper", "1f1b"])
def test_orders_of_sites(policy: str) -> None:
    sites = [{"name": "a", "gpus": 8}, {"name": "b", "gpus": 16}, {"name": "c", "gpus": 12}]
    fields = {
        **SMALL,
        "sites": sites,
        "policy": policy,
        "wan_ms": {"a|b": 90, "b|c": 15, "default": 40},
        "latency_ms": 0,
        "egress_gb": 0,
    }
    found = {}
    for order in ("given", "gpus", "search"):
        output, _, _ = solve_plan({**fields, "order": order})
        found[order] = output["choice"]["throughput"], output["order"]
    assert found["given"][1] == ["a", "b", "c"]
    assert found["gpus"][1] == ["b", "c", "a"]
    # The search finds the best of all.
    best = max(
        solve_plan({**fields, "order": list(order)})[0]["choice"]["throughput"]
        for order in itertools.permutations("abc")
    )
    assert found["search"][0] == best


def test_asymmetric_pairs() -> None:
    """ "a|b" is the way of activations if a comes first, "b|a" that of gradients."""
    job = read_job({**SMALL, "wan_ms": {"a|b": 20, "b|a": 30}, "latency_ms": {"b|a": 7}})
    cell = cell_of(job, select(job).rows[1])
    assert cell.hop_ms[2] == (20, 30)
    assert cell.latency_ms[2] == (7, 7)


@pytest.mark.parametrize(
    ("pipelines", "microbatches", "across", "replicas"),
    [(2, 16, 7.2, 7.4), (2, 60, 4.28, 4.35), (4, 16, 12.5, 14.03), (4, 60, 7.25, 8.44)],
)
def test_pipelines_or_replicas(
    pipelines: int, microbatches: int, across: float, replicas: float
) -> None:
    """Five sites of 600 GPUs, in pipelines per second: replicas win where a site holds some."""
    fields = gpt_a(pipelines, 600, 600, 600, 600, 600, microbatches=microbatches)
    output, _, _ = solve_plan({**fields, "max_cells": 25})
    assert output["choice"]["throughput"] * 1e3 >= across - 0.005
    last = output["replicas"][-1]
    assert last["sites"] == dict.fromkeys("abcde", 10)
    assert last["throughput"] * 1e3 == pytest.approx(replicas, abs=0.005)
    # GB of a pipeline in each site.
    assert last["egress_bytes"] / 50 / 1e9 == pytest.approx(7.9, abs=0.02)


def test_replicas_in_numbers() -> None:
    fields = {**SMALL, "node_gbps": {"a|b": 8, "b|a": 4}, "partitions": 2, "activation_bytes": 1}
    del fields["wan_ms"]
    alone, both = solve_plan(fields)[0]["replicas"]
    assert (alone["sites"], alone["egress_bytes"]) == ({"a": 6}, 0)
    assert both["sites"] == {"a": 6, "b": 4}
    # Within the larger site, then 2 P bytes over the nodes of the smaller one at 0.5 GB/s.
    within_ms = 4e9 * 5 / 6 / 1e10 * 1e3
    assert alone["allreduce_ms"] == pytest.approx(within_ms)
    assert both["allreduce_ms"] == pytest.approx(within_ms + 2e9 / 4 / 0.5e9 * 1e3 + 2 * 5)
    assert both["total_ms"] == both["pipeline_ms"] + both["allreduce_ms"]
    assert both["throughput"] == pytest.approx(10 / both["total_ms"])
    assert both["egress_bytes"] == 2 * 2e9 * 2
    gpu_price = (12 * 2 + 8 * 1) * both["total_ms"] / 3.6e6
    assert both["cost"] == pytest.approx(gpu_price + 4 * (0.1 + 0.3))


def test_replicas_exchange_in_a_ring_or_directly() -> None:
    """With three sites, each node sends half of the ring's bytes to each of the two others."""
    sites = [{"name": name, "gpus": 4} for name in "abc"]
    egress = {"a|b": 1.0, "b|c": 2.0, "a|c": 4.0}
    fields = {**SMALL, "sites": sites, "node_gbps": 8, "latency_ms": 5, "egress_gb": egress}
    fields |= {"partitions": 2, "activation_bytes": 1, "order": "given"}
    del fields["wan_ms"]
    ring, direct = (
        solve_plan({**fields, "exchange": exchange})[0]["replicas"]
        for exchange in ("ring", "direct")
    )
    assert solve_plan(fields)[0]["replicas"] == ring
    assert direct[:2] == ring[:2]  # of two sites, each sends to the other one
    saved_ms = 4 / 3 * 2e9 / 2 / 1e9 * 1e3 / 2
    assert ring[2]["allreduce_ms"] - direct[2]["allreduce_ms"] == pytest.approx(saved_ms)
    assert direct[2]["egress_bytes"] == ring[2]["egress_bytes"]
    # Once around, or half as much over each pair in both directions. GPUs cost nothing here.
    for row in (ring, direct):
        assert row[2]["cost"] == pytest.approx(4 / 3 * 2 * 2 * (1 + 2 + 4))
    with pytest.raises(ValueError, match=r"^exchange: "):
        solve_plan({**fields, "exchange": "tree"})


def test_steps_at_whole_cells() -> None:
    """Paper: ATLAS, Figure 12: 10 % more GPUs give nothing, 20 to 30 % the same."""
    base = gpt_a(2, 600, 0, order="given", max_cells=10)
    shares = [0, 60, 120, 180, 600]
    given = {"base": base, "vary": {"field": "sites[1].gpus", "values": shares}}
    points = solve_what_if(given)[0]["points"]
    speed = [point["choice"]["throughput"] for point in points]
    assert speed[0] == speed[1] < speed[2] == speed[3] < speed[4]
    assert points[1]["choice"]["partitions"] == {"a": 60}
    assert speed[4] / speed[0] > 1.9


def test_more_sites_help() -> None:
    """Paper: ATLAS, Figure 11: five sites over one, C = 4 and 2: 4.7 and 4.3 times."""
    for pipelines, at_least in ((4, 4.7), (2, 4.3)):
        one = select(read_job(gpt_a(pipelines, 600))).choice
        five = select(read_job(gpt_a(pipelines, 600, 600, 600, 600, 600))).choice
        assert one is not None
        assert five is not None
        assert five.throughput / one.throughput >= at_least


def test_what_if_combines_fields() -> None:
    base = copy.deepcopy(SMALL)
    vary = [
        {"field": "sites[1].gpus", "values": [4, 10]},
        {"field": "egress_gb.a|b", "values": [0, 1]},
        {"field": "relays", "values": [4]},
    ]
    output, points = solve_what_if({"base": base, "vary": vary, "points": "of an earlier output"})
    assert [point["values"] for point in output["points"]] == [
        [4, 0, 4],
        [4, 1, 4],
        [10, 0, 4],
        [10, 1, 4],
    ]
    assert base == SMALL
    assert output["base"] == SMALL
    assert len(points) == 4
    assert output["points"][2]["choice"]["cost"] < output["points"][3]["choice"]["cost"]
    assert output["points"][0]["replicas"] is None


def link(source: int, destination: int, round_trip_s: float, rate: float) -> dict[str, Any]:
    return {
        "from": source,
        "to": destination,
        "round_trip_s": 2 * round_trip_s,
        "round_trip_min_s": round_trip_s,
        "goodput_bytes_per_s": rate,
    }


def measured(place: list[int]) -> dict[str, Any]:
    """Ranks in these places: 0.2 ms and 1 GB/s within, 40 ms and 0.1 GB/s between them."""
    return {
        "hosts": [f"host{rank}" for rank in range(len(place))],
        "links": [
            link(a, b, 0.0002, 1e9) if place[a] == place[b] else link(a, b, 0.04, 1e8)
            for a, b in itertools.permutations(range(len(place)), 2)
        ],
    }


def test_sites_of_a_bench() -> None:
    found = sites_from_bench(measured([0, 1, 0]))
    assert found == {
        "sites": [{"name": "site0", "gpus": 2}, {"name": "site1", "gpus": 1}],
        "node_gbps": {"site0|site1": 0.8, "site1|site0": 0.8},
        "latency_ms": {"site0|site1": 20, "site1|site0": 20},
        "lan_gbps": 8,
    }
    assert sites_from_bench(measured([0, 1]), ["x", "y"])["sites"][1]["name"] == "y"
    fields = {key: SMALL[key] for key in ("cell", "microbatches", "tF", "tR", "tB")}
    job = read_job({**fields, **found, "partitions": 1, "activation_bytes": 1e8})
    assert job.wan_ms("site0", "site1") == 1000


@pytest.mark.parametrize(
    ("given_bench", "text"),
    [
        ([], "bench: expected the output of"),
        ({"hosts": ["a", "b"], "links": []}, "bench: expected 2 links, got 0"),
        ({"hosts": ["a"], "links": [{"from": 0, "to": 7}]}, "bench: expected the output of"),
        (
            {"hosts": ["a", "b"], "links": [{"from": 0, "to": 1, "error": "timeout"}]},
            "bench: the link from rank 0 to rank 1 was not measured",
        ),
        (
            {"hosts": ["a", "b"], "links": [link(0, 1, float("nan"), 1), link(1, 0, 1, 1)]},
            "bench: expected a finite number",
        ),
    ],
)
def test_benches_that_cannot_be_used(given_bench: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        sites_from_bench(given_bench)
    with pytest.raises(ValueError, match="sites: 3, but the ranks of the bench are at 2"):
        sites_from_bench(measured([0, 1]), ["x", "y", "z"])
