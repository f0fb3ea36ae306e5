# SPDX-License-Identifier: Apache-2.0
"""What an attention does between its products: norms of the heads, rope, and writing keys and values."""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.norm_quantize import rms_norm


def rope_cache_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    epsilon: float,
) -> Tensor:
    """Queries, rotated; rotated keys and the values go to their places in a cache: what transformers
    computes for qwen2, qwen3 and llama, in the same types.

    Args:
        qkv: float [sequences, tokens, (heads + 2 * kv_heads) * head_dim], all queries first.
        cos, sin: of the same dtype, [sequences, tokens, head_dim], both halves alike.
        places: int64 [sequences, tokens], where a token is written.
        keys, values: contiguous [sequences, kv_heads, length, head_dim], written to.
        q_norm, k_norm: weights of an RMSNorm of every query and key, [head_dim], both or neither.
        epsilon: of these norms.

    Returns [sequences, heads, tokens, head_dim].
    """
    assert keys.is_contiguous()
    assert values.is_contiguous()
    heads = qkv.unflatten(-1, (-1, keys.shape[3]))
    query, key, value = heads.tensor_split((-2 * keys.shape[1], -keys.shape[1]), 2)

    def rotated(x: Tensor, norm: Tensor | None) -> Tensor:
        if norm is not None:
            x = rms_norm(x, norm, epsilon)
        low, high = x.chunk(2, -1)
        return x * cos.unsqueeze(2) + torch.cat((-high, low), -1) * sin.unsqueeze(2)

    sequence = torch.arange(len(qkv), device=qkv.device).unsqueeze(1)
    keys[sequence, :, places] = rotated(key, k_norm)
    values[sequence, :, places] = value
    return rotated(query, q_norm).transpose(1, 2).contiguous()


def _fake(qkv, cos, sin, places, keys, values, q_norm, k_norm, epsilon):
    sequences, tokens, width = qkv.shape
    heads = width // keys.shape[3] - 2 * keys.shape[1]
    return qkv.new_empty(sequences, heads, tokens, keys.shape[3])


rope_cache = define(
    "rope_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor places, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor? q_norm, Tensor? k_norm, float epsilon) -> Tensor",
    rope_cache_reference,
    _fake,
    cuda="rope_cache.rope_cache",
)
