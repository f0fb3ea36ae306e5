# SPDX-License-Identifier: Apache-2.0
"""Derived numbers against the paper's own, seeds paired, broken files refused."""

import dataclasses
import json

import pytest

from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.cells import cells, paper_cells, paper_results
from sparse_bitnet_paper.result_row import read_rows, write_rows


def test_one_seed(make_rows):
    full, sparse_full, ternary, sparse_ternary = cells(make_rows(), "6:8")
    assert full.delta is None
    assert ternary.relative is None
    assert sparse_full.delta.mean == pytest.approx(1.4)
    assert sparse_full.relative.mean == pytest.approx(4.0)
    assert sparse_ternary.relative.mean == pytest.approx(-0.5)
    assert sparse_ternary.zero_fraction.mean == 0.4
    assert sparse_ternary.flip_rate.mean == 0.00123
    assert ternary.flip_rate is None


def test_seeds_are_paired(make_rows):
    sparse_full = cells(make_rows(3), "6:8")[1]
    assert sparse_full.delta.values == pytest.approx((1.4, 1.9, 2.4))
    assert (sparse_full.delta.least, sparse_full.delta.greatest) == pytest.approx((1.4, 2.4))
    assert sparse_full.perplexity.mean == pytest.approx(37.9)


def test_unfinished_seeds_do_not_count(make_rows):
    rows = make_rows(2)[:-1]
    assert len(cells(rows, "6:8")[0].perplexity.values) == 1
    assert cells(rows[:3], "6:8") == cells(rows, "2:4") == []


def test_paper_deltas_are_those_it_prints():
    printed = paper_results()["validation_ppl"]
    for index, (size, column) in enumerate(paper_cells("6:8").items()):
        assert size == printed["models"][index]
        assert column[1].delta.mean == pytest.approx(printed["delta_bf16"][index], abs=0.006)
        assert column[3].delta.mean == pytest.approx(printed["delta_bitnet"][index], abs=0.006)


def test_paper_sweep_serves_other_patterns():
    # Section 4.2: at 2:4, +18.8 % for BF16 and +5.7 % for BitNet.
    column = paper_cells("2:4")["0.5B"]
    assert column[1].relative.mean == pytest.approx(18.8, abs=0.05)
    assert column[3].relative.mean == pytest.approx(5.7, abs=0.05)
    assert paper_cells("5:7") == {}


def test_rows_survive_the_file(make_rows, tmp_path):
    path = tmp_path / "results.jsonl"
    assert read_rows(path) == []
    write_rows(path, make_rows(2))
    assert read_rows(path) == make_rows(2)
    assert len(path.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("\udcff", "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "not a result row"),
        (json.dumps({"format": "x"}), "not a result row"),
    ],
)
def test_broken_rows_are_refused(make_row, tmp_path, line, words):
    path = tmp_path / "results.jsonl"
    good = json.dumps(dataclasses.asdict(make_row()))
    path.write_text(f"{good}\n{line}\n", errors="surrogateescape")
    with pytest.raises(UserError, match=rf"results\.jsonl:2: {words}"):
        read_rows(path)
