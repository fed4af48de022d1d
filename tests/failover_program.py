"""One rank of a small training job, started by test_failover.py on the hosts of a lab."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time

import torch
import torch.distributed as dist

import torch_resilient


def train(steps: int, pause_s: float) -> dict[str, object]:
    """Data-parallel steps; the losses and the sum of the parameters as exact bits."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(steps):
        data = torch.randn(8, 256, generator=generator)
        loss = (model(data) - data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item().hex())
        say(kind="step", step=step)
        time.sleep(pause_s)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights.double().sum().item().hex()}


def stream(messages: int, pause_s: float) -> dict[str, object]:
    """Messages from rank 0 to rank 1, each with its own content."""
    wrong = 0
    for number in range(messages):
        content = torch.full((32768,), number, dtype=torch.int32)
        if dist.get_rank() == 0:
            dist.send(content, 1)
        else:
            message = torch.zeros_like(content)
            dist.recv(message, 0)
            wrong += not torch.equal(message, content)
        say(kind="message", number=number, wrong=wrong, time_s=time.monotonic())
        time.sleep(pause_s)
    return {"wrong": wrong}


def exchange(
    rounds: int, pause_s: float, first: int = 32768, rest: int = 32768
) -> dict[str, object]:
    """Messages in both directions at a time; after each round, what each path has been given."""
    wrong = 0
    for number in range(rounds):
        content = torch.full((rest if number else first,), number, dtype=torch.int32)
        message = torch.zeros_like(content)
        peer = 1 - dist.get_rank()
        works = [dist.isend(content, peer), dist.irecv(message, peer)]
        for work in works:
            work.wait()
        wrong += not torch.equal(message, content)
        keys = ("kind", "index", "nic", "state", "bytes_sent", "local_address", "last_error")
        paths = torch_resilient.stats().peers[0].paths
        shown = [{key: getattr(path, key) for key in keys} for path in paths]
        say(kind="round", number=number, wrong=wrong, paths=shown, time_s=time.monotonic())
        time.sleep(pause_s)
    return {"wrong": wrong}


def burst(rounds: int, pause_s: float) -> dict[str, object]:
    """Runs exchange with 32 MiB first, which keeps all links busy, then with 64 KiB at a time."""
    return exchange(rounds, pause_s, first=1 << 23, rest=1 << 14)


def large(rounds: int, pause_s: float) -> dict[str, object]:
    """Runs exchange with 16 MiB at a time."""
    return exchange(rounds, pause_s, first=1 << 22, rest=1 << 22)


def medium(rounds: int, pause_s: float) -> dict[str, object]:
    """Runs exchange with 1 MiB at a time."""
    return exchange(rounds, pause_s, first=1 << 18, rest=1 << 18)


def flood(messages: int, pause_s: float) -> dict[str, object]:
    """Large messages from rank 0 to rank 1, sixteen at a time."""
    sender = dist.get_rank() == 0
    buffers = [torch.zeros(1 << 20) for _ in range(16)]
    works = []
    for number in range(messages):
        if len(works) == len(buffers):
            works.pop(0).wait()
        buffer = buffers[number % len(buffers)]
        works.append(dist.isend(buffer, 1) if sender else dist.irecv(buffer, 0))
        time.sleep(pause_s)
    for work in works:
        work.wait()
    return {}


def say(**values: object) -> None:
    """One row for the test."""
    print(json.dumps(values), flush=True)


def main() -> None:
    """Joins the group, runs the requested job and reports its result."""
    settings = json.loads(sys.argv[1])
    dist.init_process_group(
        "resilient", timeout=datetime.timedelta(seconds=settings.get("timeout_s", 60))
    )
    if settings.get("late"):  # until then, no rank has heard of another
        say(kind="joined")
        sys.stdin.readline()
    dist.barrier()
    say(kind="ready")
    try:
        jobs = {f.__name__: f for f in (train, stream, exchange, burst, large, medium, flood)}
        result = jobs[settings["job"]](settings["count"], settings["pause_s"])
        dist.barrier()
        paths = torch_resilient.stats().peers[0].to_dict()["paths"]
        say(kind="result", paths=paths, **result)
        dist.barrier()  # no rank leaves before the others have looked at their paths
    except dist.DistBackendError as error:
        say(kind="error", text=str(error), peer=torch_resilient.stats().peers[0].to_dict())
        os._exit(3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
