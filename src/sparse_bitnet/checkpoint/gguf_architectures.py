# SPDX-License-Identifier: Apache-2.0
"""Architectures of GGUF files and the models that they are: one row each, read and written alike."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sparse_bitnet.checkpoint.config_fields import GEMMA3, HUNYUAN

Part = tuple[str, ...]
"""transformers' name of a tensor in its block, then which sizes its shape has."""

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
"""Blocks are in the order of transformers' models."""
_WITH_HEAD_NORMS = _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _NORMS
_WITH_SUB_NORMS = (
    _ATTENTION
    | {"attn_sub_norm": ("self_attn.attn_sub_norm", "queries")}
    | _FEED_FORWARD
    | {"ffn_sub_norm": ("mlp.ffn_sub_norm", "intermediate")}
    | _NORMS
)
LINEAR_NORM = "_norm_in"
"""End of the file's names of norms that linears have of their inputs (BitNet-embedding)."""
_LINEAR_NORMS = {
    f"{stored}{LINEAR_NORM}": (f"{name}.norm", columns)
    for stored, (name, _, columns) in (_ATTENTION | _FEED_FORWARD).items()
}
_GEMMA = _ATTENTION | _HEAD_NORMS | _FEED_FORWARD | _GEMMA_NORMS
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Tensors outside the blocks."""


class GgufArchitecture(NamedTuple):
    """One of the architectures that are read and written."""

    name: str
    """The file's."""
    model_type: str
    """transformers' name."""
    fields: Mapping[str, Any]
    """Of config.json, what the metadata does not say."""
    block: Mapping[str, Part] = _PLAIN
    """Tensors of a block by the file's names."""
    rotates_neighbours: bool = False
    """Rows of q and k are in an order in which neighbours rotate; in transformers halves of a head do."""
    biases: str = ""
    """Whether q, k and v have them: "always" or "optional", then with o."""
    own_head_size: bool = True
    """Heads need not share out the hidden size."""
    windows: bool = False
    """Layers may see but the last tokens."""
    linear_norms: bool = False
    norm_offset: float = 0.0
    """What norms but those of linears have in the file on top of what they have in transformers."""
    note: str = ""
    """What becomes of such a file in llama.cpp, where that is not the same."""
    in_llama_cpp: bool = True
    """llama.cpp reads it."""

    def offset_of(self, name: str) -> float:
        """`norm_offset` of transformers' tensor."""
        is_norm = name.endswith("norm.weight") and not name.endswith("proj.norm.weight")
        return self.norm_offset if is_norm else 0.0

    def stored_name(self, name: str) -> str | None:
        """The file's name of transformers' tensor; None for one that the architecture has not."""
        base, _, end = name.rpartition(".")
        names = {ours: stored for stored, ours in TOP.items()}
        if base.startswith("model.layers."):
            layer, _, base = base.removeprefix("model.layers.").partition(".")
            names = {ours: f"blk.{layer}.{stored}" for stored, (ours, *_) in self.block.items()}
        return f"{names[base]}.{end}" if base in names and end in ("weight", "bias") else None


_SILU, _RELU2 = {"hidden_act": "silu"}, {"hidden_act": "relu2"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_BITNET_CPP = "its activation is the squared ReLU, so bitnet.cpp reads it and llama.cpp does not"
_EMBEDDING = "its linears have norms, so bitnet.cpp reads it and llama.cpp does not"
_NO_WINDOW = "llama.cpp's llama has no window: there, tokens also see what lies before it"
ARCHITECTURES = (
    GgufArchitecture("qwen2", "qwen2", _SILU, biases="always", own_head_size=False),
    GgufArchitecture("qwen3", "qwen3", _SILU, _WITH_HEAD_NORMS),
    GgufArchitecture(
        "qwen3",
        "qwen3",
        _SILU,
        _WITH_HEAD_NORMS | _LINEAR_NORMS,
        linear_norms=True,
        note=_EMBEDDING,
        in_llama_cpp=False,
    ),
    GgufArchitecture("llama", "llama", _SILU, rotates_neighbours=True, biases="optional"),
    GgufArchitecture(
        "llama", "mistral", _SILU, rotates_neighbours=True, windows=True, note=_NO_WINDOW
    ),
    GgufArchitecture("gemma3", GEMMA3, _GELU, _GEMMA, windows=True, norm_offset=1.0),
    GgufArchitecture(
        "gemma3",
        GEMMA3,
        _GELU,
        _GEMMA | _LINEAR_NORMS,
        windows=True,
        linear_norms=True,
        norm_offset=1.0,
        note=_EMBEDDING,
        in_llama_cpp=False,
    ),
    GgufArchitecture(
        "hunyuan-dense", HUNYUAN, _SILU, _ATTENTION | _ROTATED_NORMS | _FEED_FORWARD | _NORMS
    ),
    GgufArchitecture(
        "bitnet-b1.58",
        "bitnet",
        _RELU2,
        _WITH_SUB_NORMS,
        own_head_size=False,
        note=_BITNET_CPP,
        in_llama_cpp=False,
    ),
    GgufArchitecture("bitnet-25", "bitnet", _RELU2, _WITH_SUB_NORMS, own_head_size=False),
    GgufArchitecture("bitnet", "bitnet", _SILU, _WITH_SUB_NORMS, own_head_size=False),
)
"""Of two of one name, the second is that of files with a window, or with norms in linears."""
