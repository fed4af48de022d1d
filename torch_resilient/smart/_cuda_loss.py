"""Codes against loss and priorities of packets on CUDA tensors, without a copy to the host.

The results are those of torch_resilient._loss on the same bytes, to the bit. Everything runs on the
current stream of the tensor's device. Only where the kernels were built: see available().

All raise ValueError, naming the argument, for a tensor that is not on a CUDA device, not
contiguous, or does not fit, and RuntimeError where the kernels were not built.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

__all__ = [
    "all_finite",
    "available",
    "encode_xor",
    "mean_magnitudes",
    "recover_xor",
    "sampled_threshold",
]

# Elements that sampled_threshold looks at (csrc/loss/magnitude.h).
_SAMPLE = 4096


@functools.cache
def available() -> bool:
    """Whether the kernels were built: torch has CUDA, and nvcc could compile them."""
    try:
        _kernels()
    except RuntimeError:
        return False
    return True


def mean_magnitudes(
    data: Tensor, elements_per_packet: int, first_packet_elements: int = 0
) -> Tensor:
    """The mean of |g| of each packet, float32: (packets,). Does not wait for the device.

    `data`: any shape, of float32, bfloat16, float16 or float64. If `first_packet_elements` is not
    0, the first packet has as many and the others `elements_per_packet`.

    Paper: SMART §3.1, Equation 1.
    """
    with _stream_of(data=data) as stream:
        packets = _kernels().packet_count(data.numel(), elements_per_packet, first_packet_elements)
        means = data.new_empty(packets, dtype=torch.float32)
        _kernels().mean_magnitudes(
            _dtype_name(data),
            data.data_ptr(),
            data.numel(),
            elements_per_packet,
            first_packet_elements,
            means.data_ptr(),
            stream,
        )
    return means


def sampled_threshold(data: Tensor, top_fraction: float, seed: int) -> float:
    """The magnitude that the largest `top_fraction` of a sample of `data` reach.

    The sample is uniform, of at most 4096 elements, the same for the same seed. Waits.

    Paper: SMART §3.1, the threshold τ.
    """
    with _stream_of(data=data) as stream:
        room = data.new_empty(_SAMPLE, dtype=torch.float64)
        result: float = _kernels().sampled_threshold(
            _dtype_name(data),
            data.data_ptr(),
            data.numel(),
            top_fraction,
            seed,
            room.data_ptr(),
            stream,
        )
    return result


def all_finite(data: Tensor) -> bool:
    """False if an element is infinite or not a number. Reads `data` once. Waits."""
    with _stream_of(data=data) as stream:
        finite = data.new_ones((), dtype=torch.int32)
        _kernels().all_finite(
            _dtype_name(data), data.data_ptr(), data.numel(), finite.data_ptr(), stream
        )
        return bool(finite)


def encode_xor(data: Tensor, parity: Tensor) -> None:
    """Writes `parity` from `data`. Does not wait for the device.

    Both are uint8: (symbols, bytes) or (blocks, symbols, bytes). Data symbol i belongs to sequence
    i mod the number of parity symbols.

    Paper: SMART §3.2.
    """
    with _stream_of(data=data, parity=parity) as stream:
        _kernels().encode_xor(data.data_ptr(), parity.data_ptr(), *_shape(data, parity), stream)


def recover_xor(data: Tensor, have: Tensor, parity: Tensor, parity_here: Tensor) -> int:
    """Writes those missing symbols of `data` that can be repaired; returns how many. Waits.

    `have` and `parity_here` have a bool for each symbol of `data` and `parity`; those in `have`
    are set for what was repaired.

    Paper: SMART §3.2.
    """
    with _stream_of(data=data, have=have, parity=parity, parity_here=parity_here) as stream:
        shape = _shape(data, parity)
        for name, flags, like in (("have", have, data), ("parity_here", parity_here, parity)):
            if flags.dtype != torch.bool or flags.shape != like.shape[:-1]:
                raise ValueError(
                    f"{name}: expected bool of the shape {tuple(like.shape[:-1])}, got "
                    f"{flags.dtype} of {tuple(flags.shape)}"
                )
        filled = data.new_zeros((), dtype=torch.int64)
        _kernels().recover_xor(
            data.data_ptr(),
            parity.data_ptr(),
            *shape,
            have.data_ptr(),
            parity_here.data_ptr(),
            filled.data_ptr(),
            stream,
        )
        return int(filled)


@functools.cache
def _kernels() -> ModuleType:
    try:
        from torch_resilient import _cuda
    except ImportError as error:
        reason = importlib.import_module("torch_resilient._build_info").WITHOUT_CUDA or error
        raise RuntimeError(
            f"torch_resilient has no CUDA kernels ({reason}): run `TORCH_RESILIENT_CUDA=1 "
            "pip install --no-build-isolation --no-deps --force-reinstall .` in its source, with a "
            "CUDA build of torch and nvcc of the same major version in PATH"
        ) from error
    return _cuda


@contextlib.contextmanager
def _stream_of(**tensors: Tensor) -> Iterator[int]:
    """The current stream of the device of all `tensors`, which becomes the current device."""
    device = next(iter(tensors.values())).device
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda" or tensor.device != device:
            raise ValueError(
                f"{name}: expected a tensor on one CUDA device with the others, got one on "
                f"{tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor; call contiguous() first")
    with torch.cuda.device(device):
        yield torch.cuda.current_stream().cuda_stream


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(data: Tensor, parity: Tensor) -> tuple[int, int, int, int]:
    """(blocks, data symbols, parity symbols, bytes); ValueError if they do not fit together."""
    for name, tensor in (("data", data), ("parity", parity)):
        if tensor.dtype != torch.uint8 or tensor.dim() not in (2, 3):
            raise ValueError(
                f"{name}: expected uint8 with the dimensions (symbols, bytes) or (blocks, "
                f"symbols, bytes), got {tensor.dtype} of {tuple(tensor.shape)}"
            )
    blocks, symbols, size = data.shape if data.dim() == 3 else (1, *data.shape)
    if (*parity.shape[:-2], parity.shape[-1]) != (*data.shape[:-2], size):
        raise ValueError(
            f"parity: expected blocks and bytes as in data, {tuple(data.shape)}, got "
            f"{tuple(parity.shape)}"
        )
    return blocks, symbols, parity.shape[-2], size
