# SPDX-License-Identifier: Apache-2.0
"""Folders that `save_pretrained` wrote, ours with their masters or any other dense model."""

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    check_tensors,
    embedding_weights,
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
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.variants.registry import Matrix


class TrainedCheckpoint(Checkpoint):
    """A folder whose names and shapes are those of the model that config.json describes."""

    def __init__(self, stored: StoredModel) -> None:
        """Open the folder. Raises `UserError` unless it is complete."""
        folder, entry, model = stored.folder, stored.entry, stored.model()
        format = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
        if entry:
            format = read_format(entry, where=str(folder / CONFIG_FILE))
            dense = set(entry["modules_to_not_convert"])
            convert_(model, format, lambda module, name: name not in dense)
        layers = {
            name: (layer.out_features, layer.in_features)
            for name, layer in sparse_layers(model).items()
        }
        wanted = stored_tensors(model)
        self.files: WeightFiles | dict[str, Tensor] = WeightFiles.in_folder(folder)
        shapes, dtypes = self.files.shapes, self.files.dtypes
        if not shapes.keys() <= model.state_dict().keys() and len(shapes) <= len(wanted):
            # transformers renames these tensors on loading (GPT-NeoX), so they are read into memory.
            self.files = from_pretrained(folder).state_dict()
            names = {getattr(torch, name): key for key, name in DTYPES.items()}
            shapes = {name: tuple(value.shape) for name, value in self.files.items()}
            dtypes = {name: names[value.dtype] for name, value in self.files.items()}
        tied = model.all_tied_weights_keys
        shapes = {name: shape for name, shape in shapes.items() if name not in tied}
        check_tensors(wanted, shapes, dtypes, folder)
        masters = {f"{name}.{part}" for name in layers for part in ("weight", "input_norm")}
        first = [name for name in embedding_weights(model) if name in wanted]
        others = [*first, *(name for name in wanted if name not in masters and name not in first)]
        super().__init__(
            stored,
            format=format,
            layers=layers,
            others={name: shapes[name] for name in others},
            dtypes={name: dtypes[name] for name in others},
            has_masters=True,
            has_one_scale=format.quantizer == REGISTERED["quantizer"],
        )

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
                f"{self.folder}: {self.format.quantizer} gives {layer} scales "
                f"{list(weight_scale.shape)} for {list(codes.shape)} weights; packed are one a matrix, "
                f"a row, or {', '.join(map(str, SCALE_GROUPS))} weights: use `export --to dense`"
            )
        return TernaryWeight(codes, weight_scale)

    def effective(self, layer: str) -> Tensor:
        return self._selection(layer).effective(self.master(layer).float())

    def _selection(self, layer: str) -> Selection:
        """Select mask, codes and scales from a layer's trained weight, in the checkpoint's format."""
        norm = f"{layer}.input_norm"
        matrix = Matrix(input_norm=self.read(norm) if norm in self.files else None)
        return select(self.master(layer), self.format, matrix=matrix)
