# SPDX-License-Identifier: Apache-2.0
"""RMSNorm with the int8 quantisation of what follows it: one pass over memory instead of five."""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.quantize_windows import empty_in_order, order_of, quantize_in_order
from sparse_bitnet.pattern import NMPattern


def norm_quantize(
    x: Tensor, weight: Tensor, epsilon: float, windows: NMPattern | None
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then int8 per token, in the order of a pattern's windows or in its own.

    Args:
        x: float [..., features].
        weight: of the norm, [features].
        epsilon: added to the mean of the squares.
        windows: pattern of the weights that the product is with, None for the features' own order.

    Returns (int8 [..., features or K'], float32 activation_scale [..., 1]).
    """
    return torch.ops.sparse_bitnet.norm_quantize(x, weight, epsilon, *order_of(windows))


def norm_quantize_reference(
    x: Tensor, weight: Tensor, epsilon: float, n: int, m: int
) -> tuple[Tensor, Tensor]:
    """What transformers and `quantize_int8` compute one after the other, in the same types."""
    return quantize_in_order(rms_norm(x, weight, epsilon), n, m)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As transformers computes it: in float32, but for the product with `weight`."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(x.dtype)


define(
    "norm_quantize(Tensor x, Tensor weight, float epsilon, int n, int m) -> "
    "(Tensor codes, Tensor activation_scale)",
    norm_quantize_reference,
    lambda x, weight, epsilon, n, m: empty_in_order(x, x.shape[-1], n, m),
    cuda="quantize.norm_quantize",
)
