# SPDX-License-Identifier: Apache-2.0
"""Folders whose config.json has no entry of a quantiser, found to be ternary by looking.

Floats of which each run of a row holds 0 and +s and -s (TriLM, BitCPM, dequantised Bonsai): exact, or
refused. MLX with two bits a weight, in which ternary models are published too.
"""

from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, StoredModel, linear_shapes
from sparse_bitnet.checkpoint.config_fields import check_fields
from sparse_bitnet.checkpoint.foreign_checkpoint import complete, opened, stored_floats
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.ternary import TernaryWeight, ternary_of_floats, with_fewest_scales
from sparse_bitnet.packing.two_bits import CODES_PER_WORD, unpack_words

_MLX_ENTRY = "quantization"
"""Key of config.json under which MLX describes its own."""

_MLX_MODE = {"mode": "affine"}

_LOOKED_AT = 64
"""Rows of a matrix that tell whether it is ternary."""


def found_ternary(config: dict[str, Any], files: WeightFiles | None) -> dict[str, Any] | None:
    """The config.json of the model that a folder without quantization_config holds, if it is ternary;
    None where it is not. Of floats the first rows of the first matrix of a block are looked at."""
    entry = config.get(_MLX_ENTRY)
    if isinstance(entry, dict):
        if entry.get("bits") != 2:
            return None
        # Layers with settings of their own have a table under their name.
        for table in (entry, *(value for value in entry.values() if isinstance(value, dict))):
            fields = {key: v for key, v in table.items() if not isinstance(v, dict)}
            check_fields(fields, ("bits", "group_size"), f"config.json: {_MLX_ENTRY}", _MLX_MODE)
        return {key: value for key, value in config.items() if key != _MLX_ENTRY}
    if files is None:
        return None
    first = next((name for name in sorted(files.shapes) if name.endswith("proj.weight")), None)
    return config if first is not None and _looks_ternary(files, first) else None


def read(found: StoredModel) -> Checkpoint:
    """Open such a folder.

    Raises `UserError`, naming the tensor, for one that is not ternary after all, and incomplete files.
    """
    files = WeightFiles.in_folder(found.folder)
    if any(name.endswith(".scales") for name in files.shapes):
        return _open_mlx(found, files)
    layers = {
        name: shape
        for name, shape in linear_shapes(found.model()).items()
        if name != "lm_head" and _looks_ternary(files, f"{name}.weight")
    }

    def read_ternary(layer: str) -> TernaryWeight:
        ternary = ternary_of_floats(stored_floats(files, layer, layers[layer]), layer)
        if ternary is None:
            raise UserError(
                f"layer {layer} of {found.folder} is not ternary, though its first rows are"
            )
        return ternary

    return opened(
        found,
        "ternary floats",
        files,
        complete(layers, files, "weight"),
        of_layer=("weight",),
        read=files.read,
        master=None,
        ternary=read_ternary,
        ternary_rows=lambda name, part: ternary_of_floats(files.read(name, part), name),
        has_one_scale=False,
    )


def _looks_ternary(files: WeightFiles, name: str) -> bool:
    shape = files.shapes.get(name, ())
    if files.dtypes.get(name) not in ("F32", "F16", "BF16") or len(shape) != 2 or 0 in shape:
        return False
    first = files.read(name, slice(0, _LOOKED_AT))
    return bool(first.isfinite().all()) and ternary_of_floats(first, name) is not None


def _open_mlx(found: StoredModel, files: WeightFiles) -> Checkpoint:
    """Words of 16 codes q; value = q * scale + bias of a group: ternary where bias = -scale, as q - 1."""
    quantised = {name.removesuffix(".scales") for name in files.shapes if name.endswith(".scales")}
    layers = {
        name: shape
        for name, shape in linear_shapes(found.model()).items()
        if name in quantised and name != "lm_head"
    }

    for name in quantised:
        words, scales, biases = (
            files.shapes.get(f"{name}.{end}", ()) for end in ("weight", "scales", "biases")
        )
        are_words = files.dtypes.get(f"{name}.weight") in ("U32", "I32") and len(words) == 2
        are_words &= files.dtypes.get(f"{name}.scales") in ("F32", "F16", "BF16")
        runs = scales[1] if len(scales) == 2 and are_words and scales[0] == words[0] else 0
        if scales != biases or not runs or CODES_PER_WORD * words[1] % runs:
            raise UserError(
                f"layer {name} of {found.folder}: its words {list(words)}, scales {list(scales)} and "
                f"biases {list(biases)} do not belong together"
            )

    def codes_and_scales(name: str, part: slice) -> tuple[Tensor, Tensor]:
        words, scales = (files.read(f"{name}.{end}", part) for end in ("weight", "scales"))
        if not torch.equal(files.read(f"{name}.biases", part), -scales):
            raise UserError(f"layer {name} of {found.folder} is not ternary: a bias is not -scale")
        # compressed-tensors' words stand for q - 2.
        codes = unpack_words(words.view(torch.int32), CODES_PER_WORD * words.shape[1]) + 1
        return codes, scales

    def read_ternary(layer: str) -> TernaryWeight:
        codes, scales = codes_and_scales(layer, slice(None))
        if tuple(codes.shape) != layers[layer]:
            raise UserError(
                f"layer {layer}: {list(codes.shape)} codes, expected {list(layers[layer])}"
            )
        return with_fewest_scales(codes, scales, layer)

    def read_other(name: str, part: slice = slice(None)) -> Tensor:
        base = name.removesuffix(".weight")
        if base not in quantised:
            return files.read(name, part)
        return TernaryWeight(*codes_and_scales(base, part)).values()

    def read_rows(name: str, part: slice) -> TernaryWeight | None:
        base = name.removesuffix(".weight")
        if base not in quantised:
            return ternary_of_floats(files.read(name, part), name)
        return with_fewest_scales(*codes_and_scales(base, part), base)

    shapes = {
        name: (shape[0], CODES_PER_WORD * shape[1])
        if name.removesuffix(".weight") in quantised and len(shape) == 2
        else shape
        for name, shape in files.shapes.items()
        if name.rpartition(".")[0] not in quantised or not name.endswith((".scales", ".biases"))
    }
    return opened(
        found,
        "MLX 2-bit",
        files,
        complete(layers, files, "weight"),
        of_layer=("weight",),
        shapes=shapes,
        read=read_other,
        master=None,
        ternary=read_ternary,
        ternary_rows=read_rows,
        has_one_scale=False,
    )
