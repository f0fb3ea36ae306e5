"""Sparse-BitLinear: an `nn.Linear` whose forward uses masked ternary weights and int8 activations.

All variants of the paper are fields of one `SparseBitConfig`. The master `weight` is an ordinary
parameter and receives the gradient of the effective weight, pruned positions included (dual
straight-through estimator, paper section 2.3).
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from sparse_bitnet.errors import UserError
from sparse_bitnet.quantizer import absmean, fake_quantize_int8, quantize_ternary
from sparse_bitnet.sparsity import NMPattern, nm_mask
from sparse_bitnet.straight_through import dequantized, masked, ternary_int8_linear

CHOICES: dict[str, tuple[str, ...]] = {
    "weight": ("ternary", "full"),
    "activation": ("int8", "none"),
    "mask_source": ("master", "ternary"),
    "scale_source": ("dense", "masked"),
    "mask_gradient": ("dense", "masked"),
    "ste": ("identity", "clipped"),
}


@dataclass(frozen=True, kw_only=True)
class SparseBitConfig:
    """One of the paper's four cells (dense/sparse x full/ternary) or one of its ablations.

    Raises `UserError` with the reason for an unknown value or a combination that contradicts itself.
    """

    weight: Literal["ternary", "full"] = "ternary"
    """Ternary codes times one scale, or the master weights as they are."""

    pattern: NMPattern = NMPattern(6, 8)
    """Which n of m weights are kept; 8:8 (any n == m) is dense."""

    activation: Literal["int8", "none"] | None = None
    """Int8 per token, or none. By default int8 with ternary weights, none with full ones."""

    mask_source: Literal["master", "ternary"] = "master"
    """Rank |master weight|, or |code| (the ablation "mask from quantized weight")."""

    scale_source: Literal["dense", "masked"] = "dense"
    """absmean of the unmasked, or of the masked weights (the ablation "sparse before quant")."""

    mask_gradient: Literal["dense", "masked"] = "dense"
    """Gradient to every weight, or to kept ones only (the ablation "mask without grad")."""

    ste: Literal["identity", "clipped"] = "identity"
    """Ternary straight-through gradient: everywhere, or only where |weight| <= weight_scale."""

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", NMPattern.parse(self.pattern))
        if not isinstance(self.pattern, NMPattern):
            raise UserError(f"pattern={self.pattern!r}: write it as n:m, for example 6:8 or 2:4")
        if self.activation is None:
            default = "int8" if self.weight == "ternary" else "none"
            object.__setattr__(self, "activation", default)
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise UserError(f"{field}={getattr(self, field)!r}: choose one of {allowed}")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        if self.weight == "full":
            for field in ("mask_source", "scale_source", "ste"):
                if getattr(self, field) != CHOICES[field][0]:
                    raise UserError(f"{field}={getattr(self, field)} needs weight=ternary")
        if self.pattern.is_dense:
            for field in ("mask_source", "scale_source", "mask_gradient"):
                if getattr(self, field) != CHOICES[field][0]:
                    raise UserError(
                        f"{field}={getattr(self, field)} needs a mask, but {self.pattern} keeps all"
                    )
        if self.mask_source == "ternary" and self.scale_source == "masked":
            raise UserError(
                "mask_source=ternary needs the scale before the mask, scale_source=masked the mask "
                "before the scale: set at most one of them"
            )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form: "ternary-6:8", "full-2:4", "ternary-6:8,mask_gradient=masked".

        Raises `UserError` naming the part that cannot be read.
        """
        head, *options = text.strip().split(",")
        weight, dash, pattern = head.partition("-")
        if not dash or weight not in CHOICES["weight"]:
            raise UserError(
                f"format {text!r}: write ternary-n:m or full-n:m, for example ternary-6:8"
            )
        fields: dict[str, Any] = {"weight": weight, "pattern": NMPattern.parse(pattern)}
        for option in options:
            field, equals, value = option.strip().partition("=")
            if not equals or field not in CHOICES or field == "weight":
                known = ", ".join(name for name in CHOICES if name != "weight")
                raise UserError(
                    f"format {text!r}: {option!r} is not field=value with one of {known}"
                )
            fields[field] = value
        return cls(**fields)

    def __str__(self) -> str:
        parts = [f"{self.weight}-{self.pattern}"]
        default = SparseBitConfig(weight=self.weight, pattern=self.pattern)
        for field in CHOICES:
            if getattr(self, field) != getattr(default, field):
                parts.append(f"{field}={getattr(self, field)}")
        return ",".join(parts)

    def to_dict(self) -> dict[str, str]:
        """All fields as strings, for JSON; `from_dict` reads them back."""
        return {field.name: str(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`. Raises `UserError` for a missing or an unknown key."""
        if not isinstance(values, dict):
            raise UserError(f"sparse_bitnet config {values!r} is not a table of fields")
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := sorted(names - values.keys()):
            raise UserError(f"sparse_bitnet config lacks {', '.join(missing)}")
        if unknown := sorted(values.keys() - names):
            raise UserError(f"sparse_bitnet config has unknown {', '.join(unknown)}")
        return cls(**values)


class Selection(NamedTuple):
    """What one optimiser step uses of one weight: computed once, shared by all its forwards."""

    codes: Tensor | None
    """int8 [out_features, in_features], masked; None with full-precision weights."""
    mask: Tensor | None
    """bool [out_features, in_features]; None when the pattern is dense."""
    weight_scale: Tensor | None
    """float32 scalar; None with full-precision weights."""


def select(weight: Tensor, config: SparseBitConfig, *, dense: bool = False) -> Selection:
    """Mask, ternary codes and scale of a master weight [out_features, in_features].

    `dense=True` keeps every weight whatever the pattern (the first phase of dense-to-sparse): the
    mask is then all ones, so the flips of the first sparse step are counted against it.
    """
    weight = weight.detach()
    prunes = not config.pattern.is_dense
    pattern = NMPattern(config.pattern.m, config.pattern.m) if dense else config.pattern
    if config.weight == "full":
        return Selection(None, nm_mask(weight, pattern) if prunes else None, None)
    if pattern.is_dense or (config.mask_source, config.scale_source) == ("master", "dense"):
        scale = absmean(weight)
        codes, mask = torch.ops.sparse_bitnet.select_ternary(weight, scale, pattern.n, pattern.m)
        return Selection(codes, mask if prunes else None, scale)
    if config.mask_source == "ternary":
        codes, scale = quantize_ternary(weight)
        mask = nm_mask(codes.to(weight.dtype), config.pattern)
    else:
        mask = nm_mask(weight, config.pattern)
        codes, scale = quantize_ternary(weight, absmean(weight * mask))
    return Selection(codes * mask, mask, scale)


class SparseBitLinear(nn.Linear):
    """`nn.Linear` with the forward of a `SparseBitConfig`; `weight` stays the dense master.

    Without further ado every forward selects mask and codes anew. `select_` does it once and keeps
    the result until `release_`; `sparse_bitnet.selected(model)` does both around a training step.

    Raises `UserError`, naming the layer, when the pattern does not divide in_features.
    """

    mask: Tensor | None
    codes: Tensor | None
    weight_scale: Tensor | None
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
        self._holds_selection = False
        self._selected_weight: tuple[int, int, int] | None = None
        self._training_masks: tuple[Tensor | None, Tensor | None] | None = None
        for buffer in ("codes", "mask", "weight_scale", "mask_flips"):
            self.register_buffer(buffer, None, persistent=False)

    @classmethod
    def from_linear(cls, linear: nn.Linear, config: SparseBitConfig, name: str) -> Self:
        """A layer that owns the very parameters of `linear` (no copy, ties are kept)."""
        config.pattern.check_divides(linear.in_features, name)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.register_parameter("weight", cast(nn.Parameter, linear.weight))
        layer.register_parameter("bias", linear.bias)
        layer.training = linear.training
        layer._adopt(config)
        return layer

    def select(self) -> Selection:
        """Mask, codes and scale of the weight as it is now."""
        return select(self.weight, self.config, dense=self.dense_phase)

    @torch.no_grad()
    def select_(self) -> None:
        """Select once; forwards use the result until `release_`, or until the weight changes.

        In training mode `mask` outlives the release: the next call counts in `mask_flips` (int64
        scalar, None without a predecessor) the positions that changed. In evaluation mode the
        release puts `mask` and `mask_flips` back, so an evaluation between two training steps leaves
        their flip rate alone.
        """
        self.release_()
        codes, mask, weight_scale = self.select()
        if self.training:
            self.mask_flips = _count_flips(self.mask, mask)
        else:
            self._training_masks = (self.mask, self.mask_flips)
        self.codes, self.mask, self.weight_scale = codes, mask, weight_scale
        self._selected_weight = _state_of(self.weight)
        self._holds_selection = True

    def release_(self) -> None:
        """Forget codes and scale; later forwards follow the weight again."""
        if self._training_masks is not None:
            self.mask, self.mask_flips = self._training_masks
            self._training_masks = None
        self.codes = self.weight_scale = None
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
            selection = Selection(self.codes, self.mask, self.weight_scale)
        else:
            selection = self.select()
        gate = self._gradient_gate(selection)
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
            input, self.weight, self.bias, selection.codes, selection.weight_scale, gate
        )

    def _gradient_gate(self, selection: Selection) -> Tensor | None:
        """Bool [out_features, in_features]: where the weight gets its gradient; None is everywhere."""
        gate = selection.mask if self.config.mask_gradient == "masked" else None
        if self.config.ste == "clipped":
            assert selection.weight_scale is not None
            inside = self.weight.detach().float().abs() <= selection.weight_scale
            gate = inside if gate is None else inside & gate
        return gate

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, format={self.config}"


def _count_flips(previous: Tensor | None, current: Tensor | None) -> Tensor | None:
    return None if previous is None or current is None else (previous ^ current).sum()


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
