# SPDX-License-Identifier: Apache-2.0
"""The packed formats: names, constants and sizes. Mirrors csrc/packed_format.h, which specifies them."""

import math
from fractions import Fraction
from functools import cache

from sparse_bitnet.errors import UserError
from sparse_bitnet.pattern import NMPattern

VERSION = 1
MAX_IN_FEATURES = 1 << 23

I2_BLOCK_WEIGHTS = 256
I2_BLOCK_BYTES = 64
I2_TAIL_ALIGNMENT = 16

B3_BLOCK_WEIGHTS = 320
B3_BLOCK_BYTES = 64

NM_ENUM_WORD_BITS = 64

SCALE_FLOOR = 1e-5
"""Smallest weight scale, and smallest absolute maximum of a token."""

SCALE_GROUPS = (32, 64, 128, 256)
"""Counts of consecutive weights of a row that may share a scale."""


FORMATS = {"i2": 1.0, "b3": 1.4, "nm-enum": 3.3, "nm-sign": 2.0}
"""The packed formats, with the seconds that loading a model takes relative to i2.

These are the largest ratios of processor time on one thread of an EPYC with AVX-512, for weights that run
as i2 and as lookup: half of Qwen2.5-0.5B's blocks (179 M weights) in 6:8 and in binary 3:4, least of 7
rounds.
"""

MOST_LOAD_TIME = 1.5
"""`auto` takes the smallest format that loads within this many times of i2's seconds."""


def coded_pattern(pattern: NMPattern) -> NMPattern:
    """The pattern whose groups the formats code: 1:1 for every dense one."""
    return NMPattern(1, 1) if pattern.is_dense else pattern


def needs_exact(name: str) -> bool:
    """Whether a format holds only weights of which every group has exactly n non-zeros."""
    return name == "nm-sign"


def check_layout(name: str, pattern: NMPattern, in_features: int, layer: str) -> None:
    """Raise `UserError` for an unknown format and, naming the layer, where a format cannot hold rows of
    this length and pattern."""
    if name not in FORMATS:
        raise UserError(f"packed format {name!r} is unknown: choose one of {', '.join(FORMATS)}")
    pattern.check_divides(in_features, layer)
    if not 1 <= in_features <= MAX_IN_FEATURES:
        raise UserError(
            f"layer {layer}: in_features {in_features:,} is not within 1..{MAX_IN_FEATURES:,}, the "
            "range of the packed formats"
        )


def scale_group(shape: tuple[int, ...], rows: int, in_features: int) -> int | None:
    """Weights of a row that share one of `shape` scales: `in_features` for one a row or a matrix; None
    where a matrix [rows, in_features] has no scales of that shape."""
    if shape == (1,) or shape == (rows, 1):
        return in_features
    return next((g for g in SCALE_GROUPS if shape == (rows, in_features / g)), None)


def row_bytes(name: str, pattern: NMPattern, in_features: int, *, layer: str = "(unnamed)") -> int:
    """Bytes of a packed row of `in_features` weights.

    Raises `UserError` for an unknown format, and for a pattern or length that it does not hold.
    """
    check_layout(name, pattern, in_features, layer)
    if name in ("i2", "b3"):
        block, plane_bytes = I2_BLOCK_WEIGHTS, i2_plane_bytes
        if name == "b3":
            block, plane_bytes = B3_BLOCK_WEIGHTS, b3_plane_bytes
        blocks, tail = divmod(in_features, block)
        return blocks * plane_bytes(block) + plane_bytes(tail)
    groups = in_features // coded_pattern(pattern).m
    if name == "nm-sign":
        return _divide_up(groups * nm_sign_group_bits(pattern), 8)
    per_word = nm_enum_groups_per_word(pattern)
    words, tail = divmod(groups, per_word)
    bits = words * nm_enum_bits(pattern, per_word) + nm_enum_bits(pattern, tail)
    return _divide_up(bits, 8)


def auto_format(pattern: NMPattern, *, exact: bool = False) -> str:
    """The smallest format for long rows among those that load within `MOST_LOAD_TIME` of i2.

    `exact`: every group has n non-zeros, so that nm-sign holds them.
    """
    quick = [
        name
        for name, load_time in FORMATS.items()
        if load_time <= MOST_LOAD_TIME and (exact or not needs_exact(name))
    ]
    long_row = I2_BLOCK_WEIGHTS * B3_BLOCK_WEIGHTS * pattern.m
    return min(quick, key=lambda name: row_bytes(name, pattern, long_row))


def _divide_up(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def i2_plane_bytes(block_weights: int) -> int:
    """Bytes of an i2 block of this many weights, at most 256."""
    return _divide_up(_divide_up(block_weights, 4), I2_TAIL_ALIGNMENT) * I2_TAIL_ALIGNMENT


def b3_plane_bytes(block_weights: int) -> int:
    """Bytes of a b3 block of this many weights, at most 320."""
    return _divide_up(block_weights, 5)


def nm_enum_states(weights: int, nonzeros: int) -> int:
    """A(weights, nonzeros): ternary vectors of this many weights, at most this many not zero."""
    return sum(math.comb(weights, k) << k for k in range(min(weights, nonzeros) + 1))


def nm_enum_bits(pattern: NMPattern, groups: int) -> int:
    """Bits of a word of this many groups, more than 64 where no word holds them."""
    coded = coded_pattern(pattern)
    return (nm_enum_states(coded.m, coded.n) ** groups - 1).bit_length()


@cache
def nm_enum_groups_per_word(pattern: NMPattern) -> int:
    """The count with the fewest bits a group in words of at most 64 bits, the smallest such count."""
    fitting = [
        groups
        for groups in range(1, NM_ENUM_WORD_BITS + 1)
        if nm_enum_bits(pattern, groups) <= NM_ENUM_WORD_BITS
    ]
    return min(
        fitting, key=lambda groups: (Fraction(nm_enum_bits(pattern, groups), groups), groups)
    )


def nm_sign_place_bits(pattern: NMPattern) -> int:
    """Bits of a group's number of places: those of C(m, n) numbers."""
    coded = coded_pattern(pattern)
    return (math.comb(coded.m, coded.n) - 1).bit_length()


def nm_sign_group_bits(pattern: NMPattern) -> int:
    """Bits of a group in nm-sign."""
    return nm_sign_place_bits(pattern) + coded_pattern(pattern).n
