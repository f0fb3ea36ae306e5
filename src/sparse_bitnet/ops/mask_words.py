# SPDX-License-Identifier: Apache-2.0
"""Masks as one integer per group: how they are stored from step to step and compared."""

import torch
from torch import Tensor


def word_dtype(m: int) -> torch.dtype:
    """Return the type of a group's mask: the smallest of uint8, int16 and int32 with m bits."""
    return torch.uint8 if m <= 8 else torch.int16 if m <= 16 else torch.int32


def pack_mask(mask: Tensor, m: int) -> Tensor:
    """Pack each group of a mask into one integer; bit j is set if weight j is kept.

    Args:
        mask: bool [..., in_features], in_features a multiple of m.
        m: size of a group.

    Returns `word_dtype(m)` [..., in_features / m]; for m = 8 the little-endian bitmap of the mask.
    """
    if m == 8 and mask.storage_offset() % 8 == 0:
        # Eight bytes of 0 or 1 as one integer: the product moves byte j to bit 56 + j; no two bits meet.
        eights = mask.contiguous().view(torch.int64)
        return (eights * 0x0102040810204080 >> 56).to(torch.uint8)
    lanes = mask.unflatten(-1, (-1, m))
    words = lanes[..., 0].to(word_dtype(m))
    for lane in range(1, m):
        words |= lanes[..., lane].to(words.dtype) << lane
    return words


def unpack_mask(words: Tensor, m: int) -> Tensor:
    """Inverse of `pack_mask`: bool [..., in_features]."""
    lane = torch.arange(m, dtype=words.dtype, device=words.device)
    return (words.unsqueeze(-1) >> lane & 1).bool().flatten(-2)


def byte_flips(previous: Tensor, current: Tensor) -> Tensor:
    """Return in how many positions each byte of two masks of `pack_mask` differs, uint8."""
    assert (previous.shape, previous.dtype) == (current.shape, current.dtype)
    bits = (previous ^ current).contiguous().view(torch.uint8)
    # Ones of each byte: of pairs of bits, of fours, of all eight.
    bits = bits - (bits >> 1 & 0x55)
    bits = (bits & 0x33) + (bits >> 2 & 0x33)
    return bits + (bits >> 4) & 0x0F


def mask_flip_rate(previous: Tensor, current: Tensor) -> Tensor:
    """Return the share of positions where two bool masks of one shape differ (paper, eq. 6), a
    float64 scalar in [0, 1]."""
    assert previous.shape == current.shape, (previous.shape, current.shape)
    return (previous ^ current).sum(dtype=torch.float64) / current.numel()
