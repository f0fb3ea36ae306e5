# SPDX-License-Identifier: Apache-2.0
"""Plain attention that skips most of what a causal mask hides, for compiled training on a CPU.

Without it, steps take 29 % longer (torch's flash attention) or 8 % longer (transformers' eager one).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "causal_blocks"
_WIDTH = 128
"""Queries of a block."""


def causal_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute transformers' eager attention in blocks of queries, each with the keys up to its last
    query.

    Args:
        query: [batch, heads, sequence, head_dim]; `key` and `value` may have fewer heads, and a past.
        attention_mask: added to the scores, [batch or 1, heads or 1, sequence, keys]; must hide every
            key after the query's position.
        position_bias: added too, of the same shape.

    Returns [batch, sequence, heads, head_dim].
    """
    # Heads that share keys become rows of one product.
    shared = query.unflatten(1, (key.shape[1], -1))
    length, past, parts = query.shape[2], key.shape[2] - query.shape[2], []
    if position_bias is not None:
        attention_mask = attention_mask + position_bias
    # One mask for all is expanded where it is added; earlier, compiled kernels would round differently.
    heads: slice | None = None
    if attention_mask.shape[1] > 1:
        attention_mask, heads = attention_mask.unflatten(1, (key.shape[1], -1)), slice(None)
    for start in range(0, length, _WIDTH):
        end = min(start + _WIDTH, length)
        rows = shared[:, :, :, start:end].flatten(2, 3)
        seen = slice(past + end)
        scores = (rows @ key[:, :, seen].transpose(2, 3) * scaling).unflatten(2, (-1, end - start))
        scores = scores + attention_mask[:, :, heads, start:end, seen]
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        weights = F.dropout(weights, dropout, module.training).flatten(2, 3)
        parts.append((weights @ value[:, :, seen]).unflatten(2, (-1, end - start)))
    return torch.cat(parts, 3).flatten(1, 2).transpose(1, 2).contiguous(), None


def stored(values: Tensor) -> Tensor:
    """Return the same values with explicit strides: compiled, inductor then computes them once and
    stores them, instead of computing them again in every kernel that needs them."""
    return values.as_strided(values.shape, values.stride())


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    mask = eager_mask(*args, **kwargs)
    return None if mask is None else stored(mask)  # a decoder without its encoder has a second one


def store_rotations_(decoder: nn.Module) -> None:
    """Make a decoder's rotary cosines and sines `stored`."""

    def hook(module: nn.Module, args: Any, result: Any) -> Any:
        return tuple(map(stored, result)) if isinstance(result, tuple) else result

    if isinstance(rotary := getattr(decoder, "rotary_emb", None), nn.Module):
        rotary.register_forward_hook(hook)


AttentionInterface.register(NAME, causal_blocks)
AttentionMaskInterface.register(NAME, _mask)
