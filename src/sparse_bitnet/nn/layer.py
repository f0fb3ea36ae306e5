# SPDX-License-Identifier: Apache-2.0
"""Sparse-BitLinear: an `nn.Linear` whose forward uses masked ternary weights and int8 activations.

All variants of the paper are fields of one `SparseBitConfig`. The master `weight` is an ordinary
parameter and receives the gradient of the effective weight, pruned positions included (dual
straight-through estimator, paper section 2.3).
"""

import warnings
from collections.abc import Callable, Iterable
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.selection import Selection, select, spread_scale, state_of, watch_optimizers
from sparse_bitnet.nn.straight_through import (
    InputQuantizer,
    output_dtype,
    several_scales_linear,
    straight_through,
    ternary_int8_linear,
)
from sparse_bitnet.ops.mask_words import byte_flips, pack_mask, unpack_mask
from sparse_bitnet.variants.registry import Matrix

Layer = TypeVar("Layer", bound=nn.Linear)

_NORM_MEMORY = 0.9
"""Weight of the running input norms; the norms of the last step get the rest."""

_MOST_TOGETHER = 2**23
"""Weights of the largest layer whose kernels on a GPU take less time than their launches."""


class KeepsBufferTypes(nn.Module):
    """A module whose buffers keep type and bits when `half` or `to` gives the weights another type."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in held.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self


class SparseBitLinear(KeepsBufferTypes, nn.Linear):
    """`nn.Linear` with the forward of a `SparseBitConfig`; `weight` stays the dense master.

    By default each forward recomputes the mask and the ternary codes. `select_` does it once and keeps
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
        self.kept: int | None = None
        self.blend = 1.0
        self.integer_forward = False
        # The result of `select_` and the weight's state then; a frozen weight's last scale and state.
        self.current: Selection | None = None
        self._made_for: tuple[int, int, int] | None = None
        self._frozen: tuple[Tensor | None, Any] = (None, None)
        # From the last training step: the mask as `pack_mask` gives it, and how many positions changed.
        self.mask_words: Tensor | None = None
        self.mask_flips: Tensor | None = None
        self.inputs = InputQuantizer(config)
        sees = config.variant("score").sees_inputs
        # Root mean square of each input feature, at first zeros; sums of squares and tokens since then.
        norm = torch.zeros(in_features, device=device, dtype=torch.float32) if sees else None
        seen = torch.zeros(in_features + 1, device=device, dtype=torch.float32) if sees else None
        self.register_buffer("input_norm", norm)
        self.register_buffer("_seen", seen, persistent=False)

    input_norm: Tensor | None
    _seen: Tensor | None

    @property
    def dense_phase(self) -> bool:
        """Whether steps keep every weight, regardless of the pattern."""
        return self.kept == self.config.pattern.m

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: SparseBitConfig, name: str) -> Self:
        """Return a layer that shares the parameters of `linear` (no copy, ties are kept); its weight is
        changed in place if the activation `folds`."""
        sizes = linear.in_features, linear.out_features
        layer = cls(*sizes, device="meta", config=config, name=name)
        _adopt_parameters(layer, linear)
        if isinstance(linear, SparseBitLinear):
            if linear.config.activation == config.activation:
                return layer
            linear.check_basis()
        if layer.inputs.variant.folds:
            with torch.no_grad():
                layer.weight.data = layer.inputs.transform(layer.weight.data)
        return layer

    def check_basis(self) -> None:
        """Raise `UserError` if the weight is folded with the transform of its inputs."""
        if self.inputs.variant.folds:
            raise UserError(
                f"the weights are rotated for activation={self.config.activation}: convert the "
                "original model, or keep this activation in the format"
            )

    def to_linear(self) -> nn.Linear:
        """Return an ordinary layer that shares the parameters of this one. Before a model without other
        ternary layers is saved, delete its `config.quantization_config`: it would load as ternary."""
        self.check_basis()
        plain = nn.Linear(self.in_features, self.out_features, device="meta")
        return _adopt_parameters(plain, self)

    @property
    def mask(self) -> Tensor | None:
        """The bool mask [out_features, in_features] of the last selection (`select_`), or None."""
        current = self.current
        if current is not None and current.mask is not None:
            return current.mask
        words = self.mask_words if current is None else current.mask_words
        return None if words is None else unpack_mask(words, self.config.pattern.m)

    def select(self) -> Selection:
        """Return mask, codes and scale of the weight as it is now."""
        weight, scale = self._source()
        selection = select(
            weight,
            self.config,
            kept=self.kept,
            blend=self.blend,
            matrix=None if self.config.is_plain and self.blend == 1 else self._matrix(),
            weight_scale=scale,
        )
        if not (self.weight.requires_grad or torch.compiler.is_compiling()):
            self._watch_frozen(selection.weight_scale)
        return selection

    def _watch_frozen(self, scale: Tensor | None) -> None:
        """Warn when a frozen ternary weight changes, as when an adapter (LoRA) is merged: its
        full-precision update is rounded to ternary codes from then on."""
        if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # a comparison would wait for the device, which a capture does not allow
        (before, state), held = self._frozen, self.weight
        now = (0 if held.is_inference() else held._version, held.dtype, held.device)
        self._frozen = (scale, now)
        if self.training or now != state or scale is None or before is None or scale.is_meta:
            return
        if not torch.equal(before, scale):
            warnings.warn(
                "a frozen ternary weight has changed, perhaps by a merged adapter: it is quantised to "
                "ternary codes again, so outputs differ from those with the adapter unmerged",
                stacklevel=2,
            )

    def _matrix(self) -> Matrix:
        """Return the `Matrix` for the registered functions that ask for it."""
        return Matrix(input_norm=self.input_norm)

    def _source(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight to select from, and its scale; None: the scale comes from that weight."""
        return self.weight, None

    @torch.no_grad()
    def select_(self) -> None:
        """Select once; forwards use the result until `release_`, or until the weight changes.

        In training mode `mask_words` and `mask_flips` outlive the release, and the next call counts the
        positions that changed. In evaluation mode both stay as they are.
        """
        _hold([self], self.select())

    def hold_(self, chosen: Selection, changed: Tensor | None) -> None:
        """Use a selection until `release_`; `changed` are the `byte_flips` of its mask."""
        self.current, self._made_for = chosen, state_of(self.weight)
        if self.training:
            self.mask_words = chosen.mask_words
            self.mask_flips = None if changed is None else changed.sum(dtype=torch.int64)
            if self._seen is not None:
                self._seen.zero_()  # of a step that raised, or memory that loading left as it was

    @property
    def selection_key(self) -> Any:
        """Equal for small layers on a GPU that are selected as one matrix; None for any other layer."""
        score, quantizer = (self.config.variant(kind).name for kind in ("score", "quantizer"))
        of_rows = self.config.weight == "full" or quantizer in ("per-channel", "per-group")
        weight, numel = self.weight, self.weight.numel()
        small = weight.is_cuda and weight.requires_grad and numel <= _MOST_TOGETHER
        if type(self) is not SparseBitLinear or not (small and of_rows and score == "magnitude"):
            return None
        state = self.training, self.mask_words is None, weight.dtype, weight.device
        return self.in_features, self.config, self.kept, self.blend, *state

    def release_(self) -> None:
        """Forget codes and scale; later forwards follow the weight again."""
        self.current = None

    @property
    def is_selected(self) -> bool:
        """Whether forwards use the result of `select_`.

        False once the weight has been replaced or written to (except through `.data`), or an optimiser
        has made a step: a selection left behind, for example by a step that raised, is never used with
        another weight. Compiled code cannot check this and trusts the caller.
        """
        if self.current is None or torch.compiler.is_compiling():
            return self.current is not None
        return self._made_for == state_of(self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self.weight.device, self.weight.dtype
        super()._apply(fn, recurse)
        if (self.weight.device, self.weight.dtype) != before:
            # The layer selects again, and counts flips from then on.
            self.current = self.mask_words = self.mask_flips = None
        return self

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., in_features] -> [..., out_features], in the autocast dtype if one is set.

        Raises `UserError` for an input that is not real floating-point numbers.
        """
        if not input.is_floating_point():
            raise UserError(f"SparseBitLinear: the input is {input.dtype}, not floating-point")
        selection = self.current if self.is_selected else None
        if selection is None:
            selection = self.select()
        gradient_mask = self._gradient_mask(selection, self.weight)
        x, codes, scale = self._transformed(input), selection.codes, selection.weight_scale
        in_int8 = selection.value is None and self.config.activation != "none"
        if in_int8 and codes is not None and scale is not None:
            if scale.dim() == 0:
                return ternary_int8_linear(
                    x,
                    self.weight,
                    self.bias,
                    codes,
                    scale,
                    gradient_mask,
                    integer=self.integer_forward,
                    quantized=self.inputs.codes(x),
                )
            # Exact in float32, as in the engine; in 16-bit types rounded, and fast, as in training.
            if not (torch.is_grad_enabled() or x.is_meta) and output_dtype(x) == torch.float32:
                return several_scales_linear(x, self.bias, codes, scale, self.inputs.codes(x))
        weight: Tensor = self.weight
        if codes is not None or selection.mask is not None or selection.value is not None:
            effective = selection.effective(weight.detach()).to(weight.dtype)
            weight = straight_through(weight, effective, gradient_mask)
        return F.linear(self.inputs.fake_quantize(x, selection.blend), weight, self.bias)

    def _transformed(self, input: Tensor) -> Tensor:
        """Return the transformed input, to be quantised; update the norms if the score needs them."""
        x = self.inputs.transform(input)
        if self._seen is not None and self.training and torch.is_grad_enabled():
            tokens = x.detach().float().reshape(-1, x.shape[-1])
            self._seen[:-1] += tokens.square().sum(0)
            self._seen[-1] += len(tokens)
        return x

    @torch.no_grad()
    def end_step_(
        self, reduce: Callable[[Tensor], Tensor] | None = None, adds: bool = True
    ) -> None:
        """Add the score's extra gradient (if `adds`), update the input norms, after a step's backwards.

        `reduce` sums a tensor over the processes whose inputs count together.
        """
        score, current = self.config.variant("score"), self.current
        gradient = self._own_gradient()
        adds = adds and score.has("gradient") and not self.dense_phase
        if adds and current is not None and gradient is not None:
            gradient += score.call(self._source()[0].detach(), current.mask, hook="gradient")
        if self._seen is None or self.input_norm is None:
            return
        seen = self._seen if reduce is None else reduce(self._seen)
        mean = seen[:-1] / seen[-1].clamp_min(1)
        before = torch.where(self.input_norm.any(), self.input_norm.square(), mean)
        followed = (_NORM_MEMORY * before + (1 - _NORM_MEMORY) * mean).sqrt()
        self.input_norm.copy_(torch.where(seen[-1] > 0, followed, self.input_norm))
        self._seen.zero_()

    def _own_gradient(self) -> Tensor | None:
        """Return the gradient of the rows that `select` sees, as it is stored."""
        return self.weight.grad

    def _gradient_mask(self, selection: Selection, weight: Tensor) -> Tensor | None:
        """Return where the weight gets its gradient, bool [out_features, in_features]; None: all."""
        kept = selection.mask if self.config.mask_gradient == "masked" else None
        if self.config.ste == "clipped":
            assert selection.weight_scale is not None
            scale = spread_scale(selection.weight_scale, weight.shape[-1])
            inside = weight.detach().float().abs() <= scale
            kept = inside if kept is None else inside & kept
        return kept

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.config}"


def select_layers_(layers: Iterable[SparseBitLinear]) -> None:
    """Call `select_` of each; those with the same `selection_key` are selected together."""
    groups: dict[Any, list[SparseBitLinear]] = {}
    for layer in layers:
        groups.setdefault(layer.selection_key or id(layer), []).append(layer)
    for first, *others in groups.values():
        if others:
            weight = torch.cat([layer.weight.detach() for layer in (first, *others)])
            chosen = select(weight, first.config, kept=first.kept, blend=first.blend)
            _hold([first, *others], chosen)
        else:
            first.select_()


def _hold(layers: list[SparseBitLinear], chosen: Selection) -> None:
    """Give each of these layers, of one `selection_key`, its rows of a selection of all, and flips."""
    first, changed = layers[0], None
    if chosen.mask is not None:
        words = pack_mask(chosen.mask, first.config.pattern.m)
        held = [layer.mask_words for layer in layers if layer.mask_words is not None]
        changed = byte_flips(torch.cat(held), words) if held and first.training else None
        gradient = first.config.variant("score").has("gradient")
        used = chosen.codes is None or first.config.mask_gradient == "masked" or gradient
        chosen = chosen._replace(mask=chosen.mask if used else None, mask_words=words)
    watch_optimizers()
    rows = [layer.out_features for layer in layers]

    def split(tensor: Tensor | None) -> Iterable[Any]:
        if tensor is None or tensor.dim() == 0 or len(layers) == 1:
            return [tensor] * len(layers)
        return tensor.split(rows)

    for layer, flipped, *own in zip(layers, *map(split, (changed, *chosen)), strict=True):
        layer.hold_(Selection(*own), flipped)


def _adopt_parameters(layer: Layer, owner: nn.Linear) -> Layer:
    layer.weight, layer.bias = owner.weight, owner.bias
    layer.training = owner.training
    if isinstance(layer, SparseBitLinear):
        for name, buffer in layer.named_buffers(recurse=False):
            same = getattr(owner, name, None)
            fresh = torch.zeros_like(buffer, device=owner.weight.device)
            setattr(layer, name, fresh if same is None else same)
    return layer
