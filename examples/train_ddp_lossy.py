"""Data-parallel training between two sites over a link that loses packets.

On one host of each site; without --smart every gradient is exact, over datagrams or connections:

    TORCH_RESILIENT_WAN=udp TORCH_RESILIENT_SITE=east torchrun --nnodes 2 --nproc-per-node 1 \\
        --rdzv-backend c10d --rdzv-endpoint node0:29400 examples/train_ddp_lossy.py --smart

The same on two emulated hosts of this machine, which needs root:

    TORCH_RESILIENT_WAN=udp torch-resilient lab --delay 20ms --rate 200mbit --drop 2% -- \\
        torchrun --nproc-per-node 1 examples/train_ddp_lossy.py --smart

examples/demo_lossy.py runs it in three ways and compares them. See docs/wan.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from gpt import GptShape, GptStage, next_byte_loss
from text_data import batch, load_text, standard_library
from torch.nn.parallel import DistributedDataParallel

import torch_resilient
from torch_resilient.smart import SmartState, smart_hook


def digest_of(model: torch.nn.Module) -> str:
    """Digest of all parameters; replicas have diverged if it differs between ranks after a step."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy())
    return digest.hexdigest()


def say(kind: str, **values: Any) -> None:
    """One line of JSON."""
    # A single write: the ranks of a host share their output.
    sys.stdout.write(json.dumps({"kind": kind, **values}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Train; rank 0 prints losses and times, or with --json every rank a line for each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--smart", action="store_true", help="small gradients may be lost")
    parser.add_argument("--json", action="store_true", help="say everything in lines of JSON")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    shape = GptShape(layers=arguments.layers, width=arguments.width)
    model = DistributedDataParallel(GptStage(shape, stage=0, stages=1, seed=arguments.seed))
    state = None
    if arguments.smart:
        state = SmartState(model=model)
        model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = load_text(standard_library())
    for step in range(arguments.steps):
        tokens, targets = batch(
            text, seed=arguments.seed, step=step, rows=4 * ranks, length=shape.context
        )
        began_s = time.monotonic()
        loss = next_byte_loss(model(tokens[rank::ranks]), targets[rank::ranks])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        taken_s = time.monotonic() - began_s
        mean = loss.detach() / ranks
        dist.all_reduce(mean)  # exact; also lets ranks begin the next step together
        if arguments.json:
            say("step", step=step, loss=float(mean), taken_s=taken_s, digest=digest_of(model))
        elif rank == 0:
            print(f"step {step} loss {float(mean):.4f}, {1e3 * taken_s:.0f} ms", flush=True)
    statistics = None if state is None else state.statistics()
    if arguments.json:
        peers = torch_resilient.stats().peers
        paths = [path.to_dict() for peer in peers for path in peer.paths]
        smart = None if statistics is None else dataclasses.asdict(statistics)
        say("result", paths=paths, smart=smart)
    elif rank == 0 and statistics is not None:
        print(
            f"rank 0: of {statistics.bytes_sent:,} bytes of gradients, "
            f"{statistics.bytes_zero_filled:,} were lost and sent again with a later gradient, or "
            f"will be. Exact: {statistics.exact_reason or 'no'}"
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
