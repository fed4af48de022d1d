"""A rank of test_verbs.py: exchanges messages in rounds until its input says "end".

Each round prints a row: the RDMA paths that are up, and the bytes that they have carried.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import sys
import time

import torch
import torch.distributed as dist

import torch_resilient

# More than a slot of a queue pair, and no multiple of one; and enough to be read from one tensor to
# the other.
ELEMENTS = 100_003
LARGE = 500_003
PAUSE_S = 0.01


def told_to_end() -> bool:
    """Whether a line waits on standard input."""
    return bool(select.select([sys.stdin], [], [], 0)[0]) and sys.stdin.readline() != ""


def one_round(number: int, rank: int) -> int:
    """Messages in both directions and a collective; returns how many came out wrong."""
    wrong = 0
    for elements in (ELEMENTS, LARGE):
        sent = torch.arange(elements, dtype=torch.int64) * (number + 1) + rank
        received = torch.zeros_like(sent)
        works = [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]
        for work in works:
            assert work is not None
            work.wait()
        sent.fill_(-1)  # its owner's again
        expected = torch.arange(elements, dtype=torch.int64) * (number + 1) + 1 - rank
        wrong += not torch.equal(received, expected)
    total = torch.full((1000,), float(number + rank))
    dist.all_reduce(total)
    return wrong + int(not (total == 2 * number + 1).all())


def main() -> None:
    """Runs the rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--off-at", type=int, default=-1, help="a rank that uses no RDMA")
    if parser.parse_args().off_at == int(os.environ["RANK"]):
        os.environ["TORCH_RESILIENT_RDMA"] = "off"
    dist.init_process_group("resilient")
    rank = dist.get_rank()
    wrong = number = 0
    going_on = torch.ones(1)
    while going_on:
        begin_s = time.monotonic()
        wrong += one_round(number, rank)
        paths = [p for p in torch_resilient.stats().peers[0].paths if p.kind == "rdma"]
        row = {
            "kind": "round",
            "round": number,
            "round_s": time.monotonic() - begin_s,
            "up": sum(p.state == "up" for p in paths),
            "bytes": sum(p.bytes_sent for p in paths),
            "placed": sum(p.rdma.placed_bytes for p in paths if p.rdma),
            "reconnects": sum(p.reconnects for p in paths),
            "errors": {p.nic: p.last_error for p in paths},
            "mtus": {p.nic: p.rdma.mtu_bytes for p in paths if p.rdma is not None},
        }
        print(json.dumps(row), flush=True)
        number += 1
        going_on.fill_(float(not (rank == 0 and told_to_end())))
        dist.broadcast(going_on, src=0)
        time.sleep(PAUSE_S)
    print(json.dumps({"kind": "result", "wrong": wrong, "rounds": number}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
