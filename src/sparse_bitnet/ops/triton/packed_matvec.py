"""int8 activations times packed ternary weights (W2A8), for the 1 to 64 tokens of decoding.

Up to eight tokens, a program multiplies a few rows with all of them on the ordinary cores, four
products an instruction (dp4a): an i2 word of 16 codes is shifted and masked into four words of four
codes; an nm-bitmap nibble and its next sign bits index a table of words of four codes. More tokens
take the i2 codes through the integer tensor cores, or nm-bitmap in rounds of eight. Sums are int32,
exact.
"""

from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.int8_linear import filled
from sparse_bitnet.ops.triton.integer_dot import dot4, has_dp4a, store_scaled
from sparse_bitnet.ops.triton.packed_dot import i2_dot
from sparse_bitnet.packing.formats import (
    I2_BLOCK_BYTES,
    I2_BLOCK_WEIGHTS,
    NM_BITMAP_CHUNK_WEIGHTS,
    i2_plane_bytes,
    i2_row_bytes,
    nm_bitmap_row_bytes,
    nm_bitmap_sign_bytes,
)
from sparse_bitnet.pattern import NMPattern

MAX_TOKENS = 64
DOT_TOKENS = 9
"""From how many tokens on i2 uses the tensor cores."""

_TOKENS = 8
_ROWS = 4
_WORDS = 128
_CHUNKS = 32
_DOT_ROWS = 32


def i2_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """x_codes @ codes.T of i2 rows, scaled, with bias.

    Args:
        x_codes: int8 [tokens, in_features].
        activation_scale: float32 [tokens, 1].
        packed: uint8 [out_features, i2_row_bytes(in_features)], 4-byte aligned.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns `dtype` [tokens, out_features].
    """
    tokens, in_features = x_codes.shape
    rows, row_bytes = packed.shape
    assert row_bytes == i2_row_bytes(in_features), (row_bytes, in_features)
    blocks, tail = divmod(in_features, I2_BLOCK_WEIGHTS)
    plane = i2_plane_bytes(tail)
    # Activations end where the last block's padded codes do, so that no kernel needs the row's end.
    x_codes = filled(x_codes, 0, blocks * I2_BLOCK_WEIGHTS + 4 * plane - in_features)
    y = torch.empty((tokens, rows), dtype=dtype, device=x_codes.device)
    epilogue = {"ONE_SCALE": weight_scale.numel() == 1, "HAS_BIAS": bias is not None}
    if tokens >= DOT_TOKENS:
        block_tokens = 16 if tokens <= 16 else 32
        grid = (triton.cdiv(rows, _DOT_ROWS), triton.cdiv(tokens, block_tokens))
        i2_dot[grid](
            x_codes,
            activation_scale,
            packed,
            weight_scale,
            bias,
            y,
            tokens,
            rows,
            blocks,
            PLANE=plane,
            BLOCK_BYTES=I2_BLOCK_BYTES,
            TOKENS=block_tokens,
            ROWS=_DOT_ROWS,
            num_warps=4,
            enable_fp_fusion=False,
            **epilogue,
        )
        return y
    block_tokens = min(_TOKENS, triton.next_power_of_2(tokens))
    grid = (triton.cdiv(rows, _ROWS), triton.cdiv(tokens, block_tokens))
    _i2_words[grid](
        x_codes.view(torch.int32),
        activation_scale,
        packed.view(torch.int32),
        weight_scale,
        bias,
        y,
        tokens,
        rows,
        row_bytes // 4,
        x_codes.shape[1] // 4,
        blocks * (I2_BLOCK_BYTES // 4),
        PLANE_WORDS=plane // 4,
        BLOCK_WORDS=I2_BLOCK_BYTES // 4,
        TOKENS=block_tokens,
        ROWS=_ROWS,
        WORDS=_WORDS,
        DP4A=has_dp4a(x_codes),
        num_warps=4,
        enable_fp_fusion=False,
        **epilogue,
    )
    return y


def nm_bitmap_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    pattern: NMPattern,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """The same of nm-bitmap rows: packed uint8 [out_features, nm_bitmap_row_bytes(...)]."""
    tokens, in_features = x_codes.shape
    rows, row_bytes = packed.shape
    assert row_bytes == nm_bitmap_row_bytes(pattern, in_features), (row_bytes, in_features)
    chunks = -(-in_features // NM_BITMAP_CHUNK_WEIGHTS)
    x_codes = filled(x_codes, 0, chunks * NM_BITMAP_CHUNK_WEIGHTS - in_features)
    # [tokens, word of a chunk, chunk]: neighbouring threads, which hold neighbouring chunks, then
    # read neighbouring words.
    x_words = x_codes.view(torch.int32).view(tokens, chunks, 16).transpose(1, 2).contiguous()
    y = torch.empty((tokens, rows), dtype=dtype, device=x_codes.device)
    block_tokens = min(_TOKENS, triton.next_power_of_2(tokens))
    _bitmap_words[(triton.cdiv(rows, _ROWS), triton.cdiv(tokens, block_tokens))](
        x_words,
        activation_scale,
        packed,
        _signed_codes(x_codes.device),
        weight_scale,
        bias,
        y,
        tokens,
        rows,
        row_bytes,
        chunks,
        SIGN_BYTES=nm_bitmap_sign_bytes(pattern),
        TOKENS=block_tokens,
        ROWS=_ROWS,
        CHUNKS=_CHUNKS,
        DP4A=has_dp4a(x_codes),
        num_warps=4,
        enable_fp_fusion=False,
        ONE_SCALE=weight_scale.numel() == 1,
        HAS_BIAS=bias is not None,
    )
    return y


@cache
def _signed_codes(device: torch.device) -> Tensor:
    """int32 [256]: for nibble * 16 + signs the four codes as bytes, signs in the order of the ones."""
    table = np.zeros((16, 16, 4), np.int8)
    for nibble in range(16):
        for signs in range(16):
            used = 0
            for bit in range(4):
                if nibble >> bit & 1:
                    table[nibble, signs, bit] = 1 - 2 * (signs >> used & 1)
                    used += 1
    return torch.from_numpy(table.reshape(256, 4).view(np.int32)[:, 0].copy()).to(device)


@triton.jit
def _i2_words(
    x_words,
    activation_scale,
    packed,
    weight_scale,
    bias,
    y,
    tokens,
    rows,
    row_words,
    x_row_words,
    full_words,
    PLANE_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    DP4A: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    # Everything is [tokens, rows, words] from the start: one layout, nothing to move between threads.
    lane = tl.arange(0, WORDS)[None, None, :]
    code_row = packed + row.to(tl.int64)[None, :, None] * row_words
    x_row = x_words + token[:, None, None] * x_row_words
    sums = tl.zeros([TOKENS, ROWS, WORDS], dtype=tl.int32)
    x_sums = tl.zeros([TOKENS, 1, WORDS], dtype=tl.int32)
    ones = tl.zeros([TOKENS, 1, WORDS], dtype=tl.int32) + 0x01010101
    for start in range(0, row_words, WORDS):
        word = start + lane
        codes = tl.load(
            code_row + word, mask=(row < rows)[None, :, None] & (word < row_words), other=0
        )
        # Word `word` holds four bytes of a block; its four fields are so many words of x apart.
        first = word // BLOCK_WORDS * (4 * BLOCK_WORDS) + word % BLOCK_WORDS
        apart = BLOCK_WORDS
        if PLANE_WORDS > 0:
            in_tail = word >= full_words
            first = tl.where(in_tail, full_words * 4 + (word - full_words), first)
            apart = tl.where(in_tail, PLANE_WORDS, BLOCK_WORDS)
        for field in tl.static_range(4):
            x = tl.load(
                x_row + (first + field * apart),
                mask=(token < tokens)[:, None, None] & (word < row_words),
                other=0,
            )
            four = (codes >> (2 * field)) & 0x03030303
            left = tl.broadcast_to(four, [TOKENS, ROWS, WORDS])
            right = tl.broadcast_to(x, [TOKENS, ROWS, WORDS])
            sums = dot4(left, right, sums, False, DP4A)
            x_sums = dot4(ones, x, x_sums, False, DP4A)
    # Fields are codes plus one, so the sum exceeds the wanted one by that of the activations.
    total = tl.sum(sums, axis=2) - tl.sum(x_sums, axis=2)
    store_scaled(
        total,
        activation_scale,
        weight_scale,
        bias,
        y,
        token,
        row,
        tokens,
        rows,
        ONE_SCALE,
        HAS_BIAS,
    )


@triton.jit
def _bitmap_words(
    x_words,
    activation_scale,
    packed,
    table,
    weight_scale,
    bias,
    y,
    tokens,
    rows,
    row_bytes,
    chunks,
    SIGN_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    DP4A: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, CHUNKS)[None, None, :]
    code_row = packed + row.to(tl.int64)[None, :, None] * row_bytes
    x_row = x_words + token[:, None, None] * 16 * chunks
    sums = tl.zeros([TOKENS, ROWS, CHUNKS], dtype=tl.int32)
    for start in range(0, chunks, CHUNKS):
        chunk = start + lane
        inside = (row < rows)[None, :, None] & (chunk < chunks)
        record = code_row + chunk * (SIGN_BYTES + 8)
        signs = tl.zeros([1, ROWS, CHUNKS], dtype=tl.int64)
        for byte in tl.static_range(SIGN_BYTES):
            signs |= tl.load(record + byte, mask=inside, other=0).to(tl.int64) << (8 * byte)
        bitmap = tl.zeros([1, ROWS, CHUNKS], dtype=tl.int64)
        for byte in tl.static_range(8):
            loaded = tl.load(record + SIGN_BYTES + byte, mask=inside, other=0)
            bitmap |= loaded.to(tl.int64) << (8 * byte)
        for word in tl.static_range(16):
            nibble = ((bitmap >> (4 * word)) & 15).to(tl.int32)
            codes = tl.load(table + nibble * 16 + (signs & 15).to(tl.int32))
            x = tl.load(
                x_row + word * chunks + chunk,
                mask=(token < tokens)[:, None, None] & (chunk < chunks),
                other=0,
            )
            left = tl.broadcast_to(codes, [TOKENS, ROWS, CHUNKS])
            right = tl.broadcast_to(x, [TOKENS, ROWS, CHUNKS])
            sums = dot4(left, right, sums, True, DP4A)
            pairs = (nibble & 5) + ((nibble >> 1) & 5)
            signs = signs >> ((pairs & 3) + (pairs >> 2)).to(tl.int64)
    store_scaled(
        tl.sum(sums, axis=2),
        activation_scale,
        weight_scale,
        bias,
        y,
        token,
        row,
        tokens,
        rows,
        ONE_SCALE,
        HAS_BIAS,
    )
