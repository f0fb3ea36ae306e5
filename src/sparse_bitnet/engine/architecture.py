# SPDX-License-Identifier: Apache-2.0
"""What the CPU engine needs to know of a model: sizes and variants, from its config.json. No torch."""

from dataclasses import dataclass
from typing import Any

from sparse_bitnet.engine.rope import Fields, Rope, read_rope
from sparse_bitnet.errors import EngineLacks, UserError

MODEL_TYPES = ("qwen2", "llama", "qwen3", "bitnet")
"""transformers' `model_type` of the families that the engine computes."""

ACTIVATIONS = {"silu": 0, "swish": 0, "relu2": 1}
"""transformers' names -> csrc/decoder.h's Activation."""

MOST_FEATURES, MOST_HEAD_DIM, MOST_POSITIONS = 1 << 23, 1 << 10, 1 << 24
"""The largest sizes that csrc/bindings_decoder.cpp takes."""

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
    head_norms: bool
    """Norms of queries and keys (Qwen3)."""
    rope: Rope

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
        if self.qkv_bias:
            lengths |= {f"{name}.bias": shapes[name][0] for name in BLOCK_LINEARS[:3]}
        if self.o_bias:
            lengths[f"{BLOCK_LINEARS[3]}.bias"] = self.hidden
        if self.sub_norms:
            lengths["self_attn.attn_sub_norm.weight"] = self.heads * self.head_dim
            lengths["mlp.ffn_sub_norm.weight"] = self.intermediate
        if self.head_norms:
            lengths |= {f"self_attn.{name}_norm.weight": self.head_dim for name in "qk"}
        return lengths


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
    # Qwen3's heads have 128 values unless it says otherwise, those of the others share out `hidden`.
    default = 128 if model_type == "qwen3" else hidden // heads
    head_dim = fields.size("head_dim", default, most=MOST_HEAD_DIM)
    if heads % kv_heads or head_dim % 2 or heads * head_dim > MOST_FEATURES:
        raise UserError(
            f"{where}: {heads} heads of {head_dim} values with {kv_heads} key-value heads make no model"
        )
    attention_bias = bool(config.get("attention_bias", False))
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
        activation=ACTIVATIONS[config["hidden_act"]],
        positions=fields.size("max_position_embeddings", most=MOST_POSITIONS),
        ties_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=model_type != "qwen2" and attention_bias,
        sub_norms=model_type == "bitnet",
        head_norms=model_type == "qwen3",
        rope=read_rope(config, head_dim, where),
    )


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    """Raise for what changes a forward and is not computed here."""
    reason = None
    layer_types = config.get("layer_types")
    activation = config.get("hidden_act")
    if not isinstance(activation, str):
        raise UserError(f"{where}: hidden_act is {activation!r}, not a name")
    if activation not in ACTIVATIONS:
        reason = f"activation {activation!r}"
    elif config.get("mlp_bias"):
        reason = "biases in the feed-forward part"
    elif isinstance(layer_types, list) and any(kind != "full_attention" for kind in layer_types):
        reason = "layers without full attention"
    elif layer_types is None and config.get("use_sliding_window") and config.get("sliding_window"):
        reason = "sliding window"
    if reason is not None:
        raise EngineLacks(f"{where}: the CPU engine has no {reason}; use --engine transformers")
