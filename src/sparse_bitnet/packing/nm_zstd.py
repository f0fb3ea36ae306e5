# SPDX-License-Identifier: Apache-2.0
"""nm-zstd: the non-zero bitmap through zstd, the signs as they are (csrc/packed_format.h).

Signs are as good as random, and positions within a group nearly so; what compresses is how many of a
group's weights are zero, and a zstd frame over whole bitmap bytes catches that (Huffman codes).
"""

import numpy as np

from sparse_bitnet.packing.bitmaps import (
    Bytes,
    DamagedBytes,
    by_slices,
    chunk_counts,
    codes_of,
    fits_pattern,
    gather_signs,
    in_chunks,
    negative_bitmap,
    nonzero_bitmap,
    spread_signs,
)
from sparse_bitnet.packing.formats import divide_up
from sparse_bitnet.pattern import NMPattern

_LEVEL = 1
"""There are no repetitions to search for: higher levels give no fewer bytes."""

_LENGTH_BYTES = 8

_LARGEST_RATIO = 16
"""Bytes of bitmap to a byte in the file, so that a small file takes little memory; trained weights
compress to a third at most. A frame of fewer bytes is filled up."""

_SKIPPED = b"\x50\x2a\x4d\x18"
"""Begins a zstd frame that readers skip; its length follows."""


def pack_matrix(codes: np.ndarray) -> Bytes:
    """int8 [rows, in_features] -> [bytes]."""
    import zstandard

    rows, in_features = codes.shape
    bitmap = np.empty((rows, divide_up(in_features, 8)), np.uint8)

    def gather_part(part: slice) -> tuple[np.ndarray, np.ndarray]:
        bitmap[part] = nonzero_bitmap(codes[part])
        return gather_signs(in_chunks(bitmap[part]), in_chunks(negative_bitmap(codes[part])))

    signs, counts = zip(*by_slices(rows, in_features, gather_part), strict=True)
    frame = zstandard.ZstdCompressor(level=_LEVEL).compress(bitmap.data)
    if (lacking := divide_up(bitmap.size, _LARGEST_RATIO) - len(frame)) > 0:
        frame += _SKIPPED + lacking.to_bytes(4, "little") + bytes(lacking)
    header = len(frame).to_bytes(_LENGTH_BYTES, "little") + frame
    return np.concatenate(
        [np.frombuffer(header, np.uint8), _join_bits(np.concatenate(signs), np.concatenate(counts))]
    )


def unpack_matrix(packed: Bytes, pattern: NMPattern, shape: tuple[int, int]) -> np.ndarray:
    """[bytes] -> int8 [rows, in_features].

    Raises `DamagedBytes` for bytes no matrix has. Allocates a bounded multiple of the compressed bytes.
    """
    rows, in_features = shape
    length = int.from_bytes(packed[:_LENGTH_BYTES].tobytes(), "little")
    row_bytes = divide_up(in_features, 8)
    if len(packed) < _LENGTH_BYTES + length or rows * row_bytes > length * _LARGEST_RATIO:
        raise DamagedBytes("it is too short for its shape")
    bitmap = _decompress(packed[_LENGTH_BYTES : _LENGTH_BYTES + length], rows * row_bytes)
    bitmap = bitmap.reshape(rows, row_bytes)
    if (bitmap[:, -1] >> ((in_features - 1) % 8) >> 1).any():
        raise DamagedBytes("the padding of a row is not zero codes")
    if not all(by_slices(*shape, lambda part: fits_pattern(bitmap[part], pattern, in_features))):
        raise DamagedBytes(f"a group has more non-zeros than the pattern {pattern} allows")
    return _with_signs(bitmap, packed[_LENGTH_BYTES + length :], in_features)


def _with_signs(bitmap: Bytes, signs: Bytes, in_features: int) -> np.ndarray:
    """Bitmap [rows, bytes] and the bits of its set bits' signs -> int8 [rows, in_features]."""
    counts = chunk_counts(in_chunks(bitmap))
    start = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts.astype(np.int64), out=start[1:])
    if len(signs) != divide_up(int(start[-1]), 8):
        raise DamagedBytes(f"it has {len(signs):,} bytes of signs for {start[-1]:,} non-zeros")
    if start[-1] % 8 and signs[-1] >> (start[-1] % 8):
        raise DamagedBytes("there are sign bits without a non-zero")
    words = np.zeros(len(signs) // 8 + 2, "<u8")
    words.view(np.uint8)[: len(signs)] = signs
    first, shift = start[:-1] >> 6, (start[:-1] & 63).astype(np.uint64)
    chunk_signs = words[first] >> shift
    # A shift by 64 is undefined: two shifts for the part in the next word.
    chunk_signs |= words[first + 1] << np.uint64(1) << (np.uint64(63) - shift)
    chunk_signs = chunk_signs.reshape(counts.shape)
    codes = np.empty((len(bitmap), in_features), np.int8)

    def decode_part(part: slice) -> None:
        chunked = in_chunks(bitmap[part])
        negative, _ = spread_signs(chunked, chunk_signs[part])
        codes[part] = codes_of(bitmap[part], negative.reshape(len(chunked), -1), in_features)

    by_slices(*codes.shape, decode_part)
    return codes


def _join_bits(word: np.ndarray, count: np.ndarray) -> Bytes:
    """The low `count` bits of every uint64 word, one after another; zeros fill the last byte."""
    word, count = word.ravel(), count.ravel()
    end = np.cumsum(count, dtype=np.int64)
    start = end - count
    first, shift = start >> 6, (start & 63).astype(np.uint64)
    bits = int(end[-1])
    joined = np.zeros(bits // 64 + 2, np.uint64)
    np.bitwise_or.at(joined, first, word << shift)
    np.bitwise_or.at(joined, first + 1, word >> np.uint64(1) >> (np.uint64(63) - shift))
    return joined.astype("<u8").view(np.uint8)[: divide_up(bits, 8)]


def _decompress(frame: Bytes, size: int) -> Bytes:
    import zstandard

    data = np.ascontiguousarray(frame).data
    try:
        if zstandard.frame_content_size(data) != size:  # before it is allocated
            raise DamagedBytes("its zstd frame is not of its shape")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint8)
    except zstandard.ZstdError as error:
        raise DamagedBytes("its zstd frame is damaged") from error
