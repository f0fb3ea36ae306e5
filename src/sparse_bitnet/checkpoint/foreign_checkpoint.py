# SPDX-License-Identifier: Apache-2.0
"""A folder of another tool as a checkpoint, if its tensors are those of the model in its config.json."""

from math import prod
from typing import Any

from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import (
    Checkpoint,
    StoredModel,
    exported_format,
    finite,
    stored_tensors,
)
from sparse_bitnet.checkpoint.model_folder import EXPORTED_FORMAT
from sparse_bitnet.checkpoint.weight_files import WeightFiles, refuse_wrapped
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.tensor_file import FLOATS
from sparse_bitnet.packing.ternary import TernaryWeight

_COMPUTED = ".rotary_emb.inv_freq"
"""End of the names of what old folders hold that follows from the config."""


def scaled(
    linears: dict[str, tuple[int, int]], files: WeightFiles, *, per_row: bool
) -> dict[str, tuple[int, int]]:
    """Those with a scale in the files. Raises `UserError` for more scales than one, or than one a row."""
    found = {name: shape for name, shape in linears.items() if f"{name}.weight_scale" in files}
    for name, (rows, _) in found.items():
        shape, dtype = (each[f"{name}.weight_scale"] for each in (files.shapes, files.dtypes))
        fits = prod(shape) == 1 or (per_row and shape in ((rows,), (rows, 1)))
        if not fits or dtype not in FLOATS:
            raise UserError(
                f"layer {name}: weight_scale is {dtype} {list(shape)}, expected a float for "
                f"{'a row' if per_row else 'the matrix'}"
            )
    return found


def complete(
    layers: dict[str, tuple[int, int]], files: WeightFiles, weight: str
) -> dict[str, tuple[int, int]]:
    """The layers. Raises `UserError` where there are none, or one is empty or has no tensor of the name
    `weight`."""
    if not layers:
        raise UserError(f"{files.folder} has no ternary layer")
    for name, shape in layers.items():
        if 0 in shape:
            raise UserError(f"{files.folder}: layer {name} is empty, {list(shape)}")
        if f"{name}.{weight}" not in files:
            raise UserError(f"{files.folder} lacks {name}.{weight}: the files are incomplete")
    return layers


def stored_floats(files: WeightFiles, layer: str, shape: tuple[int, int]) -> Tensor:
    """A layer's weight. Raises `UserError`, naming it, unless it holds floats of that shape."""
    stored = files.read(f"{layer}.weight")
    if tuple(stored.shape) != shape or not stored.is_floating_point():
        raise UserError(
            f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected floats "
            f"{list(shape)}"
        )
    return finite(stored, f"{layer}.weight", files.folder)


def ternary_weight(codes: Tensor, scale: Tensor, layer: str) -> TernaryWeight:
    """int8 codes [rows, columns] with one scale, or with one a row. Raises `UserError` for other codes
    than -1, 0 and 1, and for scales that are not positive numbers."""
    low, high = codes.aminmax()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    smallest, largest = scale.aminmax()
    if not (0 < smallest <= largest < float("inf")):
        raise UserError(f"layer {layer}: its weight scale is not a positive number")
    return TernaryWeight(codes, largest if smallest == largest else scale.view(-1, 1))


def opened(
    found: StoredModel,
    tool: str,
    files: WeightFiles,
    layers: dict[str, tuple[int, int]],
    of_layer: tuple[str, ...],
    shapes: dict[str, tuple[int, ...]] | None = None,
    **readers: Any,
) -> Checkpoint:
    """A folder's checkpoint.

    Args:
        of_layer: names of a layer's tensors that are none of the others.
        shapes: of all tensors, where they are not those in the files.

    Raises `UserError` unless the others are those of the model that config.json describes.
    """
    shapes = files.shapes if shapes is None else shapes
    internal = {f"{layer}.{name}" for layer in layers for name in of_layer}
    model = found.model()
    internal |= model.all_tied_weights_keys.keys()
    others = [name for name in shapes if name not in internal and not name.endswith(_COMPUTED)]
    wanted = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    for name in internal | {f"{layer}.weight" for layer in layers}:
        wanted.pop(name, None)
    refuse_wrapped(others, found.folder)
    for name in sorted(wanted.keys() ^ set(others)):
        what = "lacks" if name in wanted else "has, and its config.json does not describe,"
        raise UserError(
            f"{found.folder} {what} {name}: the files are incomplete or of another model"
        )
    for name in others:
        is_plain = shapes[name] == files.shapes[name]
        if shapes[name] != wanted[name] or (is_plain and files.dtypes[name] not in FLOATS):
            raise UserError(
                f"{found.folder}: {name} is {files.dtypes[name]} {list(shapes[name])}, its config.json "
                f"asks floats {list(wanted[name])}"
            )
    return Checkpoint(
        **vars(found),
        tool=tool,
        format=exported_format(found.config.get(EXPORTED_FORMAT)),
        layers=layers,
        others={name: shapes[name] for name in others},
        dtypes={name: files.dtypes[name] for name in others},
        **readers,
    )
