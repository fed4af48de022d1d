"""Point-to-point messages: any order, any number outstanding, exactly the bytes sent."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    error_of,
    make_store,
    on_gloo,
    run_outcomes,
    run_ranks,
    wait_until,
    world_size,
)

# gloo gives up on everything after a failed operation and matches by tag differently.
not_gloo = pytest.mark.skipif(on_gloo(), reason="gloo does not promise this")


def key_number(key: tuple[int, ...]) -> int:
    number = 0
    for part in key:
        number = (number * 131 + part + 1) % 100003
    return number


def content(numel: int, *key: int) -> torch.Tensor:
    """Values that tell source, order and position apart."""
    return torch.arange(numel, dtype=torch.float32) + float(key_number(key))


def expect(tensor: torch.Tensor, *key: int) -> None:
    want = content(tensor.numel(), *key).view_as(tensor)
    assert torch.equal(tensor, want), f"message {key}: got {tensor.view(-1)[:4].tolist()}"


# ---- orders -------------------------------------------------------------------------------------


def blocking(rank: int) -> None:
    size = world_size()
    for source in range(size):
        for to in range(size):
            if source == to:
                continue
            if rank == source:
                dist.send(content(1001, source, to), to)
            elif rank == to:
                got = torch.empty(1001)
                assert dist.recv(got, source) == source
                expect(got, source, to)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_send_and_recv(size: int) -> None:
    run_ranks(blocking, world_size=size)


def both_send_first(rank: int, numel: int) -> None:
    """Needs sends that do not wait for the matching receive, however large."""
    peer = 1 - rank
    works = [dist.isend(content(numel, rank, i), peer) for i in range(8)]
    got = [torch.empty(numel) for _ in range(8)]
    for i in range(8):
        dist.recv(got[i], peer)
    for i, work in enumerate(works):
        work.wait()
        expect(got[i], peer, i)


@pytest.mark.parametrize("numel", [1, 1000, 1 << 20], ids=["4_B", "4_kB", "4_MiB"])
def test_both_ranks_send_first(numel: int) -> None:
    run_ranks(both_send_first, numel)


def many_outstanding(rank: int, seed: int) -> None:
    """Every pair exchanges many messages; both sides post in one order, wait in another."""
    size = world_size()
    order = random.Random(seed)
    count = 60
    numels = {
        (source, to, i): order.choice([0, 1, 3, 100, 5000, 70000])
        for source in range(size)
        for to in range(size)
        for i in range(count)
    }
    mine = [(kind, peer) for peer in range(size) if peer != rank for kind in ("send", "recv")]
    todo = [entry for entry in mine for _ in range(count)]
    random.Random(seed * 100 + rank).shuffle(todo)
    posted = dict.fromkeys(mine, 0)
    works: list[tuple[Any, torch.Tensor, tuple[int, int, int] | None]] = []
    for kind, peer in todo:
        i = posted[kind, peer]
        posted[kind, peer] += 1
        if kind == "send":
            tensor = content(numels[rank, peer, i], rank, peer, i)
            works.append((dist.isend(tensor, peer), tensor, None))
        else:
            tensor = torch.empty(numels[peer, rank, i])
            works.append((dist.irecv(tensor, peer), tensor, (peer, rank, i)))
    random.Random(seed * 100 + rank + 50).shuffle(works)
    for work, tensor, key in works:
        work.wait()
        if key is not None:
            expect(tensor, *key)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_many_outstanding_in_random_order(size: int, seed: int) -> None:
    run_ranks(many_outstanding, seed, world_size=size)


def tags(rank: int) -> None:
    """Tags are matched out of order; within one tag the order of issue holds."""
    peer = 1 - rank
    works = []
    for tag in [7, 0, 3]:
        for i in range(5):
            works.append(dist.isend(content(50 + tag, rank, tag, i), peer, tag=tag))
    for tag in [3, 7, 0]:
        for i in range(5):
            got = torch.empty(50 + tag)
            dist.recv(got, peer, tag=tag)
            expect(got, peer, tag, i)
    for work in works:
        work.wait()


def test_tags() -> None:
    run_ranks(tags)


def any_source(rank: int) -> None:
    size = world_size()
    if rank == 0:
        seen: dict[int, int] = dict.fromkeys(range(1, size), 0)
        for _ in range(10 * (size - 1)):
            got = torch.empty(3)
            source = dist.recv(got)
            assert source in seen
            expect(got, source, seen[source])  # in order for each source
            seen[source] += 1
        assert all(count == 10 for count in seen.values())
    else:
        for i in range(10):
            dist.send(content(3, rank, i), 0)
    dist.barrier()
    # Any source and a named source at once: a message goes to one of them.
    if rank == 0:
        got = torch.empty(3)
        dist.recv(got, 1, tag=5)
        expect(got, 1, 50)
        source = dist.recv(got, tag=6)
        expect(got, source, 60)
    elif rank == 1:
        works = [dist.isend(content(3, 1, 60), 0, tag=6), dist.isend(content(3, 1, 50), 0, tag=5)]
        for work in works:
            work.wait()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_recv_from_any_source(size: int) -> None:
    run_ranks(any_source, world_size=size)


def batches(rank: int, seed: int) -> None:
    size = world_size()
    for step in range(6):
        plan = random.Random(seed * 1000 + step)
        messages = [
            (source, to, plan.choice([1, 17, 4097]))
            for source in range(size)
            for to in range(size)
            if source != to
            for _ in range(plan.randrange(4))
        ]
        ops, received = [], []
        for i, (source, to, numel) in enumerate(messages):
            if rank == source:
                tensor = content(numel, source, to, i, step)
                ops.append((to, dist.P2POp(dist.isend, tensor, to)))
            elif rank == to:
                tensor = torch.empty(numel)
                ops.append((source, dist.P2POp(dist.irecv, tensor, source)))
                received.append((tensor, (source, to, i, step)))
        # Shuffle, but keep the order towards each peer in each direction.
        keys = [(peer, op.op) for peer, op in ops]
        queues: dict[Any, list[Any]] = {}
        for peer, op in ops:
            queues.setdefault((peer, op.op), []).append(op)
        random.Random(seed * 1000 + step * 10 + rank).shuffle(keys)
        batch = [queues[key].pop(0) for key in keys]
        if batch:
            for work in dist.batch_isend_irecv(batch):
                work.wait()
        for tensor, key in received:
            expect(tensor, *key)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_batch_isend_irecv_in_random_order(size: int, seed: int) -> None:
    run_ranks(batches, seed, world_size=size)


# ---- a random program for each rank -------------------------------------------------------------


def random_program(rank: int, seed: int) -> None:
    """Sends, receives, waits, collectives and pauses, mixed at random; deadlock-free by design:

    in the order of the draw, a receive comes after its isend, and a wait for a send comes after the
    receive.
    """
    size = world_size()
    draw = random.Random(seed)
    dtypes = [torch.float32, torch.int64, torch.uint8, torch.bfloat16]
    unreceived: dict[tuple[int, int, int], list[Any]] = {}  # my sends, not yet waited for
    received: list[Any] = []  # my sends for which a receive has been drawn
    receives: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    backlog: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    for step in range(300):
        kind = draw.random()
        if kind < 0.5 or not backlog:  # a send
            source = draw.randrange(size)
            to = draw.choice([r for r in range(size) if r != source])
            tag = draw.randrange(3)
            numel = draw.choice([0, 1, 2, 31, 1024, 9999, 200_000])
            dtype = draw.choice(dtypes)
            tensor = ((torch.arange(numel) + step) % 127).to(dtype)
            backlog.setdefault((source, to, tag), []).append(tensor)
            if rank == source:
                work = dist.isend(tensor.clone(), to, tag=tag)
                unreceived.setdefault((source, to, tag), []).append(work)
        elif kind < 0.94:  # a receive of one of the messages sent
            source, to, tag = key = draw.choice(sorted(backlog))
            want = backlog[key].pop(0)
            if not backlog[key]:
                del backlog[key]
            later = draw.random() < 0.5
            if rank == source:
                received.append(unreceived[key].pop(0))
            if rank == to:
                got = torch.empty_like(want)
                work = dist.irecv(got, source, tag=tag)
                receives.append((work, got, want))
                if not later:
                    work.wait()
                    assert torch.equal(got, want), f"step {step}"
        elif kind < 0.97:  # a collective in between
            tensor = torch.full((draw.choice([1, 5000]),), float(rank))
            dist.all_reduce(tensor)
            assert tensor[0] == sum(range(size)), f"step {step}"
        else:  # wait for some of my own
            choice = draw.random()
            for work in received[: int(len(received) * choice)]:
                work.wait()
    for key in sorted(backlog):
        source, to, tag = key
        for want in backlog[key]:
            if rank == to:
                got = torch.empty_like(want)
                receives.append((dist.irecv(got, source, tag=tag), got, want))
    for work in received + [work for works in unreceived.values() for work in works]:
        work.wait()
    for i, (work, got, want) in enumerate(receives):
        work.wait()
        assert torch.equal(got, want), f"receive {i}"


@pytest.mark.skipif(on_gloo(), reason="gloo deadlocks in some of these programs")
@pytest.mark.parametrize("seed", range(6))
def test_random_program(seed: int) -> None:
    run_ranks(random_program, seed, world_size=2 + seed % 3)


def both_directions(rank: int) -> None:
    """Small messages in both directions keep their order among large ones."""
    peer = 1 - rank
    draw = random.Random(5)
    numels = [draw.choice([1, 10, 300_000, 3_000_000, 1, 1, 1]) for _ in range(40)]
    works = [dist.isend(content(n, rank, i), peer) for i, n in enumerate(numels)]
    buffers = [torch.empty(n) for n in numels]
    works += [dist.irecv(b, peer) for b in buffers]
    for work in works:
        work.wait()
    for i, buffer in enumerate(buffers):
        expect(buffer, peer, i)


def test_large_and_small_in_both_directions() -> None:
    run_ranks(both_directions)


def from_many_threads(rank: int) -> None:
    """Each thread talks under its own tag; the backend is thread-safe."""
    peer = 1 - rank
    errors: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for i in range(30):
                work = dist.isend(content(200 + tag, rank, tag, i), peer, tag=tag)
                got = torch.empty(200 + tag)
                dist.recv(got, peer, tag=tag)
                expect(got, peer, tag, i)
                work.wait()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_with_tags_of_their_own() -> None:
    run_ranks(from_many_threads)


# ---- tensors ------------------------------------------------------------------------------------


def requires_grad_and_inference(rank: int) -> None:
    if rank == 0:
        dist.send(content(64, 1), 1)
        dist.send(content(64, 2).requires_grad_(), 1)
        with torch.inference_mode():
            dist.send(content(64, 3), 1)
        dist.send(torch.tensor(7.5), 1)
        dist.send(torch.empty(0), 1)
        dist.send(torch.view_as_complex(content(64, 4).view(32, 2)), 1)
    else:
        # Pipelining receives into leaves that require grad.
        buffer = torch.zeros(64, requires_grad=True)
        work = dist.irecv(buffer, 0)
        work.wait()
        expect(buffer.detach(), 1)
        assert buffer.is_leaf
        assert buffer.requires_grad
        (buffer * 2).sum().backward()
        assert torch.equal(buffer.grad, torch.full((64,), 2.0))
        plain = torch.zeros(64)
        dist.recv(plain, 0)
        expect(plain, 2)
        with torch.inference_mode():
            inference = torch.zeros(64)
            dist.recv(inference, 0)
            expect(inference, 3)
        scalar = torch.tensor(0.0)
        dist.recv(scalar, 0)
        assert scalar.item() == 7.5
        dist.recv(torch.empty(0), 0)
        number = torch.zeros(32, dtype=torch.complex64)
        dist.recv(number, 0)
        expect(torch.view_as_real(number).reshape(-1), 4)


def test_kinds_of_tensors() -> None:
    run_ranks(requires_grad_and_inference)


def keeps_alive(rank: int) -> None:
    """The caller drops the tensor, and the Work, right after isend."""
    count, numel = 20, 250_000
    if rank == 0:
        kept = []
        for i in range(count):
            kept.append(dist.isend(content(numel, i), 1))
            gc.collect()
            torch.full((numel,), -1.0)  # would reuse the freed memory
        if not on_gloo():
            kept.clear()
        make_store().set("sent", "1")
        make_store().wait(["received"])
        for work in kept:
            work.wait()
    else:
        make_store().wait(["sent"])
        for i in range(count):
            got = torch.empty(numel)
            dist.recv(got, 0)
            expect(got, i)
        make_store().set("received", "1")


def test_isend_keeps_its_tensor_alive() -> None:
    run_ranks(keeps_alive)


def strided(rank: int) -> None:
    if rank == 0:
        dist.send(content(200, 1).view(20, 10).t(), 1)
        dist.send(content(200, 2).view(20, 10)[:, 3], 1)
    else:
        got = torch.zeros(10, 20)
        dist.recv(got, 0)
        assert torch.equal(got, content(200, 1).view(20, 10).t())
        whole = torch.zeros(20, 10)
        dist.recv(whole[:, 5], 0)
        want = torch.zeros(20, 10)
        want[:, 5] = content(200, 2).view(20, 10)[:, 3]
        assert torch.equal(whole, want)


@not_gloo
def test_noncontiguous_tensors() -> None:
    run_ranks(strided)


# ---- nothing blocks -----------------------------------------------------------------------------


def isend_returns(rank: int) -> None:
    store = make_store("isend")
    if rank == 0:
        big = torch.arange(16 << 20, dtype=torch.int32)  # 64 MiB
        work = dist.isend(big, 1)
        store.set("returned", "1")  # the receiver posts only after this: no rendezvous
        work.wait()
    else:
        store.wait(["returned"])
        got = torch.empty(16 << 20, dtype=torch.int32)
        dist.recv(got, 0)
        assert torch.equal(got, torch.arange(16 << 20, dtype=torch.int32))


def test_isend_of_64_mib_returns_before_the_receive_is_posted() -> None:
    run_ranks(isend_returns)


def completes_without_wait(rank: int) -> None:
    store = make_store("poll")
    if rank == 0:
        work = dist.isend(content(100_000, 9), 1)
    else:
        got = torch.empty(100_000)
        work = dist.irecv(got, 0)
    wait_until(work.is_completed, f"rank {rank}: is_completed() without wait()")
    if rank == 1:
        expect(got, 9)
    assert work.is_success()
    store.add("done", 1)
    wait_until(lambda: store.add("done", 0) == 2, "both ranks are done")


@pytest.mark.skipif(on_gloo(), reason="gloo completes a receive only inside wait()")
def test_completes_without_wait() -> None:
    run_ranks(completes_without_wait)


def not_completed_before_data(rank: int) -> None:
    store = make_store("early")
    if rank == 1:
        got = torch.zeros(10)
        work = dist.irecv(got, 0)
        assert not work.is_completed()
        store.set("asked", "1")
        work.wait()
        assert work.is_completed()
        expect(got, 1)
    else:
        store.wait(["asked"])
        dist.send(content(10, 1), 1)


def test_not_completed_before_the_data_is_there() -> None:
    run_ranks(not_completed_before_data)


def slow_peer_delays_nobody(rank: int) -> None:
    """Rank 0 owes rank 1, which does not read, 64 MiB; rank 2 gets its messages at once."""
    store = make_store("slow")
    if rank == 0:
        stuck = [dist.isend(torch.zeros(4 << 20), 1) for _ in range(4)]
        for i in range(20):
            dist.send(content(1000, i), 2)
            got = torch.empty(1000)
            dist.recv(got, 2)
            expect(got, i, i)
        store.set("talked", "1")
        for work in stuck:
            work.wait()
    elif rank == 1:
        store.wait(["talked"])
        for _ in range(4):
            dist.recv(torch.empty(4 << 20), 0)
    else:
        for i in range(20):
            got = torch.empty(1000)
            dist.recv(got, 0)
            expect(got, i)
            dist.send(content(1000, i, i), 0)


def test_a_peer_that_does_not_read_delays_nobody() -> None:
    run_ranks(slow_peer_delays_nobody, world_size=3)


# ---- mistakes -----------------------------------------------------------------------------------


def mismatch(rank: int, kind: str) -> str:
    """Rank 0 sends what rank 1 does not expect; rank 2 must not notice."""
    error = ""
    if rank == 0:
        dist.isend(torch.ones(10, dtype=torch.float32), 1)
    elif rank == 1:
        if kind == "size":
            got = torch.zeros(12, dtype=torch.float32)
        else:
            got = torch.zeros(10, dtype=torch.int32)
        error = error_of(lambda: dist.irecv(got, 0).wait())
        assert not got.any(), "nothing may be written by a message that does not fit"
    # The next messages between all pairs, and those with rank 2, are unharmed.
    for source in range(3):
        for to in range(3):
            if source == to:
                continue
            if rank == source:
                dist.send(content(40, source, to), to)
            elif rank == to:
                got = torch.zeros(40)
                dist.recv(got, source)
                expect(got, source, to)
    dist.all_reduce(torch.ones(1))
    return error


@not_gloo
@pytest.mark.parametrize("kind", ["size", "dtype"])
def test_a_message_that_does_not_fit_is_refused(kind: str) -> None:
    errors = run_ranks(mismatch, kind, world_size=3, group_timeout_s=15)
    text = errors[1]
    for word in ["rank 0", "rank 1", "float32"]:
        assert word in text, text
    assert ("12" in text and "10" in text) if kind == "size" else "int32" in text, text


def bad_arguments(rank: int) -> None:
    size = world_size()
    assert error_of(lambda: dist.send(torch.ones(1), rank))  # to itself
    assert error_of(lambda: dist.send(torch.ones(1), size))
    assert error_of(lambda: dist.recv(torch.ones(1), -2))
    assert error_of(lambda: dist.isend(torch.ones(1), 1 - rank, tag=-1))
    both_send_first(rank, 10)


@pytest.mark.skipif(on_gloo(), reason="gloo crashes on a negative source")
def test_bad_arguments() -> None:
    run_ranks(bad_arguments)


def recv_times_out(rank: int) -> str:
    """An expired receive names the culprit; the message that comes later is not lost on others."""
    store = make_store("timeout")
    error = ""
    if rank == 1:
        began = time.monotonic()
        error = error_of(lambda: dist.irecv(torch.zeros(4), 0, tag=1).wait())
        assert time.monotonic() - began < 15
        store.set("expired", "1")
        got = torch.zeros(4)
        dist.recv(got, 0, tag=2)
        expect(got, 2)
    else:
        store.wait(["expired"])
        dist.send(content(4, 2), 1, tag=2)
    return error


@not_gloo
def test_a_receive_that_expires_names_the_sender() -> None:
    text = run_ranks(recv_times_out, group_timeout_s=2)[1]
    assert "rank 0" in text, text
    assert "timed out" in text.lower(), text


def dead_sender(rank: int) -> str:
    import os

    if rank == 0:
        dist.all_reduce(torch.ones(1))
        os._exit(3)
    dist.all_reduce(torch.ones(1))
    began = time.monotonic()
    text = error_of(lambda: dist.recv(torch.zeros(4), 0))
    assert time.monotonic() - began < 25, "the death of a peer is noticed before the timeout"
    return text


@not_gloo
def test_a_dead_sender_is_named_soon() -> None:
    outcomes = run_outcomes(dead_sender, group_timeout_s=60, timeout_s=90)
    assert outcomes[0].exit_code == 3
    assert outcomes[1].value is not None, outcomes[1].describe()
    assert "rank 0" in outcomes[1].value, outcomes[1].value


def test_tcp_store() -> None:
    run_ranks(blocking, world_size=3, store="tcp")
