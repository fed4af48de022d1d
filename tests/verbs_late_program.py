"""A rank of the test of late packets: messages whose memory is used again as soon as they end.

    python verbs_late_program.py

After a line on standard input rank 1 sends to rank 0 and overwrites what it has sent; rank 0 checks
each message, and overwrites it. "reset" says that a path has failed. After the next line, when no
packet is under way any more, both check that their memory has the bytes that they have written.
"""

from __future__ import annotations

import json
import select
import sys
import time

import torch
import torch.distributed as dist

import torch_resilient

MESSAGES = 12
ELEMENTS = 300_007
LIMIT_S = 30.0


def content(number: int) -> torch.Tensor:
    """Of a message."""
    return torch.arange(ELEMENTS, dtype=torch.int64) * (2 * number + 1)


def own(number: int) -> torch.Tensor:
    """Bytes that are in no message: both ends write them over it."""
    return -1 - content(number)


def say(kind: str, **row: object) -> None:
    print(json.dumps({"kind": kind, **row}), flush=True)


def rdma_paths() -> list[torch_resilient.PathStats]:
    return [p for peer in torch_resilient.stats().peers for p in peer.paths if p.kind == "rdma"]


def main() -> None:
    """Runs the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    deadline = time.monotonic() + LIMIT_S
    while sum(path.state == "up" for path in rdma_paths()) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    messages = [content(n) if rank == 1 else torch.zeros_like(content(n)) for n in range(MESSAGES)]
    begin = dist.isend if rank == 1 else dist.irecv
    dist.barrier()
    say("ready", up=sum(path.state == "up" for path in rdma_paths()))
    sys.stdin.readline()
    works = [begin(message, 1 - rank) for message in messages]
    wrong = 0
    for number, work in enumerate(works):
        assert work is not None
        work.wait()
        wrong += rank == 0 and not torch.equal(messages[number], content(number))
        messages[number].copy_(own(number))
    paths = rdma_paths()
    say(
        "done",
        wrong=int(wrong),
        bytes=sum(path.bytes_sent for path in paths),
        silent=sum(path.times_suspect for path in paths),
    )
    was_reset = False
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        if not was_reset and any(path.last_error for path in rdma_paths()):
            was_reset = True
            say("reset")
    changed = sum(int((m != own(n)).sum()) * 8 for n, m in enumerate(messages))
    say("result", changed=changed)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
