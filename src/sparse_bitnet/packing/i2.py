# SPDX-License-Identifier: Apache-2.0
"""i2: two bits a weight in blocks of four contiguous pieces (csrc/packed_format.h)."""

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes
from sparse_bitnet.packing.formats import I2_BLOCK_WEIGHTS, i2_plane_bytes
from sparse_bitnet.packing.planes import pack_planes, unpack_planes
from sparse_bitnet.pattern import NMPattern


def pack_rows(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    return pack_planes(codes, I2_BLOCK_WEIGHTS, i2_plane_bytes, _join)


def unpack_rows(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    if (packed & (packed >> 1) & 0x55).any():
        raise DamagedBytes("a two-bit field holds 3, which stands for no code")
    return unpack_planes(packed, in_features, I2_BLOCK_WEIGHTS, i2_plane_bytes, _field)


def _join(planes: np.ndarray) -> Bytes:
    """int8 [..., 4, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    joined = digits[..., 0, :].copy()
    for field in range(1, digits.shape[-2]):
        joined |= digits[..., field, :] << (2 * field)
    return joined


def _field(packed: Bytes, field: int) -> np.ndarray:
    return (packed >> (2 * field) & 3).view(np.int8) - np.int8(1)
