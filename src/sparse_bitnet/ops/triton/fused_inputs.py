"""RMSNorm or SwiGLU, and the int8 quantisation (with windowed gather) of its result, one program a token.

The first pass finds the largest magnitude, the second computes the values again where they are needed
and writes codes; what it reads lies in the cache by then. Intermediate results are rounded to the
input's type where the unfused operators round them.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.triton.quantize_gather import int8_codes, int8_scales, prepare

MAX_BLOCK = 2048


def norm_quantize(
    x: Tensor, weight: Tensor, epsilon: float, n: int, m: int
) -> tuple[Tensor, Tensor]:
    """See `ops.norm_quantize`."""
    x = x.contiguous()
    codes, scale, sizes = prepare(x, x.shape[-1], n, m, MAX_BLOCK)
    if scale.numel():
        _norm_quantize[(scale.numel(),)](x, weight, codes, scale, epsilon, **sizes)
    return codes, scale


def swiglu_quantize(gate_up: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `ops.swiglu_quantize`."""
    gate_up = gate_up.contiguous()
    codes, scale, sizes = prepare(gate_up, gate_up.shape[-1] // 2, n, m, MAX_BLOCK)
    if scale.numel():
        _swiglu_quantize[(scale.numel(),)](gate_up, codes, scale, **sizes)
    return codes, scale


@triton.jit
def _source(column, M: tl.constexpr, WINDOWS: tl.constexpr):
    """The feature that a column of the codes reads."""
    if WINDOWS == 0:
        source = column
    else:
        window = column // 4
        source = window // WINDOWS * M + 2 * (window % WINDOWS) + column % 4
    return source


@triton.jit
def _normed(row, weight, at, inside, rstd):
    value = tl.load(row + at, mask=inside, other=0.0)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    normed = (value.to(tl.float32) * rstd).to(value.dtype)
    return (normed.to(tl.float32) * gain.to(tl.float32)).to(value.dtype).to(tl.float32)


@triton.jit
def _gated(row, features, at, inside):
    gate = tl.load(row + at, mask=inside, other=0.0)
    up = tl.load(row + features + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype).to(tl.float32)


@triton.jit
def _norm_quantize(
    x,
    weight,
    codes,
    scale,
    epsilon,
    features,
    columns,
    M: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = x + token * features
    offset = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, features, BLOCK):
        at = start + offset
        value = tl.load(row + at, mask=at < features, other=0.0).to(tl.float32)
        squares += value * value
    mean = tl.div_rn(tl.sum(squares, axis=0), features * 1.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean + epsilon))
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, features, BLOCK):
        at = start + offset
        value = _normed(row, weight, at, at < features, rstd)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    activation_scale, inverse = int8_scales(tl.max(largest, axis=0))
    tl.store(scale + token, activation_scale)
    for start in range(0, columns, BLOCK):
        column = start + offset
        source = _source(column, M, WINDOWS)
        inside = (column < columns) & (source < features)
        value = _normed(row, weight, source, inside, rstd)
        quantised = int8_codes(value, inverse)
        tl.store(codes + token * columns + column, quantised, mask=column < columns)


@triton.jit
def _swiglu_quantize(
    gate_up,
    codes,
    scale,
    features,
    columns,
    M: tl.constexpr,
    WINDOWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = gate_up + token * features * 2
    offset = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, features, BLOCK):
        at = start + offset
        value = _gated(row, features, at, at < features)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    activation_scale, inverse = int8_scales(tl.max(largest, axis=0))
    tl.store(scale + token, activation_scale)
    for start in range(0, columns, BLOCK):
        column = start + offset
        source = _source(column, M, WINDOWS)
        inside = (column < columns) & (source < features)
        value = _gated(row, features, source, inside)
        quantised = int8_codes(value, inverse)
        tl.store(codes + token * columns + column, quantised, mask=column < columns)
