# SPDX-License-Identifier: Apache-2.0
"""The rows of each packed format, packed and unpacked as csrc/packed_format.h lays them out.

Functions take and return arrays of whole rows: int8 codes [rows, in_features] within the pattern, and
uint8 bytes [rows, row_bytes]. Unpacking raises `DamagedBytes` for bytes to which no codes are packed.

i2 and b3 cut a row into blocks of contiguous pieces, the planes, that share bytes: byte i of a block
holds value i of each of its planes. The last block of a row is shorter and filled up with zero codes.
nm-enum numbers a group of m among the states that its pattern allows. nm-sign says which n of m weights
are not zero, and their signs.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from sparse_bitnet.packing.formats import (
    B3_BLOCK_WEIGHTS,
    I2_BLOCK_WEIGHTS,
    b3_plane_bytes,
    coded_pattern,
    i2_plane_bytes,
    nm_enum_bits,
    nm_enum_groups_per_word,
    nm_enum_states,
    nm_sign_group_bits,
    nm_sign_place_bits,
)
from sparse_bitnet.pattern import NMPattern

Bytes = np.ndarray
"""uint8 array."""


class DamagedBytes(Exception):
    """Raised for bytes to which no matrix of codes is packed. The message says why."""


class _Planes(NamedTuple):
    """Tables of a format of planes: from the codes that share a byte to the byte, and back."""

    block_weights: int
    """Weights of a whole block."""
    plane_bytes: Callable[[int], int]
    """Weights of a block -> bytes of a plane, which are those of the block."""
    byte: Bytes
    """[3^planes]: the byte of a number whose base-3 digits, one a plane, are code + 1."""
    codes: np.ndarray
    """int8 [planes, 256]: the code of each plane in a byte, 2 in bytes that are invalid."""


def _planes(block_weights: int, plane_bytes: Callable[[int], int], byte: Bytes) -> _Planes:
    count = block_weights // plane_bytes(block_weights)
    codes = np.full((count, 256), 2, np.int8)
    codes[:, byte] = np.arange(3**count) // 3 ** np.arange(count - 1, -1, -1)[:, None] % 3 - 1
    return _Planes(block_weights, plane_bytes, byte, codes)


# Four fields of two bits, the first plane's lowest; and the number as a fraction of 243, rounded up.
_FIELDS = np.add.outer(np.add.outer([0, 1, 2], [0, 4, 8]), np.add.outer([0, 16, 32], [0, 64, 128]))
_I2 = _planes(I2_BLOCK_WEIGHTS, i2_plane_bytes, _FIELDS.reshape(-1).astype(np.uint8))
_B3 = _planes(B3_BLOCK_WEIGHTS, b3_plane_bytes, (-(-256 * np.arange(243) // 243)).astype(np.uint8))


def _pack_planes(planes: _Planes, codes: np.ndarray, pattern: NMPattern) -> Bytes:
    rows, in_features = codes.shape
    count, tail = len(planes.codes), in_features % planes.block_weights
    block_bytes, last_bytes = planes.plane_bytes(planes.block_weights), planes.plane_bytes(tail)
    body = (in_features - tail) // count
    packed = np.empty((rows, body + last_bytes), np.uint8)
    whole = codes[:, : in_features - tail].reshape(rows, -1, count, block_bytes)
    packed[:, :body].reshape(rows, -1, block_bytes)[:] = _joined(planes, whole)
    if tail:
        padded = np.zeros((rows, count * last_bytes), np.int8)
        padded[:, :tail] = codes[:, in_features - tail :]
        packed[:, body:] = _joined(planes, padded.reshape(rows, count, last_bytes))
    return packed


def _joined(planes: _Planes, codes: np.ndarray) -> Bytes:
    """int8 [..., planes, bytes] -> [..., bytes]."""
    digits = (codes + 1).view(np.uint8)
    number = digits[..., 0, :].copy()
    for plane in range(1, len(planes.codes)):
        number *= 3
        number += digits[..., plane, :]
    return planes.byte.take(number)


def _unpack_planes(
    planes: _Planes, packed: Bytes, pattern: NMPattern, in_features: int
) -> np.ndarray:
    if (planes.codes[0] == 2).take(packed).any():
        raise DamagedBytes(f"a byte stands for no {len(planes.codes)} codes")
    rows, count, tail = len(packed), len(planes.codes), in_features % planes.block_weights
    body, block_bytes = (in_features - tail) // count, planes.plane_bytes(planes.block_weights)
    codes = np.empty((rows, in_features), np.int8)
    whole = packed[:, :body].reshape(rows, -1, block_bytes)
    unpacked = codes[:, : in_features - tail].reshape(rows, -1, count, block_bytes)
    for plane, code in enumerate(planes.codes):
        unpacked[:, :, plane] = code.take(whole)
    if tail:
        padded = np.concatenate([code[packed[:, body:]] for code in planes.codes], axis=1)
        if padded[:, tail:].any():
            raise DamagedBytes("the padding of a row is not zero codes")
        codes[:, in_features - tail :] = padded[:, :tail]
    return codes


def _pack_bits(bits: Bytes) -> Bytes:
    """0 and 1 [rows, bits] -> [rows, bytes], the last one filled up with zeros."""
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack_bits(packed: Bytes, count: int) -> Bytes:
    """Inverse of `_pack_bits`."""
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    if bits[:, count:].any():
        raise DamagedBytes("the padding of a row is not zero bits")
    return bits[:, :count]


def _bits_of_words(words: np.ndarray, count: int) -> Bytes:
    """uint64 [...] -> [..., count] of 0 and 1: the lowest bits of every word."""
    as_bytes = words.astype("<u8", copy=False).view(np.uint8).reshape(*words.shape, 8)
    return np.unpackbits(as_bytes, axis=-1, count=count, bitorder="little")


def _words_of_bits(bits: Bytes) -> np.ndarray:
    """Inverse of `_bits_of_words`."""
    as_bytes = np.zeros((*bits.shape[:-1], 8), np.uint8)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    as_bytes[..., : packed.shape[-1]] = packed
    return as_bytes.view("<u8")[..., 0].astype(np.uint64)


def _words_of_groups(coded: NMPattern, groups: int) -> list[tuple[slice, int, int]]:
    """Return the groups of a row by size of their word, with groups and bits of a word: first all whole
    words, then the last one, which may have fewer groups."""
    per_word = nm_enum_groups_per_word(coded)
    whole = groups - groups % per_word
    parts = ((slice(0, whole), per_word), (slice(whole, groups), groups - whole))
    return [
        (part, count, nm_enum_bits(coded, count)) for part, count in parts if part.start < part.stop
    ]


def _pack_nm_enum(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    coded = coded_pattern(pattern)
    states = np.uint64(nm_enum_states(coded.m, coded.n))
    numbers = _numbers(codes, coded)
    bits = []
    for part, count, width in _words_of_groups(coded, numbers.shape[1]):
        groups = numbers[:, part].reshape(len(codes), -1, count)
        word = groups[:, :, -1].astype(np.uint64)
        for i in range(count - 2, -1, -1):
            word *= states
            word += groups[:, :, i]
        bits.append(_bits_of_words(word, width).reshape(len(codes), -1))
    return _pack_bits(np.concatenate(bits, axis=1))


def _unpack_nm_enum(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    coded, rows = coded_pattern(pattern), len(packed)
    states = np.uint64(nm_enum_states(coded.m, coded.n))
    numbers = np.empty((rows, in_features // coded.m), np.uint64)
    words = _words_of_groups(coded, numbers.shape[1])
    sizes = [(part.stop - part.start) // count * width for part, count, width in words]
    bits, begin = _unpack_bits(packed, sum(sizes)), 0
    for (part, count, width), size in zip(words, sizes, strict=True):
        word = _words_of_bits(bits[:, begin : begin + size].reshape(rows, -1, width))
        groups = numbers[:, part].reshape(rows, -1, count)
        for i in range(count):
            quotient = word // states
            groups[:, :, i] = word - quotient * states
            word = quotient
        if word.any():
            raise DamagedBytes("a word stands for no groups")
        begin += size
    if coded.m <= _LARGEST_TABLE_GROUP:
        return _code_table(coded)[numbers].reshape(rows, in_features)
    return _codes_of_numbers(numbers, coded).reshape(rows, in_features)


_LARGEST_TABLE_GROUP = 8
"""Groups up to this many weights go through tables of 3^m and of S entries, several times faster."""


def _numbers(codes: np.ndarray, coded: NMPattern) -> np.ndarray:
    """int8 [rows, in_features] -> numbers [rows, groups]."""
    if coded.m > _LARGEST_TABLE_GROUP:
        return _numbers_of_codes(codes.reshape(len(codes), -1, coded.m), coded)
    digits = (codes + 1).view(np.uint8)
    index = digits[:, 0 :: coded.m].astype(np.uint16)
    for i in range(1, coded.m):
        index *= 3
        index += digits[:, i :: coded.m]
    return _number_table(coded)[index]


@cache
def _number_table(coded: NMPattern) -> np.ndarray:
    """uint16 [3^m]: the number of the group whose codes plus one are these base-3 digits."""
    powers = 3 ** np.arange(coded.m - 1, -1, -1)
    codes = (np.arange(3**coded.m)[:, None] // powers % 3 - 1).astype(np.int8)
    return _numbers_of_codes(codes, coded).astype(np.uint16)


@cache
def _code_table(coded: NMPattern) -> np.ndarray:
    """int8 [S, m]: the group of each number."""
    states = nm_enum_states(coded.m, coded.n)
    return _codes_of_numbers(np.arange(states, dtype=np.uint64), coded)


@cache
def _states_table(coded: NMPattern) -> np.ndarray:
    """uint64 [m, n + 1]: A(j, b)."""
    rows = [[nm_enum_states(j, b) for b in range(coded.n + 1)] for j in range(coded.m)]
    return np.array(rows, np.uint64)


def _numbers_of_codes(codes: np.ndarray, coded: NMPattern) -> np.ndarray:
    """int8 [..., m] -> uint64 [...]. Meaningless for groups with more than n non-zeros."""
    table = _states_table(coded)
    number = np.zeros(codes.shape[:-1], np.uint64)
    room = np.full(codes.shape[:-1], coded.n, np.int8)
    for i in range(coded.m):
        code, row = codes[..., i], table[coded.m - 1 - i]
        number += np.where(code != 0, row[room], np.uint64(0))
        room = np.maximum(room - (code != 0), 0)
        number += np.where(code < 0, row[room], np.uint64(0))
    return number


def _codes_of_numbers(numbers: np.ndarray, coded: NMPattern) -> np.ndarray:
    """uint64 [...], each below S -> int8 [..., m]."""
    table = _states_table(coded)
    left = numbers.copy()
    codes = np.zeros((*numbers.shape, coded.m), np.int8)
    room = np.full(numbers.shape, coded.n, np.int8)
    for i in range(coded.m):
        row = table[coded.m - 1 - i]
        zeros = row[room]
        is_nonzero = left >= zeros
        left -= np.where(is_nonzero, zeros, np.uint64(0))
        room -= is_nonzero
        positives = row[room]
        is_negative = is_nonzero & (left >= positives)
        left -= np.where(is_negative, positives, np.uint64(0))
        codes[..., i] = is_nonzero.astype(np.int8) - 2 * is_negative.astype(np.int8)
    return codes


def _pack_nm_sign(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """Pack codes that have n non-zeros in every group."""
    coded = coded_pattern(pattern)
    place_bits, sets = nm_sign_place_bits(coded), _sets(coded)
    by_place = codes.reshape(len(codes), -1, coded.m)
    groups = np.zeros(by_place.shape[:2], np.uint64)
    rank = np.zeros(groups.shape, np.uint8)
    for place in range(coded.m):
        code = by_place[:, :, place]
        groups |= (code < 0).astype(np.uint64) << (rank + np.uint64(place_bits))
        rank += code != 0
        groups += np.where(code != 0, sets[place, rank], np.uint64(0))
    return _pack_bits(_bits_of_words(groups, nm_sign_group_bits(coded)).reshape(len(codes), -1))


def _unpack_nm_sign(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    coded, rows = coded_pattern(pattern), len(packed)
    place_bits, group_bits = nm_sign_place_bits(coded), nm_sign_group_bits(coded)
    bits = _unpack_bits(packed, in_features // coded.m * group_bits)
    groups = _words_of_bits(bits.reshape(rows, -1, group_bits))
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
    return codes.reshape(rows, in_features)


@cache
def _sets(coded: NMPattern) -> np.ndarray:
    """uint64 [m, n + 1]: C(place, count of non-zeros)."""
    rows = [[math.comb(place, count) for count in range(coded.n + 1)] for place in range(coded.m)]
    return np.array(rows, np.uint64)


ROWS: dict[str, tuple[Callable[..., Bytes], Callable[..., np.ndarray]]] = {
    "i2": (partial(_pack_planes, _I2), partial(_unpack_planes, _I2)),
    "b3": (partial(_pack_planes, _B3), partial(_unpack_planes, _B3)),
    "nm-enum": (_pack_nm_enum, _unpack_nm_enum),
    "nm-sign": (_pack_nm_sign, _unpack_nm_sign),
}
"""Format -> functions that pack (codes, pattern) and unpack (bytes, pattern, in_features)."""
