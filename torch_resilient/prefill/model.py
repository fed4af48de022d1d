"""A decoder-only transformer that is computed chunk by chunk and can be cut by layers.

RMS norms, rotary positions, grouped queries (GQA) and a gated perceptron, as in Llama. A layer
takes the next tokens of a sequence and writes their keys and values into the sequence's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

# Flash attention computes in these types only.
_FLASH = (torch.float16, torch.bfloat16)
# The tokens of a chunk: more make it longer than many bubbles, fewer leave a GPU without work.
MAX_CHUNK_TOKENS = 512
_ROTARY_BASE = 10_000.0

_Module = TypeVar("_Module", bound=nn.Module)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the model. `kv_heads` divides `heads`, and `heads` divides `width`.

    Raises ValueError if they do not.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.width % (2 * self.heads):
            raise ValueError(
                f"{self}: expected heads of an even width, and kv_heads to divide heads"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def layer_flops(self, start: int, tokens: int) -> float:
        """Floating-point operations of a layer for `tokens` tokens after `start` others."""
        kv_width = self.kv_heads * self.head_dim
        weights = self.width * (2 * self.width + 2 * kv_width + 3 * self.hidden)
        # All keys up to the end of the chunk, since the mask only hides later ones.
        return 2.0 * tokens * (weights + 2 * self.width * (start + tokens))

    def kv_bytes(self, tokens: int, layers: int, dtype: torch.dtype) -> int:
        """The bytes of the keys and values of some layers."""
        return 2 * layers * tokens * self.kv_heads * self.head_dim * dtype.itemsize

    def parts(self, count: int) -> list[range]:
        """The layers of each of `count` parts."""
        return [
            range(i * self.layers // count, (i + 1) * self.layers // count) for i in range(count)
        ]


def check_chunk_tokens(chunk_tokens: int) -> None:
    """Raises ValueError for what is no number of tokens of a chunk."""
    if not 1 <= chunk_tokens <= MAX_CHUNK_TOKENS:
        raise ValueError(f"chunk_tokens: expected 1 to {MAX_CHUNK_TOKENS}, got {chunk_tokens}")


def _rotated(x: Tensor, start: int) -> Tensor:
    """Heads [tokens, heads, head_dim] turned by their positions, which begin with `start`."""
    half = x.shape[-1] // 2
    steps = torch.arange(half, dtype=torch.float32, device=x.device)
    positions = torch.arange(start, start + len(x), dtype=torch.float32, device=x.device)
    angles = positions[:, None] * _ROTARY_BASE ** (-steps / half)
    cos, sin = angles.cos()[:, None].to(x.dtype), angles.sin()[:, None].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    """Causal attention and a gated perceptron, each on a residual branch."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        kv_width = shape.kv_heads * shape.head_dim
        self.shape = shape
        self.attention_norm = nn.RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key_value = nn.Linear(shape.width, 2 * kv_width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.width)
        self.gate_up = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor, kv: Tensor, start: int) -> Tensor:
        """The output for `x` [tokens, width], the tokens from `start` on.

        `kv` [2, all tokens, kv_heads, head_dim] holds keys and values of the tokens before. Those
        of `x` are written into it.
        """
        count, end = len(x), start + len(x)
        normed = self.attention_norm(x)
        query = self.query(normed).view(count, self.shape.heads, -1)
        key, value = self.key_value(normed).view(count, 2, self.shape.kv_heads, -1).unbind(1)
        kv[0, start:end] = _rotated(key, start)
        kv[1, start:end] = value
        # Heads first, with a dimension for the batch, which flash attention wants.
        queries, keys, values = (
            each.transpose(0, 1)[None] for each in (_rotated(query, start), *kv[:, :end])
        )
        causal: Tensor = (
            causal_lower_right(count, end)  # flash attention, which takes no other mask
            if x.is_cuda and x.dtype in _FLASH
            else torch.ones(count, end, dtype=torch.bool, device=x.device).tril(start)
        )
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=causal, enable_gqa=True
        )
        x = x + self.attention_out(mixed[0].transpose(0, 1).reshape(count, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


class ModelPart(nn.Module):
    """Some consecutive layers, with the embedding before the first and the head after the last one.

    Weights are drawn from `seed` and the place in the model, independently of the cut. Names in the
    state dict contain the place as well: a checkpoint of the whole model fits each part with
    `strict=False`.
    """

    def __init__(self, shape: ModelShape, layers: range, seed: int = 0) -> None:
        super().__init__()

        def seeded(place: int, make: Callable[[], _Module]) -> _Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed * 1_000_003 + place)
                return make().requires_grad_(False)

        self.shape = shape
        self.places = layers
        self.embedding = (
            seeded(0, lambda: nn.Embedding(shape.vocabulary, shape.width))
            if layers.start == 0
            else None
        )
        self.layers = nn.ModuleDict(
            {str(place): seeded(1 + place, lambda: Layer(shape)) for place in layers}
        )
        self.head: nn.Module | None = None
        if layers.stop == shape.layers:
            self.head = seeded(
                1 + shape.layers,
                lambda: nn.Sequential(
                    nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.vocabulary, bias=False)
                ),
            )

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def memory_bytes(self) -> int:
        return sum(each.nbytes for each in self.parameters())

    def new_kv(self, tokens: int) -> Tensor:
        """Room for keys and values: [layers, 2, tokens, kv_heads, head_dim]."""
        shape = self.shape
        size = (len(self.places), 2, tokens, shape.kv_heads, shape.head_dim)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def embed(self, tokens: Tensor) -> Tensor:
        """[tokens, width]; of the first part only."""
        assert self.embedding is not None
        out: Tensor = self.embedding(tokens.to(self.device))
        return out

    def layer(self, index: int, x: Tensor, kv: Tensor, start: int) -> Tensor:
        """Runs layer `index` of this part; see Layer.forward."""
        out: Tensor = self.layers[str(self.places[index])](x, kv, start)
        return out

    def logits(self, x: Tensor) -> Tensor:
        """For the output [width] of the last layer for a token; of the last part only."""
        assert self.head is not None
        out: Tensor = self.head(x)
        return out

    @torch.no_grad()
    def extend(self, tokens: Tensor, kv: Tensor, start: int) -> Tensor:
        """The logits after `tokens`, whose first one has position `start`; of a whole model."""
        x = self.embed(tokens)
        for i in range(len(self.places)):
            x = self.layer(i, x, kv[i], start)
        return self.logits(x[-1])


@torch.no_grad()
def plain_prefill(
    model: ModelPart, tokens: Tensor, chunk_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys, values and logits of a prompt, computed by a whole model without a pause.

    With the `chunk_tokens` of workers, the result has the bits of theirs. Without, all tokens are
    computed together, which gives another rounding.
    """
    count = len(tokens)
    kv = model.new_kv(count)
    x = model.embed(tokens)
    step = chunk_tokens or count
    for i in range(len(model.places)):
        chunks = [(s, x[s : s + step]) for s in range(0, count, step)]
        x = torch.cat([model.layer(i, chunk, kv[i], s) for s, chunk in chunks])
    return kv, model.logits(x[-1])
