"""What a step selects from a master weight: mask, ternary codes and scale; and how a layer holds them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.ops.nm_mask import nm_mask
from sparse_bitnet.ops.operands import unpack_mask
from sparse_bitnet.ops.select_ternary import quantize_ternary, select_ternary, select_ternary_bits
from sparse_bitnet.pattern import NMPattern


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
