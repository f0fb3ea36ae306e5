# SPDX-License-Identifier: Apache-2.0
"""int8 activations in the order of a pattern's 2:4 windows: the operand of `sparse_int8_linear`."""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.operands import empty_tokens
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.ops.windows import gather_index, window_layout
from sparse_bitnet.pattern import NMPattern


def quantize_windows(x: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    """Int8 activations per token in the order of a pattern's windows.

    Args:
        x: float [..., in_features].
        pattern: of the weights; see `windows.window_layout`.

    Returns (int8 [..., K'], K' a multiple of 32, zeros in columns that fill up; float32 [..., 1]).
    """
    return torch.ops.sparse_bitnet.quantize_windows(x, pattern.n, pattern.m)


def quantize_windows_reference(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """`quantize_windows` in plain PyTorch: what every kernel returns, bit for bit."""
    codes, activation_scale = quantize_int8_reference(x)
    index = gather_index(NMPattern(n, m), x.shape[-1]).to(x.device)
    return torch.where(index < 0, 0, codes[..., index.clamp_min(0)]), activation_scale


define(
    "quantize_windows(Tensor x, int n, int m) -> (Tensor codes, Tensor activation_scale)",
    quantize_windows_reference,
    lambda x, n, m: empty_tokens(x, window_layout(NMPattern(n, m)).width(x.shape[-1])),
    cuda="quantize.quantize_windows",
)
