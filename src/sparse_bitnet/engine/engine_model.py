# SPDX-License-Identifier: Apache-2.0
"""A packed checkpoint as the CPU engine reads it: all tensors that its config.json needs. No torch."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.architecture import Architecture, read_architecture
from sparse_bitnet.errors import Unsupported, UserError
from sparse_bitnet.packing.formats import SCALE_GROUPS, PackedMetadata, row_bytes, scale_group
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFile
from sparse_bitnet.pattern import NMPattern

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

STORED_NAMES = {"F32": "float32", "BF16": "bfloat16", "I8": "int8", "U8": "i2"}
"""Run-time formats of tables that have a dtype in the file."""
INT4_GROUP = 64
"""Values of an int4 head that share a scale."""
_TABLE_DTYPES = {"bf16": "BF16", "float32": "F32", "int8": "I8", "ternary": "U8"}


@dataclass(frozen=True, kw_only=True)
class EngineModel:
    """A packed model that the engine has opened; the contents of its tensors are not checked yet."""

    folder: Path
    file: TensorFile
    metadata: PackedMetadata
    architecture: Architecture

    @property
    def table_names(self) -> list[str]:
        """Names of the embedding and, unless it is tied, of the output head."""
        return [EMBEDDING] if self.architecture.ties_head else [EMBEDDING, HEAD]

    def scale_group(self, layer: int, linear: str) -> int:
        """Return the number of weights of a linear that share a scale; 0: a whole row or matrix."""
        shape = self.file.entries[f"model.layers.{layer}.{linear}.weight_scale"].shape
        columns = self.architecture.linear_shapes(layer)[linear][1]
        return columns // shape[1] if len(shape) == 2 and shape[1] > 1 else 0

    def scale_groups(self) -> set[int]:
        """Return `scale_group` of all linears, as a set."""
        return {
            self.scale_group(layer, linear)
            for layer in range(self.architecture.layers)
            for linear in self.architecture.linear_shapes(layer)
        }

    def floats(self, name: str) -> np.ndarray:
        """Return a tensor as float32. Raises `UserError`, naming it, if its checksum does not match."""
        self.file.verify_tensor(name)
        values = self.file.array(name)
        if self.file.entries[name].dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise UserError(f"{self.file.path}: tensor {name} has values that are not finite")
        return values

    def scales(self, name: str) -> np.ndarray:
        """Return a tensor of weight scales, float32 in the shape of the file. Raises `UserError` unless
        they are positive; of several, those of codes that are all zero may be zero."""
        values = self.floats(name)
        if values.min() < 0 or (values.size == 1 and values.item() == 0):
            raise UserError(
                f"{self.file.path}: tensor {name} has {values.min()}, but scales must be above 0; "
                "pack the model again"
            )
        return values


def open_engine_model(path: str | Path) -> EngineModel:
    """Open a folder written by `sparse-bitnet pack`.

    Raises `Unsupported` for a model that the CPU engine does not support, extra tensors included, and
    `UserError` for anything else, naming a tensor that is missing or whose type or shape differs from
    config.json.
    """
    checkpoint = open_checkpoint(path, "packed")
    folder, file, metadata = checkpoint.folder, checkpoint.file, checkpoint.metadata
    assert file is not None
    assert metadata is not None
    architecture = read_architecture(checkpoint.config, str(folder / "config.json"))
    if metadata.format.activation != "int8":
        raise Unsupported(
            f"{folder}: the CPU engine computes with int8 activations, this model was trained with "
            f"activation={metadata.format.activation}; use --engine transformers"
        )
    model = EngineModel(folder=folder, file=file, metadata=metadata, architecture=architecture)
    entries, path, wanted = file.entries, file.path, _wanted(model)
    for name, (dtypes, shape) in wanted.items():
        entry = entries.get(name)
        if entry is None:
            if name.removesuffix("_packed") in entries:
                raise Unsupported(
                    f"{path}: tensor {name} is missing: that layer is not ternary, which the CPU engine "
                    "cannot compute; use --engine transformers"
                )
            if f"{name}_packed" in entries:
                raise Unsupported(
                    f"{path}: tensor {name} is missing: that layer is ternary, which the CPU engine "
                    "computes only as dense weights; use --engine transformers"
                )
            raise UserError(
                f"{path}: tensor {name} is missing; copy the file and config.json again"
            )
        if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
            raise UserError(
                f"{path}: tensor {name} is {DTYPES[entry.dtype]} {list(entry.shape)}, the model needs "
                f"{' or '.join(DTYPES[dtype] for dtype in dtypes)} {list(shape or ['bytes'])}"
            )
    if unknown := sorted(entries.keys() - wanted.keys()):
        raise Unsupported(
            f"{path}: tensor {unknown[0]} is not part of the {architecture.model_type} model that "
            "config.json describes"
        )
    return model


def choose_head(model: EngineModel, head: str) -> str:
    """Return the run-time format of the output head (int8, int4, bfloat16, float32 or i2) for an option
    of `Engine.load`.

    Raises `UserError` for int4 if the hidden size has no groups of 64, and for another format of a
    ternary head.
    """
    stored = STORED_NAMES[model.file.entries[model.table_names[-1]].dtype]
    if head in ("auto", "stored"):
        head = "int8" if head == "auto" and stored != "i2" else stored
    if stored == "i2" and head != stored:
        raise UserError(
            f"--head {head}: the head of {model.folder} is ternary and stays so in memory; use auto, or "
            "pack the model with --embeddings bf16"
        )
    if head == "int4" and (hidden := model.architecture.hidden) % INT4_GROUP:
        raise UserError(
            f"--head int4 needs a hidden size in groups of {INT4_GROUP}, not {hidden}; use int8"
        )
    return head


def _wanted(model: EngineModel) -> dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]]:
    """Return every tensor of the model: name -> (possible types, shape; None for any number of bytes)."""
    architecture, metadata = model.architecture, model.metadata
    wanted: dict[str, tuple[tuple[str, ...], tuple[int, ...] | None]] = {}
    floats = ("F32", "BF16", "F16")
    for layer in range(architecture.layers):
        block = f"model.layers.{layer}"
        for linear, shape in architecture.linear_shapes(layer).items():
            name = f"{block}.{linear}"
            columns = row_bytes(metadata.packed_format, metadata.pattern, shape[1], layer=name)
            wanted[f"{name}.weight_packed"] = (("U8",), (shape[0], columns))
            scales = model.file.entries.get(f"{name}.weight_scale")
            if scales and scales.shape != (1,) and scale_group(scales.shape, *shape) is not None:
                wanted[f"{name}.weight_scale"] = (floats, scales.shape)
            else:
                wanted[f"{name}.weight_scale"] = (("F32",), (1,))
        for vector, size in architecture.vectors(layer).values():
            wanted[f"{block}.{vector}"] = (floats, size)
        if layer >= len(metadata.layers):
            # A count of layers that the file cannot have is not worth enumerating.
            break
    wanted["model.norm.weight"] = (floats, (architecture.hidden,))
    rows, hidden = architecture.vocab, architecture.hidden
    for name in model.table_names:
        columns, scales = hidden, model.file.entries.get(f"{name}_scale")
        entry, form = model.file.entries.get(name), metadata.embeddings
        form = "bf16" if form == "ternary" and entry and entry.dtype == "BF16" else form
        if form == "ternary":
            columns = row_bytes("i2", NMPattern(1, 1), hidden)
            group = scale_group(scales.shape, rows, hidden) if scales else None
            group = group if group in SCALE_GROUPS else SCALE_GROUPS[0]
            wanted[f"{name}_scale"] = (floats, (rows, -(-hidden // group)))
        elif form == "int8":
            wanted[f"{name}_scale"] = (("F32",), (rows, 1))
        wanted[name] = ((_TABLE_DTYPES[form],), (rows, columns))
    return wanted
