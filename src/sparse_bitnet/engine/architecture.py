# SPDX-License-Identifier: Apache-2.0
"""What the CPU engine needs to know of a model: sizes and variants, from its config.json. No torch."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import (
    FULL,
    GEMMA3,
    HUNYUAN,
    MOST_POSITIONS,
    WINDOWED,
    Fields,
    head_size,
    unread_setting,
    windows_of,
)
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.engine.rope import Rope, read_rope
from sparse_bitnet.errors import EngineLacks, UserError

MODEL_TYPES = ("qwen2", "llama", "qwen3", "bitnet", "mistral", GEMMA3, HUNYUAN)
"""transformers' `model_type` of the families that the engine computes."""

ACTIVATIONS = {"silu": 0, "swish": 0, "relu2": 1, "gelu_pytorch_tanh": 2}
"""transformers' names -> csrc/decoder.h's Activation."""

MOST_FEATURES, MOST_HEAD_DIM, MOST_SHARED = 1 << 23, 1 << 10, 1 << 10
"""The largest sizes that csrc/bindings_decoder.cpp takes."""

_HEAD_NORMS = {
    "qwen3": ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    GEMMA3: ("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    HUNYUAN: ("self_attn.query_layernorm.weight", "self_attn.key_layernorm.weight"),
}

BLOCK_LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""The linears of a block in the order in which the decoder takes them."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder of the llama/qwen2 family."""

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
    """Longest context that the model was made for."""
    ties_head: bool
    """The output head is the embedding."""
    qkv_bias: bool
    o_bias: bool
    sub_norms: bool
    """Norms before o_proj and down_proj (BitNet b1.58)."""
    head_norms: tuple[str, ...]
    """Norms of queries and keys (Qwen3, Gemma 3, Hunyuan), by their names in the block; empty: none."""
    norms_rotated: bool
    """Those are of queries and keys that are rotated already (Hunyuan)."""
    out_norms: bool
    """Norms of what attention and feed-forward part add to the residual (Gemma 3)."""
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
    """Of layers with a window."""
    windows: tuple[int, ...]
    """Of each layer: tokens that a token sees, itself included, or 0 for all; empty: all in all."""

    @property
    def feed_forward_norm(self) -> str:
        """The norm before the feed-forward part, in the block."""
        return f"{'pre_feedforward' if self.out_norms else 'post_attention'}_layernorm.weight"

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Name in the block -> (out_features, in_features)."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = (
            (queries, self.hidden),
            (keys, self.hidden),
            (keys, self.hidden),
            (self.hidden, queries),
            (self.intermediate, self.hidden),
            (self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )
        return dict(zip(BLOCK_LINEARS, shapes, strict=True))

    def vector_lengths(self) -> dict[str, int]:
        """Norms and biases of a block: name -> length."""
        shapes = self.linear_shapes()
        lengths = {
            "input_layernorm.weight": self.hidden,
            "post_attention_layernorm.weight": self.hidden,
        }
        if self.out_norms:
            lengths |= {f"{w}_feedforward_layernorm.weight": self.hidden for w in ("pre", "post")}
        if self.qkv_bias:
            lengths |= {f"{name}.bias": shapes[name][0] for name in BLOCK_LINEARS[:3]}
        if self.o_bias:
            lengths[f"{BLOCK_LINEARS[3]}.bias"] = self.hidden
        if self.sub_norms:
            lengths["self_attn.attn_sub_norm.weight"] = self.heads * self.head_dim
            lengths["mlp.ffn_sub_norm.weight"] = self.intermediate
        if self.linear_norms:
            lengths |= {f"{name}.norm.weight": shapes[name][1] for name in BLOCK_LINEARS}
        return lengths | dict.fromkeys(self.head_norms, self.head_dim)


def read_architecture(config: dict[str, Any], where: str) -> Architecture:
    """What a config.json describes.

    Raises `EngineLacks`, beginning with `where`, for what the CPU engine cannot run, and `UserError` for
    sizes that are missing or make no model.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UserError(f"{where}: model_type is {model_type!r}, not a name")
    if model_type not in MODEL_TYPES:
        raise EngineLacks(
            f"{where}: the CPU engine runs {', '.join(MODEL_TYPES)}, not {model_type!r}; use --engine "
            "transformers"
        )
    fields = Fields(config, f"{where}: ")
    _refuse_variants(config, where)
    heads = fields.size("num_attention_heads", most=MOST_FEATURES)
    hidden = fields.size("hidden_size", most=MOST_FEATURES)
    kv_heads = fields.size("num_key_value_heads", heads)
    head_dim = fields.size("head_dim", head_size(config), most=MOST_HEAD_DIM)
    shared = heads // kv_heads
    if heads % kv_heads or shared > MOST_SHARED or head_dim % 2 or heads * head_dim > MOST_FEATURES:
        raise UserError(
            f"{where}: {heads} heads of {head_dim} values with {kv_heads} key-value heads make no model"
        )
    attention_bias = bool(config.get("attention_bias", False))
    is_gemma = model_type == GEMMA3
    scores = fields.optional("query_pre_attn_scalar", 256) if is_gemma else head_dim
    return Architecture(
        model_type=model_type,
        hidden=hidden,
        intermediate=fields.size("intermediate_size", most=MOST_FEATURES),
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
        sub_norms=model_type == "bitnet",
        head_norms=_HEAD_NORMS.get(model_type, ()),
        norms_rotated=model_type == HUNYUAN,
        out_norms=is_gemma,
        linear_norms=bool(config.get(LINEAR_NORMS)),
        norm_offset=1.0 if is_gemma else 0.0,
        query_scale=float(np.float32(1) / np.sqrt(np.float32(scores))),
        embedding_scale=math.sqrt(hidden) if is_gemma else 1.0,
        rope=read_rope(config, head_dim, where),
        local_rope=read_rope(config, head_dim, where, local=True),
        windows=windows_of(config, where),
    )


def _activation(config: dict[str, Any]) -> Any:
    """Its name; Gemma's configs have another field for it."""
    return config.get("hidden_activation" if config.get("model_type") == GEMMA3 else "hidden_act")


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    """Raise for what changes a forward and is not computed here."""
    reason = None
    layer_types = config.get("layer_types")
    activation = _activation(config)
    if not isinstance(activation, str):
        raise UserError(f"{where}: hidden_act is {activation!r}, not a name")
    if activation not in ACTIVATIONS:
        reason = f"activation {activation!r}"
    elif (own := config.get(LINEAR_NORMS)) and own != config.get("rms_norm_eps"):
        reason = f"norms of two epsilons ({own!r} in linears, {config.get('rms_norm_eps')!r})"
    elif own and config.get("model_type") == "bitnet":
        reason = "two norms before one linear"
    elif config.get("mlp_bias"):
        reason = "biases in the feed-forward part"
    elif setting := unread_setting(config):
        reason = f"counterpart of {setting} in config.json"
    elif isinstance(layer_types, list) and any(
        kind not in (FULL, WINDOWED) for kind in layer_types
    ):
        reason = "layers but those with full or sliding attention"
    elif config.get("model_type") == GEMMA3:
        names = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")
        reason = next((name for name in names if config.get(name)), None)
    if reason is not None:
        raise EngineLacks(f"{where}: the CPU engine has no {reason}; use --engine transformers")
