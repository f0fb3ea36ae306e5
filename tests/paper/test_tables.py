# SPDX-License-Identifier: Apache-2.0
"""Tables beside the paper's own numbers: strings, pairing of seeds, a terminal's width."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from made_up_results import SCALE
from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.quickstart import verdict
from sparse_bitnet_paper.tables import comparison_table, four_models, throughput_table

PERPLEXITIES = {"full-8:8": 35.0, "full-6:8": 36.4, "ternary-8:8": 40.0, "ternary-6:8": 39.8}


@pytest.fixture
def models(make_set):
    """The four models of so many seeds, by format."""

    def make(seeds=1, pattern="6:8"):
        def change(row):
            dense = row["format"].endswith("8:8")
            value = PERPLEXITIES[row["format"].replace(pattern, "6:8")]
            value += row["seed"] * (1 if dense else 1.5)
            zeros = 0.25 if row["format"] == f"full-{pattern}" else row["zero_fraction"]
            return row | {"perplexity": value, "zero_fraction": zeros}

        scale = dataclasses.replace(SCALE, pattern=pattern, sizes=SCALE.sizes[:1])
        results = make_set(
            lambda config: 1.0, seeds=seeds, scale=scale, names=["table2"], change=change
        )
        return four_models(results, SCALE.main)

    return make


def printed(shown, width):
    console = Console(file=io.StringIO(), width=width)
    shown.print(console, "title")
    return console.file.getvalue()


def test_table_cells_have_their_strings(models):
    shown = comparison_table(models())
    heads = ["PPL", "Δ %", "zeros", "flips", "paper 0.5B: PPL", "paper 0.5B: Δ %"]
    assert list(shown.frame.columns) == heads
    assert list(shown.frame.index) == ["full, dense", "full, 6:8", "ternary, dense", "ternary, 6:8"]
    cells = ["36.40", "+4.0", "25.0 %", "0.123 %", "23.11", "+5.5"]
    assert list(shown.frame.loc["full, 6:8"]) == cells
    assert list(shown.frame.loc["ternary, dense"][:4]) == ["40.00", "-", "40.0 %", "-"]


def test_seeds_are_paired_and_show_their_spread(models):
    shown = comparison_table(models(3))
    assert shown.frame.loc["full, 6:8", "Δ %"] == "+5.3\n+4.0..+6.5"
    assert "+5.3 +4.0..+6.5" in shown.markdown()
    assert "Mean of 3 seeds" in shown.notes[1]


def test_unfinished_seeds_do_not_count(make_set):
    results = make_set(seeds=2, names=["table2"])
    results.rows = results.rows[~((results.rows.seed == 1) & (results.rows.variant == "full-6:8"))]
    assert [len(own) for own in four_models(results, SCALE.main).values()] == [1] * 4
    results.rows = results.rows[results.rows.variant != "full-6:8"]
    assert four_models(results, SCALE.main) == {}


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_shows_every_number(models, seeds, width):
    shown = comparison_table(models(seeds))
    text = printed(shown, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for line in shown.frame.itertuples():
        for word in " ".join(line).split():
            assert word in text
            assert word in shown.markdown()


def test_verdict_states_values_and_limits(models):
    text = verdict(models())
    for words in ("+4.0 %", "-0.5 %", "+5.5 % and +1.2 %", "indicative", "--seeds 3"):
        assert words in text
    assert "trained too briefly" in text
    several = verdict(models(3))
    assert "for 3 of 3 seeds" in several
    assert "(+4.0.." in several
    assert "too briefly" not in several


ROW = {
    **{"kv_cache": "float16", "model": "qwen2.5-1.5b", "batch": 1, "threads": 2, "spread": 0.125},
    **{"hardware": "a machine", "date": "2026-01-02"},
}


def test_table_3_shows_patterns_over_dense_and_no_gpu(tmp_path):
    speeds = {("8:8", "i2"): 100.0, ("6:8", "i2"): 90.0, ("6:8", "b3"): 110.0}
    rows = [
        ROW
        | {"phase": phase, "tokens": tokens, "pattern": pattern, "weight_format": format}
        | {"tokens_per_second": speed * (1 if phase == "prefill" else 0.1)}
        for phase, tokens in (("prefill", 512), ("decode", 0), ("decode", 2048))
        for (pattern, format), speed in speeds.items()
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = throughput_table(path)
    assert list(shown.frame.columns) == ["dense", "6:8"]
    assert list(shown.frame.loc["prefill, 512 tokens, 2 threads"]) == ["100.0", "110.0\n1.10x"]
    assert list(shown.frame.loc["decode, batch 1, 2 threads"]) == ["10.0", "11.0\n1.10x"]
    assert "prefill 1.05x to 1.30x (A100); decode 1.10x to 1.19x (B200)" in shown.notes[1]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[1:3]))  # no dense model
    with pytest.raises(UserError, match="no rows of dense and sparse models from one run"):
        throughput_table(path)


@pytest.mark.parametrize("content", ['{"model": 1}\n', "1\n", ""])
def test_table_3_needs_rows_of_bench(tmp_path, content):
    (tmp_path / "other.jsonl").write_text(content)
    with pytest.raises(UserError, match="no rows of dense and sparse models from one run"):
        throughput_table(tmp_path / "other.jsonl")
