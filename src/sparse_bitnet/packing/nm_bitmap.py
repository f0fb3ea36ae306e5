# SPDX-License-Identifier: Apache-2.0
"""nm-bitmap: a bitmap of the non-zeros and a sign bit for each (csrc/packed_format.h)."""

import numpy as np

from sparse_bitnet.packing.bitmaps import (
    CHUNK_BYTES,
    Bytes,
    DamagedBytes,
    bits_of,
    codes_of,
    gather_signs,
    in_chunks,
    negative_bitmap,
    nonzero_bitmap,
    spread_signs,
)
from sparse_bitnet.packing.formats import nm_bitmap_sign_bytes
from sparse_bitnet.pattern import NMPattern


def pack_rows(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features], within the pattern -> [rows, row_bytes]."""
    sign_bytes = nm_bitmap_sign_bytes(pattern)
    nonzero = in_chunks(nonzero_bitmap(codes))
    signs, _ = gather_signs(nonzero, in_chunks(negative_bitmap(codes)))
    rows, chunks = signs.shape
    packed = np.empty((rows, chunks, sign_bytes + CHUNK_BYTES), np.uint8)
    as_bytes = signs.astype("<u8").view(np.uint8).reshape(rows, chunks, 8)
    packed[:, :, :sign_bytes] = as_bytes[:, :, :sign_bytes]
    packed[:, :, sign_bytes:] = nonzero
    return packed.reshape(rows, -1)


def unpack_rows(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    rows, sign_bytes = len(packed), nm_bitmap_sign_bytes(pattern)
    records = packed.reshape(rows, -1, sign_bytes + CHUNK_BYTES)
    chunks = records.shape[1]
    nonzero = np.ascontiguousarray(records[:, :, sign_bytes:])
    bitmap = nonzero.reshape(rows, -1)
    padded = bitmap.shape[1] * 8
    if padded > in_features and bits_of(bitmap, padded)[:, in_features:].any():
        raise DamagedBytes("the padding of a row is not zero codes")
    signs = np.zeros((rows, chunks, 8), np.uint8)
    signs[:, :, :sign_bytes] = records[:, :, :sign_bytes]
    negative, left = spread_signs(nonzero, signs.view("<u8")[:, :, 0].astype(np.uint64))
    if left.any():
        raise DamagedBytes("there are sign bits without a non-zero")
    return codes_of(bitmap, negative.reshape(rows, -1), in_features)
