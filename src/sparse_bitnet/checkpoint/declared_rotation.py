# SPDX-License-Identifier: Apache-2.0
"""Declarations of rotated weights (packing/rotation.py), every key checked: `prism.hadamard.*` of a GGUF
file and of hadamard.json in a folder of MLX, hadamard_packing.json in a folder of floats.

All ternary matrices are rotated or none; embedding and head as the declaration says.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import check_fields, shown
from sparse_bitnet.checkpoint.model_folder import read_json
from sparse_bitnet.checkpoint.weight_files import is_qwen35, text_model_name
from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.packing.rotation import Rotation

PREFIX = "prism.hadamard."
MANIFEST, MLX_KEYS = "hadamard_packing.json", "hadamard.json"

_TRANSFORM, _AXIS = "normalized-sylvester-walsh-hadamard", "input-last-dimension"
_SIGNED = "normalized-signed-sylvester-walsh-hadamard"
"""Name of the same transform in a manifest."""
_LISTS: dict[str, tuple[type, ...]] = {
    **{"weight_names": (str,), "inverse_weight_names": (str,)},
    **{"sign_widths": (int,), "sign_values": (int, float)},
}
"""Types in lists, which are empty by default."""


def read_rotation(
    stored: Mapping[str, Any], where: str, *, layers: Mapping[str, int], tables: Sequence[str]
) -> Rotation:
    """Return the rotation that the keys of a declaration, without their prefix, describe.

    Args:
        where: beginning of error messages: the file, and the prefix of its keys.
        layers: name in the declaration of each ternary matrix -> its columns.
        tables: names there of the embedding and, unless it is the embedding, of the output head.

    Raises `UserError`, naming the key, for one that is missing, unknown or has another value, and for
    keys that do not fit each other or the model's tensors.
    """
    values = {key: [] for key in _LISTS} | {"gdn_v_grouped": False, "tied_output": False, **stored}
    lists = {key: _list(values[key], types) for key, types in _LISTS.items()}
    folded, looked_up, widths, signs = lists.values()
    block: Any = values.get("block_size")
    wanted, mode = {*layers.values()}, values.get("sign_mode")
    is_shared, is_explicit = len(tables) == 1 and bool(looked_up), mode == "explicit"
    odd = layers.keys() ^ {*folded}.difference(tables[1:])
    is_power = type(block) is int and block > 0 and not block & block - 1
    are_widths = min(widths, default=1) > 0 and len({*widths}) == len(widths)
    fits = {
        "version": type(values.get("version")) is int and values["version"] == 1 + is_shared,
        "transform": values.get("transform") == _TRANSFORM,
        "axis": values.get("axis") == _AXIS,
        "sign_mode": is_explicit or (mode == "identity" and not widths and not signs),
        "gdn_v_grouped": type(values["gdn_v_grouped"]) is bool,
        "tied_output": values["tied_output"] is is_shared,
        "block_size": is_power and not any(width % block for width in wanted),
        "weight_names": not odd,
        "inverse_weight_names": {*looked_up} <= {tables[0]},
        "sign_widths": not is_explicit or (are_widths and wanted <= {*widths}),
        "sign_values": len(signs) == sum(widths) and {*signs} <= {1, -1},
    }
    for key in (*sorted(values.keys() - fits.keys()), *fits):
        value = values.get(key)
        if not fits.get(key) or lists.get(key, value) != value:
            said = f" (see {min(odd)})" if key == "weight_names" and odd else ""
            raise UserError(
                f"{where}{key} is {shown(value)}{said}, which is not supported or does not fit the "
                "model, so its rotated weights cannot be read"
            )
    if not is_explicit:
        widths, signs = [*wanted], [1] * sum(wanted)
    parts = np.split(np.array(signs) < 0, np.cumsum(widths)[:-1])
    packed = (np.packbits(part, bitorder="little").tobytes() for part in parts)
    of_widths = {w: bits for w, bits in zip(widths, packed, strict=True) if w in wanted}
    head = is_shared or not {*folded}.isdisjoint(tables[1:])
    return Rotation(block=block, signs=of_widths, embedding=bool(looked_up), head=head)


def rotation_keys(
    rotation: Rotation, layers: Sequence[str], tables: Sequence[str], *, has_heads: bool
) -> dict[str, Any]:
    """Return the keys of which `read_rotation` makes a rotation; `layers` and `tables` are as there.
    `has_heads`: whether columns belong to value heads of linear attention, in transformers' order."""
    is_shared = len(tables) == 1 and rotation.embedding
    keys = {
        **{"version": 1 + is_shared, "block_size": rotation.block, "transform": _TRANSFORM},
        **{"axis": _AXIS, "sign_mode": "explicit", "sign_widths": [*rotation.signs]},
        "sign_values": [int(s) for width in rotation.signs for s in rotation.values(width)],
        "weight_names": [*layers, *(tables[1:] if rotation.head else ())],
        "inverse_weight_names": [*tables[:1]] if rotation.embedding else [],
        **{"gdn_v_grouped": has_heads, "tied_output": is_shared},
    }
    return {key: value for key, value in keys.items() if value}


def _list(value: Any, types: tuple[type, ...]) -> list[Any]:
    is_list = isinstance(value, list) and all(type(each) in types for each in value)
    return value if is_list else []


def with_prefix(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys `prism.hadamard.*` of a table, without this prefix."""
    return {key[len(PREFIX) :]: v for key, v in values.items() if key.startswith(PREFIX)}


def manifest_keys(folder: Path) -> dict[str, Any]:
    """Return the keys of a folder's hadamard_packing.json as a GGUF file would have them. Raises
    `UserError` for a manifest of another kind or schema, and for unknown entries."""
    path = folder / MANIFEST
    values, has_other_names = read_json(path), is_qwen35(folder)
    only = {"kind": "hadamard-weight-fold", "status": "requires-matching-runtime"}
    read = ("schema_version", "transform", "signs", "tensors", "tied_output", "producer")
    check_fields(dict.fromkeys(only) | values, read, str(path), only)
    names: dict[str, list[Any]] = {"fold-before-matmul": [], "inverse-after-lookup": []}
    with library_errors_as(f"{path}: schema or entries are not known"):
        transform, signs = {"name": None, **values["transform"]}, values.get("signs", {})
        check_fields(transform, ("block_size", "sign_mode"), str(path), {"name": _SIGNED})
        for record in values["tensors"]:
            check_fields({"axis": None, **record}, ("name", "role"), str(path), {"axis": -1})
            name = text_model_name(record["name"]) if has_other_names else record["name"]
            names[record.get("role", "fold-before-matmul")].append(name)
        version = {1: 1, 2: 1, 3: 2}[values["schema_version"]]
        if any(width != str(len(part)) for width, part in signs.items()):
            raise KeyError("a sign for each input")
    return {
        **{"version": version, "transform": _TRANSFORM, "axis": _AXIS},
        **{key: transform.get(key) for key in ("block_size", "sign_mode")},
        **dict(zip(_LISTS, names.values(), strict=False)),
        "sign_widths": [int(width) for width in signs],
        "sign_values": [sign for part in signs.values() for sign in part],
        "tied_output": values.get("tied_output", False),
    }
