"""Fully sharded training (FSDP2), as in any PyTorch tutorial; only the backend's name is different.

torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from gpt import GptShape, GptStage, next_byte_loss
from text_data import batch, load_text, standard_library
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    """Train a model with weights sharded over the ranks; rank 0 prints the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="resilient")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    shape = GptShape(layers=2, width=64)
    model = GptStage(shape, stage=0, stages=1, seed=0)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = load_text(standard_library())
    for step in range(arguments.steps):
        tokens, targets = batch(text, seed=0, step=step, rows=4 * ranks, length=shape.context)
        loss = next_byte_loss(model(tokens[rank::ranks]), targets[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {float(mean):.4f} {float(mean).hex()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
