"""From a plan to ranks: places, layout, mesh, and ranks that run in the wrong site."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from torch_resilient._reports.topology import Topology
from torch_resilient.control.layout import Layout
from torch_resilient.geo.placement import Placement, RankPlace

# Two cells of two pipelines with two stages at a and one at b: 12 ranks.
PLAN: dict[str, Any] = {"cell": 2, "choice": {"cells": 2, "partitions": {"a": 2, "b": 1}}}
SITES = ("a",) * 8 + ("b",) * 4


def topology(sites: tuple[str, ...], declared: bool = True) -> Topology:
    return Topology(
        sites=sites, declared=declared, hosts=tuple(range(len(sites))), algorithm="auto"
    )


def test_places() -> None:
    placement = Placement.of(PLAN)
    assert placement.layout == Layout(((0, 1, 8), (2, 3, 9), (4, 5, 10), (6, 7, 11)))
    places = placement.places()
    assert [place.rank for place in places] == list(range(12))
    assert places[3] == RankPlace(3, cell=0, pipeline=1, stage=1, site="a")
    assert places[10] == RankPlace(10, cell=1, pipeline=0, stage=2, site="b")
    for stage, site in enumerate("aab"):
        group = placement.layout.data_group(stage)
        assert {SITES[rank] for rank in group} == {site}


def test_ranks_by_site() -> None:
    ranks = {"a": range(100, 120), "b": [7, 3, 5, 1]}
    placement = Placement.of(PLAN, ranks)
    assert placement.layout.ranks[1] == (102, 103, 3)
    with pytest.raises(ValueError, match="ranks: b has 2, the plan needs 4"):
        Placement.of(PLAN, {**ranks, "b": [1, 2]})
    with pytest.raises(ValueError, match="ranks: b has 0, the plan needs 4"):
        Placement.of(PLAN, {"a": ranks["a"]})
    with pytest.raises(ValueError, match="choice: the plan has none"):
        Placement.of({"cell": 2, "choice": None})


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="sites: expected 2, one per stage, got 1"):
        Placement(("a",), 1, Layout.of(2, 2))
    with pytest.raises(ValueError, match="pipelines: 3 replicas are no whole cells of 2"):
        Placement(("a", "a"), 2, Layout.of(3, 2))


def test_ranks_in_the_wrong_site_are_named() -> None:
    placement = Placement.of(PLAN)
    placement.require(topology(SITES))
    placement.require(topology((*SITES, "c")))  # one more rank, which the plan does not use
    swapped = list(SITES)
    swapped[3], swapped[9] = "b", ""
    with pytest.raises(ValueError, match="rank 3 is at b and not at a") as error:
        placement.require(topology(tuple(swapped)))
    assert "(cell 0, pipeline 1, stage 1)" in str(error.value)
    assert "rank 9 is at no site and not at b" in str(error.value)
    with pytest.raises(ValueError, match="the plan has rank 11, the group only 8 ranks"):
        placement.require(topology(SITES[:8]))
    with pytest.raises(ValueError, match="; 4 more: start the ranks"):
        placement.require(topology(tuple("ba"[site == "b"] for site in SITES)))


def test_inferred_sites_have_other_names() -> None:
    placement = Placement.of(PLAN)
    named = {"a": "site1", "b": "site0"}
    inferred = tuple(named[site] for site in SITES)
    placement.require(topology(inferred, declared=False))
    with pytest.raises(ValueError, match="rank 4 is at b and not at a"):
        placement.require(topology((*inferred[:4], "site0", *inferred[5:]), declared=False))
    # No sites are known.
    with pytest.raises(ValueError, match="rank 0 is at no site and not at a"):
        placement.require(topology(("",) * 12, declared=False))
    one_site = Placement.of({"cell": 2, "choice": {"cells": 1, "partitions": {"a": 3}}})
    one_site.require(topology(("",) * 6, declared=False))


def test_a_device_mesh() -> None:
    """In a process of its own, since it makes a default group."""
    program = f"""
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_resilient.geo.placement import Placement
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=12)
mesh = Placement.of({PLAN!r}).device_mesh()
assert mesh.mesh_dim_names == ("dp", "pp")
assert mesh.mesh.tolist() == [[0, 1, 8], [2, 3, 9], [4, 5, 10], [6, 7, 11]]
assert dist.get_process_group_ranks(mesh["dp"].get_group()) == [1, 3, 5, 7]
assert dist.get_process_group_ranks(mesh["pp"].get_group()) == [2, 3, 9]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
