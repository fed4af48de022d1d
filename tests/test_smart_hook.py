"""SMART's hook for DDP and FSDP2: replicas stay identical, buckets overlap, failures end them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import error_of, on_gloo, run_outcomes, run_ranks, wait_until
from lossy_training import (
    OPEN,
    Bucket,
    LossyNetwork,
    as_numbers,
    close,
    default_training,
    lossy_only,
    net,
    smart_training,
    train,
)
from strict_device import start
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.smart import (
    SmartState,
    ddp,
    recovery,
    smart_hook,
    smart_reduce_scatter,
)
from torch_resilient.smart.gradient_drop import ErrorMemory

# ---- replicas stay identical --------------------------------------------------------------------


@lossy_only
@pytest.mark.parametrize(
    ("rate", "sites"),
    [
        (0.05, None),
        (0.2, None),
        (0.05, ["a", "a", "b", "b"]),
        (0.2, ["a", "b", "a", "c", "a"]),
    ],
    ids=["flat, 5 %", "flat, 20 %", "2+2, 5 %", "3+1+1, 20 %"],
)
def test_replicas_stay_identical_bit_for_bit(rate: float, sites: list[str] | None) -> None:
    """DESIGN's second invariant, after every step."""
    size = len(sites) if sites else 3
    results = run_ranks(smart_training, rate, OPEN, sites, world_size=size)
    for rank in range(size):
        assert results[rank][0] == results[0][0], f"rank {rank}"
    assert sum(statistics.bytes_zero_filled for _, statistics in results) > 0
    # The loss was real: an exact training goes elsewhere.
    exact = run_ranks(smart_training, 0.0, OPEN, sites, world_size=size)
    assert exact[0][0][-1] != results[0][0][-1]


def test_without_loss_the_result_is_ddps_to_rounding() -> None:
    ours = run_ranks(smart_training, None, world_size=3)
    theirs = run_ranks(default_training, world_size=3)
    for rank in range(3):
        for step in range(5):
            assert close(ours[rank][0][step], theirs[rank][step])


@lossy_only
@pytest.mark.parametrize("sites", [["a", "a", "b", "b"], ["a", "b", "a", "a"]])
def test_without_loss_sites_change_nothing_but_rounding(sites: list[str]) -> None:
    ours = run_ranks(smart_training, 0.0, OPEN, sites, world_size=4)
    theirs = run_ranks(default_training, world_size=4)
    assert all(close(ours[0][0][step], theirs[0][step]) for step in range(5))
    if sites.count("a") == 2:
        sent = [statistics.bytes_sent for _, statistics in ours]
        assert len(set(sent)) == 1, "the ranks of a site share what crosses the border"


@pytest.mark.parametrize(
    "debug",
    [
        "OFF",
        pytest.param(
            "DETAIL",
            marks=pytest.mark.skipif(on_gloo(), reason="DDP itself crashes there on gloo"),
        ),
    ],
)
def test_two_ranks_give_ddps_bits(debug: str) -> None:
    """Halves are exact, and a sum of two has one order."""
    env = {"TORCH_DISTRIBUTED_DEBUG": debug}
    ours = run_ranks(smart_training, None, world_size=2, env=env)
    theirs = run_ranks(default_training, world_size=2)
    assert [steps for steps, _ in ours] == theirs


def with_option(rank: int, option: str) -> list[list[str]]:
    return smart_training(rank, None, **{option: True})[0]


@pytest.mark.parametrize(
    "option", ["gradient_as_bucket_view", "static_graph", "find_unused_parameters"]
)
def test_ddps_options_change_no_bit(option: str) -> None:
    ours = run_ranks(with_option, option, world_size=2)
    assert ours == run_ranks(default_training, world_size=2)


@lossy_only
def test_tolerance_without_loss_gives_the_bits_of_exact() -> None:
    tolerant = run_ranks(smart_training, 0.0, OPEN, world_size=3)
    exact = run_ranks(
        smart_training, 0.9, dataclasses.replace(OPEN, max_low_priority_drop=0.0), world_size=3
    )
    assert [steps for steps, _ in tolerant] == [steps for steps, _ in exact]
    assert tolerant[0][1].bytes_tolerant > 0
    assert exact[0][1].bytes_tolerant == 0


def on_another_backend(rank: int) -> tuple[list[list[str]], str]:
    model = DistributedDataParallel(net(), bucket_cap_mb=0.02)
    state = SmartState(model=model)
    model.register_comm_hook(state, smart_hook)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    return train(model, rank, range(5), optimizer), state.statistics().exact_reason


def test_another_backend_reduces_as_ddp_does() -> None:
    ours = run_ranks(on_another_backend, world_size=2, backend="gloo")
    theirs = run_ranks(default_training, world_size=2, backend="gloo")
    assert [steps for steps, _ in ours] == theirs
    assert "backend" in ours[0][1]


def staged_training(
    rank: int, sites: list[str] | None, device: str
) -> tuple[list[list[str]], list[int]]:
    controls = start(device=1, copy_s=0.005)
    steps, _ = smart_training(rank, None, OPEN, sites, device=device)
    return steps, controls.contexts() if device != "cpu" else []


@lossy_only
@pytest.mark.usefixtures("strict_device")
@pytest.mark.parametrize("sites", [["a", "b", "c"], ["a", "b", "a"]])
def test_tensors_of_a_device_give_the_same_bits(sites: list[str]) -> None:
    staged = run_ranks(staged_training, sites, "strict:1", world_size=3, init=False)
    on_host = run_ranks(staged_training, sites, "cpu", world_size=3, init=False)
    assert [steps for steps, _ in staged] == [steps for steps, _ in on_host]
    assert [contexts for _, contexts in staged] == [[1]] * 3


def from_a_checkpoint(rank: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(10))
    state = SmartState(model=nn.ParameterList([parameter]))
    dropped = ErrorMemory()
    dropped.remember(torch.full((10,), 4.0), [("0", 10)], [(2, 4)])
    state.load_state_dict({**state.state_dict(), "error_memory": dropped.state_dict()})
    means = torch.zeros(10)
    for _ in range(2):
        bucket = Bucket(torch.ones(10), [parameter])
        means += smart_hook(state, bucket).wait()  # type: ignore[arg-type]
    return means.tolist()


@pytest.mark.parametrize("backend", ["gloo", "resilient"])
def test_what_a_checkpoint_remembers_is_delivered_on_any_backend(backend: str) -> None:
    assert (
        run_ranks(from_a_checkpoint, world_size=2, backend=backend)
        == [[2.0, 2.0, 6.0, 6.0] + [2.0] * 6] * 2
    )


def one_rank(rank: int) -> bool:
    model = DistributedDataParallel(net())
    model.register_comm_hook(SmartState(options=OPEN, model=model), smart_hook)
    alone = net()
    for wrapped in (model, alone):
        F.mse_loss(wrapped(torch.ones(2, 24)), torch.zeros(2, 4)).backward()
    pairs = zip(model.module.parameters(), alone.parameters(), strict=True)
    return all(torch.equal(p.grad, q.grad) for p, q in pairs)  # type: ignore[arg-type]


def test_one_rank_alone() -> None:
    assert run_ranks(one_rank, world_size=1) == [True]


def sparse_gradient(rank: int, smart: bool) -> list[list[float]]:
    torch.manual_seed(1)
    table = nn.Embedding(10, 4, sparse=True)
    model = DistributedDataParallel(nn.Sequential(table, nn.Linear(4, 2)))
    if smart:
        model.register_comm_hook(SmartState(options=OPEN, model=model), smart_hook)
    model(torch.tensor([rank, 5])).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad.to_dense().tolist()  # type: ignore[no-any-return]


def test_sparse_gradients_are_reduced_as_ddp_does() -> None:
    ours = run_ranks(sparse_gradient, True, world_size=2)
    assert ours == run_ranks(sparse_gradient, False, world_size=2)


# ---- buckets overlap, and a failure ends them ---------------------------------------------------


def overlapping(rank: int) -> tuple[bool, bool, list[float]]:
    """Rank 1 calls late: rank 0's hooks have returned by then, with both buckets under way."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    buckets = [Bucket(torch.full((1000,), float(i + rank)), [parameters[i]]) for i in range(2)]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    early = any(future.done() for future in futures) if rank == 0 else False
    if rank == 0:
        dist.send(torch.ones(1), 1)
    values = [future.wait() for future in futures]
    same = all(
        value.data_ptr() == b.flat.data_ptr() for value, b in zip(values, buckets, strict=True)
    )
    return early, same, [float(value.unique()) for value in values]


def test_the_hook_returns_before_anything_has_arrived() -> None:
    assert run_ranks(overlapping, world_size=2) == [(False, True, [0.5, 1.5])] * 2


def out_of_order(rank: int) -> list[float]:
    """On rank 0, the first bucket's message seems to arrive after the second bucket's."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, second = recovery.exchange, torch.futures.Future[None]()
    calls = 0

    def slow_first(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        made = real(*arguments, **named)
        calls += 1
        if rank == 0 and calls == 1:
            made.received.append(second)
        elif rank == 0:
            # Long after the second has been reduced.
            gone = torch.futures.collect_all(made.received)
            gone.add_done_callback(
                lambda _: state._transfers._worker.submit(
                    state._transfers._worker.submit, second.set_result, None
                )
            )
        return made

    recovery.exchange = slow_first
    buckets = [Bucket(torch.full((1000,), float(i + rank)), [parameters[i]]) for i in range(2)]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    between = torch.ones(1)
    if rank == 0:  # the program's own collectives do not match those of the hook
        dist.all_reduce(between)
    values = [float(future.wait().unique()) for future in futures]
    if rank == 1:
        dist.all_reduce(between)
    return [*values, float(between)]


@lossy_only
def test_buckets_are_gathered_in_their_order_whatever_arrives_first() -> None:
    assert run_ranks(out_of_order, world_size=2) == [[0.5, 1.5, 2.0]] * 2


def held_send(rank: int) -> tuple[bool, bool]:
    """The receiver of the first bucket's message has not yet reported its zero-filled ranges."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, told = recovery.exchange, torch.futures.Future[None]()
    begun = []

    def held(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        begun.append(made)
        if len(begun) == 1:
            made.sent.append(told)
        return made

    recovery.exchange = held
    buckets = [Bucket(torch.ones(1000), [parameter]) for parameter in parameters]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    futures[1].wait()  # the shards of both buckets have been gathered
    early = futures[0].done()
    told.set_result(None)
    futures[0].wait()
    return early, futures[0].done()


@lossy_only
def test_a_bucket_ends_when_it_is_known_what_was_dropped() -> None:
    assert run_ranks(held_send, world_size=2) == [(False, True)] * 2


def first_fails(rank: int) -> list[str]:
    """The first bucket fails when the second waits for its turn."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, first = recovery.exchange, torch.futures.Future[None]()
    begun = []

    def failing(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        begun.append(made)
        if len(begun) == 1:
            made.received.append(first)
        return made

    recovery.exchange = failing
    buckets = [Bucket(torch.ones(1000), [parameter]) for parameter in parameters]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    wait_until(
        lambda: (
            len(state._transfers.gathers) == 2 and state._transfers.gathers[1].shard is not None
        ),
        "waiting",
    )
    first.set_exception(RuntimeError("the network is gone"))
    return [error_of(future.wait) for future in futures]


@lossy_only
def test_a_bucket_that_fails_takes_those_along_that_wait_for_it() -> None:
    for message in run_ranks(first_fails, world_size=1, timeout_s=30)[0]:
        assert "the network is gone" in message


def second_gather_fails(rank: int) -> list[str]:
    """It begins when the first bucket, which is late, has been reduced."""
    parameters = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    state = SmartState(model=nn.ParameterList(parameters))
    real, first = recovery.exchange, torch.futures.Future[None]()
    begun, gathers = [], []

    def slow_first(*arguments: Any, **named: Any) -> Any:
        made = real(*arguments, **named)
        begun.append(made)
        if len(begun) == 1:
            made.received.append(first)
        return made

    gather = ddp._all_gather

    def failing_second(*arguments: Any, **named: Any) -> Any:
        gathers.append(arguments)
        if len(gathers) == 2:
            raise RuntimeError("out of memory")
        return gather(*arguments, **named)

    recovery.exchange, ddp._all_gather = slow_first, failing_second
    buckets = [Bucket(torch.ones(1000), [parameter]) for parameter in parameters]
    futures = [smart_hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]
    wait_until(
        lambda: (
            len(state._transfers.gathers) == 2 and state._transfers.gathers[1].shard is not None
        ),
        "waiting",
    )
    first.set_result(None)
    return [error_of(future.wait) for future in futures]


@lossy_only
def test_a_bucket_whose_gather_fails_ends_as_well() -> None:
    for message in run_ranks(second_gather_fails, world_size=1, timeout_s=30)[0]:
        assert "out of memory" in message


def failing_backward(rank: int) -> str:
    model = DistributedDataParallel(net())
    model.register_comm_hook(SmartState(model=model), smart_hook)

    def failing(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("the network is gone")

    recovery.exchange = failing
    return error_of(model(torch.ones(2, 24)).sum().backward)


@lossy_only
def test_the_backward_raises_what_went_wrong() -> None:
    (message,) = run_ranks(failing_backward, world_size=1, timeout_s=30)
    assert "RuntimeError: the network is gone" in message
    assert "to Tensor" not in message, "torch complains about the error instead"


def crashed_peer(rank: int) -> list[str]:
    parameters = [nn.Parameter(torch.zeros(100_000)) for _ in range(3)]
    state = SmartState(model=nn.ParameterList(parameters))
    buckets = [Bucket(torch.ones(100_000), [parameter]) for parameter in parameters]
    smart_hook(state, buckets[0]).wait()  # type: ignore[arg-type]
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        import os

        store.wait(["rank 0 has it, too"])  # what has not left this process would die with it
        os._exit(7)
    store.set("rank 0 has it, too", "")
    futures = [smart_hook(state, bucket) for bucket in buckets[1:]]  # type: ignore[arg-type]
    return [error_of(future.wait) for future in futures]


@lossy_only
def test_a_rank_that_dies_fails_every_bucket() -> None:
    survivor, dead = run_outcomes(crashed_peer, world_size=2, group_timeout_s=20)
    assert dead.exit_code == 7
    assert survivor.ok, survivor.describe()
    assert len(survivor.value) == 2
    assert all("rank 1" in message for message in survivor.value)


# ---- FSDP2 --------------------------------------------------------------------------------------


def sharded(rank: int, rate: float | None, smart: bool) -> tuple[list[list[str]], int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if rate is not None:
        LossyNetwork(rate)
    model = net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)  # type: ignore[index]
    fully_shard(model, mesh=mesh)
    state = SmartState(mesh.get_group(), OPEN, model=model)
    if smart:
        smart_reduce_scatter(state, model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    after = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * rank + step)
        inputs = torch.randn(8, 24, generator=generator)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), torch.zeros(8, 4)).backward()
        optimizer.step()
        whole = [p.full_tensor().detach().reshape(-1) for p in model.parameters()]  # type: ignore[attr-defined]
        after.append(as_numbers(torch.cat(whole)))
    if smart:
        saved = state.state_dict()
        state.load_state_dict(saved)
    return after, state.statistics().bytes_zero_filled


@lossy_only
def test_fsdp2_reduces_the_same_without_loss_and_learns_with_it() -> None:
    theirs = run_ranks(sharded, None, False, world_size=2)
    ours = run_ranks(sharded, 0.0, True, world_size=2)
    for step in range(4):
        assert close(ours[0][0][step], theirs[0][0][step])
    lossy = run_ranks(sharded, 0.3, True, world_size=2)
    assert lossy[0][1] > 0
    assert lossy[0][0] == lossy[1][0], "gathered parameters are the same everywhere"
    assert lossy[0][0][-1] != ours[0][0][-1]


class Heads(nn.Module):
    """Two heads of the same size; a step uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(24, 60) for _ in range(2)])

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](inputs)  # type: ignore[no-any-return]


def sharded_heads(rank: int) -> list[tuple[float, float]]:
    """Steps with drops, and an exact one: what was to come and what came, by head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    LossyNetwork(0.5)
    model = Heads()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    state = SmartState(mesh.get_group(), OPEN, model=model)
    smart_reduce_scatter(state, model)
    wanted, came = torch.zeros(2), torch.zeros(2)
    for step in range(5):
        if step == 4:
            state.exact_next_step()
        model.zero_grad()
        inputs = torch.arange(48.0).view(2, 24)
        # The gradient of each row of the weight is the sum of the inputs.
        model(inputs, step % 2).sum().backward()
        wanted[step % 2] += 60 * inputs.sum()
        for head in range(2):
            gradient = model.get_parameter(f"heads.{head}.weight").grad
            if gradient is not None:
                came[head] += gradient.full_tensor().sum()  # type: ignore[attr-defined]
    assert state.statistics().bytes_zero_filled > 0
    return list(zip(wanted.tolist(), came.tolist(), strict=True))


@lossy_only
@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="torch 2.13 can"
)
def test_fsdp2_gives_each_parameter_what_was_lost_of_it() -> None:
    """Though a step does not use all of them."""
    for heads in run_ranks(sharded_heads, world_size=2):
        for wanted, came in heads:
            assert came == pytest.approx(wanted)
