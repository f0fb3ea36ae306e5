"""b3: five weights a byte as a base-3 fraction (csrc/packed_format.h)."""

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes
from sparse_bitnet.packing.formats import (
    B3_BLOCK_BYTES,
    B3_BLOCK_WEIGHTS,
    b3_plane_bytes,
    b3_row_bytes,
)

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


def pack_rows(codes: np.ndarray) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    rows, in_features = codes.shape
    packed = np.empty((rows, b3_row_bytes(in_features)), np.uint8)
    blocks, tail = divmod(in_features, B3_BLOCK_WEIGHTS)
    whole = codes[:, : in_features - tail].reshape(rows, blocks, _DIGITS, B3_BLOCK_BYTES)
    packed[:, : blocks * B3_BLOCK_BYTES].reshape(rows, blocks, B3_BLOCK_BYTES)[:] = _join(whole)
    if tail:
        plane = b3_plane_bytes(tail)
        padded = np.zeros((rows, _DIGITS * plane), np.int8)
        padded[:, :tail] = codes[:, in_features - tail :]
        packed[:, blocks * B3_BLOCK_BYTES :] = _join(padded.reshape(rows, _DIGITS, plane))
    return packed


def unpack_rows(packed: Bytes, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    rows = len(packed)
    if not _IS_VALID[packed].all():
        raise DamagedBytes("a byte stands for no five codes")
    blocks, tail = divmod(in_features, B3_BLOCK_WEIGHTS)
    codes = np.empty((rows, in_features), np.int8)
    whole = packed[:, : blocks * B3_BLOCK_BYTES].reshape(rows, blocks, B3_BLOCK_BYTES)
    body = codes[:, : in_features - tail].reshape(rows, blocks, _DIGITS, B3_BLOCK_BYTES)
    for digit in range(_DIGITS):
        body[:, :, digit] = _CODE[digit][whole]
    if tail:
        last = packed[:, blocks * B3_BLOCK_BYTES :]
        padded = np.concatenate([_CODE[digit][last] for digit in range(_DIGITS)], axis=1)
        if padded[:, tail:].any():
            raise DamagedBytes("the padding of a row is not zero codes")
        codes[:, in_features - tail :] = padded[:, :tail]
    return codes


def _join(planes: np.ndarray) -> Bytes:
    """int8 [..., 5, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    value = digits[..., 0, :].copy()
    for digit in range(1, _DIGITS):
        value *= 3
        value += digits[..., digit, :]
    return _FRACTION[value]
