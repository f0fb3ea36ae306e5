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
    MOST_POSITIONS,
    WINDOWED,
    Fields,
    head_size,
    rope_of,
    unread_setting,
    windows_of,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import EngineLacks, UserError, library_errors_as

MODEL_TYPES = ("qwen2", "llama", "qwen3", "bitnet", "mistral", GEMMA3, HUNYUAN)
"""transformers' `model_type` of the families that the engine computes."""

ACTIVATIONS = {"silu": 0, "swish": 0, "relu2": 1, "gelu_pytorch_tanh": 2}
"""transformers' names -> csrc/decoder.h's Activation."""

_MOST_FEATURES, _MOST_HEAD_DIM, _MOST_SHARED = 1 << 23, 1 << 10, 1 << 10
"""The largest sizes that csrc/bindings_decoder.cpp takes."""

_MOST_HIDDEN = 1 << 17
"""The largest hidden size: sums over an output head of int8 then fit into 32 bits (csrc/matmul.h)."""

_HEAD_NORMS = {
    **dict.fromkeys(("qwen3", GEMMA3), ("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    HUNYUAN: ("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"),
}
"""Norms of queries and keys by their names in the block; Hunyuan's are of rotated ones."""

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


class Rope(NamedTuple):
    """Rotary embedding: inverse frequencies, float32 [head_dim / 2], and a factor of cosine and sine."""

    inverse_frequencies: np.ndarray
    scaling: float


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
    """Added to the weights of norms: 1 for Gemma's."""
    query_scale: float
    """Multiplies the scores of attention."""
    embedding_scale: float
    """Multiplies the rows of the embedding."""
    rope: Rope
    local_rope: Rope
    """Rotary embedding of the layers with a sliding window."""
    windows: tuple[int, ...]
    """Attention window of each layer in tokens, the token itself included; 0 or empty tuple: no limit."""

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (out_features, in_features) of every linear of a block, by its name in the block."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner, outer = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        of_keys = (keys, self.hidden)
        shapes = (
            (queries, self.hidden),
            of_keys,
            of_keys,
            (self.hidden, queries),
            inner,
            inner,
            outer,
        )
        return dict(zip(BLOCK_LINEARS.values(), shapes, strict=True))

    def vectors(self) -> dict[str, tuple[str, int]]:
        """Return norms and biases of a block: name in csrc/decoder.h -> (name in the block, length).

        A norm of the input of q, k, v, gate or up alone is the decoder's `q_linear_norm` and so on.
        """
        shapes = {key: self.linear_shapes()[name] for key, name in BLOCK_LINEARS.items()}
        named = {"input_norm": ("input_layernorm.weight", self.hidden)}
        behind_attention = ("post_attention_layernorm.weight", self.hidden)
        if self.model_type == GEMMA3:
            # Gemma also normalises what attention and feed-forward part add to the residual.
            named["attention_out_norm"] = behind_attention
            named["post_attention_norm"] = ("pre_feedforward_layernorm.weight", self.hidden)
            named["ffn_out_norm"] = ("post_feedforward_layernorm.weight", self.hidden)
        else:
            named["post_attention_norm"] = behind_attention
        for key in (*("qkv" if self.qkv_bias else ""), *("o" if self.o_bias else "")):
            named[f"{key}_bias"] = (f"{BLOCK_LINEARS[key]}.bias", shapes[key][0])
        if self.model_type == "bitnet":
            named["attention_sub_norm"] = ("self_attn.attn_sub_norm.weight", shapes["o"][1])
            named["ffn_sub_norm"] = ("mlp.ffn_sub_norm.weight", shapes["down"][1])
        if self.linear_norms:
            sub_norms = {"o": "attention_sub_norm", "down": "ffn_sub_norm"}
            for key, name in BLOCK_LINEARS.items():
                norm = sub_norms.get(key, f"{key}_linear_norm")
                named[norm] = (f"{name}.norm.weight", shapes[key][1])
        names = _HEAD_NORMS.get(self.model_type, ())
        for key, name in zip(("q_norm", "k_norm"), names, strict=False):
            named[key] = (name, self.head_dim)
        return named


def read_architecture(config: dict[str, Any], where: str) -> Architecture:
    """Return the architecture that a config.json describes.

    Raises `EngineLacks`, beginning with `where`, for what the CPU engine cannot run, and `UserError` for
    sizes that are missing or do not fit together.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise EngineLacks(
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
        activation=ACTIVATIONS[_activation(config)],
        positions=fields.size("max_position_embeddings", most=MOST_POSITIONS),
        ties_head=bool(config.get("tie_word_embeddings", is_gemma)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=model_type != "qwen2" and attention_bias,
        linear_norms=bool(config.get(LINEAR_NORMS)),
        norm_offset=1.0 if is_gemma else 0.0,
        query_scale=float(np.float32(1) / np.sqrt(np.float32(scores))),
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        rope=read_rope(config, head_dim, where),
        local_rope=read_rope(config, head_dim, where, local=True),
        windows=windows_of(config, where),
    )


def _activation(config: dict[str, Any]) -> Any:
    """Return the name of the activation; Gemma's configs have another field for it."""
    return config.get("hidden_activation" if config.get("model_type") == GEMMA3 else "hidden_act")


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    """Raise `EngineLacks` for settings that change the forward pass and are not supported here."""
    model_type, activation = config["model_type"], _activation(config)
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
        f"counterpart of {setting} in config.json": setting,
        "layers but those with full or sliding attention": any(
            kind not in (FULL, WINDOWED) for kind in kinds
        ),
    }
    for name in (
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    ):
        lacks[name] = model_type == GEMMA3 and config.get(name)
    for what, is_set in lacks.items():
        if is_set:
            raise _lacks(where, what)


def _lacks(where: str, what: str) -> EngineLacks:
    return EngineLacks(f"{where}: the CPU engine has no {what}; use --engine transformers")


def read_rope(config: dict[str, Any], head_dim: int, where: str, *, local: bool = False) -> Rope:
    """Return the rope of a config.json; `local`: that of its layers with a window.

    Raises `UserError`, beginning with `where`, for unsupported kinds and missing numbers.
    """
    fields = rope_of(config, where, local=local)
    kind = fields["rope_type"]
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise _lacks(where, f"rope type {kind!r}")
    numbers = Fields(fields, f"{where}: rope parameter ")
    if numbers.optional("partial_rotary_factor", 1.0) != 1:
        raise _lacks(where, "rotation but of whole heads")
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
    match kind:
        case "yarn":
            return _yarn(powers, head_dim, numbers, config)
        case "llama3":
            plain = _llama3(plain, numbers)
        case "linear":
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
    longest = config.get("max_position_embeddings")
    if numbers.is_set("factor") or not isinstance(longest, int):
        factor = numbers["factor"]
    else:
        factor = longest / context

    def magnitude(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if numbers.is_set("attention_factor"):
        scaling = numbers["attention_factor"]
    elif numbers.is_set("mscale") and numbers.is_set("mscale_all_dim"):
        scaling = magnitude(numbers["mscale"]) / magnitude(numbers["mscale_all_dim"])
    else:
        scaling = magnitude(1.0)

    def dimension(rotations: float) -> float:
        ratio = context / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(numbers["rope_theta"]))

    low = dimension(numbers.optional("beta_fast", 32.0))
    high = dimension(numbers.optional("beta_slow", 1.0))
    if numbers.is_set("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    steps = np.arange(head_dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = 1 - ramp
    plain, stretched = np.float32(1) / powers, np.float32(1) / (np.float32(factor) * powers)
    return Rope(stretched * (1 - kept) + plain * kept, scaling)
