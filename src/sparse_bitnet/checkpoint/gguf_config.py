# SPDX-License-Identifier: Apache-2.0
"""The config.json that the metadata of a GGUF file stands for."""

from typing import Any, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.errors import UserError

ROPE_FACTORS = "rope_freqs.weight"


class GgufArchitecture(NamedTuple):
    """One of the architectures that are read."""

    name: str
    """The file's."""
    model_type: str
    """transformers' name."""
    fields: dict[str, Any]
    """Of config.json, what the metadata does not say."""
    norms: tuple[str, ...] = ()
    """Those of a block that not every model has."""
    rotates_neighbours: bool = False
    """Rows of q and k are in an order in which neighbours rotate; in transformers halves of a head do."""


_SILU: dict[str, Any] = {"hidden_act": "silu"}
_RELU2 = {"hidden_act": "relu2"}
HEAD_NORMS, SUB_NORMS = ("attn_q_norm", "attn_k_norm"), ("attn_sub_norm", "ffn_sub_norm")
ARCHITECTURES = {
    "qwen2": GgufArchitecture("qwen2", "qwen2", _SILU),
    "qwen3": GgufArchitecture("qwen3", "qwen3", _SILU, HEAD_NORMS),
    "llama": GgufArchitecture("llama", "llama", _SILU, rotates_neighbours=True),
    "bitnet": GgufArchitecture("bitnet", "bitnet", _SILU, SUB_NORMS),
    "bitnet-25": GgufArchitecture("bitnet-25", "bitnet", _RELU2, SUB_NORMS),
    "bitnet-b1.58": GgufArchitecture("bitnet-b1.58", "bitnet", _RELU2, SUB_NORMS),
}
"""The file's name -> the model that it is."""


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """What the file names. Raises `UserError` for an architecture that is not covered."""
    name = str(file.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise UserError(
            f"{file.path}: its architecture {name!r} is not covered; {', '.join(ARCHITECTURES)} are"
        )
    return ARCHITECTURES[name]


def read_config(file: GgufFile, architecture: GgufArchitecture) -> dict[str, Any]:
    """The config.json of a file. Raises `UserError` for what is missing, or not covered."""
    return _Metadata(file, architecture).config()


class _Metadata:
    def __init__(self, file: GgufFile, architecture: GgufArchitecture) -> None:
        self.file, self.architecture, self.name = file, architecture, architecture.name

    def config(self) -> dict[str, Any]:
        heads = self._size("attention.head_count")
        hidden = self._size("embedding_length")
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise UserError(f"{self.file.path} lacks token_embd.weight: it is incomplete")
        config = {
            "model_type": self.architecture.model_type,
            **self.architecture.fields,
            "hidden_size": hidden,
            "intermediate_size": self._size("feed_forward_length"),
            "num_hidden_layers": self._size("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._size("attention.head_count_kv", heads),
            "max_position_embeddings": self._size("context_length"),
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
            "rope_parameters": self._rope(),
            "bos_token_id": self.file.metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.file.metadata.get("tokenizer.ggml.eos_token_id"),
        }
        if self.architecture.model_type in ("qwen3", "llama"):
            config["head_dim"] = self._size("attention.key_length", hidden // max(1, heads))
        return config

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number("rope.freq_base", 10_000.0),
        }
        kind = self.file.metadata.get(f"{self.name}.rope.scaling.type", "none")
        if kind in ("linear", "yarn"):
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor")}
            if kind == "yarn":
                context = self._number("rope.scaling.original_context_length")
                rope["original_max_position_embeddings"] = context
        elif kind != "none":
            raise UserError(
                f"{self.file.path}: rope scaling {kind!r} is not covered; linear and yarn are"
            )
        if ROPE_FACTORS in self.file.tensors:
            rope |= self._llama3(rope["rope_theta"])
        return rope

    def _llama3(self, theta: float) -> dict[str, Any]:
        """The parameters that give the factors of the frequencies in the file."""
        factors = self.file.floats(ROPE_FACTORS)
        powers = np.arange(len(factors)) / len(factors)
        wavelengths = 2 * np.pi * theta**powers
        for context in (8192, 4096, 16384, 32768):
            rope = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            smooth = np.clip((context / wavelengths - 1) / 3, 0, 1)
            if np.allclose(1 / factors, (1 - smooth) / rope["factor"] + smooth, rtol=1e-4):
                original = {"original_max_position_embeddings": context}
                return {"rope_type": "llama3", **rope, **original}
        raise UserError(
            f"{self.file.path}: the factors in {ROPE_FACTORS} fit no rope scaling that is covered"
        )

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int):
            raise UserError(f"{self.file.path}: {self.name}.{key} is {value!r}, not a whole number")
        return value

    def _number(self, key: str, default: float | None = None) -> Any:
        value = self.file.metadata.get(f"{self.name}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(
                f"{self.file.path}: {self.name}.{key} is {value!r}, not a positive number"
            )
        return value
