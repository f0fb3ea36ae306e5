# SPDX-License-Identifier: Apache-2.0
"""GGUF files with ternary weights, opened: config, names and tokenizer follow from the file's metadata.

A new architecture is a row of `_ARCHITECTURES`; a new tensor a row of `_TOP` or `_BLOCK`. Neither torch
nor transformers is needed: values are arrays.
"""

import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.gguf_tokenizer import read_tokenizer
from sparse_bitnet.checkpoint.load import skeleton
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Architecture(NamedTuple):
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
_HEAD_NORMS, _SUB_NORMS = ("attn_q_norm", "attn_k_norm"), ("attn_sub_norm", "ffn_sub_norm")
_ARCHITECTURES = {
    "qwen2": _Architecture("qwen2", _SILU),
    "qwen3": _Architecture("qwen3", _SILU, _HEAD_NORMS),
    "llama": _Architecture("llama", _SILU, rotates_neighbours=True),
    "bitnet": _Architecture("bitnet", _SILU, _SUB_NORMS),
    "bitnet-25": _Architecture("bitnet", _RELU2, _SUB_NORMS),
    "bitnet-b1.58": _Architecture("bitnet", _RELU2, _SUB_NORMS),
}
"""The file's name -> the model that it is."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TABLES = ("model.embed_tokens", "lm_head")
_BLOCK = {
    "attn_q": ("self_attn.q_proj", "queries", "hidden"),
    "attn_k": ("self_attn.k_proj", "keys", "hidden"),
    "attn_v": ("self_attn.v_proj", "keys", "hidden"),
    "attn_output": ("self_attn.o_proj", "hidden", "queries"),
    "attn_q_norm": ("self_attn.q_norm", "head"),
    "attn_k_norm": ("self_attn.k_norm", "head"),
    "attn_sub_norm": ("self_attn.attn_sub_norm", "queries"),
    "ffn_gate": ("mlp.gate_proj", "intermediate", "hidden"),
    "ffn_up": ("mlp.up_proj", "intermediate", "hidden"),
    "ffn_down": ("mlp.down_proj", "hidden", "intermediate"),
    "ffn_sub_norm": ("mlp.ffn_sub_norm", "intermediate"),
    "attn_norm": ("input_layernorm", "hidden"),
    "ffn_norm": ("post_attention_layernorm", "hidden"),
}
"""Tensors of a block, in the order of transformers' models: its name and shape there."""
_SCALES = ("scale", "weight_scale")
"""Ends of tensors that multiply a whole matrix, beside it."""
_ROPE_FACTORS = "rope_freqs.weight"

_LOOKED_AT = 64
"""Rows of a float matrix that tell whether it is ternary."""


def find_gguf(path: Path) -> StoredModel:
    """A GGUF file, found.

    Raises `UserError` for a damaged file and for an architecture or a tensor that is not covered.
    """
    config = _Opened(path).config

    @functools.cache
    def model() -> "PreTrainedModel":
        return skeleton(config, path)

    return StoredModel(
        name=str(path),
        folder=path,
        kind="foreign",
        reader="gguf",
        config=config,
        entry={},
        model=model,
    )


def read(found: StoredModel) -> Checkpoint:
    """Its tensors opened.

    Raises `UserError` for a tensor or a type that is not covered, and for a file without ternary weights.
    """
    return _Opened(found.folder).checkpoint(found)


@dataclass(frozen=True, kw_only=True)
class _GgufCheckpoint(Checkpoint):
    """Whose names follow from the tables above: no model is built for them."""

    @cached_property
    def stored(self) -> list[str]:
        return list(self.others)

    @cached_property
    def dense_linears(self) -> list[str]:
        return ["lm_head"]

    @cached_property
    def embeddings(self) -> list[str]:
        return [f"{name}.weight" for name in _TABLES if f"{name}.weight" in self.others]


class _Opened:
    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.name = str(self.file.metadata.get("general.architecture"))
        if self.name not in _ARCHITECTURES:
            raise UserError(
                f"{path}: its architecture {self.name!r} is not covered; {', '.join(_ARCHITECTURES)} are"
            )
        self.architecture = _ARCHITECTURES[self.name]
        self.names = self._names()
        self.config = self._config()

    def checkpoint(self, found: StoredModel) -> Checkpoint:
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in self._wanted():
            if name not in self.names:
                raise UserError(f"{self.file.path} lacks a tensor for {name}: it is incomplete")
            own = self.file.tensors[self.names[name]].shape
            if own != shape:
                raise UserError(
                    f"{self.file.path}: tensor {self.names[name]} is {list(own)}, its metadata asks "
                    f"{list(shape)}"
                )
            wanted[name] = shape
        if unknown := sorted(self.names.keys() - wanted.keys()):
            # Zeros stand for biases that the model does not have.
            raise UserError(
                f"{self.file.path}: tensor {self.names[unknown[0]]} is not part of {self.name} here"
            )
        layers = self._layers(wanted)
        others = {
            name: s for name, s in wanted.items() if name.removesuffix(".weight") not in layers
        }
        kinds = {self.file.type_name(self.names[f"{layer}.weight"]) for layer in layers}
        return _GgufCheckpoint(
            **vars(found),
            tool=f"GGUF {'/'.join(sorted(kinds))}",
            format=SparseBitConfig(pattern=NMPattern(8, 8)),
            layers=layers,
            others=others,
            dtypes=dict.fromkeys(others, "F32"),
            read=self.read,
            master=None,
            ternary=self.ternary,
            has_one_scale=False,
            write_tokenizer=self.write_tokenizer,
        )

    def _wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a model of this config, in transformers' order."""
        config, heads = self.config, self.config["num_attention_heads"]
        head = config.get("head_dim", config["hidden_size"] // heads)
        sizes = {
            "hidden": config["hidden_size"],
            "intermediate": config["intermediate_size"],
            "queries": heads * head,
            "keys": config["num_key_value_heads"] * head,
            "head": head,
        }
        has_bias = config["attention_bias"] or config["model_type"] == "qwen2"
        biased = {"attn_q", "attn_k", "attn_v"} if has_bias else set()
        if has_bias and config["model_type"] != "qwen2":
            biased.add("attn_output")
        table = (config["vocab_size"], config["hidden_size"])
        yield f"{_TABLES[0]}.weight", table
        for layer in range(config["num_hidden_layers"]):
            for part, (name, *shape) in _BLOCK.items():
                if part in _HEAD_NORMS + _SUB_NORMS and part not in self.architecture.norms:
                    continue
                full = f"model.layers.{layer}.{name}"
                yield f"{full}.weight", tuple(sizes[size] for size in shape)
                if part in biased:
                    yield f"{full}.bias", (sizes[shape[0]],)
        yield "model.norm.weight", (config["hidden_size"],)
        if not config["tie_word_embeddings"]:
            yield f"{_TABLES[1]}.weight", table

    def read(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """One of the other tensors, or some of its rows, float32."""
        if self._turned(name):
            return self._in_halves(name, self.file.floats(self.names[name]))[part]
        return self.file.floats(self.names[name], part)

    def ternary(self, layer: str) -> TernaryWeight:
        stored = self.names[f"{layer}.weight"]
        if (block := self.file.block_type(stored)) is not None:
            codes, scales = self.file.codes(stored, block)
            scales = scales.astype(np.float32) * self._factor(stored)
            if self._turned(f"{layer}.weight"):
                codes = self._in_halves(layer, codes)
                scales = self._in_halves(layer, scales) if len(scales) > 1 else scales
            found = with_fewest_scales(codes, scales, layer)
            # The products are float32; what came as float16 is stored as it came.
            with np.errstate(over="ignore"):
                as_half = found.weight_scale.astype(np.float16)
            if as_half.ndim and np.array_equal(as_half, found.weight_scale):
                found = found._replace(weight_scale=as_half)
            return found
        floats = ternary_of_floats(self.read(f"{layer}.weight"), layer)
        if floats is None:
            raise UserError(
                f"layer {layer} of {self.file.path} is not ternary, as its first rows are"
            )
        return floats

    def write_tokenizer(self, folder: Path) -> None:
        """tokenizer.json, tokenizer_config.json and generation_config.json."""
        fields = {
            key.removeprefix("tokenizer.ggml."): value
            for key, value in self.file.metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        tokenizer = read_tokenizer(fields, str(self.file.path))
        tokens = fields["tokens"]
        special = {
            f"{name}_token": tokens[index]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if type(index := fields.get(f"{key}_token_id")) is int and 0 <= index < len(tokens)
        }
        if fields.get("add_bos_token", fields.get("model") == "llama") and "bos_token" in special:
            _begin_with(tokenizer, special["bos_token"])
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        if isinstance(template := self.file.metadata.get("tokenizer.chat_template"), str):
            config["chat_template"] = template
        ids = (fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom"))
        ends = {index for index in ids if isinstance(index, int)}
        for name, content in (
            ("tokenizer_config.json", config),
            ("generation_config.json", {"eos_token_id": sorted(ends)} if ends else None),
        ):
            if content is not None:
                (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")

    def _names(self) -> dict[str, str]:
        """transformers' names of the tensors -> the file's."""
        names = {}
        for stored in self.file.tensors:
            base, _, end = stored.rpartition(".")
            block = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
            key = block[2] if block else base
            ours = _BLOCK.get(key, (None,))[0] if block else _TOP.get(key)
            if stored == _ROPE_FACTORS or (end in _SCALES and ours):
                continue
            if ours is None or end not in ("weight", "bias"):
                raise UserError(
                    f"{self.file.path}: tensor {stored} is not covered; `--engine transformers` may "
                    "run the model that this file was made from"
                )
            prefix = f"model.layers.{int(block[1])}." if block else ""
            names[f"{prefix}{ours}.{end}"] = stored
        return names

    def _layers(self, wanted: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
        layers = {}
        for name, shape in wanted.items():
            layer = name.removesuffix(".weight")
            if len(shape) != 2 or layer in _TABLES:
                continue
            stored = self.names[name]
            if self.file.block_type(stored) is None:
                first = self.file.floats(stored, slice(0, _LOOKED_AT))
                if ternary_of_floats(first, layer) is None:
                    raise UserError(
                        f"{self.file.path}: tensor {stored} is {self.file.type_name(stored)} and not "
                        "ternary; llama.cpp runs such files"
                    )
            layers[layer] = (shape[0], shape[1])
        if not layers:
            raise UserError(f"{self.file.path} has no ternary layer")
        return layers

    def _factor(self, stored: str) -> np.float32:
        """What multiplies a matrix beside its own scales."""
        base = stored.removesuffix("weight")
        found = [base + end for end in _SCALES if base + end in self.file.tensors]
        return np.float32(self.file.floats(found[0]).reshape(-1)[0] if found else 1)

    def _turned(self, name: str) -> bool:
        is_rotated = name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
        return self.architecture.rotates_neighbours and is_rotated

    def _in_halves(self, name: str, values: np.ndarray) -> np.ndarray:
        """Rows of q or k from neighbours to halves of a head."""
        heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        by_head = values.reshape(self.config[heads], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(values.shape)

    def _config(self) -> dict[str, Any]:
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
        if _ROPE_FACTORS in self.file.tensors:
            rope |= self._llama3(rope["rope_theta"])
        return rope

    def _llama3(self, theta: float) -> dict[str, Any]:
        """The parameters that give the factors of the frequencies in the file."""
        factors = self.file.floats(_ROPE_FACTORS)
        powers = np.arange(len(factors)) / len(factors)
        wavelengths = 2 * np.pi * theta**powers
        for context in (8192, 4096, 16384, 32768):
            rope = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            smooth = np.clip((context / wavelengths - 1) / 3, 0, 1)
            if np.allclose(1 / factors, (1 - smooth) / rope["factor"] + smooth, rtol=1e-4):
                original = {"original_max_position_embeddings": context}
                return {"rope_type": "llama3", **rope, **original}
        raise UserError(
            f"{self.file.path}: the factors in {_ROPE_FACTORS} fit no rope scaling that is covered"
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


def _begin_with(tokenizer: Any, token: str) -> None:
    """Every text begins with the token, as the file's reader has it."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A $B",
        special_tokens=[(token, tokenizer.token_to_id(token))],
    )
