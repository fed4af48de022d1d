"""A rank of failover.py --verbs: trains in one of two ways, and reports in rows of JSON.

    python train_guest.py ddp|pipeline STEPS STEP_S

A step takes at least STEP_S seconds, so that the training lasts as long as the faults.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import train_pipeline
from gpt import GptShape, GptStage, next_byte_loss
from text_data import batch, load_text, standard_library
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from torch_resilient import stats

# Returns the loss of a step, if this rank knows it.
Step = Callable[[int], float | None]


def data_parallel() -> tuple[Step, Iterable[Tensor]]:
    """The whole model on every rank, each with its own rows."""
    shape = GptShape(layers=2, width=128)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(GptStage(shape, stage=0, stages=1, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = load_text(standard_library())

    def step(number: int) -> float:
        tokens, targets = batch(text, seed=0, step=number, rows=2 * ranks, length=shape.context)
        loss = next_byte_loss(model(tokens[rank::ranks]), targets[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        return float(mean)

    return step, model.parameters()


def pipeline() -> tuple[Step, Iterable[Tensor]]:
    """A stage on each rank."""
    sys.argv[1:] = ["--schedule=1F1B", "--layers=2", "--microbatches=4", "--rows=2"]
    trainer = train_pipeline.Trainer(train_pipeline.parse_arguments(), torch.device("cpu"))
    return trainer.step, trainer.stages[0].submod.parameters()


def main() -> None:
    """Trains, and prints a row for each step and one at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("ddp", "pipeline"))
    parser.add_argument("steps", type=int)
    parser.add_argument("step_s", type=float)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    step, weights = data_parallel() if arguments.way == "ddp" else pipeline()
    losses = []
    for number in range(arguments.steps):
        begin_s = time.monotonic()
        loss = step(number)
        if loss is not None:
            losses.append(loss.hex())
        print(json.dumps({"kind": "step", "step": number}), flush=True)
        time.sleep(max(0.0, begin_s + arguments.step_s - time.monotonic()))
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().numpy().tobytes())
    paths = [path.to_dict() for peer in stats().peers for path in peer.paths]
    row = {"kind": "result", "losses": losses, "weights": digest.hexdigest(), "paths": paths}
    print(json.dumps(row), flush=True)
    dist.barrier()  # rank 0 holds the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
