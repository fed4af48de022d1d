"""One rank of data-parallel training with SMART's hook, for test_datagrams.py."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import torch_resilient
from torch_resilient.smart import SmartOptions, SmartState, smart_hook


def main() -> None:
    """Trains, and reports its parameters after each step."""
    settings = json.loads(sys.argv[1])
    dist.init_process_group("resilient", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)
    )
    wrapped = DistributedDataParallel(model)
    state = None
    if settings["hook"]:
        options = SmartOptions(max_low_priority_drop=0.3)
        state = SmartState(model=wrapped, options=options, sites=settings["sites"])
        wrapped.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(settings["steps"]):
        data = torch.randn(8, 512, generator=generator)
        optimizer.zero_grad()
        (wrapped(data) - data).square().mean().backward()
        optimizer.step()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        say(kind="step", step=step, digest=digest.hexdigest())
    statistics = dataclasses.asdict(state.statistics()) if state is not None else {}
    dist.barrier()
    paths = [path.to_dict() for peer in torch_resilient.stats().peers for path in peer.paths]
    say(kind="result", paths=paths, statistics=statistics)
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
