# SPDX-License-Identifier: Apache-2.0
"""Any stored model, opened: its config, its layers, and its tensors one at a time.

Nothing but headers is read until a tensor is asked for, so that packing and exporting a model of any
size need the memory of its largest tensor.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import CONFIG_FILE, read_json_if_there
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.metadata import PackedMetadata
from sparse_bitnet.packing.tensor_file import TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from sparse_bitnet.nn.selection import Selection

TRAINED_CONTEXT = "trained_context_length"
"""Key of a packed folder's config.json; other readers ignore it."""

_PIECE_VALUES = 1 << 24
"""Values of an embedding read at a time."""


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What a user names, found; of its files only config.json is read."""

    name: str
    """The folder, or the hub id that was given."""

    folder: Path
    """The transformers folder (of a run: its `final`, or its latest checkpoint)."""

    kind: str
    """"trained" (of ours, with masters), "packed", "dense", "foreign" (of other tools) or "unknown"."""

    reader: str
    """The file of this package that opens its tensors; empty where none does."""

    config: dict[str, Any]
    """The whole config.json."""

    entry: dict[str, Any]
    """The `quantization_config` in it."""

    model: Callable[[], "PreTrainedModel"]
    """The transformers model on the meta device, before anything is converted."""

    weights: "Callable[[], dict[str, Tensor]] | None" = None
    """Reads all tensors of a model that transformers does not load; None for any other."""

    @property
    def title(self) -> str:
        """Its name in what is made of it: that of the folder, or of the run."""
        return (self.folder.parent if self.folder.name == "final" else self.folder).name

    @property
    def trained_context_length(self) -> int | None:
        """The sequence length with which a checkpoint of ours was trained; None for any other."""
        return trained_context_length(str(self.folder))

    def load(self, **kwargs: Any) -> "PreTrainedModel":
        """The model with its weights; `kwargs` are those of transformers' `from_pretrained`."""
        from sparse_bitnet.checkpoint.load import from_pretrained, with_weights

        if self.weights is not None:
            return with_weights(self.model(), self.weights(), **kwargs)
        if self.folder.is_file():
            raise UserError(f"{self.folder} is a GGUF file: `sparse-bitnet import` it first")
        return from_pretrained(self.folder, **kwargs)

    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """Its tokenizer, as `load_tokenizer` reads it. Raises `UserError` where there is none."""
        from sparse_bitnet.checkpoint.load import load_tokenizer

        return load_tokenizer(self.folder)


@dataclass(frozen=True, kw_only=True)
class Checkpoint(StoredModel):
    """A stored model, opened."""

    tool: str = ""
    """Of a foreign one: which format it has."""

    format: SparseBitConfig
    """Of the layers; of other tools' as far as their config says."""

    layers: dict[str, tuple[int, int]]
    """Sparse layers: full name -> (out_features, in_features), in the order of the model."""

    others: dict[str, tuple[int, ...]]
    """Shape of every tensor that is not a sparse layer's: embeddings, norms, biases, dense linears."""

    dtypes: dict[str, str]
    """Their types by the file's names, such as "BF16"."""

    read: Callable[..., Any]
    """(name, rows=None): one of `others`, as its own reader would use it, or a slice of its rows: torch's
    tensor, of a GGUF file an array."""

    master: Callable[[str], "Tensor"] | None
    """A sparse layer's trained weight; None where the checkpoint holds codes alone."""

    ternary: Callable[[str], TernaryWeight]
    """Codes and scale of a sparse layer. Not for full-precision formats."""

    selection: Callable[[str], "Selection"] | None = None
    """What the format chooses of a sparse layer's trained weight; None where there is none."""

    has_one_scale: bool = True
    """Each matrix has one scale; else what `ternary` returns shows how many."""

    ternary_rows: Callable[[str, slice], TernaryWeight | None] | None = None
    """Rows of an embedding or head, where they are ternary as the layers are; None where none can be."""

    write_tokenizer: Callable[[Path], None] | None = None
    """Writes tokenizer, chat template and end tokens into a folder; None where they lie in `folder`."""

    file: TensorFile | None = None
    metadata: PackedMetadata | None = None
    """Of a packed one."""

    @cached_property
    def stored(self) -> list[str]:
        """Names of `others` in the order of the model."""
        return [name for name in stored_tensors(self.model()) if name in self.others]

    @cached_property
    def dense_linears(self) -> list[str]:
        """Linear layers that stay as they are: the output head, and whatever was not converted."""
        return [name for name in linear_shapes(self.model()) if name not in self.layers]

    @cached_property
    def embeddings(self) -> list[str]:
        """Tensors of the embedding and, where it is not tied to it, of the output head."""
        return [name for name in embedding_weights(self.model()) if name in self.others]

    def pieces(self, name: str) -> Iterator[Any]:
        """A matrix of `others` as consecutive rows, at most 64 MB of float32 at a time."""
        return map(partial(self.read, name), self._parts(name))

    def ternary_pieces(self, name: str) -> Iterator[TernaryWeight | None]:
        """The same of one that is ternary; None for rows that are not."""
        return map(partial(self.ternary_rows or (lambda *_: None), name), self._parts(name))

    def _parts(self, name: str) -> Iterator[slice]:
        rows, columns = self.others[name]
        step = max(1, _PIECE_VALUES // columns)
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def effective(self, layer: str) -> "Tensor":
        """The float32 weight a sparse layer multiplies with: codes * scale, or the masked master."""
        if self.selection is None or self.master is None:
            return self.ternary(layer).values()
        return self.selection(layer).effective(self.master(layer).float())


def trained_context_length(checkpoint: str) -> int | None:
    """The sequence length with which a checkpoint of ours was trained; None for any other."""
    folder = Path(checkpoint)
    places = (
        (folder / "train_config.json", "sequence_length"),
        (folder / CONFIG_FILE, TRAINED_CONTEXT),
        (folder.parent / "config.json", "sequence_length"),
    )
    for path, key in places:
        found = read_json_if_there(path).get(key)
        if type(found) is int and found > 0:
            return found
    return None


def finite(values: Any, name: str, where: Path) -> Any:
    """The values of a tensor. Raises `UserError`, naming it, for any that are not finite."""
    if not math.isfinite(abs(values).max()):
        raise UserError(f"{where}: tensor {name} has values that are not finite")
    return values


def warn_of_zeros(ternary: TernaryWeight, layer: str, foreign: Checkpoint) -> None:
    """Warn of a layer that is read and has no weight but zeros."""
    if not ternary.codes.any():
        warnings.warn(f"layer {layer} of {foreign.folder} has no weight but zeros", stacklevel=2)


def exported_format(remembered: object) -> SparseBitConfig:
    """Of another tool's checkpoint: ternary, and dense unless it is an export of ours, which remembers
    the format of its training."""
    pattern = NMPattern(8, 8)
    if isinstance(remembered, str):
        # Ablations, which may not be registered here, change how masters give codes: those of an import
        # are plain.
        pattern = SparseBitConfig.parse(remembered.partition(",")[0]).pattern
    return SparseBitConfig(pattern=pattern)


def embedding_weights(model: Any) -> list[str]:
    """Names of the weights of embedding and output head, tied or not."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = model.named_modules()
    return [f"{name}.weight" for name, module in modules if any(module is end for end in ends)]


def linear_shapes(model: "nn.Module") -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every linear layer by full name, heads included."""
    from torch import nn

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }


def stored_tensors(model: Any) -> "dict[str, Tensor]":
    """What a file of a transformers model holds, by name: its state without the second of tied names."""
    state = model.state_dict()
    return {name: state[name] for name in state if name not in model.all_tied_weights_keys}
