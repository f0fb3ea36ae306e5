"""i2 rows through the integer tensor cores, for batches too large for `packed_matvec`'s own sums."""

import triton
import triton.language as tl

from sparse_bitnet.ops.triton.integer_dot import store_scaled


@triton.jit
def _i2_plane_products(
    sums,
    x_codes,
    packed,
    row,
    token,
    tokens,
    rows,
    byte,
    in_plane,
    first_byte,
    first_weight,
    x_row,
    row_bytes,
    PLANE: tl.constexpr,
):
    codes = tl.load(
        packed + row.to(tl.int64)[:, None] * row_bytes + (first_byte + byte)[None, :],
        mask=(row < rows)[:, None] & in_plane[None, :],
        other=0,
    )
    for field in tl.static_range(4):
        weight = ((codes >> (2 * field)) & 3).to(tl.int8) - 1
        x = tl.load(
            x_codes + token[:, None] * x_row + (first_weight + field * PLANE + byte)[None, :],
            mask=(token < tokens)[:, None] & in_plane[None, :],
            other=0,
        )
        sums += tl.dot(x, tl.trans(weight.to(tl.int8)), out_dtype=tl.int32)
    return sums


@triton.jit
def i2_dot(
    x_codes,
    activation_scale,
    packed,
    weight_scale,
    bias,
    y,
    tokens,
    rows,
    blocks,
    PLANE: tl.constexpr,
    BLOCK_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    byte = tl.arange(0, BLOCK_BYTES)
    x_row = blocks * (4 * BLOCK_BYTES) + 4 * PLANE
    row_bytes = blocks * BLOCK_BYTES + PLANE
    sums = tl.zeros([TOKENS, ROWS], dtype=tl.int32)
    for block in range(0, blocks):
        sums = _i2_plane_products(
            sums,
            x_codes,
            packed,
            row,
            token,
            tokens,
            rows,
            byte,
            byte < BLOCK_BYTES,
            block * BLOCK_BYTES,
            block * (4 * BLOCK_BYTES),
            x_row,
            row_bytes,
            BLOCK_BYTES,
        )
    if PLANE > 0:
        sums = _i2_plane_products(
            sums,
            x_codes,
            packed,
            row,
            token,
            tokens,
            rows,
            byte,
            byte < PLANE,
            blocks * BLOCK_BYTES,
            blocks * (4 * BLOCK_BYTES),
            x_row,
            row_bytes,
            PLANE,
        )
    store_scaled(
        sums,
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
