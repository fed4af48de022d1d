"""Tensors and calls that take another way through torch: views with a bit, sparse, functional."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import Rank
from .operations import KERNEL_S, SHAPE, Begun, Operands, fault_of, same


def run(rank: Rank) -> None:
    """Runs the section."""
    for name, operation, dtype in (
        ("negative view", _negative, torch.float32),
        ("imaginary part of a conjugate", _imaginary, torch.complex64),
    ):
        with rank.check(name) as check:
            for late in (False, True):
                fault = fault_of(rank, operation, dtype, late=late)
                check.require(not fault, f"{'late: ' if late else ''}{fault}")
    with rank.check("sparse all_reduce while the default stream is busy") as check:
        device = rank.device
        wrong = 0
        for _ in range(10):
            device.sleep(KERNEL_S)
            with device.stream():
                wrong += not same(_sparse(rank), torch.tensor([1.0, 2.0, 0.0, 6.0]))
        check.require(wrong == 0, f"{wrong} of 10 are wrong")
    _shared_memory(rank)
    _functional(rank)


def _negative(o: Operands) -> Begun:
    send = dist.isend(torch._neg_view(o.input(SHAPE, 30)), 1 - o.rank)
    output = o.output(SHAPE)
    return [send, dist.irecv(output, 1 - o.rank)], [output]


def _imaginary(o: Operands) -> Begun:
    send = dist.isend(o.input(SHAPE, 31).conj().imag, 1 - o.rank)
    output = torch.view_as_real(o.output(SHAPE))[..., 0]
    return [send, dist.irecv(output, 1 - o.rank)], [output]


def _sparse(rank: Rank) -> Tensor:
    """Rank r has r + 1 at place r, and 2 and 4 at place 3, which the ranks share."""
    device = rank.device
    numbers = torch.zeros(2, device=device.torch_device)
    late = torch.tensor([1.0, 2.0], device=device.torch_device) * (rank.number + 1)
    device.sleep(KERNEL_S)
    numbers.copy_(late)
    places = torch.tensor([[rank.number, 3]], device=device.torch_device)
    tensor = torch.sparse_coo_tensor(places, numbers, (4,), is_coalesced=True)
    work: Any
    if device.kind == "strict":  # torch's dispatcher knows sparse tensors of CPU and CUDA only
        group = dist.group.WORLD
        assert group is not None
        work = group._get_backend(device.torch_device).allreduce([tensor], dist.AllreduceOptions())
    else:
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dense = torch.zeros(4)
    dense.index_add_(0, tensor._indices()[0].cpu(), tensor._values().cpu())
    return dense


def _shared_memory(rank: Rank) -> None:
    with rank.check("tensors that share memory") as check:
        whole = torch.zeros(3, 2, device=rank.device.torch_device)
        part = torch.full((3,), rank.number + 1.0, device=rank.device.torch_device)
        dist.all_gather([whole[:, 0], whole[:, 1]], part)
        check.require(bool((whole.cpu() == torch.tensor([1.0, 2.0])).all()), f"got {whole.cpu()}")
        halves = torch.full((8,), rank.number + 1.0, device=rank.device.torch_device)
        works = [dist.all_reduce(half, async_op=True) for half in halves.chunk(2)]
        for work in works:
            work.wait()
        check.require(bool((halves.cpu() == 3).all()), f"got {halves.cpu()}")


def _functional(rank: Rank) -> None:
    device = rank.device
    with rank.check("functional collectives") as check:
        check.skip_if(device.lacks("functional"))
        from torch.distributed import _functional_collectives as functional

        group = dist.group.WORLD
        assert group is not None
        tensor = torch.full((100,), rank.number + 1.0, device=device.torch_device)
        total = functional.all_reduce(tensor, "sum", group) + 0
        check.require(bool((total.cpu() == 3).all()), "all_reduce is wrong")
        gathered = functional.all_gather_tensor(tensor, 0, group) + 0
        expected = torch.tensor([1.0, 2.0]).repeat_interleave(100)
        check.require(same(gathered, expected), "all_gather_tensor is wrong")
    with rank.check("DTensor, sharded and replicated") as check:
        check.skip_if(device.lacks("functional"))
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        mesh = init_device_mesh(device.kind, (2,))
        host = torch.arange(64.0).view(8, 8)
        sharded = distribute_tensor(host.to(device.torch_device), mesh, [Shard(0)])
        whole: Any = sharded.redistribute(mesh, [Replicate()])
        check.require(same(whole.to_local(), host), "the whole differs from its shards")
