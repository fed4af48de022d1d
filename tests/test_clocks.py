"""The clocks of a pipeline's ranks, compared while it trains."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import on_gloo, run_ranks
from test_schedules import MICROBATCHES, Part, batch_of, loss_of, orders_of
from torch import nn
from torch.distributed.pipelining import PipelineStage

from torch_resilient import _native, faults
from torch_resilient.pipelining import SchedulePlanned, clocks

STAGES = 3
STEPS = 70
# The offsets of the stages' clocks after the first comparison.
AHEAD_S = (0.0, 5.0, -0.25)


def shift_clock(by_s: float) -> None:
    """Shifts the clock of this process, as the comparison sees it."""
    native = _native.load()
    shifted = SimpleNamespace(
        wait_any=native.wait_any, ended_at=lambda work: native.ended_at(work) + by_s
    )
    clocks._native = SimpleNamespace(load=lambda: shifted)  # type: ignore[assignment]
    clocks.time = SimpleNamespace(monotonic=lambda: time.monotonic() + by_s)  # type: ignore[assignment]


def recorded(rank: int, folder: str, delay_s: float) -> None:
    clocks.EVERY, clocks._EVALUATED = 20, 15
    shift_clock(AHEAD_S[rank])
    stage = PipelineStage(Part(rank), rank, STAGES, torch.device("cpu"))
    schedule = SchedulePlanned(
        stage, MICROBATCHES, loss_of, orders=orders_of("zb_h1", STAGES), timeline_dir=folder
    )
    x, target = batch_of(0)
    if rank:
        faults.delay(delay_s, peer=0)
    else:
        for peer in (1, 2):
            faults.delay(delay_s, peer=peer)
    for _ in range(STEPS):
        inputs = (x,) if stage.is_first else ()
        more = {"target": target} if stage.is_last else {}
        schedule.step(*inputs, **more, scale=1.5)


def offsets_of(folder: Path, rank: int) -> list[float]:
    """The offsets that were measured during the run."""
    lines = (folder / f"rank{rank:05}.jsonl").read_text().splitlines()
    first, *rest = map(json.loads, lines)
    assert "step" not in first
    return [line["clock_offset_s"] for line in rest if "clock_offset_s" in line]


@pytest.mark.skipif(on_gloo(), reason="gloo does not tell when a message came")
def test_clocks_are_compared_again(tmp_path: Path) -> None:
    run_ranks(recorded, str(tmp_path), 0.003, world_size=STAGES)
    assert offsets_of(tmp_path, 0) == []
    for rank in (1, 2):
        found = offsets_of(tmp_path, rank)
        assert len(found) == (STEPS - 1 - 15) // 20
        # Off by half of the difference of the ways, which this machine's noise makes.
        assert found == pytest.approx([-AHEAD_S[rank]] * len(found), abs=0.003), found


def of_gloo(rank: int) -> Any:
    stage = PipelineStage(nn.Linear(2, 2), rank, 2, torch.device("cpu"))
    return [clocks.ClockUpdates(stage).after(step) for step in range(300)]


def test_other_backends_are_left_alone() -> None:
    for offsets in run_ranks(of_gloo, world_size=2, backend="gloo"):
        assert set(offsets) == {None}
