"""A checkpoint of ours as every exporter sees it: codes and scale per sparse layer, the rest as it is.

Nothing is read but headers until a tensor is asked for, so that an export of any size needs the memory
of its largest tensor. Shapes and names come from the files, the list of sparse layers from the model
that `config.json` describes, built without memory.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.held_out import resolve_checkpoint
from sparse_bitnet.hub import read_format
from sparse_bitnet.layer import SparseBitConfig, select
from sparse_bitnet.packing.checkpoint import MODEL_FILE
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.packing.loading import open_packed
from sparse_bitnet.packing.metadata import QUANT_METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TernaryWeight(NamedTuple):
    """value = codes * weight_scale."""

    codes: Tensor
    """int8 [out_features, in_features] in {-1, 0, 1}, masked."""
    weight_scale: Tensor
    """float32 scalar."""


class TensorFiles:
    """The tensors of a folder's safetensors files, by name, read one at a time.

    Raises `UserError` for a folder without such files, a damaged one, or one that its index names but
    that is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._paths: dict[str, Path] = {}
        for path in _weight_files(folder):
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a mapping)
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())
                    self._paths[name] = path

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str) -> Tensor:
        """One tensor in its stored dtype."""
        if name not in self._paths:
            raise UserError(f"{self.folder} lacks {name}: the files are incomplete")
        # Opened anew: the pages of a mapping that stays open would pile up as our memory.
        with _opened(self._paths[name]) as file:
            return file.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(read_json(index).get("weight_map", {}).values())
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no model*.safetensors")
    if missing := [file for file in files if not file.is_file()]:
        raise UserError(f"{missing[0]} is named in {index.name} but is not there")
    return files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `UserError` when the file is missing or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path.parent} holds no {path.name}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: not a JSON object")
    return content


def skeleton(config: dict[str, Any], where: Path) -> "PreTrainedModel":
    """The causal LM of a config.json on the meta device: names and shapes, no memory.

    Raises `UserError` for an architecture that transformers does not know.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "quantization_config"}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{where}/config.json describes no causal language model that transformers builds: "
            f"{str(error).splitlines()[0]}"
        ) from error


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Every linear layer by full name, heads included."""
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """One trained checkpoint, opened."""

    folder: Path
    """The transformers folder (of a run: its `final`, or its latest checkpoint)."""

    config: dict[str, Any]
    """config.json without its quantization_config."""

    format: SparseBitConfig

    layers: dict[str, tuple[int, int]]
    """[out_features, in_features] of every sparse layer, in the order of the model."""

    dense_linears: list[str]
    """Linear layers that stay as they are: the output head, and whatever was not converted."""

    other_tensors: dict[str, tuple[int, ...]]
    """Shape of everything that is no sparse layer's weight: embeddings, norms, biases."""

    read: Callable[[str], Tensor]
    """One of `other_tensors`, in its stored dtype."""

    read_ternary: Callable[[str], TernaryWeight]
    """Codes and scale of a sparse layer. Not for full-precision formats."""

    read_effective: Callable[[str], Tensor]
    """The weight a sparse layer multiplies with, float32: codes * scale, or the masked master."""

    def require_ternary_int8(self, target: str) -> None:
        """Raise `UserError` unless the model computes as `target` does: ternary x int8."""
        if self.format.weight != "ternary":
            raise UserError(
                f"{self.folder} is {self.format}: {target} holds ternary weights; "
                "use --format dense"
            )
        if self.format.activation != "int8":
            raise UserError(
                f"{self.folder} was trained without int8 activations ({self.format}), with which "
                f"every reader of {target} computes; use --format dense"
            )


def open_source(path: str | Path) -> ModelSource:
    """Open a run folder, a checkpoint folder or a packed folder of ours for exporting.

    Raises `UserError` for what is no such folder, an incomplete or damaged one, and for a checkpoint
    that is no local folder.
    """
    folder = Path(resolve_checkpoint(path))
    if not folder.is_dir():
        raise UserError(f"{path} is no local folder; download it first (hf download {path})")
    config = read_json(folder / "config.json")
    entry = config.pop("quantization_config", None)
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if method == QUANT_METHOD:
        return _open_packed(folder, config, entry)
    if method != "sparse_bitnet":
        found = f"quant_method {method!r}" if method else "no quantization_config"
        raise UserError(
            f"{folder} is no checkpoint of sparse-bitnet ({found} in config.json); "
            "`sparse-bitnet import` reads those of other tools"
        )
    return _open_masters(folder, config, entry)


def _open_masters(folder: Path, config: dict[str, Any], entry: dict[str, Any]) -> ModelSource:
    files = TensorFiles(folder)
    format = read_format(entry, str(folder / "config.json"))
    model = skeleton(config, folder)
    _check_complete(files, model)
    linears = linear_layers(model)
    kept = entry["modules_to_not_convert"]
    layers = {
        name: (linear.out_features, linear.in_features)
        for name, linear in linears.items()
        if name not in kept
    }

    def read_ternary(layer: str) -> TernaryWeight:
        codes, _, weight_scale = select(files.read(f"{layer}.weight"), format)
        assert codes is not None
        assert weight_scale is not None
        return TernaryWeight(codes, weight_scale)

    def read_effective(layer: str) -> Tensor:
        if format.weight == "full":
            weight = files.read(f"{layer}.weight").float()
            mask = select(weight, format).mask
            return weight if mask is None else weight * mask
        codes, weight_scale = read_ternary(layer)
        return codes * weight_scale

    weights = {f"{name}.weight" for name in layers}
    return ModelSource(
        folder=folder,
        config=config,
        format=format,
        layers=layers,
        dense_linears=[name for name in linears if name not in layers],
        other_tensors={name: shape for name, shape in files.shapes.items() if name not in weights},
        read=files.read,
        read_ternary=read_ternary,
        read_effective=read_effective,
    )


def _check_complete(files: TensorFiles, model: "PreTrainedModel") -> None:
    """Raise `UserError` for the first tensor of the model that is missing or of another shape."""
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        found, expected = files.shapes.get(name), tuple(tensor.shape)
        if found is None:
            raise UserError(f"{files.folder} lacks {name}: the files are incomplete")
        if found != expected:
            raise UserError(
                f"{files.folder}: {name} is {list(found)}, its config.json asks {list(expected)}"
            )


def _open_packed(folder: Path, config: dict[str, Any], entry: dict[str, Any]) -> ModelSource:
    file, metadata = open_packed(folder / MODEL_FILE)
    metadata.check_config_entry(entry, str(file.path))
    linears = linear_layers(skeleton(config, folder))
    int8 = {
        name
        for name, stored in file.entries.items()
        if stored.dtype == "I8" and f"{name}_scale" in file.entries
    }

    def read_ternary(layer: str) -> TernaryWeight:
        name = f"{layer}.weight_packed"
        codes = unpack(
            file.tensor(name),
            metadata.packed_format,
            metadata.pattern,
            metadata.layers[layer],
            name=name,
        )
        return TernaryWeight(codes, file.tensor(f"{layer}.weight_scale").clone().view(()))

    def read_effective(layer: str) -> Tensor:
        codes, weight_scale = read_ternary(layer)
        return codes * weight_scale

    def read(name: str) -> Tensor:
        if name in int8:
            return file.tensor(name) * file.tensor(f"{name}_scale")
        return file.tensor(name).clone()

    internal = {f"{name}.weight_packed" for name in metadata.layers}
    internal |= {f"{name}.weight_scale" for name in metadata.layers}
    internal |= {f"{name}_scale" for name in int8}
    return ModelSource(
        folder=folder,
        config=config,
        format=metadata.format,
        layers=metadata.layers,
        dense_linears=[name for name in linears if name not in metadata.layers],
        other_tensors={
            name: stored.shape for name, stored in file.entries.items() if name not in internal
        },
        read=read,
        read_ternary=read_ternary,
        read_effective=read_effective,
    )
