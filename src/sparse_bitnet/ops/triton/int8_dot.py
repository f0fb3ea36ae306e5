# SPDX-License-Identifier: Apache-2.0
"""int8 products on tensor cores, scaled where the sums are.

Sums are [rows of the weight, tokens], weights the left operand. int32 sums never reach memory. Tiles are
searched for each shape and power of two of tokens, on the GPU that runs them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparse_bitnet.ops.triton.epilogue import COMPILED, store_scaled


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
