"""Delays between all ranks, as measured in a running job."""

from __future__ import annotations

import re

import pytest
import torch
from harness import error_of, run_ranks

from torch_resilient import faults, group_by_round_trip
from torch_resilient.control.links import measure_delays


def delays(rank: int) -> list[list[float]]:
    if rank in (0, 2):
        faults.delay(0.03, peer=2 - rank)
    # Measures over new connections, which have no measurements yet.
    once = measure_delays(rounds=1)
    assert all(once[i][j] > 0 for i in range(3) for j in range(3) if i != j), once
    assert once[0][2] >= 0.03, once
    found = measure_delays()
    with pytest.raises(ValueError, match="rounds: expected at least 1, got 0"):
        measure_delays(rounds=0)
    return found


def test_the_slow_link_stands_out() -> None:
    first, *others = run_ranks(delays, world_size=3)
    assert others == [first, first]
    for i, row in enumerate(first):
        for j, delay_s in enumerate(row):
            if i == j:
                assert delay_s == 0
            elif {i, j} == {0, 2}:
                assert delay_s >= 0.03
            else:
                assert 0 < delay_s < 0.02, first


def without_the_backend(rank: int) -> None:
    with pytest.raises(ValueError, match='does not use the "resilient" backend'):
        measure_delays()


def test_other_backends_are_refused() -> None:
    run_ranks(without_the_backend, backend="gloo")


def beside_gloo(rank: int) -> None:
    """Tensors on the CPU are gloo's: only those on a GPU meet the delays that are asked for."""
    for measure in (measure_delays, lambda: group_by_round_trip(every_rank=True)):
        if torch.cuda.is_available():
            measure()
        else:
            assert re.search("CUDA|NVIDIA", error_of(measure))


def test_messages_go_where_the_backend_is() -> None:
    run_ranks(beside_gloo, backend="cpu:gloo,cuda:resilient")
