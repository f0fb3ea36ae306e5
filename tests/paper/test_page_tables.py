# SPDX-License-Identifier: Apache-2.0
"""Tables of the page that come from other files than runs: table 1's chances, table 3."""

import json

import pytest

from sparse_bitnet.errors import UserError
from sparse_bitnet_paper import results_page
from sparse_bitnet_paper.downstream import CHANCE, downstream_table
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import find_scale
from sparse_bitnet_paper.setting import make_setting
from sparse_bitnet_paper.throughput import throughput_blocks

ROW = {
    "kv_cache": "float16",
    "model": "qwen2.5-1.5b",
    "hardware": "a machine",
    "date": "2026-01-02",
}


def scored(tmp_path, make_rows, **acc):
    """Two models scored on 1,000 questions of each task; the second as `acc` says."""
    results = Results(tmp_path)
    scale = find_scale("cpu")
    results.open(make_setting(scale, {"train": {}, "validation": {}}, "cpu", "float32"))
    lines = []
    for number, row in enumerate(make_rows()[:2]):
        results.rows.append(
            type(row)(**{**vars(row), "name": f"run {number}", "model": scale.main})
        )
        tasks = {task: {"acc": acc.get(task, 0.5) if number else CHANCE[task]} for task in CHANCE}
        asked = {"asked": ["paper"], "questions": dict.fromkeys(CHANCE, 1000)}
        lines.append({"run": f"run {number}", "tasks": tasks, **asked})
    results.write("downstream.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return downstream_table(results).notes


def test_models_at_chance_are_said_to_be_once(tmp_path, make_rows):
    (note,) = scored(tmp_path, make_rows, hellaswag=0.27, arc_easy=0.23, piqa=0.52)
    assert "no model in any task: these cannot be told from chance" in note
    assert "10 one-sided binomial tests" in note
    assert "boolq 62.2 %" in note


def test_a_model_above_chance_is_named(tmp_path, make_rows):
    (note,) = scored(tmp_path, make_rows, hellaswag=0.30, arc_easy=0.25)
    assert note.endswith(": run 1 in hellaswag.")  # 25 + 3.65 standard deviations


def test_table_3_shows_patterns_over_dense_and_no_gpu(tmp_path):
    speeds = {("8:8", "i2"): 100.0, ("6:8", "i2"): 90.0, ("6:8", "lookup"): 110.0}
    rows = [
        {
            **ROW,
            "phase": phase,
            "tokens": tokens,
            "batch": 1,
            "threads": 2,
            "pattern": pattern,
            "weight_format": format,
            "tokens_per_second": speed * (1 if phase == "prefill" else 0.1),
            "spread": 0.05 if phase == "prefill" else 0.125,
        }
        for phase, tokens in (("prefill", 512), ("decode", 0), ("decode", 2048))
        for (pattern, format), speed in speeds.items()
    ]
    path = tmp_path / "bench.jsonl"
    # A later run of sparse models alone has no ratio, and lends none to the one before.
    rows += [row | {"date": "2026-11-23T09", "tokens_per_second": 1e3} for row in rows[1:3]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = throughput_blocks(path)[1]
    assert table.head == (
        "tokens/s",
        "dense",
        "6:8",
        "ours on a GPU",
        "paper's 3B, 6:8 over dense",
    )
    assert table.lines == [
        (
            "prefill, 512 tokens, 2 threads",
            "100.0",
            "110.0\n1.10x",
            "not measured",
            "1.05x to 1.30x (A100)",
        ),
        (
            "decode, batch 1, 2 threads",
            "10.0",
            "11.0\n1.10x",
            "not measured",
            "1.10x to 1.19x (B200)",
        ),
    ]


def test_table_3_needs_rows_of_bench(tmp_path):
    path = tmp_path / "other.jsonl"
    for content in ('{"model": 1}\n', "1\n"):
        path.write_text(content)
        with pytest.raises(UserError, match="no run of dense and sparse models in turn"):
            throughput_blocks(path)


@pytest.mark.parametrize("what", ["document", "page"])
def test_a_page_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, what):
    monkeypatch.setattr(results_page, "report_blocks", lambda *_: [])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^cannot write .*file"):
        results_page.write_report([], **{what: tmp_path / "file" / "page.md"})
