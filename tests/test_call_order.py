"""Collectives that callbacks of futures begin: one order on all ranks, or an error on all."""

from __future__ import annotations

import gc
import hashlib
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import error_of, on_gloo, run_ranks, scratch, wait_until
from strict_device import start
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from torch_resilient.ddp import in_order

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo checks no order")


def reduce(value: float, group: dist.ProcessGroup | None = None) -> Future[Any]:
    work = dist.all_reduce(torch.full((4,), value), group=group, async_op=True)
    assert work is not None
    return work.get_future()


def received(rank: int) -> Future[Any]:
    """The future of a message from the other rank, which gets one as well."""
    dist.isend(torch.ones(4), 1 - rank)
    work = dist.irecv(torch.zeros(4), 1 - rank)
    assert work is not None
    return work.get_future()


def coalesced(rank: int) -> Future[Any]:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for value in (1.0, 2.0):
            dist.all_reduce(torch.full((4,), value))
    (work,) = manager.works
    found: Future[Any] = work.get_future()
    return found


FIRST: dict[str, Callable[[int], Future[Any]]] = {
    "collective": lambda rank: reduce(1.0),
    "collective of another group": lambda rank: reduce(1.0, dist.new_group()),
    "message": received,
    "coalesced collectives": coalesced,
}


def added_by_rank_1(rank: int, future: Callable[[], Future[Any]], callback: Any) -> Future[Any]:
    """Adds `callback` to a future that on rank 1 cannot have ended yet."""
    added = Path(scratch()) / "added"
    if rank == 0:
        wait_until(added.exists, "rank 1 has added its callback")
    chain: Future[Any] = future().then(callback)
    if rank == 1:
        added.touch()
    return chain


# ---- what is refused ----------------------------------------------------------------------------


def out_of_order(rank: int, first: str) -> tuple[str, float]:
    """The callback's collective comes before the program's second one on rank 0, after it on
    rank 1."""
    called = threading.Event()

    def callback(_: Future[Any]) -> Any:
        if rank == 1:
            assert called.wait(20)
        return reduce(10.0).wait()[0]

    chain = added_by_rank_1(rank, lambda: FIRST[first](rank), callback)
    if rank == 0:
        chain.wait()
    second = reduce(100.0)
    called.set()
    error = error_of(second.wait if rank == 0 else chain.wait)
    # The call that failed has a number: the next collectives match.
    return error, reduce(float(rank)).wait()[0][0].item()


@pytest.mark.parametrize("first", FIRST)
def test_another_order_on_one_rank_fails_on_all(first: str) -> None:
    for rank, (error, later) in enumerate(run_ranks(out_of_order, first)):
        assert "was called in between" in error, (rank, error)
        assert "in_order" in error, (rank, error)
        assert later == 1.0


def two_chains(rank: int) -> list[str]:
    """Both collectives stand before either callback; which of those is first depends on timing."""
    callback = lambda _: reduce(10.0).wait()[0]  # noqa: E731
    if rank == 0:  # so that rank 1 adds both callbacks in time
        wait_until((Path(scratch()) / "added").exists, "rank 1 has added its callbacks")
    futures = [reduce(1.0), reduce(2.0)]
    chains = [future.then(callback) for future in futures]
    (Path(scratch()) / "added").touch()
    return [text for chain in chains if (text := error_of(chain.wait))]


def test_callbacks_of_two_collectives_are_refused() -> None:
    for errors in run_ranks(two_chains):
        assert any("was called in between" in error for error in errors), errors


# ---- what is right ------------------------------------------------------------------------------


def right_programs(rank: int) -> list[float]:
    other = dist.new_group()

    def plus(value: float, group: dist.ProcessGroup | None = None) -> Callable[..., Any]:
        return lambda future: future.value()[0] + reduce(value, group).wait()[0]

    def plus_two(future: Future[Any]) -> Any:
        return future.value()[0] + reduce(2.0).wait()[0] + reduce(3.0).wait()[0]

    results = []
    for _ in range(20):
        chain = reduce(1.0).then(plus(2.0)).then(lambda f: [f.value()]).then(plus(3.0))
        results.append(chain.wait()[0].item())
        results.append(reduce(1.0).then(plus_two).wait()[0].item())
        # A callback of a callback's collective, on the next completion thread.
        nested = reduce(1.0).then(lambda _: reduce(2.0).then(plus(3.0)).wait())
        results.append(nested.wait()[0].item())
        for begin in (received, coalesced, lambda _: reduce(1.0, other)):
            results.append(begin(rank).then(plus(5.0)).wait()[0].item())
        # Other groups do not count.
        free = reduce(1.0).then(plus(2.0))
        reduce(7.0, other).wait()
        results.append(free.wait()[0].item())
    return results


def test_collectives_that_directly_follow_pass() -> None:
    expected = [12.0, 12.0, 10.0, 11.0, 12.0, 12.0, 6.0] * 20
    for results in run_ranks(right_programs):
        assert results == expected


# ---- hooks of DDP -------------------------------------------------------------------------------

FEW_BYTES_MB = 0.2  # a bucket for each layer: collectives of equal sizes


def net() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())]
    return nn.Sequential(*layers)


def one_at_a_time(hook: Any) -> Any:
    """The reference: the backward waits for each bucket."""

    def waiting(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        future: Future[torch.Tensor] = hook(state, bucket)
        future.wait()
        return future

    waiting.__annotations__ = {}
    return waiting


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda hook: hook,
    "in_order": in_order,
    "one at a time": one_at_a_time,
}


def power_sgd(
    rank: int, wrapper: str, bucket_cap_mb: float, device: str = "cpu", **options: Any
) -> tuple[list[str], str]:
    """The parameters after each step, and the error that ended the training."""
    controls = start(device=int(device[-1]), copy_s=0.002) if device != "cpu" else None
    model = net().to(device)
    parallel = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)
    group = dist.new_group() if options.get("find_unused_parameters") else None
    state = powerSGD_hook.PowerSGDState(
        group, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    parallel.register_comm_hook(state, WRAPPERS[wrapper](powerSGD_hook.powerSGD_hook))
    optimizer = torch.optim.SGD(parallel.parameters(), 0.05)
    found: list[str] = []
    for step in range(6):
        generator = torch.Generator().manual_seed(1000 * rank + step)
        inputs = torch.randn(8, 256, generator=generator).to(device)
        targets = torch.randn(8, 256, generator=generator).to(device)
        optimizer.zero_grad()
        try:
            F.mse_loss(parallel(inputs), targets).backward()
        except RuntimeError as error:
            return found, str(error)
        optimizer.step()
        parameters = torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()])
        found.append(hashlib.sha256(parameters.numpy().tobytes()).hexdigest())
    assert controls is None or len(controls.contexts()) == 1
    return found, ""


@pytest.mark.parametrize("attempt", range(3))
def test_power_sgd_with_several_buckets_never_diverges(attempt: int) -> None:
    (mine, error), (theirs, other_error) = run_ranks(power_sgd, "plain", FEW_BYTES_MB)
    steps = min(len(mine), len(theirs))
    assert mine[:steps] == theirs[:steps]
    assert bool(error) == bool(other_error)
    if error:
        # Other sizes are also found as such. A rank may hear only that the other has ended.
        reasons = ("was called in between", "in the same order")
        assert any(reason in error + other_error for reason in reasons), error + other_error


def test_power_sgd_with_one_bucket_passes() -> None:
    (mine, error), (theirs, other_error) = run_ranks(power_sgd, "plain", 25)
    assert (error, other_error) == ("", "")
    assert mine == theirs
    assert len(mine) == 6


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_in_order_gives_the_bits_of_one_bucket_at_a_time(options: dict[str, Any]) -> None:
    ours = run_ranks(in_order_training, "in_order", options)
    assert ours[0] == ours[1]
    assert ours[0][1] == ""
    assert ours == run_ranks(in_order_training, "one at a time", options)


def in_order_training(rank: int, wrapper: str, options: dict[str, Any]) -> Any:
    return power_sgd(rank, wrapper, FEW_BYTES_MB, **options)


@pytest.mark.usefixtures("strict_device")
def test_in_order_on_a_device() -> None:
    """Products have other bits there than on the CPU."""
    ours = run_ranks(power_sgd, "in_order", FEW_BYTES_MB, "strict:1", init=False)
    assert ours[0] == ours[1]
    assert len(ours[0][0]) == 6
    assert ours == run_ranks(power_sgd, "one at a time", FEW_BYTES_MB, "strict:1", init=False)


# ---- in_order() by itself -----------------------------------------------------------------------


def bucket(tensor: torch.Tensor) -> Any:
    return types.SimpleNamespace(buffer=lambda: tensor)


def other_calls(rank: int) -> str:
    """The program calls a collective before the hook runs on rank 1, after it on rank 0."""
    called = threading.Event()

    def hook(state: None, bucket: Any) -> Future[Any]:
        if rank == 1:
            assert called.wait(20)
        return reduce(1.0)

    future = in_order(hook)(None, bucket(torch.ones(4)))
    if rank == 0:
        future.wait()
    second = reduce(100.0)
    called.set()
    if rank == 1:
        second.wait()
    return error_of(second.wait if rank == 0 else future.wait)


def test_collectives_of_others_while_a_hook_runs_are_refused() -> None:
    for error in run_ranks(other_calls):
        assert "was called elsewhere" in error
        assert "a group of its own" in error


def hooks_that_wait(rank: int) -> list[float]:
    other = dist.new_group()

    def hook(state: None, bucket: Any) -> Future[Any]:
        first = reduce(1.0).wait()[0]
        chain = reduce(2.0).then(lambda f: f.value()[0] + reduce(3.0, other).wait()[0])
        second = chain.wait() + reduce(4.0, other).wait()[0]
        return reduce(5.0).then(lambda f: f.value()[0] + first + second)

    ordered = in_order(hook)
    results = []
    for _ in range(10):
        futures = [ordered(None, bucket(torch.ones(4))) for _ in range(3)]
        results += [future.wait()[0].item() for future in futures]
        results.append(reduce(7.0).wait()[0][0].item())
    return results


def test_a_hook_may_wait_and_use_several_groups() -> None:
    assert run_ranks(hooks_that_wait) == [[30.0, 30.0, 30.0, 14.0] * 10] * 2


def test_the_hook_is_not_called_after_an_error() -> None:
    calls = []

    def hook(state: str, bucket: Any) -> Future[Any]:
        calls.append(state)
        if state == "bad":
            raise ValueError("on purpose")
        done: Future[Any] = Future()
        done.set_result(state)
        return done

    ordered = in_order(hook)
    futures = [ordered(state, bucket(torch.ones(4))) for state in ("good", "bad", "good")]
    assert futures[0].wait() == "good"
    assert "on purpose" in error_of(futures[1].wait)
    assert "failed for an earlier one: ValueError: on purpose" in error_of(futures[2].wait)
    assert calls == ["good", "bad"]


def test_the_thread_holds_no_bucket_and_ends_with_the_hook() -> None:
    def hook(state: Any, bucket: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(bucket.buffer().sum().item())
        return done

    def running() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name == "torch_resilient hooks"}

    before = running()  # those of other tests, which may end meanwhile
    ordered = in_order(hook)
    assert ordered.__name__ == "hook"
    assert not running() - before, "the thread begins with the first bucket"
    tensor, state = torch.ones(4), nn.Identity()
    assert ordered(state, bucket(tensor)).wait() == 4
    assert len(running() - before) == 1
    held = weakref.ref(tensor), weakref.ref(state)
    del tensor, state
    wait_until(lambda: gc.collect() >= 0 and not any(r() for r in held), "the bucket is dropped")
    held_hook = weakref.ref(hook)
    del ordered, hook
    wait_until(lambda: not running() - before, "the thread has ended")
    wait_until(lambda: gc.collect() >= 0 and held_hook() is None, "the hook is dropped")


def test_a_hook_that_hangs_does_not_hold_up_the_end_of_the_process(
    run_python: Callable[..., str],
) -> None:
    output = run_python(
        """
import threading, types, torch
from torch_resilient.ddp import in_order
begun = threading.Event()
def hook(state, bucket):
    begun.set()
    return torch.futures.Future()
ordered = in_order(hook)
future = ordered(None, types.SimpleNamespace(buffer=lambda: torch.ones(4)))
assert begun.wait(20)
print("end")
"""
    )
    assert output == "end\n"
