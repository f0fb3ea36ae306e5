# SPDX-License-Identifier: Apache-2.0
"""The ternary weight scale of BitNet b1.58: the mean magnitude of a matrix."""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_values
from sparse_bitnet.ops.operands import SCALE_FLOOR


def absmean(weight: Tensor) -> Tensor:
    """mean(|weight|) over the whole matrix, at least 1e-5: the ternary weight scale.

    The sum is accumulated in float64 and rounded to float32 once, so that another order of summation
    (threads, shards, kernels) gives another float32 only when the exact mean lies within about
    numel * 2**-53 of a rounding boundary, relatively. An empty weight has the floor as its scale.
    Returns a float32 scalar tensor without gradient.
    """
    return torch.ops.sparse_bitnet.absmean(weight.detach())


def absmean_reference(weight: Tensor) -> Tensor:
    """`absmean` in plain PyTorch; kernels may differ in the last bit, since they add in another order."""
    return mean_to_scale(abs_sum(weight), weight.numel())


def abs_sum(weight: Tensor) -> Tensor:
    """sum(|weight|), float64 scalar: what `absmean` is made of, for a matrix that lies in parts."""
    # Row sums first: a float64 copy of a whole matrix would be twice its size.
    magnitudes = weight.abs()
    if weight.dim() > 1:
        magnitudes = magnitudes.flatten(0, -2).sum(-1, dtype=torch.float64)
    return magnitudes.sum(dtype=torch.float64)


def mean_to_scale(total: Tensor, count: int | Tensor) -> Tensor:
    """The float32 weight scale of `count` weights whose magnitudes sum to `total` (float64)."""
    count = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
    return (total / count).float().clamp_min(SCALE_FLOOR)


def _fake(weight: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float32, device=weight.device)


define(
    "absmean(Tensor weight) -> Tensor",
    absmean_reference,
    _fake,
    takes=takes_values,
    cpu=True,
    cuda="select.absmean",
)
