"""A trained checkpoint, read one tensor at a time: which are ternary layers, embeddings, others.

Nothing is read but headers until a tensor is asked for, so that packing and exporting a model of any
size need the memory of its largest tensor. Names and shapes of layers come from the model that
config.json describes, built without memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.locate import local_checkpoint
from sparse_bitnet.convert import convert_, sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.hub import from_pretrained, read_format
from sparse_bitnet.layer import SparseBitConfig
from sparse_bitnet.model_folder import CONFIG_FILE, quantization_entry, read_config
from sparse_bitnet.models import skeleton
from sparse_bitnet.packing.metadata import QUANT_METHOD
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE_VALUES = 1 << 24
"""Values of an embedding read at a time."""


class LoadedWeights:
    """In place of `WeightFiles` where transformers renames tensors on loading (GPT-NeoX): in memory."""

    def __init__(self, folder: Path) -> None:
        self._values: dict[str, Tensor] = from_pretrained(folder).state_dict()
        keys = {getattr(torch, name): key for key, name in DTYPES.items()}
        self.shapes = {name: tuple(value.shape) for name, value in self._values.items()}
        self.dtypes = {name: keys[value.dtype] for name, value in self._values.items()}

    def read(self, name: str, part: slice | None = None) -> Tensor:
        return self._values[name] if part is None else self._values[name][part]


@dataclass(frozen=True, kw_only=True)
class TrainedCheckpoint:
    """A folder that `save_pretrained` wrote, opened."""

    folder: Path
    config: dict[str, Any]
    """The whole config.json."""
    format: SparseBitConfig
    layers: dict[str, tuple[int, int]]
    """Sparse layers: full name -> (out_features, in_features), in the order of the model."""
    dense_linears: list[str]
    """Linear layers that stay as they are: the output head, and whatever was not converted."""
    embeddings: list[str]
    """Tensors of the embedding and, where it is not tied to it, of the output head."""
    others: list[str]
    """All other tensors but the layers' weights: biases, norms, linears that were left dense."""
    weights: WeightFiles | LoadedWeights
    """Every tensor by name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return self.weights.shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor, as stored."""
        return getattr(torch, DTYPES[self.weights.dtypes[name]])

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in its stored dtype. Raises `UserError` when its bytes cannot be read."""
        return self.weights.read(name)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A matrix as consecutive rows, at most 64 MB of float32 at a time."""
        rows, columns = self.shape(name)
        step = max(1, _PIECE_VALUES // columns)
        for first in range(0, rows, step):
            yield self.weights.read(name, slice(first, min(first + step, rows)))


def open_ternary(path: str | Path) -> TrainedCheckpoint:
    """`open_checkpoint` for what needs ternary weights. Raises `UserError` for any other format."""
    checkpoint = open_checkpoint(path)
    if checkpoint.format.weight != "ternary":
        raise UserError(
            f"{checkpoint.folder} holds full-precision weights ({checkpoint.format}), which no packed "
            "format holds: `sparse-bitnet export --format dense` writes them for other tools"
        )
    return checkpoint


def open_checkpoint(path: str | Path) -> TrainedCheckpoint:
    """Look into a run folder (its finished model, or its latest checkpoint) or a model folder.

    Raises `UserError` for anything but a complete local checkpoint of sparse-bitnet with its masters.
    """
    folder = local_checkpoint(path)
    config = read_config(folder)
    entry = quantization_entry(config)
    method = entry.get("quant_method")
    if method != "sparse_bitnet":
        found = f"quant_method {method!r}" if method else "no quantization_config"
        remedy = "`sparse-bitnet import` reads those of other tools"
        if method == QUANT_METHOD:
            remedy = "it is packed already"
        raise UserError(
            f"{folder} is no trained checkpoint of sparse-bitnet ({found} in {CONFIG_FILE}): {remedy}"
        )
    format = read_format(entry, where=str(folder / CONFIG_FILE))
    dense = set(entry["modules_to_not_convert"])
    model = skeleton(config, folder)
    convert_(model, format, lambda module, name: name not in dense)
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in sparse_layers(model).items()
    }
    weights = _open_weights(model, folder)
    names = _check_complete(model, weights, folder)
    embeddings = [name for name in _embedding_weights(model) if name in names]
    kept = {f"{name}.weight" for name in layers} | set(embeddings)
    return TrainedCheckpoint(
        folder=folder,
        config=config,
        format=format,
        layers=layers,
        dense_linears=[name for name, module in model.named_modules() if type(module) is nn.Linear],
        embeddings=embeddings,
        others=[name for name in names if name not in kept],
        weights=weights,
    )


def _open_weights(model: "PreTrainedModel", folder: Path) -> WeightFiles | LoadedWeights:
    files = WeightFiles.in_folder(folder)
    for name, dtype in files.dtypes.items():
        if dtype not in DTYPES:
            raise UserError(f"{folder}: {name} is of type {dtype}, which no master weight has")
    if unknown := sorted(files.shapes.keys() - model.state_dict().keys()):
        if len(files.shapes) > len(model.state_dict()) - len(model.all_tied_weights_keys):
            raise UserError(f"{folder}: tensor {unknown[0]} is no part of {type(model).__name__}")
        return LoadedWeights(folder)
    return files


def _check_complete(
    model: "PreTrainedModel", weights: WeightFiles | LoadedWeights, folder: Path
) -> list[str]:
    """The model's tensors, of tied ones the first; raises where one is missing or of other shape."""
    wanted = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    for name, expected in wanted.items():
        found = weights.shapes.get(name)
        if found is None:
            raise UserError(f"{folder} lacks {name}: the files are incomplete")
        if found != expected:
            raise UserError(
                f"{folder}: {name} is {list(found)}, its {CONFIG_FILE} asks {list(expected)}"
            )
    return list(wanted)


def _embedding_weights(model: "PreTrainedModel") -> list[str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if any(module is end for end in ends)
    ]
