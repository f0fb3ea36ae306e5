# SPDX-License-Identifier: Apache-2.0
"""int8 products on tensor cores, scaled where the sums are: with int8 codes, and with packed i2 rows.

Sums are [rows of the weight, tokens], weights the left operand: rows belong to a warp, so a packed
weight is decoded once, in registers, whatever the tokens. int32 sums never reach memory. Tiles are
searched for each shape and power of two of tokens, on the GPU that runs them.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.triton import matvec
from sparse_bitnet.ops.triton.epilogue import COMPILED, store_scaled
from sparse_bitnet.packing.formats import I2_BLOCK_BYTES

SMALLEST_TILE, WIDEST_TILE = 16, 64
"""Tokens of a tile with packed weights."""

BLOCK = tl.constexpr(I2_BLOCK_BYTES)


def int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    ternary: bool = True,
) -> Tensor:
    """See `ops.int8_linear`."""
    x = x_codes.reshape(-1, x_codes.shape[-1]).contiguous()
    sizes = (len(x), *codes.shape)
    y, scales = prepare(x, activation_scale, len(codes), weight_scale, dtype)
    if y.numel():
        is_even, near = codes.shape[1] % 128 == 0, triton.next_power_of_2(len(x))
        more = {"NEAR": near, "IS_EVEN": is_even, "enable_fp_fusion": False}
        dense_dot[_grid](x, codes.contiguous(), y, *scales, bias, *sizes, **more)
    return y.view(*x_codes.shape[:-1], len(codes))


def packed_int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    packed: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `ops.packed_int8_linear`."""
    (rows, row_bytes), width = packed.shape, x_codes.shape[-1]
    x = F.pad(x_codes.reshape(-1, width), (0, 4 * row_bytes - width)).contiguous()
    y, scales = prepare(x, activation_scale, rows, weight_scale, dtype)
    if not y.numel():
        pass
    elif len(x) <= matvec.MAX_TOKENS:
        matvec.launch(x, packed, y, *scales, bias)
    else:
        sizes = (len(x), rows, row_bytes // I2_BLOCK_BYTES)
        tile = min(WIDEST_TILE, max(SMALLEST_TILE, triton.next_power_of_2(len(x))))
        more = {"TOKENS": tile, "enable_fp_fusion": False}
        i2_dot[_grid](x, packed, y, *scales, bias, *sizes, **more)
    return y.view(*x_codes.shape[:-1], rows)


def prepare(
    x: Tensor, activation_scale: Tensor, rows: int, weight_scale: Tensor, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Room for the output, and the scales: one a token, one a row of the weight."""
    y = torch.empty((len(x), rows), dtype=dtype, device=x.device)
    return y, (activation_scale.contiguous(), weight_scale.expand(rows).contiguous())


def _grid(sizes: dict[str, int]) -> tuple[int, int]:
    rows, tokens = sizes["rows"], sizes["tokens"]
    return triton.cdiv(rows, sizes["ROWS"]), triton.cdiv(tokens, sizes["TOKENS"])


def searched(key: list[str], names: str, *configs: tuple[int, ...]):
    """Decorator: the fastest of `configs`, sizes named by `names`, then warps and stages, for each
    `key`. Where kernels are interpreted, the first."""
    tried = [
        triton.Config(
            dict(zip(names.split(), sizes, strict=True)), num_warps=warps, num_stages=stages
        )
        for *sizes, warps, stages in configs
    ]
    return triton.autotune(tried if COMPILED.value else tried[:1], key, warmup=5, rep=20)


@searched(
    ["rows", "columns", "NEAR"],
    "ROWS TOKENS DEPTH",
    (64, 16, 128, 4, 4),
    (64, 64, 128, 4, 4),
    (128, 64, 128, 4, 3),
    (128, 128, 128, 8, 3),
    (128, 256, 128, 8, 3),
    (64, 256, 128, 8, 3),
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
    store_scaled(sums, y, activation_scale, weight_scale, bias, row, token, rows, tokens)


# Four bytes at once: a field of each, 0, 1 or 2; plus 127 it is 127, 128 or 129, without a carry, and
# with the highest bit turned over -1, 0 or 1.
DECODE = tl.constexpr(
    tuple(
        f"{{ .reg .b32 t; shr.u32 t, $1, {shift}; and.b32 t, t, 0x03030303; "
        "add.u32 t, t, 0x7F7F7F7F; xor.b32 $0, t, 0x80808080; }"
        for shift in (0, 2, 4, 6)
    )
)


@triton.jit
def _decoded(codes, FIELD: tl.constexpr):
    """int8 codes of one field of every byte."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            DECODE[FIELD], "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        return (((codes >> (2 * FIELD)) & 3).to(tl.int8) - 1).to(tl.int8)


@searched(
    ["rows", "blocks", "TOKENS"],
    "ROWS SPLIT",
    (16, 4, 4, 3),
    (64, 1, 4, 4),
    (32, 4, 4, 2),
    (128, 1, 8, 3),
)
@triton.jit
def i2_dot(
    x_codes,
    packed,
    y,
    activation_scale,
    weight_scale,
    bias,
    tokens,
    rows,
    blocks,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The same of packed rows, whose blocks are split over programs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    byte = tl.arange(0, BLOCK)
    w_at = packed + (row % rows).to(tl.int64)[:, None] * (blocks * BLOCK) + byte[None, :]
    x_at = x_codes + (token % tokens)[None, :] * (blocks * BLOCK * 4) + byte[:, None]
    if SPLIT == 1:
        sums = tl.zeros([ROWS, TOKENS], dtype=tl.int32)
    else:
        # So many blocks side by side, each with a warp of its own: few rows then fill the machine too.
        part = tl.arange(0, SPLIT)[:, None, None]
        w_at = w_at[None] + part * BLOCK
        x_at = x_at[None] + part * (BLOCK * 4)
        sums = tl.zeros([SPLIT, ROWS, TOKENS], dtype=tl.int32)
    for block in range(0, blocks, SPLIT):
        if SPLIT > 1:
            inside = part < blocks - block
        codes = tl.load(w_at) if SPLIT == 1 else tl.load(w_at, mask=inside, other=0)
        for field in tl.static_range(4):
            x_field = x_at + field * BLOCK
            x = tl.load(x_field) if SPLIT == 1 else tl.load(x_field, mask=inside, other=0)
            sums = tl.dot(_decoded(codes, field), x, sums, out_dtype=tl.int32)
        w_at += SPLIT * BLOCK
        x_at += SPLIT * BLOCK * 4
    if SPLIT > 1:
        sums = tl.sum(sums, axis=0)
    store_scaled(sums, y, activation_scale, weight_scale, bias, row, token, rows, tokens)
