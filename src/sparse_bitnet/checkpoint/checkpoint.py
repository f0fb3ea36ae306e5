# SPDX-License-Identifier: Apache-2.0
"""Any stored model, opened: its config, its layers, and its tensors one at a time.

Only headers are read until a tensor is requested, so packing or exporting a model needs only the memory
of its largest tensor.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.checkpoint.model_folder import CONFIG_FILE, read_json_if_there
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.formats import PackedMetadata
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.tensor_file import DTYPES, FLOATS, TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

TRAINED_CONTEXT = "trained_context_length"
"""Key of a packed folder's config.json with the training sequence length; other readers ignore it."""

_PIECE_VALUES = 1 << 24
"""Number of matrix values to read at a time."""


@dataclass(kw_only=True, eq=False)
class StoredModel:
    """A stored model whose tensors are not open yet; only its config.json has been read."""

    name: str
    """The folder, or the hub id that was given."""
    folder: Path
    """The transformers folder (of a run: its `final`, or its latest checkpoint), or the GGUF file."""
    kind: str
    """One of "trained" (ours, with masters), "packed", "dense", "foreign" (another tool's), "unknown"."""
    reader: str
    """The subclass of `Checkpoint` that opens its tensors, as MODULE.CLASS; empty if there is none."""
    config: dict[str, Any]
    """The whole config.json."""
    entry: dict[str, Any]
    """The `quantization_config` in it."""

    @property
    def title(self) -> str:
        """Name for files made from the model: that of the folder, of the run, or on the hub."""
        path = Path(self.name.partition("@")[0]).absolute()
        return (path.parent if path.name == "final" else path).name

    @property
    def trained_context_length(self) -> int | None:
        """The sequence length with which a checkpoint of ours was trained; None for any other."""
        own, key = self.folder / "train_config.json", "sequence_length"
        places = [(own, key), (self.folder / CONFIG_FILE, TRAINED_CONTEXT)]
        places += [(self.folder.parent / "config.json", key)] if self.folder.name == "final" else []
        lengths = (read_json_if_there(path).get(name) for path, name in places)
        return next((each for each in lengths if type(each) is int and each > 0), None)

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The transformers model on the meta device, before anything is converted."""
        from sparse_bitnet.checkpoint.load import skeleton

        return skeleton(self.config, self.folder)

    def load(self, **kwargs: Any) -> "PreTrainedModel":
        """Return the model with its weights; `kwargs` are those of transformers' `from_pretrained`."""
        from sparse_bitnet.checkpoint.load import from_pretrained

        return from_pretrained(self.folder, **kwargs)


class Checkpoint(StoredModel):
    """An opened stored model. Each kind has a subclass, which sets these attributes.

    Attributes:
        format: training format of the sparse layers; for another tool's, as far as its config states it.
        layers: sparse layers, full name -> (out_features, in_features), in the order of the model.
        others: shape of every tensor that is not a sparse layer's: embeddings, norms, biases, dense
            linears.
        dtypes: dtype of each tensor in `others`, by the file's name for it, such as "BF16".
        tool: name of a foreign checkpoint's format, else empty.
        has_masters: whether `master` returns weights.
        not_linear: a sparse layer, or experts, that is no `nn.Linear` in the plain model, else empty.
        has_one_scale: whether every matrix is known to have one scale; else `ternary` shows how many.
        rotation: rotation of the ternary matrices as they are stored, else None.
        file, metadata: tensor file and metadata of a packed checkpoint, else None.
    """

    format: SparseBitConfig
    layers: dict[str, tuple[int, int]]
    others: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    tool: str = ""
    has_masters: bool = False
    not_linear: str = ""
    has_one_scale: bool = False
    rotation: Rotation | None = None
    file: TensorFile | None = None
    metadata: PackedMetadata | None = None

    def __init__(self, stored: StoredModel) -> None:
        vars(self).update(vars(stored))
        self.others, self.dtypes = {}, {}

    def stored_values(self, name: str, part: slice = slice(None)) -> Any:
        """Return the values that `read` returns, without checking that they are finite."""
        raise NotImplementedError

    def master(self, layer: str) -> "Tensor":
        """Return a sparse layer's trained weight. Available only if `has_masters`."""
        raise NotImplementedError

    def ternary(self, layer: str) -> TernaryWeight:
        """Return the codes and scales of a sparse layer. Not available for full-precision formats."""
        raise NotImplementedError

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        """Return rows of an embedding or head if they are ternary, else None."""
        return None

    def write_tokenizer(self, folder: Path) -> bool:
        """Write tokenizer, chat template and end tokens into a folder. Return False without writing if
        they are files of `self.folder`, which the caller copies."""
        return False

    def read(self, name: str, part: slice = slice(None)) -> Any:
        """Return a tensor of `others`, or a slice of its rows, as its own reader uses it: a torch tensor,
        or an array for a GGUF file. Raises `UserError`, naming the tensor, if a value is not finite."""
        return finite(self.stored_values(name, part), name, self.folder)

    @cached_property
    def stored(self) -> list[str]:
        """Names of `others` in the order of the model."""
        return [name for name in stored_tensors(self.model) if name in self.others]

    @cached_property
    def dense_linears(self) -> list[str]:
        """Names of the linear layers that stay dense: the output head and all that were not converted."""
        return [name for name in linear_shapes(self.model) if name not in self.layers]

    @cached_property
    def embeddings(self) -> list[str]:
        """Names of the embedding's tensor and, unless it is tied, of the output head's."""
        return [name for name in embedding_weights(self.model) if name in self.others]

    def pieces(self, name: str) -> Iterator[Any]:
        """Iterate over a matrix of `others` as blocks of rows, at most 64 MB of float32 each."""
        return (self.read(name, part) for part in self._parts(name))

    def ternary_pieces(self, name: str) -> Iterator[TernaryWeight | None]:
        """Iterate over a ternary matrix as `pieces` does; None for rows that are not ternary."""
        return (self.ternary_rows(name, part) for part in self._parts(name))

    def _parts(self, name: str) -> Iterator[slice]:
        rows, columns = self.others[name]
        step = max(1, _PIECE_VALUES // columns)
        return (slice(first, min(first + step, rows)) for first in range(0, rows, step))

    def effective(self, layer: str) -> "Tensor":
        """Return the float32 weight that a sparse layer multiplies by."""
        return self.ternary(layer).values()


def finite(values: Any, name: str, where: Path) -> Any:
    """Return a tensor's values. Raises `UserError`, naming the tensor, if any value is not finite."""
    if not math.isfinite(abs(values).max()):
        raise UserError(f"{where}: tensor {name} has values that are not finite")
    return values


def check_tensors(
    wanted: "Mapping[str, Tensor]",
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    where: object,
) -> None:
    """Raise `UserError`, naming the tensor, unless a file with tensors of these shapes and dtypes holds
    exactly those of a model. Float dtypes may differ; values are not read."""
    for name in sorted(wanted.keys() ^ shapes.keys()):
        if name in wanted:
            raise UserError(f"{where} lacks {name}: the files are incomplete or of another model")
        raise UserError(f"{where}: tensor {name} is not part of the model in its {CONFIG_FILE}")
    for name, tensor in wanted.items():
        kind = str(tensor.dtype).removeprefix("torch.")
        is_float = tensor.is_floating_point()
        fits = dtypes[name] in FLOATS if is_float else DTYPES.get(dtypes[name]) == kind
        if not fits or shapes[name] != tuple(tensor.shape):
            raise UserError(
                f"{where}: {name} is {dtypes[name]} {list(shapes[name])}, its {CONFIG_FILE} needs "
                f"{'floats' if is_float else kind} {list(tensor.shape)}"
            )


def exported_format(remembered: object) -> SparseBitConfig:
    """Return the format of another tool's checkpoint: ternary, with a dense pattern unless it is an
    export of ours, which records its pattern and whether activations are quantised."""
    if not isinstance(remembered, str):
        return SparseBitConfig(pattern=NMPattern(8, 8))
    # No ablations, which may not be registered here: they change how masters give codes, and the masters
    # of an import are plain.
    first, *fields = remembered.split(",")
    activation = "none" if "activation=none" in fields else "int8"
    return SparseBitConfig(pattern=SparseBitConfig.parse(first).pattern, activation=activation)


def embedding_weights(model: Any) -> list[str]:
    """Return the names of the weights of embedding and output head, tied or not."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = model.named_modules()
    return [f"{name}.weight" for name, module in modules if any(module is end for end in ends)]


def linear_shapes(model: "nn.Module") -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of every linear layer by full name, heads included."""
    from torch import nn

    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }


def stored_tensors(model: Any) -> "dict[str, Tensor]":
    """Return the tensors in a transformers model's file, by name: its state without tied duplicates."""
    state = model.state_dict()
    return {name: state[name] for name in state if name not in model.all_tied_weights_keys}
