"""Dense int8 products on tensor cores through `torch._int_mm`, then scales and bias in one pass."""

import importlib.util

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.kernels.launch_device import on_its_device

SMALLEST_TOKENS = 32
"""On CUDA `torch._int_mm` takes more than 16 rows; fewer are filled up to these."""


def int8_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `straight_through.int8_linear`."""
    x, out_features = x_codes.reshape(-1, x_codes.shape[-1]), codes.shape[0]
    shape = (*x_codes.shape[:-1], out_features)
    if not x.shape[0]:
        return x_codes.new_empty(shape, dtype=dtype)
    sums = dense_product(x, codes)
    return scaled(sums, out_features, x_scale, weight_scale, bias, dtype).view(shape)


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
    x_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """sums * (x_scale * weight_scale) + bias: [tokens, out_features] of `dtype`.

    Args:
        sums: int32 [at least tokens, at least out_features].
        out_features: columns to use.
        x_scale: float32, one value a token.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.
    """
    token_scale = x_scale.reshape(-1, 1)
    if sums.is_cuda and importlib.util.find_spec("triton") is not None:
        from sparse_bitnet.kernels.triton.epilogue import scale_rows

        row_scale = weight_scale.contiguous()
        return scale_rows(sums, out_features, token_scale, row_scale, bias, dtype)
    y = sums[: len(token_scale), :out_features] * (token_scale * weight_scale)
    return (y if bias is None else y + bias).to(dtype)


def register() -> None:
    """Make it the CUDA implementation of `int8_linear`, which may be defined later."""
    _LIBRARY.impl("int8_linear", on_its_device(int8_linear), "CUDA")


# An implementation lives as long as the library object it was registered with.
_LIBRARY = torch.library.Library("sparse_bitnet", "IMPL")
