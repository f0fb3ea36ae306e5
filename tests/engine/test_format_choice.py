# SPDX-License-Identifier: Apache-2.0
"""The choice of the run-time format: measured once, remembered, and never a cause of failure."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sparse_bitnet.pattern import NMPattern

_cpu = pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet.engine import weights  # noqa: E402

GENERIC = _cpu.Kernels.choose("generic")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "_BYTES", 1 << 20)
    return tmp_path / "cache" / "formats.json"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[NMPattern]:
    """Patterns that were measured; i2 wins but is close to b3."""
    measured: list[NMPattern] = []

    def measure(pattern: NMPattern, *_: object, exact: bool, group: int) -> dict[str, float]:
        measured.append(pattern)
        return {"i2": 1.0, "b3": 1.01, "lookup": 1.5}

    monkeypatch.setattr(weights, "measure_formats", measure)
    return measured


def test_every_supported_format_is_measured(cache: Path) -> None:
    pool = _cpu.ThreadPool(1)
    for text in ("6:8", "8:8", "3:5"):
        seconds = weights.measure_formats(NMPattern.parse(text), pool, GENERIC)
        assert seconds.keys() == {"i2", "b3"}
        assert all(0 < taken < 1 for taken in seconds.values())
    best = _cpu.Kernels.choose()
    seconds = weights.measure_formats(NMPattern(6, 8), pool, best)
    assert ("lookup" in seconds) == (best.isa in ("amx_int8", "avx512vbmi", "i8mm", "neon"))


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_formats_are_measured_with_the_scales_of_groups(cache: Path, group: int) -> None:
    pool, dense = _cpu.ThreadPool(1), NMPattern(1, 1)
    for isa in _cpu.supported_isas():
        kernels = _cpu.Kernels.choose(isa)
        seconds = weights.measure_formats(dense, pool, kernels, group=group)
        sums = isa in ("avx512vnni", "avx512", "avxvnni", "avx2")
        assert ("b3" in seconds) == (group > 32 and sums)
        assert ("lookup" in seconds) == (group > 32 and isa in ("amx_int8", "avx512vbmi"))
    weights.choose_format(dense, pool, GENERIC, group=group)
    (key,) = json.loads(cache.read_text())
    assert key.endswith(f"| 1:1 | scales per {group}")


def test_the_choice_is_measured_once(cache: Path, measurements: list[NMPattern]) -> None:
    pool = _cpu.ThreadPool(1)
    for _ in range(2):
        assert weights.choose_format(NMPattern(6, 8), pool, GENERIC) == "b3"
    assert len(measurements) == 1
    (key,) = json.loads(cache.read_text())
    assert "generic | 1 threads | 6:8" in key
    weights.choose_format(NMPattern(2, 8), pool, GENERIC)
    weights.choose_format(NMPattern(6, 8), _cpu.ThreadPool(2), GENERIC)
    assert len(measurements) == 3


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "[" * 100_000, '{"a": 1}', "\xff", "1" * 5000, Path.mkdir, "a file"]
)
def test_a_damaged_cache_costs_a_measurement_and_nothing_else(
    cache: Path, measurements: list[NMPattern], content: str | Callable[[Path], None]
) -> None:
    if content == "a file":
        cache.parent.write_text(content)
    else:
        cache.parent.mkdir()
        if isinstance(content, str):
            cache.write_text(content, encoding="latin-1")
        else:
            content(cache)
    for _ in range(2):
        assert weights.choose_format(NMPattern(6, 8), _cpu.ThreadPool(1), GENERIC) == "b3"
    assert len(measurements) == 1 + (not cache.is_file())


@pytest.mark.parametrize("bad", ["nm-bitmap", "??", [1], None])
def test_a_remembered_format_must_be_one_of_today(
    cache: Path, measurements: list[NMPattern], bad: object
) -> None:
    pool = _cpu.ThreadPool(1)
    weights.choose_format(NMPattern(6, 8), pool, GENERIC)
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), bad)))
    assert weights.choose_format(NMPattern(6, 8), pool, GENERIC) == "b3"
    assert len(measurements) == 2
