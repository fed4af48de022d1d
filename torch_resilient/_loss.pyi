"""Codes against loss and priorities of packets (csrc/loss), on buffers, without torch.

For tests, benchmarks and studies; the backend uses the same functions in C++. Buffers are anything
contiguous with the buffer protocol, such as numpy arrays. The GIL is released meanwhile.
ValueError, naming the argument, for what does not fit together.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

_Kind = Literal["xor", "reed_solomon"]
# numpy says only from Python 3.12 on that its arrays are buffers.
_Buffer = Buffer | npt.NDArray[Any]
_DType = Literal["float32", "bfloat16", "float16", "float64"]

def encode(kind: _Kind, data: _Buffer, parity: _Buffer, kernel: str | None = None) -> None:
    """Writes `parity` from `data`.

    Both are bytes with the dimensions (symbols, bytes) or (blocks, symbols, bytes). "xor" is that
    of SMART, §3.2: data symbol i belongs to sequence i mod the number of parity symbols.
    "reed_solomon" has at most 255 symbols in a block, data and parity together. `kernel` is one of
    kernels(), None the fastest.
    """

def recover(
    kind: _Kind,
    data: _Buffer,
    have: _Buffer,
    parity: _Buffer,
    parity_here: _Buffer,
    kernel: str | None = None,
) -> int:
    """Writes those missing symbols of `data` that can be repaired; returns how many.

    `have` and `parity_here` have a bool for each symbol of `data` and `parity`; those in `have`
    are set for what was repaired.
    """

def mean_magnitudes(
    dtype: _DType, data: _Buffer, elements_per_packet: int, first_packet_elements: int = 0
) -> npt.NDArray[np.float32]:
    """The mean of |g| of each packet (Paper: SMART §3.1, Equation 1).

    `data` is read as elements of `dtype`, whatever its own type. If `first_packet_elements` is not
    0, the first packet has as many and the others `elements_per_packet`.
    """

def sampled_threshold(dtype: _DType, data: _Buffer, top_fraction: float, seed: int) -> float:
    """The magnitude that the largest `top_fraction` of a sample reach.

    The sample is uniform, of at most 4096 elements, the same for the same seed.
    """

def all_finite(dtype: _DType, data: _Buffer) -> bool:
    """False if an element is infinite or not a number."""

def kernels() -> list[str]:
    """The kernels that this processor can run, the fastest last."""

def fold_lines(data: _Buffer, out: _Buffer) -> None:
    """The XOR of each ten lines of 64 bytes in the order of memory: as fast as memory can be.

    Reads all of `data` and writes a tenth of it. For benchmarks/parity_codes.py.
    """
