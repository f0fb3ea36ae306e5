# SPDX-License-Identifier: Apache-2.0
"""What every product ends with."""

import triton
import triton.language as tl


@triton.jit
def store_scaled(sums, y, activation_scale, weight_scale, bias, row, token, rows, tokens):
    """int32 sums [ROWS, TOKENS] -> y[token, row], every operation rounded as in the reference."""
    in_rows, in_tokens = row < rows, token < tokens
    of_token = tl.load(activation_scale + token, mask=in_tokens, other=0.0)
    of_row = tl.load(weight_scale + row, mask=in_rows, other=0.0)
    value = sums.to(tl.float32) * (of_token[None, :] * of_row[:, None])
    if bias is not None:
        value += tl.load(bias + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    at = token.to(tl.int64)[None, :] * rows + row[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=in_rows[:, None] & in_tokens[None, :])


COMPILED = tl.constexpr(isinstance(store_scaled, triton.JITFunction))
"""Whether kernels may use instructions of the hardware: not where they are interpreted."""
