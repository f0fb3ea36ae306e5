# SPDX-License-Identifier: Apache-2.0
"""int8 tokens, in their own order or in that of a pattern's 2:4 windows: one kernel.

One program a token, which holds the whole token in registers: [quads, 4], since four columns of a window
are four neighbouring features. Each window of a pattern reads its columns again.
"""

import struct

import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.operands import SCALE_FLOOR, empty_tokens
from sparse_bitnet.ops.triton.float_bits import float32_bits, readable
from sparse_bitnet.ops.windows import WINDOW, WindowLayout, window_layout
from sparse_bitnet.pattern import NMPattern

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", SCALE_FLOOR))[0])
# Added to |q| < 2**22 it leaves the nearest integer, halves to even, in the lowest bits of the sum.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_int8`."""
    return quantize_windows(x, 0, 0)


def quantize_windows(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_windows`; in its own order with m = 0."""
    features = x.shape[-1]
    layout = window_layout(NMPattern(n, m)) if m else WindowLayout(WINDOW, 1)
    columns = layout.width(features) if m else features
    codes, scale = empty_tokens(x, columns)
    quads = triton.next_power_of_2(triton.cdiv(max(features, columns // layout.windows), WINDOW))
    if scale.numel():
        _quantize[(scale.numel(),)](
            readable(x.contiguous()),
            codes,
            scale,
            features,
            columns,
            M=layout.m,
            WINDOWS=layout.windows,
            QUADS=quads,
            num_warps=min(16, max(1, quads // 128)),
            enable_fp_fusion=False,
        )
    return codes, scale


@triton.jit
def _values(row, at, features):
    """float32 values at some features of a token; 0 past their end."""
    value = tl.load(row + at, mask=at < features, other=0)
    return float32_bits(value).to(tl.float32, bitcast=True)


@triton.jit
def _quantize(
    x,
    codes,
    scale,
    features,
    columns,
    M: tl.constexpr,
    WINDOWS: tl.constexpr,
    QUADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = x + token * features
    quad, lane = tl.arange(0, QUADS)[:, None], tl.arange(0, 4)[None, :]
    value = _values(row, quad * 4 + lane, features)
    # As integers NaN is above infinity, so a NaN anywhere makes the scale NaN, as in the reference.
    magnitude = value.to(tl.int32, bitcast=True) & _MAGNITUDE
    largest = tl.maximum(tl.max(tl.max(magnitude, axis=1), axis=0), _FLOOR_BITS)
    absmax = largest.to(tl.float32, bitcast=True)
    tl.store(scale + token, tl.div_rn(absmax, 127.0))
    # Rounded twice, as PyTorch evaluates 127 / tensor. No product passes 127, but for tokens that are
    # not finite: their codes are zero.
    inverse = tl.div_rn(1.0, absmax) * 127.0
    is_finite = largest < _INFINITY
    for window in tl.static_range(WINDOWS):
        if M != 4:
            value = _values(row, quad * M + 2 * window + lane, features)
        code = (value * inverse + _ROUNDING).to(tl.int32, bitcast=True)
        column = (quad * WINDOWS + window) * 4 + lane
        quantised = tl.where(is_finite, code, 0).to(tl.int8)
        tl.store(codes + token * columns + column, quantised, mask=column < columns)
