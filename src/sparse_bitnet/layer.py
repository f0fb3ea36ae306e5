"""Sparse-BitLinear: an `nn.Linear` whose forward uses masked ternary weights and int8 activations.

All variants of the paper are fields of one `SparseBitConfig`. The master `weight` is an ordinary
parameter and receives the gradient of the effective weight, pruned positions included (dual
straight-through estimator, paper section 2.3).
"""

import functools
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparse_bitnet.layer_config import CHOICES, SparseBitConfig
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.operands import count_flips, pack_mask, unpack_mask
from sparse_bitnet.ops.select_ternary import (
    quantize_ternary,
    select_ternary,
    select_ternary_bits,
)
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.straight_through import (
    dequantized,
    fake_quantize_int8,
    masked,
    ternary_int8_linear,
)

__all__ = [
    "CHOICES",
    "Selection",
    "SparseBitConfig",
    "SparseBitLinear",
    "StepSelection",
    "select",
    "select_step",
]

Layer = TypeVar("Layer", bound=nn.Linear)


class Selection(NamedTuple):
    """What the forwards use of one weight."""

    codes: Tensor | None
    """int8 [out_features, in_features], masked; None with full-precision weights."""
    mask: Tensor | None
    """bool [out_features, in_features]; None when the pattern is dense."""
    weight_scale: Tensor | None
    """float32 scalar; None with full-precision weights."""


def select(
    weight: Tensor,
    config: SparseBitConfig,
    *,
    dense: bool = False,
    weight_scale: Tensor | None = None,
) -> Selection:
    """Mask, ternary codes and scale of a master weight [out_features, in_features].

    `dense=True` keeps every weight whatever the pattern (the first phase of dense-to-sparse): the
    mask is then all ones, so the flips of the first sparse step are counted against it. With
    `weight_scale` (float32 scalar) `weight` may be some rows of a matrix of that scale.
    """
    weight = weight.detach()
    prunes = not config.pattern.is_dense
    pattern = NMPattern(config.pattern.m, config.pattern.m) if dense else config.pattern
    if config.weight == "full":
        return Selection(None, nm_mask(weight, pattern) if prunes else None, None)
    if _selects_in_one_pass(config, dense):
        scale = absmean(weight) if weight_scale is None else weight_scale
        codes, mask = select_ternary(weight, scale, pattern.n, pattern.m)
        return Selection(codes, mask if prunes else None, scale)
    if config.mask_source == "ternary":
        codes, scale = quantize_ternary(weight, weight_scale)
        mask = nm_mask(codes.to(weight.dtype), config.pattern)
    else:
        mask = nm_mask(weight, config.pattern)
        scale = absmean(weight * mask) if weight_scale is None else weight_scale
        codes, _ = quantize_ternary(weight, scale)
    return Selection(codes * mask, mask, scale)


class StepSelection(NamedTuple):
    """What one optimiser step uses of one weight: computed once, shared by all its forwards."""

    codes: Tensor | None
    """As in `Selection`."""
    mask: Tensor | None
    """As in `Selection`; None too where forwards and gradients need the codes alone."""
    weight_scale: Tensor | None
    """As in `Selection`."""
    mask_words: Tensor | None
    """The mask as `pack_mask` gives it; None when the pattern is dense."""
    mask_flips: Tensor | None
    """int64 scalar, positions that differ from those of the step before; None without these."""


def select_step(
    weight: Tensor,
    config: SparseBitConfig,
    *,
    previous: Tensor | None = None,
    dense: bool = False,
    weight_scale: Tensor | None = None,
) -> StepSelection:
    """`select`, with the mask as bits and the count of its flips, in one pass where the format allows.

    Args:
        weight, config, dense, weight_scale: as of `select`.
        previous: `mask_words` of the step before.
    """
    m = config.pattern.m
    needs_mask = config.weight == "full" or config.mask_gradient == "masked"
    if config.pattern.is_dense or not _selects_in_one_pass(config, dense):
        codes, mask, scale = select(weight, config, dense=dense, weight_scale=weight_scale)
        if mask is None:
            return StepSelection(codes, None, scale, None, None)
        words = pack_mask(mask, m)
        flips = None if previous is None else count_flips(previous, words)
        return StepSelection(codes, mask if needs_mask else None, scale, words, flips)
    weight = weight.detach()
    scale = absmean(weight) if weight_scale is None else weight_scale
    codes, words, flips = select_ternary_bits(
        weight, scale, m if dense else config.pattern.n, m, previous
    )
    mask = unpack_mask(words, m) if needs_mask else None
    return StepSelection(codes, mask, scale, words, None if previous is None else flips)


def _selects_in_one_pass(config: SparseBitConfig, dense: bool) -> bool:
    """Whether codes and mask follow from the master and its own scale, weight by weight."""
    if config.weight == "full":
        return False
    if dense or config.pattern.is_dense:
        return True
    return (config.mask_source, config.scale_source) == ("master", "dense")


class SparseBitLinear(nn.Linear):
    """`nn.Linear` with the forward of a `SparseBitConfig`; `weight` stays the dense master.

    Without further ado every forward selects mask and codes anew. `select_` does it once and keeps
    the result until `release_`; `sparse_bitnet.selected(model)` does both around a training step.

    Raises `UserError`, naming the layer, when the pattern does not divide in_features.
    """

    codes: Tensor | None
    weight_scale: Tensor | None
    step_mask: Tensor | None
    mask_words: Tensor | None
    mask_flips: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        config: SparseBitConfig,
        name: str = "(unnamed)",
    ) -> None:
        config.pattern.check_divides(in_features, name)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._adopt(config)

    def _adopt(self, config: SparseBitConfig) -> None:
        self.config = config
        self.dense_phase = False
        self.integer_forward = False
        self._holds_selection = False
        self._selected_weight: tuple[int, int, int] | None = None
        self._training_masks: tuple[Tensor | None, Tensor | None] | None = None
        for buffer in ("codes", "weight_scale", "step_mask", "mask_words", "mask_flips"):
            self.register_buffer(buffer, None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: SparseBitConfig, name: str) -> Self:
        """A layer that owns the very parameters of `linear` (no copy, ties are kept)."""
        layer = cls(
            linear.in_features, linear.out_features, device="meta", config=config, name=name
        )
        return _adopt_parameters(layer, linear)

    def to_linear(self) -> nn.Linear:
        """An ordinary layer that owns the very parameters of this one."""
        return _adopt_parameters(
            nn.Linear(self.in_features, self.out_features, device="meta"), self
        )

    @property
    def mask(self) -> Tensor | None:
        """bool [out_features, in_features] of the last selection, see `select_`; None without one.

        It is kept as bits (`mask_words`); what a step needs as bools is in `step_mask`.
        """
        if self.step_mask is not None or self.mask_words is None:
            return self.step_mask
        return unpack_mask(self.mask_words, self.config.pattern.m)

    @mask.setter
    def mask(self, value: Tensor | None) -> None:
        self.mask_words = None if value is None else pack_mask(value, self.config.pattern.m)

    def select(self) -> Selection:
        """Mask, codes and scale of the weight as it is now."""
        weight, scale = self._source()
        return select(weight, self.config, dense=self.dense_phase, weight_scale=scale)

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """What to select from, and its scale where that is not the weight's own."""
        return self.weight, None

    @torch.no_grad()
    def select_(self) -> None:
        """Select once; forwards use the result until `release_`, or until the weight changes.

        In training mode `mask` outlives the release: the next call counts in `mask_flips` (int64
        scalar, None without a predecessor) the positions that changed. In evaluation mode the
        release puts `mask` and `mask_flips` back, so an evaluation between two training steps leaves
        their flip rate alone.
        """
        self.release_()
        if not self.training:
            self._training_masks = (self.mask_words, self.mask_flips)
        weight, scale = self._source()
        chosen = select_step(
            weight,
            self.config,
            previous=self.mask_words if self.training else None,
            dense=self.dense_phase,
            weight_scale=scale,
        )
        self.codes, self.step_mask, self.weight_scale = chosen[:3]
        self.mask_words, self.mask_flips = chosen.mask_words, chosen.mask_flips
        self._selected_weight = _state_of(self.weight)
        self._holds_selection = True

    def release_(self) -> None:
        """Forget codes and scale; later forwards follow the weight again."""
        if self._training_masks is not None:
            self.mask_words, self.mask_flips = self._training_masks
            self._training_masks = None
        self.codes = self.weight_scale = self.step_mask = None
        self._holds_selection = False

    @property
    def is_selected(self) -> bool:
        """Whether forwards use the result of `select_`.

        False once the weight has been replaced or written to, or an optimiser has made a step: a
        selection left behind (by a step that raised, say) never meets another weight. Compiled code
        cannot look and trusts the caller.
        """
        if torch.compiler.is_compiling():
            return self._holds_selection
        return self._holds_selection and self._selected_weight == _state_of(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; computes in the autocast dtype if one is set."""
        if self.is_selected:
            selection = Selection(self.codes, self.step_mask, self.weight_scale)
        else:
            selection = self.select()
        gate = self._gradient_gate(selection, self.weight)
        if selection.codes is None:
            x = fake_quantize_int8(input) if self.config.activation == "int8" else input
            weight = self.weight
            if selection.mask is not None:
                weight = masked(weight, selection.mask, gate)
            return F.linear(x, weight, self.bias)
        assert selection.weight_scale is not None
        if self.config.activation == "none":
            weight = dequantized(self.weight, selection.codes, selection.weight_scale, gate)
            return F.linear(input, weight, self.bias)
        return ternary_int8_linear(
            input,
            self.weight,
            self.bias,
            selection.codes,
            selection.weight_scale,
            gate,
            integer=self.integer_forward,
        )

    def _gradient_gate(self, selection: Selection, weight: Tensor) -> Tensor | None:
        """Bool [out_features, in_features]: where the weight gets its gradient; None is everywhere."""
        gate = selection.mask if self.config.mask_gradient == "masked" else None
        if self.config.ste == "clipped":
            assert selection.weight_scale is not None
            inside = weight.detach().float().abs() <= selection.weight_scale
            gate = inside if gate is None else inside & gate
        return gate

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.config}"


def _adopt_parameters(layer: Layer, owner: nn.Linear) -> Layer:
    layer.weight, layer.bias = owner.weight, owner.bias
    layer.training = owner.training
    return layer


def _state_of(weight: Tensor) -> tuple[int, int, int]:
    """Changes whenever the values of `weight` may have."""
    version = 0 if weight.is_inference() else weight._version  # inference tensors keep none
    return id(weight), version, _optimizer_steps()[0]


@functools.cache
def _optimizer_steps() -> list[int]:
    """The count of steps of all optimisers: fused ones write weights without a new version."""
    steps = [0]

    def count(*_: Any) -> None:
        steps[0] += 1

    register_optimizer_step_post_hook(count)
    return steps
