"""int8 activations times ternary codes in int32, exactly, then scales and bias in float32.

`sparse_int8_linear` and `packed_int8_linear` compute the same; they differ in how the weight lies in
memory. The CUDA kernel is cuBLASLt through `torch._int_mm`.
"""

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import define

SMALLEST_TOKENS = 32
"""On CUDA `torch._int_mm` takes more than 16 rows; fewer are filled up to these."""

# 2**24 / 128: sums of so many int8 products are integers that float32 holds, in any order.
_EXACT_IN_FLOAT32 = 1 << 17


def int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x_codes @ codes.T in int32, times activation_scale * weight_scale, plus bias, rounded to `dtype`.

    Args:
        x_codes: int8 [..., in_features].
        activation_scale: float32 [..., 1].
        codes: int8 [out_features, in_features].
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output; all before it is float32.

    Returns [..., out_features]. No gradient flows.
    """
    return torch.ops.sparse_bitnet.int8_linear(
        x_codes, activation_scale, codes, weight_scale, bias, dtype
    )


def int8_linear_reference(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`int8_linear` in plain PyTorch: what every kernel returns, bit for bit."""
    # Not even float32 products may become bfloat16 ones here.
    with torch.autocast(x_codes.device.type, enabled=False):
        y = integer_product(x_codes, codes) * (activation_scale * weight_scale)
    return (y if bias is None else y + bias).to(dtype)


def integer_product(x_codes: Tensor, codes: Tensor) -> Tensor:
    """x_codes @ codes.T exactly, as float32: the sums stay below 2**24.

    Args:
        x_codes: int8 [..., in_features].
        codes: int8 [out_features, in_features] in {-1, 0, 1}.
    """
    wide = torch.float32 if codes.shape[-1] <= _EXACT_IN_FLOAT32 else torch.float64
    return F.linear(x_codes.to(wide), codes.to(wide)).float()


def int8_tensor_cores(
    x_codes: Tensor, activation_scale: Tensor, codes: Tensor, *more: Any
) -> Tensor:
    """`int8_linear` by `torch._int_mm`, then scales and bias in one pass."""
    x, out_features = x_codes.reshape(-1, x_codes.shape[-1]), codes.shape[0]
    shape = (*x_codes.shape[:-1], out_features)
    if not x.shape[0]:
        return x_codes.new_empty(shape, dtype=more[-1])
    return scaled(dense_product(x, codes), out_features, activation_scale, *more).view(shape)


def dense_product(x_codes: Tensor, codes: Tensor) -> Tensor:
    """int32 [at least tokens, at least out_features] of int8 [tokens, K] and [out_features, K]."""
    tokens, in_features = x_codes.shape
    fill = -in_features % 8
    rows = SMALLEST_TOKENS - tokens if tokens <= 16 else 0
    x = filled(x_codes, rows, fill)
    weight = filled(codes, -codes.shape[0] % 8, fill)
    return torch._int_mm(x, weight.t())


def filled(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """A contiguous matrix with so many rows and columns of zeros more; itself where there are none."""
    if rows or columns:
        return F.pad(matrix, (0, columns, 0, rows))
    return matrix.contiguous()


def scaled(
    sums: Tensor,
    out_features: int,
    activation_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """sums * (activation_scale * weight_scale) + bias: [tokens, out_features] of `dtype`.

    Args:
        sums: int32 [at least tokens, at least out_features].
        out_features: columns to use.
        activation_scale: float32, one value a token.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.
    """
    token_scale = activation_scale.reshape(-1, 1)
    if sums.is_cuda and importlib.util.find_spec("triton") is not None:
        from sparse_bitnet.ops.triton.epilogue import scale_rows

        row_scale = weight_scale.contiguous()
        return scale_rows(sums, out_features, token_scale, row_scale, bias, dtype)
    y = sums[: len(token_scale), :out_features] * (token_scale * weight_scale)
    return (y if bias is None else y + bias).to(dtype)


def _fake(x_codes, activation_scale, codes, weight_scale, bias, dtype):
    shape = (*x_codes.shape[:-1], codes.shape[0])
    return torch.empty(shape, dtype=dtype, device=x_codes.device)


define(
    "int8_linear(Tensor x_codes, Tensor activation_scale, Tensor codes, Tensor weight_scale, "
    "Tensor? bias, ScalarType dtype) -> Tensor",
    int8_linear_reference,
    _fake,
    cuda=int8_tensor_cores,
)
