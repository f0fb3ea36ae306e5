# SPDX-License-Identifier: Apache-2.0
"""GGUF architectures and their transformers models: one row each, used for reading and for writing."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from sparse_bitnet.checkpoint.config_fields import GEMMA3, HUNYUAN, QWEN35

Part = tuple[str, ...]
"""transformers' name of a tensor in its block, then the sizes in its shape: names, or config fields."""

_ATTENTION: dict[str, Part] = {
    "attn_q": ("self_attn.q_proj", "queries", "hidden"),
    "attn_k": ("self_attn.k_proj", "keys", "hidden"),
    "attn_v": ("self_attn.v_proj", "keys", "hidden"),
    "attn_output": ("self_attn.o_proj", "hidden", "queries"),
}
_FEED_FORWARD: dict[str, Part] = {
    "ffn_gate": ("mlp.gate_proj", "intermediate", "hidden"),
    "ffn_up": ("mlp.up_proj", "intermediate", "hidden"),
    "ffn_down": ("mlp.down_proj", "hidden", "intermediate"),
}
_NORMS: dict[str, Part] = {
    "attn_norm": ("input_layernorm", "hidden"),
    "ffn_norm": ("post_attention_layernorm", "hidden"),
}
_GEMMA_NORMS: dict[str, Part] = {
    "attn_norm": ("input_layernorm", "hidden"),
    "post_attention_norm": ("post_attention_layernorm", "hidden"),
    "ffn_norm": ("pre_feedforward_layernorm", "hidden"),
    "post_ffw_norm": ("post_feedforward_layernorm", "hidden"),
}
_HEAD_NORMS: dict[str, Part] = {
    "attn_q_norm": ("self_attn.q_norm", "head"),
    "attn_k_norm": ("self_attn.k_norm", "head"),
}
_ROTATED_NORMS: dict[str, Part] = {
    "attn_q_norm": ("self_attn.query_layernorm", "head"),
    "attn_k_norm": ("self_attn.key_layernorm", "head"),
}
_PLAIN = _ATTENTION | _FEED_FORWARD | _NORMS
"""Tensors of a plain block, in the order of transformers' models."""
_WITH_HEAD_NORMS = _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _NORMS
_WITH_SUB_NORMS = {
    **{**_ATTENTION, "attn_sub_norm": ("self_attn.attn_sub_norm", "queries")},
    **{**_FEED_FORWARD, "ffn_sub_norm": ("mlp.ffn_sub_norm", "intermediate"), **_NORMS},
}
LINEAR_NORM = "_norm_in"
"""Name ending, in the file, of the norm of a linear layer's input (BitNet-embedding)."""
_LINEAR_NORMS = {
    f"{stored}{LINEAR_NORM}": (f"{name}.norm", columns)
    for stored, (name, _, columns) in (_ATTENTION | _FEED_FORWARD).items()
}
_GEMMA = _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _GEMMA_NORMS
_QWEN35_NORMS = {name: _GEMMA_NORMS[name] for name in ("attn_norm", "post_attention_norm")}
_GATED = {"attn_q": ("self_attn.q_proj", "gated_queries", "hidden")}
_QWEN35 = _ATTENTION | _GATED | _HEAD_NORMS | _FEED_FORWARD | _QWEN35_NORMS
_LINEAR: dict[str, Part] = {
    "ssm_dt.bias": ("linear_attn.dt_bias", "linear_num_value_heads"),
    "ssm_a": ("linear_attn.A_log", "linear_num_value_heads"),
    "ssm_conv1d": ("linear_attn.conv1d", "linear_qkv", "one", "linear_conv_kernel_dim"),
    "ssm_norm": ("linear_attn.norm", "linear_value_head_dim"),
    "ssm_out": ("linear_attn.out_proj", "hidden", "values"),
    "attn_qkv": ("linear_attn.in_proj_qkv", "linear_qkv", "hidden"),
    "attn_gate": ("linear_attn.in_proj_z", "values", "hidden"),
    "ssm_beta": ("linear_attn.in_proj_b", "linear_num_value_heads", "hidden"),
    "ssm_alpha": ("linear_attn.in_proj_a", "linear_num_value_heads", "hidden"),
    **(_FEED_FORWARD | _QWEN35_NORMS),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside the blocks."""


def full_name(name: str) -> str:
    """Return the name of a module's weight, or that of a bare parameter."""
    return name if name.endswith(("dt_bias", "A_log")) else f"{name}.weight"


class GgufArchitecture(NamedTuple):
    """A GGUF architecture that can be read and written."""

    name: str
    """Name in the GGUF file."""
    model_type: str
    """transformers' `model_type`."""
    fields: Mapping[str, Any]
    """Fields of config.json that the file's metadata does not contain."""
    block: Mapping[str, Part] = _PLAIN
    """Tensors of a block by the file's names."""
    linear_block: Mapping[str, Part] = MappingProxyType({})
    """Tensors of a block with linear attention (Gated DeltaNet); empty if there are no such blocks."""
    rotates_neighbours: bool = False
    """Whether rotated pairs are neighbouring rows of q and k; in transformers, halves of a head."""
    biases: str = ""
    """Biases of q, k and v: "always", or "optional" and then with o; empty if there are none."""
    own_head_size: bool = True
    """Whether the head size may differ from the hidden size divided by the number of heads."""
    windows: bool = False
    """Whether layers may have attention windows."""
    linear_norms: bool = False
    tiles_columns: bool = True
    """Whether the inputs of an output projection of linear attention are in tiled order, too."""
    norm_offset: float = 0.0
    """Number that the file adds to transformers' weights of norms, except norms in linears."""
    note: str = ""
    """Note for users on how llama.cpp treats such a file differently; empty if it does not."""
    in_llama_cpp: bool = True
    """Whether llama.cpp reads such a file."""

    def offset_of(self, name: str) -> float:
        """Return the offset of a tensor, by transformers' name: `norm_offset` for a norm, else 0."""
        is_plain = name.endswith(("proj.norm.weight", "linear_attn.norm.weight"))
        return self.norm_offset if name.endswith("norm.weight") and not is_plain else 0.0

    def stored_name(self, name: str) -> str:
        """Return the file's name of a transformers tensor; empty if the architecture lacks it."""
        names, prefix = {ours: stored for stored, ours in _TOP.items()}, ""
        if name.startswith("model.layers."):
            layer, _, name = name.removeprefix("model.layers.").partition(".")
            parts = {**self.block, **self.linear_block}
            names, prefix = {ours: stored for stored, (ours, *_) in parts.items()}, f"blk.{layer}."
        if name in names and full_name(name) == name:
            return prefix + names[name]
        base, _, end = name.rpartition(".")
        return f"{prefix}{names[base]}.{end}" if base in names and end in ("weight", "bias") else ""


_SILU, _RELU2 = {"hidden_act": "silu"}, {"hidden_act": "relu2"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_BITNET_CPP = "its activation is the squared ReLU, so bitnet.cpp reads it and llama.cpp does not"
_EMBEDDING = "its linears have norms, so bitnet.cpp reads it and llama.cpp does not"
_NO_WINDOW = "llama.cpp's llama has no window: there, tokens also see what lies before it"
_QWEN3 = GgufArchitecture("qwen3", "qwen3", _SILU, _WITH_HEAD_NORMS)
_BITNET = GgufArchitecture("bitnet", "bitnet", _RELU2, _WITH_SUB_NORMS, own_head_size=False)
_GEMMA3 = GgufArchitecture("gemma3", GEMMA3, _GELU, _GEMMA, windows=True, norm_offset=1.0)


def _with_linear_norms(row: GgufArchitecture) -> GgufArchitecture:
    block = {**row.block, **_LINEAR_NORMS}
    return row._replace(block=block, linear_norms=True, note=_EMBEDDING, in_llama_cpp=False)


ARCHITECTURES = (
    GgufArchitecture("qwen2", "qwen2", _SILU, biases="always", own_head_size=False),
    _QWEN3,
    _with_linear_norms(_QWEN3),
    GgufArchitecture("llama", "llama", _SILU, rotates_neighbours=True, biases="optional"),
    GgufArchitecture(
        "llama", "mistral", _SILU, rotates_neighbours=True, windows=True, note=_NO_WINDOW
    ),
    _GEMMA3,
    _with_linear_norms(_GEMMA3),
    GgufArchitecture("qwen35", QWEN35, _SILU, _QWEN35, linear_block=_LINEAR, norm_offset=1.0),
    GgufArchitecture(
        "hunyuan-dense", HUNYUAN, _SILU, _ATTENTION | _ROTATED_NORMS | _FEED_FORWARD | _NORMS
    ),
    _BITNET._replace(name="bitnet-b1.58", note=_BITNET_CPP, in_llama_cpp=False),
    _BITNET._replace(name="bitnet-25"),
    _BITNET._replace(fields=_SILU),
)
"""All architectures. If two share a name, the second is for files with windows or norms in linears."""
