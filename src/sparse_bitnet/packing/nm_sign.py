# SPDX-License-Identifier: Apache-2.0
"""nm-sign: which n of m weights are not zero, and their signs (csrc/packed_format.h)."""

import math
from functools import cache

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes, bits_of_words, words_of_bits
from sparse_bitnet.packing.formats import (
    coded_pattern,
    nm_sign_group_bits,
    nm_sign_place_bits,
    nm_sign_row_bytes,
)
from sparse_bitnet.pattern import NMPattern


def pack_rows(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features], n non-zeros in every group -> [rows, row_bytes]."""
    coded = coded_pattern(pattern)
    rows, in_features = codes.shape
    place_bits, sets = nm_sign_place_bits(coded), _sets(coded)
    by_place = codes.reshape(rows, -1, coded.m)
    groups = np.zeros(by_place.shape[:2], np.uint64)
    rank = np.zeros(groups.shape, np.uint8)
    for place in range(coded.m):
        code = by_place[:, :, place]
        groups |= (code < 0).astype(np.uint64) << (rank + np.uint64(place_bits))
        rank += code != 0
        groups += np.where(code != 0, sets[place, rank], np.uint64(0))
    bits = bits_of_words(groups, nm_sign_group_bits(coded))
    packed = np.packbits(bits.reshape(rows, -1), axis=1, bitorder="little")
    assert packed.shape[1] == nm_sign_row_bytes(coded, in_features)
    return packed


def unpack_rows(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    coded = coded_pattern(pattern)
    place_bits, group_bits = nm_sign_place_bits(coded), nm_sign_group_bits(coded)
    count = in_features // coded.m
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    if bits[:, count * group_bits :].any():
        raise DamagedBytes("the padding of a row is not zero bits")
    groups = words_of_bits(bits[:, : count * group_bits].reshape(len(packed), count, group_bits))
    left = groups & np.uint64((1 << place_bits) - 1)
    if (left >= math.comb(coded.m, coded.n)).any():
        raise DamagedBytes("a group has places that no group has")
    sets, rank = _sets(coded), np.full(groups.shape, coded.n, np.uint8)
    codes = np.empty((*groups.shape, coded.m), np.int8)
    for place in range(coded.m - 1, -1, -1):
        before = sets[place, rank]
        is_nonzero = (rank > 0) & (left >= before)
        left -= np.where(is_nonzero, before, np.uint64(0))
        rank -= is_nonzero
        is_negative = groups >> (rank + np.uint64(place_bits)) & np.uint64(1)
        codes[:, :, place] = is_nonzero * (1 - 2 * is_negative.astype(np.int8))
    return codes.reshape(len(packed), in_features)


@cache
def _sets(coded: NMPattern) -> np.ndarray:
    """uint64 [m, n + 1]: C(place, count of non-zeros)."""
    rows = [[math.comb(place, count) for count in range(coded.n + 1)] for place in range(coded.m)]
    return np.array(rows, np.uint64)
