"""Runs a test function in N rank processes and reports what every rank did.

    values = run_ranks(my_function, "argument", world_size=3)

calls ``my_function(rank, "argument")`` in three new processes, each with the default process
group initialised on the backend under test, and returns what they returned, by rank. A rank that
raises, dies, or is not done in time makes RanksFailed, which shows the traceback (or, on a
timeout, the stacks of all threads) of every rank.

Ranks are forked from a server process that has imported torch but never run it, so a rank is a
fresh process and yet starts in about 20 ms instead of 3 s. `start="spawn"` gives a fresh
interpreter. The key-value store does not live in a rank: it outlives all of them.

The backend under test is "resilient"; RESILIENT_TEST_BACKEND=gloo runs the same tests on gloo,
which tells a wrong test from a wrong backend.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Imported once by the server. Each saves every rank process up to 3 s.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch._dynamo",
    "torch.testing",
    "pytest",
]

# Dumps of the stacks are made this long before the ranks are killed: enough to write them on a
# loaded machine.
_DUMP_LEAD_S = 2.0

# The maximum time from the end of a process until its exit code is readable, under load.
_REAP_S = 10.0

_PR_SET_PDEATHSIG = 1


def backend_name() -> str:
    """The backend under test."""
    return os.environ.get("RESILIENT_TEST_BACKEND", "resilient")


def on_gloo() -> bool:
    """True if the tests are checked against gloo itself; they skip its known limits."""
    return backend_name() == "gloo"


def needs(package: str) -> pytest.MarkDecorator:
    """Marks a test that is skipped without an optional package.

    With RESILIENT_TEST_FRAMEWORKS=required, as in `make test-frameworks`, it fails instead.
    """
    required = os.environ.get("RESILIENT_TEST_FRAMEWORKS") == "required"
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing and not required, reason=f"{package} is not installed")


@dataclass
class Outcome:
    """The end of one rank: exactly one of `value`, `error` and a bad `exit_code` is set."""

    rank: int
    value: Any = None
    error: str | None = None  # traceback of what it raised
    exception: str | None = None  # "DistBackendError: text", without the traceback
    exit_code: int | None = None  # None: it was killed by the harness after the timeout
    stacks: str = ""  # all threads, shortly before the timeout
    returned: bool = False

    @property
    def ok(self) -> bool:
        return self.returned and self.exit_code == 0

    def describe(self) -> str:
        if self.ok:
            return f"rank {self.rank}: ok"
        if self.error is not None:
            return f"rank {self.rank} raised:\n{self.error}"
        if self.exit_code is None:
            return f"rank {self.rank} was not done in time; its stacks:\n{self.stacks or '(none)'}"
        text = f"rank {self.rank}: exit code {self.exit_code}"
        if self.exit_code < 0:
            text += f" ({signal.Signals(-self.exit_code).name})"
        return text + (f"\n{self.stacks}" if self.stacks else "")


class RanksFailed(AssertionError):
    """At least one rank did not return normally."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self.outcomes = list(outcomes)
        super().__init__("\n".join(outcome.describe() for outcome in outcomes))


@dataclass
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    backend: str
    init: bool
    store: str  # "tcp" or "file"
    store_port: int
    store_file: str
    group_timeout_s: float
    timeout_s: float
    folder: str
    env: dict[str, str] = field(default_factory=dict)


_current: _Job | None = None
_kept: list[dist.ProcessGroup] = []


def make_store(prefix: str = "") -> dist.Store:
    """Creates, in a rank, a new client of the store shared by all ranks of this run."""
    assert _current is not None, "only in a rank process"
    store: dist.Store
    if _current.store == "tcp":
        store = dist.TCPStore(
            "127.0.0.1",
            _current.store_port,
            _current.world_size,
            is_master=False,
            timeout=timedelta(seconds=_current.timeout_s),
        )
    else:
        store = dist.FileStore(_current.store_file, -1)
    return dist.PrefixStore(prefix, store) if prefix else store


def store_port() -> int:
    """The port of the store of a run with store="tcp", on 127.0.0.1. For use in a rank."""
    assert _current is not None, "only in a rank process"
    return _current.store_port


def set_launcher_environment() -> str:
    """Sets, in a rank of a run with store="tcp", the variables that torchrun sets.

    For code that creates the default group itself. Returns the name of the run's backend.
    """
    assert _current is not None, "only in a rank process"
    rank, size = str(_current.rank), str(_current.world_size)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_current.store_port),
        RANK=rank,
        LOCAL_RANK=rank,
        GROUP_RANK="0",
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        GROUP_WORLD_SIZE="1",
        TORCHELASTIC_RUN_ID="test",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    return _current.backend


def init_group(
    prefix: str = "", backend: str | None = None, timeout_s: float | None = None
) -> None:
    """Initialises, in a rank, the default group; `prefix` separates several of them."""
    assert _current is not None, "only in a rank process"
    if (backend or _current.backend) == "gloo":
        # Else a rank may have made its group, and be gone, while another still connects to it,
        # which then fails ("connectFullMesh failed").
        os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
    dist.init_process_group(
        backend or _current.backend,
        store=make_store(prefix),
        rank=_current.rank,
        world_size=_current.world_size,
        timeout=timedelta(seconds=timeout_s or _current.group_timeout_s),
    )


def scratch() -> str:
    """A folder shared by all ranks of this run, removed after it. For use in a rank."""
    assert _current is not None, "only in a rank process"
    return _current.folder


def world_size() -> int:
    """The number of ranks of this run, with or without a group. For use in a rank."""
    assert _current is not None, "only in a rank process"
    return _current.world_size


def error_of(function: Callable[[], Any]) -> str:
    """Calls `function`, which must raise, and returns the text of the error."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{function} did not raise")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20) -> None:
    """Polls `condition` until it is true; AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.002)


def wait_until_pending() -> None:
    """Waits, in a rank, until the engine has begun an operation that has not ended."""
    from torch_resilient import stats

    wait_until(lambda: stats().operations_pending > 0, "an operation is pending")


def run_outcomes(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str | None = None,
    init: bool = True,
    store: str = "file",
    group_timeout_s: float = 30,
    timeout_s: float = 60,
    start: str = "fork",
    env: dict[str, str] | None = None,
) -> list[Outcome]:
    """Like run_ranks, but returns the Outcome of every rank, whatever it is.

    `function` must be a module-level function; it is called as function(rank, *args). `init`:
    initialise the default group before and destroy it after. `group_timeout_s` is the group's
    timeout, `timeout_s` the time after which all ranks are killed. `env` is added to the
    environment of the ranks. `store`: "file", or "tcp" for a TCPStore as in a real job. The latter
    looks up the name of ::ffff:127.0.0.1 for each connection; where the name server does not
    always answer, all ranks then stand still for 5 s.
    """
    context = _context(start)
    folder = tempfile.mkdtemp(prefix="ranks_")
    server = None
    processes: list[Any] = []
    pipes: list[multiprocessing.connection.Connection] = []
    outcomes = [Outcome(rank) for rank in range(world_size)]
    try:
        if store == "tcp":
            server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            job = _Job(
                function=function,
                args=args,
                rank=rank,
                world_size=world_size,
                backend=backend or backend_name(),
                init=init,
                store=store,
                store_port=server.port if server is not None else 0,
                store_file=os.path.join(folder, "store"),
                group_timeout_s=group_timeout_s,
                timeout_s=timeout_s,
                folder=folder,
                env=env or {},
            )
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(job, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        _collect(processes, pipes, outcomes, timeout_s)
        left_behind = []
        for outcome, process in zip(outcomes, processes, strict=True):
            process.join(0)
            outcome.exit_code = process.exitcode
            if outcome.exit_code is not None and _kill_session(process.pid):
                left_behind.append(outcome.rank)
            dump = os.path.join(folder, f"stacks_{outcome.rank}")
            if not outcome.ok and os.path.exists(dump):
                with open(dump, encoding="utf-8", errors="replace") as f:
                    outcome.stacks = f.read()
        for rank in left_behind:
            outcomes[rank].error = (outcomes[rank].error or "") + "left processes behind"
            outcomes[rank].returned = False
        return outcomes
    finally:
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                _kill_session(process.pid)
                process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()
        del server
        shutil.rmtree(folder, ignore_errors=True)


def run_ranks(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Runs function(rank, *args) in every rank and returns the values by rank.

    Options as in run_outcomes. Raises RanksFailed if any rank did not return.
    """
    outcomes = run_outcomes(function, *args, **options)
    if not all(outcome.ok for outcome in outcomes):
        raise RanksFailed(outcomes)
    return [outcome.value for outcome in outcomes]


_contexts: dict[str, Any] = {}


def _context(start: str) -> Any:
    if start not in _contexts:
        if start == "fork":
            _contexts[start] = _start_server()
        elif start == "spawn":
            _contexts[start] = multiprocessing.get_context("spawn")
        else:
            raise ValueError(f'start must be "fork" or "spawn", not {start!r}')
    return _contexts[start]


def _start_server() -> Any:
    """Starts the process that ranks are forked from; it ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # Imports of torch and careless tests write temporary files: keep them in one place.
    folder = tempfile.mkdtemp(prefix="ranks_server_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    changed = {
        "TMPDIR": folder,
        "OMP_NUM_THREADS": "1",  # no thread pool in a process that forks
    }
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def _collect(
    processes: list[Any],
    pipes: list[multiprocessing.connection.Connection],
    outcomes: list[Outcome],
    timeout_s: float,
) -> None:
    """Reads the results until every rank has ended or the time is up."""
    deadline = time.monotonic() + timeout_s
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    reading = {pipe: rank for rank, pipe in enumerate(pipes)}
    while running:
        left = deadline - time.monotonic()
        if left <= 0:
            return
        for thing in multiprocessing.connection.wait([*running, *reading], left):
            if thing in running:
                # Its pipe may be held open by what it has started, so no end of file comes.
                rank = running.pop(thing)  # type: ignore[arg-type]
                processes[rank].join(_REAP_S)
                if reading.pop(pipes[rank], None) is not None and pipes[rank].poll(0):
                    _read(pipes[rank], outcomes[rank])
            elif thing in reading:
                rank = reading.pop(thing)  # type: ignore[call-overload]
                _read(pipes[rank], outcomes[rank])


def _read(pipe: multiprocessing.connection.Connection, outcome: Outcome) -> None:
    try:
        result = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return
    outcome.returned = result[0]
    if outcome.returned:
        outcome.value = result[1]
    else:
        outcome.error, outcome.exception = result[1], result[2]


def _kill_session(pid: int) -> bool:
    """Kills what is left of a rank's session; True if there was anything."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _rank_main(job: _Job, pipe: multiprocessing.connection.Connection) -> None:
    """Body of a rank process."""
    os.setsid()  # lets the harness kill the children of the rank, too
    # The kernel kills the rank if the server that forked it, hence pytest, is gone.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    global _current
    _current = job
    os.environ.update(job.env)
    if "TORCH_DISTRIBUTED_DEBUG" in job.env:
        dist.set_debug_level_from_env()  # torch read it when it was imported
    torch.set_num_threads(1)
    # Nothing a test function loads later may depend on the folder the tests were started from.
    stacks = open(os.path.join(job.folder, f"stacks_{job.rank}"), "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    lead = _DUMP_LEAD_S if job.timeout_s > 2 * _DUMP_LEAD_S else job.timeout_s / 2
    faulthandler.dump_traceback_later(job.timeout_s - lead, file=stacks)
    try:
        if job.init:
            init_group()
        value = job.function(job.rank, *job.args)
        if job.init and dist.is_initialized():
            if dist.get_backend() == "gloo":
                # A thread of its own may otherwise be the last to let go of it: it would then wait
                # for its own end, which ends the process ("Resource deadlock avoided").
                _kept.extend(dist.distributed_c10d._pg_map)
            dist.destroy_process_group()
        pipe.send_bytes(pickle.dumps((True, value)))
        code = 0
    except BaseException as error:
        short = f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc(), short)))
        code = 1
    pipe.close()
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    sys.exit(code)
