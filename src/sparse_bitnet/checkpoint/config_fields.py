# SPDX-License-Identifier: Apache-2.0
"""Reader of heads, windows and ropes in a config.json of any transformers release. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sparse_bitnet.errors import UserError

GEMMA3, HUNYUAN, QWEN35 = "gemma3_text", "hunyuan_v1_dense", "qwen3_5_text"
QWEN35_TYPES = (QWEN35, "qwen3_5", "prism_hadamard_qwen35")
"""`model_type` of Qwen3.5: text alone; with an image encoder; with that and rotated weights."""
WINDOWED, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
"""Values in `layer_types`; the first two are keys of Gemma's `rope_parameters`, too."""

LINEAR_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Fields of Qwen3.5's linear attention with transformers' defaults."""

_DEFAULTS = {
    "llama": (1e-6, 2048, "silu"),
    "mistral": (1e-6, 131_072, "silu"),
    "qwen2": (1e-6, 32_768, "silu"),
    "qwen3": (1e-6, 32_768, "silu"),
    QWEN35: (1e-6, 32_768, "silu"),
    GEMMA3: (1e-6, 131_072, "gelu_pytorch_tanh"),
    HUNYUAN: (1e-5, 2048, "silu"),
    "bitnet": (1e-5, 2048, "relu2"),
}
"""Model type -> transformers' defaults: `rms_norm_eps`, `max_position_embeddings`, activation."""

_WINDOW_FAMILIES = ("qwen2", "qwen3", "mistral", GEMMA3)
"""Model types with attention windows; transformers ignores the window settings of all others."""

_BASES = {"bitnet": 500_000.0, GEMMA3: 1_000_000.0}
"""Default rope base of the model types whose default is not 10,000."""

MOST_POSITIONS = 1 << 24
"""Largest number of positions that csrc/bindings_decoder.cpp accepts."""

MOST_LAYERS = 4096
"""Most layers of a model that is built: each is a Python object, even without values."""

_EVERY, _WINDOW, _UNWINDOWED = 6, 4096, 28
"""Defaults: the period of Gemma's layers without a window (the sixth, the twelfth and so on), the window
in tokens, and the number of Qwen's first layers without one (`max_window_layers`)."""

_ROTATION = re.compile(r"hadamard|rotat|quarot|spinquant|(^|_)had(_|$)", re.IGNORECASE)
"""Pattern of setting and file names by which tools declare that weights are multiplied by a rotation."""

_LARGEST = float(np.finfo(np.float32).max)


class Fields:
    """Checked numbers of a table. Raises `UserError`, beginning with `where`, for invalid ones."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values, self._where = values, where

    def __getitem__(self, name: str) -> float:
        """Return a number that is positive, and finite in float32."""
        value = self.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _LARGEST:
            return float(value)
        raise UserError(f"{self._where}{name} is {shown(value)}, not a positive number")

    def optional(self, name: str, default: float) -> float:
        """Return a number as `self[name]` does, or `default` if the field is missing."""
        return default if self.values.get(name) is None else self[name]

    def size(self, name: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """Return a whole number from 1 to `most`; `default` replaces a missing field."""
        value = self.values.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise UserError(f"{self._where}{name} is {shown(value)}, not a positive size")
        if value > most:
            raise UserError(f"{self._where}{name} is above {most:,}, the largest supported value")
        return value


def shown(value: object) -> str:
    """Return the `repr` of a value from a file, cut to 40 characters for messages."""
    return repr(value)[:40]


def head_size(config: dict[str, Any]) -> Any:
    """Return `head_dim`, or transformers' default if it is not set. The value is not checked."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    defaults = {"qwen3": 128, GEMMA3: 256, QWEN35: 256}
    return config.get("head_dim") or defaults.get(config["model_type"], shared)


def activation_field(config: dict[str, Any]) -> str:
    """Return the name of the field with the activation."""
    return "hidden_activation" if config.get("model_type") == GEMMA3 else "hidden_act"


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's config in that of a Qwen3.5 model, and any other config itself; fields
    that it leaves out get the values in `_DEFAULTS` and, in Qwen3.5's, `LINEAR_SIZES`."""
    text = config.get("text_config")
    if config.get("model_type") in QWEN35_TYPES[1:] and isinstance(text, dict):
        own = ("model_type", "architectures", "text_config", "image_", "video_", "vision_")
        shared = {key: value for key, value in config.items() if not key.startswith(own)}
        config = {"model_type": QWEN35, **shared, **text}
    defaults: dict[str, Any] = {}
    if (model_type := str(config.get("model_type"))) in _DEFAULTS:
        names = ("rms_norm_eps", "max_position_embeddings", activation_field(config))
        defaults.update(zip(names, _DEFAULTS[model_type], strict=True))
    if model_type == QWEN35:
        defaults |= LINEAR_SIZES
    return config | {key: value for key, value in defaults.items() if config.get(key) is None}


def linear_attention_layers(config: dict[str, Any], where: str) -> list[bool]:
    """Return for each layer of a Qwen3.5 model whether it has linear attention. Raises `UserError`,
    beginning with `where`, for `layer_types` of another kind or number."""
    fields, kinds = Fields(config, f"{where}: "), config.get("layer_types")
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    if kinds is None:
        return all_but_every(layers, fields.size("full_attention_interval", 4))
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {LINEAR, FULL}:
        raise UserError(f"{where}: layer_types is not {layers} entries of {LINEAR} or {FULL}")
    return [kind == LINEAR for kind in kinds]


def all_but_every(layers: int, every: int = _EVERY) -> list[bool]:
    """Return for each layer whether it has a window: all but every `every`-th one do."""
    return [bool((layer + 1) % every) for layer in range(min(layers, MOST_LAYERS))]


def check_basis(settings: Mapping[str, Any], where: str, read: Iterable[str] = ()) -> None:
    """Raise `UserError`, beginning with `where`, for settings that declare weights in a rotated basis and
    are not in `read`."""
    for key, value in settings.items():
        name = f"{key} {value}" if key == "model_type" else key
        if value and name not in read and _ROTATION.search(name):
            raise UserError(
                f"{where}: {name} says that its weights are stored in a rotated basis, which is not "
                "supported; use the model from before the rotation"
            )


def check_experts(settings: Mapping[str, Any], where: str) -> None:
    """Raise `UserError`, beginning with `where`, for the settings of a mixture of experts."""
    for key, value in settings.items():
        if key.endswith(("experts", "expert_count")) and type(value) is int and value > 1:
            what = "declares a mixture of experts, which is not supported"
            raise UserError(f"{where}: {key} = {value} {what}; llama.cpp runs such GGUF files")


def check_fields(
    table: Mapping[str, Any],
    read: Iterable[str],
    where: str,
    only: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Raise `UserError`, beginning with `where`, for a field that is set but not in `read`, and for a
    field in `only` that has another value."""
    for key, value in table.items():
        is_off = not (any(value) if isinstance(value, list) else value)
        if key not in read and not (value == only[key] if key in only else is_off):
            known = f"; {only[key]} is" if key in only else " and may change what the weights mean"
            raise UserError(f"{where}: {key} = {shown(value)} is not supported{known}")


def of_all_layers(value: Any, layers: object) -> Any:
    """Return the number that a list repeats for every layer; return any other value unchanged."""
    is_list = isinstance(value, list) and len(value) == layers and value == value[:1] * len(value)
    return value[0] if is_list and value and type(value[0]) in (int, float) else value


def unread_setting(config: dict[str, Any]) -> str | None:
    """Return the name of a setting that transformers applies and this package does not, or None."""
    if not config.get("is_causal", True):
        return "is_causal"
    return next((name for name in ("per_layer_config", "text_config") if config.get(name)), None)


def windows_of(config: dict[str, Any], where: str) -> tuple[int, ...]:
    """Return each layer's window in tokens, itself included; 0 means all tokens. Empty: no layer has one.

    Raises `UserError`, beginning with `where`, for settings that are invalid or contradict each other.
    """
    fields = Fields(config, f"{where}: ")
    model_type, types = config["model_type"], config.get("layer_types")
    if model_type not in _WINDOW_FAMILIES:
        return ()
    kinds = [] if types is None else types
    if not isinstance(kinds, list):
        raise UserError(f"{where}: layer_types is {shown(types)}, not a list")
    layers = fields.size("num_hidden_layers", most=MOST_LAYERS)
    if types is not None and len(kinds) != layers:
        raise UserError(f"{where}: layer_types are {len(kinds)}, num_hidden_layers is {layers}")
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
    first = 0 if model_type == "mistral" else config.get("max_window_layers", _UNWINDOWED)
    if kinds:
        has_window = [kind == WINDOWED for kind in kinds]
    elif model_type == GEMMA3:
        has_window = all_but_every(layers, fields.size("sliding_window_pattern", _EVERY))
    elif type(first) is not int:
        raise UserError(f"{where}: max_window_layers is {shown(first)}, not a number of layers")
    else:
        has_window = [layer >= first for layer in range(layers)]
    return tuple(window if has else 0 for has in has_window)


def rope_of(config: dict[str, Any], where: str, *, local: bool = False) -> dict[str, Any]:
    """Return the rope parameters, among them `rope_type` and `rope_theta`; values may be None.

    They match transformers, which reads up to three places: `rope_scaling` replaces `rope_parameters`,
    and the fields beside the table supply what it lacks. `local`: return those of layers with a window;
    Gemma's have a rope of their own.

    Raises `UserError`, beginning with `where`, if the parameters are not a table.
    """
    model_type = config.get("model_type")
    tables, scaling = (config.get(f"rope_{name}") or {} for name in ("parameters", "scaling"))
    fields, base, default = scaling or tables, "rope_theta", _BASES.get(str(model_type), 10_000.0)
    if model_type == GEMMA3 and isinstance(tables, dict) and (not tables or FULL in tables):
        # Gemma has a table per kind of layer; `rope_scaling` is added to that of unwindowed layers.
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
    if model_type == QWEN35:
        rope.setdefault("partial_rotary_factor", 0.25)
    if kind in ("llama3", "yarn", "longrope"):
        context = "original_max_position_embeddings"
        rope.setdefault(context, config.get("max_position_embeddings"))
        if model_type != GEMMA3 and context in config:
            rope[context] = config[context]
    if model_type == HUNYUAN and kind == "dynamic" and rope.get("alpha"):
        # HunYuan stretches the base at every length: its rope is dynamic in name only.
        numbers, head = Fields(rope, f"{where}: rope parameter "), head_size(config)
        stretched = numbers["rope_theta"] * numbers["alpha"] ** (head / max(1, head - 2))
        return {"rope_theta": float(str(np.float32(stretched))), "rope_type": "default"}
    return rope
