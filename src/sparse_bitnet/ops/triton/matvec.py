# SPDX-License-Identifier: Apache-2.0
"""i2 rows times one token or two: on the ordinary cores, four products an instruction (dp4a).

A warp reads its rows in the order they lie, 16 bytes a thread and row, against activations in
registers; it moves nothing between threads before the sums. More tokens are cheaper on tensor cores: a
row of 2,048 weights takes 55 instructions here, and about 45 more for each further token, where
`int8_dot` takes 103 for up to 16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.triton.epilogue import COMPILED, store_scaled
from sparse_bitnet.packing.formats import I2_BLOCK_BYTES

MAX_TOKENS = 2
ROWS = 8
WORDS = 128
"""Of 16 weights: what the threads of a warp read of a row at once."""

BLOCK_WORDS = tl.constexpr(I2_BLOCK_BYTES // 4)


def launch(
    x_codes: Tensor,
    packed: Tensor,
    y: Tensor,
    activation_scale: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
) -> None:
    """y [tokens, rows] of int8 x_codes [tokens, 4 * bytes of a row] and whole i2 blocks."""
    rows, row_bytes = packed.shape
    # Long rows are read by four warps together: else too little of the weight is under way.
    warps = 4 if row_bytes >= 4 * 4 * WORDS else 1
    i2_matvec[(triton.cdiv(rows, ROWS),)](
        x_codes.view(torch.int32),
        packed.view(torch.int32),
        y,
        activation_scale,
        weight_scale,
        bias,
        rows,
        row_bytes // I2_BLOCK_BYTES,
        TOKENS=len(x_codes),
        ROWS=ROWS,
        WORDS=WORDS * warps,
        num_warps=warps,
        enable_fp_fusion=False,
    )


@triton.jit
def _dot4(fields, x, total):
    """total + the products of four unsigned bytes and four signed ones."""
    if COMPILED:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [fields, x, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for byte in tl.static_range(4):
            total += ((fields >> (8 * byte)) & 255) * ((x << (24 - 8 * byte)) >> 24)
    return total


@triton.jit
def i2_matvec(
    x_words,
    packed,
    y,
    activation_scale,
    weight_scale,
    bias,
    rows,
    blocks,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """y [TOKENS, rows] = x @ codes.T, scaled, with a bias; four codes at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    lane = tl.arange(0, WORDS)[None, None, :]
    row_words = blocks * BLOCK_WORDS
    w_row = packed + (row % rows).to(tl.int64)[:, None, None] * row_words
    x_row = x_words + token[None, :, None] * (row_words * 4)
    sums = tl.zeros([ROWS, TOKENS, WORDS], dtype=tl.int32)
    x_sums = tl.zeros([1, TOKENS, WORDS], dtype=tl.int32)
    ones = tl.zeros([1, TOKENS, WORDS], dtype=tl.int32) + 0x01010101
    for start in range(0, row_words, WORDS):
        word = start + lane
        inside = word < row_words
        codes = tl.load(w_row + word, mask=inside, other=0)
        # A word holds four bytes of a block, whose four fields are as many words of x apart.
        first = word // BLOCK_WORDS * (4 * BLOCK_WORDS) + word % BLOCK_WORDS
        for field in tl.static_range(4):
            x = tl.load(x_row + first + field * BLOCK_WORDS, mask=inside, other=0)
            fields = (codes >> (2 * field)) & 0x03030303
            left = tl.broadcast_to(fields, [ROWS, TOKENS, WORDS])
            sums = _dot4(left, tl.broadcast_to(x, [ROWS, TOKENS, WORDS]), sums)
            x_sums = _dot4(ones, x, x_sums)
    # Fields are codes plus one, so the sum exceeds the wanted one by that of the activations.
    total = tl.sum(sums, axis=2) - tl.sum(x_sums, axis=2)
    store_scaled(total, y, activation_scale, weight_scale, bias, row, token, rows, TOKENS)
