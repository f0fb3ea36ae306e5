# SPDX-License-Identifier: Apache-2.0
"""Folders of compressed-tensors: two- or eight-bit weights that hold ternary codes, scales of rows."""

from pathlib import Path
from typing import Any

import torch

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, linear_shapes
from sparse_bitnet.checkpoint.config_fields import check_fields
from sparse_bitnet.checkpoint.foreign_checkpoint import complete, opened, scaled, ternary_weight
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.packing.two_bits import CODES_PER_WORD, W2A8, W8A8, unpack_words

_READ = (
    *("quant_method", "format", "quantization_status", "ignore", "config_groups"),
    *("global_compression_ratio", "version"),
)
_READ_OF_GROUP = ("targets", "format", "weights", "input_activations")
_SETTINGS = {"type": "int", "symmetric": True, "dynamic": False}
_TOKENS_OF_8_BITS = {"num_bits": 8, "strategy": "token", "dynamic": True}
_OF_TRAINING = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Fields that say nothing of what is stored."""


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
    check_fields(entry, _READ, f"{where}: quantization_config")
    groups = list(_table(entry.get("config_groups")).values())
    formats = {W2A8: 2, W8A8: 8}
    bits = formats.get(str(entry.get("format")))
    if bits is None or len(groups) != 1 or not isinstance(groups[0], dict):
        raise UserError(
            f"{where}: compressed-tensors with one group of format {' or '.join(formats)} is "
            f"importable, not {entry.get('format')!r} with {len(groups)} groups"
        )
    check_fields(groups[0], _READ_OF_GROUP, f"{where}: quantization_config")
    for part, own in (("weights", {"num_bits": bits}), ("input_activations", _TOKENS_OF_8_BITS)):
        given = {"num_bits": None, **_SETTINGS, "strategy": None, **_table(groups[0].get(part))}
        read = (*_OF_TRAINING, *(("strategy",) if part == "weights" else ()))
        check_fields(given, read, f"{where}: {part}", {**_SETTINGS, **own})
        if part == "weights" and given["strategy"] not in ("channel", "tensor"):
            raise UserError(
                f"{where}: weights of strategy {given['strategy']!r}, not channel or tensor"
            )
    return entry["format"] == W2A8


def _table(value: Any) -> dict[str, Any]:
    """What a config has where it should have a table; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
