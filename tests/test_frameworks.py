"""Frameworks on c10d compute the same numbers as on gloo.

Every case runs a few training steps, or the like, twice: on gloo and on the backend under test,
with the same seeds. With two ranks there is one order of the operands of a sum (up to swapping
them), so the results must be the same to the last bit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import backend_name, needs, run_ranks, scratch, set_launcher_environment, world_size
from torch import nn

from torch_resilient.ddp import in_order

Result = dict[str, torch.Tensor]


def compare(case: Callable[..., Result], *args: Any, size: int = 2, **options: Any) -> None:
    """Runs `case` on gloo and on the backend under test and compares all named tensors."""
    options = {"world_size": size, "timeout_s": 100, **options}
    want = run_ranks(as_lists, case, *args, backend="gloo", **options)
    got = run_ranks(as_lists, case, *args, backend=backend_name(), **options)
    for rank in range(size):
        assert got[rank].keys() == want[rank].keys()
        assert want[rank], "the case returned nothing to compare"
        for name, (dtype, shape, values) in want[rank].items():
            assert got[rank][name][:2] == (dtype, shape), f"rank {rank} {name}"
            ours, theirs = torch.tensor(got[rank][name][2]), torch.tensor(values)
            assert torch.isfinite(theirs).all(), f"rank {rank} {name}: a useless reference"
            if size == 2:
                assert torch.equal(ours, theirs), f"rank {rank} {name}: {ours} != {theirs}"
            else:
                assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), f"rank {rank} {name}"


def as_lists(rank: int, case: Callable[..., Result], *args: Any) -> dict[str, Any]:
    """Float32 fits a list of Python floats exactly, and lists need no torch to be sent."""
    return {
        name: (str(t.dtype), list(t.shape), t.detach().double().reshape(-1).tolist())
        for name, t in case(rank, *args).items()
    }


def net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(12, 33), nn.Tanh(), nn.BatchNorm1d(33), nn.Linear(33, 17), nn.Tanh(),
        nn.Linear(17, 4),
    )  # fmt: skip


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, 12, generator=generator), torch.randn(8, 4, generator=generator)


def parameters_of(module: nn.Module) -> Result:
    found = dict(module.named_parameters())
    found.update(module.named_buffers())
    return {name: t.detach().clone() for name, t in found.items()}


def steps(rank: int, model: nn.Module, optimizer: Any, count: int = 4) -> Result:
    losses = []
    for step in range(count):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **parameters_of(model)}


# ---- DDP ----------------------------------------------------------------------------------------


def ddp(rank: int, options: dict[str, Any]) -> Result:
    model = nn.parallel.DistributedDataParallel(net(), **options)
    return steps(rank, model, torch.optim.Adam(model.parameters(), 0.01))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.001},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True},
    ],
    ids=lambda o: next(iter(o), "defaults"),
)
@pytest.mark.parametrize("size", [2, 3])
def test_ddp(size: int, options: dict[str, Any]) -> None:
    compare(ddp, options, size=size)


class Branches(nn.Module):
    """A different branch on each rank and step: gradients of the others are missing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.branches = nn.ModuleList([nn.Linear(12, 4) for _ in range(3)])

    def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](inputs)


def ddp_unused(rank: int) -> Result:
    model = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        F.mse_loss(model(inputs, (rank + step) % 3), targets).backward()
        optimizer.step()
    return parameters_of(model)


def test_ddp_with_unused_parameters() -> None:
    compare(ddp_unused)


def ddp_accumulate(rank: int) -> Result:
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(0, 6, 3):
        optimizer.zero_grad()
        with model.no_sync():
            for inner in range(2):
                inputs, targets = batch(rank, step + inner)
                F.mse_loss(model(inputs), targets).backward()
        inputs, targets = batch(rank, step + 2)
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return parameters_of(model)


def test_ddp_with_accumulated_gradients() -> None:
    compare(ddp_accumulate)


def ddp_uneven(rank: int) -> Result:
    """Ranks with fewer batches join the others' collectives until all are done."""
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with model.join():
        for step in range(3 + 2 * rank):
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return parameters_of(model)


def test_ddp_join_with_uneven_inputs() -> None:
    compare(ddp_uneven)


def ddp_hook(rank: int, name: str) -> Result:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    # PowerSGD begins collectives in callbacks: with several buckets their order may differ.
    bucket_cap_mb = 25 if name == "power_sgd" else 0.002
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=bucket_cap_mb)
    if name == "all_reduce":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    elif name == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name.startswith("power_sgd"):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        hook = powerSGD_hook.powerSGD_hook
        model.register_comm_hook(state, in_order(hook) if name == "power_sgd in order" else hook)
    elif name == "own":

        def own(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            work = dist.all_reduce(bucket.buffer().clone(), async_op=True)
            return work.get_future().then(lambda f: f.value()[0] / (2 * world_size()))

        own.__annotations__ = {"bucket": dist.GradBucket}
        own.__annotations__["return"] = torch.futures.Future[torch.Tensor]
        model.register_comm_hook(None, own)
    return steps(rank, model, torch.optim.SGD(model.parameters(), 0.05), 5)


@pytest.mark.parametrize("name", ["all_reduce", "fp16", "power_sgd", "power_sgd in order", "own"])
def test_ddp_communication_hooks(name: str) -> None:
    compare(ddp_hook, name)


def ddp_bfloat16(rank: int) -> Result:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4)).to(torch.bfloat16)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(4):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        F.mse_loss(model(inputs.bfloat16()), targets.bfloat16()).backward()
        optimizer.step()
    return parameters_of(model)


def test_ddp_in_bfloat16() -> None:
    compare(ddp_bfloat16)


def zero(rank: int, overlap: bool) -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=overlap
    )
    result = steps(rank, model, optimizer)
    optimizer.consolidate_state_dict(to=1)
    if rank == 1:
        states = optimizer.state_dict()["state"]
        result.update({f"state {i}": s["exp_avg"] for i, s in states.items()})
    return result


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_zero_redundancy_optimizer(size: int, overlap: bool) -> None:
    compare(zero, overlap, size=size)


# ---- FSDP2, DTensor, checkpoints ----------------------------------------------------------------


def sharded_net() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(),
                         nn.Linear(17, 4))  # fmt: skip


def full(module: nn.Module) -> Result:
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
        for name, p in module.named_parameters()
    }


def fsdp(rank: int, kind: str) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = sharded_net()
    options: dict[str, Any] = {}
    if kind == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        options["mesh"] = init_device_mesh("cpu", (world_size(),))
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    if kind == "kept":
        options["reshard_after_forward"] = False
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(3):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **full(model)}


def reference_fsdp(rank: int) -> Result:
    """The reference for FSDP: DDP without the wrapper. gloo has no AVG, which FSDP2 needs."""
    model = nn.parallel.DistributedDataParallel(sharded_net())
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(3):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    return {"losses": torch.stack(losses), **named}


@pytest.mark.parametrize(("kind", "size"), [("plain", 2), ("kept", 2), ("plain", 3), ("hybrid", 4)])
def test_fsdp2_computes_what_ddp_computes(kind: str, size: int) -> None:
    got = run_ranks(as_lists, fsdp, kind, world_size=size, timeout_s=100)
    want = run_ranks(as_lists, reference_fsdp, world_size=size, timeout_s=100)
    for rank in range(size):
        assert got[rank].keys() == want[rank].keys()
        for name in want[rank]:
            ours, theirs = torch.tensor(got[rank][name][2]), torch.tensor(want[rank][name][2])
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), f"rank {rank} {name}"


def test_fsdp2_in_mixed_precision() -> None:
    compare(fsdp, "mixed")


def gathered_shards(rank: int) -> Result:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    placements = [f"rank:{each}/cpu" for each in range(world_size())]
    shards = sharded_tensor.rand(ChunkShardingSpec(0, placements), 8, 3)
    shards.local_tensor().fill_(rank + 1)
    whole = torch.zeros(8, 3)
    shards.gather(out=whole if rank == 0 else None)
    return {"whole": whole}


def test_sharded_tensors_are_gathered() -> None:
    """It takes a device of the backend that is not a CPU, if the backend declares one."""
    compare(gathered_shards)


def fsdp1(rank: int) -> Result:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        sharded_net(), device_id=torch.device("cpu"), use_orig_params=True
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for step in range(3):
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        model.clip_grad_norm_(0.5)
        optimizer.step()
        losses.append(loss.detach())
    with FullyShardedDataParallel.summon_full_params(model):
        named = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    return {"losses": torch.stack(losses), **named}


def test_fsdp1_computes_what_ddp_computes() -> None:
    got = run_ranks(as_lists, fsdp1, timeout_s=100)
    want = run_ranks(as_lists, reference_fsdp, timeout_s=100)
    for rank in range(2):
        assert got[rank].keys() == want[rank].keys()
        for name in want[rank]:
            ours, theirs = torch.tensor(got[rank][name][2]), torch.tensor(want[rank][name][2])
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5), f"rank {rank} {name}"


def dtensors(rank: int) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size(),))
    generator = torch.Generator().manual_seed(5)
    a, b = torch.randn(10, 7, generator=generator), torch.randn(7, 9, generator=generator)
    result: Result = {}
    placements = [Replicate(), Shard(0), Shard(1)]
    for i, left in enumerate(placements):
        for j, right in enumerate(placements):
            product = distribute_tensor(a, mesh, [left]) @ distribute_tensor(b, mesh, [right])
            result[f"product {i} {j}"] = product.full_tensor()
            assert torch.allclose(result[f"product {i} {j}"], a @ b, atol=1e-5)
    whole = distribute_tensor(a, mesh, [Shard(0)])
    moved = whole.redistribute(mesh, [Shard(1)])
    result["shard to shard"] = moved.to_local()
    assert torch.equal(moved.full_tensor(), a)
    result["sum"] = whole.sum().full_tensor()
    result["softmax"] = whole.softmax(-1).full_tensor()
    partial = DTensor.from_local(torch.arange(6.0) + rank, mesh, [Partial()])
    result["partial to replicate"] = partial.redistribute(mesh, [Replicate()]).to_local()
    result["partial to shard"] = partial.redistribute(mesh, [Shard(0)]).to_local()
    mean = DTensor.from_local(torch.arange(6.0) + rank, mesh, [Partial("avg")])
    result["average"] = mean.full_tensor()
    assert torch.allclose(result["average"], torch.arange(6.0) + (world_size() - 1) / 2)
    return result


@pytest.mark.parametrize("size", [2, 3])
def test_dtensor(size: int) -> None:
    compare(dtensors, size=size)


def tensor_parallel(rank: int) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4))
    mesh = init_device_mesh("cpu", (world_size(),))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        inputs, targets = batch(0, step)  # the same on all ranks
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return full(model)


def test_tensor_parallel() -> None:
    compare(tensor_parallel)


def autograd_functions(rank: int) -> Result:
    import torch.distributed.nn.functional as distributed

    size = world_size()
    inputs = (torch.arange(6.0) + rank).requires_grad_()
    total = distributed.all_reduce(inputs * 2)
    gathered = torch.stack(distributed.all_gather(inputs))
    received = distributed.all_to_all(
        [torch.zeros(6) for _ in range(size)], [inputs * (to + 1) for to in range(size)]
    )
    loss = total.pow(2).sum() + gathered.pow(3).sum() + torch.stack(received).pow(2).sum()
    loss.backward()
    return {"loss": loss, "gradient": inputs.grad}


def test_differentiable_collectives() -> None:
    compare(autograd_functions)


def checkpoint(rank: int) -> Result:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    folder = os.path.join(scratch(), "checkpoint")
    mesh = init_device_mesh("cpu", (world_size(),))

    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 10), nn.Tanh(), nn.Linear(10, 4))
        fully_shard(model, mesh=mesh)
        return model, torch.optim.Adam(model.parameters(), 0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
        for step in range(first, first + 2):
            inputs, targets = batch(rank, step)
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    model, optimizer = make(7)
    train(model, optimizer, 0)
    saved, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved, "optimizer": saved_optimizer}, checkpoint_id=folder)
    at_save = {f"saved {k}": v for k, v in full(model).items()}
    train(model, optimizer, 2)
    straight = full(model)

    model, optimizer = make(8)
    state, state_optimizer = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": state_optimizer}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=both["model"],
        optim_state_dict=both["optimizer"],
    )
    for name, tensor in full(model).items():
        assert torch.equal(tensor, at_save[f"saved {name}"]), name
    train(model, optimizer, 2)
    for name, tensor in full(model).items():
        assert torch.equal(tensor, straight[name]), f"{name}: resumed training differs"
    return {**at_save, **straight}


def checkpoint_async(rank: int) -> Result:
    import torch.distributed.checkpoint as dcp

    folder = os.path.join(scratch(), "async")
    state = {f"t{i}": torch.full((1000,), float(i + 10 * rank)) for i in range(5)}
    everywhere = dist.new_group(backend="gloo")  # torch insists on gloo's name for async saves
    handle = dcp.async_save({f"rank {rank}": state}, checkpoint_id=folder, process_group=everywhere)
    got = torch.ones(1000)
    dist.all_reduce(got)
    handle.result()
    target = {f"rank {rank}": {name: torch.zeros(1000) for name in state}}
    dcp.load(target, checkpoint_id=folder)
    for name, tensor in state.items():
        assert torch.equal(target[f"rank {rank}"][name], tensor)
    return {"sum": got}


def test_checkpoint_save_and_load() -> None:
    compare(checkpoint)


def test_asynchronous_checkpoint() -> None:
    compare(checkpoint_async)


# ---- pipelining ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]


def pipeline(rank: int, name: str) -> Result:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        PipelineScheduleSingle,
        get_schedule_class,
    )

    size, microbatches = world_size(), 8
    schedule_class = get_schedule_class(name)
    if issubclass(schedule_class, PipelineScheduleSingle):
        per_rank, indices = 1, [rank]
    elif name in ("ZBVZeroBubble", "DualPipeV"):
        per_rank, indices = 2, [rank, 2 * size - 1 - rank]
    else:
        per_rank, indices = 2, [rank, rank + size]
    count = per_rank * size
    stages = [
        PipelineStage(Block(100 + index), index, count, torch.device("cpu")) for index in indices
    ]
    losses: list[torch.Tensor] = []
    if issubclass(schedule_class, PipelineScheduleMulti):
        schedule = schedule_class(stages, microbatches, loss_fn=F.mse_loss)
    else:
        schedule = schedule_class(stages[0], microbatches, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.1)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 16, generator=generator)
        targets = torch.randn(16, 16, generator=generator)
        optimizer.zero_grad()
        arguments = (inputs,) if any(s.is_first for s in stages) else ()
        options: dict[str, Any] = {}
        if any(s.is_last for s in stages):
            losses.clear()
            options = {"target": targets, "losses": losses}
        schedule.step(*arguments, **options)
        optimizer.step()
    result: Result = {}
    for stage in stages:
        for key, p in stage.submod.named_parameters():
            result[f"stage {stage.stage_index} {key}"] = p.detach()
            result[f"stage {stage.stage_index} {key} gradient"] = p.grad
    if losses:
        result["losses"] = torch.stack([loss.detach() for loss in losses])
    return result


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipeline_schedule(name: str) -> None:
    compare(pipeline, name)


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_pipeline_schedule_on_four_ranks(name: str) -> None:
    compare(pipeline, name, size=4)


# ---- torch.compile ------------------------------------------------------------------------------


def compiled(rank: int) -> Result:
    import torch.distributed._functional_collectives as funcol

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(scratch(), f"inductor_{rank}")

    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        gathered = funcol.all_gather_tensor(total + 1, 0, dist.group.WORLD)
        return gathered.relu() + 1

    tensor = torch.arange(8.0) + rank
    result = torch.compile(step, fullgraph=True)(tensor)
    assert torch.allclose(result, step(tensor))
    return {"result": result}


def can_compile() -> str:
    """Why torch.compile cannot work here, or an empty string."""
    import shutil
    import sysconfig

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "torch.compile needs a C++ compiler"
    include = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(include, "Python.h")):
        return f"torch.compile needs Python.h, which is not in {include}"
    return ""


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_compiled_collectives() -> None:
    reason = can_compile()
    if reason:
        pytest.skip(reason)
    compare(compiled, timeout_s=180)


def compiled_eager(rank: int) -> Result:
    """The graph captured by torch.compile, run without a C++ compiler."""
    import torch.distributed._functional_collectives as funcol

    def step(tensor: torch.Tensor) -> torch.Tensor:
        total = funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD)
        return funcol.all_gather_tensor(total + 1, 0, dist.group.WORLD) + 1

    tensor = torch.arange(8.0) + rank
    result = torch.compile(step, fullgraph=True, backend="aot_eager")(tensor)
    assert torch.allclose(result, step(tensor))
    return {"result": result}


def test_collectives_captured_by_dynamo() -> None:
    compare(compiled_eager)


# ---- packages on top of torch -------------------------------------------------------------------

# These packages create the default group themselves, or look for the variables of a launcher.
LAUNCHED: dict[str, Any] = {"init": False, "store": "tcp", "timeout_s": 180}


def lightning_fit(rank: int) -> Result:
    backend = set_launcher_environment()
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, pair: Any, index: int) -> torch.Tensor:
            inputs, targets = pair
            loss = F.mse_loss(self.net(inputs), targets)
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 0.01)

    rows = [batch(0, step) for step in range(6)]  # the sampler gives each rank its share
    data = TensorDataset(torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=scratch(),
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    assert dist.get_backend() == backend
    result = {"loss": trainer.callback_metrics["loss"].clone(), **parameters_of(module)}
    dist.destroy_process_group()
    return result


@needs("lightning")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_lightning() -> None:
    compare(lightning_fit, **LAUNCHED)


class Labelled(nn.Module):
    """A model as transformers' Trainer wants it: it computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Result:
        return {"loss": F.mse_loss(self.net(inputs), labels)}


def transformers_trainer(rank: int) -> Result:
    backend = set_launcher_environment()
    dist.init_process_group(backend)
    from transformers import Trainer, TrainingArguments

    inputs, targets = batch(0, 0)
    arguments = TrainingArguments(
        output_dir=scratch(),
        use_cpu=True,
        per_device_train_batch_size=2,
        max_steps=4,
        learning_rate=0.01,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=3,
    )
    model = Labelled()
    data = [{"inputs": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    trained = Trainer(model=model, args=arguments, train_dataset=data).train()
    assert dist.get_backend() == backend
    result = {"loss": torch.tensor(trained.training_loss), **parameters_of(model)}
    dist.destroy_process_group()
    return result


@needs("transformers")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_transformers_trainer() -> None:
    compare(transformers_trainer, **LAUNCHED)


def accelerated(rank: int) -> Result:
    backend = set_launcher_environment()
    dist.init_process_group(backend)
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    rows = [batch(0, step) for step in range(4)]
    data = TensorDataset(torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach()))
    assert accelerator.num_processes == world_size()
    assert dist.get_backend() == backend
    result = {"losses": torch.cat(losses), **parameters_of(accelerator.unwrap_model(model))}
    dist.destroy_process_group()
    return result


@needs("accelerate")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_accelerate() -> None:
    compare(accelerated, **LAUNCHED)


def metrics(rank: int) -> Result:
    from torchmetrics import MeanMetric, SumMetric
    from torchmetrics.aggregation import CatMetric

    mean, total, rows = MeanMetric(), SumMetric(), CatMetric()
    for step in range(3):
        inputs, _ = batch(rank, step)
        mean.update(inputs)
        total.update(inputs)
        rows.update(inputs[: 2 + rank, 0])  # sizes differ by rank
    return {"mean": mean.compute(), "sum": total.compute(), "rows": rows.compute()}


@needs("torchmetrics")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchmetrics() -> None:
    compare(metrics, timeout_s=180)
