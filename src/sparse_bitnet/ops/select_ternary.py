# SPDX-License-Identifier: Apache-2.0
"""BitNet b1.58's ternary codes of a weight: their scale, the mean magnitude of the matrix, and codes
with N:M mask in one pass over it.

Codes are computed in float32 whatever the type of the input, so a bfloat16 master and its float32 copy
give the same codes.
"""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_groups, takes_values
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.packing.formats import SCALE_FLOOR


def absmean(weight: Tensor) -> Tensor:
    """Return mean(|weight|) over the whole matrix, at least 1e-5: the ternary weight scale.

    The sum is accumulated in float64 and rounded to float32 once. Another order of summation (threads,
    shards, kernels) therefore changes the float32 only if the exact mean lies within about numel *
    2**-53 of a rounding boundary, relatively. The scale of an empty weight is 1e-5. Returns a float32
    scalar tensor without gradient.
    """
    return torch.ops.sparse_bitnet.absmean(weight.detach())


def absmean_reference(weight: Tensor) -> Tensor:
    """`absmean` in plain PyTorch; kernels may differ in the last bit, since they add in another order."""
    return mean_to_scale(abs_sum(weight), weight.numel())


def abs_sum(weight: Tensor) -> Tensor:
    """Return sum(|weight|), a float64 scalar, for the `absmean` of a matrix that lies in parts."""
    # Row sums first: a float64 copy of a whole matrix would be twice its size.
    magnitudes = weight.abs()
    if weight.dim() > 1:
        magnitudes = magnitudes.flatten(0, -2).sum(-1, dtype=torch.float64)
    return magnitudes.sum(dtype=torch.float64)


def mean_to_scale(total: Tensor, count: int | Tensor) -> Tensor:
    """Return the float32 weight scale of `count` weights whose magnitudes sum to `total` (float64)."""
    count = count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
    return (total / count).float().clamp_min(SCALE_FLOOR)


def quantize_ternary(weight: Tensor, weight_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ternary codes, clip(round_half_even(weight / weight_scale), -1, 1), and the scale.

    Args:
        weight: float tensor of any shape.
        weight_scale: float32 scalar, positive; default: `absmean(weight)`.

    Returns (int8 codes of the shape of `weight`, float32 scalar scale).
    """
    scale = absmean(weight) if weight_scale is None else weight_scale
    codes, _ = select_ternary(weight.detach(), scale, 1, 1)
    return codes, scale


def select_ternary_reference(
    weight: Tensor, weight_scale: Tensor, n: int, m: int
) -> tuple[Tensor, Tensor]:
    """Codes of the kept weights, zero elsewhere, and the mask: what every kernel returns, bit for bit.

    Args:
        weight: float [..., in_features], in_features a multiple of m.
        weight_scale: float32 scalar.
        n, m: keep n of every m; see `nm_mask`.

    Returns (int8 codes, bool mask), both of the shape of `weight`.
    """
    weight = weight.contiguous()
    mask = nm_mask_reference(weight, n, m)
    codes = (weight.float() / weight_scale).round().clamp(-1, 1).to(torch.int8)
    return codes * mask, mask


def quantize_groups_reference(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Do `quantize_ternary` for each run of `size` weights of a row.

    Returns int8 codes of the shape of `weight`, and float32 scales [..., in_features / size].
    """
    runs = weight.unflatten(-1, (-1, size))
    scale = mean_to_scale(runs.abs().sum(-1, dtype=torch.float64), size)
    codes = (runs.float() / scale.unsqueeze(-1)).round().clamp(-1, 1).to(torch.int8)
    return codes.flatten(-2), scale


def _takes(weight: Tensor, weight_scale: Tensor, n: int, m: int) -> bool:
    is_one = weight_scale.dim() == 0 and weight_scale.dtype == torch.float32
    if not is_one or weight_scale.device != weight.device:
        return False
    # Below, weight_scale / 2 need not be a float32 and the CPU kernel's comparison would not be exact.
    is_small = weight.device.type == "cpu" and not weight_scale.item() >= 2.0**-125
    return not is_small and takes_groups(weight, n, m)


define("absmean(Tensor weight) -> Tensor", absmean_reference, takes=takes_values)
define(
    "quantize_groups(Tensor weight, int size) -> (Tensor codes, Tensor weight_scale)",
    quantize_groups_reference,
    takes=takes_values,
)
select_ternary = define(
    "select_ternary(Tensor weight, Tensor weight_scale, int n, int m) -> (Tensor codes, Tensor mask)",
    select_ternary_reference,
    takes=_takes,
)
