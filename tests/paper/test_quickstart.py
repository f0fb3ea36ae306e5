# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart on a small text: fair, complete, resumable, and what it refuses."""

import dataclasses
import io
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

import sparse_bitnet.training.trainer
from made_up_results import read_rows
from sparse_bitnet.cli import paper as cli
from sparse_bitnet.errors import UserError
from sparse_bitnet_paper import record
from sparse_bitnet_paper.quickstart import quickstart
from sparse_bitnet_paper.report import markdown_report
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import QuickstartConfig, four_formats

NASTY = "<script>alert('&')</script>"


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = [
        f"{name}_{i % 9} = {name}({i})" for i in range(60) for name in ("read", "write", "sum")
    ]
    for number in range(120):
        lines = [words[(number * 7 + k * 11) % len(words)] for k in range(30)]
        (folder / f"{number:03}.txt").write_text("\n".join(lines) + "\n")
    return str(folder / "*.txt")


def small(text, out, **changes):
    values = {
        "source": text,
        "out": str(out),
        "steps": 3,
        "vocab_size": 300,
        "batch_size": 2,
        "sequence_length": 32,
        "prompt": f"read_1 = {NASTY}",
        "workers": 1,
    }
    return QuickstartConfig(**values | changes)


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "quickstart"
    config = small(text, out)
    console = Console(file=io.StringIO(), width=100)
    return config, quickstart(config, console), console.file.getvalue()


def rows_of(config):
    return read_rows(Path(config.out))


def test_the_report_is_whole_well_formed_and_loads_nothing(finished):
    config, result, printed = finished
    page, rows = result.report.read_text("utf-8"), rows_of(config)
    assert [row["format"] for row in rows] == list(four_formats("6:8"))
    assert "[4/4] 0.3m-ternary-6-8-lr0.003-seed0-" in printed
    for row in rows:
        assert f"{row['perplexity']:.2f}" in page
        assert (Path(config.out) / row["checkpoint"] / "model.safetensors").is_file()
    assert page.count("<figure>") == 6
    for words in ("indicative", "26.31", "ternary-2:4", "windows of 32 tokens", "2.7", "commit"):
        assert words in page
    assert not re.search(r"<(script|link|img|iframe|object|embed|base)|\b(src|srcset)=", page)
    assert NASTY not in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_finished_quickstart_is_not_run_again(finished, monkeypatch):
    config, result, _ = finished
    before = rows_of(config)
    monkeypatch.setattr(sparse_bitnet.training.trainer, "Trainer", None)
    assert quickstart(config).sample == result.sample
    assert rows_of(config) == before


def test_a_quickstart_folder_is_refused_by_report(finished):
    with pytest.raises(UserError, match=r"whose page is its report\.html"):
        markdown_report([Results(Path(finished[0].out))])


def test_several_seeds_and_workers_train_the_same_models(finished, text, tmp_path):
    """Two seeds, two at a time: the first seed is what one worker trains, the second is another."""
    config = small(text, tmp_path / "q", seeds=2, workers=2)
    page = quickstart(config).report.read_text("utf-8")
    rows = {(row["seed"], row["format"]): row for row in rows_of(config)}
    assert len(rows) == 8
    for alone in rows_of(finished[0]):
        row = rows[0, alone["format"]]
        assert (row["perplexity"], row["flip_rate"]) == (alone["perplexity"], alone["flip_rate"])
        ours, theirs = (
            (Path(out) / row["checkpoint"] / "model.safetensors").read_bytes()
            for out in (config.out, finished[0].out)
        )
        assert ours == theirs
    assert rows[0, "full-8:8"]["perplexity"] != rows[1, "full-8:8"]["perplexity"]
    assert "Mean of 2 seeds" in page
    assert "of seed 0" in page


def test_a_failing_run_ends_the_quickstart(text, tmp_path):
    with pytest.raises(UserError, match="not finite"):
        quickstart(small(text, tmp_path / "q", learning_rate=1e30, steps=20))


def test_command_says_how_to_continue(text, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "train", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt, match="stopped; run the same command to resume"):
        cli.run_quickstart(small(text, tmp_path / "q"))


def test_command_prints_table_sample_and_places(finished, capsys):
    config, *_ = finished
    cli.run_quickstart(config)
    printed = capsys.readouterr().out
    for expected in ("full, dense", "ternary, 6:8", "26.31", "indicative", "report.html", "final"):
        assert expected in printed
    assert f"{rows_of(config)[3]['perplexity']:.2f}" in printed
    assert config.prompt in printed


def test_folder_of_other_settings_is_refused(finished):
    config, *_ = finished
    with pytest.raises(UserError, match=r"another setting \(.*sizes.qwen2.5-0.3m 3 -> 4"):
        quickstart(dataclasses.replace(config, steps=4))
    with pytest.raises(UserError, match=r"another setting \(text\.vocab_size 300 -> 310"):
        quickstart(dataclasses.replace(config, vocab_size=310))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": "8:8"}, "is dense"),
        ({"pattern": "six of eight"}, "write it as n:m"),
        ({"pattern": "5:7"}, "96 is not a multiple of 7"),
        ({"model": "qwen2.5-7t"}, "not a preset"),
        ({"steps": 0}, "steps=0"),
        ({"seeds": 0}, "seeds 0"),
        ({"workers": 0}, "workers 0"),
        ({"source": "nothing-here.txt"}, r"no file|no such file"),
    ],
)
def test_bad_input_is_refused_before_any_training(text, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        quickstart(small(text, tmp_path / "q", **changes))
    assert not (tmp_path / "q" / "runs").exists()
