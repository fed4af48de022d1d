"""Started by test_exit.py: forks processes that each run one scenario and end as programs do.

A process is forked from this one after `import torch`, which takes seconds, but before torch or
the backend run. It leaves this file at its end and goes through the whole shutdown of the
interpreter, as a separate program would. Requests come as JSON lines on standard input:
{"scenario", "rank", "size", "port", "folder"}; the answers are {"pid"}. When a process has ended,
its exit code is in the file status_<pid> of the folder given as argument.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torch_resilient


def peer_of(job: dict[str, Any]) -> int:
    return (int(job["rank"]) + 1) % int(job["size"])


def process_state(pid: int) -> str:
    """One letter of ps, of the main thread: "S" sleeps, "T" is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def ready(job: dict[str, Any]) -> None:
    """Tells the test, and the other ranks, that this one has nothing left to do but to wait."""
    partial = Path(job["folder"]) / f"partial_{job['rank']}"
    partial.write_text(str(os.getpid()))
    partial.rename(partial.with_name(f"ready_{job['rank']}"))


def wait_all_ready(job: dict[str, Any]) -> None:
    """Waits for all ranks: an operation with a rank that has left would end at once."""
    folder = Path(job["folder"])
    while not all((folder / f"ready_{rank}").exists() for rank in range(int(job["size"]))):
        time.sleep(0.001)


def wait_begun() -> None:
    """Waits until the engine has begun an operation."""
    while torch_resilient.stats().operations_pending == 0:
        time.sleep(0.001)


def wait_for(job: dict[str, Any], work: Any) -> None:
    """Waits for the operation, once the engine has begun it and the test knows."""
    wait_begun()
    ready(job)
    work.wait()


def run(job: dict[str, Any]) -> None:
    # A test run in the background of a shell inherits SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group(
        "resilient",
        store=dist.TCPStore("127.0.0.1", job["port"], is_master=False),
        rank=job["rank"],
        world_size=job["size"],
        timeout=timedelta(seconds=60),
    )
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    SCENARIOS[job["scenario"]](job)


def wait_in_recv(job: dict[str, Any]) -> None:
    wait_for(job, dist.irecv(torch.empty(10), peer_of(job)))


def wait_in_all_reduce(job: dict[str, Any]) -> None:
    if job["rank"] == 0:
        wait_for(job, dist.all_reduce(torch.ones(10), async_op=True))
    else:
        ready(job)
        time.sleep(60)


def wait_for_topology(job: dict[str, Any]) -> None:
    """Waits for the topology of a group that the peer does not join."""
    if job["rank"] == 0:
        group = dist.new_group([0, 1], use_local_synchronization=True)
        ready(job)
        torch_resilient.topology(group)
    else:
        ready(job)
        time.sleep(60)


def catch_interrupt(job: dict[str, Any]) -> None:
    """The group is usable after Ctrl-C was caught."""
    try:
        wait_for(job, dist.irecv(torch.empty(10), peer_of(job), tag=1))
    except KeyboardInterrupt:
        print("caught", flush=True)
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()


def raise_in_one(job: dict[str, Any]) -> None:
    if job["rank"] == 0:
        raise RuntimeError("a mistake in the program")
    dist.all_reduce(torch.ones(10))


def os_exit_in_one(job: dict[str, Any]) -> None:
    if job["rank"] == 0:
        os._exit(7)
    dist.all_reduce(torch.ones(10))


def sys_exit(job: dict[str, Any]) -> None:
    """All leave without destroy_process_group."""
    sys.exit(5)


def sys_exit_with_pending(job: dict[str, Any]) -> None:
    job["kept"] = [
        dist.irecv(torch.empty(10), peer_of(job), tag=3),
        dist.isend(torch.ones(1 << 20), peer_of(job), tag=4),
        dist.all_reduce(torch.ones(10), async_op=True) if job["rank"] == 0 else None,
    ]
    sys.exit(5)


def end_with_waiting_thread(job: dict[str, Any]) -> None:
    """A daemon thread is blocked in a recv when the interpreter ends."""
    threading.Thread(target=wait_in_recv, args=(job,), daemon=True).start()
    wait_all_ready(job)


def end_with_threads_that_go_on(job: dict[str, Any]) -> None:
    """Daemon threads compute and receive in a loop, whatever fails, when the interpreter ends."""
    values = torch.ones(10_000)

    def receive() -> None:
        while True:
            with contextlib.suppress(RuntimeError):
                dist.recv(torch.empty(10), peer_of(job), tag=5)

    def compute() -> None:
        while True:
            values.sum()  # takes the GIL back over and over

    for loop in (receive, receive, receive, receive, compute):
        threading.Thread(target=loop, daemon=True).start()
    wait_begun()
    ready(job)
    wait_all_ready(job)


def end_with_callback(job: dict[str, Any]) -> None:
    """A Python callback on a future is still to come when the interpreter ends."""
    work = dist.all_reduce(torch.ones(10), async_op=True) if job["rank"] == 0 else None
    if work is not None:
        work.get_future().then(lambda f: f.value())
        job["kept"] = work


def destroy_twice(job: dict[str, Any]) -> None:
    dist.destroy_process_group()
    dist.init_process_group(
        "resilient",
        store=dist.PrefixStore("again", dist.TCPStore("127.0.0.1", job["port"], is_master=False)),
        rank=job["rank"],
        world_size=job["size"],
    )
    dist.barrier()
    dist.destroy_process_group()


def destroy_with_a_hung_peer(job: dict[str, Any]) -> None:
    if job["rank"] == 1:
        ready(job)
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    other = Path(job["folder"]) / "ready_1"
    while not other.exists() or process_state(int(other.read_text())) != "T":
        time.sleep(0.001)
    dist.isend(torch.ones(1 << 22), 1)
    ready(job)
    sys.exit(5)


SCENARIOS = {
    f.__name__: f
    for f in [
        wait_in_recv,
        wait_in_all_reduce,
        wait_for_topology,
        catch_interrupt,
        raise_in_one,
        os_exit_in_one,
        sys_exit,
        sys_exit_with_pending,
        end_with_waiting_thread,
        end_with_threads_that_go_on,
        end_with_callback,
        destroy_twice,
        destroy_with_a_hung_peer,
    ]
}


def collect(folder: Path) -> None:
    """Writes down the exit code of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        partial = folder / f"partial_{pid}"
        partial.write_text(str(os.waitstatus_to_exitcode(status)))
        partial.rename(folder / f"status_{pid}")


def serve(folder: Path) -> dict[str, Any] | None:
    """Forks as asked; returns the job in the child, None at the end of the input."""
    while True:
        collect(folder)
        if not select.select([sys.stdin], [], [], 0.01)[0]:
            continue
        # One request at a time is on its way, so nothing is left in the buffer.
        line = sys.stdin.readline()
        if not line:
            return None
        job: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            with open(f"{job['folder']}/output_{job['rank']}", "w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            return job
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    own_job = serve(Path(sys.argv[1]))
    if own_job is not None:
        run(own_job)
