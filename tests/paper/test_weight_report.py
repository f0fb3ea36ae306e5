# SPDX-License-Identifier: Apache-2.0
"""`analyze`: pages and counts of any checkpoint."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file

from factories import tiny_model
from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.cli import analyze
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.weight_report import (
    read_checkpoint,
    summary_table,
    weight_page,
    write_weight_report,
)

PATTERN = NMPattern(6, 8)


@pytest.fixture
def ours(tmp_path):
    model = convert_(tiny_model(), SparseBitConfig.parse("ternary-6:8"))
    save_pretrained(model, tmp_path / "run" / "final")
    return tmp_path / "run"


@pytest.fixture
def foreign(tmp_path):
    """A bfloat16 master checkpoint that calls itself BitNet, in two files."""
    folder = tmp_path / "bitnet-b1.58-masters"
    model = tiny_model("llama", dtype=torch.bfloat16)
    folder.mkdir()
    tensors = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = {name: t for name, t in tensors.items() if ".layers.0." in name}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    rest = {name: t for name, t in tensors.items() if name not in first}
    save_file(rest, folder / "model-00002-of-00002.safetensors")
    config = {"model_type": "bitnet", "quantization_config": {"quant_method": "bitnet"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_own_and_foreign_checkpoints_are_counted_layer_by_layer(ours, foreign):
    read = []
    found = [read_checkpoint(str(path), PATTERN, read.append) for path in (ours, foreign)]
    assert [checkpoint.weight for checkpoint in found] == ["ternary", "ternary"]
    assert [checkpoint.label for checkpoint in found] == ["run", "bitnet-b1.58-masters"]
    assert all(len(checkpoint.layers) == 14 for checkpoint in found)
    assert read == [str(ours), str(foreign)]
    table = summary_table(found)
    first, second = table.lines
    assert table.head[0] == "checkpoint"
    assert first[2] == second[2] == f"{sum(x.weights for x in found[0].layers):,}"


def test_files_hold_every_layer_and_every_figure(ours, foreign, tmp_path):
    found = [read_checkpoint(str(path), PATTERN) for path in (ours, foreign)]
    write_weight_report(found, PATTERN, tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "weights.json").read_text("utf-8"))
    assert [len(entry["layers"]) for entry in counts] == [14, 14]
    assert counts[0]["layers"][0]["groups"] * 8 == counts[0]["layers"][0]["weights"]
    page = (tmp_path / "out" / "weights.html").read_text("utf-8")
    assert page.count("<figure>") == 1 + 2 + 1
    assert "42.3 %" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_folder_shows_its_checkpoints_over_time(ours, tmp_path):
    for step in (10, 20, 30):
        name = f"step-{step:08d}"
        model = convert_(tiny_model(), SparseBitConfig.parse("ternary-6:8"))
        save_pretrained(model, ours / "consolidated" / name)
        (ours / "checkpoints" / name).mkdir(parents=True)
        (ours / "checkpoints" / name / "state.json").write_text("{}")
    checkpoint = read_checkpoint(str(ours), PATTERN)
    assert [step for step, _ in checkpoint.history] == [10, 20, 30]
    page = weight_page([checkpoint, checkpoint], PATTERN)
    assert page.count("Near-zero mass of every layer of ") == 2
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_command_prints_a_table_and_names_its_files(ours, tmp_path, capsys):
    analyze.main([str(ours), "--out", str(tmp_path / "out")])
    text = capsys.readouterr().out
    assert "near-zero" in text
    assert "weights.html" in text


def test_a_name_with_brackets_is_shown_as_it_is(ours, tmp_path, monkeypatch, capsys):
    shutil.move(ours, tmp_path / "run[v2]")
    monkeypatch.chdir(tmp_path)
    analyze.main(["run[v2]"])
    assert "run[v2]" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"x\[/b\]"):
        analyze.main(["x[/b]"])


@pytest.mark.parametrize(
    ("checkpoints", "pattern", "message"),
    [
        ([], "6:8", "at least one"),
        (["run"], "8:8", "keeps every weight"),
        (["./nowhere"], "6:8", "no such checkpoint"),
        (["run"], "5:9", "divide|multiple|9"),
    ],
)
def test_what_cannot_be_analysed_is_said(ours, checkpoints, pattern, message, monkeypatch):
    monkeypatch.chdir(ours.parent)
    with pytest.raises(UserError, match=message):
        analyze.main([*checkpoints, "--pattern", pattern, "--out", str(ours.parent / "out")])
    assert not (ours.parent / "out").exists()


def test_a_file_where_the_folder_would_be_is_said(ours, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match=r"^cannot write .*out: File exists"):
        write_weight_report([read_checkpoint(ours, PATTERN)], PATTERN, tmp_path / "out")


def test_a_hub_model_that_cannot_be_had_is_named():
    with pytest.raises(UserError, match="no such folder: nobody/nothing, and the hub"):
        read_checkpoint("nobody/nothing", PATTERN)
