# SPDX-License-Identifier: Apache-2.0
"""`--dense-layers` means the same in every command with a format or a pattern."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sparse_bitnet.cli import paper
from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.scales import QuickstartConfig

DOWN = ["--dense-layers", "down_proj"]


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
        paper.analyze(["model"])
    paper.analyze([*DOWN, "model"])
    weights = json.loads((tmp_path / "analysis" / "weights.json").read_text())
    assert [layer["name"] for layer in weights[0]["layers"]] == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    "command",
    [
        lambda typo: QuickstartConfig(dense_layers=typo),
        lambda typo: paper.reproduce(
            ["table2", "--scale", "smoke", "--dry-run", "--dense-layers", typo]
        ),
    ],
)
def test_a_glob_that_matches_no_layer_is_refused(command):
    with pytest.raises(
        UserError, match=r"dense_layers donw: no linear layer of .* has such a name"
    ):
        command("down_proj,donw")
    with pytest.raises(UserError, match="give names of layers"):
        command(",")
