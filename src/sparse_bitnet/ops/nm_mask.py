# SPDX-License-Identifier: Apache-2.0
"""N:M semi-structured sparsity: which n of every m consecutive weights are kept.

Groups are contiguous along `in_features` (the last dimension). A weight is kept when fewer than n
weights of its group come before it in the order "larger magnitude first, lower index first", so every
group keeps exactly n and the result does not depend on a sorting routine (paper, section 2.2).
"""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_groups
from sparse_bitnet.pattern import NMPattern


def nm_mask(weight: Tensor, pattern: NMPattern) -> Tensor:
    """Return the mask of the n largest |weight| of every group of m; ties go to the lower index.

    Args:
        weight: float tensor [..., in_features], in_features a multiple of m.
        pattern: n:m.

    Returns a bool tensor of the same shape with exactly n ones in every group. No gradient flows.

    Raises `UserError` when m does not divide in_features.
    """
    pattern.check_divides(weight.shape[-1], "(nm_mask)")
    return torch.ops.sparse_bitnet.nm_mask(weight.detach(), pattern.n, pattern.m)


def nm_mask_reference(weight: Tensor, n: int, m: int) -> Tensor:
    """Compare and count: m passes over the weights, no sorting. Defines what every kernel returns."""
    if n == m:
        return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    # As integers, the bits of |weight| have a total order (NaN above infinity) and no flush-to-zero mode.
    wide = weight.dtype == torch.float64
    magnitudes = (weight if wide else weight.float()).contiguous().abs()
    keys = magnitudes.view(torch.int64 if wide else torch.int32).unflatten(-1, (-1, m))
    lane = torch.arange(m, device=weight.device)
    ahead = torch.zeros(keys.shape, dtype=torch.int8, device=weight.device)
    for j in range(m):
        other = keys[..., j : j + 1]
        ahead += (other > keys) | ((other == keys) & (lane > j))
    return (ahead < n).flatten(-2)


define("nm_mask(Tensor weight, int n, int m) -> Tensor", nm_mask_reference, takes=takes_groups)
