# SPDX-License-Identifier: Apache-2.0
"""The choice of the run-time format: measured once, remembered, and never a cause of failure."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparse_bitnet.pattern import NMPattern

_cpu = pytest.importorskip("sparse_bitnet._cpu")
from sparse_bitnet.engine import run_time_formats  # noqa: E402

GENERIC = _cpu.Kernels.choose("generic")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSE_BITNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run_time_formats, "_BYTES", 1 << 20)
    return tmp_path / "cache" / "formats.json"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[NMPattern]:
    """Patterns that were measured; i2 wins but is close to lookup."""
    measured: list[NMPattern] = []

    def measure(pattern: NMPattern, *_: object, exact: bool, group: int) -> dict[str, float]:
        measured.append(pattern)
        return {"i2": 1.0, "b3": 0.9, "lookup": 1.01}

    monkeypatch.setattr(run_time_formats, "measure_formats", measure)
    return measured


@pytest.mark.parametrize(
    ("text", "group"),  # 7 does not divide the columns
    [("6:8", 0), ("3:5", 0), ("5:7", 0), *(("8:8", group) for group in (0, 32, 64, 128, 256))],
)
def test_every_supported_format_is_measured(cache: Path, text: str, group: int) -> None:
    pool, pattern = _cpu.ThreadPool(1), NMPattern.parse(text)
    for isa in _cpu.supported_isas():
        seconds = run_time_formats.measure_formats(
            pattern, pool, _cpu.Kernels.choose(isa), group=group
        )
        assert all(0 < taken < 1 for taken in seconds.values())
        looks_up = isa in ("amx_int8", "avx512vbmi", *(() if group else ("i8mm", "neon")))
        assert ("lookup" in seconds) == (looks_up and text != "5:7" and group != 32)
        assert ("b3" in seconds) == (isa.startswith(("avx", "amx")) and group != 32)
    assert run_time_formats.choose_format(pattern, pool, GENERIC, group=group) == "i2"
    (key,) = json.loads(cache.read_text())
    assert key.endswith(f"| 1:1 | scales per {group}") == (group > 0)


def test_the_choice_is_measured_once(cache: Path, measurements: list[NMPattern]) -> None:
    pool = _cpu.ThreadPool(1)
    for _ in range(2):
        assert run_time_formats.choose_format(NMPattern(6, 8), pool, GENERIC) == "lookup"
    assert len(measurements) == 1
    (key,) = json.loads(cache.read_text())
    assert "generic | 1 threads | 6:8" in key
    run_time_formats.choose_format(NMPattern(2, 8), pool, GENERIC)
    run_time_formats.choose_format(NMPattern(6, 8), _cpu.ThreadPool(2), GENERIC)
    assert len(measurements) == 3
    assert (
        run_time_formats.choose_format(NMPattern(6, 8), pool, SimpleNamespace(isa="avx2")) == "b3"
    )


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
        assert (
            run_time_formats.choose_format(NMPattern(6, 8), _cpu.ThreadPool(1), GENERIC) == "lookup"
        )
    assert len(measurements) == 1 + (not cache.is_file())


@pytest.mark.parametrize("bad", ["nm-bitmap", "??", [1], None])
def test_a_remembered_format_must_be_one_of_today(
    cache: Path, measurements: list[NMPattern], bad: object
) -> None:
    pool = _cpu.ThreadPool(1)
    run_time_formats.choose_format(NMPattern(6, 8), pool, GENERIC)
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), bad)))
    assert run_time_formats.choose_format(NMPattern(6, 8), pool, GENERIC) == "lookup"
    assert len(measurements) == 2
