"""Bytes of real text, cut into training batches that depend on nothing but (seed, step).

Because a batch is a pure function of the seed and the number of the step, every backend, every
pipeline schedule and every resumed run sees exactly the same data: that is what lets the examples
compare losses bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

# Enough that 30 steps of 2,048 tokens hardly ever see a passage twice; more only costs start-up.
MAX_TEXT_BYTES = 2_000_000


def standard_library() -> Path:
    """The folder of Python's own standard library: text that is on every machine."""
    return Path(os.__file__).parent


def _files(source: Path) -> Iterator[Path]:
    if source.is_file():
        yield source
        return
    pattern = "*.py" if source == standard_library() else "**/*"
    yield from (path for path in sorted(source.glob(pattern)) if path.is_file())


def load_text(source: Path, limit_bytes: int = MAX_TEXT_BYTES) -> Tensor:
    """Read a file, or the files of a folder in the order of their names.

    Returns:
        A uint8 tensor of at most `limit_bytes` bytes.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: there is no text in it.
    """
    if not source.exists():
        raise FileNotFoundError(f"--data {source}: no such file or folder")
    text = bytearray()
    for path in _files(source):
        text += path.read_bytes()[: limit_bytes - len(text)]
        if len(text) >= limit_bytes:
            break
    if not text:
        raise ValueError(f"--data {source}: holds no text")
    return torch.frombuffer(text, dtype=torch.uint8)


def batch(text: Tensor, seed: int, step: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """The batch of one step.

    Returns:
        (inputs, targets), two int64 tensors of shape (rows, length); a target is the byte that
        follows its input.

    Raises:
        ValueError: the text is shorter than one row.
    """
    starts_possible = len(text) - length
    if starts_possible < 1:
        raise ValueError(f"the text has {len(text)} bytes, a row needs {length + 1}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(starts_possible, (rows, 1), generator=generator)
    positions = starts + torch.arange(length + 1)
    window = text[positions].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
