"""A replica that trains under torchft's Manager: torchft_program.py NAME STOP_FILE.

Prints a line of JSON for each committed step. Once the file STOP_FILE exists, all replicas end
after the same step.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchft
from torch import nn

from torch_resilient.torchft import ProcessGroupResilient


def main() -> None:
    name, stop_file = sys.argv[1:]
    torch.manual_seed(os.getpid())  # the replicas begin with different weights
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 4))
    inner = torch.optim.Adam(model.parameters(), 0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=ProcessGroupResilient(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
    )
    parallel = torchft.DistributedDataParallel(manager, model)
    optimizer = torchft.Optimizer(manager, inner)
    last = False
    while not last:
        optimizer.zero_grad()
        step = manager.current_step()
        generator = torch.Generator().manual_seed(os.getpid() + step)
        inputs = torch.randn(8, 12, generator=generator)
        F.mse_loss(parallel(inputs), inputs[:, :4]).backward()
        # Every replica gets the same sum, so all leave after the same step.
        stop = torch.tensor([float(os.path.exists(stop_file))])
        manager.allreduce(stop).wait()
        optimizer.step()
        if manager.current_step() == step:
            continue  # not committed
        last = stop.item() > 0
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        row = {
            "step": manager.current_step(),
            "participants": manager.num_participants(),
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "last": last,
        }
        print(json.dumps(row), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
