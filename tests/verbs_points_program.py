"""A rank of test_verbs_points.py: one operation that a fault hits, checked to the last bit.

    python verbs_points_program.py OPERATION NUMEL SEED [TIMEOUT_S]

Rows: "ready" once RDMA carries on both networks; then, after a line on standard input, "done" with
the number of wrong tensors and what the RDMA paths have seen. After another line, which says that
the fault has ended, the operation runs once more. "left" names what is there after the end of the
group and was not before. With TIMEOUT_S the other rank is expected to die on the way: "failed" has
the error of this one, and the number of wrong messages among those that have arrived.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import torch_resilient

RANKS = 2
# Enough for the fault to come while the bytes travel.
ROUNDS = 4
# RDMA is offered again after a failure, and memory is freed when the device lets go of it.
LIMIT_S = 30.0
LOOK_S = 0.01
FIRST = "tcp://127.0.0.1:29399"

# The received tensor, and the right one.
Checked = tuple[Tensor, Tensor]
# What has arrived with other bytes than were sent.
WRONG: list[str] = []


def values(numel: int, *key: int) -> Tensor:
    """Small whole numbers: their sums are exact in any order."""
    seed = 0
    for number in key:
        seed = seed * 1009 + number
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (numel,), generator=generator).float()


def all_values(numel: int, *key: int) -> list[Tensor]:
    """Those of each rank."""
    return [values(numel, *key, rank) for rank in range(RANKS)]


def send_recv(rank: int, numel: int, seed: int) -> Checked:
    works = [dist.isend(values(numel, seed, i, rank), 1 - rank, tag=i) for i in range(3)]
    got = [torch.empty(numel) for _ in range(3)]
    wanted = [values(numel, seed, i, 1 - rank) for i in range(3)]
    for i in (2, 0, 1):
        dist.recv(got[i], 1 - rank, tag=i)
        if not torch.equal(got[i], wanted[i]):  # even if a later one fails
            WRONG.append(f"message {i}")
    for work in works:
        assert work is not None
        work.wait()
    return torch.cat(got), torch.cat(wanted)


def all_reduce(rank: int, numel: int, seed: int) -> Checked:
    got = values(numel, seed, rank)
    dist.all_reduce(got)
    return got, torch.stack(all_values(numel, seed)).sum(0)


def broadcast(rank: int, numel: int, seed: int) -> Checked:
    got = values(numel, seed, rank)
    dist.broadcast(got, seed % RANKS)
    return got, values(numel, seed, seed % RANKS)


def all_gather(rank: int, numel: int, seed: int) -> Checked:
    got = [torch.empty(numel) for _ in range(RANKS)]
    dist.all_gather(got, values(numel, seed, rank))
    return torch.cat(got), torch.cat(all_values(numel, seed))


def reduce_scatter(rank: int, numel: int, seed: int) -> Checked:
    got = torch.empty(numel)
    dist.reduce_scatter(got, [values(numel, seed, part, rank) for part in range(RANKS)])
    return got, torch.stack(all_values(numel, seed, rank)).sum(0)


def all_to_all(rank: int, numel: int, seed: int) -> Checked:
    got = torch.empty(RANKS * numel)
    parts = torch.cat([values(numel, seed, part, rank) for part in range(RANKS)])
    dist.all_to_all_single(got, parts)
    return got, torch.cat(all_values(numel, seed, rank))


OPERATIONS: dict[str, Callable[[int, int, int], Checked]] = {
    function.__name__: function
    for function in (send_recv, all_reduce, broadcast, all_gather, reduce_scatter, all_to_all)
}


def held() -> dict[str, list[str]]:
    """Threads, descriptors and RDMA objects of this process; all of the guest's QPs and MRs."""
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them has gone
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}").partition("[")[0])
    threads = []
    for thread in os.listdir("/proc/self/task"):
        # It may end meanwhile.
        with (
            contextlib.suppress(OSError),
            open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as name,
        ):
            threads.append(name.read().strip())
    objects = subprocess.run(["rdma", "resource"], capture_output=True, text=True, check=True)
    return {
        "threads": sorted(threads),
        "descriptors": sorted(descriptors),
        "rdma": sorted(objects.stdout.splitlines()),
    }


def until(condition: Callable[[], bool]) -> bool:
    """Waits for it; False if it does not come."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_S)
    return True


def rdma_paths() -> list[torch_resilient.PathStats]:
    return [p for peer in torch_resilient.stats().peers for p in peer.paths if p.kind == "rdma"]


def say(kind: str, **row: object) -> None:
    print(json.dumps({"kind": kind, **row}), flush=True)


def run(operation: Callable[[int, int, int], Checked], rank: int, numel: int, seed: int) -> None:
    """Runs it before and after a fault."""
    sys.stdin.readline()
    for number in range(ROUNDS):
        check(*operation(rank, numel, seed * ROUNDS + number))
    paths = rdma_paths()
    say(
        "done",
        wrong=len(WRONG),
        bytes=sum(path.bytes_sent for path in paths),
        silent=sum(path.times_suspect for path in paths),
        repeated=sum(path.chunks_retransmitted for path in paths),
        errors=sorted({path.last_error for path in paths} - {""}),
    )
    sys.stdin.readline()  # the fault has ended
    check(*operation(rank, numel, seed * ROUNDS - 1))
    dist.barrier()


def check(got: Tensor, wanted: Tensor) -> None:
    """Compares the bits."""
    if not torch.equal(got.view(torch.int32), wanted.view(torch.int32)):
        WRONG.append("operation")


def main() -> None:
    """Runs the rank."""
    operation, numel, seed = OPERATIONS[sys.argv[1]], int(sys.argv[2]), int(sys.argv[3])
    timeout = timedelta(seconds=float(sys.argv[4])) if len(sys.argv) > 4 else None
    torch.set_num_threads(1)
    # The first group of a process leaves a few descriptors for the later ones, in torch, too.
    dist.init_process_group("resilient", init_method=FIRST, rank=0, world_size=1)
    dist.destroy_process_group()
    before = held()
    dist.init_process_group("resilient", timeout=timeout)
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    both_up = until(lambda: sum(path.state == "up" for path in rdma_paths()) == 2)
    # Otherwise it would prove nothing that none are left.
    both_up = both_up and held()["rdma"] != before["rdma"]
    dist.barrier()
    say("ready", both_up=both_up)
    try:
        run(operation, rank, numel, seed)
    except dist.DistError as error:
        if timeout is None:
            raise
        say("failed", wrong=len(WRONG), error=str(error))
    dist.destroy_process_group()
    after = held()

    def is_clean() -> bool:
        nonlocal after
        after = held()
        return after == before

    until(is_clean)
    left = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
    say("left", wrong=len(WRONG), left=left)


if __name__ == "__main__":
    main()
