# SPDX-License-Identifier: Apache-2.0
"""The method in NumPy float64, written from the paper and sharing no code with the package.

Only two numbers are rounded to float32, because the method says so: the ternary weight scale (its
definition includes the type) and nothing else. Sorting decides the mask here, while the package counts.
Notation of the paper: W [out, in], x [..., in], gamma = mean |W|, Pi_{N:M} the top-N indicator.
"""

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


def top_n(magnitude: Array, n: int, m: int) -> Mask:
    """Pi_{N:M}, equation 2: a stable sort keeps the lower index where magnitudes tie."""
    groups = magnitude.reshape(-1, m)
    order = np.argsort(-groups, axis=1, kind="stable")
    mask = np.zeros(groups.shape, dtype=bool)
    np.put_along_axis(mask, order[:, :n], True, axis=1)
    return mask.reshape(magnitude.shape)


def weight_scale(weight: Array) -> float:
    """gamma of equation 1, floor 1e-5, as float32; `fsum` makes the mean exact before rounding."""
    mean = math.fsum(np.abs(weight).ravel()) / weight.size
    return float(max(np.float32(mean), np.float32(1e-5)))


def ternary(weight: Array, scale: float) -> Array:
    """RoundClip(W / gamma, -1, 1); `rint` rounds halves to even."""
    return np.clip(np.rint(weight / scale), -1, 1)


def inverse_activation_scale(x: Array) -> Array:
    """127 / max |x| per token, the maximum at least 1e-5."""
    return 127.0 / np.maximum(np.abs(x).max(axis=-1, keepdims=True), 1e-5)


def int8(x: Array) -> Array:
    return np.clip(np.rint(x * inverse_activation_scale(x)), -128, 127)


def fake_int8(x: Array) -> Array:
    return int8(x) / inverse_activation_scale(x)


def effective_weight(
    weight: Array, n: int, m: int, variant: str = "baseline"
) -> tuple[Array, Mask]:
    """W_eff times its scale, and the mask, of the paper's section "Optimization design" variants."""
    if variant == "full":
        mask = top_n(np.abs(weight), n, m)
        return weight * mask, mask
    if variant == "mask from quantized weight":
        codes = ternary(weight, weight_scale(weight))
        mask = top_n(np.abs(codes), n, m)
        return codes * mask * weight_scale(weight), mask
    mask = top_n(np.abs(weight), n, m)
    if variant == "sparse before quant":
        scale = weight_scale(weight * mask)
        return ternary(weight * mask, scale) * scale, mask
    assert variant in ("baseline", "mask without grad")
    scale = weight_scale(weight)
    return ternary(weight, scale) * mask * scale, mask


def forward(x: Array, weight: Array, bias: Array, n: int, m: int, variant: str) -> Array:
    """Algorithm in the appendix: y = Quant(x) W_eff^T + bias."""
    effective, _ = effective_weight(weight, n, m, variant)
    operand = x if variant == "full" else fake_int8(x)
    return operand @ effective.T + bias


def gradients(
    x: Array, weight: Array, grad_y: Array, n: int, m: int, variant: str
) -> tuple[Array, Array, Array]:
    """dL/dx, dL/dW (equation 5: that of W_eff, unmasked but in one ablation) and dL/dbias."""
    effective, mask = effective_weight(weight, n, m, variant)
    operand = x if variant == "full" else fake_int8(x)
    rows, operand = grad_y.reshape(-1, grad_y.shape[-1]), operand.reshape(-1, x.shape[-1])
    grad_weight = rows.T @ operand
    if variant == "mask without grad":
        grad_weight = grad_weight * mask
    return grad_y @ effective, grad_weight, rows.sum(axis=0)


def flip_rate(previous: Mask, current: Mask) -> float:
    """Equation 6."""
    return float(
        np.abs(current.astype(np.float64) - previous.astype(np.float64)).sum() / current.size
    )
