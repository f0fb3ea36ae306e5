# SPDX-License-Identifier: Apache-2.0
"""config.json from the metadata of a GGUF file; the other direction: gguf_metadata.py."""

from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import (
    FULL,
    GEMMA3,
    WINDOWED,
    check_fields,
    gemma_windows,
    of_all_layers,
    shown,
)
from sparse_bitnet.checkpoint.gguf_architectures import (
    ARCHITECTURES,
    LINEAR_NORM,
    GgufArchitecture,
)
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS
from sparse_bitnet.errors import UserError

ROPE_FACTORS = "rope_freqs.weight"
FORMAT, WEIGHT_SCALES = "sparse_bitnet.format", "sparse_bitnet.weight_scales"
"""Metadata of exports of ours, which other readers ignore: the training format, and of each layer the
scale in float32, which blocks have in float16."""

LAYERS = "block_count"
SIZES = {
    LAYERS: "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Key of the metadata, after the architecture's name -> field of config.json; others need a rule."""
KV_HEADS, EPSILON = "attention.head_count_kv", "attention.layer_norm_rms_epsilon"
HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
ROPE_BASE, LOCAL_ROPE_BASE = "rope.freq_base", "rope.freq_base_swa"
SCALING = "rope.scaling"
_FIRST_LINEAR_NORM = f"blk.0.attn_q{LINEAR_NORM}.weight"
KINDS = ("linear", "yarn")
LLAMA3_CONTEXTS = (8192, 4096, 16384, 32768)
_READ = ("type", "factor", "original_context_length", "finetuned")
_DEFAULTS = {
    **dict.fromkeys(("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_slow"), 1),
    **{"yarn_beta_fast": 32, "yarn_log_multiplier": 0},
}
"""Of settings of the rope's scaling those that are read, and what others may only be."""
_READ_ALSO = ("rope.scale_linear", "vocab_size", "pooling_type", "attention.layer_norm_epsilon")
"""Further keys that are understood, or say nothing of a decoder of these architectures."""
_AS_HERE = {"attention.causal": True, "tensor_data_layout": "Meta AI original pth"}
"""Keys that may have one value."""
_NAMESPACES = (
    "general",
    "tokenizer",
    "quantize",
    "imatrix",
    "split",
    "sparse_bitnet",
    "mradermacher",
)
"""Beginnings of keys that describe a file, not what its weights mean."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LARGEST = 3e38
_SHARED_SCALES = 62
"""Layers of the one Gemma (27B) whose scores are scaled by the share of a head in the hidden size."""


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """What the file names. Raises `UserError` for an architecture that is not covered."""
    name = str(file.metadata.get("general.architecture"))
    found = [row for row in ARCHITECTURES if row.name == name]
    if not found:
        known = dict.fromkeys(row.name for row in ARCHITECTURES)
        raise UserError(
            f"{file.path}: its architecture {shown(name)} is not covered; {', '.join(known)} are; "
            "distill and --engine transformers may take the model that this file was made from"
        )
    has_norms = _FIRST_LINEAR_NORM in file.tensors
    found = [row for row in found if row.linear_norms == has_norms]
    if not found:
        raise UserError(f"{file.path}: a norm in each linear of {name} is not covered")
    return found[-1 if file.metadata.get(f"{name}.{WINDOW}") else 0]


def read_config(file: GgufFile, architecture: GgufArchitecture) -> dict[str, Any]:
    """The config.json of a file. Raises `UserError` for what is missing, or not covered."""
    return _Metadata(file, architecture).config()


class _Metadata:
    def __init__(self, file: GgufFile, architecture: GgufArchitecture) -> None:
        self.file, self.architecture, self.name = file, architecture, architecture.name

    def config(self) -> dict[str, Any]:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise UserError(f"{self.file.path} has no matrix token_embd.weight: it is incomplete")
        self._check_keys()
        config: dict[str, Any] = {
            "model_type": self.architecture.model_type,
            **self.architecture.fields,
            **{name: self._size(key) for key, name in SIZES.items()},
        }
        heads = config["num_attention_heads"]
        head = self._size(HEAD_SIZES[0], max(1, config["hidden_size"] // heads))
        config |= {
            "num_key_value_heads": self._size(KV_HEADS, heads),
            "rms_norm_eps": self._number(EPSILON),
            "vocab_size": embedding.shape[0],
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.file.tensors,
            "rope_parameters": self._rope(head),
        }
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
            raise UserError(
                f"{self.file.path}: {len(tokens)} tokens, but rows of token_embd.weight for "
                f"{embedding.shape[0]}"
            )
        for name in ("bos_token_id", "eos_token_id"):
            index = self.file.metadata.get(f"tokenizer.ggml.{name}")
            has_row = type(index) is int and 0 <= index < embedding.shape[0]
            config[name] = index if has_row else None
        if self.architecture.own_head_size:
            config["head_dim"] = head
        if self.architecture.linear_norms:
            config[LINEAR_NORMS] = config["rms_norm_eps"]
        if self.architecture.windows:
            config["sliding_window"] = self._windowed()
        if self.architecture.model_type == GEMMA3:
            config |= self._gemma(config)
        return config

    def _check_keys(self) -> None:
        """Raise `UserError` for a key that may change what the weights mean and is not read."""
        read = [*SIZES, KV_HEADS, EPSILON, *HEAD_SIZES, ROPE_BASE, *_READ_ALSO]
        read += [WINDOW] if self.architecture.windows else []
        if self.architecture.model_type == GEMMA3:
            read += [PATTERN, LOCAL_ROPE_BASE, "final_logit_softcapping"]
        ignored = (f"{self.name}.{SCALING}.", *(f"{name}." for name in _NAMESPACES))
        check_fields(
            {key: v for key, v in self.file.metadata.items() if not key.startswith(ignored)},
            [f"{self.name}.{key}" for key in read],
            str(self.file.path),
            {f"{self.name}.{key}": value for key, value in _AS_HERE.items()},
        )

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        layers, window = config["num_hidden_layers"], config["sliding_window"]
        pattern = self.file.metadata.get(f"{self.name}.{PATTERN}")
        if not isinstance(pattern, list):
            every = () if pattern is None else (self._size(PATTERN),)
            pattern = gemma_windows(layers, *every)
        if len(pattern) != layers:
            raise UserError(
                f"{self.file.path}: {self.name}.{PATTERN} has {len(pattern)} layers, not {layers}"
            )
        local = {"rope_type": "default", "rope_theta": self._number(LOCAL_ROPE_BASE, 10_000.0)}
        return {
            "layer_types": [WINDOWED if window and sees_some else FULL for sees_some in pattern],
            "query_pre_attn_scalar": gemma_scores(config),
            "rope_parameters": {FULL: config["rope_parameters"], WINDOWED: local},
            "final_logit_softcapping": self.file.metadata.get(
                f"{self.name}.final_logit_softcapping"
            ),
        }

    def _windowed(self) -> int | None:
        return self._size(WINDOW) if self.file.metadata.get(f"{self.name}.{WINDOW}") else None

    def _rope(self, head: int) -> dict[str, Any]:
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": self._number(ROPE_BASE, 10_000.0),
        }
        rotated = self._size(HEAD_SIZES[2], head)
        if rotated != head or head % 2:
            raise UserError(
                f"{self.file.path}: {self.name}.{HEAD_SIZES[2]} is {rotated} of {head}; all values of a "
                "head, an even number, are rotated here"
            )
        prefix = f"{self.name}.{SCALING}."
        for key, value in self.file.metadata.items():
            setting = key.removeprefix(prefix)
            if key.startswith(prefix) and setting not in _READ and value != _DEFAULTS.get(setting):
                raise UserError(f"{self.file.path}: {key} = {shown(value)} is not covered")
        kind = self.file.metadata.get(f"{prefix}type", "linear")
        factor = self._number(f"{SCALING}.factor", self._number("rope.scale_linear", 1))
        if kind == "linear" and factor == 1:
            kind = "none"
        if kind in KINDS:
            rope |= {"rope_type": kind, "factor": factor}
            if kind == "yarn":
                context = self._size(f"{SCALING}.original_context_length")
                rope["original_max_position_embeddings"] = context
        elif kind != "none":
            raise UserError(
                f"{self.file.path}: rope scaling {shown(kind)} is not covered; "
                f"{' and '.join(KINDS)} are"
            )
        if ROPE_FACTORS in self.file.tensors:
            rope |= self._llama3(rope["rope_theta"], head // 2 if kind == "none" else 0)
        return rope

    def _llama3(self, theta: float, count: int) -> dict[str, Any]:
        """The parameters that give the factors of the frequencies in the file."""
        factors = self.file.floats(ROPE_FACTORS)
        for context in LLAMA3_CONTEXTS if factors.shape == (count,) else ():
            rope = {"factor": float(factors.max()), "original_max_position_embeddings": context}
            if np.allclose(factors, llama3_factors(theta, len(factors), rope), rtol=1e-4):
                return {"rope_type": "llama3", **rope, **LLAMA3}
        raise UserError(
            f"{self.file.path}: the factors in {ROPE_FACTORS} fit no rope scaling that is covered"
        )

    def _size(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if not isinstance(value, int) or value >= 1 << 31:
            raise UserError(f"{self.file.path}: {self.name}.{key} is {shown(value)}, not a size")
        return value

    def _number(self, key: str, default: float | None = None) -> Any:
        layers = self.file.metadata.get(f"{self.name}.{LAYERS}")
        value = of_all_layers(self.file.metadata.get(f"{self.name}.{key}", default), layers)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _LARGEST
        ):
            raise UserError(
                f"{self.file.path}: {self.name}.{key} is {shown(value)}, not a positive number"
            )
        # The shortest number that is the same in float32, as 1e-6 was before it was stored.
        return value if isinstance(value, int) else float(str(np.float32(value)))


def llama3_factors(theta: float, count: int, rope: dict[str, Any]) -> np.ndarray:
    """float32 [count]: what divides the frequencies of rope type llama3, of its parameters."""
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((rope["original_max_position_embeddings"] / wavelengths - 1) / 3, 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def gemma_scores(config: dict[str, Any]) -> int:
    """What llama.cpp takes the root of to scale the scores of Gemma's attention."""
    if config["num_hidden_layers"] == _SHARED_SCALES:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]
