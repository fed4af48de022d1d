"""The time to the first token by the number of ranks that share a model, as a table.

The chunks of one rank are measured, and so is a message with the outputs of a chunk. From these,
the times of ranks that compute at the same time are put together, as if no rank had to wait for a
bubble: one device cannot be several at a time. The model has the shape of Llama-3-8B, as in
Figure 14 of the paper (BUBBLETEA §6.6).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_resilient.prefill import ModelPart, ModelShape

from .bandwidth import median_s, there_and_back
from .checks import Rank

_LLAMA = ModelShape(vocabulary=1000, layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336)
_TOKENS = (512, 2048, 4096, 8192)
# Enough to see that the table comes, where there is no GPU.
_SMALL = ModelShape(vocabulary=1000, layers=8, width=64, heads=4, kv_heads=2, hidden=128)
_SMALL_TOKENS = (512, 1024)
_CHUNK_TOKENS = 512
_DEPTHS = (1, 2, 4, 8)
# All layers take the same time. These are larger than the device's caches.
_LAYERS = 2
_TIMES = 5
# By tokens: the time with one rank over that with 8, read from the paper's text.
_PAPER = {512: 1 / 1.29, 8192: 1.67}


def run(rank: Rank) -> None:
    """Runs the section."""
    is_gpu = rank.device.kind == "cuda"
    shape, prompts = (_LLAMA, _TOKENS) if is_gpu else (_SMALL, _SMALL_TOKENS)
    dtype = torch.bfloat16 if is_gpu else torch.float32
    with rank.check("table") as check:
        outputs = torch.zeros(
            _CHUNK_TOKENS, shape.width, dtype=dtype, device=rank.device.torch_device
        )
        hop_s = median_s(rank, 10, lambda: there_and_back(rank, outputs)) / 2
        if rank.number == 0:
            layers = _Layers(rank, shape, dtype, max(prompts))
            chunks_s = [layers.chunk_s(start) for start in range(0, max(prompts), _CHUNK_TOKENS)]
            for tokens in prompts:
                rank.row(_cells(tokens, layers, chunks_s[: tokens // _CHUNK_TOKENS], hop_s))
        check.remark = "there are no limits"


class _Layers:
    """Layers that stand for all those of the model."""

    def __init__(self, rank: Rank, shape: ModelShape, dtype: torch.dtype, tokens: int) -> None:
        self.shape = shape
        self._device = rank.device
        self._model = ModelPart(shape, range(_LAYERS)).to(rank.device.torch_device, dtype)
        self._kv = self._model.new_kv(tokens)
        self._kv.zero_()
        generator = torch.Generator().manual_seed(9)
        inputs = torch.randn(_CHUNK_TOKENS, shape.width, generator=generator)
        self._inputs = inputs.to(rank.device.torch_device, dtype)

    @torch.no_grad()
    def chunk(self, layer: int, start: int) -> Tensor:
        """Runs a chunk, and waits for it as PrefillWork does."""
        index = layer % _LAYERS
        out = self._model.layer(index, self._inputs, self._kv[index], start)
        self._device.synchronize()
        return out

    def chunk_s(self, start: int) -> float:
        """The median time of a chunk behind `start` tokens."""
        taken_s = []
        for i in range(_TIMES * _LAYERS):
            begin_s = time.monotonic()
            self.chunk(i, start)
            taken_s.append(time.monotonic() - begin_s)
        return statistics.median(taken_s[_LAYERS:])

    def prefill_s(self, tokens: int) -> float:
        """The time of all chunks of a prompt on one rank."""
        begin_s = time.monotonic()
        for start in range(0, tokens, _CHUNK_TOKENS):
            for layer in range(self.shape.layers):
                self.chunk(layer, start)
        return time.monotonic() - begin_s


def time_to_first_token_s(
    chunks_s: Sequence[float], layers: int, depth: int, hop_s: float
) -> float:
    """The end of a prompt on the last of `depth` ranks.

    `chunks_s`: by chunk of the prompt, the time of one layer. Each rank computes its layers for a
    chunk when the one before has sent its own, and when it is done with the chunk before.
    """
    ends_s = [0.0 for _ in chunks_s]
    for part in range(depth):
        free_s = 0.0
        for i, chunk_s in enumerate(chunks_s):
            ready_s = ends_s[i] + hop_s if part else 0.0
            free_s = ends_s[i] = max(free_s, ready_s) + chunk_s * layers / depth
    return ends_s[-1]


def _cells(
    tokens: int, layers: _Layers, chunks_s: Sequence[float], hop_s: float
) -> dict[str, float | str]:
    count = layers.shape.layers
    found_s = {each: time_to_first_token_s(chunks_s, count, each, hop_s) for each in _DEPTHS}
    cells: dict[str, float | str] = {
        "tokens of the prompt": str(tokens),
        "last chunk, ms": chunks_s[-1] * 1e3,
        "message, ms": hop_s * 1e3,
        "1 rank, measured, ms": layers.prefill_s(tokens) * 1e3,
    }
    cells |= {f"{each} rank{'s' if each > 1 else ''}, ms": s * 1e3 for each, s in found_s.items()}
    cells["1 rank / 8 ranks"] = found_s[1] / found_s[8]
    cells["in the paper"] = _PAPER.get(tokens, "")
    return cells
