"""Sparse-BitLinear: an `nn.Linear` whose forward uses masked ternary weights and int8 activations.

All variants of the paper are fields of one `SparseBitConfig`. The master `weight` is an ordinary
parameter and receives the gradient of the effective weight, pruned positions included (dual
straight-through estimator, paper section 2.3).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

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
    "SelectionState",
    "SparseBitLinear",
    "select",
]

Layer = TypeVar("Layer", bound=nn.Linear)


class Selection(NamedTuple):
    """What the forwards of one weight use, and the mask as it is kept from step to step."""

    codes: Tensor | None
    """int8 [out_features, in_features], masked; None with full-precision weights."""
    mask: Tensor | None
    """bool [out_features, in_features]; None when the pattern is dense, or with `mask_words` where
    forwards and gradients need the codes alone."""
    weight_scale: Tensor | None
    """float32 scalar; None with full-precision weights."""
    mask_words: Tensor | None = None
    """The mask as `pack_mask` gives it; None when the pattern is dense, or where only `mask` is."""
    mask_flips: Tensor | None = None
    """int64 scalar, positions that differ from those of the step before; None without these."""


def select(
    weight: Tensor,
    config: SparseBitConfig,
    *,
    dense: bool = False,
    weight_scale: Tensor | None = None,
    words: bool = False,
    previous: Tensor | None = None,
) -> Selection:
    """Mask, ternary codes and scale of a master weight [out_features, in_features].

    Args:
        weight: the master; with `weight_scale` it may be some rows of a matrix of that scale.
        config: the format.
        dense: keep every weight whatever the pattern (the first phase of dense-to-sparse): the mask is
            then all ones, so the flips of the first sparse step are counted against it.
        weight_scale: float32 scalar, instead of the weight's own.
        words: where one pass gives it, the mask as `mask_words`, flips against `previous` included.
        previous: `mask_words` of the step before.
    """
    weight = weight.detach()
    prunes = not config.pattern.is_dense
    pattern = NMPattern(config.pattern.m, config.pattern.m) if dense else config.pattern
    if config.weight == "full":
        return Selection(None, nm_mask(weight, pattern) if prunes else None, None)
    if dense or not prunes or (config.mask_source, config.scale_source) == ("master", "dense"):
        scale = absmean(weight) if weight_scale is None else weight_scale
        if not words or not prunes:
            codes, mask = select_ternary(weight, scale, pattern.n, pattern.m)
            return Selection(codes, mask if prunes else None, scale)
        codes, bits, flips = select_ternary_bits(weight, scale, pattern.n, pattern.m, previous)
        needed = unpack_mask(bits, pattern.m) if config.mask_gradient == "masked" else None
        return Selection(codes, needed, scale, bits, None if previous is None else flips)
    if config.mask_source == "ternary":
        codes, scale = quantize_ternary(weight, weight_scale)
        mask = nm_mask(codes.to(weight.dtype), config.pattern)
    else:
        mask = nm_mask(weight, config.pattern)
        scale = absmean(weight * mask) if weight_scale is None else weight_scale
        codes, _ = quantize_ternary(weight, scale)
    return Selection(codes * mask, mask, scale)


@dataclass
class SelectionState:
    """What a layer holds of its selections; its tensors move with the layer and are never saved."""

    current: Selection | None = None
    """What forwards use instead of selecting anew."""

    mask_words: Tensor | None = None
    """The last training step's."""

    mask_flips: Tensor | None = None
    """The last training step's."""

    frozen: tuple[Tensor | None, int] = (None, 0)
    """Scale and version of the weight at the last selection, while it was frozen."""

    _made_for: tuple[int, int, int] | None = None
    _optimizer_steps: ClassVar[int] = 0

    def hold(self, selection: Selection, weight: Tensor) -> None:
        """Make it the current one, for as long as `weight` stays what it is."""
        _watch_optimizers()
        self.current, self._made_for = selection, self._state_of(weight)

    def is_current(self, weight: Tensor | None) -> bool:
        """Whether the current selection is still that of the weight; None asks for optimisers alone."""
        if self.current is None or self._made_for is None:
            return False
        if weight is None:
            return self._made_for[2] == self._optimizer_steps
        return self._made_for == self._state_of(weight)

    def apply_(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor, as `nn.Module.to` does with a module's own."""

        def changed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        if self.current is not None:
            self.current = Selection(*map(changed, self.current))
        self.mask_words, self.mask_flips = changed(self.mask_words), changed(self.mask_flips)

    @classmethod
    def count_step(cls, *_: Any) -> None:
        """An optimiser has made a step: fused ones write weights without a new version."""
        cls._optimizer_steps += 1

    def _state_of(self, weight: Tensor) -> tuple[int, int, int]:
        """Changes whenever the values of `weight` may have."""
        version = 0 if weight.is_inference() else weight._version  # inference tensors keep none
        return id(weight), version, self._optimizer_steps


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(SelectionState.count_step)


class SparseBitLinear(nn.Linear):
    """`nn.Linear` with the forward of a `SparseBitConfig`; `weight` stays the dense master.

    Without further ado every forward selects mask and codes anew. `select_` does it once and keeps
    the result until `release_`; `sparse_bitnet.selected(model)` does both around a training step.

    Raises `UserError`, naming the layer, when the pattern does not divide in_features.
    """

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
        self.config = config
        self.dense_phase = False
        self.integer_forward = False
        self.state = SelectionState()

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
        """bool [out_features, in_features] of the last selection, see `select_`; None without one."""
        if self.state.current is not None and self.state.current.mask is not None:
            return self.state.current.mask
        words = self.mask_words
        return None if words is None else unpack_mask(words, self.config.pattern.m)

    @mask.setter
    def mask(self, value: Tensor | None) -> None:
        self.mask_words = None if value is None else pack_mask(value, self.config.pattern.m)

    @property
    def mask_words(self) -> Tensor | None:
        """The same as `pack_mask` gives it: how a mask is kept and stored."""
        return (self.state.current or self.state).mask_words

    @mask_words.setter
    def mask_words(self, words: Tensor | None) -> None:
        self.state.mask_words = words

    @property
    def mask_flips(self) -> Tensor | None:
        """int64 scalar, positions that the last selection changed; None without a predecessor."""
        return (self.state.current or self.state).mask_flips

    def select(self) -> Selection:
        """Mask, codes and scale of the weight as it is now: for every forward, or once for a step.

        Override it to choose them otherwise; codes, mask and scale are enough.
        """
        weight, scale = self._source()
        selection = select(
            weight,
            self.config,
            dense=self.dense_phase,
            weight_scale=scale,
            words=weight.is_cuda,  # one kernel there; elsewhere the mask is packed afterwards
            previous=self.state.mask_words if self.training else None,
        )
        if not (self.weight.requires_grad or torch.compiler.is_compiling()):
            self._watch_frozen(selection.weight_scale)
        return selection

    def _watch_frozen(self, scale: Tensor | None) -> None:
        """Warn when a frozen ternary weight was written to, as merging an adapter (LoRA) does: what
        was learnt in full precision is rounded to ternary codes from then on."""
        (before, version), held = self.state.frozen, self.weight
        self.state.frozen = (scale, 0 if held.is_inference() else held._version)
        written_openly = self.state.frozen[1] != version
        if self.training or written_openly or scale is None or before is None or scale.is_meta:
            return
        if before.device != scale.device or before == scale:
            return
        warnings.warn(
            "a frozen ternary weight has changed, by a merged adapter perhaps: it is rounded to "
            "ternary codes anew, so the model computes something else than with the adapter beside it",
            stacklevel=2,
        )

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """What to select from, and its scale where that is not the weight's own."""
        return self.weight, None

    @torch.no_grad()
    def select_(self) -> None:
        """Select once; forwards use the result until `release_`, or until the weight changes.

        In training mode `mask` and `mask_flips` outlive the release, and the next call counts the
        positions that changed. In evaluation mode both are as before after the release, so an
        evaluation between two training steps leaves their flip rate alone.
        """
        self.release_()
        codes, mask, scale, words, flips = self.select()
        if words is None and mask is not None:
            words = pack_mask(mask, self.config.pattern.m)
        previous = self.state.mask_words if self.training else None
        if flips is None and words is not None and previous is not None:
            flips = count_flips(previous, words)
        if codes is not None and self.config.mask_gradient == "dense":
            mask = None
        self.state.hold(Selection(codes, mask, scale, words, flips), self.weight)
        if self.training:
            self.state.mask_words, self.state.mask_flips = words, flips

    def release_(self) -> None:
        """Forget codes and scale; later forwards follow the weight again."""
        self.state.current = None

    @property
    def is_selected(self) -> bool:
        """Whether forwards use the result of `select_`.

        False once the weight has been replaced or written to, or an optimiser has made a step: a
        selection left behind (by a step that raised, say) never meets another weight. Compiled code
        cannot look and trusts the caller.
        """
        if torch.compiler.is_compiling():
            return self.state.current is not None
        return self.state.is_current(self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.state.apply_(fn)
        return super()._apply(fn, recurse)

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]; computes in the autocast dtype if one is set."""
        selection = self.state.current if self.is_selected else None
        if selection is None:
            selection = self.select()
        gradient_mask = self._gradient_mask(selection, self.weight)
        if selection.codes is None:
            x = fake_quantize_int8(input) if self.config.activation == "int8" else input
            weight = self.weight
            if selection.mask is not None:
                weight = masked(weight, selection.mask, gradient_mask)
            return F.linear(x, weight, self.bias)
        assert selection.weight_scale is not None
        if self.config.activation == "none":
            weight = dequantized(
                self.weight, selection.codes, selection.weight_scale, gradient_mask
            )
            return F.linear(input, weight, self.bias)
        return ternary_int8_linear(
            input,
            self.weight,
            self.bias,
            selection.codes,
            selection.weight_scale,
            gradient_mask,
            integer=self.integer_forward,
        )

    def _gradient_mask(self, selection: Selection, weight: Tensor) -> Tensor | None:
        """Bool [out_features, in_features]: where the weight gets its gradient; None is everywhere."""
        kept = selection.mask if self.config.mask_gradient == "masked" else None
        if self.config.ste == "clipped":
            assert selection.weight_scale is not None
            inside = weight.detach().float().abs() <= selection.weight_scale
            kept = inside if kept is None else inside & kept
        return kept

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.config}"


def _adopt_parameters(layer: Layer, owner: nn.Linear) -> Layer:
    layer.weight, layer.bias = owner.weight, owner.bias
    layer.training = owner.training
    return layer
