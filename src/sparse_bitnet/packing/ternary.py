# SPDX-License-Identifier: Apache-2.0
"""Ternary weights with their scales: reduced to the fewest scales, or read from floats.

Many models are published as floats in which each run of a row holds only 0, +s and -s. They are read
exactly or not at all. Arrays and torch's tensors are accepted; importing this module imports no torch.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.formats import SCALE_GROUPS

Values = Any
"""A tensor of torch or an array of numpy, both of which `_library` computes with."""


class TernaryWeight(NamedTuple):
    """value = codes * weight_scale, each scale for a run of its row."""

    codes: Values
    """int8 [out_features, in_features] in {-1, 0, 1}, masked."""
    weight_scale: Values
    """float32 scalar; or float32, float16 or bfloat16 [out_features, 1] or [out_features, groups]."""

    def values(self) -> Values:
        """The weights, float32 [out_features, in_features]."""
        library = _library(self.codes)
        if 0 in self.codes.shape:  # a process of a sharded model may hold no row
            return library.asarray(self.codes, dtype=library.float32)
        scales = library.asarray(self.weight_scale, dtype=library.float32)
        runs = self.codes.reshape(*scales.shape, -1)
        return (runs * scales[..., None]).reshape(self.codes.shape)


def _library(values: Values) -> Any:
    """Return numpy or torch; callers use functions with one name and meaning in both."""
    if isinstance(values, np.ndarray):
        return np
    import torch

    return torch


def with_fewest_scales(codes: Values, scales: Values, layer: str) -> TernaryWeight:
    """Reduce scales [out_features or 1, runs of a row] to the fewest that give the same weights: one for
    the matrix, one per row, or one for each group of a size in `SCALE_GROUPS`.

    The scale of codes that are all zero does not matter; it is returned as 0, or as 1 for a whole matrix.

    Raises `UserError`, naming the layer, for codes above 1, scales that are not finite, and unsupported
    group sizes.
    """
    library = _library(codes)
    low, high = codes.min(), codes.max()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    if not library.isfinite(scales).all():
        raise UserError(f"layer {layer}: its weight scale is not finite")
    rows, columns = codes.shape
    scales = library.broadcast_to(scales, (rows, scales.shape[1]))
    run = columns // scales.shape[1]
    matters = (codes.reshape(rows, -1, run) != 0).any(-1)
    if not matters.any():
        return TernaryWeight(codes, library.asarray(1.0, dtype=library.float32))
    if ((scales == 0) & matters).any():
        raise UserError(f"layer {layer}: its weight scale is zero where codes are not")
    if ((scales < 0) & matters).any():
        signs = library.asarray(library.sign(scales), dtype=library.int8)[..., None]
        codes = (codes.reshape(rows, -1, run) * signs).reshape(rows, -1)
        scales = abs(scales)
    if (scale := _common(scales.reshape(1, -1), matters.reshape(1, -1))) is not None:
        return TernaryWeight(codes, library.asarray(scale, dtype=library.float32).reshape(()))
    for wider in (columns, *sorted(SCALE_GROUPS, reverse=True)):
        if wider % run or columns % wider:
            continue
        parts = (rows * columns // wider, wider // run)
        scale = _common(scales.reshape(parts), matters.reshape(parts))
        if scale is not None:
            return TernaryWeight(codes, scale.reshape(rows, -1))
    raise UserError(
        f"layer {layer}: a scale for every {run} weights of its rows of {columns} is not supported; "
        f"{', '.join(map(str, SCALE_GROUPS))} are"
    )


def ternary_of_floats(weight: Values, layer: str) -> TernaryWeight | None:
    """Return exact codes and scales of a float matrix; None if a run of a row has values other than 0, +s
    and -s. Raises `UserError`, naming the layer, for values that are not finite."""
    library = _library(weight)
    rows, columns = weight.shape
    run = next((g for g in SCALE_GROUPS if columns % g == 0), columns)
    magnitudes = abs(weight)
    if not library.isfinite(magnitudes.max()):
        raise UserError(f"layer {layer}: its weights are not finite")
    runs = magnitudes.reshape(rows, -1, run)
    scales = library.amax(runs, -1)
    if not ((runs == 0) | (runs == scales[..., None])).all():
        return None
    codes = library.asarray(library.sign(weight), dtype=library.int8)
    return with_fewest_scales(codes, scales, layer)


class TableScales(NamedTuple):
    """Storage of the scales of a ternary table."""

    group: int
    """Number of weights of a row that share a scale, one of `SCALE_GROUPS`."""
    dtype: str
    """float16, bfloat16 or float32: the shortest that holds them all."""


def table_scales(pieces: Iterable[TernaryWeight | None], columns: int) -> TableScales | None:
    """Return the storage that holds the scales of all pieces of a table, rows of `columns`, exactly; None
    if a piece is not ternary, or rows have no groups of `SCALE_GROUPS`."""
    group = max((size for size in SCALE_GROUPS if columns % size == 0), default=None)
    is_half = is_brain = True
    for piece in pieces:
        if piece is None or group is None:
            return None
        scales = _float32(piece.weight_scale)
        group = min(group, columns // scales.shape[1])
        with np.errstate(over="ignore"):
            is_half &= np.array_equal(scales.astype(np.float16).astype(np.float32), scales)
        is_brain &= not (scales.view(np.uint32) & 0xFFFF).any()
    assert group is not None
    return TableScales(group, "float16" if is_half else "bfloat16" if is_brain else "float32")


def scales_of_groups(piece: TernaryWeight, kept: TableScales) -> np.ndarray:
    """Return a piece's scales [rows, groups] as the table stores them; bfloat16 as bits in uint16."""
    (rows, columns), scales = piece.codes.shape, _float32(piece.weight_scale)
    scales = np.broadcast_to(scales, (rows, scales.shape[1]))
    scales = scales.repeat(columns // kept.group // scales.shape[1], 1)
    if kept.dtype == "bfloat16":
        return (np.ascontiguousarray(scales).view(np.uint32) >> 16).astype(np.uint16)
    return scales.astype(kept.dtype)


def _float32(scales: Values) -> np.ndarray:
    """Return a matrix's scales as float32 [rows or 1, groups or 1]."""
    values = scales if isinstance(scales, np.ndarray) else scales.float().numpy()
    return np.ascontiguousarray(np.atleast_2d(values.astype(np.float32, copy=False)))


def _common(scales: Values, matters: Values) -> Values:
    """Return the scale that all runs of each part share, [parts], or None if some differ."""
    highest = _library(scales).amax(scales * matters, 1)
    return highest if ((scales == highest[:, None]) | ~matters).all() else None
