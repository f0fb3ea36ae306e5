# SPDX-License-Identifier: Apache-2.0
"""Sizes and variants of a model that the CPU engine needs, read from its config.json. No torch."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.config_fields import (
    FULL,
    GEMMA3,
    HUNYUAN,
    LINEAR,
    MOST_POSITIONS,
    QWEN35,
    WINDOWED,
    Fields,
    activation_field,
    head_size,
    linear_attention_layers,
    rope_of,
    text_config_of,
    unread_setting,
    windows_of,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import Unsupported, UserError, library_errors_as

MODEL_TYPES = ("qwen2", "llama", "qwen3", "bitnet", "mistral", GEMMA3, HUNYUAN, QWEN35)
"""transformers' `model_type` of the families that the engine computes."""

ACTIVATIONS = {"silu": 0, "swish": 0, "relu2": 1, "gelu_pytorch_tanh": 2}
"""transformers' names -> csrc/decoder.h's Activation."""

_MOST_FEATURES, _MOST_HEAD_DIM, _MOST_SHARED = 1 << 23, 1 << 10, 1 << 10
"""The largest sizes that csrc/bindings_decoder.cpp takes."""

_MOST_DELTA_HEADS, _MOST_TAPS = 2730, 8
"""The largest sizes of Gated DeltaNet there."""

_MOST_HIDDEN = 1 << 17
"""The largest hidden size: sums over an output head of int8 then fit into 32 bits (csrc/matmul.h)."""

_HEAD_NORMS = dict.fromkeys(("qwen3", GEMMA3, QWEN35), ("q_norm", "k_norm"))
_HEAD_NORMS |= {HUNYUAN: ("query_layernorm", "key_layernorm")}
"""Norms of queries and keys by their names in the attention; Hunyuan's are of rotated ones."""

BLOCK_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""The linears of a block in the decoder's order: name in csrc/decoder.h -> name in the block."""

DELTA_LINEARS = {
    "q": "linear_attn.in_proj_qkv",
    "k": "linear_attn.in_proj_z",
    "o": "linear_attn.out_proj",
    **{key: BLOCK_LINEARS[key] for key in ("gate", "up", "down")},
}
"""The same for a block with Gated DeltaNet."""

ONE_INPUT = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
"""Linears of a block that multiply the same input."""


class Rope(NamedTuple):
    """Rotary embedding: inverse frequencies, float32 [rotated dimensions / 2], and a factor of cosine and
    sine."""

    inverse_frequencies: np.ndarray
    scaling: float


class DeltaNet(NamedTuple):
    """Sizes of Gated DeltaNet (csrc/delta_net.h)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the token itself included."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and variants of a decoder of the llama/qwen2 family."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_epsilon: float
    activation: int
    """A value of `ACTIVATIONS`."""
    positions: int
    """Longest context that the model was trained for, in tokens."""
    ties_head: bool
    """Whether the output head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    linear_norms: bool
    """Norms of the input of each linear, without offset (BitNet-embedding)."""
    norm_offset: float
    """Added to the weights of norms: 1 for Gemma's and Qwen3.5's."""
    query_scale: float
    """Multiplies the scores of attention."""
    embedding_scale: float
    """Multiplies the rows of the embedding."""
    rope: Rope
    local_rope: Rope
    """Rotary embedding of the layers with a sliding window."""
    windows: tuple[int, ...]
    """Attention window of each layer in tokens, the token itself included; 0 or empty tuple: no limit."""
    delta_net: DeltaNet | None = None
    """Sizes of the layers with Gated DeltaNet; attention then has gates."""
    delta_layers: tuple[bool, ...] = ()
    """Whether each layer has Gated DeltaNet in place of attention; empty: none has."""

    def linears(self, layer: int = 0) -> dict[str, str]:
        """Return the linears of a block: name in csrc/decoder.h -> name in the block."""
        is_delta = layer < len(self.delta_layers) and self.delta_layers[layer]
        return DELTA_LINEARS if is_delta else BLOCK_LINEARS

    def linear_shapes(self, layer: int = 0) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of every linear of a block, by its name in the block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q": queries * (2 if self.delta_net else 1), "k": keys, "v": keys}
        linears, attended = self.linears(layer), queries
        if net := self.delta_net if linears is DELTA_LINEARS else None:
            attended = net.value_heads * net.value_dim
            rows = {"q": 2 * net.key_heads * net.key_dim + attended, "k": attended}
        shapes = {key: (count, self.hidden) for key, count in rows.items()}
        shapes |= {"o": (self.hidden, attended), "down": (self.hidden, self.intermediate)}
        shapes |= dict.fromkeys(("gate", "up"), (self.intermediate, self.hidden))
        return {name: shapes[key] for key, name in linears.items()}

    def vectors(self, layer: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return a block's norms, biases and other dense tensors: name in csrc/decoder.h -> (name in the
        block, shape).

        A norm of the input of q, k, v, gate or up alone is the decoder's `q_linear_norm` and so on.
        """
        linears = self.linears(layer)
        shapes = {key: self.linear_shapes(layer)[name] for key, name in linears.items()}
        hidden: tuple[int, ...] = (self.hidden,)
        named = {"input_norm": ("input_layernorm.weight", hidden)}
        behind_attention = ("post_attention_layernorm.weight", hidden)
        if self.model_type == GEMMA3:
            # Gemma also normalises what attention and feed-forward part add to the residual.
            named["attention_out_norm"] = behind_attention
            named["post_attention_norm"] = ("pre_feedforward_layernorm.weight", hidden)
            named["ffn_out_norm"] = ("post_feedforward_layernorm.weight", hidden)
        else:
            named["post_attention_norm"] = behind_attention
        if net := self.delta_net if linears is DELTA_LINEARS else None:
            heads, channels = net.value_heads, shapes["q"][0]
            return named | {
                "decay_weights": ("linear_attn.in_proj_a.weight", (heads, self.hidden)),
                "step_weights": ("linear_attn.in_proj_b.weight", (heads, self.hidden)),
                "decay_bias": ("linear_attn.dt_bias", (heads,)),
                "decay_rates": ("linear_attn.A_log", (heads,)),
                "convolution": ("linear_attn.conv1d.weight", (channels, 1, net.taps)),
                "delta_norm": ("linear_attn.norm.weight", (net.value_dim,)),
            }
        for key in (*("qkv" if self.qkv_bias else ""), *("o" if self.o_bias else "")):
            named[f"{key}_bias"] = (f"{linears[key]}.bias", shapes[key][:1])
        if self.model_type == "bitnet":
            named["attention_sub_norm"] = ("self_attn.attn_sub_norm.weight", shapes["o"][1:])
            named["ffn_sub_norm"] = ("mlp.ffn_sub_norm.weight", shapes["down"][1:])
        if self.linear_norms:
            sub_norms = {"o": "attention_sub_norm", "down": "ffn_sub_norm"}
            for key, name in linears.items():
                norm = sub_norms.get(key, f"{key}_linear_norm")
                named[norm] = (f"{name}.norm.weight", shapes[key][1:])
        names = _HEAD_NORMS.get(self.model_type, ())
        for key, name in zip(("q_norm", "k_norm"), names, strict=False):
            named[key] = (f"self_attn.{name}.weight", (self.head_dim,))
        return named


def read_architecture(config: dict[str, Any], where: str) -> Architecture:
    """Return the architecture that a config.json describes.

    Raises `Unsupported`, beginning with `where`, for what the CPU engine cannot run, and `UserError` for
    sizes that are missing or do not fit together.
    """
    config = text_config_of(config)
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise Unsupported(
            f"{where}: the CPU engine runs {known}, not {model_type!r}; use --engine transformers"
        )
    fields = Fields(config, f"{where}: ")
    _refuse_variants(config, where)
    heads = fields.size("num_attention_heads", most=_MOST_FEATURES)
    hidden = fields.size("hidden_size", most=_MOST_HIDDEN)
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", head_size(config), most=_MOST_HEAD_DIM)
    is_odd = heads % kv_heads or head_dim % 2
    if is_odd or heads // kv_heads > _MOST_SHARED or heads * head_dim > _MOST_FEATURES:
        raise UserError(
            f"{where}: {heads} heads of {head_dim} values do not fit {kv_heads} key-value heads"
        )
    attention_bias = bool(config.get("attention_bias", False))
    is_gemma = model_type == GEMMA3
    scores = fields.optional("query_pre_attn_scalar", 256) if is_gemma else head_dim
    return Architecture(
        model_type=model_type,
        hidden=hidden,
        intermediate=fields.size("intermediate_size", most=_MOST_FEATURES),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=fields.size("vocab_size"),
        norm_epsilon=fields["rms_norm_eps"],
        activation=ACTIVATIONS[config[activation_field(config)]],
        positions=fields.size("max_position_embeddings", most=MOST_POSITIONS),
        ties_head=bool(config.get("tie_word_embeddings", is_gemma)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=model_type != "qwen2" and attention_bias,
        linear_norms=bool(config.get(LINEAR_NORMS)),
        norm_offset=1.0 if is_gemma or model_type == QWEN35 else 0.0,
        query_scale=float(np.float32(1) / np.sqrt(np.float32(scores))),
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        rope=read_rope(config, head_dim, where),
        local_rope=read_rope(config, head_dim, where, local=True),
        windows=windows_of(config, where),
        delta_net=_delta_net(fields, where) if model_type == QWEN35 else None,
        delta_layers=tuple(linear_attention_layers(config, where)) if model_type == QWEN35 else (),
    )


def _delta_net(fields: Fields, where: str) -> DeltaNet:
    """Return the sizes of Gated DeltaNet. Raises `Unsupported` for those without kernels."""
    net = DeltaNet(
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads", most=_MOST_DELTA_HEADS),
        key_dim=fields.size("linear_key_head_dim", most=_MOST_HEAD_DIM),
        value_dim=fields.size("linear_value_head_dim", most=_MOST_HEAD_DIM),
        taps=fields.size("linear_conv_kernel_dim"),
    )
    if net.value_heads % net.key_heads:
        raise UserError(
            f"{where}: {net.value_heads} value heads do not fit {net.key_heads} key heads"
        )
    if all(linear_attention_layers(fields.values, where)):
        raise _lacks(where, "a model without attention in any layer")
    if net.key_dim % 16 or net.value_dim % 16 or not 2 <= net.taps <= _MOST_TAPS:
        sizes = f"heads of {net.key_dim} and {net.value_dim} values and {net.taps} taps"
        raise _lacks(where, f"Gated DeltaNet with {sizes}")
    return net


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    """Raise `Unsupported` for settings that change the forward pass and are not supported here."""
    model_type, activation = config["model_type"], config.get(activation_field(config))
    epsilon, in_linears = config.get("rms_norm_eps"), config.get(LINEAR_NORMS)
    layer_types, setting = config.get("layer_types"), unread_setting(config)
    kinds = layer_types if isinstance(layer_types, list) else []
    lacks = {
        f"activation {activation!r}": activation not in tuple(ACTIVATIONS),
        f"norms of two epsilons ({in_linears!r} in linears, {epsilon!r})": (
            in_linears and in_linears != epsilon
        ),
        "two norms before one linear": in_linears and model_type == "bitnet",
        "biases in the feed-forward part": config.get("mlp_bias"),
        f"config.json's {setting}": setting,
        "layers without full or sliding-window attention": any(
            kind not in (FULL, LINEAR if model_type == QWEN35 else WINDOWED) for kind in kinds
        ),
        f"Gated DeltaNet with activation {activation!r}": (
            model_type == QWEN35 and activation not in ("silu", "swish")
        ),
    }
    names = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
    lacks |= {name: config.get(name) for name in names if model_type == GEMMA3}
    for what, is_set in lacks.items():
        if is_set:
            raise _lacks(where, what)


def _lacks(where: str, what: str) -> Unsupported:
    return Unsupported(
        f"{where}: the CPU engine does not support {what}; use --engine transformers"
    )


def read_rope(config: dict[str, Any], head_dim: int, where: str, *, local: bool = False) -> Rope:
    """Return the rope of a config.json; `local`: that of its layers with a window.

    Raises `UserError`, beginning with `where`, for unsupported kinds and missing numbers.
    """
    fields = rope_of(config, where, local=local)
    kind = fields["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise _lacks(where, f"rope type {kind!r}")
    numbers = Fields(fields, f"{where}: rope parameter ")
    is_partial = config.get("model_type") == QWEN35
    share = numbers.optional("partial_rotary_factor", 1.0)
    if share != 1 and not is_partial:
        raise _lacks(where, f"partial_rotary_factor {share}")
    head_dim = int(head_dim * share)
    if share > 1 or head_dim % 2 or head_dim < 2:
        raise UserError(
            f"{where}: partial_rotary_factor is {share}, which gives no pairs of dimensions"
        )
    failure = f"{where}: its rope parameters give frequencies that are not finite"
    with library_errors_as(failure), np.errstate(all="ignore"):
        rope = _frequencies(kind, head_dim, numbers, config)
        if not np.isfinite([*rope.inverse_frequencies, np.float32(rope.scaling)]).all():
            raise UserError(f"{failure}: correct them")
    return rope


def _frequencies(kind: str, head_dim: int, numbers: Fields, config: dict[str, Any]) -> Rope:
    # torch's float32 power is correctly rounded nearly always, like this one.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(numbers["rope_theta"], exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / powers
    if kind == "yarn":
        return _yarn(powers, head_dim, numbers, config)
    if kind == "llama3":
        plain = _llama3(plain, numbers)
    elif kind == "linear":
        plain = plain / np.float32(numbers["factor"])
    return Rope(plain, 1.0)


def _llama3(plain: np.ndarray, numbers: Fields) -> np.ndarray:
    """Return Llama 3.1's rope: long wavelengths are stretched by `factor`, those in between partly."""
    factor, low, high = numbers["factor"], numbers["low_freq_factor"], numbers["high_freq_factor"]
    context = numbers["original_max_position_embeddings"]
    wavelength = np.float32(2 * math.pi) / plain
    is_long, is_short = wavelength > context / low, wavelength < context / high
    stretched = np.where(is_long, plain / np.float32(factor), plain)
    smooth = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * stretched / np.float32(factor) + smooth * stretched
    return np.where(~is_short & ~is_long, between, stretched).astype(np.float32)


def _yarn(powers: np.ndarray, head_dim: int, numbers: Fields, config: dict[str, Any]) -> Rope:
    """Return YaRN's rope (arXiv 2309.00071): slow dimensions are interpolated, quick ones kept."""
    context = numbers["original_max_position_embeddings"]
    factor = numbers.optional("factor", config["max_position_embeddings"] / context)

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if numbers.values.get("attention_factor") is not None:
        scaling = numbers["attention_factor"]
    elif numbers.values.get("mscale") and numbers.values.get("mscale_all_dim"):
        scaling = magnitude(numbers["mscale"]) / magnitude(numbers["mscale_all_dim"])
    else:
        scaling = magnitude(1.0)

    def dimension(rotations: float) -> float:
        ratio = context / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(numbers["rope_theta"]))

    low = dimension(numbers.optional("beta_fast", 32.0))
    high = dimension(numbers.optional("beta_slow", 1.0))
    if numbers.values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = 1 - ramp
    plain, stretched = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    return Rope(stretched * (1 - kept) + plain * kept, scaling)
