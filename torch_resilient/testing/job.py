"""Runs the ranks of a job on the hosts of a lab; the ranks report in rows of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from torch_resilient.testing.guest_agent import descendants
from torch_resilient.testing.lab import Host, Network

Row = dict[str, Any]

# The port of rank 0's store. Every lab has its own addresses, so all labs can use the same port.
PORT = 29400
# Maximum length of the standard error that is kept for each rank.
_WORDS_CHARACTERS = 8000
# Interval at which a caller that waits for a row checks whether any rank still runs.
_LOOK_S = 0.1
# Time limit for reading the remaining output of killed ranks.
_DRAIN_S = 10.0


class LabJob:
    """One rank on each host, with the environment that `init_process_group` reads.

    ::

        with LabJob([sys.executable, "train.py"], [a, b], control) as job:
            job.until(lambda row: row.get("step") == 10, "step 10")
            eth0.down("blackhole")
            print(job.row("result"))

    A line with a JSON object on a rank's standard output is a row; the key `rank` is added to it.
    Rows of all ranks are consumed in the order of arrival; other lines are discarded. The end of a
    rank's standard error is kept for error messages. Leaving the `with` block kills all ranks and
    their descendants.

    Args:
        command: of every rank.
        hosts: the host of each rank; a host that is listed twice runs two ranks.
        control: the network for the store of rank 0; keep it free of faults.
        environment: additions to the inherited one and RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
        sites: the `TORCH_RESILIENT_SITE` of each rank; by default none has one.
        port: of the store. Jobs that follow one another closely on the same hosts need different
            ports.

    Raises OSError if a rank cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        hosts: Sequence[Host],
        control: Network,
        *,
        environment: Mapping[str, str] | None = None,
        sites: Sequence[str] | None = None,
        port: int = PORT,
    ) -> None:
        self.rows: queue.Queue[Row] = queue.Queue()
        self.processes: list[subprocess.Popen[str]] = []
        self._words = [""] * len(hosts)
        self._readers: list[threading.Thread] = []
        try:
            for rank, host in enumerate(hosts):
                process = host.popen(
                    command,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "MASTER_ADDR": control.address(hosts[0]),
                        "MASTER_PORT": str(port),
                        "RANK": str(rank),
                        "WORLD_SIZE": str(len(hosts)),
                        **({"TORCH_RESILIENT_SITE": sites[rank]} if sites else {}),
                        **(environment or {}),
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
                self.processes.append(process)
                for read in (self._read_rows, self._read_words):
                    reader = threading.Thread(target=read, args=(rank, process), daemon=True)
                    reader.start()
                    self._readers.append(reader)
        except BaseException:
            self.close()
            raise

    def _read_rows(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            # Also raised by valid JSON with numbers of thousands of digits or with deep nesting.
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    self.rows.put({**row, "rank": rank})

    def _read_words(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            # The hosts have no name service, and torch's store says so at each start.
            if "hostname of the client socket" not in line:
                self._words[rank] = (self._words[rank] + line)[-_WORDS_CHARACTERS:]

    def words(self, rank: int) -> str:
        """The end of the rank's standard error."""
        return self._words[rank]

    def tell(self, line: str) -> None:
        """Writes a line to the standard input of every rank that still runs."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line + "\n")
                process.stdin.flush()

    def until(self, condition: Callable[[Row], bool], what: str, timeout_s: float = 60) -> Row:
        """Returns the next row that fulfils the condition and discards the rows before it.

        Raises RuntimeError if no such row arrives within `timeout_s` or all ranks have ended. Its
        text contains `what`, the exit statuses of the ranks and the end of their standard error.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            # Checked before the queue, since no row can arrive after the readers have ended.
            over = not any(reader.is_alive() for reader in self._readers)
            try:
                row = self.rows.get(timeout=0 if over else _LOOK_S)
            except queue.Empty:
                if over or time.monotonic() > deadline:
                    break
                continue
            if condition(row):
                return row
            if time.monotonic() > deadline:
                break
        words = "".join(
            f"\nrank {rank}: {text.strip()}" for rank, text in enumerate(self._words) if text
        )
        raise RuntimeError(
            f"no {what} {'before all ranks ended' if over else f'within {timeout_s:g} s'}; "
            f"exit statuses {[process.poll() for process in self.processes]}{words}"
        )

    def row(self, kind: str, timeout_s: float = 60) -> Row:
        """Returns the next row with `kind` as its "kind", like until()."""
        return self.until(lambda row: row.get("kind") == kind, repr(kind), timeout_s)

    def wait(self, timeout_s: float = 60) -> list[int | None]:
        """Exit statuses; None for a rank that has not ended in time."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def close(self) -> None:
        """Kills all ranks that still run and waits for them; may be called again."""
        for process in self.processes:
            # torchrun's workers would outlive it.
            own = list(descendants(process.pid)) if process.poll() is None else []
            process.kill()
            process.wait()
            for pid in own:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _DRAIN_S
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        for process, *readers in zip(
            self.processes, self._readers[::2], self._readers[1::2], strict=False
        ):
            # A process that an ended rank left behind may hold the rank's output open until the lab
            # is closed. Closing the stream would wait for its reader thread.
            if any(reader.is_alive() for reader in readers):
                continue
            for stream in (process.stdin, process.stdout, process.stderr):
                # Buffered input can no longer be delivered: the rank has ended.
                with contextlib.suppress(BrokenPipeError):
                    if stream is not None:
                        stream.close()

    def __enter__(self) -> LabJob:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
