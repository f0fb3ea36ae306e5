# SPDX-License-Identifier: Apache-2.0
"""nm-enum: groups numbered among the states their pattern allows (csrc/packed_format.h)."""

from functools import cache

import numpy as np

from sparse_bitnet.packing.bitmaps import Bytes, DamagedBytes, bits_of_words, words_of_bits
from sparse_bitnet.packing.formats import (
    coded_pattern,
    nm_enum_bits,
    nm_enum_groups_per_word,
    nm_enum_row_bytes,
    nm_enum_states,
)
from sparse_bitnet.pattern import NMPattern

_LARGEST_TABLE_GROUP = 8
"""Groups up to this many weights go through tables of 3^m and of S entries."""


def pack_rows(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    """int8 [rows, in_features], within the pattern -> [rows, row_bytes]."""
    coded = coded_pattern(pattern)
    rows, in_features = codes.shape
    numbers = _numbers(codes, coded)
    per_word = nm_enum_groups_per_word(coded)
    words, tail = divmod(numbers.shape[1], per_word)
    whole = numbers[:, : words * per_word].reshape(rows, words, per_word)
    bits = [_word_bits(whole, coded, per_word).reshape(rows, -1)] if words else []
    if tail:
        last = numbers[:, None, words * per_word :]
        bits.append(_word_bits(last, coded, tail).reshape(rows, -1))
    packed = np.packbits(np.concatenate(bits, axis=1), axis=1, bitorder="little")
    assert packed.shape[1] == nm_enum_row_bytes(coded, in_features)
    return packed


def unpack_rows(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    """[rows, row_bytes] -> int8 [rows, in_features]. Raises `DamagedBytes` for bytes no matrix has."""
    coded = coded_pattern(pattern)
    rows = len(packed)
    groups = in_features // coded.m
    per_word = nm_enum_groups_per_word(coded)
    words, tail = divmod(groups, per_word)
    bits = np.unpackbits(packed, axis=1, bitorder="little")
    word_bits, tail_bits = nm_enum_bits(coded, per_word), nm_enum_bits(coded, tail)
    split = words * word_bits
    end = split + tail_bits
    if bits[:, end:].any():
        raise DamagedBytes("the padding of a row is not zero bits")
    numbers = np.empty((rows, groups), _number_type(coded))
    whole = numbers[:, : words * per_word].reshape(rows, words, per_word)
    _split_words(bits[:, :split].reshape(rows, words, word_bits), coded, whole)
    if tail:
        _split_words(bits[:, None, split:end], coded, numbers[:, None, words * per_word :])
    return _codes(numbers, coded).reshape(rows, in_features)


def _word_bits(numbers: np.ndarray, coded: NMPattern, groups: int) -> Bytes:
    """Numbers [rows, words, groups] -> bits [rows, words, w]."""
    states = np.uint64(nm_enum_states(coded.m, coded.n))
    word = numbers[:, :, -1].astype(np.uint64)
    for i in range(groups - 2, -1, -1):
        word *= states
        word += numbers[:, :, i]
    return bits_of_words(word, nm_enum_bits(coded, groups))


def _split_words(bits: Bytes, coded: NMPattern, numbers: np.ndarray) -> None:
    """Bits [rows, words, w] -> `numbers` [rows, words, groups], in place."""
    states = np.uint64(nm_enum_states(coded.m, coded.n))
    word = words_of_bits(bits)
    for i in range(numbers.shape[2]):
        quotient = word // states
        numbers[:, :, i] = word - quotient * states
        word = quotient
    if word.any():
        raise DamagedBytes("a word stands for no groups")


def _numbers(codes: np.ndarray, coded: NMPattern) -> np.ndarray:
    """int8 [rows, in_features] -> numbers [rows, groups]."""
    if coded.m > _LARGEST_TABLE_GROUP:
        return _count_before(codes.reshape(len(codes), -1, coded.m), coded)
    digits = (codes + 1).view(np.uint8)
    index = digits[:, 0 :: coded.m].astype(np.uint16)
    for i in range(1, coded.m):
        index *= 3
        index += digits[:, i :: coded.m]
    return _number_table(coded)[index]


def _codes(numbers: np.ndarray, coded: NMPattern) -> np.ndarray:
    """Numbers [rows, groups] -> int8 [rows, groups, m]."""
    if coded.m > _LARGEST_TABLE_GROUP:
        return _from_count(numbers, coded)
    return _code_table(coded)[numbers]


def _number_type(coded: NMPattern) -> np.dtype:
    """The smallest unsigned type that holds every number."""
    return np.min_scalar_type(nm_enum_states(coded.m, coded.n) - 1)


@cache
def _number_table(coded: NMPattern) -> np.ndarray:
    """[3^m]: the number of the group whose codes plus one are these base-3 digits."""
    powers = 3 ** np.arange(coded.m - 1, -1, -1)
    codes = (np.arange(3**coded.m)[:, None] // powers % 3 - 1).astype(np.int8)
    return _count_before(codes, coded).astype(_number_type(coded))


@cache
def _code_table(coded: NMPattern) -> np.ndarray:
    """int8 [S, m]: the group of each number."""
    states = nm_enum_states(coded.m, coded.n)
    return _from_count(np.arange(states, dtype=np.uint64), coded)


@cache
def _states_table(coded: NMPattern) -> np.ndarray:
    """uint64 [m, n + 1]: A(j, b)."""
    rows = [[nm_enum_states(j, b) for b in range(coded.n + 1)] for j in range(coded.m)]
    return np.array(rows, np.uint64)


def _count_before(codes: np.ndarray, coded: NMPattern) -> np.ndarray:
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


def _from_count(numbers: np.ndarray, coded: NMPattern) -> np.ndarray:
    """Unsigned [...], each below S -> int8 [..., m]."""
    table = _states_table(coded)
    left = numbers.astype(np.uint64)
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
