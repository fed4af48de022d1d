"""CUDA kernels for codes and priorities: the bits of torch_resilient._loss on the same bytes.

csrc/tests/cuda_loss_test.cpp runs what their threads do without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from torch_resilient import _loss
from torch_resilient.smart import _cuda_loss
from torch_resilient.smart.gradient_drop import all_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and _cuda_loss.available()),
    reason="needs a CUDA device, and torch_resilient built with its CUDA kernels",
)


def raw(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.contiguous().cpu().view(torch.uint8).numpy()


def name_of(tensor: Tensor) -> Any:
    return str(tensor.dtype).removeprefix("torch.")


def any_bits(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Elements of all kinds: subnormals, infinities, NaNs of any sign and payload."""
    size = count * torch.empty((), dtype=dtype).element_size()
    draws = torch.Generator().manual_seed(seed)
    return torch.randint(256, (size,), dtype=torch.uint8, generator=draws).view(dtype)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_means_have_the_bits_of_the_cpu(dtype: torch.dtype, offset: int) -> None:
    """Paper: SMART §3.1, Equation 1."""
    for seed, host in enumerate(
        [torch.randn(100_003).to(dtype), any_bits(100_003, dtype, 1), torch.zeros(0, dtype=dtype)]
    ):
        host = host[offset:]
        for each, first in [(344, 0), (344, 5), (1, 0), (700, 690), (200_000, 0)]:
            means = _cuda_loss.mean_magnitudes(host.cuda(), each, first)
            expected = _loss.mean_magnitudes(name_of(host), raw(host), each, first)
            np.testing.assert_array_equal(raw(means), expected.view(np.uint8), str((seed, each)))


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 100, 4096, 4097, 1_000_003])
def test_the_threshold_is_that_of_the_cpu(dtype: torch.dtype, count: int) -> None:
    host = any_bits(count, dtype, count)
    device = host.cuda()
    for seed in range(3):
        for top in (0.01, 0.5, 1.0):
            found = _cuda_loss.sampled_threshold(device, top, seed)
            assert found == _loss.sampled_threshold(name_of(host), raw(host), top, seed)


@gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_found(dtype: torch.dtype) -> None:
    data = torch.randn(5000, device="cuda").to(dtype)
    whole = torch.full((5016,), float("nan"), dtype=dtype, device="cuda")
    for offset in range(9):
        part = whole[offset : offset + 5000]
        part.copy_(data)
        assert _cuda_loss.all_finite(part)
        for place in (0, 1, 7, 2500, 4999):
            for bad in (float("nan"), float("inf"), -float("inf")):
                part[place] = bad
                assert not all_finite(part)
            part[place] = data[place]
        whole[:] = float("nan")
    assert all_finite(data.view(50, 100).t())
    assert all_finite(data[:0])


@gpu
@pytest.mark.parametrize("shape", [(3, 100, 10, 1376), (2, 7, 3, 36), (2, 20, 30, 37)])
def test_xor_gives_the_bytes_of_the_cpu(shape: tuple[int, int, int, int]) -> None:
    """Paper: SMART §3.2."""
    blocks, symbols, parity_symbols, size = shape
    sent = any_bits(blocks * symbols * size, torch.uint8, 1).view(blocks, symbols, size)
    parity = torch.empty((blocks, parity_symbols, size), dtype=torch.uint8)
    _loss.encode("xor", sent.numpy(), parity.numpy())
    device_parity = torch.empty_like(parity, device="cuda")
    _cuda_loss.encode_xor(sent.cuda(), device_parity)
    assert torch.equal(device_parity.cpu(), parity)
    for loss in (0.0, 0.02, 0.1, 0.5, 1.0):
        draws = torch.Generator().manual_seed(int(100 * loss))
        have = torch.rand(blocks, symbols, generator=draws) >= loss
        here = torch.rand(blocks, parity_symbols, generator=draws) >= loss
        arrived = sent * have[..., None]
        on_device = [tensor.cuda() for tensor in (arrived, have, parity, here)]
        filled = _cuda_loss.recover_xor(*on_device)
        assert filled == _loss.recover(
            "xor", arrived.numpy(), have.numpy(), parity.numpy(), here.numpy()
        )
        assert torch.equal(on_device[0].cpu(), arrived)
        assert torch.equal(on_device[1].cpu(), have)


@gpu
def test_kernels_run_on_the_current_stream() -> None:
    """They see earlier results on that stream; another stream need not wait."""
    stream = torch.cuda.Stream()
    data = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            data += 1
        means = _cuda_loss.mean_magnitudes(data, 1024)
        data.zero_()
    stream.synchronize()
    assert bool((means == 50).all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: _cuda_loss.mean_magnitudes(t, 4), "data: expected a tensor on one CUDA device"),
        (lambda t: _cuda_loss.sampled_threshold(t, 0.1, 1), "data: .* got one on cpu"),
        (lambda t: _cuda_loss.all_finite(t), "data: .* got one on cpu"),
        (lambda t: _cuda_loss.encode_xor(t, t), "data: .* got one on cpu"),
        (lambda t: _cuda_loss.recover_xor(t, t, t, t), "data: .* got one on cpu"),
    ],
)
def test_tensors_elsewhere_are_refused(call: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 4))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_finite_without_a_gpu(dtype: torch.dtype) -> None:
    data = torch.ones(100, dtype=dtype)
    assert all_finite(data)
    data[70] = float("nan")
    assert not all_finite(data)


@pytest.mark.skipif(_cuda_loss.available(), reason="the kernels were built")
def test_without_kernels_the_error_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"has no CUDA kernels .*: run `TORCH_RESILIENT_CUDA=1"):
        _cuda_loss._kernels()
