"""Ternary codes as GGUF blocks: TQ1_0, TQ2_0, Q2_0 and Q8_0 of llama.cpp.

A block is a run of 32 to 256 codes of one row, with its scale in float16. All blocks of a matrix get
the same scale here, so codes survive exactly and the scale to 2**-11. t = code + 1 below.

    type   id  codes  bytes           layout
    TQ1_0  34  256    qs 48, qh 4, d  t of five places as one byte, ceil(256 V / 243) with
                                      V = sum of t_k 3**(4 - k), place k being a power of 3:
                                      n < 160: byte n % 32, place n / 32; n < 240: byte 32 +
                                      (n - 160) % 16, place (n - 160) / 16; above: byte 48 +
                                      (n - 240) % 4, place (n - 240) / 4, the fifth empty
    TQ2_0  35  256    qs 64, d        byte 32 (n / 128) + n % 32, bits 2 ((n % 128) / 32) and up
    Q2_0   42  64     d, qs 16        byte n / 4, bits 2 (n % 4) and up
    Q8_0   8   32     d, qs 32        byte n, the code itself

A row that does not fill the blocks of a type takes the next one of Q2_0, Q8_0 and F16: all hold codes
exactly and the scale to 2**-11.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

SCALE_BYTES = 2
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
    encode: Callable[[np.ndarray], np.ndarray]
    """uint8 t [blocks, codes] -> uint8 [blocks, nbytes - 2]."""
    scale_first: bool = False

    def pack(self, codes: np.ndarray, weight_scale: float) -> np.ndarray:
        """int8 codes [rows, in_features] -> uint8 [rows, bytes of a row], or float16."""
        rows, columns = codes.shape
        if self is F16:
            return codes * np.float16(weight_scale)
        assert columns % self.codes == 0, (codes.shape, self.name)
        encoded = self.encode((codes.reshape(-1, self.codes) + 1).astype(np.uint8))
        scale = np.frombuffer(np.array(weight_scale, dtype="<f2").tobytes(), dtype=np.uint8)
        scales = np.broadcast_to(scale, (len(encoded), SCALE_BYTES))
        parts = (scales, encoded) if self.scale_first else (encoded, scales)
        return np.concatenate(parts, axis=1).reshape(rows, -1)


def _encode_tq1_0(t: np.ndarray) -> np.ndarray:
    parts = (
        _five_in_a_byte(t[:, :160].reshape(-1, 5, 32)),
        _five_in_a_byte(t[:, 160:240].reshape(-1, 5, 16)),
        _five_in_a_byte(t[:, 240:].reshape(-1, 4, 4)),
    )
    return np.concatenate(parts, axis=1)


def _five_in_a_byte(t: np.ndarray) -> np.ndarray:
    value = (t * _POWERS[: t.shape[1]]).sum(axis=1, dtype=np.uint16)
    # A fixed-point fraction: multiplying by 3 modulo 256 brings the next place to the top.
    return ((value * 256 + 242) // 243).astype(np.uint8)


def _encode_tq2_0(t: np.ndarray) -> np.ndarray:
    return _four_in_a_byte(t.reshape(-1, 2, 4, 32).swapaxes(1, 2)).reshape(len(t), -1)


def _encode_q2_0(t: np.ndarray) -> np.ndarray:
    return _four_in_a_byte(t.reshape(-1, 16, 4).transpose(0, 2, 1))


def _four_in_a_byte(t: np.ndarray) -> np.ndarray:
    return t[:, 0] | t[:, 1] << 2 | t[:, 2] << 4 | t[:, 3] << 6


TQ1_0 = BlockType("TQ1_0", 34, 36, 256, 54, _encode_tq1_0)
TQ2_0 = BlockType("TQ2_0", 35, 37, 256, 66, _encode_tq2_0)
Q2_0 = BlockType("Q2_0", 42, 41, 64, 18, _encode_q2_0, scale_first=True)
Q8_0 = BlockType("Q8_0", 8, 7, 32, 34, lambda t: t - np.uint8(1), scale_first=True)
F16 = BlockType("F16", 1, 1, 1, 2, lambda t: t)
BLOCK_TYPES = {block.name: block for block in (TQ1_0, TQ2_0, Q2_0)}


def block_for(columns: int, wanted: BlockType) -> BlockType:
    """The type in which rows of so many codes are stored where `wanted` is the choice."""
    types = (wanted, Q2_0, Q8_0, F16)
    return next(block for block in types if columns % block.codes == 0)
