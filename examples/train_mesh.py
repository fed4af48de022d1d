"""Training across sites: resilient between them, another backend within each.

The ranks form a device mesh with one dimension across the sites and one within a site, and
`backend_override` gives each its backend: within a site NCCL where there are GPUs, else gloo.

  --plan hsdp      weights are sharded within a site, and replicated and averaged across sites
  --plan pipeline  each site holds one stage of a pipeline, in replicas that DDP averages

torchrun --standalone --nproc-per-node 4 examples/train_mesh.py --plan hsdp
torchrun --standalone --nproc-per-node 4 examples/train_mesh.py --plan pipeline

On real hosts, start torchrun on all of them with --nnodes and --rdzv-endpoint, so that ranks of one
site are neighbours, and set TORCH_RESILIENT_SITE on each.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from gpt import GptShape, GptStage, next_byte_loss
from text_data import batch, load_text, standard_library
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

SHAPE = GptShape(layers=2, width=64)
ROWS = 4  # of each rank
Step = Callable[[Tensor, Tensor], Tensor | None]


def hsdp(mesh: DeviceMesh, device: torch.device) -> tuple[list[torch.nn.Parameter], Step]:
    """Weights sharded over the dimension "within", replicas over "across"."""
    model = GptStage(SHAPE, stage=0, stages=1, seed=0).to(device)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = next_byte_loss(model(tokens), targets)
        loss.backward()
        return loss.detach()

    return list(model.parameters()), step


def pipeline(mesh: DeviceMesh, device: torch.device) -> tuple[list[torch.nn.Parameter], Step]:
    """One stage for each place of the dimension "across", replicas over "within"."""
    across, within = mesh["across"], mesh["within"]
    stage, stages = across.get_local_rank(), across.size()
    module = GptStage(SHAPE, stage=stage, stages=stages, seed=0).to(device)
    replica = DistributedDataParallel(module, process_group=within.get_group())
    schedule = Schedule1F1B(
        PipelineStage(replica, stage, stages, device, group=across.get_group()),
        n_microbatches=ROWS,
        loss_fn=next_byte_loss,
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(
            *([tokens] if stage == 0 else []),
            **({"target": targets, "losses": losses} if stage == stages - 1 else {}),
        )
        return torch.stack(losses).mean().detach() if losses else None

    return list(module.parameters()), step


def main() -> None:
    """Train, and let rank 0 print the mean loss of each step and the backend of each dimension."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", choices=("hsdp", "pipeline"), default="hsdp")
    parser.add_argument("--sites", type=int, default=2, help="number of sites (default 2)")
    parser.add_argument("--backend", default="resilient", help="between sites")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(arguments.backend)
    ranks = dist.get_world_size()
    if ranks % arguments.sites != 0:
        parser.error(f"{ranks} ranks do not fill {arguments.sites} sites evenly")
    mesh = init_device_mesh(
        device.type,
        (arguments.sites, ranks // arguments.sites),
        mesh_dim_names=("across", "within"),
        backend_override={"across": arguments.backend, "within": "nccl" if gpus else "gloo"},
    )
    # The stages of one pipeline work on the same text.
    share = dist.get_rank() if arguments.plan == "hsdp" else mesh["within"].get_local_rank()
    shares = ranks if arguments.plan == "hsdp" else mesh["within"].size()
    parameters, step = (hsdp if arguments.plan == "hsdp" else pipeline)(mesh, device)
    optimizer = torch.optim.AdamW(parameters, lr=2e-3)
    text = load_text(standard_library())
    if dist.get_rank() == 0:
        for name in ("across", "within"):
            print(f"{name}: {dist.get_backend(mesh[name].get_group())}", flush=True)
    for number in range(arguments.steps):
        tokens, targets = batch(text, 0, number, ROWS * shares, SHAPE.context)
        loss = step(tokens[share::shares].to(device), targets[share::shares].to(device))
        optimizer.step()
        optimizer.zero_grad()
        # In a pipeline, only ranks with the last stage know a loss.
        own = torch.full((1,), torch.nan, device=device) if loss is None else loss.view(1)
        losses = own.new_empty(ranks)
        dist.all_gather_into_tensor(losses, own)
        if dist.get_rank() == 0:
            value = float(losses.nanmean())
            print(f"step {number} loss {value:.4f} {value.hex()}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
