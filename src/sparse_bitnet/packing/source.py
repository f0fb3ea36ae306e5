"""A trained checkpoint, read one tensor at a time: which are packed, which are embeddings, which rest."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparse_bitnet.convert import convert_, sparse_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.held_out import resolve_checkpoint
from sparse_bitnet.hub import from_pretrained, read_format
from sparse_bitnet.layer import SparseBitConfig
from sparse_bitnet.packing.tensor_file import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PIECE_VALUES = 1 << 24
"""Values of an embedding read at a time."""

_INDEX = "model.safetensors.index.json"


class StoredTensor(NamedTuple):
    """Where a tensor is."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    value: Tensor | None = None
    """Where transformers had to load the model, because its files use other names."""


@dataclass(frozen=True, kw_only=True)
class TrainedCheckpoint:
    """A folder that `save_pretrained` wrote. Nothing stays open or in memory between two reads.

    Except for the few families (GPT-NeoX) whose tensors transformers renames on loading: those are in
    memory as a whole.
    """

    folder: Path
    config: dict[str, Any]
    """The whole config.json."""
    format: SparseBitConfig
    layers: dict[str, tuple[int, int]]
    """Ternary layers: full name -> (out_features, in_features), in the order of the model."""
    embeddings: list[str]
    """Tensors of the embedding and, where it is not tied to it, of the output head."""
    others: list[str]
    """All other tensors: biases, norms, linears that were left dense."""
    stored: dict[str, StoredTensor]
    """Every tensor of its files by name."""

    def tensor(self, name: str) -> Tensor:
        """A whole tensor. Raises `UserError` when its bytes cannot be read."""
        return self._read(name, slice(None))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """A matrix as consecutive rows, at most 64 MB of float32 at a time."""
        rows, columns = self.stored[name].shape
        step = max(1, _PIECE_VALUES // columns)
        for first in range(0, rows, step):
            yield self._read(name, slice(first, min(first + step, rows)))

    def _read(self, name: str, part: slice) -> Tensor:
        stored = self.stored[name]
        if stored.value is not None:
            return stored.value[part] if stored.shape else stored.value
        # Opened anew each time: pages of a mapping that stays open would count as our memory.
        try:
            with safe_open(stored.path, framework="pt") as file:
                return file.get_slice(name)[part] if stored.shape else file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{stored.path}: cannot read tensor {name}: {error}") from error


def open_checkpoint(path: str | Path) -> TrainedCheckpoint:
    """Look into a run folder (its finished model, or its latest checkpoint) or a model folder.

    Raises `UserError` for anything but a complete local checkpoint of a ternary sparse-bitnet model.
    """
    folder = Path(resolve_checkpoint(path))
    if not folder.is_dir():
        raise UserError(f"{path} is not a local folder: download the model first")
    config = _read_json(folder / "config.json")
    entry = config.get("quantization_config")
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if not isinstance(entry, dict) or method != "sparse_bitnet":
        raise UserError(
            f"{folder} is not a trained sparse-bitnet model (quant_method {method or 'none'}): only "
            "those can be packed"
        )
    format = read_format(entry, where=str(folder / "config.json"))
    if format.weight != "ternary":
        raise UserError(f"{folder} holds full-precision weights ({format}): nothing to pack")
    model = _empty_model(folder, format, set(entry["modules_to_not_convert"]))
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in sparse_layers(model).items()
    }
    stored = _stored_tensors(folder)
    if unknown := sorted(stored.keys() - model.state_dict().keys()):
        if len(stored) > len(model.state_dict()) - len(model.all_tied_weights_keys):
            raise UserError(f"{folder}: tensor {unknown[0]} is no part of {type(model).__name__}")
        stored = _loaded_tensors(folder)
    names = _check_complete(model, stored, folder)
    embeddings = [name for name in _embedding_weights(model) if name in names]
    packed = {f"{name}.weight" for name in layers}
    return TrainedCheckpoint(
        folder=folder,
        config=config,
        format=format,
        layers=layers,
        embeddings=embeddings,
        others=[name for name in names if name not in packed and name not in embeddings],
        stored=stored,
    )


def _empty_model(folder: Path, format: SparseBitConfig, dense: set[str]) -> "PreTrainedModel":
    """The model without weights, converted as `from_pretrained` converts it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder)
        del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"{folder}: transformers cannot build this model: {reason}") from error
    convert_(model, format, lambda module, name: name not in dense)
    return model


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of model.safetensors, or of the several files that an index names."""
    paths = [folder / "model.safetensors"]
    if (folder / _INDEX).is_file():
        weight_map = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f"{folder / _INDEX}: no weight_map")
        paths = sorted({folder / str(name) for name in weight_map.values()})
    stored = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    known, shape = DTYPES.get(part.get_dtype()), tuple(part.get_shape())
                    if known is None:
                        raise UserError(
                            f"{path}: tensor {name} is {part.get_dtype()}: not a master"
                        )
                    stored[name] = StoredTensor(getattr(torch, known), shape, path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
    return stored


def _loaded_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors under the model's own names, as transformers loads them."""
    model = from_pretrained(folder)
    return {
        name: StoredTensor(value.dtype, tuple(value.shape), folder, value)
        for name, value in model.state_dict().items()
    }


def _check_complete(
    model: "PreTrainedModel", stored: dict[str, StoredTensor], folder: Path
) -> list[str]:
    """The model's tensors, of tied ones the first; raises where one is missing or of other shape."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    names = [name for name in wanted if name not in model.all_tied_weights_keys]
    for name in names:
        if name not in stored:
            raise UserError(f"{folder} lacks tensor {name}: its files are incomplete")
        if stored[name].shape != wanted[name]:
            raise UserError(
                f"{folder}: tensor {name} has shape {list(stored[name].shape)}, the model needs "
                f"{list(wanted[name])}"
            )
    return names


def _embedding_weights(model: "PreTrainedModel") -> list[str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [
        f"{name}.weight"
        for name, module in model.named_modules()
        if any(module is end for end in ends)
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a JSON object")
    return values
