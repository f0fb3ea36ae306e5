# SPDX-License-Identifier: Apache-2.0
"""Queries, keys and values from where the product left them to where attention reads them: one kernel.

A program takes some heads of a token, [heads, half of a head] twice, since rope turns the halves into
each other. Products and sums are rounded to the input's type where the unfused operators round them.
"""

import triton
import triton.language as tl
from torch import Tensor

HEADS = 4
"""Of a program: they share the cosines and sines of their token."""


def rope_cache(
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
    """See `ops.rope_cache`."""
    assert keys.is_contiguous()
    assert values.is_contiguous()
    sequences, tokens, width = qkv.shape
    _, kv_heads, length, head_dim = keys.shape
    heads = width // head_dim
    query = qkv.new_empty(sequences, heads - 2 * kv_heads, tokens, head_dim)
    if qkv.numel():
        _rope_cache[(sequences * tokens, triton.cdiv(heads, HEADS))](
            qkv.contiguous(),
            cos.contiguous(),
            sin.contiguous(),
            places.contiguous(),
            q_norm,
            k_norm,
            query,
            keys,
            values,
            epsilon,
            tokens,
            heads,
            kv_heads,
            length,
            HALF=head_dim // 2,
            LANES=triton.next_power_of_2(head_dim // 2),
            HEADS=HEADS,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return query


@triton.jit
def _times(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@triton.jit
def _rope_cache(
    qkv,
    cos,
    sin,
    places,
    q_norm,
    k_norm,
    query,
    keys,
    values,
    epsilon,
    tokens,
    heads,
    kv_heads,
    length,
    HALF: tl.constexpr,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    real, q_heads = lane < HALF, heads - 2 * kv_heads
    is_query, is_value = head < q_heads, head >= q_heads + kv_heads
    at = (token * heads + head) * (2 * HALF) + lane
    inside = real & (head < heads)
    low = tl.load(qkv + at, mask=inside, other=0.0)
    high = tl.load(qkv + at + HALF, mask=inside, other=0.0)
    # Heads of values keep what is read here.
    low_value, high_value = low, high
    if q_norm is not None:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low + wide_high * wide_high, axis=1)
        mean = tl.div_rn(squares, tl.zeros_like(squares) + 2 * HALF)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))[:, None]
        low = _normed(wide_low * rstd, low, q_norm + lane, k_norm + lane, real, is_query)
        high = _normed(
            wide_high * rstd, high, q_norm + HALF + lane, k_norm + HALF + lane, real, is_query
        )
    turn = token * (2 * HALF) + lane
    cos_low = tl.load(cos + turn, mask=real, other=0.0)
    cos_high = tl.load(cos + turn + HALF, mask=real, other=0.0)
    sin_low = tl.load(sin + turn, mask=real, other=0.0)
    sin_high = tl.load(sin + turn + HALF, mask=real, other=0.0)
    new_low = (_times(low, cos_low) - _times(high, sin_low)).to(low.dtype)
    new_high = (_times(high, cos_high) + _times(low, sin_high)).to(low.dtype)

    sequence = token // tokens
    q_at = ((sequence * q_heads + head) * tokens + token % tokens) * (2 * HALF) + lane
    tl.store(query + q_at, new_low, mask=real & is_query)
    tl.store(query + q_at + HALF, new_high, mask=real & is_query)
    place = tl.load(places + token)
    is_key = (head >= q_heads) & (head < q_heads + kv_heads)
    k_at = ((sequence * kv_heads + head - q_heads) * length + place) * (2 * HALF) + lane
    tl.store(keys + k_at, new_low, mask=real & is_key)
    tl.store(keys + k_at + HALF, new_high, mask=real & is_key)
    v_at = ((sequence * kv_heads + head - q_heads - kv_heads) * length + place) * (2 * HALF) + lane
    tl.store(values + v_at, low_value, mask=inside & is_value)
    tl.store(values + v_at + HALF, high_value, mask=inside & is_value)


@triton.jit
def _normed(normed, like, q_norm, k_norm, real, is_query):
    of_query = tl.load(q_norm, mask=real, other=0.0)
    of_key = tl.load(k_norm, mask=real, other=0.0)
    return _times(normed.to(like.dtype), tl.where(is_query, of_query, of_key)).to(like.dtype)
