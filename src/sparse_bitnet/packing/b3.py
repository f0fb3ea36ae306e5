# SPDX-License-Identifier: Apache-2.0
"""b3: five weights a byte as a base-3 fraction (csrc/packed_format.h)."""

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes
from sparse_bitnet.packing.formats import B3_BLOCK_WEIGHTS, b3_plane_bytes
from sparse_bitnet.packing.planes import pack_planes, unpack_planes
from sparse_bitnet.pattern import NMPattern

_DIGITS = 5
_VALUES = 3**_DIGITS

_FRACTION: Bytes = np.array(
    [-(-256 * value // _VALUES) for value in range(_VALUES)] + [0] * (256 - _VALUES), np.uint8
)
"""[256]: the byte of a value below 243."""

_IS_VALID: np.ndarray = np.isin(np.arange(256), _FRACTION[:_VALUES])

_CODE: np.ndarray = np.zeros((_DIGITS, 256), np.int8)
"""[5, 256]: the code of each digit of a byte."""
for _digit in range(_DIGITS):
    _CODE[_digit, _FRACTION[:_VALUES]] = np.arange(_VALUES) // 3 ** (_DIGITS - 1 - _digit) % 3 - 1


def pack_rows(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    return pack_planes(codes, B3_BLOCK_WEIGHTS, b3_plane_bytes, _join)


def unpack_rows(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    if not _IS_VALID[packed].all():
        raise DamagedBytes("a byte stands for no five codes")
    return unpack_planes(packed, in_features, B3_BLOCK_WEIGHTS, b3_plane_bytes, _digit_codes)


def _join(planes: np.ndarray) -> Bytes:
    """int8 [..., 5, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    value = digits[..., 0, :].copy()
    for digit in range(1, _DIGITS):
        value *= 3
        value += digits[..., digit, :]
    return _FRACTION[value]


def _digit_codes(packed: Bytes, digit: int) -> np.ndarray:
    return _CODE[digit][packed]
