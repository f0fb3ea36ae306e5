# SPDX-License-Identifier: Apache-2.0
"""Folders that `save_pretrained` wrote, ours with their masters or any other dense model."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    embedding_weights,
    finite,
    stored_tensors,
)
from sparse_bitnet.checkpoint.hub import read_format
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.model_folder import CONFIG_FILE
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import REGISTERED, SparseBitConfig
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.selection import Selection, select
from sparse_bitnet.packing.formats import SCALE_GROUPS, scale_group
from sparse_bitnet.packing.tensor_file import DTYPES, FLOATS
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read(found: StoredModel) -> Checkpoint:
    """Open a folder whose names and shapes are those of the model that config.json describes.

    Raises `UserError` for anything but a complete one.
    """
    folder, entry, model = found.folder, found.entry, found.model()
    format = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
    if entry:
        format = read_format(entry, where=str(folder / CONFIG_FILE))
        dense = set(entry["modules_to_not_convert"])
        convert_(model, format, lambda module, name: name not in dense)
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in sparse_layers(model).items()
    }
    files = _files(model, folder)
    tensors = stored_tensors(model)
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, expected in wanted.items():
        if (stored := files.shapes.get(name)) is None:
            raise UserError(f"{folder} lacks {name}: the files are incomplete")
        if stored != expected:
            raise UserError(
                f"{folder}: {name} is {list(stored)}, its {CONFIG_FILE} asks {list(expected)}"
            )
        if tensors[name].is_floating_point() and files.dtypes[name] not in FLOATS:
            raise UserError(f"{folder}: {name} is {files.dtypes[name]}, not floats as weights are")

    def selection(layer: str) -> Selection:
        norm = f"{layer}.input_norm"
        matrix = Matrix(input_norm=files.read(norm) if norm in files.shapes else None)
        return select(master(layer), format, matrix=matrix)

    def ternary(layer: str) -> TernaryWeight:
        codes, _, weight_scale = selection(layer)[:3]
        assert codes is not None
        assert weight_scale is not None
        if weight_scale.dim() and scale_group(tuple(weight_scale.shape), *codes.shape) is None:
            raise UserError(
                f"{folder}: {format.quantizer} gives {layer} scales {list(weight_scale.shape)} for "
                f"{list(codes.shape)} weights; packed are one a matrix, a row, or "
                f"{', '.join(map(str, SCALE_GROUPS))} weights: use `export --format dense`"
            )
        return TernaryWeight(codes, weight_scale)

    def master(layer: str) -> Tensor:
        return finite(files.read(f"{layer}.weight"), f"{layer}.weight", folder)

    masters = {f"{name}.{part}" for name in layers for part in ("weight", "input_norm")}
    first = [name for name in embedding_weights(model) if name in wanted]
    others = [*first, *(name for name in wanted if name not in masters and name not in first)]
    return Checkpoint(
        **vars(found),
        format=format,
        layers=layers,
        others={name: wanted[name] for name in others},
        dtypes={name: files.dtypes[name] for name in others},
        read=files.read,
        master=master,
        ternary=ternary,
        selection=selection,
        has_one_scale=format.quantizer == REGISTERED["quantizer"],
    )


class _Loaded(WeightFiles):
    """In memory, where transformers renames tensors on loading (GPT-NeoX)."""

    def __init__(self, folder: Path) -> None:
        self._values: dict[str, Tensor] = from_pretrained(folder).state_dict()
        keys = {getattr(torch, name): key for key, name in DTYPES.items()}
        self.shapes = {name: tuple(value.shape) for name, value in self._values.items()}
        self.dtypes = {name: keys[value.dtype] for name, value in self._values.items()}

    def read(self, name: str, part: slice | None = None) -> Tensor:
        return self._values[name] if part is None else self._values[name][part]


def _files(model: "PreTrainedModel", folder: Path) -> WeightFiles:
    files = WeightFiles.in_folder(folder)
    for name, dtype in files.dtypes.items():
        if dtype not in DTYPES:
            raise UserError(f"{folder}: {name} is of type {dtype}, which no master weight has")
    if unknown := sorted(files.shapes.keys() - model.state_dict().keys()):
        if len(files.shapes) > len(model.state_dict()) - len(model.all_tied_weights_keys):
            raise UserError(f"{folder}: tensor {unknown[0]} is not part of {type(model).__name__}")
        return _Loaded(folder)
    return files
