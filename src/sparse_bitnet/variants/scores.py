# SPDX-License-Identifier: Apache-2.0
"""Which weights of a group are kept: the n highest scores."""

from typing import TYPE_CHECKING

from sparse_bitnet.variants.registry import Matrix, register_score

if TYPE_CHECKING:
    from torch import Tensor


@register_score("magnitude")
def magnitude(weight: "Tensor") -> "Tensor":
    """|weight|: the paper's (section 2.2)."""
    return weight.abs()


@register_score("wanda", sees_inputs=True)
def wanda(weight: "Tensor", *, matrix: Matrix) -> "Tensor":
    """|weight| times the norm of its input feature (Sun et al., "A Simple and Effective Pruning Approach
    for Large Language Models", ICLR 2024, eq. 1).

    The norm is that of calibration text (`convert_(..., calibration=...)`), and follows the training
    batches, as their root mean square; before the first of either every feature counts the same.
    """
    norm = matrix.input_norm
    return weight.abs() if norm is None else weight.abs() * norm.where(norm.any(), 1.0)


def decay_pruned(weight: "Tensor", mask: "Tensor", *, strength: float = 2e-4) -> "Tensor":
    """strength * weight where it is pruned."""
    return weight * ~mask * strength


@register_score("sr-ste", gradient=decay_pruned)
def sr_ste(weight: "Tensor") -> "Tensor":
    """|weight|, and pruned weights decay: their gradient gets `strength` times the weight (Zhou et al.,
    "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021, eq. 9)."""
    return weight.abs()


def soft_threshold(weight: "Tensor", mask: "Tensor", m: int) -> "Tensor":
    """sign(w) * (|w| - t) where kept, t the largest magnitude that its group prunes; see `s_ste`."""
    pruned = (weight.abs() * ~mask).unflatten(-1, (-1, m)).amax(-1, keepdim=True)
    shrunk = (weight.abs().unflatten(-1, (-1, m)) - pruned).flatten(-2).clamp_min(0)
    return weight.sign() * shrunk * mask


@register_score("s-ste", shrink=soft_threshold)
def s_ste(weight: "Tensor") -> "Tensor":
    """|weight|, and what is kept shrinks towards zero by the group's largest pruned magnitude, so that
    weights come and go continuously (Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4
    Sparse Pre-training", NeurIPS 2024, eq. 8). Its rescaling is the quantiser's scale; with
    full-precision weights nothing is rescaled."""
    return weight.abs()


@register_score("random")
def random(weight: "Tensor", *, seed: int = 0, matrix: Matrix) -> "Tensor":
    """Uniform in [0, 1) by position and seed, whatever the weight: the control. Layers of one shape
    share their masks, and they never change."""
    import torch

    rows, columns = weight.shape
    row = torch.arange(matrix.first_row, matrix.first_row + rows, device=weight.device)
    position = row[:, None] * columns + torch.arange(columns, device=weight.device)
    # The finaliser of SplitMix64; shifts are made logical by their masks.
    start = (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    word = position + (start - (1 << 64) if start >> 63 else start)
    word = (word ^ (word >> 30 & (1 << 34) - 1)) * -4658895280553007687
    word = (word ^ (word >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return (word >> 40 & (1 << 24) - 1).float() / (1 << 24)
