"""GGUF's ternary blocks against gguf-py, and against their description."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.export.gguf_blocks import BLOCK_TYPES, Q2_0, TQ1_0, TQ2_0, BlockType

scales = st.floats(2**-14, 100, width=32)


@pytest.mark.parametrize("block", [TQ1_0, TQ2_0], ids=lambda block: block.name)
@given(
    rows=st.integers(1, 4), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), scale=scales
)
def test_gguf_py_reads_the_codes_exactly(
    random_codes, block: BlockType, rows: int, blocks: int, seed: int, scale: float
) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install gguf")
    codes = random_codes(rows, 256 * blocks, seed).numpy()
    packed = block.pack(codes, scale)
    assert packed.shape == (rows, blocks * block.nbytes)
    values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(block.type_id))
    assert np.array_equal(values, codes * np.float32(np.float16(scale)))
    assert abs(np.float32(np.float16(scale)) - scale) <= 2**-11 * scale


def unpack_q2_0(packed: np.ndarray) -> np.ndarray:
    """As ggml's dequantize_row_q2_0 does: d, then four codes a byte, 0..3 for -1..2."""
    blocks = packed.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    fields = [(blocks[:, 2:] >> 2 * place) & 3 for place in range(4)]
    codes = np.stack(fields, axis=-1).reshape(len(blocks), 64).astype(np.int8) - 1
    return (codes * d).reshape(len(packed), -1)


@given(
    rows=st.integers(1, 4), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), scale=scales
)
def test_q2_0(random_codes, rows: int, blocks: int, seed: int, scale: float) -> None:
    codes = random_codes(rows, 64 * blocks, seed).numpy()
    packed = Q2_0.pack(codes, scale)
    assert packed.shape == (rows, 18 * blocks)
    assert np.array_equal(unpack_q2_0(packed), codes * np.float32(np.float16(scale)))


def test_positions_of_tq1_0() -> None:
    """One code at a time moves exactly the byte that the table of the format names."""
    zeros = np.zeros((1, 256), np.int8)
    empty = TQ1_0.pack(zeros, 1.0)[0]
    for n in range(256):
        codes = zeros.copy()
        codes[0, n] = 1
        byte = n % 32 if n < 160 else 32 + (n - 160) % 16 if n < 240 else 48 + (n - 240) % 4
        assert np.flatnonzero(TQ1_0.pack(codes, 1.0)[0] != empty).tolist() == [byte]


@pytest.mark.parametrize("block", BLOCK_TYPES.values(), ids=list(BLOCK_TYPES))
def test_all_zero_blocks_keep_the_scale(block: BlockType) -> None:
    packed = block.pack(np.zeros((2, block.codes), np.int8), 0.5)
    at = slice(0, 2) if block.scale_first else slice(-2, None)
    assert packed[:, at].copy().view("<f2").ravel().tolist() == [0.5, 0.5]
