"""Several devices: no context on one that is not used, and operations between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.smart import SmartState, smart_hook

from .checks import Rank


def run(rank: Rank) -> None:
    """Runs the section, on the second device where there is one."""
    device = rank.device
    missing = device.lacks("two devices")
    with rank.check("no context on the other device") as check:
        check.skip_if(missing)
        for _ in range(10):
            tensor = torch.full((1000,), rank.number + 1.0, device=device.torch_device)
            dist.all_reduce(tensor)
            work = dist.all_reduce(tensor, async_op=True)
            doubled = work.get_future().then(lambda future: future.value()[0] * 2)
            del work, tensor  # the last references are those of the backend's threads
            check.require(bool((doubled.wait().cpu() == 12).all()), "the result is wrong")
        options: dict[str, Any] = {"device_ids": [device.index]} if device.kind == "cuda" else {}
        net = nn.Linear(64, 64).to(device.torch_device)
        model = DistributedDataParallel(net, **options)
        model.register_comm_hook(SmartState(model=model), smart_hook)
        model(torch.ones(4, 64, device=device.torch_device)).sum().backward()
        device.synchronize()
        found = device.contexts()
        check.require(found == [device.index], f"there are contexts on {found}")
    # From here on, there are contexts on both.
    with rank.check("ranks on different devices") as check:
        check.skip_if(missing)
        mine = torch.full((1000,), rank.number + 1.0, device=f"{device.kind}:{rank.number}")
        got = torch.zeros_like(mine)
        works = [dist.isend(mine, rank.peer), dist.irecv(got, rank.peer)]
        for work in works:
            work.wait()
        check.require(bool((got.cpu() == rank.peer + 1).all()), "the message is wrong")
        dist.all_reduce(mine)
        check.require(bool((mine.cpu() == 3).all()), "the sum is wrong")
    with rank.check("one call with tensors on two devices") as check:
        check.skip_if(missing)
        inputs, outputs = [], []
        for index in range(2):
            where = f"{device.kind}:{index}"
            inputs.append(torch.full((1000,), 10.0 * rank.number + index, device=where))
            outputs.append(torch.full((2000,), -1.0, device=where))
        group = dist.group.WORLD
        assert group is not None
        group.allgather_into_tensor_coalesced(outputs, inputs).wait()
        for index, output in enumerate(outputs):
            expected = torch.tensor([0.0, 10.0]).repeat_interleave(1000) + index
            check.require(bool((output.cpu() == expected).all()), f"device {index} is wrong")
