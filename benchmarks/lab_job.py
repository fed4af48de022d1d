"""Ranks as processes on the hosts of a NetworkLab, one each, that report rows of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_resilient.testing import NetworkLab
from torch_resilient.testing.lab import Host, Network

ROOT = Path(__file__).resolve().parent.parent
PORT = 29400


class LabJob:
    """The ranks of one job; `with` ends them all."""

    def __init__(
        self,
        script: str,
        hosts: Sequence[Host],
        control: Network,
        arguments: Mapping[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
        port: int = PORT,
    ) -> None:
        """Starts `script --worker JSON` on each host; the store goes over `control`."""
        self.rows: queue.Queue[dict[str, Any]] = queue.Queue()
        self.processes = []
        self._threads = []
        for rank, host in enumerate(hosts):
            env = {
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": control.address(hosts[0]),
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                **(environment or {}),
            }
            process = host.popen(
                [sys.executable, script, "--worker", json.dumps(dict(arguments))],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.processes.append(process)
            for stream in ("stdout", "stderr"):
                thread = threading.Thread(target=self._read, args=(rank, stream), daemon=True)
                thread.start()
                self._threads.append(thread)
        self.errors = ["" for _ in hosts]

    def _read(self, rank: int, stream: str) -> None:
        for line in getattr(self.processes[rank], stream):
            if stream == "stdout" and line.startswith("{"):
                self.rows.put({"rank": rank, **json.loads(line)})
            elif stream == "stderr" and "hostname of the client socket" not in line:
                self.errors[rank] = (self.errors[rank] + line)[-8000:]

    def tell(self, line: str) -> None:
        """A line to the standard input of every rank."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def row(self, kind: str, timeout_s: float = 60) -> dict[str, Any]:
        """The next row of a `kind`, from any rank; others on the way are dropped.

        Raises RuntimeError with the ranks' last words if none comes.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                row = self.rows.get(timeout=0.2)
            except queue.Empty:
                dead = [p.poll() for p in self.processes]
                if all(code is not None for code in dead) or time.monotonic() > deadline:
                    words = "\n".join(e for e in self.errors if e)
                    raise RuntimeError(
                        f"no {kind!r} from ranks that ended {dead}: {words}"
                    ) from None
                continue
            if row.get("kind") == kind:
                return row

    def wait(self, timeout_s: float = 60) -> list[int | None]:
        """Exit statuses; None for a rank that has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def __enter__(self) -> LabJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(5)


def say(kind: str, **values: Any) -> None:
    """From a rank: one row for the parent."""
    print(json.dumps({"kind": kind, **values}), flush=True)


@contextlib.contextmanager
def two_hosts(
    links: Sequence[Mapping[str, Any]],
    *,
    seed: int = 1,
    sysctl: Mapping[str, object] | None = None,
) -> Iterator[tuple[NetworkLab, list[Host], list[Network], Network]]:
    """Two hosts, `links` between them (eth0, eth1, ...) and one for the store."""
    with NetworkLab(seed=seed) as lab:
        hosts = [lab.host("a", sysctl=sysctl), lab.host("b", sysctl=sysctl)]
        data = [lab.link(*hosts, **settings) for settings in links]
        control = lab.link(*hosts, name="control")
        yield lab, hosts, data, control
