"""One rank of a job across sites, started by test_relays.py on the hosts of a lab."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

import torch_resilient


def content(number: int, count: int) -> torch.Tensor:
    """The values of a message, other ones in each."""
    return torch.arange(number, number + count, dtype=torch.int64) * 0x9E3779B97F4A7C15


def stream(settings: Mapping[str, Any]) -> None:
    """Messages from one rank to another in each of some pairs; the rest take no part."""
    pairs = [pair for pair in settings["pairs"] if dist.get_rank() in pair]
    count = settings["bytes"] // 8
    if dist.get_rank() in settings.get("busy", ()):
        while True:
            sum(range(10_000))
    if not pairs:
        return
    ((source, target),) = pairs
    message = torch.zeros(count, dtype=torch.int64)
    for number in range(settings["count"]):
        begin = time.monotonic()
        if dist.get_rank() == source:
            dist.send(content(number, count), target)
        else:
            dist.recv(message, source)
            say(
                kind="message",
                source=source,
                number=number,
                right=torch.equal(message, content(number, count)),
                time_s=time.monotonic(),
                took_s=time.monotonic() - begin,
            )
        time.sleep(settings.get("pause_s", 0.0))


def pipelines(settings: Mapping[str, Any]) -> None:
    """Both ranks of a site send a message to their counterpart, again and again, at one time."""
    rank, count = dist.get_rank(), settings["bytes"] // 8
    message = torch.zeros(count, dtype=torch.int64)
    for number in range(settings["count"]):
        dist.barrier()
        begin = time.monotonic()
        if rank < 2:
            dist.send(content(number, count), rank + 2)
        else:
            dist.recv(message, rank - 2)
            right = torch.equal(message, content(number, count))
            say(kind="message", rank=rank, right=right, took_s=time.monotonic() - begin)


def train(settings: Mapping[str, Any]) -> None:
    """Data-parallel steps; the losses and the sum of the parameters as exact bits.

    A rank that is no member waits for a line, and leaves.
    """
    members = settings.get("members") or list(range(dist.get_world_size()))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        sys.stdin.readline()
        say(kind="leaves", relay=torch_resilient.stats().relay.to_dict())
        dist.destroy_process_group()
        say(kind="left")
        sys.exit()
    torch.manual_seed(0)
    width = settings.get("width", 256)
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(settings["count"]):
        data = torch.randn(8, width, generator=generator)
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= len(members)
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total, group=group)
        losses.append(total.item().hex())
        say(kind="step", number=step, time_s=time.monotonic())
        time.sleep(settings.get("pause_s", 0.0))
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    say(kind="trained", losses=losses, weights=weights.double().sum().item().hex())


def say(**values: object) -> None:
    """One row for the test."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Joins the group, runs the job, and reports what the paths have carried."""
    settings = json.loads(sys.argv[1])
    if int(os.environ["RANK"]) in settings.get("off", ()):
        os.environ["TORCH_RESILIENT_RELAY"] = "off"
    dist.init_process_group(
        "resilient", timeout=datetime.timedelta(seconds=settings.get("timeout_s", 60))
    )
    try:
        dist.barrier()
        say(kind="ready")
        {"stream": stream, "pipelines": pipelines, "train": train}[settings["job"]](settings)
        say(kind="done")
        sys.stdin.readline()  # relays stay until the test has seen what it wants
        found = torch_resilient.stats()
        say(kind="result", relay=found.relay.to_dict(), peers=[p.to_dict() for p in found.peers])
    except dist.DistBackendError as error:
        say(kind="error", text=str(error))
        os._exit(3)
    sys.stdin.readline()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
