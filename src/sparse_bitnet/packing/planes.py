# SPDX-License-Identifier: Apache-2.0
"""What i2 and b3 have in common: rows in blocks of contiguous pieces, the planes, that share bytes.

Byte i of a block holds value i of each of its planes (csrc/packed_format.h). The last block of a row is
shorter and filled up with zero codes.
"""

from collections.abc import Callable

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes

PlaneBytes = Callable[[int], int]
"""Weights of a block -> bytes of a plane, which are those of the block."""


def pack_planes(
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


def unpack_planes(
    packed: Bytes,
    in_features: int,
    block_weights: int,
    plane_bytes: PlaneBytes,
    codes_of_plane: Callable[[Bytes, int], np.ndarray],
) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features].

    Args:
        block_weights, plane_bytes: as of `pack_planes`.
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
