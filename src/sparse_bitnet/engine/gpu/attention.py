"""A key-value cache of fixed size and the attention over it, all shapes constant from step to step.

transformers models take both through their interfaces; which keys count is said by a mask that depends
on the position tensor alone, so a step can be recorded as a CUDA graph and replayed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATTENTION = "sparse_bitnet_grouped"
"""The name under which `grouped_attention` is entered in transformers' registry."""


class FixedCache:
    """Keys and values of all layers: two tensors [batch, kv_heads, context_length, head_dim] a layer.

    Stands where transformers expects a `Cache`. The model is given its positions, so it asks for
    little more than `update`.
    """

    is_compileable = True

    def __init__(
        self, config: Any, batch: int, context_length: int, dtype: torch.dtype, device: Any
    ) -> None:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        shape = (batch, config.num_key_value_heads, context_length, head_dim)
        layers = range(config.num_hidden_layers)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in layers]
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.context_length = context_length

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store one step's key and value at the position, or a prompt's from 0 on.

        Returns what to attend to: of a step the whole cache, of a prompt its own keys and values.
        """
        if key.shape[2] == 1:
            self.keys[layer].index_copy_(2, self.position, key)
            self.values[layer].index_copy_(2, self.position, value)
            return self.keys[layer], self.values[layer]
        self.keys[layer][:, :, : key.shape[2]] = key
        self.values[layer][:, :, : value.shape[2]] = value
        return key, value

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """The position, as a tensor."""
        return self.position

    def mask(self) -> Tensor:
        """Bool [1, 1, 1, context_length]: the positions up to the current one."""
        index = torch.arange(self.context_length, device=self.position.device)
        return (index <= self.position).view(1, 1, 1, -1)


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
