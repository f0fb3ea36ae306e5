# SPDX-License-Identifier: Apache-2.0
"""Saves and loads trained models, master weights included, as Hugging Face folders.

The folder is an ordinary transformers checkpoint (config.json, model.safetensors, tokenizer) whose
config carries `quant_method: "sparse_bitnet"`, a version and the whole `SparseBitConfig`. Once
`sparse_bitnet` is imported, transformers' own `from_pretrained` loads the trained model, bit for bit; the
master weights are stored, so training can continue from there. Packed folders load in the same way.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    check_tensors,
    embedding_weights,
    stored_tensors,
)
from sparse_bitnet.checkpoint.config_fields import check_fields
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.model_folder import (
    CONFIG_FILE,
    MASTERS_HELD,
    TOKENIZER_FILES,
    copy_files,
    finish_folder,
)
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import TEMPORARY_PREFIX, atomic_folder, check_ours
from sparse_bitnet.layer_config import FORMAT_VERSION, REGISTERED
from sparse_bitnet.nn.convert import convert_, is_linear, quantization_config, sparse_layers
from sparse_bitnet.nn.experts import is_fused_experts
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import Selection, select
from sparse_bitnet.nn.ternary_tables import quantize_table, set_tables_
from sparse_bitnet.packing.formats import SCALE_GROUPS, scale_group
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_REQUIRED_KEYS = ("version", "format", "modules_to_not_convert")


def read_format(entry: dict[str, Any], where: str = "config.json") -> SparseBitConfig:
    """Return the `SparseBitConfig` of the `quantization_config` in the config.json `where`.

    Raises `UserError` for a missing or an unknown key, or a version newer than this package reads.
    """
    for key in _REQUIRED_KEYS:
        if key not in entry:
            raise UserError(f"{where}: quantization_config lacks {key}")
    check_fields(entry, ("quant_method", *_REQUIRED_KEYS), f"{where}: quantization_config")
    kept = entry["modules_to_not_convert"]
    if not isinstance(kept, list) or not all(isinstance(name, str) for name in kept):
        raise UserError(f"{where}: modules_to_not_convert is not a list of names")
    if not isinstance(entry["version"], int) or not 1 <= entry["version"] <= FORMAT_VERSION:
        raise UserError(
            f"{where}: sparse_bitnet format version {entry['version']} is not readable by this "
            f"release (it reads up to {FORMAT_VERSION}); upgrade sparse-bitnet"
        )
    try:
        return SparseBitConfig.from_dict(entry["format"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def save_pretrained(
    model: "PreTrainedModel", folder: str | Path, tokenizer: "PreTrainedTokenizerBase | None" = None
) -> None:
    """Write a converted model, and its tokenizer if given, as a complete folder in one step. A checkpoint
    in `folder` is replaced; without a tokenizer, its own stays.

    Raises `UserError` when `model` is no transformers model or holds no `SparseBitLinear`, `folder` holds
    other files than a checkpoint's, or the disk is full; `folder` is then unchanged.
    """
    configs = [layer.config for layer in sparse_layers(model).values()]
    if not configs:
        raise UserError(
            f"{type(model).__name__} has no SparseBitLinear to save; use convert_ first"
        )
    if not hasattr(model, "save_pretrained"):
        kind = type(model).__name__
        raise UserError(f"{kind} is no transformers model: unwrap it, or save its state_dict")
    if any(config != configs[0] for config in configs):
        raise UserError("layers differ in their format; one checkpoint holds one format")
    if getattr(model, "peft_config", None):
        raise UserError("the model has adapters: merge them first, or save them with peft")
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if configs[0].embeddings == "ternary" and {nn.Embedding, nn.Linear} & set(map(type, ends)):
        raise UserError("the model has a new embedding or head: call convert_ again")
    folder = Path(folder)
    check_ours(folder, ["config.json"], "a checkpoint")
    model.config.quantization_config = quantization_config(model, configs[0])
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        copy_files(folder, temporary, TOKENIZER_FILES if tokenizer is None else ())
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        finish_folder(temporary, MASTERS_HELD)
        patterns = ("model*.safetensors*", ".lock", *TOKENIZER_FILES)
        ours = {path for pattern in patterns for path in folder.glob(pattern)}
        ours |= {path.parent for path in ours}
        for path in sorted(folder.rglob("*")):
            top = (name := path.relative_to(folder)).parts[0]
            is_ours = path in ours or top.startswith(TEMPORARY_PREFIX)
            if not (is_ours or (temporary / name).exists()):
                raise UserError(f"{folder} holds {top}, no checkpoint's: choose another one")


class TrainedCheckpoint(Checkpoint):
    """A folder whose names and shapes are those of the model that config.json describes."""

    def __init__(self, stored: StoredModel) -> None:
        """Open the folder. Raises `UserError` unless it is complete."""
        super().__init__(stored)
        folder, entry, model = stored.folder, stored.entry, self.model
        self.format = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
        if entry:
            self.format = read_format(entry, where=str(folder / CONFIG_FILE))
            chosen = converted_filter(model, entry, lambda: WeightFiles.in_folder(folder).shapes)
            self.not_linear = first_unpackable(model, lambda name: not chosen(None, name))
            convert_(model, self.format, chosen)
            set_tables_(model, ternary=False)  # which are read as `others`
        sparse = sparse_layers(model).items()
        self.layers = {name: (layer.out_features, layer.in_features) for name, layer in sparse}
        # Stored are the weights that multiply rotated inputs.
        widths = {width for _, width in self.layers.values()}
        self.rotation = Rotation.of_format(self.format, widths)
        if self.rotation:
            self.format = replace(self.format, activation="int8")
        self.has_masters = True
        self.has_one_scale = self.format.quantizer == REGISTERED["quantizer"]
        wanted = stored_tensors(model)
        self.files: WeightFiles | dict[str, Tensor] = WeightFiles.in_folder(folder)
        shapes, dtypes = self.files.shapes, self.files.dtypes
        if not shapes.keys() <= model.state_dict().keys() and len(shapes) <= len(wanted):
            # transformers renames these tensors on loading (GPT-NeoX), so they are read into memory.
            self.files = from_pretrained(folder).state_dict()
            names = {getattr(torch, name): key for key, name in DTYPES.items()}
            shapes = {name: tuple(value.shape) for name, value in self.files.items()}
            dtypes = {name: names[value.dtype] for name, value in self.files.items()}
        shapes = {n: shape for n, shape in shapes.items() if n not in model.all_tied_weights_keys}
        check_tensors(wanted, shapes, dtypes, folder)
        masters = {f"{name}.{part}" for name in self.layers for part in ("weight", "input_norm")}
        first = [name for name in embedding_weights(model) if name in wanted]
        others = [*first, *(name for name in wanted if name not in masters and name not in first)]
        self.others = {name: shapes[name] for name in others}
        self.dtypes = {name: dtypes[name] for name in others}

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        if self.format.embeddings != "ternary" or name not in self.embeddings:
            return None
        return quantize_table(super().read(name, part))

    def read(self, name: str, part: slice = slice(None)) -> Tensor:
        table = self.ternary_rows(name, part)
        return super().read(name, part) if table is None else table.values()

    def stored_values(self, name: str, part: slice = slice(None)) -> Tensor:
        if isinstance(self.files, WeightFiles):
            return self.files.read(name, part)
        return self.files[name][part] if self.files[name].dim() else self.files[name]

    def master(self, layer: str) -> Tensor:
        return self.read(f"{layer}.weight")

    def ternary(self, layer: str) -> TernaryWeight:
        codes, _, weight_scale = self._selection(layer)[:3]
        assert codes is not None
        assert weight_scale is not None
        if weight_scale.dim() and scale_group(tuple(weight_scale.shape), *codes.shape) is None:
            raise UserError(
                f"{self.folder}: {self.format.quantizer} gives {layer} scales {list(weight_scale.shape)} "
                f"for {list(codes.shape)} weights; packed folders hold one scale per matrix, row or "
                f"{', '.join(map(str, SCALE_GROUPS))} weights: use `export --to dense`"
            )
        return TernaryWeight(codes, weight_scale)

    def effective(self, layer: str) -> Tensor:
        return self._selection(layer).effective(self.master(layer).float())

    def _selection(self, layer: str) -> Selection:
        """Select mask, codes and scales from a layer's trained weight, in the checkpoint's format."""
        norm = f"{layer}.input_norm"
        matrix = Matrix(input_norm=self.read(norm) if norm in self.files else None)
        return select(self.master(layer), self.format, matrix=matrix)


def first_unpackable(model: nn.Module, keeps_dense: Callable[[str], bool]) -> str:
    """Return the name of the first layer that `convert_` converts but packed folders cannot hold: a
    transposed one, or fused experts; "" for none. Layers that `keeps_dense` accepts are skipped."""
    for name, module in model.named_modules():
        is_other = is_linear(module) and not isinstance(module, nn.Linear)
        if (is_other or is_fused_experts(module)) and not keeps_dense(name):
            return name
    return ""


def converted_filter(
    model: Any, entry: dict[str, Any], stored: Callable[[], Iterable[str]]
) -> Callable[[Any, str], bool]:
    """Return a filter for the layers that the stored model had in its format. In one of another
    class, which may have a head of its own, weights outside the blocks must be among `stored`."""
    # A base model without its head has the same names less the prefix.
    prefix = f"{model.base_model_prefix}."
    dense = {name.removeprefix(prefix) for name in entry["modules_to_not_convert"]}
    is_same = type(model).__name__ in (model.config.architectures or ())
    weights = set() if is_same else {name.removeprefix(prefix) for name in stored()}

    def chosen(module: Any, name: str) -> bool:
        name = name.removeprefix(prefix)
        is_there = is_same or re.search(r"\.\d+\.", name) or f"{name}.weight" in weights
        return name not in dense and bool(is_there)

    return chosen
