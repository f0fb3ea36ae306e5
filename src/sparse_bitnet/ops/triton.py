# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels, in Triton, compiled on first use: each function is the kernel of the op of its name.

Selection: ternary codes and the mask in one pass over the weights.
A tile is [groups, lanes], a group of m weights to a row. The n kept weights are picked one by one: the
n largest, or the m - n smallest to be dropped, whichever takes fewer picks; 6:8 and 2:4
take two picks. Magnitudes are compared as integers, as `nm_mask_reference` does.

Activations: one program a token, which holds the whole token in registers: [quads, 4], since four columns
of a window are four neighbouring features. Each window of a pattern reads its columns again.

Products: sums are [rows of the weight, tokens], weights the left operand. int32 sums never reach memory.
Tiles are searched for each shape and power of two of tokens, on the GPU that runs them.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.windows import WINDOW, WindowLayout, window_layout
from sparse_bitnet.packing.formats import SCALE_FLOOR
from sparse_bitnet.pattern import NMPattern

TILE_WEIGHTS = 1024

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_FLOOR_BITS = tl.constexpr(struct.unpack("<i", struct.pack("<f", SCALE_FLOOR))[0])
# Added to |q| < 2**22 it leaves the nearest integer, halves to even, in the lowest bits of the sum.
_ROUNDING = tl.constexpr(1.5 * 2.0**23)


def readable(x: Tensor) -> Tensor:
    """`x` as kernels read it: bfloat16 as int16, whose bits `float32_bits` moves into place."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@triton.jit
def float32_bits(value):
    """Return the float32 bits, as int32, of a value loaded from a `readable` tensor.

    Shifting a bfloat16 is exact for denormals and NaN too, which conversions do not promise.
    """
    if value.dtype == tl.int16:
        bits = value.to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits


def nm_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """See `nm_mask_reference`."""
    return select_ternary(weight, None, n, m)[1]


def select_ternary(
    weight: Tensor, weight_scale: Tensor | None, n: int, m: int
) -> tuple[Tensor, Tensor]:
    """See `select_ternary_reference`: (int8 masked codes, bool mask), bit for bit; without a scale, no
    codes are computed."""
    weight, lanes = weight.contiguous(), triton.next_power_of_2(m)
    codes = weight if weight_scale is None else torch.empty_like(weight, dtype=torch.int8)
    mask = torch.empty_like(weight, dtype=torch.bool)
    groups, tile = weight.numel() // m, max(1, TILE_WEIGHTS // lanes)
    _select[(triton.cdiv(groups, tile),)](
        readable(weight),
        weight_scale,
        None if weight_scale is None else codes,
        mask.view(torch.uint8),
        groups,
        N=n,
        M=m,
        LANES=lanes,
        GROUPS=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return codes, mask


@triton.jit
def _kept(key, lane, N: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Return the mask of the n largest lanes of each group, ties to the lower index.

    Keys are magnitudes minus one, -1 .. 2**31 - 2: the integers at both ends are free, for lanes to
    ignore. Complements instead of minima lose a pick on an H200 (Triton 3.6 forgets a negation).
    """
    keeps: tl.constexpr = N <= M - N
    picks: tl.constexpr = N if keeps else M - N
    gone: tl.constexpr = -0x80000000 if keeps else 0x7FFFFFFF
    rank = lane if keeps else LANES - 1 - lane
    left = tl.where((lane < M)[None, :], key, gone)
    picked = key < -1
    for _ in tl.static_range(picks):
        best = tl.max(left, axis=1) if keeps else tl.min(left, axis=1)
        first = tl.min(tl.where(left == best[:, None], rank[None, :], LANES), axis=1)
        hit = rank[None, :] == first[:, None]
        picked = picked | hit
        left = tl.where(hit, gone, left)
    return picked if keeps else ~picked


@triton.jit
def _select(
    weight,
    weight_scale,
    codes,
    mask,
    groups,
    N: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, LANES)
    inside = (group < groups)[:, None] & (lane < M)[None, :]
    at = group[:, None] * M + lane[None, :]
    bits = float32_bits(tl.load(weight + at, mask=inside, other=0))
    value = bits.to(tl.float32, bitcast=True)
    keep = _kept((bits & _MAGNITUDE) - 1, lane, N, M, LANES)
    if codes is not None:
        # |w| / scale rounds above 0.5 where |w| > scale / 2, for positive scales from 2**-125 on.
        half = tl.load(weight_scale) * 0.5
        code = (value > half).to(tl.int32) - (value < -half).to(tl.int32)
        tl.store(codes + at, tl.where(keep, code, 0).to(tl.int8), mask=inside)
    tl.store(mask + at, keep.to(tl.uint8), mask=inside)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_int8`."""
    return quantize_windows(x, 0, 0)


def quantize_windows(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `ops.quantize_windows`; in its own order with m = 0."""
    features = x.shape[-1]
    layout = window_layout(NMPattern(n, m)) if m else WindowLayout(WINDOW, 1)
    columns = layout.width(features) if m else features
    codes = torch.empty((*x.shape[:-1], columns), dtype=torch.int8, device=x.device)
    scale = codes.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
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
    x, codes, scale, features, columns, M: tl.constexpr, WINDOWS: tl.constexpr, QUADS: tl.constexpr
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


def int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `ops.int8_linear`."""
    x = x_codes.reshape(-1, x_codes.shape[-1]).contiguous()
    (tokens, columns), rows = x.shape, len(codes)
    y = torch.empty((tokens, rows), dtype=dtype, device=x.device)

    def grid(sizes: dict[str, int]) -> tuple[int, int]:
        return triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(tokens, sizes["TOKENS"])

    if y.numel():
        dense_dot[grid](
            x,
            codes.contiguous(),
            y,
            activation_scale.contiguous(),
            weight_scale.expand(rows).contiguous(),
            bias,
            tokens,
            rows,
            columns,
            NEAR=triton.next_power_of_2(tokens),
            IS_EVEN=columns % 128 == 0,
            enable_fp_fusion=False,
        )
    return y.view(*x_codes.shape[:-1], rows)


_TILES = [
    triton.Config(
        {"ROWS": rows, "TOKENS": tokens, "DEPTH": 128}, num_warps=warps, num_stages=stages
    )
    for rows, tokens, warps, stages in (
        *((64, 16, 4, 4), (64, 64, 4, 4), (128, 64, 4, 3)),
        *((128, 128, 8, 3), (128, 256, 8, 3), (64, 256, 8, 3)),
    )
]
_IS_COMPILED = isinstance(float32_bits, triton.JITFunction)


@triton.autotune(
    _TILES if _IS_COMPILED else _TILES[:1], ["rows", "columns", "NEAR"], warmup=5, rep=20
)
@triton.jit
def dense_dot(
    x_codes,
    codes,
    y,
    activation_scale,
    weight_scale,
    bias,
    tokens,
    rows,
    columns,
    NEAR: tl.constexpr,
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """y = x_codes @ codes.T, scaled, with a bias; a block of rows and tokens a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, DEPTH)
    # Rows and tokens past the end compute what others do; only their results are left out.
    w_at = codes + (row % rows).to(tl.int64)[:, None] * columns + column[None, :]
    x_at = x_codes + (token % tokens).to(tl.int64)[None, :] * columns + column[:, None]
    sums = tl.zeros([ROWS, TOKENS], dtype=tl.int32)
    for start in range(0, columns, DEPTH):
        if IS_EVEN:
            w, x = tl.load(w_at), tl.load(x_at)
        else:
            inside = column < columns - start
            w = tl.load(w_at, mask=inside[None, :], other=0)
            x = tl.load(x_at, mask=inside[:, None], other=0)
        sums = tl.dot(w, x, sums, out_dtype=tl.int32)
        w_at += DEPTH
        x_at += DEPTH
    # Every operation is rounded as in the reference.
    in_rows, in_tokens = row < rows, token < tokens
    of_token = tl.load(activation_scale + token, mask=in_tokens, other=0.0)
    of_row = tl.load(weight_scale + row, mask=in_rows, other=0.0)
    value = sums.to(tl.float32) * (of_token[None, :] * of_row[:, None])
    if bias is not None:
        value += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=in_rows[:, None] & in_tokens[None, :])
