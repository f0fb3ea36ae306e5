"""Attention over a key-value cache of fixed size, through transformers' interface.

Which keys count is said by a mask that depends on the position tensor alone, so a step can be recorded as
a CUDA graph and replayed.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "sparse_bitnet_grouped"
"""The name under which `grouped_attention` is entered in transformers' registry."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    key_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention with fewer key than query heads, without copying keys.

    Args:
        module, attention_mask: not used; sequences have no padding.
        query: [batch, heads, tokens, head_dim].
        key, value: [batch, kv_heads, length, head_dim].
        scaling: of the scores; by default 1 / sqrt(head_dim).
        key_mask: bool [1 or batch, 1, tokens, length], which keys each token attends to; without it
            the attention is causal. It comes through the keyword arguments of the model's forward,
            because what models do with an attention mask differs between them.

    Returns ([batch, tokens, heads, head_dim], None).
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    if key_mask is not None:
        # The heads of a group are so many more queries of the same keys.
        group = heads // kv_heads
        grouped = query.reshape(batch, kv_heads, group * tokens, head_dim)
        mask = key_mask if tokens == 1 else key_mask.repeat(1, 1, group, 1)
        y = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        return y.reshape(batch, heads, tokens, head_dim).transpose(1, 2), None
    y = F.scaled_dot_product_attention(
        query, key, value, is_causal=tokens > 1, scale=scaling, enable_gqa=heads != kv_heads
    )
    return y.transpose(1, 2), None


def use_grouped_attention_(model: Any) -> None:
    """Make a transformers model attend through `grouped_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, grouped_attention)
    model.config._attn_implementation = ATTENTION
