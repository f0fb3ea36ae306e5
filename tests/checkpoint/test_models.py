# SPDX-License-Identifier: Apache-2.0
"""Presets with the published shapes, reproducible initial weights, starting from existing weights."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from factories import edit_tensors, tiny_model
from sparse_bitnet.checkpoint.build_model import build_model, preset_config
from sparse_bitnet.checkpoint.load import from_pretrained, skeleton
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.convert import convert_, sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.presets import PRESETS

PUBLISHED = {
    # hidden, ffn, layers, heads, kv heads, parameters with tied embeddings counted once
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 494_032_768),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 1_543_714_304),
    "qwen2.5-3b": (2048, 11008, 36, 16, 2, 3_085_938_688),
}


def on_meta(name: str) -> nn.Module:
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        return Qwen2ForCausalLM(preset_config(name))


class TestPresets:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_published_shape_and_parameter_count(self, name: str) -> None:
        hidden, ffn, layers, heads, kv_heads, count = PUBLISHED[name]
        config = preset_config(name)
        assert (config.hidden_size, config.intermediate_size) == (hidden, ffn)
        assert config.num_hidden_layers == layers
        assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
        assert config.vocab_size == 151936
        assert config.tie_word_embeddings
        assert config.rms_norm_eps == 1e-6
        assert config.rope_parameters["rope_theta"] == 1e6
        assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == count

    @pytest.mark.parametrize("name", PRESETS)
    def test_block_weights_is_what_convert_reaches(self, name: str) -> None:
        model = convert_(on_meta(name), SparseBitConfig())
        layers = sparse_layers(model)
        shape = PRESETS[name]
        assert len(layers) == 7 * shape.num_hidden_layers
        assert sum(layer.weight.numel() for layer in layers.values()) == shape.block_weights

    def test_unknown_preset_lists_the_known(self) -> None:
        with pytest.raises(
            UserError, match=r"'qwen9' is not a preset: choose one of .*qwen2\.5-3b"
        ):
            preset_config("qwen9")


def test_initial_weights_have_their_distribution() -> None:
    model = build_model("qwen2.5-1m", SparseBitConfig(), vocab_size=256)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if parameter.dim() == 2:
            assert abs(parameter.std().item() - 0.02) < 0.002, name
        else:
            assert (parameter == (1.0 if "norm" in name else 0.0)).all(), name


class TestInit:
    @pytest.fixture
    def dense(self, tmp_path: Path) -> Path:
        tiny_model("llama", seed=9).save_pretrained(tmp_path / "dense")
        return tmp_path / "dense"

    def test_starts_from_existing_weights(self, dense: Path) -> None:
        model = build_model("ignored", SparseBitConfig(), init=dense, vocab_size=96)
        expected = tiny_model("llama", seed=9).state_dict()
        assert type(model).__name__ == "LlamaForCausalLM"
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        assert len(sparse_layers(model)) == 14

    def test_bfloat16_weights_become_float32_masters(self, tmp_path: Path) -> None:
        tiny_model(seed=9).bfloat16().save_pretrained(tmp_path)
        model = build_model("ignored", SparseBitConfig(), init=tmp_path)
        expected = tiny_model(seed=9).bfloat16().float().state_dict()
        for name, value in model.state_dict().items():
            assert value.dtype == torch.float32
            assert torch.equal(value, expected[name])

    def test_from_a_checkpoint_of_ours_takes_the_new_format(self, tmp_path: Path) -> None:
        model = build_model("qwen2.5-1m", SparseBitConfig.parse("ternary-8:8"), vocab_size=256)
        model.save_pretrained(tmp_path)
        again = build_model("ignored", SparseBitConfig.parse("full-2:4"), init=tmp_path)
        formats = {str(layer.config) for layer in sparse_layers(again).values()}
        assert formats == {"full-2:4"}
        state = model.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in again.state_dict().items())

    @pytest.mark.parametrize("size", [95, 500])
    def test_another_vocabulary_size_is_refused(self, dense: Path, size: int) -> None:
        with pytest.raises(UserError, match=rf"vocab_size={size}: --init .* has 96 rows"):
            build_model("ignored", SparseBitConfig(), init=dense, vocab_size=size)

    def test_training_does_not_start_from_a_packed_model(self, dense: Path, tmp_path: Path) -> None:
        save_pretrained(convert_(from_pretrained(dense), "ternary-6:8"), tmp_path / "trained")
        pack_checkpoint(tmp_path / "trained", tmp_path / "packed")
        with pytest.raises(UserError, match="packed is packed: training needs the weights, so"):
            build_model("ignored", SparseBitConfig(), init=tmp_path / "packed")
        entry = {"quantization_config": {"quant_method": "compressed-tensors"}}
        config = json.loads((dense / "config.json").read_text()) | entry
        (tmp_path / "trained" / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match="another tool's; run sparse-bitnet import"):
            build_model("ignored", SparseBitConfig(), init=tmp_path / "trained")

    def test_incomplete_weights_are_refused_not_randomised(self, dense: Path) -> None:
        edit_tensors(dense, {"model.layers.1.mlp.down_proj.weight": None})
        with pytest.raises(UserError, match=r"lacks model\.layers\.1\.mlp\.down_proj\.weight"):
            build_model("ignored", SparseBitConfig(), init=dense)

    def test_numbers_that_json_lacks_are_read(self, dense: Path) -> None:
        config = json.loads((dense / "config.json").read_text())
        config["rms_norm_eps"] = {"__float__": "Infinity"}  # as transformers writes it
        assert skeleton(config, dense).config.rms_norm_eps == float("inf")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": "x"}, "'hidden_size'.*expected int, got str"),
            ({"num_attention_heads": 0}, "zero"),
            ({"rope_parameters": 3}, "rope_parameters"),
            ({"vocab_size": -3}, "negative dimension"),
            ({"hidden_act": "x9"}, "x9"),
            ({"model_type": "x9"}, "x9"),
        ],
    )
    def test_impossible_configs_are_one_line(self, dense: Path, changes: dict, message: str):
        config = json.loads((dense / "config.json").read_text()) | changes
        with pytest.raises(UserError, match=message) as raised:
            skeleton(config, dense)
        assert "\n" not in str(raised.value)
        (dense / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=message) as raised:
            build_model("ignored", SparseBitConfig(), init=dense)
        assert "\n" not in str(raised.value)
