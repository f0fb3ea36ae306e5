# SPDX-License-Identifier: Apache-2.0
"""int8 activations with one scale per token (absmax), as BitNet b1.58 defines them.

Features keep their order, or are put into that of a pattern's 2:4 windows for `sparse_int8_linear`.
"""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_values
from sparse_bitnet.ops.windows import gather_index
from sparse_bitnet.packing.formats import SCALE_FLOOR
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.built_in import hadamard


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each token symmetrically to int8: x times 127 / max(|x|), the maximum being at least 1e-5.

    Args:
        x: float tensor [..., features].

    Returns (int8 codes [..., features], float32 activation_scale [..., 1]).
    """
    if x.is_cuda and torch.compiler.is_compiling():
        return quantize_int8_reference(x.detach())  # fused with what is before and after
    return torch.ops.sparse_bitnet.quantize_int8(x.detach())


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_int8` in plain PyTorch: what every kernel returns, bit for bit."""
    values = x.float().contiguous()
    absmax = values.abs().amax(-1, keepdim=True).clamp_min(SCALE_FLOOR)
    codes = (values * (127.0 / absmax)).round().clamp(-128, 127).to(torch.int8)
    return codes, absmax / 127.0


def quantize_windows(x: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    """Quantise each token to int8, with features in the order of a pattern's windows.

    Args:
        x: float [..., in_features].
        pattern: the weights' pattern; see `windows.window_layout`.

    Returns (int8 [..., K'], K' a multiple of 32, with zeros in the added columns; float32 [..., 1]).
    """
    return torch.ops.sparse_bitnet.quantize_windows(x, pattern.n, pattern.m)


def quantize_windows_reference(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """`quantize_windows` in plain PyTorch: what every kernel returns, bit for bit."""
    codes, activation_scale = quantize_int8_reference(x)
    index = gather_index(NMPattern(n, m), x.shape[-1], x.device)
    return torch.where(index < 0, 0, codes[..., index.clamp_min(0)]), activation_scale


define(
    "quantize_int8(Tensor x) -> (Tensor codes, Tensor activation_scale)",
    quantize_int8_reference,
    takes=takes_values,
)
define(
    "quantize_windows(Tensor x, int n, int m) -> (Tensor codes, Tensor activation_scale)",
    quantize_windows_reference,
)
define(
    "hadamard(Tensor x, int block) -> Tensor",
    hadamard,
    takes=lambda x, block: x.dtype == torch.float32 and takes_values(x, block),
)
