# SPDX-License-Identifier: Apache-2.0
"""Folders that `sparse-bitnet pack` wrote. Opening one imports no torch."""

import math
from typing import TYPE_CHECKING

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import scale_group
from sparse_bitnet.packing.metadata import PackedMetadata
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFile
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"


def read(found: StoredModel) -> Checkpoint:
    """Open a packed folder; a tensor is compared with its checksum when it is read.

    Raises `UserError` for a file that is damaged, truncated, of another version, or not of this config.
    """
    file = TensorFile(found.folder / MODEL_FILE)
    metadata = PackedMetadata.from_json(file.metadata, str(file.path))
    metadata.check_config_entry(found.entry, str(file.path))
    int8 = {
        name
        for name, stored in file.entries.items()
        if stored.dtype == "I8" and f"{name}_scale" in file.entries
    }
    internal = {f"{name}.weight_packed" for name in metadata.layers}
    internal |= {f"{name}.weight_scale" for name in metadata.layers}
    for name, shape in metadata.layers.items():
        for end in ("packed", "scale"):
            if f"{name}.weight_{end}" not in file.entries:
                raise UserError(f"{file.path}: tensor {name}.weight_{end} is missing")
        _check_scales_entry(file, f"{name}.weight_scale", shape, one=("F32",))
    hidden = found.config.get("hidden_size")
    tables = {
        name: (stored.shape[0], hidden if type(hidden) is int else 0)
        for name, stored in file.entries.items()
        if stored.dtype == "U8" and len(stored.shape) == 2 and f"{name}_scale" in file.entries
    }
    for name in (*sorted(int8), *tables):
        internal.add(f"{name}_scale")
        # Of int8 one a row: rows of one value have no other groups.
        whole = tables[name] if name in tables else (*file.entries[name].shape[:1], 1)
        _check_scales_entry(file, f"{name}_scale", whole, one=())
    others = {name: entry for name, entry in file.entries.items() if name not in internal}

    def ternary(layer: str) -> TernaryWeight:
        from sparse_bitnet.packing.codec import unpack

        name = f"{layer}.weight_packed"
        packed, scale = file.checked(name), file.checked(f"{layer}.weight_scale")
        check_scales(scale, f"{layer}.weight_scale")
        whole = metadata.layers[layer]
        codes = unpack(packed, metadata.packed_format, metadata.pattern, whole, name=name)
        shape = () if scale.shape == (1,) else scale.shape
        return TernaryWeight(codes, scale.clone().view(shape))

    def ternary_rows(name: str, part: slice) -> TernaryWeight | None:
        if name not in tables:
            return None
        packed, scales = file.checked(name)[part], file.checked(f"{name}_scale")[part]
        return ternary_table(packed, scales, tables[name][1], name)

    def tensor(name: str, part: slice = slice(None)) -> "Tensor":
        if (table := ternary_rows(name, part)) is not None:
            return table.values()
        stored = file.checked(name)[part] if others[name].shape else file.checked(name)
        return stored * file.checked(f"{name}_scale")[part] if name in int8 else stored.clone()

    return Checkpoint(
        **vars(found),
        format=metadata.format,
        layers=metadata.layers,
        others={name: tables.get(name, entry.shape) for name, entry in others.items()},
        dtypes={name: "F32" if name in tables else others[name].dtype for name in others},
        read=tensor,
        master=None,
        ternary=ternary,
        ternary_rows=ternary_rows,
        has_one_scale=all(
            file.entries[f"{layer}.weight_scale"].shape == (1,) for layer in metadata.layers
        ),
        file=file,
        metadata=metadata,
    )


def _check_scales_entry(
    file: TensorFile, name: str, shape: tuple[int, ...], *, one: tuple[str, ...]
) -> None:
    """`one`: types that a single scale of the whole matrix may have."""
    scales = file.entries[name]
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
