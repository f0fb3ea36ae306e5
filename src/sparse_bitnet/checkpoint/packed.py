# SPDX-License-Identifier: Apache-2.0
"""Folders that `sparse-bitnet pack` wrote. Opening one imports no torch."""

import math
from typing import TYPE_CHECKING

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import PackedMetadata, scale_group
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"


class PackedCheckpoint(Checkpoint):
    """A packed folder; a tensor is compared with its checksum when it is read."""

    file: TensorFile
    metadata: PackedMetadata

    def __init__(self, stored: StoredModel) -> None:
        """Raises `UserError` for a file that is damaged, truncated, of another version, or not of this
        config."""
        file = TensorFile(stored.folder / MODEL_FILE)
        metadata = PackedMetadata.from_json(file.metadata, str(file.path))
        metadata.check_config_entry(stored.entry, str(file.path))
        for name, shape in metadata.layers.items():
            if f"{name}.weight_packed" not in file.entries:
                raise UserError(f"{file.path}: tensor {name}.weight_packed is missing")
            check_scales_entry(file, f"{name}.weight_scale", shape, one=("F32",))
        internal = {
            f"{name}.weight_{end}" for name in metadata.layers for end in ("packed", "scale")
        }
        hidden = stored.config.get("hidden_size")
        self._int8: set[str] = set()
        self._tables: dict[str, tuple[int, int]] = {}
        for name, entry in file.entries.items():
            if f"{name}_scale" not in file.entries or name in internal:
                continue
            if entry.dtype == "I8":
                self._int8.add(name)
                # One scale a row: rows of one value have no other groups.
                whole = (*entry.shape[:1], 1)
            elif entry.dtype == "U8" and len(entry.shape) == 2:
                whole = (entry.shape[0], hidden if type(hidden) is int else 0)
                self._tables[name] = whole
            else:
                continue
            check_scales_entry(file, f"{name}_scale", whole, one=())
        internal |= {f"{name}_scale" for name in (*self._int8, *self._tables)}
        others = {name: entry for name, entry in file.entries.items() if name not in internal}
        scales = (file.entries[f"{layer}.weight_scale"] for layer in metadata.layers)
        super().__init__(
            stored,
            format=metadata.format,
            layers=metadata.layers,
            others={name: self._tables.get(name, entry.shape) for name, entry in others.items()},
            dtypes={n: "F32" if n in self._tables else others[n].dtype for n in others},
            has_one_scale=all(scale.shape == (1,) for scale in scales),
        )
        self.file, self.metadata = file, metadata

    def ternary(self, layer: str) -> TernaryWeight:
        from sparse_bitnet.packing.codec import unpack

        name, metadata = f"{layer}.weight_packed", self.metadata
        packed, scale = self.file.checked(name), self.file.checked(f"{layer}.weight_scale")
        check_scales(scale, f"{layer}.weight_scale")
        whole = metadata.layers[layer]
        codes = unpack(packed, metadata.packed_format, metadata.pattern, whole, name=name)
        return TernaryWeight(codes, scale.clone().view(() if scale.shape == (1,) else scale.shape))

    def ternary_rows(self, name: str, part: slice) -> TernaryWeight | None:
        if name not in self._tables:
            return None
        packed, scales = self.file.checked(name)[part], self.file.checked(f"{name}_scale")[part]
        return ternary_table(packed, scales, self._tables[name][1], name)

    def stored_values(self, name: str, part: slice = slice(None)) -> "Tensor":
        if (table := self.ternary_rows(name, part)) is not None:
            return table.values()
        values = self.file.checked(name)
        values = values[part] if self.others[name] else values
        if name in self._int8:
            return values * self.file.checked(f"{name}_scale")[part]
        return values.clone()


def check_scales_entry(
    file: TensorFile, name: str, shape: tuple[int, ...], *, one: tuple[str, ...]
) -> None:
    """Raise `UserError` for a tensor of scales that is missing or not of a matrix of this shape.

    `one`: types that a single scale of the whole matrix may have.
    """
    if (scales := file.entries.get(name)) is None:
        raise UserError(f"{file.path}: tensor {name} is missing")
    types = one if scales.shape == (1,) else ("F32", "F16", "BF16")
    if scales.dtype not in types or len(shape) != 2 or scale_group(scales.shape, *shape) is None:
        raise UserError(
            f"{file.path}: tensor {name} is {DTYPES[scales.dtype]} {list(scales.shape)}, the model "
            f"needs scales of a matrix {list(shape)}"
        )


def check_scales(scales: "Tensor", name: str) -> None:
    """Raise `UserError` for scales that are not positive and finite. Of several, those of codes that are
    all zero may be zero."""
    low, high = (float(bound) for bound in scales.aminmax())
    if not (low > 0 or (low == 0 and scales.numel() > 1)) or not high < math.inf:
        raise UserError(
            f"tensor {name} is {low}: a scale is positive and finite; pack the model again"
        )


def ternary_table(packed: "Tensor", scales: "Tensor", columns: int, name: str) -> TernaryWeight:
    """Rows of an embedding or head that is stored as i2 with scales of groups."""
    from sparse_bitnet.packing.codec import unpack

    return TernaryWeight(
        unpack(packed, "i2", NMPattern(1, 1), (len(packed), columns), name=name), scales
    )
