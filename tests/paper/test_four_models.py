# SPDX-License-Identifier: Apache-2.0
"""The whole quickstart on a small text: fair, complete, resumable, and what it refuses."""

import dataclasses
import io
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from rich.console import Console

import sparse_bitnet.training.train_run
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.cli import evaluate as evaluate_cli
from sparse_bitnet.cli import quickstart as cli
from sparse_bitnet.data.loader import TokenLoader
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.training.run_folder import Interrupted
from sparse_bitnet_paper import runner
from sparse_bitnet_paper.four_models import quickstart
from sparse_bitnet_paper.paper_runs import plan
from sparse_bitnet_paper.quickstart_scale import QuickstartConfig
from sparse_bitnet_paper.result_row import read_rows
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.results_page import report_blocks
from sparse_bitnet_paper.scales import four_formats


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
        "prompt": "read_1 = ",
        "workers": 1,
    }
    return QuickstartConfig(**values | changes)


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "quickstart"
    config = small(text, out)
    console = Console(file=io.StringIO(), width=100)
    return config, quickstart(config, console), console.file.getvalue()


def test_runs_differ_in_format_and_folder_only(text, tmp_path):
    runs = [run.config for run in plan(small(text, tmp_path, seeds=2).scale(), ["table2"])]
    assert [run.format for run in runs[:4]] == [
        "full-8:8",
        "full-6:8",
        "ternary-8:8",
        "ternary-6:8",
    ]
    free = {"format": "", "checkpoint_every": 1, "keep_checkpoints": 1}
    for seed, four in ((0, runs[:4]), (1, runs[4:])):
        assert len({dataclasses.replace(run, **free).to_json() for run in four}) == 1
        assert {(run.seed, run.data_seed) for run in four} == {(seed, seed)}
    names = [run.name for run in plan(small(text, tmp_path, seeds=2).scale(), ["table2"])]
    assert len(set(names)) == 8
    assert names[3] == "seed-0/ternary-6of8"


def test_same_initial_weights_and_batches(text, tmp_path):
    config = small(text, tmp_path)
    runner.prepare_text(config.scale(), tmp_path / "data")
    dataset = TokenDataset.open(tmp_path / "data")
    weights, batches = [], []
    for run in (planned.config for planned in plan(config.scale(), ["table2"])):
        model = build_model(
            run.model,
            SparseBitConfig.parse(run.format),
            seed=run.seed,
            vocab_size=dataset.vocab_size,
        )
        weights.append(model.state_dict())
        loader = TokenLoader(
            dataset,
            sequence_length=run.sequence_length,
            batch_size=run.batch_size,
            seed=run.data_seed,
        )
        batches.append([loader.batch(step) for step in range(run.steps)])
    for other in weights[1:]:
        assert other.keys() == weights[0].keys()
        assert all(torch.equal(other[name], weights[0][name]) for name in other)
    for other in batches[1:]:
        for ours, theirs in zip(other, batches[0], strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])


def test_rows_and_models(finished):
    config, result, _ = finished
    assert read_rows(Path(config.out) / "results.jsonl") == result.results.rows
    assert [row.format for row in result.results.rows] == list(four_formats("6:8"))
    for row in result.results.rows:
        assert row.tokens == 3 * 2 * 32
        assert row.perplexity > 1
        assert row.provenance["threads"] >= 1
        assert row.precision in ("float32", "bfloat16")
        assert row.config["steps"] == 3
        model = from_pretrained(Path(config.out) / row.checkpoint)
        assert model.config.vocab_size == TokenDataset.open(f"{config.out}/data").vocab_size
    assert [row.flip_rate is None for row in result.results.rows] == [True, False, True, False]
    assert [row.zero_fraction for row in result.results.rows[:2]] == [0.0, 0.25]
    assert result.results.rows[3].zero_fraction > result.results.rows[2].zero_fraction > 0


def test_progress_lines(finished):
    _, _, printed = finished
    assert re.search(r"full-8:8 at qwen2.5-0.3m  2/3 steps.*, loss \d\.\d{3}", printed)
    assert re.search(r"ternary-6:8 at qwen2.5-0.3m  2/3 steps.* left", printed)
    assert re.search(r"\[4/4\] seed-0/ternary-6of8: perplexity \d+\.\d\d", printed)


def test_report(finished):
    config, result, _ = finished
    page = result.report.read_text("utf-8")
    for row in result.results.rows:
        assert f"{row.perplexity:.2f}" in page
    figures = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 6
    for figure in figures:
        ElementTree.fromstring(figure)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for expected in (config.prompt, "indicative", "26.31", "ternary-2:4", "windows of 32 tokens"):
        assert expected in page
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_finished_quickstart_is_not_run_again(finished, monkeypatch):
    config, result, _ = finished
    monkeypatch.setattr(sparse_bitnet.training.train_run, "Trainer", None)
    again = quickstart(config)
    assert again.results.rows == result.results.rows
    assert again.sample == result.sample


def test_a_quickstart_is_no_set_to_report(finished):
    config, *_ = finished
    with pytest.raises(UserError, match=r"whose page is its report\.html"):
        report_blocks([Results(Path(config.out))])


def test_stopped_quickstart_goes_on(finished, text, tmp_path, monkeypatch):
    whole = finished[1].results.rows
    config = small(text, tmp_path / "stopped")
    train = runner.train
    calls = []

    def stops_at_the_third(run, **options):
        calls.append(run.format)
        if len(calls) == 3:
            raise Interrupted("stopped after step 1 of 3")
        return train(run, **options)

    monkeypatch.setattr(runner, "train", stops_at_the_third)
    with pytest.raises(Interrupted):
        quickstart(config)
    results = Path(config.out) / "results.jsonl"
    kept = read_rows(results)
    assert [row.format for row in kept] == ["full-8:8", "full-6:8"]
    monkeypatch.setattr(runner, "train", train)
    rows = quickstart(config).results.rows
    assert rows[:2] == kept
    assert [row.perplexity for row in rows] == [row.perplexity for row in whole]


def test_seeds_and_workers(finished, text, tmp_path):
    """Two seeds, two at a time: the first seed is what one worker trains, the second is another."""
    config = small(text, tmp_path / "q", seeds=2, workers=2)
    result = quickstart(config)
    formats = four_formats("6:8")
    assert len(result.results.rows) == 8
    rows = [result.results.by_seed(format)[seed] for seed in (0, 1) for format in formats]
    for row, alone in zip(rows, finished[1].results.rows, strict=False):
        assert (row.perplexity, row.flip_rate) == (alone.perplexity, alone.flip_rate)
        ours, theirs = (
            (Path(out) / row.checkpoint / "model.safetensors").read_bytes()
            for out in (config.out, finished[0].out)
        )
        assert ours == theirs
    assert rows[0].perplexity != rows[4].perplexity
    page = result.report.read_text("utf-8")
    assert "Mean of 2 seeds" in page
    assert "of seed 0" in page


def test_a_failing_run_ends_the_quickstart(text, tmp_path):
    with pytest.raises(UserError, match="not finite"):
        quickstart(small(text, tmp_path / "q", learning_rate=1e30, steps=20))


def test_command_says_how_to_go_on(text, tmp_path, monkeypatch, capsys):
    def stopped(*arguments, **options):
        raise Interrupted("stopped after step 1 of 3")

    monkeypatch.setattr(runner, "train", stopped)
    with pytest.raises(SystemExit) as exit_:
        cli.run(small(text, tmp_path / "q"))
    assert exit_.value.code == 130
    assert "the same command continues" in capsys.readouterr().err


def test_command_prints_table_sample_and_places(finished, capsys):
    config, result, _ = finished
    cli.run(config)
    printed = capsys.readouterr().out
    for expected in ("full, dense", "ternary, 6:8", "26.31", "indicative", "report.html", "final"):
        assert expected in printed
    assert f"{result.results.rows[3].perplexity:.2f}" in printed
    assert config.prompt in printed


def test_evaluating_a_run_gives_its_perplexity(finished, tmp_path, capsys):
    config, result, _ = finished
    row = result.results.rows[3]
    run = str((Path(config.out) / row.checkpoint).parent)
    arguments = [run, "--data", f"{config.out}/data", "--max-tokens", str(row.validation_tokens)]
    evaluate_cli.main([*arguments, "--json", str(tmp_path / "out.json")])
    assert f"{row.perplexity:.4f}" in capsys.readouterr().out
    assert '"format": "ternary-6:8"' in (tmp_path / "out.json").read_text("utf-8")


def test_folder_of_other_settings_is_refused(finished):
    config, _, _ = finished
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
        ({"seeds": 0}, "seeds=0"),
        ({"workers": 0}, "workers=0"),
        ({"source": "nothing-here.txt"}, r"no file|no such file"),
    ],
)
def test_bad_input_is_refused_before_any_training(text, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        quickstart(small(text, tmp_path / "q", **changes))
    assert not (tmp_path / "q" / "runs").exists()


def test_damaged_results_are_named(finished, text, tmp_path):
    config, _, _ = finished
    shutil.copytree(config.out, tmp_path / "q")
    (tmp_path / "q" / "results.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"results\.jsonl:1"):
        quickstart(small(text, tmp_path / "q"))
