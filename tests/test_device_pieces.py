"""Large device tensors are copied in pieces while the network carries them.

On the strict device: the number of copies that it makes is limited, so a test sees what has
happened with a part of the tensor in host memory.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import strict_device
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks, scratch, wait_until
from strict_device import DEVICE

import torch_resilient

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="gloo has no backend for the strict device"),
    pytest.mark.usefixtures("strict_device"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

MIB = 1 << 20
# The first piece has 1 MiB, so has the second, each later one as much as all before it.
LARGE = 8 * MIB // 4  # elements of float32
TIMEOUT_S = 3.0


def run(function: Any, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(function, *args, init=False, **options)


def numbers(count: int, start: int = 0) -> torch.Tensor:
    """Values that differ by place, exact in float32."""
    return torch.arange(start, start + count, dtype=torch.float32).remainder_(1 << 20)


def received_bytes(peer: int) -> int:
    (found,) = [p for p in torch_resilient.stats().peers if p.rank == peer]
    return found.bytes_received


def flag(name: str) -> Path:
    return Path(scratch()) / name


def wait_for_flag(name: str) -> None:
    wait_until(flag(name).exists, name)


# ---- copies and the network at the same time -----------------------------------------------------


def _send_begins_early(rank: int, others_during_a_query: bool) -> float:
    controls = strict_device.start()
    if rank == 0:
        tensor = numbers(LARGE).to(DEVICE)
        controls.synchronize()
        controls.limit_copies(1)
        work = dist.isend(tensor, 1)
        wait_for_flag("the first piece has arrived")
        assert not work.is_completed()
        controls.answer_late(others_during_a_query)
        controls.limit_copies(-1)
        work.wait(timedelta(seconds=20))
        return 0.0
    tensor = torch.zeros(LARGE)
    work = dist.irecv(tensor, 0)
    wait_until(lambda: received_bytes(0) >= MIB, "the first piece has arrived")
    assert not work.is_completed()
    flag("the first piece has arrived").touch()
    work.wait()
    return float((tensor - numbers(LARGE)).abs().max())


@pytest.mark.parametrize("others_during_a_query", [False, True])
def test_a_send_begins_before_its_last_copy(others_during_a_query: bool) -> None:
    """The other copies end while the backend asks, or later."""
    assert run(_send_begins_early, others_during_a_query) == [0.0, 0.0]


def _receive_copies_early(rank: int) -> float:
    controls = strict_device.start()
    if rank == 0:
        tensor = numbers(LARGE).to(DEVICE)
        controls.synchronize()
        controls.limit_copies(2)
        work = dist.isend(tensor, 1)
        wait_for_flag("the beginning is on the device")
        controls.limit_copies(-1)
        work.wait()
        return 0.0
    tensor = torch.zeros(LARGE, device=DEVICE)
    work = dist.irecv(tensor, 0)
    count = MIB // 4
    wait_until(
        lambda: bool((tensor[:count].cpu() == numbers(count)).all()),
        "the beginning is on the device",
    )
    assert not work.is_completed()
    flag("the beginning is on the device").touch()
    work.wait()
    return float((tensor.cpu() - numbers(LARGE)).abs().max())


def test_the_beginning_of_a_message_is_on_the_device_before_its_end_has_come() -> None:
    assert run(_receive_copies_early) == [0.0, 0.0]


def _collective_begins_early(rank: int, name: str) -> float:
    """Rank 1 gets something from rank 0, which has only a part of its input."""
    os.environ["TORCH_RESILIENT_SITE"] = "east" if rank < 2 else "west"
    controls = strict_device.start()
    dist.barrier()
    before = received_bytes(0) if rank == 1 else 0
    tensor = numbers(LARGE, rank).to(DEVICE)
    controls.synchronize()
    if rank == 0:
        controls.limit_copies(2)
    if name == "all_reduce":
        work = dist.all_reduce(tensor, async_op=True)
    else:
        work = dist.broadcast(tensor, src=0, async_op=True)
    if rank == 0:
        wait_for_flag("some of it has arrived")
        assert not work.is_completed()
        controls.limit_copies(-1)
    elif rank == 1:
        wait_until(lambda: received_bytes(0) - before >= MIB // 2, "some of it has arrived")
        flag("some of it has arrived").touch()
    work.wait()
    ranks = range(4) if name == "all_reduce" else [0]
    expected = sum((numbers(LARGE, r) for r in ranks), torch.zeros(LARGE))
    return float((tensor.cpu() - expected).abs().max())


@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_a_collective_between_sites_begins_before_its_last_copy(name: str) -> None:
    assert run(_collective_begins_early, name, world_size=4) == [0.0] * 4


# ---- the same results as on the host -------------------------------------------------------------


def _operation(name: str, rank: int, size: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """One operation on tensors of some MiB that do not end with a piece; returns its results."""
    count = (3 * MIB + 12345 * 4) // torch.empty(0, dtype=dtype).element_size() // size * size
    own = (numbers(count, 1000 * rank) % 251).to(dtype).to(device)
    parts = [torch.zeros(count, dtype=dtype, device=device) for _ in range(size)]
    if name == "all_reduce":
        dist.all_reduce(own)
        return own
    if name == "avg":
        dist.all_reduce(own, op=dist.ReduceOp.AVG)
        return own
    if name == "reduce":
        dist.reduce(own, dst=size - 1)
        return own if rank == size - 1 else torch.zeros(1, device=device)
    if name == "broadcast":
        dist.broadcast(own, src=1)
        return own
    if name == "all_gather":
        dist.all_gather(parts, own)
        return torch.cat(parts)
    if name == "all_gather_in_place":
        whole = torch.zeros(size * count, dtype=dtype, device=device)
        mine = whole[rank * count : (rank + 1) * count]
        mine.copy_(own)
        dist.all_gather_into_tensor(whole, mine)
        return whole
    if name == "reduce_scatter":
        out = torch.zeros(count // size, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(out, own)
        return out
    if name == "all_to_all":
        out = torch.zeros_like(own)
        dist.all_to_all_single(out, own)
        return out
    if name == "gather":
        dist.gather(own, parts if rank == 0 else None, dst=0)
        return torch.cat(parts)
    if name == "scatter":
        inputs = [own + r for r in range(size)] if rank == 0 else None
        dist.scatter(parts[0], inputs, src=0)
        return parts[0]
    if name == "coalesced":
        tensors = [own, own.clone() + 1, own[:7].clone()]
        with dist._coalescing_manager():
            for tensor in tensors:
                dist.all_reduce(tensor)
        return torch.cat(tensors)
    if name == "strided":
        square = own[: count // 2 * 2].view(2, -1).t()
        dist.all_reduce(square)
        return square
    assert name == "ring"
    works = [dist.isend(own, (rank + 1) % size), dist.irecv(parts[0], (rank - 1) % size)]
    for work in works:
        assert work is not None
        work.wait()
    return parts[0]


OPERATIONS = (
    "all_reduce",
    "avg",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_in_place",
    "reduce_scatter",
    "all_to_all",
    "gather",
    "scatter",
    "coalesced",
    "strided",
    "ring",
)


def _all_operations(rank: int, size: int, seed: int) -> list[str]:
    controls = strict_device.start()
    chance = random.Random(seed)
    wrong = []
    for name in chance.sample(OPERATIONS, len(OPERATIONS)):
        dtype = chance.choice([torch.float32, torch.float16, torch.float64, torch.int32])
        if name == "avg":
            dtype = torch.float32
        host = _operation(name, rank, size, "cpu", dtype)
        controls.set_copy_time(chance.choice([0, 0.002]))
        staged = _operation(name, rank, size, DEVICE, dtype)
        if not torch.equal(staged.cpu(), host.cpu()):
            wrong.append(f"{name} of {dtype}")
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_all_operations_give_the_results_of_host_tensors(size: int) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    assert run(_all_operations, size, seed, world_size=size) == [[]] * size


def _aliased(rank: int) -> float:
    """The result lies where an input does: it is written after all of the input was read."""
    controls = strict_device.start(copy_s=0.005)
    whole = numbers(2 * LARGE).to(DEVICE)
    # The result goes to a place that overlaps both inputs.
    inputs = [whole[:LARGE], whole[LARGE:]]
    dist.all_to_all(
        [whole[LARGE // 2 : LARGE // 2 + LARGE], torch.zeros_like(whole[:LARGE])], inputs
    )
    got = whole[LARGE // 2 : LARGE // 2 + LARGE].cpu()
    controls.synchronize()
    expected = numbers(LARGE, 0 if rank == 0 else LARGE)
    return float((got - expected).abs().max())


def test_results_that_share_memory_with_inputs() -> None:
    assert run(_aliased) == [0.0, 0.0]


# ---- failures ------------------------------------------------------------------------------------


def _stalls_half_way(rank: int, message: bool) -> str:
    controls = strict_device.start()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S), backend=strict_device.BACKEND)
    tensor = numbers(LARGE).to(DEVICE)
    controls.synchronize()
    if rank == 0:
        controls.limit_copies(1)
    if not message:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    elif rank == 0:
        work = dist.isend(tensor, 1, group=group)
    else:
        work = dist.irecv(tensor, 0, group=group)
    with pytest.raises(dist.DistBackendError) as error:
        work.wait()
    controls.limit_copies(-1)
    if rank == 1 and message:
        # Pieces were on their way: none is written after what comes behind wait().
        tensor.fill_(7)
        controls.synchronize()
        assert (tensor.cpu() == 7).all()
    return str(error.value)


@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "send"])
def test_copies_that_stop_half_way_end_the_operation_in_time(message: bool) -> None:
    first, second = run(_stalls_half_way, message)
    assert "the inputs have not been copied from the device, because strict:0, stream" in first
    if not message:
        assert "the inputs have not been copied" in second
        assert "rank 0" in second


def _no_pinned_memory_is_left(rank: int) -> int:
    controls = strict_device.start()
    tensors = [numbers(LARGE).to(DEVICE) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    wait_until(lambda: controls.pinned_bytes() == 0, "pinned memory is given back")
    return int(controls.pinned_bytes())


def test_works_on_large_tensors_hold_no_pinned_memory() -> None:
    assert run(_no_pinned_memory_is_left) == [0, 0]
