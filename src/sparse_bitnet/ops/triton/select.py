# SPDX-License-Identifier: Apache-2.0
"""Mask, ternary codes, mask bits and flip count in one pass over the weights; absmean in another.

A tile is [groups, lanes], a group of m weights to a row. Which n are kept follows from picking: the
largest n one after another, or the smallest m - n to be dropped, whichever is shorter; 6:8 and 2:4
take two picks. Magnitudes are compared as integers, as `nm_mask_reference` does.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.operands import SCALE_FLOOR, word_dtype
from sparse_bitnet.ops.triton.float_bits import float32_bits, readable

TILE_WEIGHTS = 1024
ABSMEAN_BLOCK = 8192

# From here on weight_scale / 2 is a float32 and |w| / scale rounds above 0.5 where |w| > scale / 2.
_SMALLEST_SCALE = tl.constexpr(2.0**-125)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def select_ternary(weight: Tensor, weight_scale: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `select_ternary_reference`: (int8 masked codes, bool mask), bit for bit."""
    codes, mask, _ = _launch(weight, weight_scale, n, m, words=False)
    return codes, mask


def nm_mask(weight: Tensor, n: int, m: int) -> Tensor:
    """See `nm_mask_reference`."""
    return _launch(weight, None, n, m, words=False)[1]


def select_ternary_bits(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See `select_ternary_bits_reference`: (int8 codes, mask words, int64 flips)."""
    codes, words, flips = _launch(weight, weight_scale, n, m, words=True, previous=previous)
    return codes, words, flips.sum(dtype=torch.int64)


def absmean(weight: Tensor) -> Tensor:
    """See `absmean_reference`; another order of the float64 sum."""
    weight = weight.contiguous()
    count = weight.numel()
    programs = triton.cdiv(count, ABSMEAN_BLOCK)
    partial = torch.empty(programs, dtype=torch.float64, device=weight.device)
    _sum_magnitudes[(programs,)](readable(weight), partial, count, BLOCK=ABSMEAN_BLOCK, num_warps=8)
    return (partial.sum() / count).float().clamp_min(SCALE_FLOOR)


def _launch(
    weight: Tensor,
    weight_scale: Tensor | None,
    n: int,
    m: int,
    words: bool,
    previous: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (of a scale), mask as words or bools, flips of each program."""
    weight, lanes = weight.contiguous(), triton.next_power_of_2(m)
    codes = weight if weight_scale is None else torch.empty_like(weight, dtype=torch.int8)
    grouped = (*weight.shape[:-1], weight.shape[-1] // m)
    mask = weight.new_empty(
        grouped if words else weight.shape, dtype=word_dtype(m) if words else torch.bool
    )
    groups, tile = weight.numel() // m, max(1, TILE_WEIGHTS // lanes)
    programs = triton.cdiv(groups, tile)
    flips = weight.new_empty(0 if previous is None else programs, dtype=torch.int32)
    if previous is not None:
        assert (previous.shape, previous.dtype) == (mask.shape, mask.dtype)
        previous = previous.contiguous()
    _select[(programs,)](
        readable(weight),
        weight_scale,
        None if weight_scale is None else codes,
        None if words else mask.view(torch.uint8),
        mask if words else None,
        previous,
        flips,
        groups,
        N=n,
        M=m,
        LANES=lanes,
        GROUPS=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return codes, mask, flips


@triton.jit
def _kept(key, lane, N: tl.constexpr, M: tl.constexpr, LANES: tl.constexpr):
    """Which lanes of each group are among its n largest, ties to the lower index.

    Keys are magnitudes minus one, -1 .. 2**31 - 2, so that both ends are free for lanes to ignore.
    """
    real = (lane < M)[None, :] & (key >= -1)
    if N == M:
        keep = real
    elif N <= M - N:
        keep = key < -1
        left = tl.where(real, key, -2)
        for _ in tl.static_range(N):
            largest = tl.max(left, axis=1)
            first = tl.min(tl.where(left == largest[:, None], lane[None, :], LANES), axis=1)
            hit = lane[None, :] == first[:, None]
            keep = keep | hit
            left = tl.where(hit, -2, left)
    else:
        keep = real
        left = tl.where(real, key, 0x7FFFFFFF)
        for _ in tl.static_range(M - N):
            smallest = tl.min(left, axis=1)
            last = tl.max(tl.where(left == smallest[:, None], lane[None, :], -1), axis=1)
            hit = lane[None, :] == last[:, None]
            keep = keep & (lane[None, :] != last[:, None])
            left = tl.where(hit, 0x7FFFFFFF, left)
    return keep


@triton.jit
def _select(
    weight,
    weight_scale,
    codes,
    mask,
    words,
    previous,
    flips,
    groups,
    N: tl.constexpr,
    M: tl.constexpr,
    LANES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    program = tl.program_id(0)
    group = program.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, LANES)
    inside = (group < groups)[:, None] & (lane < M)[None, :]
    at = group[:, None] * M + lane[None, :]
    bits = float32_bits(tl.load(weight + at, mask=inside, other=0))
    value = bits.to(tl.float32, bitcast=True)
    keep = _kept((bits & _MAGNITUDE) - 1, lane, N, M, LANES)
    if codes is not None:
        scale = tl.load(weight_scale)
        if scale >= _SMALLEST_SCALE:
            half = scale * 0.5
            code = (value > half).to(tl.int32) - (value < -half).to(tl.int32)
        else:
            quotient = tl.div_rn(value, tl.zeros_like(value) + scale)
            code = (quotient > 0.5).to(tl.int32) - (quotient < -0.5).to(tl.int32)
        tl.store(codes + at, tl.where(keep, code, 0).to(tl.int8), mask=inside)
    if mask is not None:
        tl.store(mask + at, keep.to(tl.uint8), mask=inside)
    if words is not None:
        word = tl.sum(keep.to(tl.int32) << lane[None, :], axis=1)
        tl.store(words + group, word.to(words.dtype.element_ty), mask=group < groups)
    if previous is not None:
        before = tl.load(previous + group, mask=group < groups, other=0).to(tl.int32)
        was_kept = (before[:, None] >> lane[None, :]) & 1
        changed = tl.where(inside, was_kept ^ keep.to(tl.int32), 0)
        tl.store(flips + program, tl.sum(tl.sum(changed, axis=1), axis=0))


@triton.jit
def _sum_magnitudes(weight, partial, count, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = float32_bits(tl.load(weight + at, mask=at < count, other=0)) & _MAGNITUDE
    value = bits.to(tl.float32, bitcast=True)
    tl.store(partial + program, tl.sum(value.to(tl.float64), axis=0))
