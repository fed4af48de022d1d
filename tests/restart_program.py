"""A pipeline that resumes from its checkpoint when torchrun restarts it.

Arguments: directory, step at which rank 0 kills itself in its first life (-1: never). Each rank
leaves its losses and parameters there, as hexadecimal numbers, and how its last life began.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_schedules import MICROBATCHES, Part, batch_of, loss_of, numbers
from torch.distributed.pipelining import PipelineStage

from torch_resilient.pipelining import ScheduleAdaptiveZB

STEPS = 12
CHECKPOINT_EVERY = 4


def main(folder: Path, killed_at: int) -> None:
    dist.init_process_group("resilient")
    rank, size = dist.get_rank(), dist.get_world_size()
    module = Part(rank)
    optimizer = torch.optim.Adam(module.parameters())
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = ScheduleAdaptiveZB(stage, MICROBATCHES, loss_of)
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    begin = 0
    history: list[list[list[str]]] = []
    path = folder / f"checkpoint{rank}.pt"
    if path.exists():
        begin, history, weights, moments = torch.load(path)
        module.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    for step in range(begin, STEPS):
        if rank == 0 and step == killed_at and life == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        x, target = batch_of(step)
        losses: list[torch.Tensor] = []
        inputs = (x,) if rank == 0 else ()
        last = {"target": target, "losses": losses} if rank == size - 1 else {}
        optimizer.zero_grad()
        schedule.step(*inputs, **last)
        optimizer.step()
        history.append(numbers(losses))
        if (step + 1) % CHECKPOINT_EVERY == 0:
            state = (step + 1, history, module.state_dict(), optimizer.state_dict())
            torch.save(state, path.with_suffix(".new"))
            dist.barrier()  # one counts only if all ranks have it
            path.with_suffix(".new").replace(path)
            dist.barrier()
    result = {
        "life": life,
        "begin": begin,
        "losses": history,
        "parameters": numbers(module.parameters()),
    }
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
