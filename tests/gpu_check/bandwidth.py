"""Bandwidth and latency, as a table: there are no limits, since they would be those of a machine.

Times are medians over rank 0. `copy out` and `copy in` are copies between the device and pinned
host memory, without a network. A `send` is half of a message there and back. Host tensors are in
pinned memory. The copies of a large tensor overlap the network, so that an operation on it takes
less than one on host tensors and the copies together.

On the strict device copies are paced, which shows the overlap without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import Rank

SIZES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28))
# Enough to see that the table comes: other devices than GPUs are slow.
_SMALL_SIZES = (*SIZES[:3], 16 << 20)
# The strict device's: faster than the network between two processes, as a GPU's copies are.
_STRICT_BYTES_PER_S = 2e9


def run(rank: Rank) -> None:
    """Runs the section."""
    if rank.device.kind == "strict":
        rank.device.controls.set_copy_time(0)
        rank.device.controls.set_copy_rate(_STRICT_BYTES_PER_S)
    for size in SIZES if rank.device.kind == "cuda" else _SMALL_SIZES:
        _measure(rank, size)
    with rank.check("table") as check:
        check.remark = "there are no limits"


def _measure(rank: Rank, size: int) -> None:
    host = torch.zeros(size // 4, pin_memory=rank.device.accelerated)
    there = torch.zeros(size // 4, device=rank.device.torch_device)
    times = 50 if size < 1 << 20 else 10 if rank.device.kind == "cuda" else 3
    seconds = {
        "copy out": median_s(rank, times, lambda: host.copy_(there, non_blocking=True)),
        "copy in": median_s(rank, times, lambda: there.copy_(host, non_blocking=True)),
        "send, host": median_s(rank, times, lambda: there_and_back(rank, host)) / 2,
        "send, device": median_s(rank, times, lambda: there_and_back(rank, there)) / 2,
        "all_reduce, host": median_s(rank, times, lambda: dist.all_reduce(host)),
        "all_reduce, device": median_s(rank, times, lambda: dist.all_reduce(there)),
    }
    if rank.number != 0:
        return
    copies_s = seconds["copy out"] + seconds["copy in"]
    cells: dict[str, float | str] = {"size": format_size(size)}
    cells |= {f"{name}, us": value * 1e6 for name, value in seconds.items()}
    for name in ("copy out", "send, host", "send, device"):
        cells[f"{name}, GB/s"] = size / seconds[name] / 1e9
    cells["send, device / (host + copies)"] = seconds["send, device"] / (
        seconds["send, host"] + copies_s
    )
    cells["all_reduce, device / (host + copies)"] = seconds["all_reduce, device"] / (
        seconds["all_reduce, host"] + copies_s
    )
    rank.row(cells)


def format_size(size: int) -> str:
    """ "4 KiB" or "16 MiB"."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def there_and_back(rank: Rank, tensor: Tensor) -> None:
    """Two messages."""
    if rank.number == 0:
        dist.send(tensor, 1)
        dist.recv(tensor, 1)
    else:
        dist.recv(tensor, 0)
        dist.send(tensor, 0)


def median_s(rank: Rank, times: int, call: Callable[[], object]) -> float:
    """The median time of a call until the device is done; all ranks begin together."""
    call()
    taken_s = []
    for _ in range(times):
        rank.device.synchronize()
        dist.barrier()
        begin_s = time.monotonic()
        call()
        rank.device.synchronize()
        taken_s.append(time.monotonic() - begin_s)
    return sorted(taken_s)[times // 2]
