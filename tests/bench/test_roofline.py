# SPDX-License-Identifier: Apache-2.0
"""Bytes and operations of a model, and the machine's roofline."""

import math
from pathlib import Path

import pytest

from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.bench.roofline import RooflineMeter, work_of
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.packed_sizes import model_size
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS


@pytest.mark.parametrize("name", ["i2", "b3", "nm-bitmap"])
def test_weights_cost_what_the_packed_format_takes(tiny_folder: Path, name: str) -> None:
    work = work_of(tiny_folder, name, "auto", "float16")
    size = model_size("tiny", NMPattern(6, 8), name, "int8")
    assert work.weight_bytes == size.weight_bytes
    assert work.block_weights == PRESETS["tiny"].block_weights
    assert work.prefill_ops(10) == 20 * PRESETS["tiny"].block_weights


def test_scales_of_groups_are_read_with_the_weights(tmp_path: Path) -> None:
    engine = pytest.importorskip("sparse_bitnet.engine.engine")
    read, kept = [], []
    for group in (0, 32):
        write_random_model(tmp_path / f"{group}", "tiny", NMPattern(6, 8), scale_group=group)
        read.append(work_of(tmp_path / f"{group}", "i2", "int8", "float16").weight_bytes)
        loaded = engine.Engine.load(tmp_path / f"{group}", weight_format="i2", threads=1)
        kept.append(loaded.weight_bytes)
        loaded.close()
    scales = 2 * PRESETS["tiny"].block_weights // 32
    assert read[1] - read[0] == scales - 4 * 7 * PRESETS["tiny"].num_hidden_layers
    assert kept[1] - kept[0] == scales


def test_stored_is_what_lies_in_the_file(tiny_folder: Path) -> None:
    stored = work_of(tiny_folder, "stored", "stored", "float16")
    assert stored == work_of(tiny_folder, "i2", "int8", "float16")


@pytest.mark.parametrize(
    ("embeddings", "head", "bytes_a_row"),
    [
        ("int8", "auto", 256 + 4),
        ("int8", "stored", 256 + 4),
        ("bf16", "auto", 256 + 4),
        ("bf16", "stored", 512),
        ("bf16", "int8", 256 + 4),
        ("int8", "int4", 128 + 16),
        ("ternary", "auto", 64 + 2 * 2),
    ],
)
def test_the_head_costs_what_it_is_kept_in(
    tmp_path: Path, embeddings: str, head: str, bytes_a_row: int
) -> None:
    write_random_model(tmp_path / "model", "tiny", NMPattern(6, 8), embeddings=embeddings)
    work = work_of(tmp_path / "model", "i2", head, "float16")
    assert work.head_bytes == 512 * bytes_a_row


@pytest.mark.parametrize(
    ("kv_cache", "vector"), [("float32", 256), ("float16", 128), ("int8", 68), ("int4", 36)]
)
def test_a_step_reads_weights_head_and_cache(tiny_folder: Path, kv_cache: str, vector: int) -> None:
    work = work_of(tiny_folder, "i2", "int8", kv_cache)
    token = 2 * 2 * 2 * vector  # keys and values, layers, heads
    assert work.cache_token_bytes == token
    fixed = work.weight_bytes + work.head_bytes
    assert work.step_bytes(0, 8) == fixed
    assert work.step_bytes(100, 8) == fixed + 800 * token
    assert work.step_bytes(100, 8, shared_context=True) == fixed + 100 * token


def test_only_packed_folders_are_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run folder"):
        work_of(tmp_path, "i2", "auto", "float16")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "quantization_config": []}')
    with pytest.raises(UserError, match="sparse-bitnet pack"):
        work_of(tmp_path, "i2", "auto", "float16")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_roofline_is_measured(threads: int) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    meter = RooflineMeter(threads, ["generic"], read_bytes=8 << 20)
    for _ in range(3):
        meter.visit()
    found = meter.result("generic")
    assert found.threads == threads
    for rate in (
        found.read_bytes_per_second,
        found.int8_ops_per_second,
        found.float32_ops_per_second,
    ):
        assert 1e8 < rate < math.inf
    if "avx2" in _cpu.supported_isas():
        roofline = _cpu.Roofline(threads, 1)
        assert roofline.int8_rate("avx2", 0.01) > found.int8_ops_per_second
    assert 1e8 < _cpu.Roofline(threads, 1).clock_rate(0.01) < 1e11


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read_rate", (-1,)),
        ("read_rate", (1 << 20,)),
        ("int8_rate", ("sse", 0.01)),
        ("int8_rate", ("generic", 0.0)),
        ("float32_rate", ("generic", math.nan)),
        ("float32_rate", ("generic", 1e9)),
    ],
)
def test_what_cannot_be_measured_is_refused(method: str, arguments: tuple) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    with pytest.raises(ValueError, match=r"out of range|this machine has"):
        getattr(_cpu.Roofline(1, 1 << 20), method)(*arguments)
    for sizes in ((0, 1), (1, 0), (1 << 20, 1), (1, -5)):
        with pytest.raises(ValueError, match="out of range"):
            _cpu.Roofline(*sizes)
