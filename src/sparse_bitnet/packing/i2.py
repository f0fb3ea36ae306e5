"""i2: two bits a weight in blocks of four contiguous pieces (csrc/packed_format.h)."""

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes
from sparse_bitnet.packing.formats import (
    I2_BLOCK_BYTES,
    I2_BLOCK_WEIGHTS,
    i2_plane_bytes,
    i2_row_bytes,
)

_FIELDS = 4


def pack_rows(codes: np.ndarray) -> Bytes:
    """int8 [rows, in_features] -> [rows, row_bytes]."""
    rows, in_features = codes.shape
    packed = np.empty((rows, i2_row_bytes(in_features)), np.uint8)
    blocks, tail = divmod(in_features, I2_BLOCK_WEIGHTS)
    whole = codes[:, : in_features - tail].reshape(rows, blocks, _FIELDS, I2_BLOCK_BYTES)
    packed[:, : blocks * I2_BLOCK_BYTES].reshape(rows, blocks, I2_BLOCK_BYTES)[:] = _join(whole)
    if tail:
        plane = i2_plane_bytes(tail)
        padded = np.zeros((rows, _FIELDS * plane), np.int8)
        padded[:, :tail] = codes[:, in_features - tail :]
        packed[:, blocks * I2_BLOCK_BYTES :] = _join(padded.reshape(rows, _FIELDS, plane))
    return packed


def unpack_rows(packed: Bytes, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    rows = len(packed)
    if (packed & (packed >> 1) & 0x55).any():
        raise DamagedBytes("a two-bit field holds 3, which stands for no code")
    blocks, tail = divmod(in_features, I2_BLOCK_WEIGHTS)
    codes = np.empty((rows, in_features), np.int8)
    whole = packed[:, : blocks * I2_BLOCK_BYTES].reshape(rows, blocks, I2_BLOCK_BYTES)
    body = codes[:, : in_features - tail].reshape(rows, blocks, _FIELDS, I2_BLOCK_BYTES)
    for field in range(_FIELDS):
        body[:, :, field] = _field(whole, field)
    if tail:
        last = packed[:, blocks * I2_BLOCK_BYTES :]
        padded = np.concatenate([_field(last, field) for field in range(_FIELDS)], axis=1)
        if padded[:, tail:].any():
            raise DamagedBytes("the padding of a row is not zero codes")
        codes[:, in_features - tail :] = padded[:, :tail]
    return codes


def _join(planes: np.ndarray) -> Bytes:
    """int8 [..., 4, bytes] -> [..., bytes]."""
    digits = (planes + 1).view(np.uint8)
    joined = digits[..., 0, :].copy()
    for field in range(1, _FIELDS):
        joined |= digits[..., field, :] << (2 * field)
    return joined


def _field(packed: Bytes, field: int) -> np.ndarray:
    return (packed >> (2 * field) & 3).view(np.int8) - np.int8(1)
