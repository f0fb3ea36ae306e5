# SPDX-License-Identifier: Apache-2.0
"""GGUF's ternary blocks against gguf-py, and against their description."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.packing.gguf_blocks import Q2_0, READ_TYPES, TQ1_0, TQ2_0, BlockType

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
    """Decode what ggml's dequantize_row_q2_0 decodes: d, then four codes a byte, 0..3 for -1..2."""
    blocks = packed.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    fields = [(blocks[:, 2:] >> 2 * place) & 3 for place in range(4)]
    codes = np.stack(fields, axis=-1).reshape(len(blocks), 64).astype(np.int8) - 1
    return (codes * d).reshape(len(packed), -1)


@given(
    rows=st.integers(1, 4), blocks=st.integers(1, 5), seed=st.integers(0, 2**32 - 1), scale=scales
)
def test_q2_0_keeps_codes_and_the_float16_scale(
    random_codes, rows: int, blocks: int, seed: int, scale: float
) -> None:
    codes = random_codes(rows, 64 * blocks, seed).numpy()
    packed = Q2_0.pack(codes, scale)
    assert packed.shape == (rows, 18 * blocks)
    assert np.array_equal(unpack_q2_0(packed), codes * np.float32(np.float16(scale)))


@pytest.mark.parametrize(
    "block", [TQ1_0, TQ2_0, Q2_0, *READ_TYPES[3:6]], ids=lambda b: f"{b.name}-{b.codes}"
)
@given(
    rows=st.integers(1, 3), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), scale=scales
)
def test_unpacking_inverts_packing(random_codes, block: BlockType, rows, blocks, seed, scale):
    codes = random_codes(rows, block.codes * blocks, seed).numpy()
    packed = block.pack(codes, scale)
    assert packed.size == block.tensor_bytes(*codes.shape)
    read, read_scales = block.unpack(packed.reshape(-1), *codes.shape)
    assert np.array_equal(read, codes)
    assert read_scales.shape == (rows, blocks)
    assert (read_scales == np.float16(scale)).all()


def named(name: str) -> BlockType:
    return next(block for block in READ_TYPES if block.name == name)


def test_ptq1_0_of_another_writer_is_read(random_codes) -> None:
    """Bytes hold five codes of a part as digits of base 3, the first as the highest."""
    t, data = random_codes(2, 256, 3).numpy() + 1, b""
    for block in t.reshape(-1, 128).tolist():
        for start, step, count in ((0, 16, 5), (80, 8, 5), (120, 2, 4)):
            for j in range(step):
                digits = block[start + j : start + step * count : step]
                value = sum(digit * 3 ** (4 - k) for k, digit in enumerate(digits))
                data += bytes([(256 * value + 242) // 243])
        data += np.array([0.5], "<f2").tobytes()
    codes, scales = named("PTQ1_0").unpack(np.frombuffer(data, np.uint8), 2, 256)
    assert np.array_equal(codes, t - 1)
    assert (scales == 0.5).all()


def test_i2_s_keeps_codes_and_scale(random_codes) -> None:
    """128 codes to 32 bytes, the first in the highest bits, rows without a gap; one scale behind all."""
    t = random_codes(3, 256, 1).numpy().view(np.uint8) + np.uint8(1)
    quarters = t.reshape(-1, 4, 32)
    data = quarters[:, 0] << 6 | quarters[:, 1] << 4 | quarters[:, 2] << 2 | quarters[:, 3]
    tail = np.zeros(32, np.uint8)
    tail[:4] = np.array([0.75], "<f4").view(np.uint8)
    data = np.concatenate([data.reshape(-1), tail])
    codes, scale = named("I2_S").unpack(data, 3, 256)
    assert np.array_equal(named("I2_S").pack(codes, scale), data)
    assert np.array_equal(codes, t.view(np.int8) - 1)
    assert scale.tolist() == [[0.75]]


def test_iq2_bn_and_iq1_bn_are_read(random_codes) -> None:
    """Byte by byte, as their dequantisers do: a row's scale, then blocks of 64."""
    t = random_codes(2, 128, 2).numpy() + 1
    rows2, rows1 = [], []
    for row, scale in zip(t, (0.5, 3.0), strict=True):
        two, one = np.array([scale], "<f4").tobytes(), np.array([scale], "<f2").tobytes()
        for block in row.reshape(-1, 64).tolist():
            two += bytes(sum(block[j + 16 * k] << 2 * k for k in range(4)) for j in range(16))
            extra = 0
            for part in range(4):
                digits = block[16 * part : 16 * part + 16]
                for first in (0, 5, 10):
                    value = sum(digits[first + k] * 3**k for k in range(5))
                    one += bytes([-(-256 * value // 243)])
                extra += digits[15] * 3**part
            one += bytes([-(-256 * extra // 243)])
        rows2.append(two)
        rows1.append(one)
    for name, rows in (("IQ2_BN", rows2), ("IQ1_BN", rows1)):
        data = np.frombuffer(b"".join(rows), np.uint8)
        assert data.size == named(name).tensor_bytes(2, 128)
        codes, scale = named(name).unpack(data, 2, 128)
        assert np.array_equal(codes, t - 1), name
        assert scale.tolist() == [[0.5], [3.0]]


def test_stq1_0_of_another_writer_is_read() -> None:
    """Whole blocks as its quantiser lays them out (ggml-org/llama.cpp pull request 22836)."""
    random = np.random.default_rng(0)
    weight = random.choice(np.array([-1, 1], np.int8), (2, 512))
    data, scales = np.zeros((4, 42), np.uint8), random.uniform(0.01, 1, 4).astype("<f2")
    for block, start in enumerate(range(0, 1024, 256)):
        for group in range(64):
            lanes = start + 64 * (group // 16) + group % 16 + 16 * np.arange(4)
            row, columns = lanes[0] // 512, lanes % 512
            weight[row, columns[zero := random.integers(4)]] = 0
            first, second, third = (int(w) for w in weight[row, columns] if w)
            slot = 4 * zero + (second != first) + 2 * (third != first)
            data[block, group // 2] |= slot << 4 * (group % 2)
            data[block, 32 + group // 8] |= (first < 0) << group % 8
        data[block, 40:] = scales[block : block + 1].view(np.uint8)
    for type_id in (42, 43):
        (block,) = (b for b in READ_TYPES if (b.name, b.type_id) == ("STQ1_0", type_id))
        codes, stored_scales = block.unpack(data.reshape(-1), 2, 512)
        assert np.array_equal(codes, weight)
        assert np.array_equal(stored_scales.reshape(-1), scales)
