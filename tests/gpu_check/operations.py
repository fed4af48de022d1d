"""Operations, their operands, and the comparison of a device with the host, bit by bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .checks import Rank
from .device import Device

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OTHERS = [
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
TYPES = [*FLOATS, *INTEGERS, *OTHERS]

# Odd, so that parts are not aligned.
SHAPE = (257, 31)
# SHAPE has 32 KB in float32; tensors of 2 MiB and more are copied in pieces.
_LARGE_TIMES = 100
# Longer than the calls of an operation take, so that a missing wait shows.
KERNEL_S = 0.004
# The largest time that an operation without a fault takes on a busy machine.
PATIENCE_S = 20.0

# The ways of finding out that an operation has ended: see _finish().
WAYS = ("wait", "other stream", "future", "callback", "poll")


def type_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Host memory with numbers that depend on `seed` only."""
    draws = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=draws).bool()
    if dtype in INTEGERS:
        return torch.randint(100, shape, generator=draws).to(dtype)
    if dtype.is_complex:
        pairs = torch.randn(*shape, 2, generator=draws, dtype=torch.float64)
        return torch.view_as_complex(pairs).to(dtype)
    return torch.randn(*shape, generator=draws).to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of `tensor`, in host memory: NaN and -0 count, too."""
    host = tensor.detach().cpu()
    if host.is_complex():
        host = torch.view_as_real(host.resolve_conj())
    return host.resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and bits."""
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


class Operands:
    """Makes the tensors of an operation.

    Args:
        strided: no tensor is contiguous.
        late: kernels on the current stream write inputs, and read the old contents of outputs,
            only after the operation was called.
        large: tensors of some MiB, which are copied in pieces.
    """

    def __init__(
        self,
        rank: int,
        device: Device,
        dtype: torch.dtype,
        strided: bool = False,
        late: bool = False,
        large: bool = False,
    ) -> None:
        self.rank = rank
        self.device = device
        self.dtype = dtype
        self.strided = strided
        self.late = late
        self._times = _LARGE_TIMES if large else 1
        self._read_before: list[tuple[Tensor, Tensor]] = []
        if late:
            device.sleep(KERNEL_S)

    def input(self, shape: tuple[int, ...], seed: int) -> Tensor:
        """Numbers that differ by `seed` and by rank."""
        shape = self._sized(shape)
        tensor = self._room(shape)
        host = values(shape, self.dtype, 1000 * seed + self.rank)
        if self.late:
            tensor.zero_()
            self.device.sleep(KERNEL_S / 4)
        self._copy(tensor, host)
        return tensor

    def output(self, shape: tuple[int, ...]) -> Tensor:
        """Old contents, to be overwritten."""
        shape = self._sized(shape)
        tensor = self._room(shape)
        old = values(shape, self.dtype, 4711)
        self._copy(tensor, old)
        if self.late:
            self.device.sleep(KERNEL_S / 4)
            self._read_before.append((tensor.clone(), old))
        return tensor

    def outputs(self, count: int, shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
        """Several of them."""
        return [self.output(shape) for _ in range(count)]

    def _sized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] * self._times)

    def overwritten_early(self) -> bool:
        """Whether an output changed before an earlier kernel had read it."""
        return not all(same(read, old) for read, old in self._read_before)

    def _copy(self, tensor: Tensor, host: Tensor) -> None:
        if self.late and self.device.accelerated:
            # A copy of other memory waits for the kernels in front of it.
            tensor.copy_(host.pin_memory(), non_blocking=True)
        else:
            tensor.copy_(host)

    def _room(self, shape: tuple[int, ...]) -> Tensor:
        room = (*shape, 2) if self.strided else shape
        tensor = torch.empty(room, dtype=self.dtype, device=self.device.torch_device)
        return tensor[..., 0] if self.strided else tensor


Begun: TypeAlias = tuple[list[Any], list[Tensor]]  # Works, and the tensors that hold results
Operation: TypeAlias = Callable[[Operands], Begun]


def all_reduce(op: Any) -> Operation:
    """An all-reduce with `op`."""

    def begin(o: Operands) -> Begun:
        tensor = o.input(SHAPE, 1)
        return [dist.all_reduce(tensor, op=op, async_op=True)], [tensor]

    return begin


def _reduce(o: Operands) -> Begun:
    tensor = o.input(SHAPE, 2)
    # Elsewhere than at the root the contents are undefined.
    return [dist.reduce(tensor, dst=0, async_op=True)], [tensor] if o.rank == 0 else []


def _reduce_scatter(o: Operands) -> Begun:
    output = o.output(SHAPE)
    parts = [o.input(SHAPE, 3), o.input(SHAPE, 4)]
    return [dist.reduce_scatter(output, parts, async_op=True)], [output]


def _reduce_scatter_tensor(o: Operands) -> Begun:
    output, whole = o.output(SHAPE), o.input((2 * SHAPE[0], SHAPE[1]), 5)
    return [dist.reduce_scatter_tensor(output, whole, async_op=True)], [output]


def _several(o: Operands) -> Begun:
    tensors = [o.input(SHAPE, 6), o.input((5,), 7)]
    group = dist.group.WORLD
    assert group is not None
    return [group.allreduce_coalesced(tensors)], tensors


def _broadcast(o: Operands) -> Begun:
    tensor = o.input(SHAPE, 8) if o.rank == 1 else o.output(SHAPE)
    return [dist.broadcast(tensor, src=1, async_op=True)], [tensor]


def _all_gather(o: Operands) -> Begun:
    outputs = o.outputs(2)
    return [dist.all_gather(outputs, o.input(SHAPE, 9), async_op=True)], outputs


def _all_gather_tensor(o: Operands) -> Begun:
    whole = o.output((2 * SHAPE[0], SHAPE[1]))
    return [dist.all_gather_into_tensor(whole, o.input(SHAPE, 10), async_op=True)], [whole]


def _gather(o: Operands) -> Begun:
    outputs = o.outputs(2) if o.rank == 0 else []
    return [dist.gather(o.input(SHAPE, 11), outputs or None, dst=0, async_op=True)], outputs


def _scatter(o: Operands) -> Begun:
    parts = [o.input(SHAPE, 12), o.input(SHAPE, 13)] if o.rank == 1 else None
    output = o.output(SHAPE)
    return [dist.scatter(output, parts, src=1, async_op=True)], [output]


def _all_to_all(o: Operands) -> Begun:
    outputs = o.outputs(2)
    parts = [o.input(SHAPE, 14), o.input(SHAPE, 15)]
    return [dist.all_to_all(outputs, parts, async_op=True)], outputs


def _all_to_all_single(o: Operands) -> Begun:
    sent, received = ([3, 5], [3, 7]) if o.rank == 0 else ([7, 2], [5, 2])
    output, whole = o.output((sum(received), 9)), o.input((sum(sent), 9), 16)
    return [dist.all_to_all_single(output, whole, received, sent, async_op=True)], [output]


def _messages(o: Operands) -> Begun:
    outputs = o.outputs(3)
    works = [dist.irecv(output, 1 - o.rank) for output in outputs]
    works += [dist.isend(o.input(SHAPE, 17 + i), 1 - o.rank) for i in range(3)]
    return works, outputs


def _batch(o: Operands) -> Begun:
    output = o.output(SHAPE)
    send = dist.P2POp(dist.isend, o.input(SHAPE, 20), 1 - o.rank)
    return dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, output, 1 - o.rank)]), [output]


REDUCTIONS: dict[str, Operation] = {
    name: all_reduce(getattr(dist.ReduceOp, name))
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
# Each form of operation once.
FORMS: dict[str, Operation] = {
    "all_reduce SUM": REDUCTIONS["SUM"],
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "allreduce_coalesced": _several,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "isend and irecv": _messages,
    "batch_isend_irecv": _batch,
}

_HOST = Device("cpu")


class RefusedOnHost(Exception):
    """The operation takes no such type, on any device."""


def fault_of(
    rank: Rank,
    operation: Operation,
    dtype: torch.dtype,
    *,
    way: str = "wait",
    strided: bool = False,
    late: bool = False,
    large: bool = False,
) -> str:
    """Compares the operation on the device with the same on the host; "" if all bits agree.

    Raises RefusedOnHost if the host refuses it.
    """
    expected = _on_host(rank, operation, dtype, large)
    device = rank.device
    caller, reader = device.new_stream(), device.new_stream()
    with device.on(caller):
        operands = Operands(rank.number, device, dtype, strided, late, large)
        works, results = operation(operands)
    with device.on(reader if way in ("other stream", "poll") else caller):
        copies = _finish(works, results, way)
    device.synchronize()
    wrong = [
        i for i, (copy, e) in enumerate(zip(copies, expected, strict=True)) if not same(copy, e)
    ]
    if wrong:
        return f"results {wrong} differ from those of host tensors"
    if operands.overwritten_early():
        return "an output was written before an earlier kernel had read it"
    return ""


def _on_host(
    rank: Rank, operation: Operation, dtype: torch.dtype, large: bool = False
) -> list[Tensor]:
    try:
        works, results = operation(Operands(rank.number, _HOST, dtype, large=large))
    except (RuntimeError, ValueError, TypeError) as error:
        raise RefusedOnHost(str(error)) from error
    for work in works:
        work.wait()
    return [result.clone() for result in results]


def _finish(works: list[Any], results: list[Tensor], way: str) -> list[Tensor]:
    """Waits in this way, and at once copies the results on the current stream."""
    if way == "future":
        for work in works:
            work.get_future().wait()
    elif way == "callback":
        for work in works[1:]:
            work.wait()
        copied = works[0].get_future().then(lambda _: [result.clone() for result in results])
        return list(copied.wait())
    elif way == "poll":
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(work.is_completed() for work in works):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"is_completed() is false after {PATIENCE_S} s")
    else:
        for work in works:
            work.wait()
    copies = [result.clone() for result in results]
    for result in results:  # a copy that is still on its way would spoil this or be spoilt
        result.zero_()
    return copies
