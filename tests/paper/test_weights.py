# SPDX-License-Identifier: Apache-2.0
"""Counts of weights against plain numpy, from models and files, and the command `analyze`."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import reference
from factories import tiny_model
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.cli.paper import analyze
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.weight_counts import BIN_CENTRES, BIN_WIDTH, as_json
from sparse_bitnet_paper.weights import (
    count_checkpoint,
    count_model,
    count_weights,
    read_checkpoint,
    summary_table,
    write_weight_report,
)

PATTERN = NMPattern(6, 8)


def counted(weight, text="ternary-6:8", **options):
    config = SparseBitConfig.parse(text)
    return pd.Series(count_weights("layers.3.x", weight, config, **options))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    groups=st.integers(1, 6),
    pattern=st.sampled_from(["6:8", "2:4", "1:2", "5:7"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    seed=st.integers(0, 99),
)
def test_counts_equal_numpy(rows, groups, pattern, dtype, seed):
    n, m = map(int, pattern.split(":"))
    weight = random(rows, groups * m, seed=seed).to(dtype)
    counts = counted(weight, f"ternary-{pattern}")

    w = weight.float().numpy()
    mean = np.float32(np.abs(w.astype(np.float64)).mean())
    relative = w / mean
    mask = reference.top_n(np.abs(w), n, m)
    codes = np.clip(np.round(relative), -1, 1)
    assert counts.weights == w.size
    assert counts.block == 3
    assert counts.absolute_sum / w.size == pytest.approx(mean, rel=1e-6)
    assert counts.near_zero == (np.abs(relative) < 0.5).sum()
    assert counts.code_zeros == (codes == 0).sum()
    assert counts.zeros == (codes * mask == 0).sum()
    assert counts.groups == w.size // m
    thresholds = np.sort(np.abs(relative.reshape(-1, m)), axis=1)[:, -(n + 1)]
    inside = int((thresholds < 4).sum())
    assert counts.thresholds.sum() == inside
    expected = (thresholds[thresholds < 4]).mean() if inside else 0.0
    centres = BIN_CENTRES[len(counts.thresholds) :]
    assert (counts.thresholds @ centres) / max(inside, 1) == pytest.approx(expected, abs=0.026)
    assert counts.histogram.sum() == ((relative >= -4) & (relative < 4)).sum()


@pytest.mark.parametrize(
    "text",
    [
        "ternary-2:4,scale_source=masked",
        "ternary-8:8,quantizer=per-channel",
        "ternary-8:8,quantizer=per-group:size=32",
    ],
)
def test_zeros_are_those_of_the_codes_that_the_layer_uses(text):
    weight = random(16, 64) * torch.logspace(-2, 1, 16)[:, None]
    codes = select(weight, SparseBitConfig.parse(text)).codes
    assert counted(weight, text).zeros == int((codes == 0).sum())


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        ("ternary-6:8,quantizer=binary", "ternary-8:8,quantizer=binary"),
        ("ternary-6:8,quantizer=twn", "ternary-8:8,quantizer=twn"),
        ("ternary-6:8,score=s-ste", "ternary-8:8"),
    ],
)
def test_codes_before_the_mask_are_those_of_the_dense_format(sparse, dense):
    weight = random(8, 16)
    codes = select(weight, SparseBitConfig.parse(dense)).codes
    assert counted(weight, sparse).code_zeros == int((codes == 0).sum())


def test_thresholds_of_another_pattern_are_counted_on_a_dense_layer():
    weight = torch.tensor([[8.0, 7, 6, 5, 4, 3, 2, 1]])
    assert counted(weight, "ternary-8:8").groups == 0
    counts = counted(weight, "ternary-8:8", pattern=PATTERN)
    # The seventh largest, 2, over the mean 4.5.
    assert counts.groups == 1
    place = BIN_CENTRES[len(counts.thresholds) :][counts.thresholds.argmax()]
    assert place == pytest.approx(2 / 4.5, abs=BIN_WIDTH / 2)


def test_model_and_checkpoint_agree(tmp_path):
    model = build_model("qwen2.5-1m", SparseBitConfig.parse("ternary-6:8"), vocab_size=64)
    save_pretrained(model, tmp_path / "model")
    of_model, of_files = count_model(model), count_checkpoint(tmp_path / "model")
    assert len(of_model) == len(of_files) == 28
    by_name = {layer["name"]: as_json(layer) for _, layer in of_files.iterrows()}
    for _, layer in of_model.iterrows():
        assert by_name[layer["name"]] == as_json(layer)
    assert set(of_files.block) == {0, 1, 2, 3}


def test_foreign_checkpoint_counts_block_matrices_only(tmp_path):
    tensors = {
        "embed.weight": torch.randn(10, 8),
        "layers.10.up.weight": torch.randn(4, 8),
        "layers.2.up.weight": torch.randn(4, 8),
        "layers.2.norm.weight": torch.randn(8),
        "layers.2.up.bias": torch.randn(4),
        "layers.2.packed.weight": torch.ones(4, 8, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    counts = count_checkpoint(tmp_path, pattern=PATTERN)
    assert list(counts.name) == ["layers.2.up", "layers.10.up"]
    assert counts.zeros[0] == 0


def test_packed_checkpoint_and_ordinary_model_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    packed = {"layers.0.up.weight": torch.ones(4, 8, dtype=torch.uint8)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="only codes"):
        count_checkpoint(tmp_path)
    with pytest.raises(UserError, match="convert_"):
        count_model(torch.nn.Linear(2, 2))


def test_codes_of_a_packed_bitnet_model_are_counted(tmp_path):
    """Weights that transformers' own quantiser packed: the near-zero mass is the share of zero codes."""
    model = convert_(tiny_model(), SparseBitConfig.parse("ternary-8:8"))
    save_pretrained(model, tmp_path / "model")
    options = ExportConfig(format="bitnet", embeddings="f32")
    export(tmp_path / "model", tmp_path / "packed", options)
    packed = count_checkpoint(tmp_path / "packed").set_index("name")
    trained = count_checkpoint(tmp_path / "model").set_index("name")
    assert len(packed) == len(trained) == 14
    packed = packed.loc[trained.index]
    assert (packed.near_zero == trained.code_zeros).all()
    assert (packed.zeros == trained.code_zeros).all()


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


def test_a_report_holds_every_layer_and_every_figure(ours, foreign, tmp_path):
    checkpoints = [read_checkpoint(str(path), PATTERN) for path in (ours, foreign)]
    assert [checkpoint.weight for checkpoint in checkpoints] == ["ternary", "ternary"]
    summary = summary_table(checkpoints).frame
    assert list(summary.index) == ["run", "bitnet-b1.58-masters"]
    assert list(summary.weights) == [f"{checkpoints[0].layers.weights.sum():,}"] * 2
    write_weight_report(checkpoints, PATTERN, tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "weights.json").read_text("utf-8"))
    assert [len(entry["layers"]) for entry in counts] == [14, 14]
    layer = counts[0]["layers"][0]
    assert layer["groups"] * 8 == layer["weights"] >= sum(layer["histogram"])
    assert layer["near_zero_mass"] == layer["near_zero"] / layer["weights"]
    page = (tmp_path / "out" / "weights.html").read_text("utf-8")
    assert page.count("<figure>") == 1 + 2 + 1
    assert "42.3 %" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_command_shows_names_as_they_are(ours, tmp_path, monkeypatch, capsys):
    shutil.move(ours, tmp_path / "run[v2]")
    monkeypatch.chdir(tmp_path)
    analyze(["run[v2]"])
    printed = capsys.readouterr().out
    for words in ("run[v2]", "near-zero", "weights.html"):
        assert words in printed
    with pytest.raises(UserError, match=r"x\[/b\]"):
        analyze(["x[/b]"])


def test_analyze_skips_dense_layers_that_no_pattern_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = {
        "model.layers.0.mlp.up_proj.weight": torch.randn(172, 64),
        "model.layers.0.mlp.down_proj.weight": torch.randn(64, 172),
    }
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"172 is not a multiple of 8.*--dense-layers"):
        analyze(["model"])
    analyze(["--dense-layers", "down_proj", "model"])
    weights = json.loads((tmp_path / "analysis" / "weights.json").read_text())
    assert [layer["name"] for layer in weights[0]["layers"]] == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("checkpoints", "pattern", "message"),
    [
        ([], "6:8", "CHECKPOINT is missing"),
        (["run"], "8:8", "keeps every weight"),
        (["./nowhere"], "6:8", "no such checkpoint"),
        (["run"], "5:9", "divide|multiple|9"),
    ],
)
def test_checkpoints_that_cannot_be_analysed_are_refused(
    ours, checkpoints, pattern, message, monkeypatch
):
    monkeypatch.chdir(ours.parent)
    with pytest.raises(UserError, match=message):
        analyze([*checkpoints, "--pattern", pattern, "--out", str(ours.parent / "out")])
    assert not (ours.parent / "out").exists()
