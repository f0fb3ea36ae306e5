"""int32 sums to outputs: both scales, the bias and the conversion in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def scale_rows(
    sums: Tensor,
    out_features: int,
    activation_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """sums * (activation_scale * weight_scale) + bias, each operation rounded to float32.

    Args:
        sums: int32 [at least tokens, at least out_features], contiguous.
        out_features: columns to use.
        activation_scale: float32 [tokens, 1].
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns `dtype` [tokens, out_features].
    """
    tokens = activation_scale.numel()
    y = torch.empty((tokens, out_features), dtype=dtype, device=sums.device)
    if y.numel():
        _scale_rows[(tokens, triton.cdiv(out_features, BLOCK))](
            sums,
            y,
            activation_scale,
            weight_scale,
            bias,
            sums.stride(0),
            out_features,
            ONE_SCALE=weight_scale.numel() == 1,
            HAS_BIAS=bias is not None,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y


@triton.jit
def _scale_rows(
    sums,
    y,
    activation_scale,
    weight_scale,
    bias,
    stride,
    columns,
    ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    scale = tl.load(activation_scale + token)
    if ONE_SCALE:
        scale = scale * tl.load(weight_scale)
    else:
        scale = scale * tl.load(weight_scale + column, mask=inside, other=0.0)
    value = tl.load(sums + token * stride + column, mask=inside, other=0).to(tl.float32) * scale
    if HAS_BIAS:
        value = value + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * columns + column, value.to(y.dtype.element_ty), mask=inside)
