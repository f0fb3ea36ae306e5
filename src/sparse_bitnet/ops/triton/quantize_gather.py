"""Per-token int8 activations, in their own order or gathered into windows, in one kernel.

One program a token: the first pass over the row finds the largest magnitude, the second reads the row
again (from the cache), quantises and writes. Bits equal `quantize_int8_reference`.
"""

import struct

import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.operands import SCALE_FLOOR, empty_tokens
from sparse_bitnet.ops.triton.float_bits import float32_bits, readable
from sparse_bitnet.ops.windows import layout_of

MAX_BLOCK = 4096

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", SCALE_FLOOR))[0])
# Adding and subtracting it rounds |q| <= 2**22 to the nearest integer, halves to even.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_int8`."""
    return quantize_windows(x, 0, 0)


def quantize_windows(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_windows`; in its own order with m = 0."""
    x = x.contiguous()
    codes, scale, sizes = prepare(x, x.shape[-1], n, m, MAX_BLOCK)
    if scale.numel():
        _quantize[(scale.numel(),)](readable(x), codes, scale, **sizes)
    return codes, scale


def prepare(
    x: Tensor, features: int, n: int, m: int, max_block: int
) -> tuple[Tensor, Tensor, dict[str, int | bool]]:
    """Room for so many features of each token in the order of n:m, and the kernels' sizes."""
    layout = layout_of(n, m)
    columns = features if layout is None else layout.padded_width(features)
    block = min(max_block, triton.next_power_of_2(columns))
    sizes = {
        "features": features,
        "columns": columns,
        "M": 1 if layout is None else layout.m,
        "WINDOWS": 0 if layout is None else layout.windows,
        "BLOCK": block,
        "num_warps": 8 if block >= 2048 else 4,
        "enable_fp_fusion": False,
    }
    return *empty_tokens(x, columns), sizes


@triton.jit
def int8_scales(largest):
    """(absmax / 127, 127 / absmax) of a token, from the bits of its largest magnitude."""
    # As integers NaN is above infinity, so a NaN anywhere makes the scale NaN, as in the reference.
    absmax = tl.maximum(largest, _FLOOR_BITS).to(tl.float32, bitcast=True)
    # The inverse is rounded twice, as PyTorch evaluates 127 / tensor.
    return tl.div_rn(absmax, 127.0), tl.div_rn(1.0, absmax) * 127.0


@triton.jit
def int8_codes(value, inverse):
    """int8 round_half_even(value * inverse), NaN to 0."""
    scaled = value * inverse
    scaled = tl.where(scaled == scaled, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -128.0), 127.0)
    return ((scaled + _ROUNDING) - _ROUNDING).to(tl.int8)


@triton.jit
def _quantize(
    x,
    codes,
    scale,
    features,
    columns,
    M: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = x + token * features
    offset = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, features, BLOCK):
        value = tl.load(row + start + offset, mask=start + offset < features, other=0)
        largest = tl.maximum(largest, float32_bits(value) & _MAGNITUDE)
    activation_scale, inverse = int8_scales(tl.max(largest, axis=0))
    tl.store(scale + token, activation_scale)
    for start in range(0, columns, BLOCK):
        column = start + offset
        if WINDOWS == 0:
            source = column
        else:
            window = column // 4
            source = window // WINDOWS * M + 2 * (window % WINDOWS) + column % 4
        value = tl.load(row + source, mask=(column < columns) & (source < features), other=0)
        quantised = int8_codes(float32_bits(value).to(tl.float32, bitcast=True), inverse)
        tl.store(codes + token * columns + column, quantised, mask=column < columns)
