# SPDX-License-Identifier: Apache-2.0
"""The measured choice of a product: never slower than dense where it was measured, dense elsewhere."""

import json
import math
import random

import pytest

from sparse_bitnet.errors import UserError
from sparse_bitnet.ops.tuning_cache import (
    GAIN,
    LayerShape,
    TuningCache,
    cache_path,
    machine_name,
)
from sparse_bitnet.pattern import NMPattern

SHAPE = LayerShape(2048, 11008, NMPattern(6, 8))


@pytest.fixture
def table() -> TuningCache:
    fastest = {1: "packed", 64: "dense", 1024: "sparse", 4096: "sparse"}
    return TuningCache(machine="a GPU", fastest={SHAPE: fastest})


@pytest.mark.parametrize(
    ("tokens", "route"),
    [
        (1, "packed"),
        (2, "dense"),
        (64, "dense"),
        (500, "dense"),
        (1024, "sparse"),
        (3000, "sparse"),
        (4096, "sparse"),
        (10**6, "sparse"),
    ],
)
def test_both_measured_neighbours_decide(table, tokens, route):
    assert table.choose(SHAPE, tokens) == route


def test_what_was_not_measured_is_dense(table):
    other = LayerShape(2048, 11008, NMPattern(2, 4))
    assert table.choose(other, 4096) == "dense"
    assert table.routes(other) == {"dense"}
    assert table.routes(SHAPE) == {"dense", "sparse", "packed"}


def measured(times: dict[str, list[float]]) -> TuningCache:
    table = TuningCache(machine="a GPU")
    table.add(SHAPE, 16, times)
    return table


@pytest.mark.parametrize(
    ("dense", "sparse", "packed", "route"),
    [
        ([5.0, 1.5, 9.0], [2.0, 1.0, 3.0], [3.0, 1.1, 4.0], "sparse"),
        # By less than the noise of medians; by its median alone; never.
        ([1.0, 1.0, 1.0], [GAIN + 0.01] * 3, [1.5] * 3, "dense"),
        ([5.0, 1.0, 9.0], [2.0, 2.0, 100.0], [4.0, 0.9, 8.0], "packed"),
        ([1.0, 1.1, 0.9], [2.0, 3.0, 4.0], [2.0, 3.0, 4.0], "dense"),
    ],
)
def test_medians_and_rounds_decide(dense, sparse, packed, route):
    table = measured({"dense": dense, "sparse": sparse, "packed": packed})
    assert table.fastest == {SHAPE: {16: route}}


def test_equal_paths_are_hardly_ever_chosen_whatever_the_noise():
    """By a timer with 20 % of noise: dense where nothing is gained, sparse where it is twice as fast."""
    noise = random.Random(0)

    def rounds(seconds: float) -> list[float]:
        return [seconds * noise.lognormvariate(0.0, 0.2) for _ in range(9)]

    def chosen(seconds: float) -> int:
        tables = (measured({"dense": rounds(1.0), "sparse": rounds(seconds)}) for _ in range(200))
        return sum(table.choose(SHAPE, 16) == "sparse" for table in tables)

    assert chosen(1.05) <= 10
    assert chosen(1.0) <= 25
    assert chosen(0.5) == 200


def test_round_trip_and_other_machines(table, tmp_path):
    path = tmp_path / "folder" / "tuning.json"
    table.save(path)
    assert TuningCache.load(path, "a GPU") == table
    assert TuningCache.load(path, "another GPU").fastest == {}
    assert TuningCache.load(tmp_path / "none.json", "a GPU").fastest == {}


ROW = [8, 8, "6:8", {"1": "dense"}]
DAMAGED_ROWS = [
    {},
    None,
    *([*ROW[:at], value, *ROW[at + 1 :]] for at in range(4) for value in (None, [], "x", math.inf)),
    [8, 8, "6:8", {"1": "fast"}],
    [8, 8, "6:8", {"one": "dense"}],
]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 3}', 100_000 * "[", "\ud800"]
    + [json.dumps({"version": 3, "machine": "a GPU", "rows": [row]}) for row in DAMAGED_ROWS],
    ids=lambda text: text[-60:],
)
def test_a_damaged_table_is_reported(tmp_path, text):
    path = tmp_path / "tuning.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"tuning\.json is not a tuning cache"):
        TuningCache.load(path, "a GPU")


def test_where_the_table_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSE_BITNET_TUNING_CACHE", raising=False)
    monkeypatch.delenv("SPARSE_BITNET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cache_path("NVIDIA H200 torch 2.11.0+cu128 / x")
    assert path == tmp_path / "sparse-bitnet" / "tuning-NVIDIA-H200-torch-2.11.0-cu128-x.json"
    monkeypatch.setenv("SPARSE_BITNET_TUNING_CACHE", "here.json")
    assert str(cache_path("x")) == "here.json"
    assert "torch" in machine_name()
