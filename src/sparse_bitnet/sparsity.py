"""N:M semi-structured sparsity: which n of every m consecutive weights are kept.

Groups are contiguous along `in_features` (the last dimension). A weight is kept when fewer than n
weights of its group come before it in the order "larger magnitude first, lower index first", so every
group keeps exactly n and the result does not depend on a sorting routine (paper, section 2.2).
"""

import torch
from torch import Tensor

from sparse_bitnet.pattern import MAX_GROUP, NMPattern

__all__ = [
    "MAX_GROUP",
    "NMPattern",
    "count_flips",
    "magnitude_keys",
    "mask_flip_rate",
    "nm_mask",
    "nm_mask_reference",
    "pack_mask",
    "unpack_mask",
    "word_dtype",
]


def nm_mask(weight: Tensor, pattern: NMPattern) -> Tensor:
    """The n largest |weight| of every group of m, ties to the lower index.

    Args:
        weight: float tensor [..., in_features], in_features a multiple of m.
        pattern: which n of m.

    Returns a bool tensor of the same shape with exactly n ones in every group. No gradient flows.

    Raises `UserError` when m does not divide in_features.
    """
    pattern.check_divides(weight.shape[-1], "(nm_mask)")
    return torch.ops.sparse_bitnet.nm_mask(weight.detach(), pattern.n, pattern.m)


def mask_flip_rate(previous: Tensor, current: Tensor) -> Tensor:
    """Share of positions where two masks differ, in [0, 1] (paper, eq. 6).

    Args:
        previous, current: bool tensors of one shape.

    Returns a float64 scalar tensor.
    """
    assert previous.shape == current.shape, (previous.shape, current.shape)
    return (previous ^ current).sum(dtype=torch.float64) / current.numel()


def word_dtype(m: int) -> torch.dtype:
    """Of a group's mask as one integer: the smallest of uint8, int16 and int32 with m bits."""
    return torch.uint8 if m <= 8 else torch.int16 if m <= 16 else torch.int32


def pack_mask(mask: Tensor, m: int) -> Tensor:
    """One integer a group, bit j set where its weight j is kept.

    Args:
        mask: bool [..., in_features], in_features a multiple of m.
        m: size of a group.

    Returns `word_dtype(m)` [..., in_features / m]; for m = 8 the little-endian bitmap of the mask.
    """
    lanes = mask.unflatten(-1, (-1, m))
    words = lanes[..., 0].to(word_dtype(m))
    for lane in range(1, m):
        words |= lanes[..., lane].to(words.dtype) << lane
    return words


def unpack_mask(words: Tensor, m: int) -> Tensor:
    """Inverse of `pack_mask`: bool [..., in_features]."""
    lane = torch.arange(m, dtype=words.dtype, device=words.device)
    return (words.unsqueeze(-1) >> lane & 1).bool().flatten(-2)


def count_flips(previous: Tensor, current: Tensor) -> Tensor:
    """Positions where two masks of `pack_mask` differ, int64 scalar."""
    assert (previous.shape, previous.dtype) == (current.shape, current.dtype)
    bits = (previous ^ current).contiguous().view(torch.uint8)
    # Ones of each byte: of pairs of bits, of fours, of all eight.
    bits = bits - (bits >> 1 & 0x55)
    bits = (bits & 0x33) + (bits >> 2 & 0x33)
    return (bits + (bits >> 4) & 0x0F).sum(dtype=torch.int64)


def magnitude_keys(weight: Tensor) -> Tensor:
    """Integers that order like |weight|: the bits of the absolute value.

    Comparing integers gives a total order (NaN above infinity), the same one in every kernel, and it
    is exact: no comparison depends on flush-to-zero modes.
    """
    if weight.dtype == torch.float64:
        return weight.abs().view(torch.int64)
    return weight.float().abs().view(torch.int32)


def nm_mask_reference(weight: Tensor, n: int, m: int) -> Tensor:
    """Compare and count: m passes over the weights, no sorting. Defines what every kernel returns."""
    if n == m:
        return torch.ones(weight.shape, dtype=torch.bool, device=weight.device)
    keys = magnitude_keys(weight.contiguous()).unflatten(-1, (-1, m))
    lane = torch.arange(m, device=weight.device)
    ahead = torch.zeros(keys.shape, dtype=torch.int8, device=weight.device)
    for j in range(m):
        other = keys[..., j : j + 1]
        ahead += (other > keys) | ((other == keys) & (lane > j))
    return (ahead < n).flatten(-2)


# Registered by hand rather than through @custom_op, whose call costs three times as much.
_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")
_LIBRARY.define("nm_mask(Tensor weight, int n, int m) -> Tensor")
_LIBRARY.impl("nm_mask", nm_mask_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sparse_bitnet::nm_mask", lib=_LIBRARY)
def _(weight: Tensor, n: int, m: int) -> Tensor:
    return torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
