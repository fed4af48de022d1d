"""Continues a sequence from keys and values that other ranks have computed."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_resilient.prefill.model import ModelPart


def decode(model: ModelPart, kv: Tensor, logits: Tensor, count: int) -> list[int]:
    """The `count` most probable next tokens, one after the other.

    `model` is the whole model, `kv` [layers, 2, tokens, kv_heads, head_dim] and `logits` are those
    of the prompt.
    """
    if count <= 0:
        return []
    found = [int(logits.argmax())]
    tokens = kv.shape[2]
    room = model.new_kv(tokens + count - 1)
    room[:, :, :tokens] = kv
    for position in range(tokens, tokens + count - 1):
        logits = model.extend(torch.tensor(found[-1:]), room, position)
        found.append(int(logits.argmax()))
    return found
