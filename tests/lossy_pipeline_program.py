"""One stage of a pipeline over a lossy link, for test_datagrams.py."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

import torch_resilient
from torch_resilient.pipelining import ScheduleAdaptiveZB
from torch_resilient.smart import SmartOptions

WIDTH = 1024
MICROBATCHES = 4


def main() -> None:
    """Trains, and reports each step's losses and the dropped packets."""
    settings = json.loads(sys.argv[1])
    dist.init_process_group("resilient", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    module = torch.nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(
        stage,
        MICROBATCHES,
        torch.nn.functional.mse_loss,
        smart=SmartOptions(activation_bound=settings["bound"]),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(7)
    for step in range(settings["steps"]):
        data = torch.randn(64 * MICROBATCHES, WIDTH, generator=generator)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(data)
        else:
            schedule.step(target=data, losses=losses)
        optimizer.step()
        say(kind="step", step=step, losses=[each.item().hex() for each in losses])
    dist.barrier()
    paths = torch_resilient.stats().peers[0].paths
    say(
        kind="result",
        paths=[path.to_dict() for path in paths],
        tolerance=dataclasses.asdict(schedule.tolerance),
    )
    dist.barrier()
    dist.destroy_process_group()


def say(**values: object) -> None:
    """One row for the test."""
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    try:
        main()
    except dist.DistBackendError as error:
        say(kind="error", text=str(error))
        os._exit(3)
