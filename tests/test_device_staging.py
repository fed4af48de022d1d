"""Operations on device tensors: order and visibility of the copies, without a device.

Host tensors are treated as if they were on a device. Its copies end late and in another order than
requested. An operation that reads or sends bytes before their copy has ended is wrong.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks
from pretended_device import pretend

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="gloo has no pretended device"),
    pytest.mark.usefixtures("pretended_device"),
]

COPY_S = 0.01


def _many_collectives(rank: int) -> list[float]:
    pretend(COPY_S)
    tensors = [torch.full((1000,), float(i * (rank + 1))) for i in range(16)]
    works = []
    for i, tensor in enumerate(tensors):
        if i % 3 == 2:  # no copy to wait for on one of the ranks
            works.append(dist.broadcast(tensor, src=i % 2, async_op=True))
        else:
            works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    return [tensor.unique().item() for tensor in tensors]


def test_collectives_keep_call_order_whatever_the_copies_do() -> None:
    expected = [float(i * (i % 2 + 1)) if i % 3 == 2 else float(i * 3) for i in range(16)]
    assert run_ranks(_many_collectives) == [expected, expected]


def _mixed_host_and_device(rank: int) -> list[float]:
    tensors = [torch.full((8,), float(i + rank)) for i in range(12)]
    works = []
    for i, tensor in enumerate(tensors):
        pretend(COPY_S if i % 2 == rank else 0)  # each rank stages the others' host tensors
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    return [tensor.unique().item() for tensor in tensors]


def test_host_operation_does_not_overtake_a_device_operation() -> None:
    expected = [float(2 * i + 1) for i in range(12)]
    assert run_ranks(_mixed_host_and_device) == [expected, expected]


def _many_messages(rank: int) -> list[float]:
    pretend(COPY_S)
    peer = 1 - rank
    outgoing = [torch.full((100,), float(100 * rank + i)) for i in range(16)]
    incoming = [torch.zeros(100) for _ in range(16)]
    works = [dist.isend(tensor, peer) for tensor in outgoing]
    works += [dist.irecv(tensor, peer) for tensor in incoming]
    for work in works:
        work.wait()
    return [tensor.unique().item() for tensor in incoming]


def test_messages_keep_call_order_whatever_the_copies_do() -> None:
    received = run_ranks(_many_messages)
    assert received[0] == [100.0 + i for i in range(16)]
    assert received[1] == [float(i) for i in range(16)]


def _results_are_there(rank: int) -> bool:
    pretend(COPY_S)
    polled = torch.ones(10)
    work = dist.all_reduce(polled, async_op=True)
    while not work.is_completed():
        pass
    assert polled.eq(2).all(), "is_completed() was true before the copy back had ended"
    futured = torch.ones(10)
    value = dist.all_reduce(futured, async_op=True).get_future().wait()
    assert value[0].eq(2).all()
    columns = torch.zeros(3, 2)  # each output is not contiguous
    dist.all_gather([columns[:, 0], columns[:, 1]], torch.full((3,), float(rank)))
    return bool(columns.eq(torch.tensor([0.0, 1.0])).all())


def test_results_are_there_when_told() -> None:
    assert run_ranks(_results_are_there) == [True, True]


def _abandoned(rank: int) -> str:
    pretend(10.0)  # copies that end after the group
    peer = 1 - rank
    dist.isend(torch.ones(1), peer)  # the second copy in the sequence is the quick one
    works = [dist.isend(torch.ones(1), peer) for _ in range(3)]
    group = dist.group.WORLD
    group.abort()
    messages = []
    for work in works:
        with pytest.raises(dist.DistBackendError) as error:
            work.wait(timedelta(seconds=20))
        messages.append(str(error.value))
    return messages[0]


def test_abort_ends_operations_that_wait_for_a_copy() -> None:
    for message in run_ranks(_abandoned):
        assert "abort" in message
