"""Processes end in time, with the right exit code, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from exit_program import process_state
from harness import init_group, on_gloo, run_ranks, scratch, wait_until

pytestmark = pytest.mark.skipif(on_gloo(), reason="gloo promises none of this")

# A process that has nothing more to do, or gets a signal to stop, is gone within this time.
END_S = 2.0
LOAD = 3.0  # the machine that runs the tests is busy with others
CRASHES = ["terminate called", "core dumped", "Fatal Python error", "Segmentation", "Aborted"]


class Programs:
    """Ranks of one run; see exit_program.py."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pids: dict[int, int] = {}
        self._began = 0.0

    def start(self, scenario: str, size: int = 2) -> None:
        for rank in range(size):
            job: dict[str, Any] = {
                "scenario": scenario,
                "rank": rank,
                "size": size,
                "port": self._store.port,
                "folder": str(self._folder),
            }
            assert self._server.stdin
            assert self._server.stdout
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
            self._pids[rank] = json.loads(self._server.stdout.readline())["pid"]

    def wait_ready(self, *ranks: int) -> None:
        for rank in ranks:
            wait_until(
                (self._folder / f"ready_{rank}").exists,
                f"rank {rank} is about to wait: {self.output(rank)}",
            )

    def wait_blocked(self, *ranks: int) -> None:
        """Waits until the ranks are in their waits and their main threads sleep."""
        self.wait_ready(*ranks)
        for rank in ranks:
            wait_until(partial(self._sleeps, rank), f"rank {rank} is blocked: {self.output(rank)}")

    def _sleeps(self, rank: int) -> bool:
        return process_state(self._pids[rank]) == "S"

    def signal(self, rank: int, number: int) -> None:
        os.kill(self._pids[rank], number)

    def end(self, rank: int, within_s: float = END_S) -> int:
        """Waits for the end of the process; returns its exit code, negative for a signal."""
        began = time.monotonic()
        path = self._folder.parent / f"status_{self._pids[rank]}"
        wait_until(path.exists, f"rank {rank} ends: {self.output(rank)}", within_s * LOAD)
        print(f"rank {rank} ended after {time.monotonic() - began:.2f} s")
        code = int(path.read_text())
        text = self.output(rank)
        for crash in CRASHES:
            assert crash not in text, text
        return code

    def output(self, rank: int) -> str:
        path = self._folder / f"output_{rank}"
        return path.read_text() if path.exists() else ""

    def kill(self) -> list[int]:
        """Kills what is left, and returns which ranks' sessions were still there."""
        left = []
        for rank, pid in self._pids.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
                left.append(rank)
        return left


def end_in_good_order(rank: int, folder: str) -> None:
    """Ends normally, with its standard error in a file."""
    from torch_resilient import stats

    log = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    os.close(log)
    init_group()
    dist.all_reduce(torch.ones(1000))
    wait_until(
        lambda: all(
            {path.name for path in peer.paths} == {"shm", "tcp 0", "tcp 1", "tcp 2", "tcp 3"}
            for peer in stats().peers
        ),
        "all paths are up",
    )
    # At the start, two ranks may have called each other at once: one connection replaces the other.
    os.write(2, b"the end\n")
    dist.barrier()
    dist.destroy_process_group()


def test_a_clean_end_reports_no_lost_paths(tmp_path: Path) -> None:
    env = {"TORCH_RESILIENT_LOG_LEVEL": "info", "TORCH_RESILIENT_PATHS_SAME_HOST": "4"}
    run_ranks(end_in_good_order, str(tmp_path), world_size=3, init=False, env=env)
    for rank in range(3):
        text = (tmp_path / str(rank)).read_text()
        assert "listening at" in text
        end = text.split("the end\n", 1)[1]
        for other in {0, 1, 2} - {rank}:  # who ends first need not hear that others have left
            assert re.search(rf"rank {other} \(.*\) (has|is) left", end)
        assert "reconnecting" not in end
        assert "no more memory" not in text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    """The process that forks ranks."""
    folder = tmp_path_factory.mktemp("exit")
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("exit_program.py")), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_RESILIENT_CONNECT_TIMEOUT_S": "20"},
    )
    yield process, folder
    assert process.stdin
    process.stdin.close()
    assert process.wait(20) == 0


@pytest.fixture
def programs(server: tuple[Any, Path]) -> Iterator[Programs]:
    process, parent = server
    folder = parent / str(time.monotonic_ns())
    folder.mkdir()
    shared_before = set(os.listdir("/dev/shm"))
    made = Programs(process, folder)
    try:
        yield made
        assert not made.kill(), "processes were left behind"
        left = set(os.listdir("/dev/shm")) - shared_before
        assert not [name for name in left if "torch" in name or "resilient" in name]
    finally:
        made.kill()


@pytest.mark.parametrize("scenario", ["wait_in_recv", "wait_in_all_reduce", "wait_for_topology"])
def test_ctrl_c_ends_a_blocked_wait(programs: Programs, scenario: str) -> None:
    programs.start(scenario)
    programs.wait_blocked(0, 1)
    for rank in (0, 1):
        programs.signal(rank, signal.SIGINT)
    for rank in (0, 1):
        # Python ends itself with the signal, once everything is cleaned up.
        assert programs.end(rank) in (-signal.SIGINT, 130, 1)
        assert "KeyboardInterrupt" in programs.output(rank) or "has left" in programs.output(rank)


def test_the_group_is_usable_after_ctrl_c_was_caught(programs: Programs) -> None:
    programs.start("catch_interrupt")
    programs.wait_blocked(0, 1)
    for rank in (0, 1):
        programs.signal(rank, signal.SIGINT)
    for rank in (0, 1):
        assert programs.end(rank) == 0, programs.output(rank)
        assert "caught" in programs.output(rank)


def test_sigterm_ends_a_blocked_wait_at_once(programs: Programs) -> None:
    programs.start("wait_in_recv")
    programs.wait_blocked(0, 1)
    programs.signal(0, signal.SIGTERM)
    assert programs.end(0) == -signal.SIGTERM
    assert programs.end(1) == 1  # it learns that its peer died
    assert "rank 0 (host" in programs.output(1)
    assert "died" in programs.output(1)


def test_an_exception_in_one_rank_ends_all(programs: Programs) -> None:
    programs.start("raise_in_one", size=3)
    for rank in range(3):
        assert programs.end(rank) == 1, programs.output(rank)
    assert "a mistake in the program" in programs.output(0)
    for rank in (1, 2):
        assert "DistBackendError" in programs.output(rank)
        assert "rank 0 (host" in programs.output(rank)


def test_os_exit_in_one_rank_ends_all(programs: Programs) -> None:
    programs.start("os_exit_in_one", size=3)
    assert programs.end(0) == 7
    for rank in (1, 2):
        assert programs.end(rank) == 1
        assert "rank 0 (host" in programs.output(rank)
        assert "died" in programs.output(rank)


@pytest.mark.parametrize("scenario", ["sys_exit", "sys_exit_with_pending"])
def test_sys_exit_without_destroy(programs: Programs, scenario: str) -> None:
    programs.start(scenario)
    for rank in (0, 1):
        assert programs.end(rank) == 5, programs.output(rank)


@pytest.mark.parametrize(
    "scenario",
    [
        "end_with_waiting_thread",
        "end_with_threads_that_go_on",
        "end_with_callback",
        "destroy_twice",
    ],
)
def test_the_interpreter_ends_whatever_is_pending(programs: Programs, scenario: str) -> None:
    programs.start(scenario)
    for rank in (0, 1):
        assert programs.end(rank) == 0, programs.output(rank)


def send_and_leave(rank: int) -> int:
    """The sender ends, without destroy_process_group, while most messages wait for receives."""
    init_group()
    flag = Path(scratch()) / "sent"
    messages = 100
    if rank == 1:
        for number in range(messages):
            dist.send(torch.full((10_000,), float(number)), 0)
        flag.touch()
        return 0
    wait_until(flag.exists, "rank 1 has sent")
    value = torch.zeros(10_000)
    received = 0
    for number in range(messages):
        dist.recv(value, 1)
        received += int((value == number).all())
    return received


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_what_was_sent_arrives_when_a_process_of_multiprocessing_ends(start: str) -> None:
    assert run_ranks(send_and_leave, world_size=2, init=False, start=start)[0] == 100


def test_a_rank_ends_though_its_peer_hangs(programs: Programs) -> None:
    programs.start("destroy_with_a_hung_peer")
    programs.wait_ready(0, 1)
    try:
        assert programs.end(0) == 5, programs.output(0)
    finally:
        programs.signal(1, signal.SIGCONT)
    assert programs.end(1) == 0, programs.output(1)
