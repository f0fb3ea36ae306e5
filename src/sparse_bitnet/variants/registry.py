# SPDX-License-Identifier: Apache-2.0
"""Registry of scores, quantisers, activations and schedules by name, built in or your own. Free of torch.

An entry is a function. Its keyword-only parameters with defaults are its fields; the text form writes
them after the name: `score=random:seed=3`, `quantizer=per-group:size=128`. A keyword-only parameter
`matrix` without default receives the `Matrix` that contains the given rows.
"""

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sparse_bitnet.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

IMPORTED = "SPARSE_BITNET_IMPORT"
"""Environment variable with the modules, separated by commas, that register your own entries."""

_PACKAGE = __name__.partition(".")[0]


@dataclass(kw_only=True)
class Matrix:
    """The weight matrix that contains the rows given to a function: all of its rows, or those of one
    process in a sharded model."""

    first_row: int = 0
    """Index of the first row given, in the whole matrix."""
    input_norm: "Tensor | None" = None
    """float32 [in_features], root mean square of each input feature, for scores with `sees_inputs`."""
    reduce_sum: Callable[["Tensor"], "Tensor"] | None = None
    reduce_max: Callable[["Tensor"], "Tensor"] | None = None
    """Sum and maximum over the processes that hold the other rows; None where there are none."""
    is_reduced: bool = field(default=False, init=False)
    """Whether a sum or a maximum over the whole matrix was taken."""

    def sum(self, parts: "Tensor") -> "Tensor":
        """Return the elementwise sum of `parts` over all processes that hold rows of the matrix."""
        self.is_reduced = True
        return parts if self.reduce_sum is None else self.reduce_sum(parts)

    def max(self, parts: "Tensor") -> "Tensor":
        """Return the elementwise maximum of `parts` over all processes that hold rows of the matrix."""
        self.is_reduced = True
        return parts if self.reduce_max is None else self.reduce_max(parts)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A registered function with its hooks and the values of its fields."""

    name: str
    module: str
    functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = field(default_factory=dict)
    """The function itself as "", and its hooks by name, each with its keyword-only parameters and their
    defaults; empty if an op of the package computes the variant."""
    sees_inputs: bool = False
    blends: bool = False
    folds: bool = False
    values: dict[str, Any] = field(default_factory=dict)
    """Values of fields that are not at their defaults."""

    @property
    def fields(self) -> dict[str, Any]:
        """Names and defaults of the fields that the text form may set."""
        keywords = [each for _, each in self.functions.values()]
        return {k: v for each in keywords for k, v in each.items() if k != "matrix"}

    @property
    def text(self) -> str:
        """`name`, or `name:field=value` for fields that are not at their defaults."""
        settings = (
            f":{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in self.values.items()
        )
        return self.name + "".join(settings)

    @property
    def is_foreign(self) -> bool:
        """Whether it was registered outside the package."""
        return self.module.partition(".")[0] != _PACKAGE

    def has(self, hook: str) -> bool:
        """Whether it has a hook of that name."""
        return hook in self.functions

    def call(self, *args: Any, hook: str = "", matrix: Matrix | None = None) -> Any:
        """Call the function or a hook with its fields, and with `matrix` if it has that parameter."""
        function, keywords = self.functions[hook]
        given = {**self.values, "matrix": matrix}
        return function(*args, **{k: given.get(k, default) for k, default in keywords.items()})


_ENTRIES: dict[str, dict[str, Variant]] = {
    "score": {},
    "quantizer": {},
    # Ops of the package compute these.
    "activation": {name: Variant(name=name, module=__name__) for name in ("int8", "none")},
    "schedule": {},
}


def register_score(
    name: str,
    *,
    shrink: Callable[..., Any] | None = None,
    gradient: Callable[..., Any] | None = None,
    sees_inputs: bool = False,
) -> Callable[[F], F]:
    """Decorator that registers `function(weight, *, fields) -> Tensor`; the n highest of every group are
    kept.

    Args:
        name: letters, digits, dashes and underscores, as the text form has it.
        shrink: `(weight, mask, m, *, fields) -> Tensor`, the weight that is used (and quantised)
            instead.
        gradient: `(weight, mask, *, fields) -> Tensor`, added to the weight's gradient once per step,
            when `selected` ends.
        sees_inputs: record `matrix.input_norm`, which is stored with the checkpoint.

    The weight is [rows, in_features] without gradient, and all three functions return that shape and
    leave the weight unchanged. Scores are compared in float32; ties go to the lower index. Raises
    `UserError` for a name that is taken or has other characters.
    """
    hooks = {"shrink": shrink, "gradient": gradient}
    return _registers("score", name, hooks, sees_inputs=sees_inputs)


def register_quantizer(name: str) -> Callable[[F], F]:
    """Decorator that registers `function(weight, mask, *, fields) -> (codes, weight_scale)`.

    Codes are -1, 0 or 1 in the weight's shape; pruned ones are set to 0 afterwards. The scale is
    float32: one value, [rows, 1], or [rows, groups], where groups divides in_features. `mask` is bool,
    or None if nothing is pruned. A single value must be that of the whole matrix: see `Matrix.sum`.
    """
    return _registers("quantizer", name, {})


def register_activation(
    name: str, *, transform: Callable[..., Any] | None = None, folds: bool = False
) -> Callable[[F], F]:
    """Decorator that registers `function(x, *, fields) -> (codes, activation_scale)`: int8 [...,
    features] and float32 [..., 1]; or None to quantise as "int8" does.

    Args:
        transform: `(x, *, fields) -> Tensor` of the same shape, applied first, with a gradient of its
            own; the weight then multiplies the transformed input.
        folds: the transform is orthonormal, and conversion applies it to the rows of the weight too, so
            that products stay the same.
    """
    return _registers("activation", name, {"transform": transform}, folds=folds)


def register_schedule(name: str, *, blends: bool = False) -> Callable[[F], F]:
    """Decorator that registers `function(progress, n, m, *, fields) -> (kept, blend)`, called before
    every step.

    `progress` is the share of steps that are done, 0 <= progress < 1; n:m is the format's pattern. The
    step keeps `kept` of every m weights (m: dense). Its forward mixes quantised values (share `blend`)
    with full-precision ones (the rest), 0 <= blend <= 1. A blend below 1 needs `blends`.
    """
    return _registers("schedule", name, {}, blends=blends)


def _registers(
    kind: str, name: str, hooks: dict[str, Callable[..., Any] | None], **options: Any
) -> Callable[[F], F]:
    if not re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_-]*", name):
        raise UserError(f"{kind} {name!r}: names are letters, digits, dashes and underscores")

    def register(function: F) -> F:
        before = _ENTRIES[kind].get(name)
        # A cell of a notebook, or a reloaded module, registers its own again.
        if before is not None and before.module != function.__module__:
            raise UserError(f"{kind} {name!r} is taken: {before.module} registered it")
        functions = {
            hook: (each, _keywords(each))
            for hook, each in {"": function, **hooks}.items()
            if each is not None
        }
        entry = Variant(name=name, module=function.__module__, functions=functions, **options)
        for field_name, default in entry.fields.items():
            if type(default) not in (int, float, str, bool):
                raise UserError(
                    f"{kind} {name!r}: its field {field_name} needs a number, text or bool as default"
                )
        _ENTRIES[kind][name] = entry
        return function

    return register


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def find(kind: str, text: Any) -> Variant:
    """Return the variant that a text form `name` or `name:field=value:field=value` names.

    Raises `UserError` for an unknown name, with the nearest known one, and for unknown fields.
    """
    name, *settings = str(text).split(":")
    if (entry := _entry(kind, name)) is None:
        known = _ENTRIES[kind]
        raise UserError(
            f"{kind}={name!r} is not registered{did_you_mean(name, known)}: choose one of "
            f"{', '.join(known)}, or import the module that registers it"
        )
    values: dict[str, Any] = {}
    defaults = entry.fields
    for setting in settings:
        field_name, equals, value = setting.partition("=")
        if not equals or field_name not in defaults:
            fields = ", ".join(defaults) or "it has none"
            raise UserError(f"{kind}={text}: {setting!r} is not field=value with one of: {fields}")
        if field_name in values:
            raise UserError(f"{kind}={text}: {field_name} is given twice; leave one out")
        values[field_name] = _read(f"{kind}={text}", defaults[field_name], value)
    changed = {k: values[k] for k in defaults if values.get(k, defaults[k]) != defaults[k]}
    return replace(entry, values=changed) if changed else entry


def _read(where: str, default: Any, text: str) -> Any:
    """Return the value of a field, of the type of its default."""
    kind = type(default)
    if kind is str:
        return text
    try:
        value = {"true": True, "false": False}[text] if kind is bool else kind(text)
        if math.isfinite(value):
            return value
    except (KeyError, ValueError, OverflowError):
        pass
    wanted = "true or false" if kind is bool else "a finite number"
    raise UserError(f"{where}: {text!r} is not {wanted}")


def check_module(kind: str, text: str, module: str) -> None:
    """Raise `UserError` unless `module` registered the entry."""
    name = text.partition(":")[0]
    if (entry := _entry(kind, name)) is None:
        raise UserError(
            f"{kind} {name!r} is not registered here: import {module}, which registered it "
            f"({IMPORTED} on the command line)"
        )
    if entry.module != module and "__main__" not in (entry.module, module):
        raise UserError(
            f"{kind} {name!r} comes from {module}, but {entry.module} registered it here"
        )


def _entry(kind: str, name: str) -> Variant | None:
    """Return the entry of a name, or None; imports the modules named in the environment if needed."""
    if name not in _ENTRIES[kind]:
        for module in filter(None, os.environ.get(IMPORTED, "").split(",")):
            if (here := os.getcwd()) not in sys.path:  # scripts do not look there
                sys.path.append(here)
            try:
                importlib.import_module(module.strip())
            except ImportError as error:
                raise UserError(f"{IMPORTED}: cannot import {module} ({error})") from error
    return _ENTRIES[kind].get(name)
