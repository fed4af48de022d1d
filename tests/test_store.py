"""The store is needed to join, and no longer: not while ranks work, and not when they leave."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import make_store, on_gloo, run_ranks, scratch, wait_until

GROUP_TIMEOUT = timedelta(seconds=60)


class DistantStore:
    """Forwards connections to a store in this host after a delay, as a long way would."""

    def __init__(self, port: int, one_way_s: float) -> None:
        self._target = port
        self._one_way_s = one_way_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, function: object, *args: object) -> None:
        threading.Thread(target=function, args=args, daemon=True).start()  # type: ignore[arg-type]

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((near, far), (far, near)):
                waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
                self._start(self._read, source, waiting)
                self._start(self._write, sink, waiting)

    def _read(self, source: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"first"
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + self._one_way_s, data))

    @staticmethod
    def _write(sink: socket.socket, waiting: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, data = waiting.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                if not data:
                    sink.shutdown(socket.SHUT_RDWR)
                    return
                sink.sendall(data)
            except OSError:
                return


def store_of_rank_zero(rank: int, size: int, one_way_s: float = 0.0) -> dist.Store:
    """`env://` without torchrun: rank 0 serves the store, and closes it when it ends."""
    shared = make_store("ports")
    if rank == 0:
        served = dist.TCPStore("127.0.0.1", 0, size, True, GROUP_TIMEOUT, wait_for_workers=False)
        shared.set("port", str(served.port))
        return served
    port = int(shared.get("port"))
    if one_way_s > 0:
        port = DistantStore(port, one_way_s).port
    return dist.TCPStore("127.0.0.1", port, size, False, GROUP_TIMEOUT)


def connections_to(port: int) -> int:
    """Established connections to a local port."""
    count = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            remote, state = fields[2], fields[3]
            count += state == "01" and int(remote.rpartition(":")[2], 16) == port
    return count


def leave_early(rank: int, size: int) -> None:
    """Ranks 1 and 2 have not met when rank 0, which serves the store, has heard of both."""
    store = store_of_rank_zero(rank, size, one_way_s=0.05)
    dist.init_process_group("resilient", store=store, rank=rank, world_size=size)
    if rank == 0:
        works = [dist.isend(torch.full((4,), float(i)), 1, tag=i) for i in range(5)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank == 1:
        for i in reversed(range(5)):
            got = torch.zeros(4)
            dist.recv(got, 0, tag=i)
            assert (got == i).all()
    dist.barrier()
    dist.destroy_process_group()
    del store


@pytest.mark.skipif(on_gloo(), reason="gloo joins all ranks in init_process_group")
@pytest.mark.parametrize("size", [3, 5])
def test_the_rank_that_serves_a_distant_store_may_leave_first(size: int) -> None:
    run_ranks(leave_early, size, world_size=size, init=False)


def work_without_store(rank: int, size: int) -> float:
    store = store_of_rank_zero(rank, size)
    dist.init_process_group(
        "resilient", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    value = torch.ones(3)
    dist.all_reduce(value)
    if rank == 0:
        dist.destroy_process_group()
        return 0.0
    # No message has passed between these two, and there is no store any more.
    del store
    if rank == 1:
        dist.send(value, 2)
    elif rank == 2:
        dist.recv(value, 1)
    assert value.tolist() == [float(size)] * 3
    return 0.0


@pytest.mark.skipif(on_gloo(), reason="gloo joins all ranks in init_process_group")
def test_ranks_meet_after_the_store_has_ended() -> None:
    run_ranks(work_without_store, 9, world_size=9, init=False)


def fail_soon(rank: int, size: int) -> tuple[str, float] | None:
    """The last rank never comes, and the store ends: what waits for it fails at once."""
    if rank == size - 1:
        return None
    store = store_of_rank_zero(rank, size)
    dist.init_process_group(
        "resilient", store=store, rank=rank, world_size=size, timeout=GROUP_TIMEOUT
    )
    if rank == 0:
        wait_until(lambda: (Path(scratch()) / "waiting").exists(), "rank 1 waits")
        # The group is not destroyed: the process ends as if it had been killed.
        os._exit(0)
    work = dist.irecv(torch.zeros(1), size - 1)
    assert work is not None
    (Path(scratch()) / "waiting").touch()
    begun = time.monotonic()
    with pytest.raises(dist.DistBackendError) as caught:
        work.wait()
    return str(caught.value), time.monotonic() - begun


@pytest.mark.skipif(on_gloo(), reason="gloo joins all ranks in init_process_group")
def test_operations_fail_soon_when_the_store_ends_before_all_have_joined() -> None:
    from harness import run_outcomes

    outcomes = run_outcomes(fail_soon, 3, world_size=3, init=False)
    assert outcomes[1].value is not None, outcomes[1].describe()
    text, seconds = outcomes[1].value
    assert "the address of rank 2 is not known, since the store fails" in text
    assert "usually that of rank 0" in text
    assert seconds < GROUP_TIMEOUT.total_seconds() / 2


def count_connections(rank: int, size: int) -> int:
    store = store_of_rank_zero(rank, size)
    dist.init_process_group("resilient", store=store, rank=rank, world_size=size)
    groups = [dist.new_group(list(range(size))) for _ in range(6)]
    value = torch.ones(1)
    for group in groups:
        dist.all_reduce(value, group=group)
    assert isinstance(store, dist.TCPStore)
    found = connections_to(store.port) if rank == 0 else 0
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.skipif(on_gloo(), reason="counts connections of the resilient backend")
def test_groups_share_the_one_connection_to_the_store() -> None:
    size = 4
    counts = run_ranks(count_connections, size, world_size=size, init=False)
    assert counts[0] == size


def join_from_threads(rank: int) -> list[str]:
    store = dist.HashStore()
    texts = ["", ""]

    def join(member: int) -> None:
        from torch_resilient._registration import create_backend

        options = dist.distributed_c10d._DistributedBackendOptions()
        options.store = store
        options.group_rank = member
        options.group_size = 2
        options.timeout = GROUP_TIMEOUT
        options.group_id = "threads"
        options.global_ranks_in_group = [0, 1]
        try:
            group = create_backend(options, None)
            group.allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        except Exception as error:
            texts[member] = str(error)

    threads = [threading.Thread(target=join, args=(member,)) for member in (0, 1)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun < GROUP_TIMEOUT.total_seconds() / 2
    return texts


@pytest.mark.skipif(on_gloo(), reason="gloo can join two ranks in one process")
def test_two_ranks_in_one_process_are_refused_at_once() -> None:
    (texts,) = run_ranks(join_from_threads, world_size=1, init=False)
    for text in texts:
        assert "ranks 0 and 1 are in one process" in text
        assert "torchrun" in text


def read_one_key(rank: int, kind: str) -> None:
    """The comparison with an absent key; a look-up in one round trip relies on it."""
    store: dist.Store
    if kind == "file":
        store = dist.FileStore(str(Path(scratch()) / "store"), 1)
    elif kind == "hash":
        store = dist.HashStore()
    else:
        store = dist.PrefixStore("p", dist.TCPStore("127.0.0.1", 0, 1, True))
    assert store.compare_set("key", "absent", "absent") == b"absent"
    assert store.num_keys() == dist_keys(kind)
    store.set("key", "value")
    assert store.compare_set("key", "absent", "absent") == b"value"
    assert store.get("key") == b"value"


def dist_keys(kind: str) -> int:
    """Keys of a new store: a FileStore and a TCPStore count their users in one of their own."""
    return 0 if kind == "hash" else 1


@pytest.mark.parametrize("kind", ["tcp", "file", "hash"])
def test_stores_answer_for_an_absent_key_without_waiting_or_setting_it(kind: str) -> None:
    run_ranks(read_one_key, kind, world_size=1, init=False)
