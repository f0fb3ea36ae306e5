# SPDX-License-Identifier: Apache-2.0
"""Folders of compressed-tensors: two- or eight-bit weights that hold ternary codes, scales of rows."""

from pathlib import Path
from typing import Any

import torch

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, linear_shapes
from sparse_bitnet.checkpoint.foreign_checkpoint import complete, opened, scaled, ternary_weight
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.packing.two_bits import CODES_PER_WORD, W2A8, W8A8, unpack_words


def read(found: StoredModel) -> Checkpoint:
    """Open a folder that config.json says to be of compressed-tensors.

    Raises `UserError` for settings that have no counterpart here, and for incomplete files.
    """
    folder, entry = found.folder, found.entry
    packed = _is_packed(folder, entry)
    files = WeightFiles.in_folder(folder)
    weight = "weight_packed" if packed else "weight"
    layers = scaled(linear_shapes(found.model()), files, per_row=True)

    def read_ternary(layer: str) -> TernaryWeight:
        stored = files.read(f"{layer}.{weight}")
        rows, columns = layers[layer]
        words = -(-columns // CODES_PER_WORD)
        expected = (torch.int32, (rows, words)) if packed else (torch.int8, (rows, columns))
        if (stored.dtype, tuple(stored.shape)) != expected:
            raise UserError(
                f"layer {layer}: {weight} is {stored.dtype} {list(stored.shape)}, expected "
                f"{expected[0]} {list(expected[1])}"
            )
        codes = unpack_words(stored, columns) if packed else stored
        return ternary_weight(codes, files.read(f"{layer}.weight_scale").float(), layer)

    return opened(
        found,
        f"compressed-tensors {entry['format']}",
        files,
        complete(layers, files, weight),
        of_layer=(weight, "weight_scale", "weight_shape"),
        read=files.read,
        master=None,
        ternary=read_ternary,
        has_one_scale=all(
            len(files.read(f"{layer}.weight_scale").unique()) == 1 for layer in layers
        ),
    )


def _is_packed(folder: Path, entry: dict[str, Any]) -> bool:
    where = f"{folder}/config.json"
    if entry.get("sparsity_config"):
        raise UserError(f"{where}: a sparsity_config is not covered; decompress the model first")
    groups = list(_table(entry.get("config_groups")).values())
    formats = {W2A8: 2, W8A8: 8}
    bits = formats.get(str(entry.get("format")))
    if bits is None or len(groups) != 1 or not isinstance(groups[0], dict):
        raise UserError(
            f"{where}: compressed-tensors with one group of format {' or '.join(formats)} is "
            f"importable, not {entry.get('format')!r} with {len(groups)} groups"
        )
    weights = _table(groups[0].get("weights"))
    found = (weights.get("num_bits"), weights.get("symmetric"), weights.get("strategy"))
    if found[:2] != (bits, True) or found[2] not in ("channel", "tensor"):
        raise UserError(
            f"{where}: weights with num_bits, symmetric, strategy = {found} are not importable; "
            f"({bits}, True, channel or tensor) are"
        )
    if _table(groups[0].get("input_activations")).get("num_bits") != 8:
        raise UserError(f"{where}: the layers have no 8-bit activations, as ternary ones here have")
    return entry["format"] == W2A8


def _table(value: Any) -> dict[str, Any]:
    """What a config has where it should have a table; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
