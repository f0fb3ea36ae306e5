# SPDX-License-Identifier: Apache-2.0
"""i2 and b3: rows in blocks of contiguous pieces, the planes, that share bytes (csrc/packed_format.h).

Byte i of a block holds value i of each of its planes: four fields of two bits in i2, five base-3 digits
in b3. The last block of a row is shorter and filled up with zero codes.
"""

from collections.abc import Callable

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes
from sparse_bitnet.packing.formats import (
    B3_BLOCK_WEIGHTS,
    I2_BLOCK_WEIGHTS,
    b3_plane_bytes,
    i2_plane_bytes,
)
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

PlaneBytes = Callable[[int], int]
"""Weights of a block -> bytes of a plane, which are those of the block."""


def pack_i2(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    return _pack_planes(codes, I2_BLOCK_WEIGHTS, i2_plane_bytes, _join_fields)


def unpack_i2(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    if (packed & (packed >> 1) & 0x55).any():
        raise DamagedBytes("a two-bit field holds 3, which stands for no code")
    return _unpack_planes(packed, in_features, I2_BLOCK_WEIGHTS, i2_plane_bytes, _field)


def _join_fields(planes: np.ndarray) -> Bytes:
    """int8 [..., 4, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    joined = digits[..., 0, :].copy()
    for field in range(1, digits.shape[-2]):
        joined |= digits[..., field, :] << (2 * field)
    return joined


def _field(packed: Bytes, field: int) -> np.ndarray:
    return (packed >> (2 * field) & 3).view(np.int8) - np.int8(1)


def pack_b3(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    return _pack_planes(codes, B3_BLOCK_WEIGHTS, b3_plane_bytes, _join_digits)


def unpack_b3(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    if not _IS_VALID[packed].all():
        raise DamagedBytes("a byte stands for no five codes")
    return _unpack_planes(packed, in_features, B3_BLOCK_WEIGHTS, b3_plane_bytes, _digit_codes)


def _join_digits(planes: np.ndarray) -> Bytes:
    """int8 [..., 5, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    value = digits[..., 0, :].copy()
    for digit in range(1, _DIGITS):
        value *= 3
        value += digits[..., digit, :]
    return _FRACTION[value]


def _digit_codes(packed: Bytes, digit: int) -> np.ndarray:
    return _CODE[digit][packed]


def _pack_planes(
    codes: np.ndarray,
    block_weights: int,
    plane_bytes: PlaneBytes,
    join: Callable[[np.ndarray], Bytes],
) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes].

    Args:
        block_weights: of a whole block.
        plane_bytes: of the format.
        join: int8 [..., planes, bytes] -> [..., bytes].
    """
    rows, in_features = codes.shape
    blocks, tail = divmod(in_features, block_weights)
    block_bytes, last_bytes = plane_bytes(block_weights), plane_bytes(tail)
    planes, body = block_weights // block_bytes, blocks * block_bytes
    packed = np.empty((rows, body + last_bytes), np.uint8)
    whole = codes[:, : in_features - tail].reshape(rows, blocks, planes, block_bytes)
    packed[:, :body].reshape(rows, blocks, block_bytes)[:] = join(whole)
    if tail:
        padded = np.zeros((rows, planes * last_bytes), np.int8)
        padded[:, :tail] = codes[:, in_features - tail :]
        packed[:, body:] = join(padded.reshape(rows, planes, last_bytes))
    return packed


def _unpack_planes(
    packed: Bytes,
    in_features: int,
    block_weights: int,
    plane_bytes: PlaneBytes,
    codes_of_plane: Callable[[Bytes, int], np.ndarray],
) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features].

    Args:
        block_weights, plane_bytes: as of `_pack_planes`.
        codes_of_plane: bytes and the number of a plane -> its int8 codes.

    Raises `DamagedBytes` where a row is filled up with other codes than zero.
    """
    rows = len(packed)
    blocks, tail = divmod(in_features, block_weights)
    block_bytes = plane_bytes(block_weights)
    planes, body = block_weights // block_bytes, blocks * block_bytes
    codes = np.empty((rows, in_features), np.int8)
    whole = packed[:, :body].reshape(rows, blocks, block_bytes)
    unpacked = codes[:, : in_features - tail].reshape(rows, blocks, planes, block_bytes)
    for plane in range(planes):
        unpacked[:, :, plane] = codes_of_plane(whole, plane)
    if tail:
        last = packed[:, body:]
        padded = np.concatenate([codes_of_plane(last, plane) for plane in range(planes)], axis=1)
        if padded[:, tail:].any():
            raise DamagedBytes("the padding of a row is not zero codes")
        codes[:, in_features - tail :] = padded[:, :tail]
    return codes
