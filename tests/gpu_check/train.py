"""Training on the device: DDP, SMART and FSDP2 have the bits of the same step over host tensors."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with types.

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.smart import SmartOptions, SmartState, smart_hook

from .checks import Rank
from .operations import KERNEL_S, bits, values

_LAYERS = 6
_STEPS = 3
# Several buckets, so that operations overlap.
_BUCKET_PART = 0.3


def run(rank: Rank) -> None:
    """Runs the section."""
    expected = _trained(rank, _ddp(rank, lambda model: _over_host))
    for name, hook, more in (
        ("DDP", None, {}),
        ("DDP, gradient_as_bucket_view", None, {"gradient_as_bucket_view": True}),
        ("DDP, all-reduce as a hook", lambda model: default_hooks.allreduce_hook, {}),
    ):
        with rank.check(name) as check:
            got = _trained(rank, _ddp(rank, hook, **more))
            check.require(torch.equal(got, expected), "bits differ from those over host tensors")
    with rank.check("DDP, SMART without drops") as check:
        options = SmartOptions(max_low_priority_drop=0.0)
        model = _ddp(rank, None)
        model.register_comm_hook(SmartState(options=options, model=model), smart_hook)
        got = _trained(rank, model)
        check.require(torch.equal(got, expected), "bits differ from those of DDP")
    with rank.check("DDP, PowerSGD: replicas stay equal") as check:
        # With several buckets, callbacks begin collectives in another order on each rank.
        model = _ddp(rank, None, bucket_cap_mb=100)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        _trained(rank, model)
        weights = torch.cat([bits(p) for p in model.parameters()])
        both = [torch.empty_like(weights) for _ in range(2)]
        dist.all_gather(both, weights)
        check.require(torch.equal(*both), "the replicas differ")
    with rank.check("FSDP2") as check:
        check.skip_if(rank.device.lacks("FSDP2"))
        got = _trained(rank, _sharded(rank, over_host=False))
        expected = _trained(rank, _sharded(rank, over_host=True))
        check.require(torch.equal(got, expected), "bits differ from those over host tensors")


def _width(rank: Rank) -> int:
    return 256 if rank.device.kind == "cuda" else 48


def _net(rank: Rank) -> nn.Sequential:
    torch.manual_seed(7)
    width = _width(rank)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(_LAYERS)]
    return nn.Sequential(*layers).to(rank.device.torch_device)


def _ddp(
    rank: Rank, hook: Callable[[nn.Module], Any] | None, **options: Any
) -> DistributedDataParallel:
    net = _net(rank)
    megabytes = sum(p.nbytes for p in net.parameters()) / (1 << 20)
    options = {"bucket_cap_mb": _BUCKET_PART * megabytes, **options}
    if rank.device.kind == "cuda":
        options["device_ids"] = [rank.device.index]
    model = DistributedDataParallel(net, **options)
    if hook is not None:
        made = hook(model)
        state = rank if made is _over_host else None
        model.register_comm_hook(state, made)
    return model


def _trained(rank: Rank, model: nn.Module) -> Tensor:
    """The bits of all losses and of the weights in the end."""
    device = rank.device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for step in range(_STEPS):
        batch = values((16, _width(rank)), torch.float32, 100 * step + rank.number)
        optimizer.zero_grad()
        output = model(batch.to(device.torch_device))
        output.register_hook(lambda _: device.sleep(KERNEL_S))  # the backward is late
        loss = output.square().mean()
        loss.backward()
        optimizer.step()
        results.append(loss.detach().clone())
    device.synchronize()
    for parameter in model.parameters():
        whole: Any = parameter
        results.append(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
    return torch.cat([bits(result) for result in results])


def _reduced_over_host(rank: Rank, tensor: Tensor) -> None:
    rank.device.synchronize()
    host = tensor.cpu()
    dist.all_reduce(host)
    tensor.copy_(host)
    rank.device.synchronize()


def _over_host(rank: Rank, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own hook, with nothing left to order."""
    buffer = bucket.buffer().div_(2)
    _reduced_over_host(rank, buffer)
    devices: Sequence[torch.device] = [rank.device.torch_device] if rank.device.accelerated else []
    done: torch.futures.Future[Tensor] = torch.futures.Future(devices=list(devices))
    done.set_result(buffer)
    return done


class _GatherOverHost:
    """FSDP2's all-gather over host tensors."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        self._call(output_tensor, input_tensor, dist.all_gather_into_tensor, group=group)

    def _call(self, output: Tensor, source: Tensor, operation: Any, **options: Any) -> None:
        self.rank.device.synchronize()
        host = torch.empty(output.shape, dtype=output.dtype)
        operation(host, source.cpu(), **options)
        output.copy_(host)
        self.rank.device.synchronize()


class _ScatterOverHost(_GatherOverHost):
    """FSDP2's reduce-scatter over host tensors."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, **_: Any
    ) -> None:
        self._call(output_tensor, input_tensor, dist.reduce_scatter_tensor, op=op, group=group)


def _sharded(rank: Rank, over_host: bool) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    model = _net(rank)
    mesh = init_device_mesh(rank.device.kind, (2,))
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    if over_host:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                gather: Any = _GatherOverHost(rank)
                scatter: Any = _ScatterOverHost(rank)
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(scatter)
    return model
