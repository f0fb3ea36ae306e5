# SPDX-License-Identifier: Apache-2.0
"""Embedding and output head of a packed folder: bfloat16, float32, int8 by rows, or ternary."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import SCALE_FLOOR, SCALE_GROUPS, row_bytes
from sparse_bitnet.packing.tensor_file import TensorFileWriter, TensorSpec
from sparse_bitnet.packing.ternary import TableScales, scales_of_groups, table_scales
from sparse_bitnet.pattern import NMPattern


def ternary_tables(checkpoint: Checkpoint, embeddings: str) -> dict[str, TableScales]:
    """Of embedding and head those that are ternary, with their scales; none where something else is asked
    for.

    Raises `UserError` where "ternary" is asked for and none is.
    """
    found: dict[str, TableScales] = {}
    for name in checkpoint.embeddings if embeddings in ("auto", "ternary") else ():
        scales = table_scales(checkpoint.ternary_pieces(name), checkpoint.others[name][1])
        if scales is not None:
            found[name] = scales
    if embeddings == "ternary" and not found:
        raise UserError(
            f"{checkpoint.folder}: tensor {checkpoint.embeddings[0]} is not ternary with a scale for "
            f"some {', '.join(map(str, SCALE_GROUPS))} weights; use --embeddings auto"
        )
    return found


def table_specs(
    checkpoint: Checkpoint, embeddings: str, tables: dict[str, TableScales]
) -> Iterator[TensorSpec]:
    """The tensors of embedding and head, and of their scales; `tables` are those that are ternary."""
    for name in checkpoint.embeddings:
        rows, columns = checkpoint.others[name]
        if name in tables:
            yield TensorSpec(name, "uint8", (rows, row_bytes("i2", NMPattern(1, 1), columns)))
            groups = columns // tables[name].group
            yield TensorSpec(f"{name}_scale", tables[name].dtype, (rows, groups))
        elif embeddings == "int8":
            yield TensorSpec(name, "int8", (rows, columns))
            yield TensorSpec(f"{name}_scale", "float32", (rows, 1))
        else:
            dtype = "float32" if embeddings == "float32" else "bfloat16"
            yield TensorSpec(name, dtype, (rows, columns))


def write_table(
    checkpoint: Checkpoint, name: str, embeddings: str | TableScales, writer: TensorFileWriter
) -> int:
    """Write embedding or head, piece by piece; returns its bytes with its scales."""
    rows, columns = checkpoint.others[name]
    if isinstance(embeddings, TableScales):
        kept = list(_ternary_pieces(checkpoint, name, embeddings))
        for end, pieces in zip(("", "_scale"), zip(*kept, strict=True), strict=True):
            writer.write(f"{name}{end}", pieces)
        return sum(piece.nbytes for pieces in kept for piece in pieces)
    if embeddings == "int8":
        scales: list[np.ndarray] = []
        writer.write(name, _int8_pieces(checkpoint.pieces(name), scales))
        writer.write(f"{name}_scale", scales)
        return rows * (columns + 4)
    stored = _floats if embeddings == "float32" else _rounded
    writer.write(name, (stored(piece) for piece in checkpoint.pieces(name)))
    return rows * columns * (4 if embeddings == "float32" else 2)


def _ternary_pieces(
    checkpoint: Checkpoint, name: str, kept: TableScales
) -> Iterator[tuple[Any, np.ndarray]]:
    """Rows of i2, and their scales."""
    for piece in checkpoint.ternary_pieces(name):
        assert piece is not None
        yield pack(piece.codes, "i2", NMPattern(1, 1), name=name), scales_of_groups(piece, kept)


def _int8_pieces(pieces: Iterator[Any], scales: list[np.ndarray]) -> Iterator[np.ndarray]:
    """int8 codes [rows, columns], a row's as `quantize_int8` makes a token's; appends the float32
    scales [rows, 1] to `scales`."""
    for piece in pieces:
        values = _floats(piece)
        largest = np.maximum(np.abs(values).max(-1, keepdims=True), np.float32(SCALE_FLOOR))
        scales.append(largest / np.float32(127))
        yield np.rint(values * (np.float32(127) / largest)).clip(-128, 127).astype(np.int8)


def _floats(piece: Any) -> np.ndarray:
    """A tensor's or an array's values, float32."""
    return piece if isinstance(piece, np.ndarray) else piece.float().numpy()


def _rounded(piece: Any) -> np.ndarray:
    """The nearest bfloat16: its bits, as uint16."""
    values = _floats(piece)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
