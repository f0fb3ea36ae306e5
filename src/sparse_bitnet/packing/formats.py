# SPDX-License-Identifier: Apache-2.0
"""The packed formats: names, constants and sizes. Mirrors csrc/packed_format.h, which specifies them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
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

NM_BITMAP_CHUNK_WEIGHTS = 64

NM_ENUM_WORD_BITS = 64

SCALE_FLOOR = 1e-5
"""Smallest weight scale, and smallest absolute maximum of a token."""

SCALE_GROUPS = (32, 64, 128, 256)
"""Counts of consecutive weights of a row that may share a scale."""


@dataclass(frozen=True, kw_only=True)
class PackedFormat:
    """What a format is for."""

    name: str
    summary: str
    decode_speed: float | None
    """Matrix-vector products a second relative to the fastest format; None: decoded once, on loading."""


# Speeds on a 2-core Xeon with AVX-512 VNNI: i2 43 G and nm-bitmap 40 G weights/s a thread; for b3 the
# ratio of the 1.62-bit to the 2-bit type of the fastest published engine, 18.0 to 23.4 tokens/s. nm-sign
# becomes another layout on loading, whichever is fastest there, i2 among them.
FORMATS: dict[str, PackedFormat] = {
    format.name: format
    for format in (
        PackedFormat(name="i2", summary="2 bits, any pattern", decode_speed=1.0),
        PackedFormat(name="b3", summary="1.6 bits, any pattern", decode_speed=0.77),
        PackedFormat(name="nm-bitmap", summary="1 + n/m bits, m divides 64", decode_speed=0.93),
        PackedFormat(name="nm-enum", summary="log2(states)/m bits, archive", decode_speed=None),
        PackedFormat(
            name="nm-sign", summary="log2(places)/m + n/m bits, n of m binary", decode_speed=1.0
        ),
        PackedFormat(name="nm-zstd", summary="entropy coded, archive", decode_speed=None),
    )
}

SPEED_TOLERANCE = 0.1
"""`auto` takes the smallest format that decodes at no less than 1 - this of the fastest one's speed."""


def check_format(name: str) -> None:
    """Raise `UserError` for a name that is not a packed format."""
    if name not in FORMATS:
        raise UserError(f"packed format {name!r} is unknown: choose one of {', '.join(FORMATS)}")


def coded_pattern(pattern: NMPattern) -> NMPattern:
    """The pattern whose groups the formats code: 1:1 for every dense one."""
    return NMPattern(1, 1) if pattern.is_dense else pattern


def holds_pattern(name: str, pattern: NMPattern) -> bool:
    """Whether a format holds rows of this pattern at all: nm-bitmap needs an m that divides 64."""
    return name != "nm-bitmap" or NM_BITMAP_CHUNK_WEIGHTS % coded_pattern(pattern).m == 0


def needs_exact(name: str) -> bool:
    """Whether a format holds only weights of which every group has exactly n non-zeros."""
    return name == "nm-sign"


def check_layout(name: str, pattern: NMPattern, in_features: int, layer: str) -> None:
    """Raise `UserError`, naming the layer, where a format cannot hold rows of this length and pattern."""
    check_format(name)
    pattern.check_divides(in_features, layer)
    if not 1 <= in_features <= MAX_IN_FEATURES:
        raise UserError(
            f"layer {layer}: in_features {in_features:,} is not within 1..{MAX_IN_FEATURES:,}, the "
            "range of the packed formats"
        )
    if not holds_pattern(name, pattern):
        raise UserError(
            f"layer {layer}: {name} needs an m that divides {NM_BITMAP_CHUNK_WEIGHTS}, the pattern "
            f"is {pattern}; use i2 or nm-enum"
        )


def scale_group(shape: tuple[int, ...], rows: int, in_features: int) -> int | None:
    """Weights of a row that share one of `shape` scales: `in_features` for one a row or a matrix; None
    where a matrix [rows, in_features] has no scales of that shape."""
    if shape == (1,) or shape == (rows, 1):
        return in_features
    return next((g for g in SCALE_GROUPS if shape == (rows, in_features / g)), None)


def row_bytes(name: str, pattern: NMPattern, in_features: int, *, layer: str = "(unnamed)") -> int:
    """Bytes of a packed row of `in_features` weights.

    Raises `UserError` for an unknown format, a pattern or length that it does not hold, and for
    nm-zstd, whose size depends on the weights.
    """
    check_layout(name, pattern, in_features, layer)
    if name == "i2":
        return _planes_row_bytes(in_features, I2_BLOCK_WEIGHTS, i2_plane_bytes)
    if name == "b3":
        return _planes_row_bytes(in_features, B3_BLOCK_WEIGHTS, b3_plane_bytes)
    if name == "nm-bitmap":
        return nm_bitmap_row_bytes(pattern, in_features)
    if name == "nm-enum":
        return nm_enum_row_bytes(pattern, in_features)
    if name == "nm-sign":
        return nm_sign_row_bytes(pattern, in_features)
    raise UserError(f"{name} has no fixed size: it depends on the weights")


def has_fixed_rows(name: str) -> bool:
    """Whether every row takes the same number of bytes, whatever its codes."""
    return name != "nm-zstd"


def auto_format(pattern: NMPattern, *, exact: bool = False) -> str:
    """The smallest format whose decode speed is within 10 % of the fastest one's.

    Smallest for long rows (no padding); the faster of two of equal size. Speeds are those in
    `FORMATS`, measured elsewhere and stored. `exact`: every group has n non-zeros.
    """
    speeds = {format.name: format.decode_speed or 0.0 for format in FORMATS.values()}
    slowest = (1 - SPEED_TOLERANCE) * max(speeds.values())
    quick = [
        name
        for name in FORMATS
        if speeds[name] >= slowest
        and holds_pattern(name, pattern)
        and (exact or not needs_exact(name))
    ]
    long_row = I2_BLOCK_WEIGHTS * B3_BLOCK_WEIGHTS * pattern.m
    return min(quick, key=lambda name: (row_bytes(name, pattern, long_row), -speeds[name]))


def divide_up(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


def i2_plane_bytes(block_weights: int) -> int:
    """Bytes of an i2 block of this many weights, at most 256."""
    return divide_up(divide_up(block_weights, 4), I2_TAIL_ALIGNMENT) * I2_TAIL_ALIGNMENT


def b3_plane_bytes(block_weights: int) -> int:
    """Bytes of a b3 block of this many weights, at most 320."""
    return divide_up(block_weights, 5)


def _planes_row_bytes(in_features: int, block: int, plane_bytes: Callable[[int], int]) -> int:
    blocks, tail = divmod(in_features, block)
    return blocks * plane_bytes(block) + plane_bytes(tail)


def nm_bitmap_sign_bytes(pattern: NMPattern) -> int:
    """Sign bytes of a chunk of 64 weights."""
    coded = coded_pattern(pattern)
    return divide_up(NM_BITMAP_CHUNK_WEIGHTS // coded.m * coded.n, 8)


def nm_bitmap_row_bytes(pattern: NMPattern, in_features: int) -> int:
    """Bytes of a row in nm-bitmap."""
    chunks = divide_up(in_features, NM_BITMAP_CHUNK_WEIGHTS)
    return chunks * (nm_bitmap_sign_bytes(pattern) + 8)


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


def nm_enum_row_bytes(pattern: NMPattern, in_features: int) -> int:
    """Bytes of a row in nm-enum."""
    per_word = nm_enum_groups_per_word(pattern)
    words, tail = divmod(in_features // coded_pattern(pattern).m, per_word)
    return divide_up(words * nm_enum_bits(pattern, per_word) + nm_enum_bits(pattern, tail), 8)


def nm_sign_place_bits(pattern: NMPattern) -> int:
    """Bits of a group's number of places: those of C(m, n) numbers."""
    coded = coded_pattern(pattern)
    return (math.comb(coded.m, coded.n) - 1).bit_length()


def nm_sign_group_bits(pattern: NMPattern) -> int:
    """Bits of a group in nm-sign."""
    return nm_sign_place_bits(pattern) + coded_pattern(pattern).n


def nm_sign_row_bytes(pattern: NMPattern, in_features: int) -> int:
    """Bytes of a row in nm-sign."""
    return divide_up(in_features // coded_pattern(pattern).m * nm_sign_group_bits(pattern), 8)
