# SPDX-License-Identifier: Apache-2.0
"""GGUF files with ternary weights, opened: config, names and tokenizer follow from the file's metadata.

A new architecture is a row of gguf_architectures.py. Neither torch nor transformers is needed: values are
arrays.
"""

import functools
import re
import warnings
from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, exported_format
from sparse_bitnet.checkpoint.gguf_architectures import TOP
from sparse_bitnet.checkpoint.gguf_config import (
    FORMAT,
    ROPE_FACTORS,
    WEIGHT_SCALES,
    ConfigReader,
    architecture_of,
)
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.gguf_tokenizer import write_tokenizer
from sparse_bitnet.checkpoint.load import skeleton
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.gguf_blocks import I2_S, I2_S_ARM, in_arm_order
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales

if TYPE_CHECKING:
    from torch import Tensor

_TABLES = ("model.embed_tokens", "lm_head")
_SCALES = ("scale", "weight_scale")
"""Name endings of scale tensors, each of which multiplies the whole matrix beside it."""
_LAYERS_TOLD_BY, _SURE = 4, 64
"""Number of layers that decide the order of I2_S's codes, and the sum of n r^2 that is decisive: it is
about 4 for unrelated numbers, and above 64 once in 10^12 cases."""
_LOOKED_AT = 64
"""Number of rows of a float matrix that decide whether it is ternary."""


def find_gguf(path: Path) -> StoredModel:
    """Return the model of a GGUF file after reading its header.

    Raises `UserError` for a damaged file and for an architecture or a tensor that is not covered.
    """
    model = _GgufModel(path)
    linears = model.linears()
    is_ternary = any(map(model.is_ternary, linears))
    first = [
        f"tensor {each} is {model.gguf.type_name(each)} and not ternary" for each in linears[:1]
    ]
    return StoredModel(
        name=str(path),
        folder=path,
        kind="foreign" if is_ternary else "dense",
        reader="gguf.GgufCheckpoint" if is_ternary else "",
        config=model.config,
        entry={} if is_ternary else {"not_ternary": "".join(first)},
        model=functools.cache(partial(skeleton, model.config, path)),
        weights=None if is_ternary else model.all_weights,
    )


class _GgufModel:
    """The model in a GGUF file: its config, and its tensors under transformers' names."""

    def __init__(self, path: Path) -> None:
        self.gguf = GgufFile(path)
        self.architecture = architecture_of(self.gguf)
        self.names = self._names()
        self.config = ConfigReader(self.gguf, self.architecture).config()

    def checked(self) -> dict[str, tuple[int, ...]]:
        """Return the model's tensor shapes by name. Raises `UserError` if the file has other tensors."""
        wanted: dict[str, tuple[int, ...]] = {}
        for name, shape in self._wanted():
            if name not in self.names:
                raise UserError(f"{self.gguf.path} lacks a tensor for {name}: it is incomplete")
            own = self.gguf.tensors[self.names[name]].shape
            if own != shape:
                raise UserError(
                    f"{self.gguf.path}: tensor {self.names[name]} is {list(own)}, its metadata asks "
                    f"{list(shape)}"
                )
            wanted[name] = shape
            self._factor(self.names[name])
        if unknown := sorted(self.names.keys() - wanted.keys()):
            # Zeros stand for biases that the model does not have.
            raise UserError(
                f"{self.gguf.path}: tensor {self.names[unknown[0]]} is not part of "
                f"{self.architecture.name} here"
            )
        return wanted

    def linears(self) -> list[str]:
        """Return the file's names of the matrices in its blocks."""
        return [
            stored
            for name, stored in self.names.items()
            if len(self.gguf.tensors[stored].shape) == 2 and not name.startswith(_TABLES)
        ]

    def is_ternary(self, stored: str) -> bool:
        """Whether a matrix is ternary, judging by its type and its first rows."""
        if self.gguf.block_type(stored) is not None or self.gguf.is_quantised(stored):
            return not self.gguf.is_quantised(stored)
        first = self.gguf.floats(stored, slice(0, _LOOKED_AT))
        return ternary_of_floats(first, stored) is not None

    def all_weights(self) -> "dict[str, Tensor]":
        """Return all tensors in float32, by transformers' names. Raises `UserError` as `checked` does."""
        import torch

        return {name: torch.from_numpy(self.values(name)) for name in self.checked()}

    def _wanted(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the tensors of a model with this config, in transformers' order."""
        config, heads = self.config, self.config["num_attention_heads"]
        head = config.get("head_dim", config["hidden_size"] // heads)
        sizes = {
            "hidden": config["hidden_size"],
            "intermediate": config["intermediate_size"],
            "queries": heads * head,
            "keys": config["num_key_value_heads"] * head,
            "head": head,
        }
        always = self.architecture.biases == "always"
        biased = {"attn_q", "attn_k", "attn_v"} if always or config["attention_bias"] else set()
        if biased and not always:
            biased.add("attn_output")
        table = (config["vocab_size"], config["hidden_size"])
        yield f"{_TABLES[0]}.weight", table
        for layer in range(config["num_hidden_layers"]):
            for part, (name, *shape) in self.architecture.block.items():
                full = f"model.layers.{layer}.{name}"
                yield f"{full}.weight", tuple(sizes[size] for size in shape)
                if part in biased:
                    yield f"{full}.bias", (sizes[shape[0]],)
        yield "model.norm.weight", (config["hidden_size"],)
        if not config["tie_word_embeddings"]:
            yield f"{_TABLES[1]}.weight", table

    def values(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, in float32."""
        stored = self.names[name]
        if self._turned(name):
            return self._in_halves(name, self._floats(stored))[part]
        values, offset = self._floats(stored, part), self.architecture.offset_of(name)
        return values - offset if offset else values

    def _floats(self, stored: str, part: slice = slice(None)) -> np.ndarray:
        values, factor = self.gguf.floats(stored, part), self._factor(stored)
        return values if factor == 1 else values * factor

    def _names(self) -> dict[str, str]:
        """transformers' names of the tensors -> the file's."""
        names = {}
        for stored in self.gguf.tensors:
            base, _, end = stored.rpartition(".")
            block = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)", base)
            key = block[2] if block else base
            ours = self.architecture.block.get(key, (None,))[0] if block else TOP.get(key)
            weight = self.gguf.tensors.get(f"{base}.weight")
            is_scale = end in _SCALES and weight is not None and len(weight.shape) == 2
            if stored == ROPE_FACTORS or (is_scale and ours):
                continue
            if ours is None or end not in ("weight", "bias"):
                raise UserError(
                    f"{self.gguf.path}: tensor {stored} is not covered; distill and --engine "
                    "transformers may take the model that this file was made from"
                )
            prefix = f"model.layers.{int(block[1])}." if block else ""
            names[f"{prefix}{ours}.{end}"] = stored
        return names

    def _factor(self, stored: str) -> np.float32:
        """Return the factor of a whole matrix, from the scale tensor beside it; 1 without one."""
        base = stored.removesuffix("weight")
        found = [base + end for end in _SCALES if base + end in self.gguf.tensors]
        factors = [self.gguf.floats(name) for name in found] or [np.ones(1, np.float32)]
        if len(factors) > 1 or factors[0].size != 1 or not 0 < abs(factors[0].item()) < np.inf:
            raise UserError(
                f"{self.gguf.path}: tensor {found[0]} is not the one scale of its matrix, a number other "
                "than zero"
            )
        return np.float32(factors[0].item())

    def _turned(self, name: str) -> bool:
        is_rotated = name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
        return self.architecture.rotates_neighbours and is_rotated

    def _in_halves(self, name: str, values: np.ndarray) -> np.ndarray:
        """Reorder rows of q or k: rotated pairs move from neighbours to the two halves of a head."""
        heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        by_head = values.reshape(self.config[heads], -1, 2, *values.shape[1:])
        return np.ascontiguousarray(by_head.swapaxes(1, 2)).reshape(values.shape)


class GgufCheckpoint(_GgufModel, Checkpoint):
    """A GGUF file with ternary weights. Names come from its tables, so no model is built for them."""

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` for a tensor or a type that is not covered, and where none is ternary."""
        _GgufModel.__init__(self, stored.folder)
        wanted, metadata = self.checked(), self.gguf.metadata
        layers = self._layers(wanted)
        others = {
            n: shape for n, shape in wanted.items() if n.removesuffix(".weight") not in layers
        }
        scales = metadata.get(WEIGHT_SCALES)
        scales = scales if isinstance(scales, list) and len(scales) == len(layers) else []
        self.scales: dict[str, np.float32] = {}
        """Layer -> exact float32 scale, if the file is an export of ours that records it."""
        if scales and all(type(each) is float for each in scales):
            self.scales = dict(zip(layers, np.array(scales, np.float32), strict=True))
        if FORMAT not in metadata:
            self._settle_i2_s()
        kinds = {self.gguf.type_name(self.names[f"{layer}.weight"]) for layer in layers}
        Checkpoint.__init__(
            self,
            stored,
            tool=f"GGUF {'/'.join(sorted(kinds))}",
            format=exported_format(metadata.get(FORMAT)),
            layers=layers,
            others=others,
            dtypes=dict.fromkeys(others, "F32"),
        )

    @cached_property
    def stored(self) -> list[str]:
        return list(self.others)

    @cached_property
    def dense_linears(self) -> list[str]:
        return ["lm_head"]

    @cached_property
    def embeddings(self) -> list[str]:
        return [f"{name}.weight" for name in _TABLES if f"{name}.weight" in self.others]

    def stored_values(self, name: str, part: slice = slice(None)) -> np.ndarray:
        return self.values(name, part)

    def write_tokenizer(self, folder: Path) -> bool:
        write_tokenizer(self.gguf.metadata, self.gguf.path, folder)
        return True

    def ternary(self, layer: str) -> TernaryWeight:
        found = self._stored_ternary(layer)
        if found.weight_scale.ndim == 0 and layer in self.scales:
            exact = self.scales[layer]
            # Another number means that the file has been quantised again since the export.
            if np.float16(exact) == found.weight_scale:
                found = found._replace(weight_scale=np.asarray(exact))
        return found

    def _stored_ternary(self, layer: str) -> TernaryWeight:
        stored = self.names[f"{layer}.weight"]
        if (block := self.gguf.block_type(stored)) is not None:
            codes, scales = self.gguf.codes(stored, block)
            scales = scales.astype(np.float32) * self._factor(stored)
            if self._turned(f"{layer}.weight"):
                codes = self._in_halves(layer, codes)
                scales = self._in_halves(layer, scales) if len(scales) > 1 else scales
            found = with_fewest_scales(codes, scales, layer)
            # The products are float32; scales that float16 holds exactly are stored as float16.
            with np.errstate(over="ignore"):
                as_half = found.weight_scale.astype(np.float16)
            if as_half.ndim and np.array_equal(as_half, found.weight_scale):
                found = found._replace(weight_scale=as_half)
            return found
        floats = ternary_of_floats(self.values(f"{layer}.weight"), layer)
        if floats is None:
            raise UserError(
                f"layer {layer} of {self.gguf.path} is not ternary, as its first rows are"
            )
        return floats

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        """Return rows of embedding or head if they are ternary, else None; see `Checkpoint`."""
        stored = self.names[name]
        if (block := self.gguf.block_type(stored)) is None:
            return ternary_of_floats(self.values(name, part), name)
        codes, scales = self.gguf.codes(stored, block, part)
        if codes.max() > 1:
            return None
        return with_fewest_scales(codes, scales.astype(np.float32) * self._factor(stored), name)

    def _layers(self, wanted: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
        layers = {}
        for name, shape in wanted.items():
            layer = name.removesuffix(".weight")
            if len(shape) != 2 or layer in _TABLES:
                continue
            stored = self.names[name]
            if not self.is_ternary(stored):
                raise UserError(
                    f"{self.gguf.path}: tensor {stored} is {self.gguf.type_name(stored)} and not "
                    "ternary, as others are; llama.cpp runs such files"
                )
            layers[layer] = (shape[0], shape[1])
        if not layers:
            raise UserError(f"{self.gguf.path} has no ternary layer")
        return layers

    def _settle_i2_s(self) -> None:
        """Decide from the weights which order the codes of I2_S are in; warn if they do not show it.

        In a trained model, the zeros in a hidden feature's row of ffn_up correlate with those in its
        column of ffn_down. In the order in which the file was written the correlation is four times that
        in the other order, which leaves a quarter of the columns in place.
        """
        squares, tells = np.zeros(2), False
        for layer in range(min(_LAYERS_TOLD_BY, self.config["num_hidden_layers"])):
            up, down = (f"model.layers.{layer}.mlp.{name}_proj" for name in ("up", "down"))
            if self.gguf.block_type(self.names[f"{down}.weight"]) is not I2_S:
                continue
            tells = True
            rows = np.abs(self._stored_ternary(up).codes).mean(1)
            columns = np.abs(self._stored_ternary(down).codes).mean(0)
            by_arm = in_arm_order(columns.reshape(-1, I2_S.codes)).reshape(-1)
            with np.errstate(invalid="ignore"):
                found = [np.corrcoef(rows, order)[0, 1] for order in (columns, by_arm)]
            squares += len(rows) * np.nan_to_num(np.square(found))
        if squares.max() >= _SURE:
            self.gguf.i2_s = I2_S_ARM if squares[1] > squares[0] else I2_S
        elif tells:
            warnings.warn(
                f"{self.gguf.path}: I2_S is read as bitnet.cpp for x86 writes it; its weights do not "
                "tell whether one for ARM wrote the file: then the model makes no sense",
                stacklevel=2,
            )
