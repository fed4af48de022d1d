"""Traffic classes: urgent messages pass bulk ones, and bulk never stands still."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks

import torch_resilient

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo has no traffic classes")

# Slow enough that megabytes queue up, fast enough for a test.
LINK_BYTES_PER_S = 8e6
BULK_ELEMENTS = 1 << 21  # 8 MiB: one second on that link


def urgent_behind_bulk(rank: int, urgent_class: str) -> list[str]:
    """Rank 0 sends bulk, then a small message; rank 1 returns the order of their completion."""
    dist.barrier()
    if rank == 0:
        with torch_resilient.faults.limit(LINK_BYTES_PER_S, peer=1):
            with torch_resilient.traffic_class("bulk"):
                works = [dist.isend(torch.ones(BULK_ELEMENTS), 1, tag=1)]
            with torch_resilient.traffic_class(urgent_class):
                works.append(dist.isend(torch.ones(1000), 1, tag=2))
            for work in works:
                assert work is not None
                work.wait()
            dist.barrier()
        return []
    bulk, urgent = torch.zeros(BULK_ELEMENTS), torch.zeros(1000)
    works = {"bulk": dist.irecv(bulk, 0, tag=1), "urgent": dist.irecv(urgent, 0, tag=2)}
    order: list[str] = []
    if urgent_class == "bulk":
        works["bulk"].wait()
        order = ["bulk", "urgent"] if not works["urgent"].is_completed() else []
        works["urgent"].wait()
        order = order or ["bulk and urgent"]
    else:
        works["urgent"].wait()
        order = ["urgent", "bulk"] if not works["bulk"].is_completed() else ["bulk first"]
        works["bulk"].wait()
    assert bool((bulk == 1).all())
    assert bool((urgent == 1).all())
    dist.barrier()
    return order


@pytest.mark.parametrize("urgent_class", ["activation", "activation_gradient", "gradient"])
def test_a_higher_class_passes_a_lower_one(urgent_class: str) -> None:
    assert run_ranks(urgent_behind_bulk, urgent_class, world_size=2)[1] == ["urgent", "bulk"]


def test_within_a_class_the_first_goes_first() -> None:
    assert run_ranks(urgent_behind_bulk, "bulk", world_size=2)[1][0].startswith("bulk")


def bulk_under_load(rank: int) -> bool:
    """Activations without end in front of one bulk message: it must arrive all the same."""
    dist.barrier()
    if rank == 0:
        with torch_resilient.traffic_class("bulk"):
            bulk = dist.isend(torch.ones(1 << 18), 1, tag=1)
        assert bulk is not None
        done = torch.zeros(1)
        stop = dist.irecv(done, 1, tag=3)
        assert stop is not None
        window = []
        while not stop.is_completed():
            with torch_resilient.traffic_class("activation"):
                window.append(dist.isend(torch.ones(1 << 19), 1, tag=2))
            while len(window) > 8:
                window.pop(0).wait()  # type: ignore[union-attr]
        with torch_resilient.traffic_class("activation"):
            window.append(dist.isend(torch.zeros(1 << 19), 1, tag=2))
        for work in [*window, bulk]:
            assert work is not None
            work.wait()
        return True
    bulk_data, activation = torch.zeros(1 << 18), torch.ones(1 << 19)
    bulk_work = dist.irecv(bulk_data, 0, tag=1)
    assert bulk_work is not None
    told = False
    while bool(activation[0] == 1):
        dist.recv(activation, 0, tag=2)
        if bulk_work.is_completed() and not told:
            told = True
            dist.send(torch.ones(1), 0, tag=3)
    return told


def test_bulk_is_not_starved() -> None:
    assert run_ranks(bulk_under_load, world_size=2, timeout_s=60)[1]


def test_an_unknown_class_is_an_error() -> None:
    with pytest.raises(ValueError, match="activation"), torch_resilient.traffic_class("urgent"):
        pass
