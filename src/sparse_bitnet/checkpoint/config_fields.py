# SPDX-License-Identifier: Apache-2.0
"""What a config.json, of any release of transformers, says of heads, windows and ropes. Free of torch."""

from typing import Any

import numpy as np

from sparse_bitnet.errors import UserError

GEMMA3, HUNYUAN = "gemma3_text", "hunyuan_v1_dense"
WINDOWED, FULL = "sliding_attention", "full_attention"
"""Entries of `layer_types`, and of Gemma's `rope_parameters`."""

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


def windows_of(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """Of each layer: tokens that a token sees, itself included, or 0 for all; empty: all in all.

    Raises `UserError`, beginning with `where`, for numbers that make none.
    """
    fields = Fields(config, f"{where}: ")
    model_type, types = config["model_type"], config.get("layer_types")
    if not config.get("sliding_window", _WINDOW):
        return ()
    if types is None and model_type != GEMMA3:
        # Mistral's window is every layer's, Qwen's that of the upper layers, if it is used at all.
        is_used = model_type == "mistral" or config.get("use_sliding_window")
        if not is_used:
            return ()
    elif isinstance(types, list) and WINDOWED not in types:
        return ()
    window = fields.size("sliding_window", _WINDOW, most=MOST_POSITIONS)
    layers = fields.size("num_hidden_layers", most=_MOST_LAYERS)
    first = 0 if model_type == "mistral" else config.get("max_window_layers", _UNWINDOWED)
    if types is not None:
        if len(types) != layers:
            raise UserError(f"{where}: layer_types are {len(types)}, num_hidden_layers is {layers}")
        has_window = [kind == WINDOWED for kind in types]
    elif model_type == GEMMA3:
        has_window = gemma_windows(layers, fields.size("sliding_window_pattern", _EVERY))
    elif type(first) is not int:
        raise UserError(f"{where}: max_window_layers is {shown(first)}, not a number of layers")
    else:
        has_window = [layer >= first for layer in range(layers)]
    return tuple(window if has else 0 for has in has_window)


def rope_of(config: dict[str, Any], where: str, *, local: bool = False) -> dict[str, Any]:
    """The parameters of the rope, `rope_type` and `rope_theta` among them, which may be None.

    Args:
        local: of layers with a window, of which Gemma's have another one.

    Raises `UserError`, beginning with `where`, for what is no table.
    """
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta")
    if not isinstance(fields, dict):
        raise UserError(f"{where}: its rope parameters are not a table")
    if config.get("model_type") == GEMMA3:
        if FULL in fields:
            fields = fields.get(WINDOWED if local else FULL)
            if not isinstance(fields, dict):
                raise UserError(f"{where}: its rope parameters are not a table")
        elif local:
            # As transformers 4 writes it.
            fields, theta = {}, config.get("rope_local_base_freq")
    kind = fields.get("rope_type", fields.get("type", "default"))
    rope = {"rope_theta": theta, **fields, "rope_type": kind}
    if config.get("model_type") == HUNYUAN and kind == "dynamic" and rope.get("alpha"):
        # It stretches the base whatever the length is: dynamic by name alone.
        numbers, head = Fields(rope, f"{where}: rope parameter "), head_size(config)
        base = numbers["rope_theta"] * numbers["alpha"] ** (head / max(1, head - 2))
        return {"rope_theta": float(str(np.float32(base))), "rope_type": "default"}
    return rope
