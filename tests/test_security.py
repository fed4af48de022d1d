"""Strangers at the door of a rank, wrong secrets, wrong options: refused, counted, or explained."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from handshake_client import BUSY, OK, Caller, data_frame
from harness import error_of, make_store, on_gloo, run_outcomes, run_ranks, scratch, wait_until

from torch_resilient import ListenerStats, stats

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo lets everybody in")

# The maximum growth of a rank while strangers come and go: torch allocates, too.
GROWTH_BYTES_MAX = 64 << 20
STRANGERS = 1000


def listening_ports(pid: int) -> list[int]:
    """TCP ports that the process listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports


def memory_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def job_of_two(rank: int) -> dist.Store:
    """Ranks 0 and 1 form a group; rank 2 stays outside and learns their pids."""
    store = make_store("test")
    store.set(f"pid/{rank}", str(os.getpid()))
    if rank < 2:
        dist.init_process_group(
            "resilient",
            store=make_store("job"),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=30),
        )
    return store


class Worked(NamedTuple):
    """The observations of a rank while it worked."""

    rounds: int = 0
    longest_s: float = 0.0
    growth_bytes: int = 0
    callers: ListenerStats | None = None  # the listener's counters


def strangers_counted(callers: ListenerStats) -> int:
    """The number of strangers that the listener has counted."""
    return callers.refused + callers.timed_out + callers.broken_off + callers.dropped


def work_until_told(rank: int, store: dist.Store, strangers: int = 0) -> Worked:
    """Exchanges messages, checking each; ends when as many `strangers` have been counted."""
    x = torch.arange(1 << 16, dtype=torch.float32)
    dist.all_reduce(x.clone())
    store.set(f"running/{rank}", "")
    before = memory_bytes()
    rounds, longest = 0, 0.0
    while True:
        began = time.monotonic()
        y = x * (rank + 1)
        dist.all_reduce(y)
        assert torch.equal(y, x * 3)
        longest = max(longest, time.monotonic() - began)
        rounds += 1
        # Both must stop after the same round.
        stop = torch.tensor([float(rounds > 1 and store.check(["stop"]))])
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop.item():
            break
    growth = memory_bytes() - before
    # The last ones may still be at the door.
    wait_until(lambda: strangers_counted(stats().listener) >= strangers, f"{strangers} strangers")
    callers = stats().listener
    dist.destroy_process_group()
    store.set(f"done/{rank}", "")
    return Worked(rounds, longest, growth, callers)


def attacked(rank: int, attack: str) -> Worked:
    store = job_of_two(rank)
    if rank < 2:
        # They all knock at rank 0.
        return work_until_told(rank, store, STRANGERS_COUNTED[attack] if rank == 0 else 0)
    store.wait(["running/0", "running/1"])
    (port,) = listening_ports(int(store.get("pid/0")))
    ATTACKS[attack](port)
    store.set("stop", "")
    return Worked()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def closed_by_peer(s: socket.socket, timeout_s: float) -> bool:
    """Whether the other end closes within the time; its messages are ignored."""
    s.settimeout(timeout_s)
    try:
        while s.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def garbage(port: int) -> None:
    import random

    rng = random.Random(7)
    for length in [1, 3, 16, 63, 64, 65, 200, 1000, 100_000]:
        for _ in range(5):
            with connect(port) as s:
                with contextlib.suppress(OSError):
                    s.sendall(rng.randbytes(length))
                    s.shutdown(socket.SHUT_WR)
                assert closed_by_peer(s, 10), f"{length} bytes of garbage were not refused"
    for text in [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20, b"\0" * 5000, b"\xff" * 5000]:
        with connect(port) as s:
            with contextlib.suppress(OSError):
                s.sendall(text)
                s.shutdown(socket.SHUT_WR)
            assert closed_by_peer(s, 10)


def crowd(port: int) -> None:
    """Opens many connections, sends nothing, and stays."""
    sockets = []
    try:
        for i in range(STRANGERS):
            s = connect(port)
            if i % 3 == 0:
                with contextlib.suppress(OSError):
                    s.sendall(b"x" * (i % 60))  # a beginning
            sockets.append(s)
        selector = selectors.DefaultSelector()
        for s in sockets:
            s.setblocking(False)
            selector.register(s, selectors.EVENT_READ)
        # All are thrown out in the end: too many at once, then the time limit.
        deadline = time.monotonic() + 30
        while selector.get_map() and time.monotonic() < deadline:
            for key, _ in selector.select(1):
                peer: socket.socket = key.fileobj  # type: ignore[assignment]
                try:
                    if peer.recv(4096):
                        continue
                except OSError:
                    pass
                selector.unregister(peer)
        left = len(selector.get_map())
        assert left == 0, f"{left} strangers may stay"
    finally:
        for s in sockets:
            s.close()


def in_and_out(port: int) -> None:
    """Resets instead of goodbyes."""
    for i in range(STRANGERS):
        s = connect(port)
        if i % 2:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        s.close()


ATTACKS: dict[str, Callable[[int], None]] = {
    "garbage": garbage,
    "crowd": crowd,
    "in and out": in_and_out,
}


# A connection that is reset before it is accepted never shows.
STRANGERS_COUNTED = {"garbage": 48, "crowd": STRANGERS, "in and out": STRANGERS // 2}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_job_does_not_notice(attack: str) -> None:
    results = run_ranks(
        attacked,
        attack,
        world_size=3,
        init=False,
        env={"TORCH_RESILIENT_HANDSHAKE_TIMEOUT_S": "1", "TORCH_RESILIENT_LOG_LEVEL": "error"},
    )
    for seen in results[:2]:
        print(f"{attack}: {seen}")
        assert seen.rounds > 1
        assert seen.longest_s < 5
        assert seen.growth_bytes < GROWTH_BYTES_MAX
    # Each is counted, and none as one of us.
    callers = results[0].callers
    strangers = strangers_counted(callers)
    assert callers.accepted == callers.admitted + strangers + callers.pending
    assert callers.admitted <= 2


UIDS = 10_000
AT_A_TIME = 100
UNKNOWN_GROWTH_BYTES_MAX = 20 << 20
EAGER_BYTES = 56 << 20  # within what a member may send unasked
SECRET = "the secret of the job, and the attacker has it"


def pretend(rank: int) -> Worked:
    """Rank 2 has the secret, and claims repeatedly to be another member."""
    store = job_of_two(rank)
    if rank < 2:
        dist.all_reduce(torch.ones(1 << 16))
        before = memory_bytes()
        store.set(f"running/{rank}", "")
        store.wait(["stop"], timedelta(seconds=200))
        growth = memory_bytes() - before
        dist.all_reduce(torch.ones(1 << 16))
        dist.destroy_process_group()
        store.set(f"done/{rank}", "")
        return Worked(growth_bytes=growth)
    store.wait(["running/0", "running/1"])
    (port,) = listening_ports(int(store.get("pid/0")))
    shared = make_store()
    (key,) = [k for k in shared.list_keys() if k.endswith("resilient/at/1/0")]
    victim = uid_of(shared.get(key).decode())
    verdicts: dict[int, int] = {}
    began = time.monotonic()
    for _ in range(UIDS // AT_A_TIME):
        callers = [Caller(port, SECRET.encode(), victim) for _ in range(AT_A_TIME)]
        for caller in callers:
            caller.prove()
        for caller in callers:
            verdict = caller.verdict()
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            caller.socket.close()
    print(f"verdicts {verdicts} in {time.monotonic() - began:.1f} s")
    assert verdicts.get(BUSY, 0) + verdicts[OK] == UIDS
    # Once these are gone, others; and they say much.
    frames = b"".join(data_frame(1 + i, bytes(1 << 20)) for i in range(EAGER_BYTES >> 20))
    talkers: list[socket.socket] = []

    def talk() -> bool:
        caller = Caller(port, SECRET.encode(), victim)
        caller.prove()
        if caller.verdict() != OK:
            caller.socket.close()
            return False
        talkers.append(caller.socket)
        caller.socket.settimeout(0.2)
        with contextlib.suppress(OSError):
            caller.socket.sendall(frames)
        return len(talkers) == 10

    wait_until(talk, "ten that nobody knows are let in", 60)
    store.set("stop", "")
    store.wait(["done/0", "done/1"])
    for s in talkers:
        s.close()
    return Worked()


def uid_of(record: str) -> bytes:
    """Returns the uid in a process's published record."""
    (word,) = (word for word in record.split() if word.startswith("uid="))
    return bytes.fromhex(word.removeprefix("uid="))


def test_members_that_no_group_knows_cost_no_memory() -> None:
    env = {"TORCH_RESILIENT_SECRET": SECRET, "TORCH_RESILIENT_HANDSHAKE_TIMEOUT_S": "1"}
    results = run_ranks(pretend, world_size=3, init=False, env=env, timeout_s=240)
    print(f"rank 0 grew by {results[0].growth_bytes / (1 << 20):.1f} MiB")
    assert results[0].growth_bytes < UNKNOWN_GROWTH_BYTES_MAX


class Proxy:
    """Forwards connections to a port, and keeps the bytes that the callers sent."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.said: list[bytearray] = []
        self.listener = socket.create_server(("", 0))
        self.own_port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            caller, _ = self.listener.accept()
            callee = connect(self.port)
            callee.settimeout(None)
            said = bytearray()
            self.said.append(said)
            threading.Thread(target=self._pass, args=(caller, callee, said), daemon=True).start()
            threading.Thread(target=self._pass, args=(callee, caller, None), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, said: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if said is not None:
                    said += data
                to.sendall(data)
        for s in (source, to):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)


def replayed(rank: int) -> Worked:
    """Rank 2 puts itself in front of rank 0, and later replays the recorded bytes."""
    if rank == 1:  # it reads the address of rank 0 as it joins
        make_store("test").wait(["between"])
    store = job_of_two(rank)
    if rank == 0:
        store.wait(["connected"])  # by rank 1
    if rank < 2:
        return work_until_told(rank, store)
    shared = make_store()

    def keys() -> list[str]:
        return [k for k in shared.list_keys() if k.endswith("resilient/at/1/0")]

    wait_until(lambda: len(keys()) == 1, "rank 0 has joined")
    (port,) = listening_ports(int(store.get("pid/0")))
    proxy = Proxy(port)
    (key,) = keys()
    text = shared.get(key).decode()
    assert f":{port}" in text
    shared.set(key, text.replace(f":{port}", f":{proxy.own_port}"))
    store.set("between", "")
    wait_until(lambda: any(len(said) > 200 for said in proxy.said), "rank 1 connects")
    store.set("connected", "")
    store.wait(["running/0", "running/1"])
    wait_until(lambda: any(len(said) > 100_000 for said in proxy.said), "data flows")
    refused = 0
    for said in list(proxy.said):
        for length in [len(said) // 2, 1000, 500, 200]:
            with connect(proxy.port) as s:
                with contextlib.suppress(OSError):
                    s.sendall(said[:length])
                    s.shutdown(socket.SHUT_WR)
                assert closed_by_peer(s, 10), "a replayed handshake was let in"
                refused += 1
    assert refused > 0
    store.set("stop", "")
    store.wait(["done/0", "done/1"])  # their connections lead through here
    return Worked()


def test_a_replayed_handshake_is_refused() -> None:
    # No shared memory, which would bypass the proxies.
    env = {"TORCH_RESILIENT_SHARED_MEMORY": "0"}
    results = run_ranks(replayed, world_size=3, init=False, env=env)
    for seen in results[:2]:
        assert seen.rounds > 1
        assert seen.longest_s < 5
    assert sum(seen.callers.refused for seen in results[:2]) > 0


# ---- settings -----------------------------------------------------------------------------


def with_secret(rank: int, secrets: list[str]) -> tuple[str, float]:
    if secrets[rank]:
        os.environ["TORCH_RESILIENT_SECRET"] = secrets[rank]
    os.environ["TORCH_RESILIENT_CONNECT_TIMEOUT_S"] = "2"
    began = time.monotonic()

    def start() -> None:
        dist.init_process_group(
            "resilient",
            store=make_store("job"),
            rank=rank,
            world_size=2,
            timeout=timedelta(minutes=30),
        )
        dist.all_reduce(torch.ones(10))

    error = error_of(start)
    return error, time.monotonic() - began


def test_different_secrets_end_in_an_explanation() -> None:
    secrets = ["one secret of the job", "another secret of the job"]
    for error, took in run_ranks(with_secret, secrets, init=False):
        print(f"{took:.2f} s: {error}")
        assert "TORCH_RESILIENT_SECRET" in error
        assert took < 8
        assert not any(secret in error for secret in secrets), "a secret was shown"


def test_a_secret_on_some_ranks_only_ends_in_an_explanation() -> None:
    results = run_outcomes(with_secret, ["", "one secret of the job"], init=False)
    texts = [o.value[0] if o.ok else o.exception or "" for o in results]
    print(texts)
    assert any("Either all ranks" in t and "TORCH_RESILIENT_SECRET" in t for t in texts)
    assert all(o.ok for o in results), texts


def with_option(rank: int, name: str, value: str) -> str:
    if name == "TORCH_RESILIENT_LISTEN_PORT" and value == "busy":
        busy = socket.create_server(("", 0))
        value = str(busy.getsockname()[1])
    os.environ[name] = value
    return error_of(
        lambda: dist.init_process_group(
            "resilient",
            store=make_store(f"job{rank}"),
            rank=0,
            world_size=1,
        )
    )


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LISTEN_PORT", "busy", "another process has that port"),
        ("LISTEN_PORT", "70000", "65535"),
        ("INTERFACE", "nosuch0", "nosuch0"),
        ("CHUNK_BYTES", "many", "CHUNK_BYTES"),
        ("PATHS_SAME_HOST", "0", "PATHS_SAME_HOST"),
        ("LOG_LEVEL", "loud", "debug, info, warning or error"),
        ("EAGER_CONNECT", "perhaps", "EAGER_CONNECT"),
        ("SECRET", "swordfish", "at least 16 random ones"),
        ("SECRET_FILE", "/nowhere/secret", "/nowhere/secret"),
        ("SECRET_FILE", "/dev/zero", "not a regular file"),
    ],
)
def test_a_wrong_setting_fails_the_start_and_says_what_is_right(
    name: str, value: str, text: str
) -> None:
    (error,) = run_ranks(with_option, f"TORCH_RESILIENT_{name}", value, world_size=1, init=False)
    print(error)
    assert text in error
    assert error.startswith("ValueError: ")


def dump_on_signal(rank: int) -> str:
    import signal

    dist.all_reduce(torch.ones(123))
    dist.barrier()
    path = Path(scratch()) / "dumps" / f"rank{rank}.txt"
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: path.exists() and "barrier" in path.read_text(), "the dump is written")
    dist.barrier()
    return path.read_text()


def dump_on_failure(rank: int) -> str:
    path = Path(scratch()) / "dumps" / f"rank{rank}.txt"
    dist.all_reduce(torch.ones(123))
    error_of(lambda: dist.all_reduce(torch.ones(10 + rank)))
    wait_until(path.exists, "the dump is written")
    make_store("test").set(f"{rank}", "")
    make_store("test").wait(["0", "1"])
    return path.read_text()


def dumping(rank: int, function: Callable[[int], str]) -> str:
    os.environ["TORCH_RESILIENT_DUMP_DIR"] = str(Path(scratch()) / "dumps")
    dist.init_process_group(
        "resilient",
        store=make_store("job"),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=20),
    )
    text = function(rank)
    dist.destroy_process_group()
    return text


def test_sigusr1_dumps_the_recent_operations() -> None:
    for rank, text in enumerate(run_ranks(dumping, dump_on_signal, init=False)):
        assert f"recent operations of rank {rank}" in text
        assert "(SIGUSR1)" in text
        assert "all_reduce(float32[123], SUM)" in text
        assert "done in" in text


def test_the_first_failure_dumps_the_recent_operations() -> None:
    for text in run_ranks(dumping, dump_on_failure, init=False):
        assert "an operation failed: " in text
        assert "all_reduce(float32[123], SUM)" in text
        assert "failed after" in text
