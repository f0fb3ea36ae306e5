# SPDX-License-Identifier: Apache-2.0
"""How inputs are quantised, per token. int8 (absmax, BitNet b1.58's) is the op `quantize_int8`."""

from typing import TYPE_CHECKING

from sparse_bitnet.variants.registry import register_activation, reserve

if TYPE_CHECKING:
    from torch import Tensor


reserve("activation", "int8")
reserve("activation", "none")


def hadamard(x: "Tensor") -> "Tensor":
    """Each block of features times an orthonormal Hadamard matrix; blocks are as long as the largest
    power of two that divides the features."""
    import torch

    features, dtype = x.shape[-1], x.dtype
    block, width = features & -features, 1
    x = x.float() if dtype == torch.float16 else x  # sums pass the end of float16
    while width < block:
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        width *= 2
    return (x * block**-0.5).to(dtype)


@register_activation("int4-hadamard", transform=hadamard)
def int4_hadamard(x: "Tensor") -> tuple["Tensor", "Tensor"]:
    """[-8, 7] in steps of mean |x| / sqrt(7), after a Hadamard transform that spreads outliers (Wang et
    al., "BitNet v2: Native 4-bit Activations with Hadamard Transformation", 2025, eqs. 4-6).

    Every converted layer has the transform; there only the output and down projections do.
    """
    values = x.float()
    scale = values.abs().mean(-1, keepdim=True).clamp_min(1e-5) * 7**-0.5
    return (values / scale).round().clamp(-8, 7).char(), scale
