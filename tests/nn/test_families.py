# SPDX-License-Identifier: Apache-2.0
"""Families beyond plain decoders: `convert_` recognises their layers, and saved models load again."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from factories import tiny_model, train_on_one_batch
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT = SIZES | {"vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}
IDS = torch.arange(24).view(2, 12)

moe = partial(tiny_model, "qwen2_moe")


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=16, patch_size=8)
    return transformers.ViTForImageClassification(config)


def dinov2() -> nn.Module:
    config = transformers.Dinov2Config(**SIZES, image_size=16, patch_size=8, mlp_ratio=2)
    return transformers.Dinov2ForImageClassification(config)


def gemma3() -> nn.Module:
    config = transformers.Gemma3Config(
        text_config=TEXT | {"head_dim": 16},
        vision_config=SIZES | {"image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    config = transformers.Qwen2VLConfig(
        text_config=TEXT
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4},
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


@pytest.mark.parametrize("build", ["qwen2_moe", "gpt2", "falcon", vit, dinov2, gemma3, qwen2_vl])
def test_saved_models_load_bit_for_bit(build: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="convert_: [0-9]+ matrices")
        model = tiny_model(build) if isinstance(build, str) else build()
        convert_(model, SparseBitConfig())
    save_pretrained(model, tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    assert list(sparse_layers(loaded)) == list(sparse_layers(model))
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_encoders_of_images_and_all_output_heads_stay_dense() -> None:
    for build in (gemma3, qwen2_vl):
        with warnings.catch_warnings(action="error"):
            names = sparse_layers(convert_(build(), SparseBitConfig()))
        assert names
        assert all(name.startswith("model.language_model.layers.") for name in names)
    assert len(sparse_layers(convert_(nn.ModuleDict({"own": vit()}), SparseBitConfig()))) == 12
    model = tiny_model("qwen2")
    model.lm_heads = nn.ModuleList([nn.Linear(64, 96), nn.Linear(64, 96)])
    model.get_output_embeddings = lambda: model.lm_heads
    assert not any("lm_heads" in name for name in sparse_layers(convert_(model, SparseBitConfig())))


def test_a_refused_conversion_of_rotated_weights_changes_nothing() -> None:
    rotated = "ternary-6:8,activation=int8-hadamard:block=32,dense_layers=q_proj"
    model = convert_(tiny_model("qwen2"), rotated)
    before = {name: str(layer.config) for name, layer in sparse_layers(model).items()}
    with pytest.raises(UserError, match="the weights are rotated"):
        convert_(model, "ternary-6:8")
    assert {name: str(layer.config) for name, layer in sparse_layers(model).items()} == before


class TestExperts:
    def test_each_expert_is_two_matrices_with_their_own_scales(self) -> None:
        dense = moe()
        fused = dense.model.layers[1].mlp.experts.gate_up_proj.detach().clone()
        model = convert_(moe(), SparseBitConfig())
        layers = sparse_layers(model)
        names = [
            f"model.layers.1.mlp.experts.{i}.{part}"
            for i in range(4)
            for part in ("gate_up", "down")
        ]
        assert [name for name in layers if "layers.1.mlp.experts" in name] == names
        assert torch.equal(layers[names[2]].weight, fused[1])
        scales = {layers[name].select().weight_scale.item() for name in names}
        assert len(scales) == len(names)
        left = {n for n, p in model.named_parameters() if p.dim() > 1 and "layers" in n} - {
            f"{name}.weight" for name in layers
        }
        gates = ("gate", "shared_expert_gate")
        assert left == {f"model.layers.{i}.mlp.{name}.weight" for i in range(2) for name in gates}

    def test_full_dense_changes_no_bit(self) -> None:
        model = convert_(moe(), SparseBitConfig.parse("full-8:8"))
        assert torch.equal(model(IDS).logits, moe()(IDS).logits)

    def test_learns_one_batch_and_comes_back(self, tmp_path: Path) -> None:
        model = convert_(moe(), SparseBitConfig())
        expert = model.model.layers[0].mlp.experts.get_submodule("0.down").weight
        before = expert.detach().clone()
        losses = train_on_one_batch(model, IDS)
        assert losses[-1] < 0.6 * losses[0]
        assert not torch.equal(expert, before)
        save_pretrained(model, tmp_path / "out")
        assert torch.equal(
            from_pretrained(tmp_path / "out").eval()(IDS).logits, model.eval()(IDS).logits
        )

    def test_leaving_most_of_a_model_dense_is_refused(self) -> None:
        model = moe()
        for layer in model.model.layers:
            layer.mlp.experts.has_bias = True
        before = list(model.state_dict())
        with pytest.raises(UserError, match=r"6 matrices .*experts\.gate_up_proj.*with filter_fn"):
            convert_(model, SparseBitConfig())
        assert not sparse_layers(model)
        assert list(model.state_dict()) == before
        convert_(model, SparseBitConfig(), lambda module, name: name != "lm_head")
        assert len(sparse_layers(model)) == 16

    def test_calibration_reaches_experts_that_were_taken_apart(self) -> None:
        model, config = moe(), SparseBitConfig.parse("full-6:8,score=wanda")
        with pytest.raises(UserError, match="calibration does not reach fused experts"):
            convert_(model, config, calibration=[IDS])
        assert not sparse_layers(model)
        convert_(model, SparseBitConfig.parse("full-8:8"))
        layers = sparse_layers(convert_(model, config, calibration=[IDS]))
        assert any(layer.input_norm.any() for name, layer in layers.items() if "experts.1" in name)

    def test_a_dense_router_is_named_in_a_warning_unless_a_filter_leaves_it(self) -> None:
        attention = SparseBitConfig(dense_layers=("experts", "shared_*"))
        warning = r"convert_: 2 matrices of Qwen2Moe\w+ stay .* 2% .*mlp\.gate\.weight"
        with pytest.warns(UserWarning, match=warning):
            model = convert_(moe(), attention)
        assert len(sparse_layers(model)) == 8
        with warnings.catch_warnings(action="error"):
            model = convert_(moe(), attention, lambda module, name: "self_attn" in name)
        assert len(sparse_layers(model)) == 8


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_linear_layers_by_other_names_compute_the_same(family: str) -> None:
    model = convert_(tiny_model(family).eval(), SparseBitConfig.parse("full-8:8"))
    assert len(sparse_layers(model)) == 8
    expected = tiny_model(family).eval()(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)
    ternary = convert_(tiny_model(family), SparseBitConfig())
    ternary(IDS).logits.sum().backward()
    assert all(layer.weight.grad is not None for layer in sparse_layers(ternary).values())


@pytest.mark.parametrize(
    ("family", "frozen", "end"),
    [
        ("gpt2", ("attn.c_attn.bias", "mlp.c_fc.weight"), ".c_fc"),
        ("qwen2_moe", "experts.down_proj", ".down"),
    ],
)
def test_new_weights_are_frozen_as_the_old_ones(family: str, frozen: Any, end: str) -> None:
    model = tiny_model(family)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith(frozen))
    layers = sparse_layers(convert_(model, SparseBitConfig()))
    left = {name for name, layer in layers.items() if not layer.weight.requires_grad}
    assert left == {name for name in layers if name.endswith(end)}


@pytest.mark.parametrize("family", ["gpt2", "qwen2_moe"])
def test_experts_and_transposed_layers_are_not_exported(family: str, tmp_path: Path) -> None:
    save_pretrained(convert_(tiny_model(family), "ternary-6:8"), tmp_path / "model")
    for write in (pack_checkpoint, lambda *paths: export(*paths, ExportConfig(format="dense"))):
        with pytest.raises(UserError, match="is a stack of experts, or transposed"):
            write(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()
