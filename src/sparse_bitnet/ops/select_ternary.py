# SPDX-License-Identifier: Apache-2.0
"""Ternary codes of a weight as in BitNet b1.58: their scale, the mean magnitude of the matrix, and codes
and N:M mask (as bools or as bits) in one pass over it.

Codes are computed in float32 whatever the type of the input, so a bfloat16 master and its float32 copy
give the same ones.
"""

import torch
from torch import Tensor

from sparse_bitnet.ops.backends import define, takes_groups, takes_values
from sparse_bitnet.ops.mask_words import count_flips, pack_mask, word_dtype
from sparse_bitnet.ops.nm_mask import nm_mask_reference
from sparse_bitnet.packing.formats import SCALE_FLOOR

# Below, weight_scale / 2 need not be a float32 and the CPU kernel's comparison would not be exact.
_SMALLEST_SCALE = 2.0**-125


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


def quantize_ternary(weight: Tensor, weight_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """codes = clip(round_half_even(weight / weight_scale), -1, 1).

    Args:
        weight: float tensor of any shape.
        weight_scale: float32 scalar; `absmean(weight)` when not given.

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


def select_ternary_bits_reference(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes as of `select_ternary`, by whatever kernel that has, the mask as of `pack_mask`, and its
    flips against `previous`.

    Returns (int8 codes, mask words, int64 scalar: 0 without `previous`).
    """
    codes, mask = select_ternary(weight, weight_scale, n, m)
    words = pack_mask(mask, m)
    flips = count_flips(words if previous is None else previous, words)
    return codes, words, flips


def _takes(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None = None
) -> bool:
    others = (weight_scale,) if previous is None else (weight_scale, previous)
    if weight_scale.dim() or weight_scale.dtype != torch.float32:
        return False
    if any(other.device != weight.device for other in others):
        return False
    too_small = weight.device.type == "cpu" and not weight_scale.item() >= _SMALLEST_SCALE
    return not too_small and takes_groups(weight, n, m)


def _fake(weight: Tensor, weight_scale: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    return codes, torch.empty_like(codes, dtype=torch.bool)


def _fake_bits(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    words = codes.new_empty((*weight.shape[:-1], weight.shape[-1] // m), dtype=word_dtype(m))
    return codes, words, codes.new_empty((), dtype=torch.int64)


define(
    "absmean(Tensor weight) -> Tensor",
    absmean_reference,
    lambda weight: weight.new_empty((), dtype=torch.float32),
    takes=takes_values,
    cuda="triton",
)
select_ternary = define(
    "select_ternary(Tensor weight, Tensor weight_scale, int n, int m) -> (Tensor codes, Tensor mask)",
    select_ternary_reference,
    _fake,
    takes=_takes,
    cuda="triton",
)
select_ternary_bits = define(
    "select_ternary_bits(Tensor weight, Tensor weight_scale, int n, int m, Tensor? previous) -> "
    "(Tensor codes, Tensor mask_words, Tensor flips)",
    select_ternary_bits_reference,
    _fake_bits,
    takes=_takes,
    cuda="triton",
)
