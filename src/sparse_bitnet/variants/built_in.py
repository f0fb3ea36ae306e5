# SPDX-License-Identifier: Apache-2.0
"""The built-in scores, quantisers, activations and schedules, each with its source."""

from typing import TYPE_CHECKING, Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.variants.registry import (
    Matrix,
    register_activation,
    register_quantizer,
    register_schedule,
    register_score,
)

if TYPE_CHECKING:
    from torch import Tensor

Quantized = tuple["Tensor", "Tensor"]

_FLOOR = 1e-5


# Scores: which weights of a group are kept, the n highest.


@register_score("magnitude")
def magnitude(weight: "Tensor") -> "Tensor":
    """|weight|, the paper's score (section 2.2)."""
    return weight.abs()


@register_score("wanda", sees_inputs=True)
def wanda(weight: "Tensor", *, matrix: Matrix) -> "Tensor":
    """|weight| times the norm of its input feature (Sun et al., "A Simple and Effective Pruning Approach
    for Large Language Models", ICLR 2024, eq. 1).

    The norm is the root mean square over calibration data (`convert_(..., calibration=...)`), and then a
    running one over the training batches. Before either, all features count the same.
    """
    norm = matrix.input_norm
    return weight.abs() if norm is None else weight.abs() * norm.where(norm.any(), 1.0)


def decay_pruned(weight: "Tensor", mask: "Tensor", *, strength: float = 2e-4) -> "Tensor":
    """Return strength * weight where it is pruned, else 0."""
    return weight * ~mask * strength


@register_score("sr-ste", gradient=decay_pruned)
def sr_ste(weight: "Tensor") -> "Tensor":
    """|weight|; pruned weights decay, since `strength` times the weight is added to their gradient (Zhou
    et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021, eq.
    9)."""
    return weight.abs()


def soft_threshold(weight: "Tensor", mask: "Tensor", m: int) -> "Tensor":
    """Return sign(w) * (|w| - t) where kept, t the group's largest pruned magnitude; see `s_ste`."""
    weight = weight.float() if weight.itemsize < 4 else weight  # else the difference is rounded
    pruned = (weight.abs() * ~mask).unflatten(-1, (-1, m)).amax(-1, keepdim=True)
    shrunk = (weight.abs().unflatten(-1, (-1, m)) - pruned).flatten(-2).clamp_min(0)
    return weight.sign() * shrunk * mask


@register_score("s-ste", shrink=soft_threshold)
def s_ste(weight: "Tensor") -> "Tensor":
    """|weight|; kept weights shrink towards zero by the group's largest pruned magnitude, so that
    pruning is continuous (Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse
    Pre-training", NeurIPS 2024, eq. 8). Its rescaling is left to the quantiser's scale; full-precision
    weights are not rescaled."""
    return weight.abs()


@register_score("random")
def random(weight: "Tensor", *, seed: int = 0, matrix: Matrix) -> "Tensor":
    """Random score, uniform in [0, 1), from position and seed alone: the control experiment. Layers of
    one shape share their mask, and masks never change."""
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


# Quantisers: codes and scales of a weight matrix.


def _rounded(weight: "Tensor", scale: "Tensor") -> Quantized:
    """Return clip(round_half_even(weight / scale), -1, 1) as int8, by a kernel, and the scale."""
    import torch

    quotient = weight.float() / scale
    select = torch.ops.sparse_bitnet.select_ternary
    return select(quotient, quotient.new_ones(()), 1, 1)[0], scale


def _mean(values: "Tensor", kept: "Tensor | None", matrix: Matrix) -> "Tensor":
    """Return the mean of the kept values over the whole matrix; float32, at least `_FLOOR`."""
    import torch

    count = values.new_full((), values.numel(), dtype=torch.float64) if kept is None else kept.sum()
    values = values if kept is None else values * kept
    total, number = matrix.sum(torch.stack([values.double().sum(), count.double()]))
    return (total / number.clamp_min(1)).float().clamp_min(_FLOOR)


@register_quantizer("absmean")
def absmean(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Round to multiples of mean |w|, one scale per matrix: BitNet b1.58's and the paper's quantiser (Ma
    et al., "The Era of 1-bit LLMs", 2024, eqs. 1-3)."""
    return _rounded(weight, _mean(weight.float().abs(), None, matrix))


@register_quantizer("absmax")
def absmax(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Round to multiples of max |w|, one scale per matrix: symmetric round-to-nearest (Nagel et al., "A
    White Paper on Neural Network Quantization", 2021, section 2.2) with three levels."""
    magnitudes = weight.float().abs()
    # A process of a sharded model may hold no row.
    largest = magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(())
    return _rounded(weight, matrix.max(largest).clamp_min(_FLOOR))


@register_quantizer("per-channel")
def per_channel(weight: "Tensor", mask: "Tensor | None") -> Quantized:
    """Round to multiples of mean |w|, one scale per row (as in Nagel et al., 2021, section 2.2.3)."""
    return per_group(weight, mask, size=weight.shape[-1])


@register_quantizer("per-group")
def per_group(weight: "Tensor", mask: "Tensor | None", *, size: int = 64) -> Quantized:
    """Round to multiples of mean |w|, one scale for every `size` weights of a row (groups as in Frantar
    et al., "GPTQ", ICLR 2023, section 4)."""
    if size < 1 or weight.shape[-1] % size:
        raise UserError(
            f"quantizer per-group: size={size} does not divide a row of {weight.shape[-1]} weights"
        )
    import torch

    return torch.ops.sparse_bitnet.quantize_groups(weight, size)


@register_quantizer("twn")
def twn(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Return ±1 beyond 0.7 mean |w|, scaled by the mean of those magnitudes (Li et al., "Ternary Weight
    Networks", 2016, eqs. 5-6)."""
    magnitudes = weight.float().abs()
    threshold = 0.7 * _mean(magnitudes, None, matrix)
    beyond = magnitudes > threshold
    kept = beyond if mask is None else beyond & mask
    return weight.sign() * beyond, _mean(magnitudes, kept, matrix)


@register_quantizer("binary")
def binary(weight: "Tensor", mask: "Tensor | None", *, matrix: Matrix) -> Quantized:
    """Return ±1 at every kept position (zero counts as +1), scaled by the mean of those magnitudes
    (Rastegari et al., "XNOR-Net", ECCV 2016, eqs. 4-6). With 3:4 it is the weight format of "Sherry:
    Hardware-Efficient 1.25-Bit Ternary Quantization via Fine-grained Sparsification" (2026)."""
    scale = _mean(weight.float().abs(), mask, matrix)
    return (weight >= 0).to(weight.dtype) * 2 - 1, scale


# Activations: how inputs are quantised, per token. int8 (absmax, BitNet b1.58's) is an op.


def hadamard(x: "Tensor", block: int = 0) -> "Tensor":
    """Multiply each block of features by an orthonormal Hadamard matrix. The block size is a power of
    two; 0 means the largest one that divides the number of features."""
    import torch

    features, dtype, width = x.shape[-1], x.dtype, 1
    block = block or features & -features
    x = x.float() if dtype == torch.float16 else x  # sums can exceed the range of float16
    while width < block:
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        width *= 2
    return (x * block**-0.5).to(dtype)


@register_activation("int4-hadamard", transform=hadamard)
def int4_hadamard(x: "Tensor") -> tuple["Tensor", "Tensor"]:
    """Quantise to integers in [-8, 7] in steps of mean |x| / sqrt(7), after a Hadamard transform that
    spreads outliers (Wang et al., "BitNet v2: Native 4-bit Activations with Hadamard Transformation",
    2025, eqs. 4-6).

    Here every converted layer applies the transform; in the paper only output and down projections do.
    """
    values = x.float()
    scale = values.abs().mean(-1, keepdim=True).clamp_min(1e-5) * 7**-0.5
    return (values / scale).round().clamp(-8, 7).char(), scale


def sign(place: Any) -> Any:
    """Return the sign, 1 or -1, by which `rotate` multiplies an integer, array or tensor of positions."""
    # The low 17 bits of 0x9E3779B1, which decide: more would not fit int32, in which GPUs count.
    return 1 - 2 * (place * 0x179B1 >> 16 & 1)


def rotate(x: "Tensor", *, block: int = 64) -> "Tensor":
    """Multiply features by fixed signs, then each `block` of them by an orthonormal Hadamard matrix.

    With gradients enabled it is one matrix product, whose rounding differs from that of `hadamard`.
    """
    import torch

    features = x.shape[-1]
    if block < 1 or block & (block - 1) or features % block:
        raise UserError(
            f"int8-hadamard: block={block} is not a power of two that divides {features} inputs"
        )
    x = x * sign(torch.arange(features, device=x.device)).to(x.dtype)
    if not torch.is_grad_enabled():
        return torch.ops.sparse_bitnet.hadamard(x.float(), block).to(x.dtype)
    matrix = hadamard(torch.eye(block, dtype=x.dtype, device=x.device), block)
    return (x.unflatten(-1, (-1, block)) @ matrix).flatten(-2)


@register_activation("int8-hadamard", transform=rotate, folds=True)
def int8_hadamard(x: "Tensor") -> None:
    """int8 per token in a rotated basis, in which few weights and inputs stand out (as in Ashkboos et
    al., "QuaRot", NeurIPS 2024, but for ternary weights)."""


# Schedules: from the dense, full-precision model to the format, step by step.


@register_schedule("dense-to-sparse")
def dense_to_sparse(progress: float, n: int, m: int, *, rho: float = 1.0) -> tuple[int, float]:
    """Dense, then n:m for the last `rho` of the steps (the paper, section 4.4). rho=1 stands for the
    run's `sparse_fraction`."""
    _share("rho", rho)
    return (n if progress >= 1 - rho - 1e-12 else m), 1.0


@register_schedule("gradual")
def gradual(progress: float, n: int, m: int, *, until: float = 0.5) -> tuple[int, float]:
    """Keep m of m at first, then one weight per group fewer at a time, and n:m from the share `until` of
    the steps on (Zhu and Gupta, "To prune, or not to prune", 2017, but with equal steps)."""
    _share("until", until)
    if progress >= until:
        return n, 1.0
    return m - int(progress / until * (m - n)), 1.0


@register_schedule("lambda", blends=True)
def lambda_warmup(progress: float, n: int, m: int, *, until: float = 0.25) -> tuple[int, float]:
    """Prune from the first step, and blend linearly from full precision to quantised weights and
    activations until the share `until` of the steps (Hugging Face, "Fine-tuning LLMs to 1.58bit",
    2024)."""
    _share("until", until)
    return n, 1.0 if progress >= until else progress / until


def _share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise UserError(f"schedule {name}={value}: must lie in 0..1")
