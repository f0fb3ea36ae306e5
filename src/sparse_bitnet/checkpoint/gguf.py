# SPDX-License-Identifier: Apache-2.0
"""GGUF files with ternary weights, opened: config, names and tokenizer follow from the file's metadata.

A new architecture is a row of gguf_architectures.py. Neither torch nor transformers is needed: values are
arrays.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, exported_format
from sparse_bitnet.checkpoint.config_fields import LINEAR
from sparse_bitnet.checkpoint.declared_rotation import PREFIX, read_rotation, with_prefix
from sparse_bitnet.checkpoint.gguf_architectures import full_name
from sparse_bitnet.checkpoint.gguf_config import (
    FORMAT,
    ROPE_FACTORS,
    WEIGHT_SCALES,
    architecture_of,
    config_of,
)
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.gguf_order import from_file, stored_order, stored_shape
from sparse_bitnet.checkpoint.gguf_tokenizer import write_tokenizer
from sparse_bitnet.checkpoint.load import load_with
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import GATES
from sparse_bitnet.packing.gguf_blocks import I2_S, I2_S_ARM
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TABLES = ("model.embed_tokens", "lm_head")
_SCALES = ("scale", "weight_scale")
"""Name endings of scale tensors, each of which multiplies the whole matrix beside it."""
_ORDER_LAYERS, _DECISIVE = 4, 64
"""Number of layers that decide the order of I2_S's codes, and the sum of n r^2 that is decisive: it is
about 4 for unrelated numbers, and above 64 once in 10^12 cases."""
_UNREAD = ("v.", "mm.", "mtp.")
"""Prefixes of the tensors of an image encoder, and of multi-token prediction layers."""
_LOOKED_AT = 64
"""Number of rows of a float matrix that decide whether it is ternary."""
ROTATED = ("llama", "qwen3", "qwen35")
"""Architectures whose weights may be rotated."""


class GgufCheckpoint(Checkpoint):
    """A GGUF file: kind "foreign" with ternary weights, else "dense". Its names come from tables, so no
    model is built for them.

    Attributes:
        names: transformers' names of the model's tensors, in its order -> the file's.
        shapes: their shapes.
        scales: layer -> exact float32 scale, if the file is an export of ours that records it.
    """

    def __init__(self, path: Path) -> None:
        """Raises `UserError` for a damaged file, an architecture or a tensor that is not supported, and a
        file in which only some matrices are ternary."""
        self.name, self.folder, self.gguf = str(path), path, GgufFile(path)
        self.architecture = architecture_of(self.gguf)
        self.config = config_of(self.gguf, self.architecture)
        self.shapes: dict[str, Any] = dict(self._wanted())
        self.names = {name: self.architecture.stored_name(name) for name in self.shapes}
        if not any(name.endswith("ssm_dt.bias") for name in self.gguf.tensors):  # Ollama's name
            self.names = {n: s.replace("ssm_dt.bias", "ssm_dt") for n, s in self.names.items()}
        matrices = [name for name, shape in self.shapes.items() if len(shape) == 2]
        self._check_tensors(matrices)
        gates = [n for n in matrices if n.removesuffix(".weight").endswith(GATES)]
        # The engine computes dense gates; only ours are known to have been trained otherwise, and the
        # dense ones of ours are float32.
        types = {name: self.gguf.type_name(self.names[name]) for name in gates}
        is_ours = FORMAT in self.gguf.metadata
        gates = [n for n in gates if not is_ours or types[n] == "F32" or not self.is_ternary(n)]
        linears = [n for n in matrices if not n.startswith(_TABLES) and n not in gates]
        plain, said = [name for name in linears if not self.is_ternary(name)], ""
        if plain:
            stored = self.names[plain[0]]
            said = f"tensor {stored} is {self.gguf.type_name(stored)} and not ternary"
        if 0 < len(plain) < len(linears):
            raise UserError(f"{path}: {said}, but other matrices are; llama.cpp runs such files")
        self.kind, self.reader = ("dense", "") if plain else ("foreign", "gguf.GgufCheckpoint")
        self.entry = {"not_ternary": said} if plain else {}
        metadata = self.gguf.metadata
        self.format = exported_format(metadata.get(FORMAT))
        self.layers = {name.removesuffix(".weight"): self.shapes[name] for name in linears}
        self.others = {n: shape for n, shape in self.shapes.items() if n not in linears}
        self.dtypes = dict.fromkeys(self.others, "F32")
        self.stored = list(self.others)
        self.dense_linears = ["lm_head", *(name.removesuffix(".weight") for name in gates)]
        self.embeddings = [f"{n}.weight" for n in _TABLES if f"{n}.weight" in self.others]
        if keys := with_prefix(metadata):
            row, grouped = self.architecture, keys.get("gdn_v_grouped") is True
            heads, shared = (self.config.get(f"linear_num_{n}_heads") for n in ("value", "key"))
            if row.name not in ROTATED:
                said = said or f"its architecture is {row.name}"
            elif heads != shared and not grouped:
                # A rotation mixes columns: heads among them that are tiled could not be reordered.
                said = said or f"{PREFIX}gdn_v_grouped is not true"
            if said:
                raise UserError(f"{path} has rotated weights, which is not supported: {said}")
            self.architecture = row._replace(tiles_columns=False)
            columns = {self.names[f"{n}.weight"]: shape[1] for n, shape in self.layers.items()}
            tables, where = [self.names[name] for name in self.embeddings], f"{path}: {PREFIX}"
            self.rotation = read_rotation(keys, where, layers=columns, tables=tables)
        self.scales: dict[str, np.float32] = {}
        scales = metadata.get(WEIGHT_SCALES)
        if isinstance(scales, list) and [type(each) for each in scales] == [float] * len(linears):
            self.scales = dict(zip(self.layers, np.array(scales, np.float32), strict=True))
        if FORMAT not in metadata and not plain:
            self._settle_i2_s()
        kinds = {self.gguf.type_name(self.names[name]) for name in linears}
        self.tool = f"GGUF {'/'.join(sorted(kinds))}"

    def _check_tensors(self, matrices: list[str]) -> None:
        """Raise `UserError` unless the file's tensors are those that its metadata describes."""
        path, tensors = self.gguf.path, self.gguf.tensors
        scales = {
            self.names[name].removesuffix("weight") + end for name in matrices for end in _SCALES
        }
        known = {ROPE_FACTORS, *scales, *self.names.values()}
        blocks = self.gguf.metadata[f"{self.architecture.name}.block_count"]
        behind = (f"blk.{block}." for block in range(self.config["num_hidden_layers"], blocks))
        unread = (*_UNREAD, *behind) if self.architecture.linear_block else ()
        if unknown := sorted(n for n in tensors.keys() - known if not n.startswith(unread)):
            raise UserError(
                f"{path}: tensor {unknown[0]} is not supported; `distill` and --engine transformers may "
                "support the model that this file was made from"
            )
        for name, stored in self.names.items():
            if stored not in tensors:
                raise UserError(f"{path} lacks a tensor for {name}: it is incomplete")
            needed = stored_shape(name, self.shapes[name])
            if (own := tensors[stored].shape) != needed:
                raise UserError(
                    f"{path}: tensor {stored} is {list(own)}, its metadata needs {list(needed)}"
                )
            self._factor(stored)

    def is_ternary(self, name: str) -> bool:
        """Whether a matrix is ternary, judging by its type and its first rows."""
        stored = self.names[name]
        if self.gguf.is_quantised(stored):
            return False
        if self.gguf.block_type(stored) is not None:
            return True
        return ternary_of_floats(self.gguf.floats(stored, slice(0, _LOOKED_AT)), stored) is not None

    def load(self, **kwargs: Any) -> "PreTrainedModel":
        import torch

        if self.kind != "dense":
            raise UserError(f"{self.folder} is a GGUF file: `sparse-bitnet import` it first")
        state = {name: torch.from_numpy(self.stored_values(name)) for name in self.names}
        loader = type(self.model).from_pretrained
        return load_with(loader, None, config=self.model.config, state_dict=state, **kwargs)

    def _wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the tensors of a model with this config, in transformers' order."""
        config, heads = self.config, self.config["num_attention_heads"]
        head = config.get("head_dim", config["hidden_size"] // heads)
        sizes = {"head": head, "queries": heads * head, "hidden": config["hidden_size"]}
        sizes["keys"] = config["num_key_value_heads"] * head
        sizes["intermediate"] = config["intermediate_size"]
        if kinds := config.get("layer_types") if self.architecture.linear_block else None:
            inner = config["linear_num_value_heads"] * config["linear_value_head_dim"]
            linear_keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
            sizes |= {"gated_queries": 2 * heads * head, "values": inner, "one": 1}
            sizes |= {"linear_qkv": 2 * linear_keys + inner, **config}
        always = self.architecture.biases == "always"
        biased = {"attn_q", "attn_k", "attn_v"} if always or config["attention_bias"] else set()
        if biased and not always:
            biased.add("attn_output")
        table = (config["vocab_size"], config["hidden_size"])
        yield f"{_TABLES[0]}.weight", table
        for layer in range(config["num_hidden_layers"]):
            is_linear = kinds and kinds[layer] == LINEAR
            block = self.architecture.linear_block if is_linear else self.architecture.block
            for part, (name, *shape) in block.items():
                full = f"model.layers.{layer}.{name}"
                yield full_name(full), tuple(sizes[size] for size in shape)
                if part in biased:
                    yield f"{full}.bias", (sizes[shape[0]],)
        yield "model.norm.weight", (config["hidden_size"],)
        if not config["tie_word_embeddings"]:
            yield f"{_TABLES[1]}.weight", table

    def stored_values(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, in float32."""
        stored, factor = self.names[name], self._factor(self.names[name])
        order = stored_order(self.architecture, self.config, name)
        is_same = len(self.shapes[name]) == 2 and order is None
        values = self.gguf.floats(stored, part if is_same else slice(None))
        values = values if factor == 1 else values * factor
        return values if is_same else from_file(self.architecture, self.config, name, values)[part]

    def _factor(self, stored: str) -> np.float32:
        """Return the factor of a whole matrix, from the scale tensor beside it; 1 without one."""
        base = stored.removesuffix("weight")
        scales = [base + end for end in _SCALES if base + end in self.gguf.tensors]
        factors = [self.gguf.floats(name) for name in scales] or [np.ones(1, np.float32)]
        if len(factors) > 1 or factors[0].size != 1 or not 0 < abs(factors[0].item()) < np.inf:
            raise UserError(
                f"{self.gguf.path}: tensor {scales[0]} is not one non-zero number, the "
                "scale of its matrix"
            )
        return np.float32(factors[0].item())

    def write_tokenizer(self, folder: Path) -> bool:
        write_tokenizer(self.gguf.metadata, self.gguf.path, folder)
        return True

    def ternary(self, layer: str) -> TernaryWeight:
        ternary = self._stored_ternary(layer)
        exact = self.scales.get(layer)
        # Another number means that the file has been quantised again since the export.
        if ternary.weight_scale.ndim == 0 and exact and np.float16(exact) == ternary.weight_scale:
            return ternary._replace(weight_scale=np.asarray(exact))
        return ternary

    def _stored_ternary(self, layer: str) -> TernaryWeight:
        name = f"{layer}.weight"
        stored = self.names[name]
        if (block := self.gguf.block_type(stored)) is None:
            if (floats := ternary_of_floats(self.stored_values(name), layer)) is not None:
                return floats
            raise UserError(
                f"layer {layer} of {self.gguf.path} is not ternary, though its first rows are"
            )
        codes, scales = self.gguf.codes(stored, block)
        scales = scales.astype(np.float32) * self._factor(stored)
        if (order := stored_order(self.architecture, self.config, name)) is not None:
            scales = order.inverse().of_scales(scales, codes.shape[1])
            codes = np.ascontiguousarray(order.inverse().of_values(codes))
        ternary = with_fewest_scales(codes, scales, layer)
        # The products are float32; scales that float16 holds exactly are stored as float16.
        with np.errstate(over="ignore"):
            as_half = ternary.weight_scale.astype(np.float16)
        if as_half.ndim and np.array_equal(as_half, ternary.weight_scale):
            return ternary._replace(weight_scale=as_half)
        return ternary

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        stored = self.names[name]
        if (block := self.gguf.block_type(stored)) is None:
            return ternary_of_floats(self.stored_values(name, part), name)
        codes, scales = self.gguf.codes(stored, block, part)
        if codes.max() > 1:
            return None
        return with_fewest_scales(codes, scales.astype(np.float32) * self._factor(stored), name)

    def _settle_i2_s(self) -> None:
        """Decide from the weights which order the codes of I2_S are in; warn if they do not show it.

        In a trained model, the zeros in a hidden feature's row of ffn_up correlate with those in its
        column of ffn_down. In the order in which the file was written the correlation is four times that
        in the other order, which leaves a quarter of the columns in place.
        """
        squares, tells = np.zeros(2), False
        for layer in range(min(_ORDER_LAYERS, self.config["num_hidden_layers"])):
            up, down = (f"model.layers.{layer}.mlp.{name}_proj" for name in ("up", "down"))
            if self.gguf.block_type(self.names[f"{down}.weight"]) is not I2_S:
                continue
            tells = True
            rows = np.abs(self._stored_ternary(up).codes).mean(1)
            columns = np.abs(self._stored_ternary(down).codes).mean(0)
            # In a block of four runs of 32, ARM stores the first half of each run first.
            by_arm = columns.reshape(-1, 4, 2, 16).swapaxes(1, 2).reshape(-1)
            with np.errstate(invalid="ignore"):
                fits = [np.corrcoef(rows, order)[0, 1] for order in (columns, by_arm)]
            squares += len(rows) * np.nan_to_num(np.square(fits))
        if squares.max() >= _DECISIVE:
            self.gguf.i2_s = I2_S_ARM if squares[1] > squares[0] else I2_S
        elif tells:
            warnings.warn(
                f"{self.gguf.path}: I2_S is read in the layout of bitnet.cpp for x86; if bitnet.cpp for "
                "ARM wrote the file, which its weights do not show, outputs are nonsense",
                stacklevel=2,
            )
