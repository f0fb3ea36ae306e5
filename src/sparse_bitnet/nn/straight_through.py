# SPDX-License-Identifier: Apache-2.0
"""Products of the effective weight whose gradient goes straight to the dense master weight.

The forward uses the mask, the codes, or both; the backward gives the master the gradient of the
effective weight, pruned positions included (dual straight-through estimator, paper section 2.3). A
`gradient_mask` (bool, shape of the weight) limits it to some positions; None means everywhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.ops.int8_linear import int8_linear, int8_linear_reference
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.packing.two_bits import unpack_codes


class InputQuantizer:
    """Transforms and quantises the inputs of a layer, as the `activation` of a format says."""

    def __init__(self, config: SparseBitConfig) -> None:
        self.variant = config.variant("activation")
        self.name = self.variant.name

    def transform(self, x: Tensor) -> Tensor:
        """Return the input after the `transform` hook; it is quantised and multiplied with the weight."""
        return self.variant.call(x, hook="transform") if self.variant.has("transform") else x

    def codes(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return int8 [..., features] and float32 [..., 1]; None with int8, quantised by the products."""
        quantized = None if self.name == "int8" else self.variant.call(x.detach())
        if quantized is None:
            return None
        codes, scale = quantized
        if codes.shape != x.shape or codes.dtype != torch.int8 or scale.shape != (*x.shape[:-1], 1):
            raise UserError(
                f"activation {self.variant.text}: returned {codes.dtype} {list(codes.shape)} and a scale "
                f"of {list(scale.shape)} for {list(x.shape)}; int8 codes and [..., 1] are wanted"
            )
        return codes, scale.float()

    def fake_quantize(self, x: Tensor, blend: Tensor | None = None) -> Tensor:
        """Return the quantised values as floats of the dtype of `x`, or blended with `x`; the gradient
        is the identity."""
        if self.name == "none":
            return x
        codes, scale = self.codes(x) or quantize_int8(x)
        value = codes * scale
        if blend is not None:
            value = torch.lerp(x.detach().float(), value, blend)
        return straight_through(x, value.to(x.dtype))


def straight_through(latent: Tensor, value: Tensor, gradient_mask: Tensor | None = None) -> Tensor:
    """Return `value`, which needs no gradient; the backward pass is the identity onto `latent`, limited
    to `gradient_mask`.

    Exact in both directions, unlike `latent + (value - latent).detach()`, which rounds twice.
    """
    return _StraightThrough.apply(latent, value, gradient_mask)


def ternary_int8_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    weight_scale: Tensor,
    gradient_mask: Tensor | None = None,
    *,
    integer: bool = False,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Multiply int8 activations by ternary codes and scale once at the end, as integer hardware does.

    Args:
        x: float [..., in_features], quantised to int8 per token unless `quantized` is given.
        weight: the master that gets the gradient, [out_features, in_features].
        bias: [out_features] or None; not quantised.
        codes: int8 [out_features, in_features] in {-1, 0, 1}, masked; or uint8, the same from
            `pack_codes` (in a sharded model, only those bytes live until the backward).
        weight_scale: float32 scalar.
        integer: multiply int8 operands into int32 sums (`int8_linear`) instead of floats that hold the
            integers. In float32 both give the same bits; in 16-bit types the float product rounds its
            sums once more.
        quantized: int8 codes [..., in_features] and float32 scale [..., 1] of `x`, quantised otherwise.

    Returns [..., out_features] in the autocast dtype, else the dtype of `x`. Both operands hold small
    integers, exact in bfloat16, and their sums stay below 2**24, so a float32 accumulator gives the
    integer result whatever the order of summation. The backward pass needs int8 activations, a quarter
    of float32 ones.
    """
    x_codes, activation_scale = quantized or (None, None)
    return _TernaryInt8Linear.apply(
        x, weight, bias, codes, weight_scale, gradient_mask, integer, x_codes, activation_scale
    )


def several_scales_linear(
    x: Tensor,
    bias: Tensor | None,
    codes: Tensor,
    weight_scale: Tensor,
    quantized: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Do `ternary_int8_linear` for scales [out_features, 1 or groups], without a gradient: int32 sums of
    each run, as in the engine."""
    x_codes, activation_scale = quantized or quantize_int8(x)
    scale = weight_scale.view(-1) if weight_scale.shape[1] == 1 else weight_scale
    return int8_linear_reference(x_codes, activation_scale, codes, scale, bias, output_dtype(x))


def output_dtype(x: Tensor) -> torch.dtype:
    """Return the autocast dtype if one is set, else that of `x`."""
    device = x.device.type
    is_cast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else x.dtype


def _where_kept(gradient: Tensor, gradient_mask: Tensor | None) -> Tensor:
    return gradient if gradient_mask is None else gradient * gradient_mask


def _unpacked(codes: Tensor, in_features: int) -> Tensor:
    return unpack_codes(codes, in_features) if codes.dtype == torch.uint8 else codes


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, latent, value, gradient_mask):
        ctx.save_for_backward(gradient_mask)
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        (gradient_mask,) = ctx.saved_tensors
        return _where_kept(gradient, gradient_mask), None, None


class _TernaryInt8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, codes, weight_scale, gradient_mask, integer, x_codes, activation_scale
    ):
        dtype = output_dtype(x)
        if x_codes is None:
            x_codes, activation_scale = quantize_int8(x)
        ctx.save_for_backward(x_codes, activation_scale, codes, weight_scale, gradient_mask)
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        codes = _unpacked(codes, x.shape[-1])
        if integer:
            return int8_linear(x_codes, activation_scale, codes, weight_scale, bias, dtype)
        x_operand, y_scale = x_codes.to(dtype), activation_scale * weight_scale
        if dtype == torch.float16:
            # Sums of codes can pass 65504, the end of float16; 1/128 of them, still exact, cannot.
            x_operand, y_scale = x_operand / 128, y_scale * 128
        y = F.linear(x_operand, codes.to(dtype)) * y_scale
        if bias is not None:
            y = y + bias
        return y.to(dtype)

    # A second derivative would miss the terms of both straight-through estimators.
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x_codes, activation_scale, codes, weight_scale, gradient_mask = ctx.saved_tensors
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dtype = gradient.dtype
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            codes = _unpacked(codes, x_codes.shape[-1])
            grad_x = ((gradient @ codes.to(dtype)) * weight_scale).to(x_dtype)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            x = (x_codes * activation_scale).to(dtype).reshape(-1, x_codes.shape[-1])
            grad_weight = _where_kept((rows.t() @ x).to(weight_dtype), gradient_mask)
        if bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_x, grad_weight, grad_bias, *(None,) * 6
