"""Groups with changing members: ranks die, others join, and the weights stay equal."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import error_of, make_store, needs, run_outcomes, run_ranks, store_port

from torch_resilient._registration import create_group, end_group

TIMEOUT = timedelta(seconds=20)
# The processes of each group, by rank. Process 2 dies after the first one, and process 3 joins the
# fourth one; between them, processes 0 and 1 exchange their ranks.
GROUPS = [[0, 1, 2], [0, 1], [1, 0], [1, 3, 0], [0, 1, 3]]
STEPS = 3  # in each group
EXIT_CODE = 7
PROGRAM = Path(__file__).parent / "torchft_program.py"
needs_torchft = needs("torchft")


class Bare:
    """The backend's groups without torchft."""

    def __init__(self) -> None:
        self.group: Any = None

    def configure(self, number: int, rank: int, size: int) -> Any:
        if self.group is not None:
            end_group(self.group)
        store = make_store(f"group {number}")
        self.group = create_group(store, rank, size, name="bare", timeout=TIMEOUT)
        return self.group


class Torchft:
    """The process group that torchft's Manager would configure."""

    def __init__(self) -> None:
        from torch_resilient.torchft import ProcessGroupResilient

        self.group = ProcessGroupResilient(timeout=TIMEOUT)

    def configure(self, number: int, rank: int, size: int) -> Any:
        address = f"127.0.0.1:{store_port()}/group{number}"
        if hasattr(self.group, "configure"):
            self.group.configure(address, f"replica_{rank}", rank, size, number)
        else:  # torchft newer than 0.2
            from torchft.process_group import reconfigure_with_store

            reconfigure_with_store(self.group, address, rank, size, TIMEOUT)
        return self.group


def gradient(process: int, step: int) -> torch.Tensor:
    return torch.arange(1000.0) * (process + 1) + step  # whole numbers: sums are exact


def trained() -> torch.Tensor:
    """The weights that all processes must have at the end."""
    weights, step = torch.zeros(1000), 0
    for processes in GROUPS:
        for _ in range(STEPS):
            weights += torch.stack([gradient(p, step) for p in processes]).sum(0)
            step += 1
    return weights


def train(process: int, kind: Callable[[], Any]) -> list[float]:
    """The life of one process; returns its weights."""
    maker = kind()
    weights, step = torch.zeros(1000), 0
    for number, processes in enumerate(GROUPS):
        if process not in processes:
            continue
        group = maker.configure(number, processes.index(process), len(processes))
        state = torch.cat([weights, torch.tensor([float(step)])])
        group.broadcast([state], dist.BroadcastOptions()).wait()
        weights, step = state[:-1], int(state[-1])
        for _ in range(STEPS):
            total = gradient(process, step)
            group.allreduce([total], dist.AllreduceOptions()).wait()
            weights += total
            step += 1
        group.barrier(dist.BarrierOptions()).wait()
        if process == 2:
            os._exit(EXIT_CODE)
        if 2 in processes:
            with pytest.raises(RuntimeError, match=r"rank 2"):
                group.allreduce([gradient(process, step)], dist.AllreduceOptions()).wait()
    group.shutdown()
    return weights.tolist()


@pytest.mark.parametrize(
    ("kind", "store"), [(Bare, "file"), pytest.param(Torchft, "tcp", marks=needs_torchft)]
)
def test_ranks_leave_and_join(kind: Callable[[], Any], store: str) -> None:
    outcomes = run_outcomes(train, kind, world_size=4, init=False, store=store)
    assert outcomes[2].exit_code == EXIT_CODE, outcomes[2].describe()
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert outcome.ok, "\n".join(o.describe() for o in outcomes)
        assert torch.equal(torch.tensor(outcome.value), trained())


def end_early(rank: int) -> str:
    store = make_store("group")
    group = create_group(store, rank, 2, name="bare", timeout=TIMEOUT)
    group.barrier(dist.BarrierOptions()).wait()
    work = group.recv([torch.zeros(4)], 1 - rank, 0)
    if rank == 0:
        end_group(group)
    return error_of(work.wait)


def test_a_pending_operation_fails_on_all_ranks_when_its_group_ends() -> None:
    for text in run_ranks(end_early, init=False):
        assert "rank 0 aborted the group" in text


@pytest.mark.skipif(importlib.util.find_spec("torchft") is not None, reason="torchft is installed")
def test_without_torchft_the_module_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"needs torchft: run `pip install torchft`"):
        import torch_resilient.torchft  # noqa: F401


class Replica:
    """A training process with torchft's Manager, and the lines that it has printed."""

    def __init__(self, name: str, folder: Path, lighthouse: str) -> None:
        self.log = open(folder / f"{name}.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), name, str(folder / "stop")],
            cwd=folder,
            env={**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.rows: list[dict[str, Any]] = []
        self.lines: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def until(self, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
        """Reads rows up to the first one for which `condition` is true."""
        deadline = time.monotonic() + 60
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = ""
            if not line:
                self.log.seek(0)
                raise AssertionError(f"no {what}; log:\n{self.log.read()[-5000:]}")
            self.rows.append(json.loads(line))
            if condition(self.rows[-1]):
                return

    def weights(self) -> dict[int, str]:
        """Digests of the weights by step."""
        return {row["step"]: row["weights"] for row in self.rows}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The address of a lighthouse, by which torchft's replicas find each other."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=2000,
    )
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@needs_torchft
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_replica_comes_back_under_the_manager(lighthouse: str, tmp_path: Path) -> None:
    replicas = [Replica(f"replica_{n}", tmp_path, lighthouse) for n in range(2)]
    try:
        stays, leaves = replicas
        leaves.until(lambda row: row["participants"] == 2 and row["step"] >= 5, "step 5 of two")
        leaves.process.kill()
        alone = leaves.rows[-1]["step"]
        stays.until(lambda row: row["participants"] == 1 and row["step"] > alone + 5, "step alone")
        comes = Replica("replica_1", tmp_path, lighthouse)
        replicas.append(comes)
        comes.until(lambda row: row["participants"] == 2, "step of two replicas")
        assert comes.rows[0]["step"] > alone  # it has taken the other one's state over
        again = comes.rows[-1]["step"]
        comes.until(lambda row: row["step"] >= again + 20, "20 more steps")
        (tmp_path / "stop").touch()
        for replica in (stays, comes):
            replica.until(lambda row: bool(row["last"]), "last step")
            assert replica.process.wait(30) == 0
        both = stays.weights().keys() & comes.weights().keys()
        assert len(both) >= 20
        assert stays.rows[-1]["step"] == comes.rows[-1]["step"]
        assert {s: stays.weights()[s] for s in both} == {s: comes.weights()[s] for s in both}
    finally:
        for replica in replicas:
            replica.close()
