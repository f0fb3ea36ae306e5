# SPDX-License-Identifier: Apache-2.0
"""Selection of mask, ternary codes and scale from a master weight, and how a layer holds them."""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.select_ternary import absmean, quantize_ternary, select_ternary
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix, Variant


class Selection(NamedTuple):
    """The values that forwards of one weight use, and the mask that is kept from step to step."""

    codes: Tensor | None
    """int8 [out_features, in_features], masked; None with full-precision weights."""
    mask: Tensor | None
    """bool [out_features, in_features]; None when the pattern is dense, or with `mask_words` where
    forwards and gradients need the codes alone."""
    weight_scale: Tensor | None
    """float32: one value, [out_features, 1] or [out_features, groups]; None with full precision."""
    mask_words: Tensor | None = None
    """The mask as `pack_mask` gives it, once a layer holds it; None when the pattern is dense."""
    value: Tensor | None = None
    """The effective weight, where it is not that of codes and scale, or mask."""
    blend: Tensor | None = None
    """float32 scalar, the share of the quantised input in the forward's; None is all of it."""

    def effective(self, weight: Tensor) -> Tensor:
        """Return the effective weight of forwards; `weight` is the master that this was selected from."""
        if self.value is not None:
            return self.value
        if self.codes is not None and self.weight_scale is not None:
            return TernaryWeight(self.codes, self.weight_scale).values()
        return weight if self.mask is None else weight * self.mask


def select(
    weight: Tensor,
    config: SparseBitConfig,
    *,
    kept: int | None = None,
    blend: float = 1.0,
    matrix: Matrix | None = None,
    weight_scale: Tensor | None = None,
) -> Selection:
    """Return mask, ternary codes and scale of a master weight [out_features, in_features].

    Args:
        weight: the master; with `weight_scale` or `matrix` it may be some rows of a matrix.
        config: the format.
        kept: number of every m weights kept in this step, instead of the pattern's n; with m (the first
            phase of dense-to-sparse) the mask is all ones, and the flips of the first sparse step are
            counted against it.
        blend: share of the quantised values in the forward; the rest is full precision.
        matrix: passed to registered functions that have this parameter; by default the weight's own.
        weight_scale: float32 scalar, instead of the weight's own (absmean only).

    Raises `UserError` if a registered function returns another shape, type or value than it should.
    """
    weight = weight.detach()
    prunes = not config.pattern.is_dense
    pattern = config.pattern if kept is None else NMPattern(kept, config.pattern.m)
    if not config.is_plain or blend < 1:
        return _select_registered(weight, config, pattern, blend, matrix or Matrix())
    if config.weight == "full":
        return Selection(None, nm_mask(weight, pattern) if prunes else None, None)
    in_one_pass = (config.mask_source, config.scale_source) == ("master", "dense")
    if pattern.is_dense or in_one_pass:
        scale = absmean(weight) if weight_scale is None else weight_scale
        codes, mask = select_ternary(weight, scale, pattern.n, pattern.m)
        return Selection(codes, mask if prunes else None, scale)
    if config.mask_source == "ternary":
        codes, scale = quantize_ternary(weight, weight_scale)
        mask = nm_mask(codes.to(weight.dtype), pattern)
    else:
        mask = nm_mask(weight, pattern)
        scale = absmean(weight * mask) if weight_scale is None else weight_scale
        codes, _ = quantize_ternary(weight, scale)
    return Selection(codes * mask, mask, scale)


def _select_registered(
    weight: Tensor, config: SparseBitConfig, pattern: NMPattern, blend: float, matrix: Matrix
) -> Selection:
    """Return the selection by the registered functions, called one after another."""
    mask, latent = None, weight
    if not config.pattern.is_dense:
        score = config.variant("score")
        ranked = weight  # as it is for magnitude: a mask ranks by |weight|, without a copy of it
        if score.name != "magnitude":
            ranked = _checked(score, score.call(weight, matrix=matrix), weight)
        # Built-in scores are magnitudes already, and kernels rank float32.
        mask = nm_mask(_as_magnitudes(ranked) if score.is_foreign else ranked.float(), pattern)
        if score.has("shrink") and not pattern.is_dense:
            latent = _checked(score, score.call(weight, mask, pattern.m, hook="shrink"), weight)
    masked = config.weight == "full" or config.scale_source == "masked" or blend < 1
    kept = latent * mask if masked and mask is not None else latent
    codes = scale = value = None
    if config.weight == "full":
        value = kept if latent is not weight else None
    else:
        source = kept if config.scale_source == "masked" else latent
        codes, scale = _quantized(config.variant("quantizer"), source, mask, matrix)
    if blend < 1:
        if codes is not None and scale is not None:
            value = TernaryWeight(codes, scale).values()
        value = torch.lerp(kept.float(), kept.float() if value is None else value.float(), blend)
    share = None if blend == 1 else weight.new_full((), blend, dtype=torch.float32)
    value = None if value is None else value.to(weight.dtype)
    return Selection(codes, mask, scale, value=value, blend=share)


def _quantized(
    quantizer: Variant, weight: Tensor, mask: Tensor | None, matrix: Matrix
) -> tuple[Tensor, Tensor]:
    """Return int8 codes, zero where the mask prunes, and the float32 scale."""
    matrix.is_reduced = False  # a score may have set it
    codes, scale = quantizer.call(weight, mask, matrix=matrix)
    rows, in_features = weight.shape
    scale = torch.as_tensor(scale, dtype=torch.float32, device=weight.device)
    per_row = scale.dim() == 2 and scale.shape[0] == rows and in_features % scale.shape[1] == 0
    is_part = matrix.reduce_sum is not None and not matrix.is_reduced
    if scale.numel() == 1 and is_part and not per_row:
        raise UserError(
            f"quantizer {quantizer.text}: its scale is that of some rows of a matrix; reduce it with "
            "matrix.sum or matrix.max"
        )
    codes = _checked(quantizer, codes, weight)
    if scale.numel() != 1 and not per_row:
        raise UserError(
            f"quantizer {quantizer.text}: a scale of {list(scale.shape)} for {list(weight.shape)}"
        )
    checked = quantizer.is_foreign and not torch.compiler.is_compiling()
    if checked and not (codes == codes.sign()).all():
        raise UserError(f"quantizer {quantizer.text}: its codes are not -1, 0 and 1")
    # A process that holds one row has one scale per row all the same.
    one = scale.numel() == 1 and not is_part
    codes = codes.to(torch.int8)
    codes = codes if mask is None else codes * mask.view(torch.int8)
    return codes, scale.view(()) if one else scale


def _checked(variant: Variant, result: Tensor, weight: Tensor) -> Tensor:
    if result.shape != weight.shape:
        raise UserError(
            f"{variant.text} returned {list(result.shape)} for a weight of {list(weight.shape)}"
        )
    return result.detach()


def _as_magnitudes(score: Tensor) -> Tensor:
    """float64 that `nm_mask` ranks by magnitude as the float32 scores rank by value, exactly."""
    bits = (score.float() + 0.0).contiguous().view(torch.int32)
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).double() + 2.0**31


def spread_scale(scale: Tensor, in_features: int) -> Tensor:
    """Return a scale in a shape that multiplies [rows, in_features]."""
    if scale.dim() < 2 or scale.shape[1] in (1, in_features):
        return scale
    return scale.repeat_interleave(in_features // scale.shape[1], 1)


optimizer_steps = 0


def state_of(weight: Tensor) -> tuple[int, int, int]:
    """Return a value that changes whenever the values of `weight` may have: its identity, its version,
    and the number of optimiser steps, since fused optimisers write weights without a new version."""
    version = 0 if weight.is_inference() else weight._version  # inference tensors keep none
    return id(weight), version, optimizer_steps


@cache
def watch_optimizers() -> None:
    """Count the steps of all optimisers from now on, for `state_of`."""

    def count(*_: Any) -> None:
        global optimizer_steps
        optimizer_steps += 1

    register_optimizer_step_post_hook(count)
