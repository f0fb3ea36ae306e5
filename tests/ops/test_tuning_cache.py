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
    table = TuningCache(machine="a GPU")
    table.add(SHAPE, 1, {"dense": 10.0, "sparse": 12.0, "packed": 3.0})
    table.add(SHAPE, 64, {"dense": 10.0, "sparse": 11.0, "packed": 9.9})
    table.add(SHAPE, 1024, {"dense": 20.0, "sparse": 14.0})
    table.add(SHAPE, 4096, {"dense": 80.0, "sparse": 56.0})
    return table


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


def test_noise_does_not_choose():
    table = TuningCache(machine="a GPU")
    table.add(SHAPE, 8, {"dense": 1.0, "sparse": GAIN + 0.01, "packed": 1.5})
    assert table.choose(SHAPE, 8) == "dense"


def measured(times: dict[str, list[float]]) -> TuningCache:
    table = TuningCache(machine="a GPU")
    table.add_rounds(SHAPE, 16, times)
    return table


def test_medians_decide():
    table = measured({"dense": [5.0, 1.5, 9.0], "sparse": [2.0, 1.0, 3.0]})
    assert table.seconds[SHAPE][16] == {"dense": 5.0, "sparse": 2.0}
    assert table.choose(SHAPE, 16) == "sparse"


def test_a_path_that_wins_by_its_median_alone_is_not_chosen():
    table = measured({"dense": [5.0, 1.0, 9.0], "sparse": [2.0, 2.0, 100.0]})
    assert table.seconds[SHAPE][16] == {"dense": 5.0}
    table = measured({"dense": [1.0, 1.1, 0.9], "sparse": [2.0, 3.0, 4.0]})
    assert table.seconds[SHAPE][16] == {"dense": 1.0, "sparse": 3.0}, "slower ones are kept"


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
    assert TuningCache.load(path, "another GPU").seconds == {}
    assert TuningCache.load(tmp_path / "none.json", "a GPU").seconds == {}


ROW = {"pattern": "6:8", "out_features": 8, "in_features": 8, "tokens": 1, "seconds": {"dense": 1}}
DAMAGED_ROWS = [
    {},
    None,
    *({**ROW, name: value} for name in ROW for value in (None, [], "x", math.inf)),
]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"version": 1}', 100_000 * "[", "\ud800"]
    + [json.dumps({"version": 1, "machine": "a GPU", "rows": [row]}) for row in DAMAGED_ROWS],
    ids=lambda text: text[-60:],
)
def test_a_damaged_table_is_reported(tmp_path, text):
    path = tmp_path / "tuning.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=r"tuning\.json is not a tuning cache"):
        TuningCache.load(path, "a GPU")


def test_times_that_cannot_be(table, tmp_path):
    path = tmp_path / "tuning.json"
    table.add(SHAPE, 2, {"dense": 0.0})
    table.save(path)
    with pytest.raises(UserError, match="times are positive"):
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
