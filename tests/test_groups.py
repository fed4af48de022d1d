"""Process groups: making, splitting, nesting, ending and making them again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import (
    backend_name,
    error_of,
    init_group,
    make_store,
    on_gloo,
    run_outcomes,
    run_ranks,
    scratch,
    wait_until,
    world_size,
)

not_gloo = pytest.mark.skipif(on_gloo(), reason="gloo does not promise this")


def check(group: Any = None, ranks: list[int] | None = None) -> None:
    """A sum over the group's ranks, and a message around it."""
    ranks = ranks if ranks is not None else list(range(dist.get_world_size()))
    me = dist.get_rank()
    tensor = torch.tensor([float(me), 1.0])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [float(sum(ranks)), float(len(ranks))], tensor
    if len(ranks) > 1:
        position = ranks.index(me)
        right, left = ranks[(position + 1) % len(ranks)], ranks[position - 1]
        work = dist.isend(torch.tensor([me]), right, group=group)
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, left, group=group)
        assert got.item() == left
        work.wait()


# ---- sub-groups ---------------------------------------------------------------------------------


def subgroups(rank: int) -> None:
    size = world_size()
    made = {}
    for ranks in [[0, 1], [1, 2, 3], [3, 0], [2], [3, 2, 1, 0][:size]]:
        made[tuple(ranks)] = dist.new_group(ranks)
    for ranks, group in made.items():
        if rank in ranks:
            assert dist.get_rank(group) == sorted(ranks).index(rank)
            assert dist.get_process_group_ranks(group) == sorted(ranks)
            check(group, sorted(ranks))
    check()
    for ranks, group in made.items():
        if rank in ranks:
            dist.destroy_process_group(group)
    check()


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_new_group(store: str) -> None:
    run_ranks(subgroups, world_size=4, store=store)


def groups_in_threads(rank: int) -> None:
    """Four groups over the same ranks at once, each with its own thread."""
    groups = [dist.new_group() for _ in range(4)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            group = groups[index]
            for i in range(25):
                tensor = torch.full((100 * index + 1,), float(rank + index + i))
                dist.all_reduce(tensor, group=group)
                want = sum(r + index + i for r in range(world_size()))
                assert tensor[0] == want, f"group {index} step {i}: {tensor[0]} != {want}"
                gathered = torch.zeros(world_size())
                dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
                assert gathered.tolist() == [float(r) for r in range(world_size())]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("size", [2, 4])
def test_groups_used_at_once_from_several_threads(size: int) -> None:
    run_ranks(groups_in_threads, world_size=size)


def overlapping_order(rank: int) -> None:
    """Ranks enter two groups in opposite orders: legal with asynchronous operations."""
    first, second = dist.new_group(), dist.new_group()
    a, b = torch.ones(10), torch.ones(20)
    calls = [
        lambda: dist.all_reduce(a, group=first, async_op=True),
        lambda: dist.all_reduce(b, group=second, async_op=True),
    ]
    works = [call() for call in (calls if rank == 0 else reversed(calls))]
    for work in works:
        work.wait()
    assert a[0] == b[0] == world_size()


def test_groups_entered_in_opposite_orders() -> None:
    run_ranks(overlapping_order, world_size=3)


def with_local_synchronization(rank: int) -> None:
    ranks = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(ranks, use_local_synchronization=True)
    check(group, ranks)


def test_new_group_with_local_synchronization() -> None:
    run_ranks(with_local_synchronization, world_size=4)


def helpers(rank: int) -> None:
    mine, everyone = dist.new_subgroups(2)
    check(mine, [0, 1] if rank < 2 else [2, 3])
    assert len(everyone) == 2
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    check(mine, [0, 2] if rank % 2 == 0 else [1, 3])


def test_new_subgroups() -> None:
    run_ranks(helpers, world_size=4)


def split(rank: int) -> str:
    try:
        group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    except (RuntimeError, ValueError) as error:
        return str(error)
    check(group, [0, 1] if rank < 2 else [2, 3])
    return ""


def test_split_group() -> None:
    errors = run_ranks(split, world_size=4)
    if any("device" in error for error in errors):
        pytest.skip(f"torch {torch.__version__} splits only groups bound to a GPU: {errors[0]}")
    assert not any(errors), errors


def mesh(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    row, column = divmod(rank, 2)
    check(grid.get_group("data"), [column, column + 2])
    check(grid.get_group("pipe"), [2 * row, 2 * row + 1])
    assert grid["data"].get_local_rank() == row
    flat = grid._flatten("all")
    check(flat.get_group(), [0, 1, 2, 3])


def test_device_mesh() -> None:
    run_ranks(mesh, world_size=4)


# ---- beginning and end --------------------------------------------------------------------------


def again_and_again(rank: int, times: int) -> float:
    """Returns the longest time, in seconds, from the start of a group to its first results."""
    longest = 0.0
    for i in range(times):
        began = time.monotonic()
        init_group(f"round {i}")
        check()
        longest = max(longest, time.monotonic() - began)
        if i % 3 == 0:
            check(dist.new_group())
        dist.destroy_process_group()
    return longest


@pytest.mark.parametrize("store", ["tcp", "file"])
def test_init_and_destroy_many_times(store: str) -> None:
    times = 12 if store == "file" else 4
    longest = run_ranks(
        again_and_again, times, world_size=3, init=False, store=store, timeout_s=100
    )
    if store == "file":  # torch's TCPStore may wait for a name server
        # Far above what it takes (milliseconds), below a handshake that was lost and tried again.
        assert max(longest) < 4, f"a group took {max(longest):.1f} s to start"


def same_prefix(rank: int) -> None:
    """The same store and prefix again: leftovers of one group must not confuse the next."""
    for _ in range(5):
        init_group("same")
        check()
        check(dist.new_group())
        # No rank begins the next round while another is still in this one.
        dist.barrier()
        dist.destroy_process_group()
        store = make_store("between")
        arrived = store.add("arrived", 1)
        target = -(-arrived // world_size()) * world_size()
        wait_until(lambda: store.add("arrived", 0) >= target, "all ranks left")  # noqa: B023


@not_gloo
def test_the_same_store_again() -> None:
    run_ranks(same_prefix, world_size=3, init=False)


def once_without_the_other(rank: int) -> None:
    """The state after a restart by torchrun: before it, rank 0 had joined and rank 1 had not."""
    if rank == 0:
        child = os.fork()
        if child == 0:
            init_group("restarted")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        init_group("restarted")
    store = make_store("between")
    if rank == 0:
        store.set("joined", "1")
    else:
        store.wait(["joined"])
        init_group("restarted")
    check()
    check(dist.new_group())
    dist.destroy_process_group()


@not_gloo
def test_the_same_store_after_a_restart() -> None:
    run_ranks(once_without_the_other, init=False)


def other_settings(rank: int) -> None:
    """Every engine begins with the settings of now: the last one's do not stay."""

    def connections(options: Any = None) -> int:
        store = dist.HashStore()
        dist.init_process_group("resilient", store=store, rank=0, world_size=1, pg_options=options)
        from torch_resilient._groups import find_backend

        found = find_backend().options.wan_connections
        dist.destroy_process_group()
        return int(found)

    name = "TORCH_RESILIENT_INTERFACE"
    os.environ[name] = "no-such-interface"
    assert "no-such-interface" in error_of(connections)
    del os.environ[name]
    assert connections() == 0
    os.environ["TORCH_RESILIENT_WAN_CONNECTIONS"] = "3"
    assert connections() == 3
    import torch_resilient

    assert connections(torch_resilient.Options(wan_connections=7)) == 7
    assert connections() == 3


@not_gloo
def test_a_new_engine_has_the_settings_of_its_first_group() -> None:
    run_ranks(other_settings, world_size=1, init=False)


def first_messages(rank: int, times: int) -> float:
    """Everybody connects to everybody at the same moment, some only to leave at once."""
    longest = 0.0
    for i in range(times):
        init_group(f"first {i}")
        began = time.monotonic()
        if rank == 0:
            for _ in range(world_size() - 1):
                dist.recv(torch.zeros(2))
        else:
            dist.send(torch.ones(2), 0)
        dist.destroy_process_group()
        longest = max(longest, time.monotonic() - began)
    return longest


def test_first_messages_are_prompt() -> None:
    longest = run_ranks(first_messages, 20, world_size=4, init=False, timeout_s=100)
    assert max(longest) < 4, f"first messages took {max(longest):.1f} s"


def per_device(rank: int) -> None:
    init_group("device", backend=f"cpu:{backend_name()}")
    check()
    check(dist.new_group())
    check(dist.new_group(backend="gloo"))
    dist.destroy_process_group()


def test_backend_named_by_device() -> None:
    run_ranks(per_device, init=False)


def beside_gloo(rank: int) -> None:
    """A group of the backend under test inside a job with gloo as the default group."""
    init_group("mixed", backend="gloo")
    ours = dist.new_group(backend=backend_name())
    check()
    check(ours)
    assert dist.get_backend(ours) == backend_name()
    dist.destroy_process_group()


def test_beside_gloo() -> None:
    run_ranks(beside_gloo, init=False, world_size=3)


def alone(rank: int) -> None:
    tensor = torch.arange(6.0)
    want = tensor.clone()
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.reduce(tensor, 0)
    dist.barrier()
    assert torch.equal(tensor, want)
    out = torch.zeros(6)
    dist.all_gather([out], tensor)
    assert torch.equal(out, want)
    dist.all_gather_into_tensor(out.zero_(), tensor)
    assert torch.equal(out, want)
    dist.reduce_scatter_tensor(out.zero_(), tensor)
    assert torch.equal(out, want)
    dist.all_to_all_single(out.zero_(), tensor)
    assert torch.equal(out, want)
    dist.gather(tensor, [out.zero_()], 0)
    assert torch.equal(out, want)
    dist.scatter(out.zero_(), [tensor], 0)
    assert torch.equal(out, want)
    everything: list[Any] = [None]
    dist.all_gather_object(everything, "me")
    assert everything == ["me"]
    dist.group.WORLD.monitored_barrier(timedelta(seconds=5))
    assert dist.all_reduce(tensor, async_op=True).get_future().wait()[0] is not None


def test_world_of_one() -> None:
    run_ranks(alone, world_size=1)


def detail(rank: int) -> None:
    check()
    check(dist.new_group([0, 1]), [0, 1]) if rank < 2 else dist.new_group([0, 1])
    if rank == 0:
        text = error_of(lambda: dist.all_reduce(torch.ones(3)))
    else:
        text = error_of(lambda: dist.all_reduce(torch.ones(4)))
    assert "mismatch" in text.lower() or "Detected" in text, text


def test_debug_level_detail() -> None:
    """torch wraps the backend and compares the calls of the ranks through a separate group."""
    run_ranks(detail, world_size=3, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def shutdown_twice(rank: int) -> None:
    check()
    group = dist.group.WORLD
    dist.barrier()
    if not on_gloo():
        group.shutdown()
        group.shutdown()
        assert error_of(lambda: dist.all_reduce(torch.ones(1)))
    dist.destroy_process_group()
    assert error_of(lambda: dist.all_reduce(torch.ones(1)))


def test_shutdown_is_idempotent() -> None:
    run_ranks(shutdown_twice)


def leave_without_destroying(rank: int) -> None:
    init_group("leave")
    check()


def test_exit_without_destroy() -> None:
    """Normal for scripts: the process must end, and end well."""
    run_ranks(leave_without_destroying, init=False, world_size=3)


def leave_with_pending(rank: int) -> None:
    init_group("pending")
    check()
    dist.irecv(torch.zeros(4), 1 - rank)
    if rank == 0:
        dist.all_reduce(torch.ones(5), async_op=True)


def test_exit_with_pending_work() -> None:
    began = time.monotonic()
    run_ranks(leave_with_pending, init=False, timeout_s=50)
    assert time.monotonic() - began < 40


def destroy_with_pending(rank: int) -> None:
    got = torch.zeros(4)
    work = dist.irecv(got, 1 - rank)
    dist.destroy_process_group()
    wait_until(work.is_completed, "destroying the group completes its operations")
    assert not work.is_success()
    assert error_of(work.wait)


@not_gloo
def test_destroy_fails_pending_work() -> None:
    run_ranks(destroy_with_pending)


def abort(rank: int) -> str:
    """Rank 0 aborts; its operations fail at once, and those of its peers soon, with its name."""
    check()
    store = make_store("abort")
    began = time.monotonic()
    if rank == 0:
        work = dist.irecv(torch.zeros(4), 1)
        collective = dist.all_reduce(torch.ones(3), async_op=True)
        store.wait(["entered 1", "entered 2"])
        dist.distributed_c10d._abort_process_group()
        wait_until(work.is_completed, "abort completes a receive")
        wait_until(collective.is_completed, "abort completes a collective")
        return error_of(work.wait)
    # A collective which rank 1, not yet in it, keeps open: only the abort can end it.
    work = (
        dist.all_reduce(torch.ones(3), async_op=True)
        if rank == 2
        else dist.irecv(torch.zeros(4), 0)
    )
    store.set(f"entered {rank}", "1")
    text = error_of(work.wait)
    assert time.monotonic() - began < 20, "peers hear of the abort long before the timeout"
    dist.destroy_process_group()
    return text


@not_gloo
def test_abort_with_pending_work() -> None:
    texts = run_ranks(abort, world_size=3, group_timeout_s=50)
    assert "abort" in texts[0].lower(), texts[0]
    for text in texts[1:]:
        assert "rank 0" in text, text


# ---- processes ----------------------------------------------------------------------------------


def forked_child(rank: int) -> None:
    check()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            text = error_of(lambda: dist.all_reduce(torch.ones(1)))
            code = 0 if "fork before init_process_group" in text else 2
        finally:
            os._exit(code)
    # The parent continues while the child lives, and after it has ended.
    check()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child got no error that speaks of fork"
    check()


@not_gloo
def test_a_forked_child_gets_a_clear_error() -> None:
    run_ranks(forked_child)


def child_ends_normally() -> None:
    sys.exit(0)  # runs exit handlers and destructors in the child


def fork_that_exits(rank: int) -> None:
    check()
    process = multiprocessing.get_context("fork").Process(target=child_ends_normally)
    process.start()
    check()
    process.join(30)
    assert process.exitcode == 0
    check()


def test_a_forked_child_that_exits_does_not_hurt() -> None:
    run_ranks(fork_that_exits, world_size=3)


class Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def data_loader(rank: int, method: str) -> None:
    loader = torch.utils.data.DataLoader(
        Numbers(),
        batch_size=4,
        num_workers=2,
        multiprocessing_context=method,
        sampler=torch.utils.data.DistributedSampler(Numbers(), shuffle=False),
    )
    total = torch.zeros(1)
    for _ in range(2):  # each epoch starts new workers
        for batch in loader:
            total += batch[:, 0].sum()
            check()
    dist.all_reduce(total)
    assert total.item() == 2 * sum(range(32))


def test_data_loader_with_forked_workers() -> None:
    run_ranks(data_loader, "fork")


def test_data_loader_with_spawned_workers() -> None:
    run_ranks(data_loader, "spawn", timeout_s=100)


def test_spawned_interpreters() -> None:
    run_ranks(check_all, world_size=2, start="spawn")


def check_all(rank: int) -> None:
    check()


def dies_in_a_collective(rank: int) -> str:
    check()
    if rank == 2:
        os._exit(9)
    began = time.monotonic()
    text = error_of(lambda: dist.all_reduce(torch.ones(4)))
    assert time.monotonic() - began < 30
    return text


@not_gloo
def test_a_dead_rank_is_named_by_all_survivors() -> None:
    outcomes = run_outcomes(dies_in_a_collective, world_size=4, group_timeout_s=60, timeout_s=90)
    assert outcomes[2].exit_code == 9
    for rank in (0, 1, 3):
        assert outcomes[rank].value is not None, outcomes[rank].describe()
        assert "rank 2" in outcomes[rank].value, outcomes[rank].value


def sum_in_file(rank: int) -> None:
    assert os.listdir(scratch()) is not None
    check()


def test_ranks_leave_no_files() -> None:
    before = {name for name in os.listdir("/dev/shm") if "resilient" in name}
    run_ranks(sum_in_file, world_size=3)
    after = {name for name in os.listdir("/dev/shm") if "resilient" in name}
    assert after <= before


def torchrun(tmp_path: Path, *options: str) -> None:
    """Runs tmp_path/script.py on two ranks, which must succeed."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            *options,
            str(tmp_path / "script.py"),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_torchrun_and_nothing_but_torch(tmp_path: Path) -> None:
    """A script that imports torch only, under torchrun with env://."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import torch
            torch.distributed.init_process_group({backend_name()!r})
            rank = torch.distributed.get_rank()
            tensor = torch.tensor([float(rank + 1)])
            torch.distributed.all_reduce(tensor)
            assert tensor.item() == 3.0
            open({str(tmp_path)!r} + f"/done{{rank}}", "w").close()
            torch.distributed.destroy_process_group()
            """
        )
    )
    torchrun(tmp_path)
    assert (tmp_path / "done0").exists()
    assert (tmp_path / "done1").exists()


@not_gloo
def test_torchrun_restarts_ranks_that_had_not_all_joined(tmp_path: Path) -> None:
    """In any order of joining, old entries of rank 0 in the store do not count for the new one."""
    (tmp_path / "script.py").write_text(
        textwrap.dedent(
            f"""
            import os, pathlib, sys, time
            import torch

            def wait_for(name):
                while not (here / name).exists():
                    time.sleep(0.01)

            here = pathlib.Path({str(tmp_path)!r})
            rank, life = (int(os.environ[x]) for x in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
            if rank == 1 and life == 0:
                wait_for("joined 0 0")
                sys.exit(3)
            if rank == 0 and life == 1:
                wait_for("joined 1 1")
            torch.distributed.init_process_group({backend_name()!r})
            (here / f"joined {{rank}} {{life}}").touch()
            if life == 0:
                time.sleep(1000)  # until torchrun ends it
            tensor = torch.tensor([float(rank + 1)])
            torch.distributed.all_reduce(tensor)
            assert tensor.item() == 3.0
            torch.distributed.destroy_process_group()
            """
        )
    )
    torchrun(tmp_path, "--max-restarts=1")
