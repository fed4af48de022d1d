"""Collectives over sites and hosts: results, bits, bytes across the border, and refusals.

All ranks run on this machine; each says which site it is at. Every rank can compute the input of
every rank. Exact results must match bit for bit, rounded sums must be close to the float64
result; all results must have the same bits on all ranks and in every run.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_oracle import (
    AVG,
    MAX,
    SUM,
    Checks,
    assert_good,
    bits,
    generator,
    joined,
    reduced,
    small,
)
from harness import error_of, init_group, make_store, on_gloo, run_ranks, wait_until, world_size

import torch_resilient
from torch_resilient import faults
from torch_resilient._reports.topology import clusters

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo knows no sites")

# The site of each rank: two of two, uneven, a site of one, interleaved, three sites.
SHAPES = ["aabb", "aaab", "abab", "abbca"]
ELEMENTS = [(1,), (2,), (3, 5), (257,), (70001,), (1 << 20,)]


def join(rank: int, sites: str, algorithm: str = "auto") -> None:
    """Initialises the default group; '.' declares no site."""
    if sites[rank] != ".":
        os.environ["TORCH_RESILIENT_SITE"] = sites[rank]
    os.environ["TORCH_RESILIENT_COLLECTIVE_ALGORITHM"] = algorithm
    init_group()


def values(shape: tuple[int, ...], dtype: torch.dtype, *key: object) -> torch.Tensor:
    return (torch.rand(shape, generator=generator(*key)) * 2 - 1).to(dtype)


def everything(rank: int, sites: str, algorithm: str) -> Any:
    join(rank, sites, algorithm)
    checks, size = Checks(), world_size()
    assert torch_resilient.topology().sites == tuple(sites)
    for dtype, shape in itertools.product([torch.float32, torch.bfloat16, torch.int64], ELEMENTS):
        case = f"{dtype} {shape}"
        exact = [small(shape, dtype, "e", r, shape) for r in range(size)]
        for op in (SUM, MAX):
            got = exact[rank].clone()
            dist.all_reduce(got, op)
            checks.equal(got, reduced(exact, op), f"all_reduce {op} {case}")
        root = shape[0] % size
        got = exact[rank].clone()
        dist.reduce(got, root)
        checks.equal(got, reduced(exact, SUM) if rank == root else exact[rank], f"reduce {case}")
        want = bits(shape, dtype, "b", shape)
        got = want.clone() if rank == root else torch.empty_like(want)
        dist.broadcast(got, root)
        checks.equal(got, want, f"broadcast {case}")

        got = torch.empty_like(exact[0])
        dist.reduce_scatter_tensor(got, torch.cat([t * 1 for t in [exact[rank]] * size]))
        checks.equal(got, reduced(exact, SUM), f"reduce_scatter_tensor {case}")
        mine = bits(shape, dtype, "g", rank, shape)
        got = torch.empty(size * shape[0], *shape[1:], dtype=dtype)
        dist.all_gather_into_tensor(got, mine)
        whole = joined([bits(shape, dtype, "g", r, shape) for r in range(size)])
        checks.equal(got, whole.reshape(got.shape), f"all_gather_into_tensor {case}")
        dist.barrier()

        if not dtype.is_floating_point:
            continue
        rough = [values(shape, dtype, "v", r, shape) for r in range(size)]
        for op, factor in [(SUM, 1.0), (AVG, 1.0), (dist._make_nccl_premul_sum(0.25), 0.25)]:
            if factor != 1 and dtype != torch.float32:
                continue
            results = []
            for _ in range(2):
                got = rough[rank].clone()
                dist.all_reduce(got, op)
                results.append(got)
            oracle = reduced([t * factor for t in rough], AVG if op == AVG else SUM)
            checks.close(results[0], oracle, f"all_reduce {op} {case}")
            checks.equal(results[1], results[0], f"all_reduce {op} {case}, run again")
            checks.on_all_ranks(results[0])
    dist.destroy_process_group()
    return checks.report()


@pytest.mark.parametrize("sites", SHAPES)
@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_every_collective_over_sites(sites: str, algorithm: str) -> None:
    reports = run_ranks(everything, sites, algorithm, world_size=len(sites), init=False)
    assert_good(reports, 100)


def summed(rank: int, sites: str, algorithm: str, count: int) -> bytes:
    join(rank, sites, algorithm)
    tensor = values((count,), torch.float32, "bits", rank)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.numpy().tobytes()


def test_the_bits_are_those_of_the_places_or_of_the_flat_algorithm() -> None:
    """The order is ((0 + 1) + 2) + 3 or (0 + 1) + (2 + 3), whatever the sites of the ranks."""
    count = 100003
    inputs = [values((count,), torch.float32, "bits", r) for r in range(4)]
    flat = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    paired = (inputs[0] + inputs[1]) + (inputs[2] + inputs[3])
    crossed = (inputs[0] + inputs[2]) + (inputs[1] + inputs[3])
    uneven = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    for sites, algorithm, want in [
        ("....", "auto", flat),
        ("aabb", "flat", flat),
        ("aabb", "auto", paired),
        ("aabb", "hierarchical", paired),
        ("abab", "auto", crossed),
        ("aaab", "auto", uneven),
    ]:
        got = run_ranks(summed, sites, algorithm, count, world_size=4, init=False)
        assert all(x == want.numpy().tobytes() for x in got), (sites, algorithm)


def crossing(rank: int, sites: str, count: int) -> dict[str, tuple[int, int]]:
    """Bytes that this rank has written to ranks of other sites, headers and all."""
    join(rank, sites)
    size = world_size()

    def written() -> int:
        return sum(
            path.bytes_sent
            for peer in torch_resilient.stats().peers
            if sites[peer.rank] != sites[rank]
            for path in peer.paths
        )

    def sent(operation: Any) -> int:
        dist.barrier()
        before = written()
        operation()
        dist.barrier()
        return written() - before

    big, part = torch.ones(count), torch.ones(count // size)
    whole = torch.ones(count // size * size)
    result = {
        "all_reduce": sent(lambda: dist.all_reduce(big)),
        "reduce_scatter": sent(lambda: dist.reduce_scatter_tensor(part, whole)),
        "all_gather": sent(lambda: dist.all_gather_into_tensor(whole, part)),
        "broadcast": sent(lambda: dist.broadcast(big, 0)),
        "reduce": sent(lambda: dist.reduce(big, 0)),
    }
    dist.destroy_process_group()
    return result


@pytest.mark.parametrize("sites", ["aabb", "aaab", "abab"])
def test_bytes_cross_the_border_once_and_from_all_hands(sites: str) -> None:
    count = 1 << 21
    whole = count * 4
    ranks = run_ranks(crossing, sites, count, world_size=4, init=False)
    for site in "ab":
        home = [r for r in range(4) if sites[r] == site]
        parts = len(home) / 4 * whole  # of reduce-scatter and all-gather
        for operation, least in {
            "all_reduce": whole,
            "reduce_scatter": whole - parts,
            "all_gather": parts,
            "broadcast": whole if site == sites[0] else 0,
            "reduce": 0 if site == sites[0] else whole,
        }.items():
            sent = [ranks[r][operation] for r in home]
            small_change = 64 << 10  # barriers, acknowledgements
            assert least * 0.99 <= sum(sent) <= 1.02 * least + small_change, (operation, sent)
            assert max(sent) <= 1.02 * least / len(home) + small_change, (operation, sent)


def after_joining(rank: int, sites: str, algorithms: list[str]) -> str:
    def work() -> None:
        join(rank, sites, algorithms[rank])
        dist.all_reduce(torch.ones(3))

    return error_of(work)


def test_sites_of_some_ranks_only_fail_on_all() -> None:
    for error in run_ranks(after_joining, "a.b", ["auto"] * 3, world_size=3, init=False):
        assert "ranks 0, 2 declared a site (rank 0 on " in error
        assert "rank 1 did not (rank 1 on " in error
        assert "TORCH_RESILIENT_SITE on all ranks or on none" in error


def test_different_algorithms_fail_on_all() -> None:
    choices = ["auto", "flat", "auto"]
    for error in run_ranks(after_joining, "aab", choices, world_size=3, init=False):
        assert 'collective_algorithm is "' in error
        assert "TORCH_RESILIENT_COLLECTIVE_ALGORITHM alike on all ranks" in error


def misnamed(rank: int) -> str:
    os.environ["TORCH_RESILIENT_SITE"] = "north pole"
    return error_of(init_group)


def test_a_bad_site_is_refused_at_once() -> None:
    for error in run_ranks(misnamed, init=False):
        assert 'site="north pole" (TORCH_RESILIENT_SITE): expected up to 64 letters' in error


def with_options_for_sites(rank: int, folder: str) -> str:
    """Returns the standard error of a rank."""
    os.environ["TORCH_RESILIENT_WAN_RATE_LIMIT"] = "*=1G, bb=900M"
    os.environ["TORCH_RESILIENT_WAN_DSCP"] = "b=8"
    path = Path(folder, str(rank))
    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    join(rank, "aab")
    wait_until(lambda: '"bb"' in path.read_text(), "warning")
    return path.read_text()


def test_sites_in_options_where_nobody_is_are_told(tmp_path: Path) -> None:
    for text in run_ranks(with_options_for_sites, str(tmp_path), world_size=3, init=False):
        warnings = [line for line in text.splitlines() if " names the site " in line]
        assert len(warnings) == 1, text
        assert 'TORCH_RESILIENT_WAN_RATE_LIMIT names the site "bb", where no rank is' in text
        assert "TORCH_RESILIENT_SITE of the ranks: a, b" in text


def absent(rank: int) -> str:
    join(rank, "aabb", "hierarchical")
    store = make_store("test")
    if rank == 3:
        store.wait(["failed/0", "failed/1", "failed/2"])  # its own end must not be the cause
        return ""
    error = error_of(lambda: dist.all_reduce(torch.ones(100000)))
    store.set(f"failed/{rank}", "")
    return error


def test_a_rank_that_does_not_call_is_named() -> None:
    errors = run_ranks(absent, world_size=4, init=False, group_timeout_s=4)
    for error in errors[:3]:
        assert "not called by all: rank 3" in error, error


def subgroups(rank: int) -> Any:
    """A group sees only the sites of its own members, not all four of the default group."""
    join(rank, "abba", "hierarchical")
    group = dist.new_group([0, 2, 3])
    if rank != 1:
        assert torch_resilient.topology(group).sites == ("a", "b", "a")
        inputs = [values((1000,), torch.float32, "sub", r) for r in range(4)]
        got = inputs[rank].clone()
        dist.all_reduce(got, group=group)
        assert torch.equal(got, (inputs[0] + inputs[3]) + inputs[2])
    dist.barrier()
    dist.destroy_process_group()


def test_a_subgroup_has_its_own_places() -> None:
    run_ranks(subgroups, world_size=4, init=False)


def alone(rank: int) -> None:
    join(rank, "ab", "hierarchical")
    for each in range(2):
        group = dist.new_group([each])
        if rank == each:
            found = torch_resilient.topology(group)
            assert (found.sites, found.hosts) == (("ab"[rank],), (0,))
    dist.barrier()
    dist.destroy_process_group()


def test_a_group_of_one_rank_has_a_place() -> None:
    run_ranks(alone, world_size=2, init=False)


# ---- nothing declared ---------------------------------------------------------------------------


def test_clusters_by_round_trip() -> None:
    near, far = 0.0002, 0.04
    rows = [[near if i % 2 == j % 2 else far for j in range(5)] for i in range(5)]
    assert clusters(rows, 0.003) == [0, 1, 0, 1, 0]
    assert clusters(rows, 0.1) == [0] * 5
    assert clusters(rows, 0.0001) == list(range(5))
    # Clusters form through other ranks, and if only one of two has measured the delay.
    inf = float("inf")
    chain = [[0, near, far], [inf, 0, inf], [far, near, 0]]
    assert clusters(chain, 0.003) == [0, 0, 0]
    assert clusters([], 1) == []


def measured(rank: int) -> list[str]:
    join(rank, "....")
    count = 100003
    inputs = [values((count,), torch.float32, "bits", r) for r in range(4)]
    flat = ((inputs[0] + inputs[1]) + inputs[2]) + inputs[3]
    crossed = (inputs[0] + inputs[2]) + (inputs[1] + inputs[3])
    for peer in range(4):
        if peer % 2 != rank % 2:
            faults.delay(0.02, peer=peer)
    before = inputs[rank].clone()
    dist.all_reduce(before)
    assert torch.equal(before, flat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's too, of what it gives up
        sites = torch_resilient.group_by_round_trip(every_rank=True)
    assert torch_resilient.topology().sites == tuple(sites)
    after = inputs[rank].clone()
    dist.all_reduce(after)
    assert torch.equal(after, crossed)
    # One host: nothing to measure, nothing changed.
    group = dist.new_group()
    assert torch_resilient.group_by_round_trip(group) == [""] * 4
    assert "site_s" in error_of(lambda: torch_resilient.group_by_round_trip(site_s=0))
    dist.destroy_process_group()
    return sites


def test_sites_are_found_by_round_trip() -> None:
    sites = ["site0", "site1", "site0", "site1"]
    assert run_ranks(measured, world_size=4, init=False) == [sites] * 4


def declared(rank: int) -> list[str]:
    join(rank, "aab")
    sites = torch_resilient.group_by_round_trip()
    dist.destroy_process_group()
    return sites


def test_declared_sites_are_not_measured() -> None:
    assert run_ranks(declared, world_size=3, init=False) == [["a", "a", "b"]] * 3
