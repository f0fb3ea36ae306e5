# SPDX-License-Identifier: Apache-2.0
"""Rope and cache write: the reference is transformers' code, the kernel equals it, interpreted or not."""

import pytest
import torch

from sparse_bitnet.ops.rope_cache import rope_cache, rope_cache_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Sequences, tokens, heads, kv_heads, head_dim, length.
SHAPES = [(1, 1, 4, 2, 16, 5), (3, 2, 7, 1, 6, 9), (2, 5, 14, 2, 128, 8), (2, 1, 9, 3, 40, 3)]


def problem(shape, dtype, has_norms):
    sequences, tokens, heads, kv_heads, head_dim, length = shape
    qkv = torch.randn(sequences, tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    angle = torch.randn(sequences, tokens, head_dim // 2).repeat(1, 1, 2)
    # No place twice, and not in order.
    places = torch.stack([torch.randperm(length)[:tokens] for _ in range(sequences)])
    cache = torch.full((2, sequences, kv_heads, length, head_dim), float("nan"), dtype=dtype)
    norms = torch.rand(2, head_dim).to(dtype) + 0.5 if has_norms else (None, None)
    return [qkv, angle.cos().to(dtype), angle.sin().to(dtype), places, *cache, *norms, 1e-6]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_the_reference_is_the_code_of_transformers(family):
    from transformers.models.qwen3 import modeling_qwen3 as module

    shape = sequences, tokens, heads, kv_heads, head_dim, length = SHAPES[2]
    given = problem(shape, torch.bfloat16, family == "qwen3")
    qkv, cos, sin, places, keys, values, *weights, _ = given
    query = rope_cache(*given)
    parts = qkv.view(sequences, tokens, -1, head_dim).split((heads, kv_heads, kv_heads), 2)
    wanted = [part.transpose(1, 2) for part in parts]
    if family == "qwen3":
        for at, weight in enumerate(weights):
            norm = module.Qwen3RMSNorm(head_dim).to(weight.dtype)
            norm.weight.data = weight
            wanted[at] = norm(wanted[at]).detach()
    wanted[:2] = module.apply_rotary_pos_emb(*wanted[:2], cos, sin)
    assert torch.equal(query, wanted[0])
    for cache, want in zip((keys, values), wanted[1:], strict=True):
        for sequence in range(sequences):
            assert torch.equal(cache[sequence][:, places[sequence]], want[sequence])
        assert cache.isnan().sum() == sequences * kv_heads * (length - tokens) * head_dim


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_equals_the_reference(shape, dtype, has_norms):
    pytest.importorskip("triton", reason="triton is not installed")
    from sparse_bitnet.ops.triton import rope_cache as kernel

    expected = problem(shape, dtype, has_norms)
    found = [t.to(DEVICE, copy=True) if isinstance(t, torch.Tensor) else t for t in expected]
    queries = kernel.rope_cache(*found).cpu(), rope_cache_reference(*expected)
    # A norm's sum has another order; interpreted, bfloat16 is not rounded to even.
    exact = not has_norms and (dtype != torch.bfloat16 or DEVICE == "cuda")
    ulp = 0 if exact else 8 * torch.finfo(dtype).eps
    pairs = [queries, *((found[at].cpu(), expected[at]) for at in (4, 5))]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=ulp, atol=2 * ulp, equal_nan=True)
    assert torch.equal(pairs[2][0].nan_to_num(), pairs[2][1].nan_to_num())


def test_opcheck():
    op = torch.ops.sparse_bitnet.rope_cache.default
    given = problem(SHAPES[0], torch.float32, True)
    given[4:6] = torch.zeros(2, *given[4].shape)
    torch.library.opcheck(op, given)
