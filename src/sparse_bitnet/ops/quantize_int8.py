# SPDX-License-Identifier: Apache-2.0
"""int8 activations with one scale a token (absmax), as BitNet b1.58 defines them."""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_values
from sparse_bitnet.ops.operands import SCALE_FLOOR, empty_tokens


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 per token: 127 / max(|x|) over the last dimension, maximum at least 1e-5.

    Args:
        x: float tensor [..., features].

    Returns (int8 codes [..., features], float32 activation_scale [..., 1]).
    """
    return torch.ops.sparse_bitnet.quantize_int8(x.detach())


def quantize_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_int8` in plain PyTorch: what every kernel returns, bit for bit."""
    values = x.float().contiguous()
    absmax = values.abs().amax(-1, keepdim=True).clamp_min(SCALE_FLOOR)
    codes = (values * (127.0 / absmax)).round().clamp(-128, 127).to(torch.int8)
    return codes, absmax / 127.0


define(
    "quantize_int8(Tensor x) -> (Tensor codes, Tensor activation_scale)",
    quantize_int8_reference,
    lambda x: empty_tokens(x, x.shape[-1]),
    takes=takes_values,
    cpu=True,
    cuda="quantize.quantize_int8",
)
