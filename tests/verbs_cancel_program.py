"""A rank of the test of a receive that times out while its memory is being read.

    python verbs_cancel_program.py

After a line on standard input rank 1 sends to rank 0, over networks so slow that the operation
times out in the middle. "failed" says so, with the bytes that were placed by then. After the next
line rank 0 checks that its memory has not changed since the error. After one more, the group goes
on.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import torch_resilient

ELEMENTS = 10_000_019
TIMEOUT_S = 2.0
LIMIT_S = 30.0


def say(kind: str, **row: object) -> None:
    print(json.dumps({"kind": kind, **row}), flush=True)


def rdma_paths() -> list[torch_resilient.PathStats]:
    return [p for peer in torch_resilient.stats().peers for p in peer.paths if p.kind == "rdma"]


def both_up() -> bool:
    """Waits for it; False if it does not come."""
    deadline = time.monotonic() + LIMIT_S
    while sum(path.state == "up" for path in rdma_paths()) < 2:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def placed() -> int:
    return sum(path.rdma.placed_bytes for path in rdma_paths() if path.rdma)


def main() -> None:
    """Runs the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("resilient", timeout=timedelta(seconds=TIMEOUT_S))
    rank = dist.get_rank()
    total = torch.ones(1)
    dist.all_reduce(total)
    message = (
        torch.arange(1, ELEMENTS + 1) if rank == 1 else torch.zeros(ELEMENTS, dtype=torch.int64)
    )
    say("ready", both_up=both_up())
    sys.stdin.readline()
    error = ""
    try:
        if rank == 0:
            dist.recv(message, 1)
        else:
            dist.send(message, 0)
    except RuntimeError as raised:
        error = str(raised)
    snapshot = message.clone()
    say("failed", error=error, placed=placed(), bytes=8 * ELEMENTS)
    sys.stdin.readline()
    say("result", changed=int((message != snapshot).sum()), received=int((message != 0).sum()))
    sys.stdin.readline()
    # On a group of its own, with more patience.
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    dist.all_reduce(total, group=group)
    part = message[: ELEMENTS // 10].fill_(rank + 1)
    dist.all_reduce(part, group=group)
    right = bool((part == 3).all()) and total.item() == 4
    say("after", right=right, both_up=both_up())
    dist.barrier(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
