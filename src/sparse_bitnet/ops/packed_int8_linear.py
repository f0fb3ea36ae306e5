"""`int8_linear` with a weight that stays in a packed format, for the few tokens of decoding."""

from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.int8_linear import int8_linear_reference
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.pattern import NMPattern

PACKED_FORMATS = ("i2", "nm-bitmap")
"""Packed formats that `packed_int8_linear` multiplies with."""


def packed_int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    packed_format: str,
    pattern: NMPattern,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Product with packed rows, for few tokens.

    Args:
        x_codes: int8 [..., in_features].
        activation_scale: float32 [..., 1].
        packed: uint8 [out_features, row_bytes], checked when it was loaded.
        packed_format: one of `PACKED_FORMATS`.
        pattern: of the codes.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns [..., out_features].
    """
    assert packed_format in PACKED_FORMATS, packed_format
    return torch.ops.sparse_bitnet.packed_int8_linear(
        x_codes,
        activation_scale,
        packed,
        packed_format,
        pattern.n,
        pattern.m,
        weight_scale,
        bias,
        dtype,
    )


def packed_int8_linear_reference(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    packed_format: str,
    n: int,
    m: int,
    *more: Any,
) -> Tensor:
    """`int8_linear` of the unpacked codes."""
    shape = (packed.shape[0], x_codes.shape[-1])
    codes = unpack(packed, packed_format, NMPattern(n, m), shape).to(x_codes.device)
    return int8_linear_reference(x_codes, activation_scale, codes, *more)


def _fake(x_codes, activation_scale, packed, packed_format, n, m, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], packed.shape[0]), dtype=dtype, device=x_codes.device)


def _triton(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    packed_format: str,
    n: int,
    m: int,
    weight_scale: Tensor,
    *more: Any,
) -> Tensor:
    from sparse_bitnet.ops.triton import packed_matvec

    x = x_codes.reshape(-1, x_codes.shape[-1])
    shape = (*x_codes.shape[:-1], packed.shape[0])
    if not x.shape[0]:
        return x_codes.new_empty(shape, dtype=more[-1])
    scales = (activation_scale.reshape(-1, 1), weight_scale.contiguous())
    if packed_format == "i2":
        return packed_matvec.i2_linear(x, scales[0], packed, scales[1], *more).view(shape)
    pattern = NMPattern(n, m)
    return packed_matvec.nm_bitmap_linear(x, scales[0], packed, pattern, scales[1], *more).view(
        shape
    )


define(
    "packed_int8_linear(Tensor x_codes, Tensor activation_scale, Tensor packed, str packed_format, "
    "int n, int m, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    packed_int8_linear_reference,
    _fake,
    cuda=_triton,
)
