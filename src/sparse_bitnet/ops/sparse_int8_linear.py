"""`int8_linear` with a weight in 2:4 form, on NVIDIA's sparse tensor cores through cuSPARSELt.

The library is slower than a dense product for few tokens on some GPUs: which of the two a layer uses
is for `tuning_cache` to say.
"""

from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import cusparselt_unavailable, define
from sparse_bitnet.ops.int8_linear import filled, int8_linear_reference, scaled
from sparse_bitnet.ops.windows import check_two_of_four

TOKEN_MULTIPLE = 16
"""Columns of a dense int8 operand of cuSPARSELt, our tokens, are a multiple of this."""


def compress_windows(expanded: Tensor) -> Tensor:
    """The weight operand of `sparse_int8_linear`, for the device that `expanded` is on.

    Args:
        expanded: int8 [out_features, K'] in 2:4 form, K' a multiple of 32.

    Returns an opaque int8 matrix whose rows are out_features filled up to a multiple of 32. It depends
    on device and library: made on loading, never saved.

    Raises `UserError` where four columns hold more than two non-zeros.
    """
    check_two_of_four(expanded)
    return torch.ops.sparse_bitnet.compress_windows(filled(expanded, -expanded.shape[0] % 32, 0))


def sparse_int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    compressed: Tensor,
    out_features: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Product with a weight of `compress_windows`.

    Args:
        x_codes: int8 [..., K'] of `quantize_windows`.
        activation_scale: float32 [..., 1].
        compressed: see `compress_windows`.
        out_features: rows of the weight without those that fill up.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns [..., out_features].
    """
    return torch.ops.sparse_bitnet.sparse_int8_linear(
        x_codes, activation_scale, compressed, out_features, weight_scale, bias, dtype
    )


def sparse_int8_linear_reference(
    x_codes: Tensor, activation_scale: Tensor, compressed: Tensor, out_features: int, *more: Any
) -> Tensor:
    """With what the reference of `compress_windows` returns: the expanded codes themselves."""
    return int8_linear_reference(x_codes, activation_scale, compressed[:out_features], *more)


def _sparse_tensor_cores(
    x_codes: Tensor, activation_scale: Tensor, compressed: Tensor, out_features: int, *more: Any
) -> Tensor:
    x = x_codes.reshape(-1, x_codes.shape[-1])
    if not x.shape[0]:
        return x_codes.new_empty((*x_codes.shape[:-1], out_features), dtype=more[-1])
    y = scaled(sparse_product(x, compressed), out_features, activation_scale, *more)
    return y.view(*x_codes.shape[:-1], out_features)


def sparse_product(x_codes: Tensor, compressed: Tensor) -> Tensor:
    """int32 [tokens filled up to a multiple of 16, rows of the weight].

    Args:
        x_codes: int8 [tokens, K'].
        compressed: of `compress_windows`.
    """
    x = filled(x_codes, -x_codes.shape[0] % TOKEN_MULTIPLE, 0).t()
    operands = (
        compressed,
        x,
        None,
        None,
        torch.int32,
        True,
    )  # no bias, no alpha, transposed result
    return torch._cslt_sparse_mm(*operands, *_algorithm(*operands))


_ALGORITHMS: dict[tuple[int, ...], tuple[int, int, int]] = {}


def _algorithm(compressed: Tensor, x: Tensor, *more: Any) -> tuple[int, int, int]:
    """The library's fastest algorithm for a shape, searched the first time the shape is met: its
    number, the parts into which K is split, and how they are added."""
    device = compressed.device.index or 0
    key = (device, *compressed.shape, *x.shape)
    if key not in _ALGORITHMS:
        if torch.cuda.is_current_stream_capturing():
            # A search times kernels and synchronises, which a graph cannot record.
            return 0, 1, -1
        library: Any = torch._C._cusparselt
        _ALGORITHMS[key] = library.mm_search(compressed, x, *more)[:3]
    return _ALGORITHMS[key]


def _fake(x_codes, activation_scale, compressed, out_features, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], out_features), dtype=dtype, device=x_codes.device)


define(
    "compress_windows(Tensor expanded) -> Tensor",
    torch.clone,
    None,
    cuda=lambda expanded: torch._cslt_compress(expanded.contiguous()),
    cuda_unavailable=cusparselt_unavailable,
)
define(
    "sparse_int8_linear(Tensor x_codes, Tensor activation_scale, Tensor compressed, "
    "int out_features, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    sparse_int8_linear_reference,
    _fake,
    cuda=_sparse_tensor_cores,
    cuda_unavailable=cusparselt_unavailable,
)
