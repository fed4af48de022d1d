"""Processor time of a connected rank that has nothing to do, in percent of a core."""

from __future__ import annotations

import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

IDLE_S = 5.0


def rank_main(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("resilient", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1 << 20))
    dist.barrier()
    time.sleep(0.5)  # the last acknowledgements
    before = time.process_time()
    time.sleep(IDLE_S)
    used = time.process_time() - before
    print(f"rank {rank}: {100 * used / IDLE_S:.4f} % of a core while idle", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (f"{folder}/store",), nprocs=2)
