# SPDX-License-Identifier: Apache-2.0
"""Codes to packed bytes and back, exactly: the plain reference of every packed format, as
csrc/packed_format.h lays them out.

`pack` and `unpack` accept arrays or torch's tensors, and return the same kind. Importing this module
imports no torch. The functions of `ROWS` take and return arrays of whole rows: int8 codes [rows,
in_features] within the pattern, and uint8 bytes [rows, row_bytes]. Unpacking raises `DamagedBytes` for
bytes to which no codes are packed.

i2 and b3 cut a row into blocks of contiguous pieces, the planes, that share bytes: byte i of a block
holds value i of each of its planes. The last block of a row is shorter and filled up with zero codes.
nm-enum numbers a group of m among the states that its pattern allows. nm-sign says which n of m weights
are not zero, and their signs.
"""

import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Union

import numpy as np

from sparse_bitnet.errors import UserError
from sparse_bitnet.host import available_cores
from sparse_bitnet.packing.formats import (
    PLANES,
    coded_pattern,
    needs_exact,
    nm_enum_bits,
    nm_enum_groups_per_word,
    nm_enum_states,
    nm_sign_group_bits,
    nm_sign_place_bits,
    row_bytes,
)
from sparse_bitnet.pattern import NMPattern

if TYPE_CHECKING:
    from torch import Tensor

Matrix = TypeVar("Matrix", bound=Union["Tensor", np.ndarray])
Bytes = np.ndarray
"""uint8 array."""

SLICE_WEIGHTS = 1 << 19
"""Weights coded at a time: intermediate results stay in the cache, and memory stays bounded."""


def pack(codes: Matrix, format: str, pattern: NMPattern, *, name: str = "(unnamed)") -> Matrix:
    """Pack ternary codes into uint8 [rows, row_bytes] on the CPU.

    Args:
        codes: int8 [rows, in_features] of -1, 0 and 1, at most n non-zeros in every group of m.
        format: a name in `formats.FORMATS`.
        pattern: n:m.
        name: of the layer, for error messages.

    Raises `UserError` for codes outside the pattern, for shapes that the format does not support and,
    with nm-sign, for groups with fewer than n non-zeros.
    """
    array = _array(codes)
    if array.dtype != np.int8 or array.ndim != 2 or not array.size:
        raise UserError(
            f"layer {name}: pack needs an int8 matrix, not {codes.dtype} {list(codes.shape)}"
        )
    rows, in_features = array.shape
    packed = np.empty((rows, row_bytes(format, pattern, in_features, layer=name)), np.uint8)
    coded = coded_pattern(pattern)

    def pack_part(part: slice) -> None:
        codes = array[part]
        if (codes + 1).view(np.uint8).max() > 2:
            raise UserError(f"layer {name}: there are codes other than -1, 0 and 1")
        if not _fits(codes, pattern):
            raise UserError(
                f"layer {name}: a group of {pattern.m} has more than {pattern.n} non-zero codes; mask "
                "the codes first or pack them with the pattern they were trained with"
            )
        if needs_exact(format) and np.count_nonzero(codes) != codes.size // coded.m * coded.n:
            raise UserError(
                f"layer {name}: {format} needs exactly {pattern.n} non-zero weights in each {pattern.m}, "
                "and a group has fewer; use nm-enum, or train with quantizer=binary"
            )
        packed[part] = ROWS[format][0](codes, pattern)

    _by_slices(rows, in_features, pack_part)
    return _like(codes, packed)


def unpack(
    packed: Matrix,
    format: str,
    pattern: NMPattern,
    shape: tuple[int, int],
    *,
    name: str = "(unnamed)",
) -> Matrix:
    """Inverse of `pack`: int8 codes of `shape` [rows, in_features], on the CPU.

    Raises `UserError`, naming the tensor, if the number of bytes does not match the shape, or if `pack`
    writes such bytes for no codes within the pattern.
    """
    rows, in_features = shape
    expected = [rows, row_bytes(format, pattern, in_features, layer=name)]
    array = _array(packed)
    if array.dtype != np.uint8 or expected != list(array.shape):
        raise UserError(
            f"tensor {name}: {format} of a {pattern} matrix {list(shape)} is uint8 {expected}, "
            f"not {packed.dtype} {list(packed.shape)}"
        )
    codes = np.empty((rows, in_features), np.int8)

    def unpack_part(part: slice) -> None:
        codes[part] = ROWS[format][1](array[part], pattern, in_features)
        if not _fits(codes[part], pattern):
            raise DamagedBytes(f"a group has more non-zeros than the pattern {pattern} allows")

    try:
        _by_slices(rows, in_features, unpack_part)
    except DamagedBytes as error:
        raise UserError(f"tensor {name} is damaged or not {format}: {error}") from error
    return _like(packed, codes)


def _array(given: Union["Tensor", np.ndarray]) -> np.ndarray:
    return np.ascontiguousarray(given if isinstance(given, np.ndarray) else given.cpu().numpy())


def _like(given: Any, made: np.ndarray) -> Any:
    if isinstance(given, np.ndarray):
        return made
    import torch

    return torch.from_numpy(made)


def _by_slices(rows: int, in_features: int, work: Callable[[slice], None]) -> None:
    """Call `work` for slices of `SLICE_WEIGHTS`, on as many threads as torch has, else processors."""
    torch = sys.modules.get("torch")
    step = max(1, SLICE_WEIGHTS // in_features)
    slices = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    # numpy releases the interpreter's lock in all that takes time here.
    with ThreadPoolExecutor(torch.get_num_threads() if torch else available_cores()) as pool:
        list(pool.map(work, slices))


def _fits(codes: np.ndarray, pattern: NMPattern) -> bool:
    """Whether every group of m of ternary codes [rows, in_features] has at most n that are not zero."""
    if pattern.is_dense:
        return True
    nonzero = codes.view(np.uint8) & 1
    counts = nonzero[:, 0 :: pattern.m].copy()
    for i in range(1, pattern.m):
        counts += nonzero[:, i :: pattern.m]
    return bool((counts <= pattern.n).all())


class DamagedBytes(Exception):
    """Raised for bytes that no matrix of codes packs to. The message says why."""


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
_I2 = _planes(*PLANES["i2"], _FIELDS.reshape(-1).astype(np.uint8))
_B3 = _planes(*PLANES["b3"], (-(-256 * np.arange(243) // 243)).astype(np.uint8))


def _spans(planes: _Planes, in_features: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the columns and the bytes of a row's whole blocks, then of its shorter last one, each with
    the size of such a block in bytes."""
    whole = in_features - in_features % planes.block_weights
    begin = 0
    for first, last in ((0, whole), (whole, in_features)):
        if first < last:
            block_bytes = planes.plane_bytes(min(planes.block_weights, last - first))
            end = begin + max(1, (last - first) // planes.block_weights) * block_bytes
            yield slice(first, last), slice(begin, end), block_bytes
            begin = end


def _pack_planes(planes: _Planes, codes: np.ndarray, pattern: NMPattern) -> Bytes:
    count, parts = len(planes.codes), []
    for columns, _, block_bytes in _spans(planes, codes.shape[1]):
        part = codes[:, columns]
        filled = np.pad(part, ((0, 0), (0, -part.shape[1] % (count * block_bytes))))
        digits = (filled + 1).view(np.uint8).reshape(len(codes), -1, count, block_bytes)
        number = digits[:, :, 0].copy()
        for plane in range(1, count):
            number *= 3
            number += digits[:, :, plane]
        parts.append(planes.byte.take(number).reshape(len(codes), -1))
    return np.concatenate(parts, axis=1)


def _unpack_planes(
    planes: _Planes, packed: Bytes, pattern: NMPattern, in_features: int
) -> np.ndarray:
    if (planes.codes[0] == 2).take(packed).any():
        raise DamagedBytes(f"a byte is not a code of {len(planes.codes)} weights")
    codes = np.empty((len(packed), in_features), np.int8)
    for columns, at, block_bytes in _spans(planes, in_features):
        blocks = packed[:, at].reshape(len(packed), -1, block_bytes)
        filled = np.stack([code.take(blocks) for code in planes.codes], axis=2)
        filled = filled.reshape(len(packed), -1)
        width = columns.stop - columns.start
        if filled[:, width:].any():
            raise DamagedBytes("the padding of a row is not zero codes")
        codes[:, columns] = filled[:, :width]
    return codes


def _unpack_bits(packed: Bytes, count: int) -> Bytes:
    """Unpack [rows, bytes] to 0 and 1 [rows, count]; bits behind them are zeros that fill up a byte."""
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
    return [(part, n, nm_enum_bits(coded, n)) for part, n in parts if part.start < part.stop]


def _pack_nm_enum(codes: np.ndarray, pattern: NMPattern) -> Bytes:
    coded = coded_pattern(pattern)
    states = np.uint64(nm_enum_states(coded.m, coded.n))
    numbers = _numbers_of_codes(codes.reshape(len(codes), -1, coded.m), coded)
    bits = []
    for part, count, width in _words_of_groups(coded, numbers.shape[1]):
        groups = numbers[:, part].reshape(len(codes), -1, count)
        word = groups[:, :, -1].astype(np.uint64)
        for i in range(count - 2, -1, -1):
            word *= states
            word += groups[:, :, i]
        bits.append(_bits_of_words(word, width).reshape(len(codes), -1))
    return np.packbits(np.concatenate(bits, axis=1), axis=1, bitorder="little")


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
            raise DamagedBytes("a word is not a code of groups")
        begin += size
    return _codes_of_numbers(numbers, coded).reshape(rows, in_features)


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
    bits = _bits_of_words(groups, nm_sign_group_bits(coded)).reshape(len(codes), -1)
    return np.packbits(bits, axis=1, bitorder="little")


def _unpack_nm_sign(packed: Bytes, pattern: NMPattern, in_features: int) -> np.ndarray:
    coded, rows = coded_pattern(pattern), len(packed)
    place_bits, group_bits = nm_sign_place_bits(coded), nm_sign_group_bits(coded)
    bits = _unpack_bits(packed, in_features // coded.m * group_bits)
    groups = _words_of_bits(bits.reshape(rows, -1, group_bits))
    left = groups & np.uint64((1 << place_bits) - 1)
    if (left >= math.comb(coded.m, coded.n)).any():
        raise DamagedBytes("a group has an invalid set of positions")
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
