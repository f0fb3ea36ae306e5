# SPDX-License-Identifier: Apache-2.0
"""Plain attention that skips most of what a causal mask hides: for compiled training on a CPU."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

NAME = "causal_blocks"
_BLOCKS, _LEAST = 4, 64


def causal_blocks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, None]:
    """Transformers' eager attention, a block of queries at a time with the keys up to its last.

    Args:
        query: [batch, heads, sequence, head_dim]; `key` and `value` may have fewer heads.
        attention_mask: added to the scores, [batch or 1, 1, sequence, sequence]; nothing after a query's
            own position may be let through.

    Returns [batch, sequence, heads, head_dim].
    """
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    width = max(_LEAST, -(-length // _BLOCKS))
    parts = []
    for start in range(0, length, width):
        end = min(start + width, length)
        scores = query[:, :, start:end] @ key[:, :, :end].transpose(2, 3) * scaling
        scores = scores + attention_mask[..., start:end, :end]
        weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
        parts.append(F.dropout(weights, dropout, module.training) @ value[:, :, :end])
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, causal_blocks)
AttentionMaskInterface.register(NAME, eager_mask)
