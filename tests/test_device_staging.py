"""Operations on device tensors, without a GPU: the strict device punishes every wrong order.

Each test that needs a late device puts a delay on a stream, as a long kernel would.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import strict_device
import torch
import torch.distributed as dist
from harness import on_gloo, run_ranks
from strict_device import DEVICE
from torch.nn.parallel import DistributedDataParallel

import torch_resilient

pytestmark = [
    pytest.mark.skipif(on_gloo(), reason="gloo has no backend for the strict device"),
    pytest.mark.usefixtures("strict_device"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

COPY_S = 0.01
# Longer than everything else that a test does in the meantime.
KERNEL_S = 0.3


def run(function: Any, *args: Any, **options: Any) -> list[Any]:
    return run_ranks(function, *args, init=False, **options)


def full(value: float, count: int = 1000, device: str = DEVICE) -> torch.Tensor:
    return torch.full((count,), float(value), device=device)


def only(tensor: torch.Tensor) -> float:
    """The one value that all elements have."""
    (value,) = tensor.cpu().unique().tolist()
    return float(value)


# ---- order and visibility ------------------------------------------------------------------------


def _many_collectives(rank: int) -> list[float]:
    strict_device.start(copy_s=COPY_S)
    tensors = [full(i * (rank + 1)) for i in range(16)]
    works = []
    for i, tensor in enumerate(tensors):
        if i % 3 == 2:  # no copy to wait for on one of the ranks
            works.append(dist.broadcast(tensor, src=i % 2, async_op=True))
        else:
            works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    return [only(tensor) for tensor in tensors]


def test_collectives_keep_call_order_whatever_the_copies_do() -> None:
    expected = [float(i * (i % 2 + 1)) if i % 3 == 2 else float(i * 3) for i in range(16)]
    assert run(_many_collectives) == [expected, expected]


def _mixed_host_and_device(rank: int) -> list[float]:
    strict_device.start(copy_s=COPY_S)
    tensors = [full(i + rank, 8, DEVICE if i % 2 == rank else "cpu") for i in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    return [only(tensor) for tensor in tensors]


def test_host_operation_does_not_overtake_a_device_operation() -> None:
    expected = [float(2 * i + 1) for i in range(12)]
    assert run(_mixed_host_and_device) == [expected, expected]


def _many_messages(rank: int) -> list[float]:
    strict_device.start(copy_s=COPY_S)
    peer = 1 - rank
    outgoing = [full(100 * rank + i, 100) for i in range(16)]
    incoming = [full(0, 100) for _ in range(16)]
    works = [dist.isend(tensor, peer) for tensor in outgoing]
    works += [dist.irecv(tensor, peer) for tensor in incoming]
    for work in works:
        work.wait()
    return [only(tensor) for tensor in incoming]


def test_messages_keep_call_order_whatever_the_copies_do() -> None:
    received = run(_many_messages)
    assert received[0] == [100.0 + i for i in range(16)]
    assert received[1] == [float(i) for i in range(16)]


def _late_kernels(rank: int) -> list[float]:
    controls = strict_device.start()
    peer = 1 - rank
    values = []
    # The kernel that writes the input is still to come at the call.
    written_late = full(-1)
    controls.sleep(KERNEL_S)
    written_late.fill_(rank + 1)
    dist.all_reduce(written_late)
    values.append(only(written_late))
    # A kernel that reads the old contents of the output is still to come.
    received, copied = full(5), full(0)
    controls.sleep(KERNEL_S)
    copied.copy_(received)
    works = [dist.irecv(received, peer), dist.isend(full(rank), peer)]
    for work in works:
        work.wait()
    values += [only(copied), only(received)]
    # A kernel after wait() reads the result, although wait() did not wait for the device.
    controls.set_copy_time(KERNEL_S)
    reduced = full(rank + 1)
    dist.all_reduce(reduced)
    values.append(only(reduced.clone()))
    return values


def test_kernels_before_and_after_an_operation_are_in_order_with_it() -> None:
    assert run(_late_kernels) == [[3.0, 5.0, 1.0, 3.0], [3.0, 5.0, 0.0, 3.0]]


def _results_are_there(rank: int) -> bool:
    strict_device.start(copy_s=COPY_S)
    polled = full(1, 10)
    work = dist.all_reduce(polled, async_op=True)
    while not work.is_completed():
        pass
    with torch.Stream(DEVICE):  # completed: any stream may read it
        assert only(polled) == 2
    # From here on, by the current stream only.
    value = dist.all_reduce(full(1, 10), async_op=True).get_future().wait()
    assert only(value[0]) == 2
    columns = torch.zeros(3, 2, device=DEVICE)  # each output is not contiguous
    dist.all_gather([columns[:, 0], columns[:, 1]], full(rank, 3))
    assert columns.cpu().eq(torch.tensor([0.0, 1.0])).all()
    pending = full(1, 10)
    dist.all_reduce(pending, async_op=True).synchronize()
    assert only(pending.clone()) == 2, "synchronize() of a pending Work orders nothing"
    then = (
        dist.all_reduce(full(1, 10), async_op=True)
        .get_future()
        .then(lambda future: future.value()[0] * 2)
    )
    assert only(then.wait()) == 4
    return True


def test_results_are_there_when_told() -> None:
    assert run(_results_are_there) == [True, True]


def _freed_operands(rank: int) -> float:
    strict_device.start(copy_s=COPY_S)
    received = full(0)
    works = [dist.irecv(received, 1 - rank)]
    for _ in range(8):
        sent = full(rank + 1)
        works.append(dist.isend(sent, 1 - rank))
        del sent
        full(9)  # takes the memory, if it is free
    for _ in range(7):
        works.append(dist.irecv(full(0), 1 - rank))
    for work in works:
        work.wait()
    return only(received)


def test_memory_that_the_caller_frees_is_kept_for_the_copies() -> None:
    assert run(_freed_operands) == [2.0, 1.0]


def _views_with_a_bit(rank: int) -> tuple[list[float], list[float]]:
    controls = strict_device.start(copy_s=COPY_S)
    group = dist.group.WORLD
    assert group is not None
    # torch's dispatcher resolves such views before it calls a backend; other callers do not.
    backend = group._get_backend(torch.device(DEVICE))
    values, received, signed = full(rank + 1), full(0), full(0)
    works = [
        backend.send([torch._neg_view(values)], 1 - rank, 1),
        backend.send([values], 1 - rank, 2),
        backend.recv([received], 1 - rank, 1),
        backend.recv([torch._neg_view(signed)], 1 - rank, 2),
    ]
    for work in works:
        work.wait()
    controls.synchronize()
    return [only(received)], [only(signed)]


def test_negative_views_keep_their_sign() -> None:
    assert run(_views_with_a_bit) == [([-2.0], [-2.0]), ([-1.0], [-1.0])]


def _sparse(rank: int) -> list[float]:
    controls = strict_device.start(copy_s=COPY_S)
    values = full(0, 2)
    indices = torch.tensor([[rank, 2]], device=DEVICE)
    tensor = torch.sparse_coo_tensor(indices, values, (4,), is_coalesced=True)
    controls.hold()
    values.fill_(rank + 1)
    group = dist.group.WORLD
    assert group is not None
    # torch's dispatcher knows sparse tensors of the CPU and of CUDA only.
    backend = group._get_backend(torch.device(DEVICE))
    work = backend.allreduce([tensor], dist.AllreduceOptions())  # returns while the stream stands
    assert not work.is_completed()
    controls.release()
    work.wait()
    dense = torch.zeros(4)
    for i, value in zip(tensor._indices()[0].tolist(), tensor._values().tolist(), strict=True):
        dense[i] = value
    return dense.tolist()


def test_sparse_tensors_are_staged_as_dense_ones() -> None:
    assert run(_sparse) == [[1.0, 2.0, 3.0, 0.0]] * 2


# ---- devices, streams and memory -----------------------------------------------------------------


def _second_device(rank: int) -> tuple[list[int], list[float]]:
    controls = strict_device.start(device=1, copy_s=0.001)
    device = "strict:1"
    results = []
    for _ in range(3):
        tensor = full(rank + 1, device=device)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        results.append(future.then(lambda value: value.value()[0] + 1))
        del future, tensor  # the last references go on threads of the backend
    received = full(0, device=device)
    works = [dist.isend(full(rank, device=device), 1 - rank), dist.irecv(received, 1 - rank)]
    for work in works:
        work.wait()
    values = [only(result.wait()) for result in results] + [only(received)]
    dist.barrier(device_ids=[1])
    del results, works
    dist.destroy_process_group()
    return controls.contexts(), values


def test_no_context_is_made_on_another_device() -> None:
    for rank, (contexts, values) in enumerate(run(_second_device)):
        assert contexts == [1]
        assert values == [4.0, 4.0, 4.0, 1.0 - rank]


def _two_devices_in_one_call(rank: int) -> list[float]:
    controls = strict_device.start(copy_s=COPY_S)
    inputs, outputs = [], []
    for device in ("strict:0", "strict:1"):
        controls.set_device(int(device[-1]))
        inputs.append(full(-1, device=device))
        outputs.append(full(-1, 2000, device=device))
        controls.sleep(KERNEL_S)
        inputs[-1].fill_(10 * rank + int(device[-1]))
    group = dist.group.WORLD
    assert group is not None
    group.allgather_into_tensor_coalesced(outputs, inputs).wait()
    return [only(part) for output in outputs for part in output.chunk(2)]


def test_a_coalesced_gather_takes_tensors_of_several_devices() -> None:
    assert run(_two_devices_in_one_call) == [[0.0, 10.0, 1.0, 11.0]] * 2


def _streams_and_events(rank: int) -> tuple[int, int, bool]:
    controls = strict_device.start(copy_s=0.001)
    works = [dist.all_reduce(full(1), async_op=True) for _ in range(40)]
    for work in works:
        work.wait()
    del works, work
    events = controls.events_made()
    for _ in range(40):
        dist.all_reduce(full(1))
    side = [high for number, high, tasks in controls.streams(0) if number != 0 and tasks > 0]
    return controls.events_made() - events, len(side), all(side)


def test_side_streams_and_events_are_few_and_used_again() -> None:
    for new_events, side_streams, high_priority in run(_streams_and_events):
        # A Python future and its readers make events of their own; these operations have none.
        assert new_events == 0
        assert side_streams == 2
        assert high_priority


def _beside_a_busy_stream(rank: int) -> bool:
    controls = strict_device.start()
    busy = torch.Stream(DEVICE)
    with busy:
        controls.hold()
        waiting = dist.isend(full(1), 1 - rank, tag=1)  # its input comes from the busy stream
    for _ in range(40):  # as many as torch's pool has streams, and more
        reduced = full(rank + 1)
        dist.all_reduce(reduced)
        assert only(reduced) == 3
    assert not waiting.is_completed()
    with busy:
        controls.release()
    received = full(0)
    dist.recv(received, 1 - rank, tag=1)
    waiting.wait()
    return only(received) == 1


def test_operations_do_not_wait_for_an_unrelated_stream() -> None:
    assert run(_beside_a_busy_stream) == [True, True]


def _pinned_memory(rank: int) -> int:
    controls = strict_device.start()
    works: list[Any] = []
    tensors = [full(1) for _ in range(8)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
        works.append(dist.isend(tensor, 1 - rank))
        works.append(dist.irecv(full(0), 1 - rank))
    for work in works:
        work.wait()
    limit = time.monotonic() + 20
    while controls.pinned_bytes() > 0 and time.monotonic() < limit:
        time.sleep(0.01)
    return int(controls.pinned_bytes())


def test_a_work_that_has_ended_holds_no_pinned_memory() -> None:
    assert run(_pinned_memory) == [0, 0]


# ---- failures ------------------------------------------------------------------------------------


def _abandoned(rank: int) -> str:
    controls = strict_device.start()
    controls.hold()  # copies that end after the group
    works = [dist.isend(full(1, 1), 1 - rank) for _ in range(3)]
    group = dist.group.WORLD
    assert group is not None
    group.abort()
    messages = []
    for work in works:
        with pytest.raises(dist.DistBackendError) as error:
            work.wait(timedelta(seconds=20))
        messages.append(str(error.value))
    controls.release()
    return messages[0]


def test_abort_ends_operations_that_wait_for_a_copy() -> None:
    for message in run(_abandoned):
        assert "abort" in message


TIMEOUT_S = 3.0


def _a_stream_that_never_gets_on(rank: int, message: bool) -> tuple[float, str]:
    controls = strict_device.start()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S), backend=strict_device.BACKEND)
    tensor = full(1)
    if rank == 0:
        controls.hold()
    before_s = time.monotonic()
    if not message:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    elif rank == 0:
        work = dist.isend(tensor, 1, group=group)
    else:
        work = dist.irecv(tensor, 0, group=group)
    with pytest.raises(dist.DistBackendError) as error:
        work.wait()
    waited_s = time.monotonic() - before_s
    if rank == 0:
        controls.release()
        dist.send(full(7), 1, group=group)
    else:
        # The failed message has kept its place: this one is not taken for it.
        dist.recv(tensor, 0, group=group)
        assert only(tensor) == 7
    return waited_s, str(error.value)


@pytest.mark.parametrize("message", [False, True], ids=["all_reduce", "send"])
def test_a_stream_that_never_gets_on_ends_operations_in_time(message: bool) -> None:
    results = run(_a_stream_that_never_gets_on, message)
    for waited_s, _ in results:
        assert waited_s < TIMEOUT_S + 5
    texts = [text for _, text in results]
    for text in texts:
        assert f"{DEVICE}, stream 0 has not finished" in text, texts
    assert "rank 0" in texts[1]


# ---- graphs --------------------------------------------------------------------------------------


def _inside_a_capture(rank: int) -> list[str]:
    controls = strict_device.start()
    tensor, texts = full(rank + 1), []
    with torch.Stream(DEVICE):
        controls.begin_capture()
        for call in (dist.all_reduce, lambda t: dist.isend(t, 1 - rank)):
            with pytest.raises(ValueError, match="capturing a graph") as error:
                call(tensor)
            texts.append(str(error.value))
        assert controls.end_capture()
    dist.all_reduce(tensor)  # nothing was numbered
    assert only(tensor) == 3
    return texts


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."), reason="torch 2.11 does not tell a backend of captures"
)
def test_an_operation_inside_a_capture_is_refused_at_the_call() -> None:
    for texts in run(_inside_a_capture):
        for text in texts:
            assert f"the current stream of {DEVICE}" in text


def _beside_a_capture(rank: int) -> bool:
    controls = strict_device.start(copy_s=COPY_S)
    capturing, ended = threading.Event(), threading.Event()
    valid: list[bool] = []

    def capture() -> None:
        with torch.Stream(DEVICE):
            controls.begin_capture()
            capturing.set()
            ended.wait(60)
            valid.append(controls.end_capture())

    thread = threading.Thread(target=capture)
    tensors = [full(rank + 1) for _ in range(4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors[:2]]
    thread.start()
    capturing.wait(60)
    works += [dist.all_reduce(tensor, async_op=True) for tensor in tensors[2:]]
    for work in works:
        work.wait()
        while not work.is_completed():
            pass
    ended.set()
    thread.join()
    assert [only(tensor) for tensor in tensors] == [3.0] * 4
    return valid == [True]


@pytest.mark.skipif(
    torch.version.cuda is not None,
    reason="the relaxed mode is that of CUDA's own runtime, which the strict device does not see",
)
def test_operations_leave_the_capture_of_another_thread_valid() -> None:
    assert run(_beside_a_capture) == [True, True]


# ---- barriers and training -----------------------------------------------------------------------


def _barrier(rank: int) -> bool:
    controls = strict_device.start()
    others = dist.new_group(backend=strict_device.BACKEND)
    if rank == 0:
        controls.hold()
    work = dist.barrier(device_ids=[0], async_op=True)
    dist.barrier(others)  # has no devices to wait for
    early = work.is_completed()
    dist.barrier(others)  # both have asked
    controls.release()
    work.wait()
    return early


def test_a_barrier_with_device_ids_comes_after_the_kernels() -> None:
    assert run(_barrier) == [False, False]


def _training(rank: int, device: str) -> tuple[list[list[float]], list[int]]:
    controls = strict_device.start(device=1, copy_s=0.002)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        data = torch.arange(16.0).reshape(2, 8).add(rank + step).div(30).to(device)
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()
    contexts = controls.contexts() if device != "cpu" else []
    return [p.detach().flatten().cpu().tolist() for p in model.parameters()], contexts


def test_training_gives_the_same_bits_as_on_the_host() -> None:
    on_host = run(_training, "cpu")
    for (weights, contexts), (expected, _) in zip(run(_training, "strict:1"), on_host, strict=True):
        assert weights == expected
        assert contexts == [1]


def test_the_backend_is_found_for_device_tensors() -> None:
    assert run(_found) == ["strict", "strict"]


def _found(rank: int) -> str:
    strict_device.start()
    dist.all_reduce(full(1))
    assert torch_resilient.stats().size == 2
    (kind,) = {torch.device(DEVICE).type}
    return kind
