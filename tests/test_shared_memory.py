"""Ranks on one host: what goes through shared memory, and what does not."""

from __future__ import annotations

import os
import resource
import sys
import tempfile

import torch
import torch.distributed as dist
from harness import make_store, run_ranks, wait_until

from torch_resilient import PathStats, faults, stats

OFF = {"TORCH_RESILIENT_SHARED_MEMORY": "0"}


def paths() -> tuple[list[PathStats], list[PathStats]]:
    """To the one peer: shared memory, and connections."""
    found = stats().peers[0].paths
    return [p for p in found if p.kind == "shm"], [p for p in found if p.kind == "tcp"]


def exchange(rank: int, size: int = 1 << 20) -> None:
    data = torch.full((size,), rank + 1.0)
    dist.all_reduce(data)
    assert bool((data == 3).all())


def wait_until_shared() -> None:
    def shared() -> bool:
        exchange(dist.get_rank(), 1)
        mine = torch.tensor([bool(paths()[0])])
        dist.all_reduce(mine, dist.ReduceOp.MIN)
        return bool(mine)

    wait_until(shared, "memory is shared")


def carried(rank: int) -> tuple[int, int]:
    """Bytes that the memory and the connections carried of 4 MiB, once the memory is there."""
    wait_until_shared()
    before = [sum(p.bytes_sent for p in kind) for kind in paths()]
    exchange(rank)
    after = [sum(p.bytes_sent for p in kind) for kind in paths()]
    dist.barrier()  # no rank leaves before
    return after[0] - before[0], after[1] - before[1]


def test_memory_carries_all_on_one_host() -> None:
    for memory, connections in run_ranks(carried):
        assert memory >= 1 << 21
        assert connections == 0


def test_small_rings_do() -> None:
    for memory, _ in run_ranks(carried, env={"TORCH_RESILIENT_SHARED_RING_BYTES": "16384"}):
        assert memory >= 1 << 21


def without(rank: int) -> int:
    exchange(rank)
    found = len(paths()[0])
    dist.barrier()
    return found


def test_it_can_be_turned_off() -> None:
    assert run_ranks(without, env=OFF) == [0, 0]


def with_a_rule(rank: int) -> None:
    wait_until_shared()
    dist.barrier()
    # One end's rule is enough: it stands for the network between the two.
    slow = faults.delay(0.001) if rank == 0 else None
    wait_until(lambda: paths()[0][0].state == "reserve", "the memory is avoided")
    dist.barrier()
    before = sum(p.bytes_sent for p in paths()[0])
    exchange(rank)
    assert sum(p.bytes_sent for p in paths()[0]) == before
    dist.barrier()
    if slow is not None:
        slow.clear()
    wait_until(lambda: paths()[0][0].state == "up", "the memory is used again")
    dist.barrier()
    before = sum(p.bytes_sent for p in paths()[0])
    exchange(rank)
    assert sum(p.bytes_sent for p in paths()[0]) > before
    dist.barrier()


def test_fault_rules_stand_for_a_network() -> None:
    run_ranks(with_a_rule)


def where_it_cannot_be_made(rank: int) -> tuple[int, str]:
    log = tempfile.TemporaryFile()  # noqa: SIM115
    os.dup2(log.fileno(), sys.stderr.fileno())
    # Less than the two rings need.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    # The first message of either makes the memory: both must have the limit before.
    store = make_store("limits")
    store.set(f"set/{rank}", "")
    store.wait(["set/0", "set/1"])
    for _ in range(3):
        exchange(rank)
    found = len(paths()[0])
    dist.barrier()
    log.seek(0)
    return found, log.read().decode()


def test_connections_do_where_memory_cannot_be_shared() -> None:
    found, logs = zip(*run_ranks(where_it_cannot_be_made), strict=True)
    assert found == (0, 0)
    lines = "".join(logs).splitlines()
    assert len(lines) == 1, lines  # of the one that was to make it
    assert "cannot share memory, and use connections" in lines[0]
    assert "File too large" in lines[0]
