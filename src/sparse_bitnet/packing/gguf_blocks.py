# SPDX-License-Identifier: Apache-2.0
"""GGUF blocks of ternary codes, of llama.cpp and the tools built on it.

A block is a run of 32 to 256 codes of one row, with its scale d in float16. We write TQ1_0, TQ2_0,
Q2_0 and Q8_0 with one scale for all blocks of a matrix, so codes survive exactly and the scale to
2**-11; I2_S; and Prism ML's PQ2_0 and PTQ1_0. We read all but Q8_0. Below, t = code + 1.

    type   id  codes  bytes           layout
    TQ1_0  34  256    qs 48, qh 4, d  t of five places as one byte, ceil(256 V / 243) with
                                      V = sum of t_k 3**(4 - k), place k being a power of 3:
                                      n < 160: byte n % 32, place n / 32; n < 240: byte 32 +
                                      (n - 160) % 16, place (n - 160) / 16; above: byte 48 +
                                      (n - 240) % 4, place (n - 240) / 4, the fifth empty
    TQ2_0  35  256    qs 64, d        byte 32 (n / 128) + n % 32, bits 2 ((n % 128) / 32) and up
    Q2_0   42  64     d, qs 16        byte n / 4, bits 2 (n % 4) and up
    Q2_0   42  128    d, qs 32        the same, of another release (told apart by their size)
    STQ1_0 43  256    qs 32, sign 8,  one zero in four: group g = 16 (n / 64) + n % 16 holds n with lane
           or 42      d               n % 64 / 16; its four bits (byte g / 2, low half first) are 4 z +
                                      [2nd non-zero < first] + 2 [3rd], z the lane of the zero, and its
                                      sign (bit g % 8 of byte g / 8) negates the three
    Q8_0   8   32     d, qs 32        byte n, the code itself
    IQ1_BN 134 64     13, a row       t of five codes a byte as in TQ1_0, but the first the least digit;
                      begins with     of 16 codes three bytes and a digit of the last byte
                      float16 d
    IQ2_BN 135 64     16, a row with  byte n % 16, bits 2 (n / 16) and up
                      float32 d
    I2_S   36  128    32, the matrix  byte n % 32, bits 6 - 2 (n / 32) and up; then float32 d and 28 bytes
                      in one piece
    I2_S  as       64     16      byte n % 16, bits 6 - 2 (n / 16) and up: under the same number (gguf.py
          of ARM                  tells them apart)

A row that does not fill the blocks of a type uses the next one of Q2_0, Q8_0 and F16: all hold codes
exactly and the scale to 2**-11. Readers of I2_S do not know Q2_0.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

Encode = Callable[[np.ndarray], np.ndarray]

_POWERS = np.array([81, 27, 9, 3, 1], dtype=np.uint16)[:, None]


@dataclass(frozen=True)
class BlockType:
    """One of ggml's ternary types."""

    name: str
    type_id: int
    """ggml_type, in the header of every tensor."""
    file_type: int
    """llama_ftype, in the metadata of the file."""
    codes: int
    """Codes in a block; rows are a multiple of it."""
    nbytes: int
    """Bytes of a block."""
    encode: Encode | None
    """uint8 t [blocks, codes] -> uint8 [blocks, nbytes - 2]; None where codes are not written."""
    decode: Encode | None = None
    """Inverse of `encode`; None where codes are not read."""
    scale_first: bool = False
    scale_of: str = "block"
    """Unit with a scale of its own: each "block", each "row" (in front), or the "matrix" (behind)."""
    scale_dtype: str = "<f2"

    def tensor_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix whose rows fill blocks."""
        extra = {"block": 0, "row": rows * np.dtype(self.scale_dtype).itemsize, "matrix": 32}
        return rows * columns // self.codes * self.nbytes + extra[self.scale_of]

    def unpack(self, data: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Inverse of `pack`: uint8 [tensor_bytes] -> int8 codes [rows, columns] and scales, float16 or
        float32 [rows, blocks of a row], [rows, 1] or [1, 1]. Codes may come out above 1 where the type
        has such."""
        assert self.decode is not None
        if self.scale_of == "matrix":
            blocks = data[:-32].reshape(-1, self.nbytes)
            scales = data[-32:-28].copy().view(self.scale_dtype).reshape(1, 1)
        elif self.scale_of == "row":
            head = np.dtype(self.scale_dtype).itemsize
            by_row = data.reshape(rows, -1)
            scales = by_row[:, :head].copy().view(self.scale_dtype)
            blocks = by_row[:, head:].reshape(-1, self.nbytes)
        else:
            blocks = data.reshape(-1, self.nbytes)
            at = slice(0, 2) if self.scale_first else slice(-2, None)
            scales = blocks[:, at].copy().view(self.scale_dtype).reshape(rows, -1)
            blocks = blocks[:, 2:] if self.scale_first else blocks[:, :-2]
        codes = np.ascontiguousarray(self.decode(blocks)).reshape(rows, columns).view(np.int8)
        return np.subtract(codes, 1, out=codes), scales

    def pack(self, codes: np.ndarray, weight_scale: float | np.ndarray) -> np.ndarray:
        """int8 codes [rows, in_features] -> uint8 [rows, bytes of a row], or float16. `weight_scale`: one
        for the matrix, or [rows, groups] with groups of whole blocks."""
        rows, columns = codes.shape
        scale = np.atleast_2d(np.asarray(weight_scale, "<f2"))
        if self is F16:
            return codes * np.repeat(scale, columns // scale.shape[1], 1)
        assert self.encode is not None
        encoded = self.encode((codes.reshape(-1, self.codes) + 1).astype(np.uint8))
        if self is I2_S:
            tail = np.zeros(8, "<f4")
            tail[0] = np.asarray(weight_scale).item()
            return np.concatenate([encoded.reshape(-1), tail.view(np.uint8)])
        assert columns % (self.codes * scale.shape[1]) == 0, (codes.shape, self.name)
        blocks = np.repeat(scale, columns // self.codes // scale.shape[1], 1)
        blocks = np.broadcast_to(blocks, (rows, columns // self.codes)).reshape(-1, 1)
        scales = blocks.copy().view(np.uint8)
        parts = (scales, encoded) if self.scale_first else (encoded, scales)
        return np.concatenate(parts, axis=1).reshape(rows, -1)


def _encode_trits(t: np.ndarray, runs: tuple[int, ...]) -> np.ndarray:
    """Pack five codes a byte in parts: of five runs of runs[i] codes each, code k of a run goes into byte
    k of the part. The last part has four runs."""
    parts = np.split(t, np.cumsum([5 * run for run in runs[:-1]]), axis=1)
    by_run = (part.reshape(len(t), -1, run) for part, run in zip(parts, runs, strict=True))
    return np.concatenate([*map(_five_in_a_byte, by_run)], axis=1)


def _decode_trits(blocks: np.ndarray, runs: tuple[int, ...]) -> np.ndarray:
    """Inverse of `_encode_trits`."""
    parts = np.split(blocks, np.cumsum(runs[:-1]), axis=1)
    decoded = map(_five_of_a_byte, parts, [5] * (len(runs) - 1) + [4])
    return np.concatenate([part.reshape(len(blocks), -1) for part in decoded], axis=1)


def _five_in_a_byte(t: np.ndarray) -> np.ndarray:
    value = (t * _POWERS[: t.shape[1]]).sum(axis=1, dtype=np.uint16)
    # A fixed-point fraction: multiplying by 3 modulo 256 brings the next place to the top.
    return ((value * 256 + 242) // 243).astype(np.uint8)


def _five_of_a_byte(packed: np.ndarray, count: int) -> np.ndarray:
    """uint8 [blocks, bytes] -> t [blocks, count, bytes], the greatest digit first."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    fractions = packed[:, None] * powers
    return ((fractions.astype(np.uint16) * 3) >> 8).astype(np.uint8)


def _encode_fields(t: np.ndarray, run: int, step: int = 1) -> np.ndarray:
    """Pack two bits a code: of every four runs of `run` codes the first one goes into the lowest bits of
    as many bytes, with `step` -1 into the highest."""
    t = t.reshape(len(t), -1, 4, run)[:, :, ::step]
    joined = t[:, :, 0] | t[:, :, 1] << 2 | t[:, :, 2] << 4 | t[:, :, 3] << 6
    return joined.reshape(len(t), -1)


def _decode_fields(blocks: np.ndarray, run: int, step: int = 1) -> np.ndarray:
    """Inverse of `_encode_fields`."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[::step, None]
    runs = blocks.reshape(len(blocks), -1, 1, run) >> shifts & 3
    return runs.reshape(len(blocks), -1)


def _trits(*runs: int) -> tuple[Encode, Encode]:
    return partial(_encode_trits, runs=runs), partial(_decode_trits, runs=runs)


def _fields(run: int, step: int = 1) -> tuple[Encode, Encode]:
    return partial(_encode_fields, run=run, step=step), partial(_decode_fields, run=run, step=step)


def _decode_iq1_bn(blocks: np.ndarray) -> np.ndarray:
    digits = _five_of_a_byte(blocks, 5)[:, ::-1]
    fifteen = digits[:, :, :12].swapaxes(1, 2).reshape(-1, 4, 15)
    return np.concatenate([fifteen, digits[:, :4, 12:]], axis=2).reshape(len(blocks), -1)


def _decode_stq1_0(blocks: np.ndarray) -> np.ndarray:
    halves = np.stack([blocks[:, :32] & 15, blocks[:, :32] >> 4], axis=-1).reshape(len(blocks), 64)
    signs = np.unpackbits(blocks[:, 32:], axis=1, bitorder="little")
    # [32, 4]: t of the lanes for each sign (bit 4) and four bits.
    table = np.empty((32, 4), np.uint8)
    for index in range(32):
        others = [1, -1 if index & 1 else 1, -1 if index & 2 else 1]
        others.insert(index >> 2 & 3, 0)
        table[index] = [1 - code if index & 16 else 1 + code for code in others]
    lanes = table[halves | signs << 4].reshape(-1, 4, 16, 4)
    return lanes.swapaxes(2, 3).reshape(len(blocks), 256)


TQ1_0 = BlockType("TQ1_0", 34, 36, 256, 54, *_trits(32, 16, 4))
TQ2_0 = BlockType("TQ2_0", 35, 37, 256, 66, *_fields(32))
Q2_0 = BlockType("Q2_0", 42, 41, 64, 18, *_fields(1), scale_first=True)
Q8_0 = BlockType("Q8_0", 8, 7, 32, 34, lambda t: t - np.uint8(1), scale_first=True)
F16 = BlockType("F16", 1, 1, 1, 2, lambda t: t)
I2_S = BlockType("I2_S", 36, 40, 128, 32, *_fields(32, -1), scale_of="matrix", scale_dtype="<f4")
I2_S_ARM = dataclasses.replace(I2_S, name="I2_S of ARM", decode=_fields(16, -1)[1])
"""I2_S as bitnet.cpp for ARM writes it, under the same number and size."""
PQ2_0 = BlockType("PQ2_0", 142, 141, 128, 34, *_fields(1), scale_first=True)
PTQ1_0 = BlockType("PTQ1_0", 143, 143, 128, 28, *_trits(16, 8, 2))
PRISM_TYPES = (PQ2_0, PTQ1_0)
"""Types read only by programs that know rotated weights; any other would compute nonsense from these."""
BLOCK_TYPES = {block.name: block for block in (TQ1_0, TQ2_0, Q2_0, I2_S, *PRISM_TYPES)}

READ_TYPES = (
    TQ1_0,
    TQ2_0,
    Q2_0,
    dataclasses.replace(Q2_0, codes=128, nbytes=34),
    *PRISM_TYPES,
    BlockType("STQ1_0", 42, 0, 256, 42, None, _decode_stq1_0),
    BlockType("STQ1_0", 43, 0, 256, 42, None, _decode_stq1_0),
    I2_S,
    BlockType("IQ1_BN", 134, 0, 64, 13, None, _decode_iq1_bn, scale_of="row"),
    BlockType("IQ2_BN", 135, 0, 64, 16, *_fields(16), scale_of="row", scale_dtype="<f4"),
)
"""Types whose codes are read; releases gave 42 to three of them, which differ in their size."""


def block_for(columns: int, wanted: BlockType) -> BlockType:
    """Return the type that stores rows of this many codes: `wanted`, or the next one that they fill."""
    types = (wanted, Q8_0, F16) if wanted is I2_S else (wanted, Q2_0, Q8_0, F16)
    return next(block for block in types if columns % block.codes == 0)
