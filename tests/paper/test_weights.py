# SPDX-License-Identifier: Apache-2.0
"""Counts against a plain numpy computation, and the same from a model and from its files."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from factories import tiny_model
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.weight_statistics import bin_centres, pool
from sparse_bitnet_paper.weights import (
    checkpoint_statistics,
    model_statistics,
    weight_statistics,
)

DENSE = SparseBitConfig.parse("full-8:8")


def statistics(weight, text="ternary-6:8", **options):
    return weight_statistics("layers.3.x", weight, SparseBitConfig.parse(text), **options)


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
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, groups * m, generator=generator).to(dtype)
    found = statistics(weight, f"ternary-{pattern}")

    w = weight.float().numpy()
    mean = np.float32(np.abs(w.astype(np.float64)).mean())
    relative = w / mean
    order = np.argsort(-np.abs(w.reshape(-1, m)), axis=1, kind="stable")
    mask = np.zeros_like(w.reshape(-1, m), dtype=bool)
    np.put_along_axis(mask, order[:, :n], True, axis=1)
    codes = np.clip(np.round(relative), -1, 1)
    assert found.weights == w.size
    assert found.block == 3
    assert found.weight_scale == pytest.approx(mean, rel=1e-6)
    assert found.near_zero == (np.abs(relative) < 0.5).sum()
    assert found.code_zeros == (codes == 0).sum()
    assert found.zeros == (codes * mask.reshape(w.shape) == 0).sum()
    assert found.groups == w.size // m
    thresholds = np.sort(np.abs(relative.reshape(-1, m)), axis=1)[:, -(n + 1)]
    inside = int((thresholds < 4).sum())
    assert found.thresholds.sum() == inside
    expected = (thresholds[thresholds < 4]).mean() if inside else 0.0
    centres = bin_centres()[len(found.thresholds) :]
    assert (found.thresholds @ centres) / max(inside, 1) == pytest.approx(expected, abs=0.026)
    assert found.histogram.sum() == ((relative >= -4) & (relative < 4)).sum()


def test_row_blocks_do_not_change_counts(monkeypatch):
    weight = torch.randn(37, 64, generator=torch.Generator().manual_seed(0))
    whole = statistics(weight)
    monkeypatch.setattr("sparse_bitnet_paper.weights._BLOCK_WEIGHTS", 64 * 5)
    parts = statistics(weight)
    assert whole.to_dict() | {"weight_scale": 0} == parts.to_dict() | {"weight_scale": 0}
    assert whole.weight_scale == pytest.approx(parts.weight_scale, rel=1e-12)


def test_zero_fraction_of_each_format():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    assert statistics(weight, "full-8:8").zero_fraction == 0
    assert statistics(weight, "full-6:8").zero_fraction == 0.25
    dense, sparse = statistics(weight, "ternary-8:8"), statistics(weight, "ternary-6:8")
    assert dense.zero_fraction == dense.code_zero_fraction == sparse.code_zero_fraction
    assert sparse.zero_fraction > dense.zero_fraction
    # A Gaussian rounds to zero where |x| < 0.5 E|x| = 0.399 sigma.
    assert dense.code_zero_fraction == pytest.approx(0.310, abs=0.02)
    assert dense.near_zero_mass == pytest.approx(dense.code_zero_fraction, abs=1e-3)


def test_masked_scale_counts_what_the_layer_uses():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    config = SparseBitConfig.parse("ternary-2:4,scale_source=masked")
    layer = build_layer(weight, config)
    with torch.no_grad():
        codes = layer.select().codes
    found = weight_statistics("x", weight, config)
    assert found.zeros == int((codes == 0).sum())
    assert found.block is None


def build_layer(weight, config):
    from sparse_bitnet.nn.layer import SparseBitLinear

    layer = SparseBitLinear(weight.shape[1], weight.shape[0], bias=False, config=config)
    layer.weight.data = weight
    return layer


@pytest.mark.parametrize("quantizer", ["per-channel", "per-group:size=32"])
def test_scales_of_rows_and_groups_count_what_they_round_to_zero(monkeypatch, quantizer):
    monkeypatch.setattr("sparse_bitnet_paper.weights._BLOCK_WEIGHTS", 5 * 64)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight *= torch.logspace(-2, 1, 16)[:, None]
    config = SparseBitConfig.parse(f"ternary-8:8,quantizer={quantizer}")
    found = weight_statistics("layers.0.q", weight, config)
    codes = select(weight, config).codes
    assert found.code_zeros == found.zeros == int((codes == 0).sum())


@pytest.mark.parametrize(
    ("sparse", "dense"),
    [
        ("ternary-6:8,quantizer=binary", "ternary-8:8,quantizer=binary"),
        ("ternary-6:8,quantizer=twn", "ternary-8:8,quantizer=twn"),
        ("ternary-6:8,score=s-ste", "ternary-8:8"),
    ],
)
def test_codes_before_the_mask_are_those_of_the_dense_format(sparse, dense):
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    codes = select(weight, SparseBitConfig.parse(dense)).codes
    assert statistics(weight, sparse).code_zeros == int((codes == 0).sum())


def test_thresholds_of_another_pattern_on_a_dense_layer():
    weight = torch.tensor([[8.0, 7, 6, 5, 4, 3, 2, 1]])
    assert statistics(weight, "ternary-8:8").groups == 0
    found = statistics(weight, "ternary-8:8", pattern=NMPattern(6, 8))
    # The seventh largest, 2, over the mean 4.5.
    assert found.groups == 1
    assert bin_centres()[len(found.thresholds) :][found.thresholds.argmax()] == pytest.approx(
        2 / 4.5, abs=0.025
    )


def test_densities_integrate_to_one():
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    found = statistics(weight)
    width = bin_centres()[1] - bin_centres()[0]
    for density in (found.density, found.magnitude_density, found.threshold_density):
        assert density.sum() * width == pytest.approx(1, abs=0.01)


def test_pool_adds_up():
    generator = torch.Generator().manual_seed(4)
    parts = [statistics(torch.randn(8, 16, generator=generator) * k) for k in (1, 3)]
    pooled = pool(parts)
    assert pooled.weights == 256
    assert pooled.block is None
    assert pooled.zeros == sum(part.zeros for part in parts)
    assert pooled.weight_scale == pytest.approx(sum(part.weight_scale for part in parts) / 2)
    assert (pooled.histogram == parts[0].histogram + parts[1].histogram).all()
    assert json.loads(json.dumps(pooled.to_dict()))["weights"] == 256


def test_pattern_that_does_not_divide_is_refused():
    with pytest.raises(UserError, match=r"layers\.3\.x.*12"):
        weight_statistics("layers.3.x", torch.ones(2, 12), DENSE, pattern=NMPattern(6, 8))


def test_model_and_checkpoint_agree(tmp_path):
    model = build_model("qwen2.5-1m", SparseBitConfig.parse("ternary-6:8"), vocab_size=64)
    save_pretrained(model, tmp_path / "model")
    from_model = model_statistics(model)
    from_files = checkpoint_statistics(tmp_path / "model")
    assert len(from_model) == len(from_files) == 28
    by_name = {layer.name: layer.to_dict() for layer in from_files}
    assert all(by_name[layer.name] == layer.to_dict() for layer in from_model)
    assert {layer.block for layer in from_files} == {0, 1, 2, 3}


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
    found = checkpoint_statistics(tmp_path, pattern=NMPattern(6, 8))
    assert [layer.name for layer in found] == ["layers.2.up", "layers.10.up"]
    assert found[0].zero_fraction == 0


def test_layers_left_dense_are_not_counted(tmp_path):
    entry = {
        "quant_method": "sparse_bitnet",
        "version": 1,
        "format": SparseBitConfig.parse("ternary-6:8").to_dict(),
        "modules_to_not_convert": ["layers.0.up"],
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "other", "quantization_config": entry})
    )
    tensors = {f"layers.{i}.up.weight": torch.randn(4, 8) for i in range(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert [layer.name for layer in checkpoint_statistics(tmp_path)] == ["layers.1.up"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "config.json"),
        ({"config.json": "{}"}, "neither a run folder"),
        ({"config.json": '{"model_type": "other"}'}, "no model"),
        (
            {"config.json": '{"model_type": "other"}', "model.safetensors": "garbage"},
            "safetensors is damaged",
        ),
    ],
)
def test_unreadable_folders_are_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        checkpoint_statistics(tmp_path)


def test_packed_checkpoint_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "other"}')
    packed = {"layers.0.up.weight": torch.ones(4, 8, dtype=torch.uint8)}
    save_file(packed, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="only codes"):
        checkpoint_statistics(tmp_path)


def test_model_without_sparse_layers_is_refused():
    with pytest.raises(UserError, match="convert_"):
        model_statistics(torch.nn.Linear(2, 2))


def test_codes_of_a_packed_bitnet_model_are_counted(tmp_path):
    """As transformers' own quantiser packs them: the near-zero mass is the share of zero codes."""
    model = convert_(tiny_model(), SparseBitConfig.parse("ternary-8:8"))
    save_pretrained(model, tmp_path / "model")
    options = ExportConfig(format="bitnet", embeddings="f32")
    export(tmp_path / "model", tmp_path / "packed", options)
    found = {each.name: each for each in checkpoint_statistics(tmp_path / "packed")}
    trained = checkpoint_statistics(tmp_path / "model")
    assert len(found) == len(trained) == 14
    for each in trained:
        assert found[each.name].near_zero == found[each.name].zeros == each.code_zeros
