"""Codes and priorities of packets in torch_resilient._loss: against numpy, torch and ISA-L."""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_resilient import _loss

Bytes = npt.NDArray[np.uint8]
SHAPES = [("xor", 100, 10), ("xor", 7, 3), ("reed_solomon", 100, 10), ("reed_solomon", 20, 2)]


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(kind: Any, data: Bytes, parity: int, kernel: str | None = None) -> Bytes:
    result = np.empty((*data.shape[:-2], parity, data.shape[-1]), dtype=np.uint8)
    _loss.encode(kind, data, result, kernel)
    return result


@pytest.mark.parametrize("kernel", _loss.kernels())
@pytest.mark.parametrize(("kind", "data", "parity"), SHAPES)
def test_blocks_come_back(kind: Any, data: int, parity: int, kernel: str) -> None:
    sent = random_bytes(1, 3, data, 137)
    repair = encoded(kind, sent, parity, kernel)
    # A burst of as many as there are repair symbols, at another place in each block.
    have = np.ones((3, data), dtype=bool)
    for block in range(3):
        first = block * (data - parity) // 2
        have[block, first : first + parity] = False
    arrived = np.where(have[..., None], sent, np.uint8(0))
    here = np.ones((3, parity), dtype=bool)
    assert _loss.recover(kind, arrived, have, repair, here, kernel) == 3 * parity
    assert have.all()
    np.testing.assert_array_equal(arrived, sent)
    # Without repair symbols nothing comes back, and nothing is touched.
    have[1, 2] = False
    arrived[1, 2] = 77
    assert _loss.recover(kind, arrived, have, repair, np.zeros_like(here), kernel) == 0
    assert not have[1, 2]
    assert (arrived[1, 2] == 77).all()


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 300), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_xor_is_that_of_numpy(data: int, parity: int, size: int, seed: int) -> None:
    sent = random_bytes(seed, data, size)
    repair = encoded("xor", sent, parity)
    for j in range(parity):
        np.testing.assert_array_equal(repair[j], np.bitwise_xor.reduce(sent[j::parity], axis=0))


def isal() -> Any:
    """Intel's ISA-L, from which nothing is used but in comparisons."""
    name = ctypes.util.find_library("isal")
    if name is None:
        pytest.skip("ISA-L is not installed (Debian: libisal2): nothing to compare with")
    return ctypes.CDLL(name)


@pytest.mark.parametrize("kernel", _loss.kernels())
@pytest.mark.parametrize(("data", "parity"), [(100, 10), (20, 2), (1, 1), (10, 245), (254, 1)])
def test_reed_solomon_gives_the_bytes_of_isal(data: int, parity: int, kernel: str) -> None:
    """The same field and Cauchy matrix as gf_gen_cauchy1_matrix, so the same bytes."""
    library = isal()
    sent = random_bytes(2, data, 1376)
    matrix = (ctypes.c_ubyte * ((data + parity) * data))()
    library.gf_gen_cauchy1_matrix(matrix, data + parity, data)
    tables = (ctypes.c_ubyte * (32 * data * parity))()
    library.ec_init_tables(data, parity, ctypes.byref(matrix, data * data), ctypes.byref(tables))
    expected = np.empty((parity, 1376), dtype=np.uint8)
    library.ec_encode_data(1376, data, parity, tables, row_pointers(sent), row_pointers(expected))
    np.testing.assert_array_equal(encoded("reed_solomon", sent, parity, kernel), expected)


def row_pointers(rows: Bytes) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(rows))(*(row.ctypes.data for row in rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_means_are_those_of_torch(dtype: torch.dtype) -> None:
    """Paper: SMART §3.1, Equation 1: 5 elements in the first packet, then 344 in each."""
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(1)).to(dtype)
    raw = gradient.view(torch.uint8).numpy()
    name: Any = str(dtype).removeprefix("torch.")
    means = _loss.mean_magnitudes(name, raw, 344, 5)
    parts = [gradient[:5], *torch.split(gradient[5:], 344)]
    expected = [part.double().abs().mean().item() for part in parts]
    np.testing.assert_allclose(means, expected, rtol=1e-5)
    # The largest 1 % of elements: of 4096 of them, 41.
    threshold = _loss.sampled_threshold(name, raw, 0.01, seed=3)
    assert 0.004 < (gradient.abs() >= threshold).double().mean().item() < 0.017
    assert _loss.sampled_threshold(name, raw, 0.01, seed=3) == threshold
    assert _loss.all_finite(name, raw)
    gradient[7000] = float("nan")
    assert not _loss.all_finite(name, raw)


def test_errors_name_the_argument() -> None:
    block = random_bytes(1, 10, 8)
    parity = np.zeros((2, 8), dtype=np.uint8)
    have = np.ones(10, dtype=bool)
    here = np.ones(2, dtype=bool)
    bad: Any = "fountain"
    with pytest.raises(ValueError, match="kind: expected 'xor' or 'reed_solomon', got 'fountain'"):
        _loss.encode(bad, block, parity)
    with pytest.raises(ValueError, match="data: expected a contiguous buffer"):
        _loss.encode("xor", random_bytes(1, 10, 16)[:, ::2], parity)
    with pytest.raises(ValueError, match=r"data: expected bytes .* got 1 dimensions"):
        _loss.encode("xor", block[0], parity)
    with pytest.raises(ValueError, match=r"data: expected bytes .* items of 4 bytes"):
        _loss.encode("xor", np.zeros((10, 8), dtype=np.float32), parity)
    with pytest.raises(ValueError, match="parity: expected 1 blocks of symbols of 8 bytes"):
        _loss.encode("xor", block, parity[:, :7].copy())
    with pytest.raises(ValueError, match="at most 255 symbols"):
        _loss.encode("reed_solomon", random_bytes(1, 254, 8), parity)
    with pytest.raises(ValueError, match="have: expected one bool for each of 10 symbols, got 9"):
        _loss.recover("xor", block, have[:9], parity, here)
    with pytest.raises(ValueError, match="parity_here: expected one bool"):
        _loss.recover("xor", block, have, parity, here[:1])
    with pytest.raises(ValueError, match="kernel: 'mmx' is not one of"):
        _loss.encode("xor", block, parity, "mmx")
    with pytest.raises(ValueError, match=r"dtype: expected .* got 'int8'"):
        _loss.mean_magnitudes(*("int8", block, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="10 bytes are no whole number of elements of float32"):
        _loss.mean_magnitudes("float32", bytes(10), 4)
    with pytest.raises(ValueError, match="elements_per_packet: expected at least 1"):
        _loss.mean_magnitudes("float32", bytes(8), 0)
    with pytest.raises(ValueError, match="top_fraction: expected a fraction"):
        _loss.sampled_threshold("float32", bytes(8), 0.0, 1)
    fixed = block.copy()
    fixed.flags.writeable = False
    with pytest.raises((BufferError, ValueError), match=r"(?i)writ|read-only"):
        _loss.recover("xor", fixed, have, parity, here)
