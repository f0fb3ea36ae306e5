# SPDX-License-Identifier: Apache-2.0
"""int8 activations times ternary codes in int32, exactly, then scales and bias in float32.

`sparse_int8_linear` does the same with a weight in 2:4 layout, on NVIDIA's sparse tensor cores through
cuSPARSELt. For few tokens it is slower than a dense product on some GPUs.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import cusparselt_unavailable, define

# 2**24 / 128: sums of this many int8 products are integers that float32 holds, in any order.
_EXACT_IN_FLOAT32 = 1 << 17

TOKEN_MULTIPLE = 16
"""Columns of a dense int8 operand of cuSPARSELt, our tokens, are a multiple of this."""


def int8_linear_reference(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return x_codes @ codes.T in int32, times activation_scale * weight_scale, plus bias, rounded to
    `dtype`. Every kernel returns the same, bit for bit.

    Args:
        x_codes: int8 [..., in_features].
        activation_scale: float32 [..., 1].
        codes: int8 [out_features, in_features], of -1, 0 and 1.
        weight_scale: float32, one value or [out_features]. The reference alone also supports
            [out_features, groups], one for each run of in_features / groups weights: the runs are added
            up in ascending order, as csrc/packed_format.h has it.
        bias: [out_features] or None.
        dtype: of the output; everything before it is float32.

    Returns [..., out_features]. No gradient flows.
    """
    # Not even float32 products may become bfloat16 ones here.
    with torch.autocast(x_codes.device.type, enabled=False):
        if weight_scale.dim() == 2:
            scales = weight_scale.float().unbind(1)
            x_runs, runs = (each.chunk(len(scales), -1) for each in (x_codes, codes))
            triples = zip(x_runs, runs, scales, strict=True)
            parts = (integer_product(x, run) * scale for x, run, scale in triples)
            y = reduce(torch.add, parts) * activation_scale
        else:
            y = integer_product(x_codes, codes) * (activation_scale * weight_scale)
    return (y if bias is None else y + bias).to(dtype)


def integer_product(x_codes: Tensor, codes: Tensor) -> Tensor:
    """Return x_codes @ codes.T of ternary codes exactly, rounded to float32: most stay below 2**24. The
    arguments are those of `int8_linear_reference`."""
    wide = torch.float32 if codes.shape[-1] <= _EXACT_IN_FLOAT32 else torch.float64
    return F.linear(x_codes.to(wide), codes.to(wide)).float()


def compress_windows(expanded: Tensor) -> Tensor:
    """Return the weight operand of `sparse_int8_linear`, for the device that `expanded` is on, int8
    [out_features, K'] of `window_expand`: an opaque int8 matrix whose rows are out_features filled up to
    a multiple of 32. It depends on device and library, so make it on loading and never save it."""
    return torch.ops.sparse_bitnet.compress_windows(F.pad(expanded, (0, 0, 0, -len(expanded) % 32)))


def sparse_int8_linear_reference(
    x_codes: Tensor, activation_scale: Tensor, compressed: Tensor, out_features: int, *more: Any
) -> Tensor:
    """`int8_linear` of int8 [..., K'] from `quantize_windows`, with a weight of `compress_windows`, here
    expanded codes, of which the first `out_features` rows count. `more`: weight_scale, bias, dtype."""
    return int8_linear_reference(x_codes, activation_scale, compressed[:out_features], *more)


def sparse_tensor_cores(
    x_codes: Tensor,
    activation_scale: Tensor,
    compressed: Tensor,
    out_features: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """`sparse_int8_linear` by the library. In bfloat16 it scales rows itself and sums never reach memory,
    which costs two roundings more than the reference has; in other types it returns the integers."""
    x = x_codes.reshape(-1, x_codes.shape[-1])
    shape, tokens = (*x_codes.shape[:-1], out_features), x.shape[0]
    if not tokens:
        return x_codes.new_empty(shape, dtype=dtype)
    x = F.pad(x, (0, 0, 0, -tokens % TOKEN_MULTIPLE)).t()
    row_scale = weight_scale.expand(out_features)
    activation_scale = activation_scale.reshape(-1, 1)
    is_bf16 = dtype == torch.bfloat16
    alpha = F.pad(row_scale, (0, compressed.shape[0] - out_features)) if is_bf16 else None
    operands = (compressed, x, None, alpha, dtype if is_bf16 else torch.int32, True)
    sums = torch._cslt_sparse_mm(*operands, *_algorithm(*operands))[:tokens, :out_features]
    y = sums.mul_(activation_scale) if is_bf16 else sums * (activation_scale * row_scale)
    return (y if bias is None else y + bias).to(dtype).reshape(shape)


_ALGORITHMS: dict[tuple[Any, ...], tuple[int, int, int]] = {}


def _algorithm(
    compressed: Tensor, x: Tensor, bias: None, alpha: Tensor | None, *more: Any
) -> tuple[int, int, int]:
    """The library's fastest algorithm for a shape, searched the first time the shape is met: its
    number, the parts into which K is split, and how they are added."""
    key = (compressed.device.index or 0, *compressed.shape, *x.shape, *more)
    if key not in _ALGORITHMS:
        if torch.cuda.is_current_stream_capturing():
            # A search times kernels and synchronises, which a graph cannot record.
            return 0, 1, -1
        library: Any = torch._C._cusparselt
        _ALGORITHMS[key] = library.mm_search(compressed, x, bias, alpha, *more)[:3]
    return _ALGORITHMS[key]


def _sparse_fake(x_codes, activation_scale, compressed, out_features, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], out_features), dtype=dtype, device=x_codes.device)


def _fake(x_codes, activation_scale, codes, weight_scale, bias, dtype):
    shape = (*x_codes.shape[:-1], codes.shape[0])
    return torch.empty(shape, dtype=dtype, device=x_codes.device)


int8_linear = define(
    "int8_linear(Tensor x_codes, Tensor activation_scale, Tensor codes, Tensor weight_scale, "
    "Tensor? bias, ScalarType dtype) -> Tensor",
    int8_linear_reference,
    fake=_fake,
)
define(
    "compress_windows(Tensor expanded) -> Tensor",
    torch.clone,
    cuda=lambda expanded: torch._cslt_compress(expanded.contiguous()),
    cuda_unavailable=cusparselt_unavailable,
)
sparse_int8_linear = define(
    "sparse_int8_linear(Tensor x_codes, Tensor activation_scale, Tensor compressed, "
    "int out_features, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    sparse_int8_linear_reference,
    fake=_sparse_fake,
    cuda=sparse_tensor_cores,
    cuda_unavailable=cusparselt_unavailable,
)
