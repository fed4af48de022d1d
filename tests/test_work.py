"""The contract of Work and its Future: truthful, completed exactly once, bounded."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    error_of,
    make_store,
    on_gloo,
    run_ranks,
    wait_until,
    world_size,
)

from torch_resilient.smart import zero_filled

# gloo: a wait that expires closes its connections, point-to-point Works have no Future.
not_gloo = pytest.mark.skipif(on_gloo(), reason="gloo does not promise this")


def has_exception(work: dist.Work) -> bool:
    """Whether `work` has failed, by exception(), which torch 2.11 cannot convert for Python."""
    try:
        return work.exception() is not None
    except TypeError:
        return not work.is_success()


def states(rank: int) -> None:
    store = make_store("states")
    tensor = torch.full((1000,), float(rank + 1))
    if rank == 1:
        store.wait(["asked"])
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        assert not work.is_completed(), "rank 1 has not started yet"
        store.set("asked", "1")
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert not has_exception(work)
    assert tensor[0] == 3
    assert work.wait() is True, "wait again"


def test_states_of_a_work() -> None:
    run_ranks(states)


def completes_without_wait(rank: int) -> None:
    tensors = [torch.ones(10_000) for _ in range(5)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    works.append(dist.barrier(async_op=True))
    for work in works:
        wait_until(work.is_completed, "is_completed() without wait()")
    assert all(t[0] == world_size() for t in tensors)
    assert all(work.is_success() for work in works)


def test_completes_without_wait() -> None:
    run_ranks(completes_without_wait, world_size=3)


def futures(rank: int) -> None:
    size = world_size()
    total = sum(range(1, size + 1))

    # A chain: each step sees the tensors.
    work = dist.all_reduce(torch.full((4,), float(rank + 1)), async_op=True)
    chain = work.get_future().then(lambda f: f.value()[0] * 2).then(lambda f: f.value() + 1)
    assert torch.equal(chain.wait(), torch.full((4,), 2.0 * total + 1))

    # A callback added after completion runs, too, and only once.
    calls: list[Any] = []
    done = work.get_future()
    done.wait()
    later = done.then(lambda f: calls.append(f.value()[0][0].item()))
    later.wait()
    assert calls == [total]
    assert done.done()

    # A collective issued inside a callback, as PowerSGD does.
    def second(f: torch.futures.Future[Any]) -> torch.Tensor:
        tensor = f.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    first = dist.all_reduce(torch.full((3,), 1.0), async_op=True).get_future()
    assert torch.equal(first.then(second).wait(), torch.full((3,), float(size * size)))

    # collect_all and futures of other operations.
    operations = [
        dist.broadcast(torch.full((2,), float(rank)), 1, async_op=True),
        dist.all_gather([torch.zeros(2) for _ in range(size)], torch.ones(2), async_op=True),
        dist.all_gather_into_tensor(torch.zeros(2 * size), torch.ones(2), async_op=True),
        dist.reduce_scatter_tensor(torch.zeros(2), torch.ones(2 * size), async_op=True),
        dist.barrier(async_op=True),
    ]
    together = torch.futures.collect_all([w.get_future() for w in operations])
    assert len(together.wait()) == len(operations)
    assert torch.equal(operations[0].get_future().value()[0], torch.ones(2))


@pytest.mark.skipif(on_gloo(), reason="gloo has no futures for some operations")
@pytest.mark.parametrize("size", [2, 3])
def test_futures(size: int) -> None:
    run_ranks(futures, world_size=size)


def callback_raises(rank: int) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)

    def bad(f: torch.futures.Future[Any]) -> None:
        raise ValueError("on purpose")

    chained = work.get_future().then(bad)
    assert "on purpose" in error_of(chained.wait)
    work.wait()
    dist.barrier()


def test_a_callback_that_raises_harms_nobody() -> None:
    run_ranks(callback_raises)


def callback_state(rank: int) -> None:
    received = torch.zeros(2)
    if rank == 1:
        with torch.no_grad():
            future = dist.irecv(received, 0).get_future()
        enabled = future.then(lambda _: torch.is_grad_enabled())
    dist.barrier()  # the message leaves only after the callback was added
    if rank == 0:
        dist.send(torch.ones(2), 1)
    else:
        assert enabled.wait() is False
        assert torch.is_grad_enabled()


def test_a_callback_has_the_thread_local_state_of_who_asked_for_the_future() -> None:
    run_ranks(callback_state)


def p2p_futures(rank: int) -> None:
    peer = 1 - rank
    send = dist.isend(torch.full((5,), float(rank)), peer)
    got = torch.zeros(5)
    receive = dist.irecv(got, peer)
    value = receive.get_future().then(lambda f: f.value()[0] + 1).wait()
    assert torch.equal(value, torch.full((5,), float(peer + 1)))
    send.get_future().wait()
    assert receive.is_completed()
    assert send.is_completed()
    assert receive._source_rank() == peer


@not_gloo
def test_point_to_point_works_have_futures() -> None:
    run_ranks(p2p_futures)


def source_rank(rank: int) -> None:
    size = world_size()
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            got = torch.zeros(2)
            work = dist.group.WORLD.recv_anysource([got], 0)
            work.wait()
            assert got[0] == work._source_rank()
            seen.add(work._source_rank())
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)


def test_source_rank_of_any_source() -> None:
    run_ranks(source_rank, world_size=3)


def results(rank: int) -> None:
    tensor = torch.full((3,), 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    (result,) = work.result()
    assert result.data_ptr() == tensor.data_ptr()
    assert torch.equal(result, torch.full((3,), float(world_size())))


def test_result_is_the_output() -> None:
    run_ranks(results)


def wait_expires(rank: int) -> None:
    """A wait with its own timeout raises; the operation continues and completes later."""
    store = make_store("expires")
    tensor = torch.full((100,), float(rank + 1))
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        began = time.monotonic()
        text = error_of(lambda: work.wait(timedelta(seconds=0.3)))
        assert 0.2 < time.monotonic() - began < 10
        assert "time" in text.lower(), text
        assert not work.is_completed()
        store.set("expired", "1")
        work.wait()
    else:
        store.wait(["expired"])
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
    assert work.is_success()
    assert torch.equal(tensor, torch.full((100,), 3.0))
    got = torch.ones(5)
    dist.all_reduce(got)
    assert got[0] == 2


@not_gloo
def test_a_wait_that_expires_does_not_end_the_operation() -> None:
    run_ranks(wait_expires)


def receive_wait_expires(rank: int) -> None:
    store = make_store("receive")
    if rank == 0:
        got = torch.zeros(8)
        work = dist.irecv(got, 1)
        error_of(lambda: work.wait(timedelta(seconds=0.2)))
        store.set("expired", "1")
        wait_until(work.is_completed, "the receive completes after an expired wait")
        assert torch.equal(got, torch.ones(8))
    else:
        store.wait(["expired"])
        dist.send(torch.ones(8), 0)
    dist.barrier()


@not_gloo
def test_a_receive_outlives_an_expired_wait() -> None:
    run_ranks(receive_wait_expires)


def operation_times_out(rank: int) -> str:
    """Only rank 0 calls: the group's timeout fails the Work on rank 0, with a culprit."""
    store = make_store("operation")
    text = ""
    if rank == 0:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future()
        wait_until(work.is_completed, "the operation fails by itself", 30)
        assert not work.is_success()
        assert has_exception(work)
        text = error_of(work.wait)
        assert error_of(future.wait)
        store.set("failed", "1")
    else:
        store.wait(["failed"])
    return text


@not_gloo
def test_an_operation_that_times_out_names_the_absent_rank() -> None:
    text = run_ranks(operation_times_out, group_timeout_s=1.5)[0]
    for word in ["all_reduce", "rank 1", "timed out"]:
        assert word in text.lower(), text


def centuries(rank: int) -> None:
    """A TimePoint of C++ ends after 292 years."""
    long = timedelta(days=150_000)
    group = dist.new_group(timeout=long)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), 2.0))
    store = make_store("centuries")
    if rank == 0:
        got = torch.zeros(3)
        work = dist.irecv(got, 1, group=group)
        store.set("posted", "1")
        assert work.wait(long)
        assert torch.equal(got, tensor)
    else:
        store.wait(["posted"])
        dist.send(tensor, 0, group=group)


def test_the_longest_time_out_does_not_expire_at_once() -> None:
    run_ranks(centuries)


def waits_from_threads(rank: int) -> None:
    """Several threads wait for one Work; Python threads run meanwhile (the GIL is free)."""
    store = make_store("threads")
    ticks = 0
    if rank == 1:
        store.wait(["waiting"])
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    finished: list[float] = []
    threads = [
        threading.Thread(target=lambda: (work.wait(), finished.append(tensor[0].item())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    if rank == 0:
        while ticks < 1000:  # impossible if a waiting thread held the GIL
            ticks += 1
        store.set("waiting", "1")
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert finished == [2.0] * 4


def test_several_threads_wait_for_one_work() -> None:
    run_ranks(waits_from_threads)


def works_outlive_the_group(rank: int) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    future = work.get_future()
    dist.destroy_process_group()
    assert work.is_completed()
    assert torch.equal(future.value()[0], torch.full((3,), 2.0))


def test_a_work_outlives_its_group() -> None:
    run_ranks(works_outlive_the_group)


def dropped_works(rank: int) -> None:
    """Works without a waiter complete; destroying the group does not wait forever."""
    for _ in range(50):
        dist.all_reduce(torch.ones(1000), async_op=True)
    last = torch.ones(2)
    dist.all_reduce(last)
    assert last[0] == 2


def test_works_nobody_waits_for() -> None:
    run_ranks(dropped_works)


def profiled(rank: int) -> list[str]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        dist.all_reduce(torch.ones(7))
        dist.broadcast(torch.ones(7), 0)
    names = [event.name for event in profiler.events()]
    return [name for name in names if name.startswith(dist.get_backend() + ":")]


def test_operations_appear_in_the_profile() -> None:
    for names in run_ranks(profiled):
        assert any(name.endswith(":all_reduce") for name in names), names
        assert any(name.endswith(":broadcast") for name in names), names


def waits_for_any(rank: int) -> None:
    from torch_resilient._native import load

    wait_any = load().wait_any
    store = make_store("any")
    if rank == 1:
        for tag in (2, 0, 1):
            store.wait([f"send {tag}"])
            dist.send(torch.full((4,), float(tag)), 0, tag=tag)
        return
    assert wait_any([]) is None
    tensors = [torch.zeros(4) for _ in range(3)]
    works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(tensors)]
    assert wait_any(works, 0.0) is None
    assert wait_any(works, 0.01) is None
    found: list[int | None] = []
    # Two threads wait for the same works, one of them for some of them only.
    threads = [
        threading.Thread(target=lambda: found.append(wait_any(works))),
        threading.Thread(target=lambda: found.append(wait_any(works[1:]))),
    ]
    for thread in threads:
        thread.start()
    store.set("send 2", "1")
    for thread in threads:
        thread.join(20)
    assert sorted(str(each) for each in found) == ["1", "2"]
    store.set("send 0", "1")
    assert wait_any(works[:2]) == 0
    store.set("send 1", "1")
    assert wait_any([works[1]]) == 0
    assert [int(tensor[0]) for tensor in tensors] == [0, 1, 2]
    with pytest.raises(ValueError, match="timeout_s: expected 0 to 1e9"):
        wait_any(works, -1.0)


@not_gloo
def test_waiting_for_the_first_of_several_works() -> None:
    run_ranks(waits_for_any)


def a_failure_is_an_end(rank: int) -> None:
    from torch_resilient._native import load

    store = make_store("failure")
    if rank == 0:
        works = [dist.irecv(torch.zeros(4), 1, tag=tag) for tag in range(2)]
        store.set("posted", "1")
        assert load().wait_any(works) in (0, 1)
        with pytest.raises(RuntimeError, match="rank 1"):
            works[0].wait()
    else:
        store.wait(["posted"])


@not_gloo
def test_a_failed_work_has_ended() -> None:
    run_ranks(a_failure_is_an_end)


def other_backends_work(rank: int) -> None:
    from torch_resilient._native import load

    works = [dist.all_reduce(torch.ones(1), async_op=True)]
    with pytest.raises(TypeError, match="works of the resilient backend only"):
        load().wait_any(works, 0.0)
    works[0].wait()


def test_works_of_another_backend_are_refused() -> None:
    run_ranks(other_backends_work, backend="gloo")


def _asked_before_the_end(rank: int) -> None:
    if rank == 1:
        dist.barrier()
        dist.recv(torch.empty(1 << 22), 0)
        return
    work = dist.isend(torch.ones(1 << 22), 1)
    assert work is not None
    with pytest.raises(RuntimeError, match="has not completed"):
        zero_filled(work)
    dist.barrier()
    work.wait()
    assert zero_filled(work) == []


@pytest.mark.skipif(on_gloo(), reason="only this backend drops anything")
def test_zeros_of_a_send_are_known_at_its_end_only() -> None:
    run_ranks(_asked_before_the_end)
