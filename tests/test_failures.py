"""Ranks die, hang, come late or call something else: which ranks notice, when, with what error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    Outcome,
    RanksFailed,
    error_of,
    init_group,
    make_store,
    on_gloo,
    run_outcomes,
    run_ranks,
    wait_until,
    wait_until_pending,
    world_size,
)

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo promises none of this")

# The news of a death reach everybody within this time. The loaded machine that runs the tests may
# need longer, but a timeout of an operation (LIMIT_S and more) must stay apart from it.
DEATH_S = 1.0
LOAD = 3.0
LIMIT_S = 20.0

MIB = 1 << 20


def mebibytes(n: float, value: float) -> torch.Tensor:
    return torch.full((int(n * MIB) // 4,), float(value))


def start_operation(name: str, rank: int, victim: int) -> dist.Work:
    """Starts a collective; every rank needs something from `victim` for it."""
    size = world_size()
    mine = mebibytes(8, rank)
    work: Any
    if name == "all_reduce":
        work = dist.all_reduce(mine, async_op=True)
    elif name == "broadcast":
        work = dist.broadcast(mine, victim, async_op=True)
    elif name == "all_gather":
        work = dist.all_gather([mine.clone() for _ in range(size)], mine, async_op=True)
    elif name == "reduce_scatter":
        parts = [mebibytes(4, rank) for _ in range(size)]
        work = dist.reduce_scatter(torch.empty_like(parts[0]), parts, async_op=True)
    elif name == "all_to_all":
        parts = [mebibytes(4, rank) for _ in range(size)]
        work = dist.all_to_all_single(
            torch.empty(size * parts[0].numel()), torch.cat(parts), async_op=True
        )
    elif name == "scatter":
        lists = [mebibytes(4, r) for r in range(size)] if rank == victim else None
        work = dist.scatter(mebibytes(4, 0), lists, victim, async_op=True)
    elif name == "barrier":
        work = dist.barrier(async_op=True) if rank != victim else None
    elif name == "recv":
        if rank == victim:
            return dist.isend(mine, (rank + 1) % size)  # type: ignore[return-value]
        work = dist.irecv(mine, victim)
    else:
        raise AssertionError(name)
    return work  # type: ignore[no-any-return]


def paths_bytes_sent() -> int:
    from torch_resilient import stats

    return sum(path.bytes_sent for peer in stats().peers for path in peer.paths)


def bytes_acknowledged() -> int:
    from torch_resilient import stats

    return sum(peer.bytes_sent for peer in stats().peers)


def wait_until_in_barrier(store: dist.Store, ranks: list[int]) -> None:
    """Waits for the ranks in the barrier; the victim takes no part in it."""
    store.wait([f"in/{r}" for r in ranks])


def failure_in(rank: int, name: str, victim: int, sign: int, warm: bool) -> tuple[float, str]:
    """`victim` gets signal `sign` in mid-operation; the others return when and how they failed.

    The time is in seconds since the signal.
    """
    from torch_resilient import faults

    if warm:
        dist.all_reduce(torch.ones(1 << 18))
        dist.barrier()
    store = make_store("test")
    store.set(f"ready/{rank}", "")
    store.wait([f"ready/{r}" for r in range(world_size())])
    if rank == victim:
        # Slow enough that the operation cannot end before the signal.
        slow = faults.limit(1e6)
        before = paths_bytes_sent()
        work = start_operation(name, rank, victim)
        if name != "barrier":
            wait_until(lambda: paths_bytes_sent() - before > 100_000, "the operation is under way")
        else:
            wait_until_in_barrier(store, [r for r in range(world_size()) if r != victim])
        store.set("at", repr(time.monotonic()))
        os.kill(os.getpid(), sign)
        # Only a stopped rank gets here, when the others continue it.
        slow.clear()
        error_of(work.wait)
        return 0.0, ""
    work = start_operation(name, rank, victim)
    if name == "barrier":
        wait_until_pending()
        store.set(f"in/{rank}", "")
    error = error_of(work.wait)
    failed_at = time.monotonic()
    signalled_at = float(store.get("at"))
    # A survivor stays until all have failed: its own exit must not be the cause they see.
    store.set(f"failed/{rank}", "")
    store.wait([f"failed/{r}" for r in range(world_size()) if r != victim])
    return failed_at - signalled_at, error


def victim_ended(outcomes: list[Outcome], victim: int) -> None:
    """The survivors returned, and only they."""
    assert outcomes[victim].exit_code == -signal.SIGKILL
    if not all(o.ok for o in outcomes if o.rank != victim):
        raise RanksFailed(outcomes)


EVERY_OPERATION = [
    "all_reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "scatter",
    "barrier",
    "recv",
]


def report(what: str, times: list[float]) -> None:
    print(f"{what}: failed after {', '.join(f'{t:.3f}' for t in sorted(times))} s")


@pytest.mark.parametrize(
    ("name", "size"),
    # Among 11, most are connected to few, so the news need messengers.
    [(name, 4) for name in EVERY_OPERATION]
    + [("all_reduce", 11), ("broadcast", 11), ("barrier", 11)],
)
def test_all_survivors_learn_who_died(name: str, size: int) -> None:
    victim = 2
    outcomes = run_outcomes(
        failure_in,
        name,
        victim,
        signal.SIGKILL,
        size == 4,
        world_size=size,
        group_timeout_s=LIMIT_S,
    )
    victim_ended(outcomes, victim)
    survivors = [o for o in outcomes if o.rank != victim]
    report(f"{name} of {size}", [o.value[0] for o in survivors])
    for outcome in survivors:
        took, error = outcome.value
        assert took < DEATH_S * LOAD, error
        assert re.search(rf"rank {victim} \(host .*\) died", error), error
        assert f"failed on rank {outcome.rank}" in error
        assert "elapsed" in error


def wait_for_any(rank: int) -> tuple[float, list[str]]:
    """Rank 1 dies; rank 0 returns how long after that its receives from any source failed."""
    dist.barrier()
    store = make_store("test")
    if rank == 1:
        store.wait(["waiting"])
        store.set("at", repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.irecv(torch.zeros(4))
    assert work is not None
    wait_until_pending()
    store.set("waiting", "")
    # The second one starts when no peer is left.
    errors = [error_of(work.wait), error_of(lambda: dist.recv(torch.zeros(4)))]
    return time.monotonic() - float(store.get("at")), errors


def test_a_receive_from_any_source_ends_with_the_last_rank() -> None:
    outcomes = run_outcomes(wait_for_any, world_size=2, group_timeout_s=LIMIT_S)
    victim_ended(outcomes, 1)
    seconds, errors = outcomes[0].value
    assert seconds < DEATH_S * LOAD
    assert "recv of float32[4] from any" in errors[0]
    for text in errors:
        assert "no rank is left to send" in text


def receive_what_the_gone_have_sent(rank: int) -> str:
    """Rank 1 sends and leaves; rank 0 receives from any source once no peer is left."""
    dist.barrier()
    if rank == 1:
        for i in range(3):
            dist.send(torch.full((4,), float(i)), 0, tag=6)
        return ""
    assert "no rank is left to send" in error_of(lambda: dist.recv(torch.zeros(4), tag=9))
    for i in range(3):
        got = torch.zeros(4)
        assert dist.recv(got, tag=6) == 1
        assert torch.equal(got, torch.full((4,), float(i)))
    return error_of(lambda: dist.recv(torch.zeros(4), tag=6))


def test_a_receive_from_any_source_gets_what_the_gone_have_sent() -> None:
    error = run_ranks(receive_what_the_gone_have_sent, world_size=2)[0]
    assert "no rank is left to send" in error


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_to_all", "barrier", "recv"])
def test_at_the_time_out_all_learn_who_hangs(name: str) -> None:
    victim, limit_s = 2, 4.0  # the others have a quarter of it to say that they live
    outcomes = run_outcomes(hang_in, name, victim, limit_s, world_size=4, group_timeout_s=limit_s)
    if not all(o.ok for o in outcomes):
        raise RanksFailed(outcomes)
    survivors = [o for o in outcomes if o.rank != victim]
    report(f"{name}, limit {limit_s}", [o.value[0] for o in survivors])
    for outcome in survivors:
        took, error = outcome.value
        if name == "recv" and outcome.rank != 3:
            continue
        assert limit_s * 0.9 < took < limit_s + LOAD, error
        assert f"Timed out waiting {int(limit_s * 1000)}ms" in error
        assert re.search(rf"rank {victim} \(host .*\) does not respond", error), error
        assert re.search(r"last sign of life \d[\d.]* (?:ms|s) ago", error), error
        # The last operation that this rank has seen from there.
        assert re.search(r"then in \w+\([a-z0-9]+.*\) #[23]", error), error
    if name == "broadcast":
        errors = [o.value[1] for o in survivors]
        assert any("then in broadcast(float32[2097152], root=2) #3" in e for e in errors), errors


def hang_in(rank: int, name: str, victim: int, limit_s: float) -> tuple[float, str]:
    """Like failure_in, for a rank that is stopped; it continues when the others are done.

    The time is in seconds since the first of the others began: its time-out ends it for all.
    """
    from torch_resilient import faults, stats

    dist.all_reduce(torch.ones(1 << 18))
    dist.barrier()
    store = make_store("test")
    others = [r for r in range(world_size()) if r != victim]
    if rank == victim:
        store.set("pid", str(os.getpid()))
        slow = faults.limit(4e6)
        before = paths_bytes_sent()
        before_each = {p.rank: sum(path.bytes_sent for path in p.paths) for p in stats().peers}
        work = start_operation(name, rank, victim)
        # More than all that was ever sent before: some of it is of this operation.
        if name == "broadcast":  # to each, since any of them may be the first to give up
            wait_until(
                lambda: all(p.bytes_sent > before_each[p.rank] for p in stats().peers),
                "a first piece has arrived everywhere",
            )
        elif name != "barrier":
            wait_until(lambda: bytes_acknowledged() > before, "the first pieces have arrived")
        else:
            wait_until_in_barrier(store, others)
        os.kill(os.getpid(), signal.SIGSTOP)
        slow.clear()
        if work is not None:
            with contextlib.suppress(RuntimeError):  # it may have sent all it had to
                work.wait()
        return 0.0, ""
    pid = int(store.get("pid"))
    starters = others if name != "recv" else [3]
    if rank in starters:
        store.set(f"started/{rank}", repr(time.monotonic()))
        work = start_operation(name, rank, victim)
        if name == "barrier":
            wait_until_pending()
            store.set(f"in/{rank}", "")
        error = error_of(work.wait)
    else:
        error = ""
    failed_at = time.monotonic()
    store.set(f"failed/{rank}", "")
    store.wait([f"failed/{r}" for r in others])
    if rank == others[0]:
        os.kill(pid, signal.SIGCONT)
    first = min(float(store.get(f"started/{r}")) for r in starters)
    return failed_at - first, error


def in_a_slow_network(rank: int) -> str:
    """One rank gives up in the middle, while each waits for the other; the other has time."""
    from torch_resilient import faults

    init_group(timeout_s=4 if rank == 0 else 60)
    dist.barrier()
    with faults.limit(4e6):  # 16 s
        error = error_of(lambda: dist.broadcast(mebibytes(64, rank), 0))
    dist.destroy_process_group()
    return error


def test_a_time_out_in_a_slow_network_says_whose_it_is() -> None:
    own, others = run_ranks(in_a_slow_network, init=False)
    assert "failed on rank 0: Timed out waiting 4000ms: waiting for each other" in own, own
    assert re.search(r"rank 1: \d of \d paths up", own), own
    assert re.search("failed on rank 1: rank 0 (gave up|reports)", others), others


def others_go_on(rank: int) -> str:
    store = make_store("test")
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    if rank == 0:
        error = error_of(lambda: dist.recv(torch.empty(1), 2))
    # Point-to-point among the living is as good as before.
    peer = 1 - rank
    for i in range(5):
        sent = torch.full((1 << 16,), float(rank * 10 + i))
        got = torch.empty(1 << 16)
        work = dist.isend(sent, peer)
        dist.recv(got, peer)
        work.wait()
        assert torch.equal(got, torch.full((1 << 16,), float(peer * 10 + i)))
    pair = dist.new_group([0, 1], use_local_synchronization=True)
    both = torch.ones(1000) * (rank + 1)
    dist.all_reduce(both, group=pair)
    assert torch.equal(both, torch.full((1000,), 3.0))
    store.set(f"done/{rank}", "")
    store.wait(["done/0", "done/1"])
    return error


def test_the_living_go_on_without_the_dead() -> None:
    outcomes = run_outcomes(others_go_on, world_size=3)
    victim_ended(outcomes, 2)
    assert re.search(r"rank 2 \(host .*\) died", outcomes[0].value)


def recv_from_a_late_one(rank: int) -> tuple[str, float]:
    """A timeout affects only its operation."""
    store = make_store("test")
    got = torch.empty(4)
    if rank == 0:
        started = time.monotonic()
        error = error_of(lambda: dist.recv(got, 1, tag=5))
        took = time.monotonic() - started
        store.set("failed", "")
    else:
        store.wait(["failed"])
        error, took = "", 0.0
    ones = torch.ones(100)
    dist.all_reduce(ones)
    assert torch.equal(ones, torch.full((100,), 3.0))
    if rank == 1:
        dist.send(torch.full((4,), 7.0), 0, tag=6)
    elif rank == 0:
        dist.recv(got, 1, tag=6)
        assert torch.equal(got, torch.full((4,), 7.0))
    dist.barrier()
    return error, took


def test_the_group_is_usable_after_a_message_has_timed_out() -> None:
    error, took = run_ranks(recv_from_a_late_one, world_size=3, group_timeout_s=2)[0]
    assert "recv of float32[4] from rank 1, tag 5" in error
    assert "Timed out waiting 2000ms" in error
    assert "rank 1" in error
    assert took < 2 + LOAD


# The test is about lateness, so it sleeps: longer than it takes to ask an idle peer for a sign of
# life and to miss the answer (heartbeat_s and stall_timeout_s, 0.5 s each; a look every 0.1 s).
LATE_S = 1.3


def late(rank: int) -> None:
    if rank == 1:
        time.sleep(LATE_S)
    x = torch.ones(1 << 18) * rank
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((1 << 18,), 3.0))
    if rank == 2:
        time.sleep(LATE_S)
        dist.send(x, 0)
    elif rank == 0:
        dist.recv(x, 2)
    dist.barrier()


def test_a_rank_that_is_late_is_no_error() -> None:
    run_ranks(late, world_size=3)


# ---- different calls ----------------------------------------------------------------------


def call(name: str, rank: int, group: Any) -> None:
    """One of the operations that do not fit each other."""
    x = torch.ones(1000) * (rank + 1)
    if name == "all_reduce":
        dist.all_reduce(x, group=group)
    elif name == "all_reduce, max":
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    elif name == "all_reduce, longer":
        dist.all_reduce(torch.ones(1001), group=group)
    elif name == "all_reduce, large":
        dist.all_reduce(torch.ones(1 << 20), group=group)
    elif name == "all_reduce, int":
        dist.all_reduce(torch.ones(1000, dtype=torch.int32), group=group)
    elif name == "broadcast":
        dist.broadcast(x, 0, group=group)
    elif name == "broadcast from 1":
        dist.broadcast(x, 1, group=group)
    elif name == "broadcast, large":
        dist.broadcast(torch.ones(1 << 20), 0, group=group)
    elif name == "broadcast, shorter":
        dist.broadcast(torch.ones(999), 0, group=group)
    elif name == "all_gather":
        dist.all_gather([torch.empty(1000) for _ in range(world_size())], x, group=group)
    elif name == "barrier":
        dist.barrier(group=group)
    elif name == "reduce to 0":
        dist.reduce(x, 0, group=group)
    elif name == "reduce to 1":
        dist.reduce(x, 1, group=group)
    elif name == "reduce_scatter" or name == "reduce_scatter, other parts":
        parts = [mebibytes(2, 1) for _ in range(world_size())]
        parts[-1 if name == "reduce_scatter" else 0] = mebibytes(4, 1)
        dist.reduce_scatter(torch.empty_like(parts[rank]), parts, group=group)
    elif name == "all_reduce of two" or name == "all_reduce of two, swapped":
        tensors = [mebibytes(2, 1), mebibytes(4, 1)]
        with dist._coalescing_manager(group):
            for tensor in tensors if name == "all_reduce of two" else reversed(tensors):
                dist.all_reduce(tensor, group=group)
    elif name == "all_gather of two" or name == "all_gather of two, one int":
        with dist._coalescing_manager(group):
            for dtype in [torch.float32, torch.int32 if "int" in name else torch.float32]:
                gathered = torch.empty(4 * world_size(), dtype=dtype)
                dist.all_gather_into_tensor(gathered, gathered[:4].clone(), group=group)
    elif name == "nothing":
        pass
    else:
        raise AssertionError(name)


PAIRS = [
    ("all_reduce", "broadcast"),
    ("all_reduce", "all_gather"),
    ("all_reduce", "barrier"),
    ("all_reduce", "all_reduce, max"),
    ("all_reduce", "all_reduce, longer"),
    ("all_reduce", "all_reduce, large"),
    ("all_reduce", "all_reduce, int"),
    ("broadcast", "broadcast from 1"),
    ("broadcast", "broadcast, shorter"),
    ("broadcast, large", "broadcast"),
    ("reduce to 0", "reduce to 1"),
    # The totals are equal, and the pieces have equal sizes.
    ("reduce_scatter", "reduce_scatter, other parts"),
    ("all_reduce of two", "all_reduce of two, swapped"),
    ("all_gather of two", "all_gather of two, one int"),
]


def different_calls(rank: int) -> list[str]:
    """Uses a separate group for each pair, because a mismatch that one side missed ends a group."""
    errors = []
    odd = world_size() - 1
    for names in PAIRS:
        group = dist.new_group(list(range(world_size())), timeout=timedelta(seconds=4))

        def both(names: tuple[str, str] = names, group: Any = group) -> None:
            call(names[rank == odd], rank, group)
            # If one side needs nothing from the other, the next operation fails.
            call("barrier", rank, group)

        errors.append(error_of(both))
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_all_learn_who_called_something_else(size: int) -> None:
    by_rank = run_ranks(different_calls, world_size=size)
    odd = size - 1
    for i, names in enumerate(PAIRS):
        kinds = [re.split("[ ,]", name)[0] for name in names]
        for rank in range(size):
            error = by_rank[rank][i]
            print(f"{names} on rank {rank} of {size}: {error[:300]}")
            # Both roots wait for each other, and neither sends: only the timeout ends this.
            assert ("Timed out" in error) == (size == 2 and kinds[0] == "reduce"), error
            theirs = rf"rank {odd} called {kinds[1]}\("
            refused = rf"rank {odd} refused it: .*where the receiver called {kinds[1]}\("
            assert re.search(f"{theirs}|{refused}", error), error
            ours = rf"rank \d called {kinds[0]}\("
            refused = rf"rank \d refused it: .*where the receiver called {kinds[0]}\("
            assert re.search(f"{ours}|{refused}", error), error
            assert len(set(re.findall(r"called (\w+\([^)]*\))", error))) > 1, error


def mismatch_after_mismatch(rank: int) -> None:
    size, store = world_size(), make_store("test")
    for i in range(10):
        # Each needs something of each, so it fails on all.
        name = "all_reduce, longer" if rank == i % size else "all_reduce"
        error_of(partial(call, name, rank, None))
        store.set(f"failed/{i}/{rank}", "")
        store.wait([f"failed/{i}/{r}" for r in range(size)])
        ones = torch.ones(1000)
        dist.all_reduce(ones)
        assert torch.equal(ones, torch.full((1000,), float(size)))


@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_that_fails_on_all_leaves_the_group_usable(size: int) -> None:
    run_ranks(mismatch_after_mismatch, world_size=size)


def barriers_after_a_mismatch(rank: int) -> str:
    with contextlib.suppress(RuntimeError):  # ranks 0 and 1 have nothing to wait for
        call("broadcast, shorter" if rank == 2 else "broadcast", rank, None)
    return error_of(lambda: [dist.barrier() for _ in range(100)])


def test_a_mismatch_that_some_missed_ends_the_group_on_all() -> None:
    for error in run_ranks(barriers_after_a_mismatch, world_size=3, group_timeout_s=10):
        assert "float32[999]" in error, error


def one_call_fewer(rank: int) -> tuple[str, float]:
    dist.all_reduce(torch.ones(10))
    dist.barrier()
    started = time.monotonic()
    if rank == 1:
        store = make_store("test")
        store.wait(["failed/0", "failed/2"])
        return "", 0.0
    error = error_of(lambda: dist.all_reduce(torch.ones(10)))
    make_store("test").set(f"failed/{rank}", "")
    return error, time.monotonic() - started


def test_a_time_out_says_who_has_not_called() -> None:
    values = run_ranks(one_call_fewer, world_size=3, group_timeout_s=4)
    for rank in (0, 2):
        error, took = values[rank]
        assert "Timed out waiting 4000ms" in error
        assert "not called by all: rank 1" in error
        assert "its last collective was #2, barrier" in error
        assert took < 4 + LOAD


def called_too_late(rank: int) -> str:
    store = make_store("test")
    if rank == 2:
        store.wait(["failed/0", "failed/1"])
        # These come behind the news of the failure, which ends the operation at its beginning.
        for other in (0, 1):
            dist.recv(torch.zeros(1), other)
    error = error_of(lambda: dist.all_reduce(torch.ones(4000)))
    store.set(f"failed/{rank}", "")
    if rank != 2:
        dist.send(torch.ones(1), 2)
    return error


def test_an_error_has_the_facts_of_its_own_rank_once_and_says_what_they_count() -> None:
    errors = run_ranks(called_too_late, world_size=3, group_timeout_s=4)
    for rank, error in enumerate(errors):
        (facts,) = re.findall(r"\[.*? elapsed", re.sub(r"\w+\[\d+\]", "", error))
        count = "0 of 0" if rank == 2 else r"\d+ of \d+"
        assert re.fullmatch(
            rf"\[this rank: {count} bytes sent, {count} bytes received, \S+ (us|ms|s) elapsed",
            facts,
        ), error
        assert len(re.findall("failed on rank", error)) == 1, error
    assert re.search(r"failed on rank 2: rank [01] reports: Timed out waiting 4000ms", errors[2])


def destroyed_too_early(rank: int) -> str:
    group = dist.new_group(timeout=timedelta(seconds=4))
    dist.all_reduce(torch.ones(10), group=group)
    dist.barrier()
    store = make_store("test")
    error = ""
    if rank == 0:
        dist.destroy_process_group(group)
        store.set("destroyed", "")
        store.wait(["failed"])
    else:
        store.wait(["destroyed"])
        error = error_of(lambda: dist.all_reduce(torch.ones(10), group=group))
        store.set("failed", "")
    return error


def test_a_time_out_says_who_has_destroyed_the_group() -> None:
    error = run_ranks(destroyed_too_early)[1]
    assert re.search(r"rank 0 \(host .*\) is alive, but does not answer for this group", error)


def different_messages(rank: int, recv_first: bool) -> list[str]:
    peer = 1 - rank
    errors = []
    store = make_store("test")
    token = torch.zeros(1)
    for i, (sent, wanted) in enumerate(
        [
            (torch.ones(10), torch.empty(11)),
            (torch.ones(11), torch.empty(10)),
            (torch.ones(10), torch.empty(10, dtype=torch.int32)),
            (torch.ones(1 << 20), torch.empty(1 << 19)),
            (torch.ones(1 << 19), torch.empty(1 << 20)),
        ]
    ):
        if rank == 0:
            if recv_first:
                dist.recv(token, peer, tag=1)
            work = dist.isend(sent, peer)
            if recv_first:
                errors.append(error_of(work.wait))
            else:
                store.set(f"sent/{i}", "")
                # Taken in before anybody knew better: a send of that kind has succeeded.
                with contextlib.suppress(RuntimeError):
                    work.wait()
        else:
            before = wanted.fill_(3).clone()
            if not recv_first:
                store.wait([f"sent/{i}"])
            got = dist.irecv(wanted, peer)
            if recv_first:
                # Through the receive, which a busy machine may not have posted yet.
                dist.send(token, peer, tag=1)
            errors.append(error_of(got.wait))
            assert torch.equal(wanted, before), "wrong data was written"
        dist.barrier()
    return errors


@pytest.mark.parametrize("recv_first", [True, False])
def test_messages_that_do_not_fit_fail_on_both_sides(recv_first: bool) -> None:
    sender, receiver = run_ranks(different_messages, recv_first, world_size=2, env=NO_COPIES)
    assert len(sender) == (5 if recv_first else 0)
    assert len(receiver) == 5
    for error in sender + receiver:
        print(error)
        assert re.search(r"(float32|int32)\[\d+\].*(float32|int32)\[\d+\]", error), error


# Sends then end only when they are acknowledged, and so can tell.
NO_COPIES = {"TORCH_RESILIENT_COPY_BYTES": "0", "TORCH_RESILIENT_STAGING_BYTES": "0"}


# ---- abort and destroy --------------------------------------------------------------------


def abort_elsewhere(rank: int) -> tuple[str, float]:
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    dist.barrier()
    store = make_store("test")
    aborted_at = []

    def abort() -> None:
        store.wait([f"in/{r}" for r in range(3)])
        aborted_at.append(time.monotonic())
        backend.abort()

    work = dist.irecv(torch.empty(10), (rank + 1) % 3)
    assert work is not None
    wait_until_pending()
    store.set(f"in/{rank}", "")
    if rank == 0:
        thread = threading.Thread(target=abort)
        thread.start()
    error = error_of(work.wait)
    failed_at = time.monotonic()
    if rank == 0:
        thread.join()
        store.set("at", repr(aborted_at[0]))
    return error, failed_at - float(store.get("at"))


def test_abort_from_another_thread_ends_all_waiting() -> None:
    values = run_ranks(abort_elsewhere, world_size=3)
    for error, took in values:
        assert "rank 0 aborted the group" in error
        assert took < DEATH_S * LOAD


def abort_in_a_group_apart(rank: int) -> str:
    """Ranks 1 and 2 make a group that counts them 0 and 1, as jobs do that meet others."""
    dist.barrier()
    error = ""
    if rank > 0:
        store = make_store("apart")
        group, _ = dist.distributed_c10d._new_process_group_helper(
            2,
            rank - 1,
            [],
            "resilient",
            store,
            group_name="apart",
            timeout=timedelta(seconds=20),
        )
        group.barrier().wait()
        if rank == 1:
            store.wait(["pending"])
            group._get_backend(torch.device("cpu")).abort()
        else:
            work = group.recv([torch.empty(10)], 0, 0)
            store.set("pending", "")
            error = error_of(work.wait)
    dist.barrier()
    return error


def test_abort_reaches_ranks_that_other_groups_count_otherwise() -> None:
    assert "rank 0 aborted the group" in run_ranks(abort_in_a_group_apart, world_size=3)[2]


def destroy_with_pending(rank: int) -> tuple[str, float]:
    dist.barrier()
    work = dist.irecv(torch.empty(10), 1 - rank)
    started = time.monotonic()
    dist.destroy_process_group()
    took = time.monotonic() - started
    return error_of(work.wait), took


def test_destroy_ends_what_is_pending() -> None:
    for error, took in run_ranks(destroy_with_pending, world_size=2):
        assert "was destroyed" in error or "has left" in error
        assert took < 1 + LOAD
