# SPDX-License-Identifier: Apache-2.0
"""The packed formats: names, constants and sizes, which csrc/packed_format.h specifies, and the metadata
of a packed checkpoint, in its tensor file and in its config.json."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.pattern import NMPattern

VERSION = 1
VERSIONS = (VERSION, 2)
"""Versions of a file: the second has rotated weights, and releases that know only the first refuse it."""
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

FORMATS = ("i2", "b3", "nm-enum", "nm-sign")
"""Names of the packed formats."""

AUTO_FORMAT = "b3"
"""The smallest format that loads in at most 1.5x the time of i2: b3 takes 1.4 times, nm-sign 2.0 and
nm-enum 3.3. These are the largest ratios of processor time on one thread of an EPYC with AVX-512, for
weights that run as i2 and as lookup: half of Qwen2.5-0.5B's blocks (179 M weights) in 6:8 and in binary
3:4, fastest of 7 rounds."""

QUANT_METHOD = "sparse_bitnet_packed"

EMBEDDINGS = ("bf16", "int8", "float32", "ternary")
"""Storage of embedding and output head: int8 with a float32 scale for each row; ternary as rows of i2
with a scale for every group of weights (`formats.SCALE_GROUPS`). If only one of the two is ternary, the
other is stored in bfloat16."""


def coded_pattern(pattern: NMPattern) -> NMPattern:
    """Return the pattern whose groups the formats code: 1:1 for every dense one."""
    return NMPattern(1, 1) if pattern.is_dense else pattern


def needs_exact(name: str) -> bool:
    """Whether a format requires exactly n non-zeros in every group."""
    return name == "nm-sign"


def scale_group(shape: tuple[int, ...], rows: int, in_features: int) -> int | None:
    """Return how many weights of a row share one of the `shape` scales: `in_features` for one scale per
    row or matrix; None if a matrix [rows, in_features] has no scales of that shape."""
    if shape == (1,) or shape == (rows, 1):
        return in_features
    return next((g for g in SCALE_GROUPS if shape == (rows, in_features / g)), None)


def row_bytes(name: str, pattern: NMPattern, in_features: int, *, layer: str = "(unnamed)") -> int:
    """Return the bytes of a packed row of `in_features` weights.

    Raises `UserError` for an unknown format and, naming the layer, for a pattern or length that it does
    not support.
    """
    if name not in FORMATS:
        raise UserError(f"packed format {name!r} is unknown: choose one of {', '.join(FORMATS)}")
    pattern.check_divides(in_features, layer)
    if not 1 <= in_features <= MAX_IN_FEATURES:
        raise UserError(
            f"layer {layer}: in_features {in_features:,} is not within 1..{MAX_IN_FEATURES:,}, the "
            "range of the packed formats"
        )
    if name in PLANES:
        block, plane_bytes = PLANES[name]
        blocks, tail = divmod(in_features, block)
        return blocks * plane_bytes(block) + plane_bytes(tail)
    groups = in_features // coded_pattern(pattern).m
    if name == "nm-sign":
        return -(-groups * nm_sign_group_bits(pattern) // 8)
    per_word = nm_enum_groups_per_word(pattern)
    words, tail = divmod(groups, per_word)
    bits = words * nm_enum_bits(pattern, per_word) + nm_enum_bits(pattern, tail)
    return -(-bits // 8)


PLANES: dict[str, tuple[int, Callable[[int], int]]] = {
    "i2": (I2_BLOCK_WEIGHTS, lambda n: -(-n // (4 * I2_TAIL_ALIGNMENT)) * I2_TAIL_ALIGNMENT),
    "b3": (B3_BLOCK_WEIGHTS, lambda n: -(-n // 5)),
}
"""Weights of a whole block, and the bytes of a block of n weights, of the formats made of planes."""


def nm_enum_states(weights: int, nonzeros: int) -> int:
    """A(weights, nonzeros): ternary vectors of this many weights, at most this many not zero."""
    return sum(math.comb(weights, k) << k for k in range(min(weights, nonzeros) + 1))


def nm_enum_bits(pattern: NMPattern, groups: int) -> int:
    """Return the bits of a word of `groups` groups; more than 64 if they do not fit a word."""
    coded = coded_pattern(pattern)
    return (nm_enum_states(coded.m, coded.n) ** groups - 1).bit_length()


@cache
def nm_enum_groups_per_word(pattern: NMPattern) -> int:
    """Return the smallest number of groups per word that takes the fewest bits per group, within 64."""
    counts = range(1, NM_ENUM_WORD_BITS + 1)
    fitting = [count for count in counts if nm_enum_bits(pattern, count) <= NM_ENUM_WORD_BITS]
    return min(fitting, key=lambda count: nm_enum_bits(pattern, count) / count)


def nm_sign_place_bits(pattern: NMPattern) -> int:
    """Bits of a group's number of places: those of C(m, n) numbers."""
    coded = coded_pattern(pattern)
    return (math.comb(coded.m, coded.n) - 1).bit_length()


def nm_sign_group_bits(pattern: NMPattern) -> int:
    """Bits of a group in nm-sign."""
    return nm_sign_place_bits(pattern) + coded_pattern(pattern).n


@dataclass(frozen=True, kw_only=True)
class PackedMetadata:
    """Format, pattern and layers of a packed checkpoint."""

    packed_format: str
    """A name in `formats.FORMATS`."""
    format: SparseBitConfig
    """Training format of the layers; its pattern is that of the packed codes."""
    embeddings: str
    """One of `EMBEDDINGS`."""
    layers: dict[str, tuple[int, int]]
    """Packed layers: full name -> (out_features, in_features)."""
    rotation: Rotation | None = None
    """Rotation of the layers' weights; None if they are not rotated."""

    @property
    def pattern(self) -> NMPattern:
        """Pattern of the packed codes."""
        return self.format.pattern

    @property
    def weights(self) -> int:
        """Number of ternary weights."""
        return sum(rows * columns for rows, columns in self.layers.values())

    def to_json(self) -> dict[str, Any]:
        """Return the metadata as the tensor file stores it."""
        values = {
            "version": VERSIONS[self.rotation is not None],
            "packed_format": self.packed_format,
            "pattern": str(self.pattern),
            "format": self.format.to_dict(),
            "embeddings": self.embeddings,
            "layers": {name: list(shape) for name, shape in self.layers.items()},
        }
        return values if self.rotation is None else {**values, "rotation": self.rotation.to_json()}

    def config_entry(self) -> dict[str, Any]:
        """Return the `quantization_config` of config.json."""
        values = {"quant_method": QUANT_METHOD, **self.to_json()}
        return {key: value for key, value in values.items() if key not in ("layers", "rotation")}

    def check_config_entry(self, entry: dict[str, Any], where: str) -> None:
        """Raise `UserError` if a `quantization_config` contradicts the tensor file."""
        own = self.config_entry()
        for key in sorted(own.keys() | entry.keys()):
            if entry.get(key) != own.get(key):
                raise UserError(
                    f"{where}: its {key} is {own.get(key)!r}, config.json says {entry.get(key)!r}; "
                    "they are of different checkpoints"
                )

    @classmethod
    def from_json(cls, values: dict[str, Any], where: str) -> "PackedMetadata":
        """Inverse of `to_json`. Raises `UserError` for another version or anything unreadable."""
        version = values.get("version")
        if version not in VERSIONS or isinstance(version, bool):
            raise UserError(
                f"{where}: packed format version {version!r} is not readable by this release (it reads "
                f"up to {VERSIONS[1]}); upgrade sparse-bitnet or pack the model again"
            )
        try:
            format = SparseBitConfig.from_dict(values["format"])
            layers = {name: (rows, columns) for name, (rows, columns) in values["layers"].items()}
            is_rotated = "rotation" in values
            if version != VERSIONS[is_rotated]:
                raise UserError("its version is not that of a file with or without rotated weights")
            rotation = Rotation.from_json(values["rotation"], layers) if is_rotated else None
            if values["packed_format"] not in FORMATS or values["embeddings"] not in EMBEDDINGS:
                raise UserError("an unknown packed format or embedding type")
            if values["pattern"] != str(format.pattern) or format.weight != "ternary":
                raise UserError("its pattern and its layers' format contradict each other")
            sizes = [size for shape in layers.values() for size in shape]
            if not all(type(size) is int and size > 0 for size in sizes):
                raise UserError("a layer's shape is not two positive sizes")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            incomplete = f"its metadata is incomplete ({error!r})"
            reason = error if isinstance(error, UserError) else incomplete
            raise UserError(f"{where}: {reason}") from None
        return cls(
            packed_format=values["packed_format"],
            format=format,
            embeddings=values["embeddings"],
            layers=layers,
            rotation=rotation,
        )
