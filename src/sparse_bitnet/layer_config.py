# SPDX-License-Identifier: Apache-2.0
"""The configuration of a Sparse-BitLinear: one of the paper's cells or ablations, or a registered
variant. Free of torch."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Self, get_args, get_origin

from sparse_bitnet.errors import UserError
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Variant, check_module, find

REGISTERED = {
    "score": "magnitude",
    "quantizer": "absmean",
    "activation": "int8",
    "schedule": "dense-to-sparse",
}
"""Fields that name a registered function (`variants.registry`), and their defaults, the paper's."""

FORMAT_VERSION = 1
"""Version of the `quantization_config` entry that a converted model's config carries."""

GATES = (
    *(".in_proj_a", ".in_proj_b", ".in_proj_ba", ".a_proj", ".b_proj"),
    *(".shared_expert_gate", ".router.gate", ".gate.wg"),
    *(".router.proj", ".router.layer", ".router.classifier"),
)
"""Name endings of gates of linear attention, of shared experts, and of routers, which are dense by
default: a row of theirs steers a whole head or expert."""

OPTIONS = (
    *("activation", "mask_source", "scale_source", "mask_gradient", "ste"),
    *("score", "quantizer", "schedule", "embeddings", "dense_layers"),
)
"""Fields that the text form may set after the pattern."""


@dataclass(frozen=True, kw_only=True)
class SparseBitConfig:
    """Format of a layer: one of the paper's four cells (dense/sparse x full/ternary), one of its
    ablations, or a registered variant.

    Raises `UserError` with the reason for an unknown value or a combination that contradicts itself.
    """

    weight: Literal["ternary", "full"] = "ternary"
    """Ternary codes times one scale, or the master weights as they are."""

    pattern: NMPattern = NMPattern(6, 8)
    """N:M pattern: n of every m weights are kept; 8:8 (any n == m) is dense."""

    score: str = REGISTERED["score"]
    """Score that ranks a group's weights: magnitude, wanda, sr-ste, s-ste, random or a registered one."""

    quantizer: str = REGISTERED["quantizer"]
    """How weights become codes and scales: absmean, absmax, per-channel, per-group, twn, binary, or one
    registered."""

    activation: str | None = None
    """int8 per token, int4-hadamard, none, or one registered. By default int8 with ternary weights, none
    with full ones."""

    schedule: str = REGISTERED["schedule"]
    """How training approaches the format: dense-to-sparse, gradual, lambda, or one registered."""

    mask_source: Literal["master", "ternary"] = "master"
    """Rank |master weight|, or |code| (the ablation "mask from quantized weight")."""

    scale_source: Literal["dense", "masked"] = "dense"
    """absmean of the unmasked, or of the masked weights (the ablation "sparse before quant")."""

    mask_gradient: Literal["dense", "masked"] = "dense"
    """Gradient to every weight, or to kept ones only (the ablation "mask without grad")."""

    ste: Literal["identity", "clipped"] = "identity"
    """Ternary straight-through gradient: everywhere, or only where |weight| <= weight_scale."""

    embeddings: Literal["full", "ternary"] = "full"
    """Embedding and output head as they are, or ternary with a scale for every 128 weights of a row (64
    or 32 where 128 do not divide it)."""

    dense_layers: tuple[str, ...] = ()
    """Layers that stay ordinary linear ones: globs over module names or their ends, as `down_proj`,
    `layers.0.*`, `*.self_attn.*`. In the text form they are joined by `+`."""

    def __post_init__(self) -> None:
        if isinstance(self.pattern, str):
            object.__setattr__(self, "pattern", NMPattern.parse(self.pattern))
        if not isinstance(self.pattern, NMPattern):
            raise UserError(f"pattern={self.pattern!r}: write it as n:m, for example 6:8 or 2:4")
        if self.activation is None:
            default = "int8" if self.weight == "ternary" else "none"
            object.__setattr__(self, "activation", default)
        for kind in REGISTERED:
            object.__setattr__(self, kind, find(kind, getattr(self, kind)).text)
        object.__setattr__(self, "dense_layers", _globs(self.dense_layers))
        for field in dataclasses.fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if get_origin(field.type) is Literal and value not in allowed:
                raise UserError(f"{field.name}={value!r}: choose one of {allowed}")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        needs: list[tuple[str, str]] = []
        if self.weight == "full":
            of_codes = ("mask_source", "scale_source", "ste", "quantizer", "embeddings")
            needs += [(field, "weight=ternary") for field in of_codes]
        if self.pattern.is_dense:
            of_masks = ("mask_source", "scale_source", "mask_gradient", "score")
            needs += [(field, f"a mask, but {self.pattern} keeps all") for field in of_masks]
        for field, wanted in needs:
            if getattr(self, field) != getattr(SparseBitConfig, field):
                raise UserError(f"{field}={getattr(self, field)} needs {wanted}")
        if self.mask_source != "ternary":
            return
        if not self.is_plain or self.variant("schedule").blends:
            raise UserError(
                "mask_source=ternary ranks the codes of absmean: leave out score, quantizer and "
                "blending schedule"
            )
        if self.scale_source == "masked":
            raise UserError(
                "mask_source=ternary needs the scale before the mask, scale_source=masked the mask "
                "before the scale: set at most one of them"
            )

    @property
    def is_plain(self) -> bool:
        """Whether score and quantiser are the paper's; one fused op computes both."""
        return all(getattr(self, kind) == REGISTERED[kind] for kind in ("score", "quantizer"))

    def variant(self, kind: str) -> Variant:
        """Return the variant that one of the fields in `REGISTERED` names."""
        return find(kind, getattr(self, kind))

    def keeps_dense(self, name: str) -> bool:
        """Whether one of `dense_layers` matches a module's full name, or its last components."""
        return any(_matches(name, glob) for glob in self.dense_layers)

    def check_dense_layers(self, names: Iterable[str], model: str) -> None:
        """Raise `UserError` for a glob of `dense_layers` that matches none of a model's linear layers."""
        names = list(names)
        for glob in self.dense_layers:
            if not any(_matches(name, glob) for name in names):
                raise UserError(
                    f"dense_layers {glob}: no linear layer of {model} has such a name"
                    + (f"; one is called {names[0]}" if names else "")
                )

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, for example "full-2:4" or "ternary-6:8,dense_layers=down_proj+layers.0.*".

        Raises `UserError` naming the part that cannot be read.
        """
        head, *options = text.strip().split(",")
        weight, dash, pattern = head.partition("-")
        if not dash or weight not in ("ternary", "full"):
            raise UserError(
                f"format {text!r}: write ternary-n:m or full-n:m, for example ternary-6:8"
            )
        fields: dict[str, Any] = {"weight": weight, "pattern": NMPattern.parse(pattern)}
        for option in options:
            field, equals, value = option.strip().partition("=")
            if not equals or field not in OPTIONS:
                raise UserError(
                    f"format {text!r}: {option!r} is not field=value with one of {', '.join(OPTIONS)}"
                )
            if field in fields:
                raise UserError(f"format {text!r}: {field} is given twice; leave one out")
            fields[field] = value
        return cls(**fields)

    def __str__(self) -> str:
        own, default = self._texts(), type(self)(weight=self.weight, pattern=self.pattern)._texts()
        options = [f"{name}={own[name]}" for name in OPTIONS if own[name] != default[name]]
        return ",".join([f"{self.weight}-{self.pattern}", *options])

    def _texts(self) -> dict[str, str]:
        texts = {name: str(value) for name, value in vars(self).items()}
        return texts | {"dense_layers": "+".join(self.dense_layers)}

    def to_dict(self) -> dict[str, str]:
        """Return the fields as strings, for JSON; `from_dict` reads them back.

        Fields in `_LEFT_OUT` are written only if they differ from the values there. `registered_by`
        names the modules of functions registered outside the package.
        """
        values = {k: text for k, text in self._texts().items() if _LEFT_OUT.get(k) != text}
        used = {kind: self.variant(kind) for kind in REGISTERED}
        foreign = [f"{kind}={each.module}" for kind, each in used.items() if each.is_foreign]
        return values | ({"registered_by": "+".join(foreign)} if foreign else {})

    def config_entry(self, dense: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a config.json. `dense`: the linear layers that stay so."""
        head = {"quant_method": "sparse_bitnet", "version": FORMAT_VERSION}
        return head | {"format": self.to_dict(), "modules_to_not_convert": dense}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Read what `to_dict` returns.

        Raises `UserError` for missing or unknown keys, and for a function that is not registered or that
        another module registered.
        """
        if not isinstance(values, dict):
            raise UserError(f"sparse_bitnet config {values!r} is not a table of fields")
        fields = {name: value for name, value in values.items() if name != "registered_by"}
        names = {field.name for field in dataclasses.fields(cls)}
        if missing := sorted(names - _LEFT_OUT.keys() - fields.keys()):
            raise UserError(f"sparse_bitnet config lacks {', '.join(missing)}")
        if unknown := sorted(fields.keys() - names):
            raise UserError(f"sparse_bitnet config has unknown {', '.join(unknown)}")
        for entry in str(values.get("registered_by", "")).split("+"):
            kind, _, module = entry.partition("=")
            if kind in REGISTERED:
                check_module(kind, str(fields.get(kind)), module)
        return cls(**fields)


_LEFT_OUT = {"dense_layers": "", "embeddings": "full"} | {
    k: v for k, v in REGISTERED.items() if k != "activation"
}
"""Fields that `to_dict` leaves out where they have these values."""


@dataclass(kw_only=True)
class DenseLayersOption:
    """Option of every command that has a format or a pattern."""

    dense_layers: str = ""
    """Layers to leave out, which stay ordinary linear layers: globs over their names, separated by
    commas, for example down_proj,layers.0.*"""

    @property
    def dense_globs(self) -> tuple[str, ...]:
        """Return the globs of `SparseBitConfig.dense_layers`. Raises `UserError` for an empty one."""
        return _globs(self.dense_layers.replace(",", "+")) if self.dense_layers else ()

    def with_dense_layers(self, format: str) -> SparseBitConfig:
        """Return a text form's format with these dense layers. Raises `UserError` if it names others."""
        parsed = SparseBitConfig.parse(format)
        if self.dense_layers and parsed.dense_layers not in ((), self.dense_globs):
            raise UserError(
                f"--dense-layers {self.dense_layers}: --format {format} names other layers"
            )
        return dataclasses.replace(parsed, dense_layers=self.dense_globs or parsed.dense_layers)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}")


def _globs(given: Any) -> tuple[str, ...]:
    globs = tuple(given.split("+")) if isinstance(given, str) else given
    if not isinstance(globs, tuple | list) or not all(
        isinstance(glob, str) and glob.strip() and not set(glob) & set("+,") for glob in globs
    ):
        raise UserError(f"dense_layers={given!r}: give names of layers, for example down_proj")
    return tuple(glob.strip() for glob in globs)
