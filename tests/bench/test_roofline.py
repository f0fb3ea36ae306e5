# SPDX-License-Identifier: Apache-2.0
"""What a step of a model reads, and the machine's roofline."""

import math
from pathlib import Path

import pytest

from sparse_bitnet.bench.random_model import write_random_model
from sparse_bitnet.bench.roofline import RooflineMeter
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS


def load(folder: Path, **options):
    engine = pytest.importorskip("sparse_bitnet.engine.engine").Engine
    return engine.load(folder, **{"threads": 1, "weight_format": "i2"} | options)


def read_of(folder: Path, **options) -> dict[str, float]:
    from sparse_bitnet.bench.model import read_bytes

    engine = load(folder, **options)
    found = read_bytes(engine) | {"head_bytes": engine.head_bytes}
    engine.close()
    return found


@pytest.mark.parametrize(("name", "bits"), [("i2", 2), ("b3", 1.6)])
def test_weights_cost_what_the_format_takes_in_whole_cache_lines(
    tiny_folder: Path, name: str, bits: float
) -> None:
    found = read_of(tiny_folder, weight_format=name)
    shape = PRESETS["tiny"]
    rows = sum(rows for rows, _ in shape.linears.values())
    blocks = found["weight_bytes"] - found["head_bytes"]
    assert 0 <= blocks - shape.block_weights * bits / 8 < 64 * rows
    assert blocks % 64 == 0
    assert found["block_weights"] == shape.block_weights


def test_scales_of_groups_are_read_with_the_weights(tmp_path: Path) -> None:
    read = []
    for group in (0, 32):
        write_random_model(tmp_path / f"{group}", "tiny", NMPattern(6, 8), scale_group=group)
        read.append(read_of(tmp_path / f"{group}")["weight_bytes"])
    assert read[1] - read[0] == 2 * PRESETS["tiny"].block_weights // 32


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
    assert read_of(tmp_path / "model", head=head)["head_bytes"] == 512 * bytes_a_row


@pytest.mark.parametrize(
    ("kv_cache", "vector"), [("float32", 256), ("float16", 128), ("int8", 68), ("int4", 36)]
)
def test_a_token_of_the_cache_costs_keys_and_values(
    tiny_folder: Path, kv_cache: str, vector: int
) -> None:
    found = read_of(tiny_folder, kv_cache=kv_cache)
    assert found["cache_token_bytes"] == 2 * 2 * 2 * vector  # keys and values, layers, heads


@pytest.mark.parametrize("threads", [1, 2])
def test_the_roofline_is_measured(threads: int) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    meter = RooflineMeter(threads, ["generic"], read_bytes=8 << 20)
    for _ in range(3):
        meter.visit()
    found = meter.result("generic")
    assert found.threads == threads
    for rate in (found.read_bytes_per_second, found.int8_ops_per_second):
        assert 1e8 < rate < math.inf
    if "avx2" in _cpu.supported_isas():
        roofline = _cpu.Roofline(threads, 1)
        rates = [roofline.int8_rate("avx2", 0.01) for _ in range(5)]
        assert max(rates) > found.int8_ops_per_second
    assert 1e8 < _cpu.Roofline(threads, 1).clock_rate(0.01) < 1e11


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read_rate", (-1,)),
        ("read_rate", (1 << 20,)),
        ("int8_rate", ("sse", 0.01)),
        ("int8_rate", ("generic", 0.0)),
        ("int8_rate", ("generic", math.nan)),
        ("int8_rate", ("generic", 1e9)),
    ],
)
def test_what_cannot_be_measured_is_refused(method: str, arguments: tuple) -> None:
    _cpu = pytest.importorskip("sparse_bitnet._cpu")
    with pytest.raises(ValueError, match=r"out of range|this machine has"):
        getattr(_cpu.Roofline(1, 1 << 20), method)(*arguments)
    for sizes in ((0, 1), (1, 0), (1 << 20, 1), (1, -5)):
        with pytest.raises(ValueError, match="out of range"):
            _cpu.Roofline(*sizes)
