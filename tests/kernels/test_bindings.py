# SPDX-License-Identifier: Apache-2.0
"""The extension refuses sizes that do not fit before it allocates, divides or multiplies with them."""

import numpy as np
import pytest
from test_thread_pool import assert_one_caller_at_a_time

from decoder_in_memory import DecoderInMemory, random_model
from sparse_bitnet import _cpu

HUGE = (2**63 - 1, 2**62, 2**53, -1, -(2**63))


@pytest.mark.parametrize("size", HUGE)
def test_sizes_of_ops_kernels_are_checked(size: int) -> None:
    kernels, float32 = _cpu.Kernels.choose(""), _cpu.Dtype.float32
    for call in (
        lambda: kernels.select_ternary(0, float32, 1.0, size, 2, 4, 0, 0, 1),
        lambda: kernels.absmean(0, float32, size, 1),
        lambda: kernels.quantize_int8(0, float32, size, 8, 0, 0, 1),
        lambda: kernels.quantize_int8(0, float32, 8, size, 0, 0, 1),
        lambda: kernels.quantize_groups(0, float32, size, 8, 0, 0, 1),
        lambda: kernels.quantize_groups(0, float32, 8, min(size, 0), 0, 0, 1),
    ):
        with pytest.raises(ValueError, match="out of range"):
            call()


@pytest.mark.parametrize(("n", "m"), [(0, 4), (5, 4), (1, 0), (1, 33), (1, -4)])
def test_impossible_patterns_are_refused(n: int, m: int) -> None:
    with pytest.raises(ValueError, match="pattern"):
        _cpu.Kernels.choose("").select_ternary(0, _cpu.Dtype.float32, 1.0, 8, n, m, 0, 0, 1)
    with pytest.raises(ValueError, match="pattern"):
        _cpu.bytes_per_row(_cpu.WeightFormat.lookup, n, m, 64)


@pytest.mark.parametrize("size", [*HUGE, 0])
def test_sizes_of_matrix_kernels_are_checked(size: int) -> None:
    kernels, pool = _cpu.Kernels.choose(""), _cpu.ThreadPool(1)
    with pytest.raises(ValueError, match="columns"):
        _cpu.bytes_per_row(_cpu.WeightFormat.i2, 1, 1, size)
    good = {"rows": 8, "columns": 64, "row_stride": 64}
    for name in good:
        with pytest.raises(ValueError, match=name):
            _cpu.Matrix(_cpu.WeightFormat.i2, 1, 1, address=64, **good | {name: size})
        with pytest.raises(ValueError, match=name):
            _cpu.Table(_cpu.TableType.int8, address=64, scales=64, **good | {name: size})
    matrix = _cpu.Matrix(_cpu.WeightFormat.i2, 1, 1, 8, 64, 64, 64)
    with pytest.raises(ValueError, match="y_stride"):
        _cpu.Product(matrix, 0, 0, size)
    with pytest.raises(ValueError, match="columns"):
        _cpu.Activations(1, size, 0, 0, 0, 0, 0)
    if size:
        with pytest.raises(ValueError, match="tokens"):
            _cpu.Activations(size, 64, 0, 0, 0, 0, 0)
    activations = _cpu.Activations(1, 128, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="other columns"):
        kernels.matmul(pool, activations, [_cpu.Product(matrix, 0, 0, 8)])


def test_int8_rows_whose_sums_would_overflow_are_refused() -> None:
    columns = (1 << 17) + 64
    size = {"rows": 1, "columns": columns, "row_stride": columns, "address": 64, "scales": 64}
    with pytest.raises(ValueError, match=r"int8 takes at most 2\^17 columns"):
        _cpu.Matrix(_cpu.WeightFormat.int8, 1, 1, **size)
    builder = _cpu.ModelBuilder(columns, 64, 1, 1, 64, 1, 0, _cpu.Activation.silu, 64)
    builder.set_embedding(_cpu.Table(_cpu.TableType.int8, **size))
    with pytest.raises(ValueError, match=r"head of int8: hidden is larger than 2\^17"):
        builder.set_head(_cpu.Table(_cpu.TableType.int8, **size))


@pytest.mark.parametrize("threads", [0, -1, 1025, 2**31 - 1])
def test_impossible_thread_counts_are_refused(threads: int) -> None:
    with pytest.raises(ValueError, match="threads"):
        _cpu.ThreadPool(threads)


def test_offsets_beyond_any_file_are_refused() -> None:
    place = {"descriptor": 0, "offset": 2**63 - 1}
    with pytest.raises(ValueError, match="neither an address nor a file"):
        _cpu.StoredMatrix(_cpu.StoredFormat.i2, 1, 1, 1, 256, 64, **place)
    with pytest.raises(ValueError, match="neither an address nor a file"):
        _cpu.StoredTable(_cpu.TableType.int8, 1, 256, 256, **place)


def test_a_decoder_takes_one_caller_at_a_time() -> None:
    """Without that: a crash, or logits of another thread's tokens."""
    model, tokens = random_model(max_position_embeddings=2048), np.zeros(1500, np.int32)
    memory = DecoderInMemory(model, threads=2, cache_tokens=2048)  # it owns what the decoder reads
    decoder, sequence = memory.decoder, memory.decoder.open()

    def busy() -> None:
        decoder.truncate(sequence, 0)
        decoder.forward([(sequence, tokens.ctypes.data, len(tokens))], _cpu.Logits.none, 0)

    message = "another thread is using the engine"
    assert_one_caller_at_a_time(busy, lambda: decoder.length(sequence), message)
    decoder.close(sequence)


def test_a_closed_decoder_refuses_calls() -> None:
    decoder = DecoderInMemory(random_model()).decoder
    decoder.shut()
    decoder.shut()
    with pytest.raises(RuntimeError, match="closed"):
        decoder.open()
