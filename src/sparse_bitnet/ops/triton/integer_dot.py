"""What the packed products share: four int8 products at once, and sums to outputs."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def has_dp4a(x: Tensor) -> bool:
    """Whether the kernel may use the instruction: compiled for NVIDIA, not interpreted."""
    return x.is_cuda and torch.version.cuda is not None and isinstance(dot4, triton.JITFunction)


@triton.jit
def dot4(a, b, total, SIGNED: tl.constexpr, DP4A: tl.constexpr):
    """total + the products of the four bytes of a (unsigned or signed) and of b (signed)."""
    if DP4A:
        if SIGNED:
            total = tl.inline_asm_elementwise(
                "dp4a.s32.s32 $0, $1, $2, $3;",
                "=r,r,r,r",
                [a, b, total],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        else:
            total = tl.inline_asm_elementwise(
                "dp4a.u32.s32 $0, $1, $2, $3;",
                "=r,r,r,r",
                [a, b, total],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
    else:
        for byte in tl.static_range(4):
            left = (a >> (8 * byte)) & 255
            if SIGNED:
                left = (left << 24) >> 24
            total += left * ((b << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def store_scaled(
    sums,
    activation_scale,
    weight_scale,
    bias,
    y,
    token,
    row,
    tokens,
    rows,
    ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """sums int32 [TOKENS, ROWS] -> y[token, row]."""
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    token_scale = tl.load(activation_scale + token, mask=token < tokens, other=0.0)
    if ONE_SCALE:
        scale = (token_scale * tl.load(weight_scale))[:, None]
    else:
        row_scale = tl.load(weight_scale + row, mask=row < rows, other=0.0)
        scale = token_scale[:, None] * row_scale[None, :]
    value = sums.to(tl.float32) * scale
    if HAS_BIAS:
        value = value + tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    at = token.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
