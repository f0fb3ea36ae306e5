# SPDX-License-Identifier: Apache-2.0
"""What a config.json, of any release of transformers, says of heads, windows and ropes. Free of torch."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sparse_bitnet.errors import UserError

GEMMA3, HUNYUAN = "gemma3_text", "hunyuan_v1_dense"
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Entries of `layer_types`, and of Gemma's `rope_parameters`."""

_WINDOW_FAMILIES = ("qwen2", "qwen3", "mistral", GEMMA3)
"""transformers' other families have no window, whatever their config says."""

_BASES = {"bitnet": 500_000.0, GEMMA3: 1_000_000.0}
"""Base of the rope where a config does not say, of families of which it is not 10,000."""

MOST_POSITIONS = 1 << 24
"""As csrc/bindings_decoder.cpp takes them."""

_MOST_LAYERS = 1 << 16
"""Of models with windows, whose layers are counted out before their weights are looked at."""

_EVERY = 6
"""Of Gemma's layers the sixth, twelfth and so on see everything, unless a config says otherwise."""

_WINDOW = 4096
"""Where a config does not say."""

_UNWINDOWED = 28
"""Of Qwen's layers those below the first with a window, if a config does not say."""

_ROTATION = re.compile(r"hadamard|rotat|quarot|spinquant|(^|_)had(_|$)", re.IGNORECASE)
"""In names of settings and files with which tools declare that weights are multiplied by a rotation."""

_LARGEST = float(np.finfo(np.float32).max)


class Fields:
    """Numbers of a config.json, checked. Raises `UserError`, beginning with `where`, for what is none."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def __getitem__(self, name: str) -> float:
        """A number that is positive, and finite in float32."""
        value = self._values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return float(value)
        raise UserError(f"{self._where}{name} is {shown(value)}, not a positive number")

    def optional(self, name: str, default: float) -> float:
        """The same of one that may be missing."""
        return default if self._values.get(name) is None else self[name]

    def is_set(self, name: str, default: bool = False) -> bool:
        """Whether a field is there and neither false nor zero."""
        return bool(self._values.get(name, default))

    def size(self, name: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """A whole number from 1 to `most`."""
        value = self._values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise UserError(f"{self._where}{name} is {shown(value)}, not a positive size")
        if value > most:
            raise UserError(f"{self._where}{name} is above {most:,}, the most that can be computed")
        return value


def shown(value: object) -> str:
    """As a message quotes what a file says, which may be of any length."""
    return repr(value)[:40]


def head_size(config: dict[str, Any]) -> Any:
    """`head_dim`, or what transformers takes in its stead; not checked."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    return config.get("head_dim") or {"qwen3": 128, GEMMA3: 256}.get(config["model_type"], shared)


def gemma_windows(layers: int, every: int = _EVERY) -> list[bool]:
    """Whether each layer has a window."""
    return [bool((layer + 1) % every) for layer in range(min(layers, _MOST_LAYERS))]


def check_basis(settings: Mapping[str, Any], where: str) -> None:
    """Raise `UserError`, beginning with `where`, for settings that declare weights in a rotated basis."""
    for key, value in settings.items():
        name = f"{key} {value}" if key == "model_type" else key
        if value and _ROTATION.search(name):
            raise UserError(
                f"{where}: {name} says that its weights are stored in a rotated basis, which is not read "
                "here; take the model as it was before the rotation"
            )


def check_fields(
    table: Mapping[str, Any],
    read: Iterable[str],
    where: str,
    only: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise `UserError`, beginning with `where`, for a field that is set and not one of `read`, and for
    one of `only` that has another value."""
    for key, value in table.items():
        is_off = not (any(value) if isinstance(value, list) else value)
        if key not in read and not (value == only[key] if key in only else is_off):
            known = f"; {only[key]} is" if key in only else " and may change what the weights mean"
            raise UserError(f"{where}: {key} = {shown(value)} is not read here{known}")


def of_all_layers(value: Any, layers: object) -> Any:
    """The number that a list has for each of the layers; anything else as it is."""
    is_list = isinstance(value, list) and len(value) == layers and value == value[:1] * len(value)
    return value[0] if is_list and type(value[0]) in (int, float) else value


def unread_setting(config: dict[str, Any]) -> str | None:
    """The name of a setting with which transformers computes and nothing here does; None without one."""
    if not config.get("is_causal", True):
        return "is_causal"
    return next((name for name in ("per_layer_config", "text_config") if config.get(name)), None)


def windows_of(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """Of each layer: tokens that a token sees, itself included, or 0 for all; empty: all in all.

    Raises `UserError`, beginning with `where`, for settings that make none or contradict each other.
    """
    fields = Fields(config, f"{where}: ")
    model_type, types = config["model_type"], config.get("layer_types")
    if model_type not in _WINDOW_FAMILIES:
        return ()
    kinds = [] if types is None else types
    if not isinstance(kinds, list):
        raise UserError(f"{where}: layer_types is {shown(types)}, not a list")
    if model_type not in ("mistral", GEMMA3) and not config.get("use_sliding_window"):
        if WINDOWED in kinds:
            raise UserError(f"{where}: layer_types has {WINDOWED}, use_sliding_window is not set")
        return ()
    is_set = config.get("sliding_window", _WINDOW) is not None
    if WINDOWED in kinds and not is_set:
        raise UserError(f"{where}: layer_types has {WINDOWED}, sliding_window is not set")
    if not is_set or (kinds and WINDOWED not in kinds):
        return ()
    window = fields.size("sliding_window", _WINDOW, most=MOST_POSITIONS)
    layers = fields.size("num_hidden_layers", most=_MOST_LAYERS)
    first = 0 if model_type == "mistral" else config.get("max_window_layers", _UNWINDOWED)
    if kinds:
        if len(kinds) != layers:
            raise UserError(f"{where}: layer_types are {len(kinds)}, num_hidden_layers is {layers}")
        has_window = [kind == WINDOWED for kind in kinds]
    elif model_type == GEMMA3:
        has_window = gemma_windows(layers, fields.size("sliding_window_pattern", _EVERY))
    elif type(first) is not int:
        raise UserError(f"{where}: max_window_layers is {shown(first)}, not a number of layers")
    else:
        has_window = [layer >= first for layer in range(layers)]
    return tuple(window if has else 0 for has in has_window)


def rope_of(config: dict[str, Any], where: str, *, local: bool = False) -> dict[str, Any]:
    """The parameters of the rope, `rope_type` and `rope_theta` among them, which may be None.

    They are those that transformers applies, which reads up to three places: `rope_scaling` takes the
    place of `rope_parameters`, and what the table lacks comes from the fields beside it.

    Args:
        local: of layers with a window, of which Gemma's have another one.

    Raises `UserError`, beginning with `where`, for what is no table.
    """
    model_type = config.get("model_type")
    tables, scaling = (config.get(f"rope_{name}") or {} for name in ("parameters", "scaling"))
    fields, base, default = scaling or tables, "rope_theta", _BASES.get(str(model_type), 10_000.0)
    if model_type == GEMMA3 and isinstance(tables, dict) and (not tables or FULL in tables):
        # A table for each kind of layer; a scaling is added to that of the layers without a window.
        fields = tables.get(WINDOWED if local else FULL) or {"rope_type": "default"}
        if local:
            base, default = "rope_local_base_freq", 10_000.0
        elif isinstance(fields, dict) and isinstance(scaling, dict):
            fields = {**fields, **scaling}
    elif model_type == GEMMA3:
        fields = None
    if not isinstance(fields, dict) or any(isinstance(each, dict) for each in fields.values()):
        raise UserError(f"{where}: its rope parameters are not a table that transformers reads")
    kind = fields.get("rope_type", fields.get("type", "default"))
    rope = {"rope_theta": config.get(base, default), **fields, "rope_type": kind}
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if kind in ("llama3", "yarn", "longrope"):
        context = "original_max_position_embeddings"
        rope.setdefault(context, config.get("max_position_embeddings"))
        if model_type != GEMMA3 and context in config:
            rope[context] = config[context]
    if model_type == HUNYUAN and kind == "dynamic" and rope.get("alpha"):
        # It stretches the base whatever the length is: dynamic by name alone.
        numbers, head = Fields(rope, f"{where}: rope parameter "), head_size(config)
        stretched = numbers["rope_theta"] * numbers["alpha"] ** (head / max(1, head - 2))
        return {"rope_theta": float(str(np.float32(stretched))), "rope_type": "default"}
    return rope
