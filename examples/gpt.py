"""A small byte-level GPT that can be cut into pipeline stages.

Every part draws its first weights from its own seed, and is named by its place in the whole
model (`layers.5...`), not in its stage. So the model is the same however it is cut, and a
checkpoint written by four stages can be read by eight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte


@dataclass(frozen=True)
class GptShape:
    """Sizes of the model: layers and heads are counts, width and context are elements."""

    layers: int = 8
    width: int = 128
    heads: int = 4
    context: int = 64


class Block(nn.Module):
    """Causal attention and a two-layer perceptron, each on a residual branch."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.mlp_norm = nn.LayerNorm(shape.width)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.query_key_value(self.attention_norm(x))
        query, key, value = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in qkv.split(width, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        # The sum is a fresh tensor, never a view: the split backward of the zero-bubble schedules
        # detaches a stage's output in place, which autograd forbids for views.
        out: Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class Embedding(nn.Module):
    """Bytes to vectors: token and position."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.token(tokens) + self.position(positions)
        return out


def layers_of_stage(shape: GptShape, stage: int, stages: int) -> range:
    """The layers of the model that stage `stage` of `stages` holds."""
    return range(stage * shape.layers // stages, (stage + 1) * shape.layers // stages)


class GptStage(nn.Module):
    """Stage `stage` of `stages`: its layers, with the embedding first and the head last.

    Input: int64 tokens (rows, length) on the first stage, else float (rows, length, width).
    Output: logits (rows, length, 256) on the last stage, else float (rows, length, width).

    Raises:
        ValueError: there are more stages than layers.
    """

    def __init__(self, shape: GptShape, stage: int, stages: int, seed: int) -> None:
        super().__init__()
        if stages > shape.layers:
            raise ValueError(f"{shape.layers} layers cannot fill {stages} stages: use --layers")

        def seeded(place: int, part: Callable[[], nn.Module]) -> nn.Module:
            torch.manual_seed(seed * 1_000_003 + place)
            return part()

        self.embedding = seeded(0, lambda: Embedding(shape)) if stage == 0 else None
        self.layers = nn.ModuleDict(
            {
                str(layer): seeded(1 + layer, lambda: Block(shape))
                for layer in layers_of_stage(shape, stage, stages)
            }
        )
        self.head: nn.Module | None = None
        if stage == stages - 1:
            self.head = seeded(
                1 + shape.layers,
                lambda: nn.Sequential(
                    nn.LayerNorm(shape.width), nn.Linear(shape.width, VOCABULARY, bias=False)
                ),
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.head is not None:
            x = self.head(x)
        return x


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte; an untrained model starts near ln 256 = 5.55."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
