# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of a weight matrix."""

from typing import TYPE_CHECKING

from sparse_bitnet.errors import UserError
from sparse_bitnet.variants.registry import Matrix, register_quantizer

if TYPE_CHECKING:
    from torch import Tensor

_FLOOR = 1e-5

Quantized = tuple["Tensor", "Tensor"]


def _rounded(weight: "Tensor", scale: "Tensor") -> Quantized:
    return (weight.float() / scale).round().clamp(-1, 1), scale


def _mean(total: "Tensor", count: "Tensor") -> "Tensor":
    return (total / count.clamp_min(1)).float().clamp_min(_FLOOR)


def _sum_and_count(values: "Tensor", kept: "Tensor | None") -> "Tensor":
    """float64 [2]: of the values that are kept."""
    import torch

    count = values.new_full((), values.numel(), dtype=torch.float64) if kept is None else kept.sum()
    values = values if kept is None else values * kept
    return torch.stack([values.double().sum(), count.double()])


@register_quantizer("absmean")
def absmean(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Rounded to multiples of mean |w|, one scale a matrix: BitNet b1.58's, and the paper's (Ma et al.,
    "The Era of 1-bit LLMs", 2024, eqs. 1-3)."""
    return _rounded(weight, _mean(*matrix.sum(_sum_and_count(weight.float().abs(), None))))


@register_quantizer("absmax")
def absmax(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Rounded to multiples of max |w|, one scale a matrix: symmetric round-to-nearest (Nagel et al., "A
    White Paper on Neural Network Quantization", 2021, section 2.2) at three levels."""
    magnitudes = weight.float().abs()
    # A process may hold no row.
    largest = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    return _rounded(weight, matrix.max(largest).clamp_min(_FLOOR))


@register_quantizer("per-channel")
def per_channel(weight: "Tensor", mask: "Tensor | None") -> Quantized:
    """As absmean, one scale for each output feature (as in Nagel et al., 2021, section 2.2.3)."""
    return _rounded(weight, weight.float().abs().mean(-1, keepdim=True).clamp_min(_FLOOR))


@register_quantizer("per-group")
def per_group(weight: "Tensor", mask: "Tensor | None", *, size: int = 64) -> Quantized:
    """As absmean, one scale for every `size` weights of a row (groups as in Frantar et al., "GPTQ", ICLR
    2023, section 4)."""
    if size < 1 or weight.shape[-1] % size:
        raise UserError(
            f"quantizer per-group: size={size} does not divide a row of {weight.shape[-1]} weights"
        )
    groups = weight.float().unflatten(-1, (-1, size))
    codes, scale = _rounded(groups, groups.abs().mean(-1, keepdim=True).clamp_min(_FLOOR))
    return codes.flatten(-2), scale.squeeze(-1)


@register_quantizer("twn")
def twn(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """±1 beyond 0.7 mean |w|, scaled by the mean of those magnitudes (Li et al., "Ternary Weight
    Networks", 2016, eqs. 5-6)."""
    magnitudes = weight.float().abs()
    threshold = 0.7 * _mean(*matrix.sum(_sum_and_count(magnitudes, None)))
    beyond = magnitudes > threshold
    kept = beyond if mask is None else beyond & mask
    return weight.sign() * beyond, _mean(*matrix.sum(_sum_and_count(magnitudes, kept)))


@register_quantizer("binary")
def binary(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """±1 at every kept position (zero counts as +1), scaled by the mean of those magnitudes (Rastegari
    et al., "XNOR-Net", ECCV 2016, eqs. 4-6). With 3:4 it is the weight format of "Sherry:
    Hardware-Efficient 1.25-Bit Ternary Quantization via Fine-grained Sparsification" (2026)."""
    scale = _mean(*matrix.sum(_sum_and_count(weight.float().abs(), mask)))
    return (weight >= 0).to(weight.dtype) * 2 - 1, scale
