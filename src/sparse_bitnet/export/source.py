"""A checkpoint of ours as every exporter sees it: codes and scale per sparse layer, the rest as it is.

Masters are read as checkpoint/trained.py reads them, packed folders through their own reader: headers at
first, a tensor when it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparse_bitnet.checkpoint.locate import local_checkpoint
from sparse_bitnet.checkpoint.packed_loading import open_packed
from sparse_bitnet.checkpoint.trained import TrainedCheckpoint, open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack import MODEL_FILE
from sparse_bitnet.layer import SparseBitConfig, select
from sparse_bitnet.model_folder import quantization_entry, read_config
from sparse_bitnet.models import skeleton
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.packing.metadata import QUANT_METHOD


class TernaryWeight(NamedTuple):
    """value = codes * weight_scale."""

    codes: Tensor
    """int8 [out_features, in_features] in {-1, 0, 1}, masked."""
    weight_scale: Tensor
    """float32 scalar."""


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
    folder = local_checkpoint(path)
    config = read_config(folder)
    if quantization_entry(config).get("quant_method") == QUANT_METHOD:
        return _open_packed(folder, config)
    return _of_masters(open_checkpoint(folder))


def _of_masters(checkpoint: TrainedCheckpoint) -> ModelSource:
    format = checkpoint.format

    def read_ternary(layer: str) -> TernaryWeight:
        codes, _, weight_scale = select(checkpoint.tensor(f"{layer}.weight"), format)[:3]
        assert codes is not None
        assert weight_scale is not None
        return TernaryWeight(codes, weight_scale)

    def read_effective(layer: str) -> Tensor:
        if format.weight == "full":
            weight = checkpoint.tensor(f"{layer}.weight").float()
            mask = select(weight, format).mask
            return weight if mask is None else weight * mask
        codes, weight_scale = read_ternary(layer)
        return codes * weight_scale

    others = [*checkpoint.embeddings, *checkpoint.others]
    return ModelSource(
        folder=checkpoint.folder,
        config=_without_quantization(checkpoint.config),
        format=format,
        layers=checkpoint.layers,
        dense_linears=checkpoint.dense_linears,
        other_tensors={name: checkpoint.shape(name) for name in others},
        read=checkpoint.tensor,
        read_ternary=read_ternary,
        read_effective=read_effective,
    )


def _open_packed(folder: Path, config: dict[str, Any]) -> ModelSource:
    file, metadata = open_packed(folder / MODEL_FILE)
    metadata.check_config_entry(quantization_entry(config), str(file.path))
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
        config=_without_quantization(config),
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


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "quantization_config"}
