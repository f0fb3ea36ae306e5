# SPDX-License-Identifier: Apache-2.0
"""A norm in every linear (BitNet-embedding), against transformers' own layer that has one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from exported import assert_import_refused
from factories import edit_json, edit_quantization, randomise_vectors_, tiny_model
from packed_models import engine_logits, reference_logits, typical_error
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.model_folder import LINEAR_NORMS, TOKENIZER_FILES, copy_files
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.engine.engine import Engine
from sparse_bitnet.errors import Unsupported, UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.generation.pooling import read_pooling

TOKENS = [number * 7 % 96 for number in range(1, 33)]


def reference(family: str, **changes: Any) -> Any:
    """A random model in float32 whose linears are transformers' AutoBitLinear with norms."""
    from transformers.integrations.bitnet import AutoBitLinear

    model: Any = tiny_model(family, seed=5, rms_norm_eps=1e-6, **changes)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            sizes = (module.in_features, module.out_features, False)
            layer = AutoBitLinear(*sizes, online_quant=True, use_rms_norm=True, rms_norm_eps=1e-6)
            layer.weight.data = module.weight.data.bfloat16().float()
            model.set_submodule(name, layer)
    return randomise_vectors_(model, mean=0.6, std=0.2).eval()


def write(folder: Path, model: Any, *, released: bool) -> Path:
    """Released folders have the names of a text encoder and no quantiser; others are transformers'."""
    folder.mkdir()
    state = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if "lm_head" not in name
    }
    config = json.loads(model.config.to_json_string())
    if released:
        state = {
            name.removeprefix("model.").replace(".rms_norm.", ".norm."): tensor
            for name, tensor in state.items()
        }
    else:
        entry = {"quant_method": "bitnet", "quantization_mode": "online", "use_rms_norm": True}
        config["quantization_config"] = entry | {"linear_class": "autobitlinear"}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@torch.no_grad()
def expected(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden states of all tokens."""
    with torch.compiler.set_stance("force_eager"):
        hidden = model.model(torch.tensor([TOKENS])).last_hidden_state
        return model.lm_head(hidden)[0].numpy(), hidden[0].numpy()


@pytest.mark.parametrize(("family", "released"), [("qwen3", True), ("gemma3_text", False)])
def test_engine_equals_transformers_layers(tmp_path: Path, family: str, released: bool) -> None:
    model = reference(family)
    folder = write(tmp_path / "model", model, released=released)
    assert find_checkpoint(folder).kind == "foreign"
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "mean"}')
    import_checkpoint(folder, tmp_path / "packed", packed="i2", embeddings="float32")
    assert read_pooling(tmp_path / "packed") == "mean"
    logits, hidden = expected(model)
    assert typical_error(reference_logits(tmp_path / "packed", TOKENS), logits) < 1e-5
    engine = Engine.load(tmp_path / "packed", head="stored", kv_cache="float32", threads=1)
    for what, wanted in (("all", logits), ("hidden", hidden)):
        sequence = engine.new_sequence()
        parts = [engine.forward([(sequence, part)], what)[0] for part in (TOKENS[:20], TOKENS[20:])]
        assert typical_error(np.concatenate(parts), wanted) < 1e-5, what
        sequence.close()
    engine.close()
    edit_json(folder / "config.json", rms_norm_eps=1e-5)
    assert open_checkpoint(folder).config[LINEAR_NORMS] == (1e-5 if released else 1e-6)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("rms_norm_eps", "1e-6", "rms_norm_eps is '1e-6', not a positive number"),
        ("modules_to_not_convert", ["(a+)+$"], "is not a list of names"),
        ("modules_to_not_convert", 3, "is not a list of names"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, setting: str, value: object, message: str):
    folder = write(tmp_path / "model", reference("qwen3"), released=False)
    edit_quantization(folder, **{setting: value})
    assert_import_refused(folder, tmp_path / "no", message, packed="i2")


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_gguf_keeps_linear_norms(tmp_path: Path, checkpoint: Path, family: str) -> None:
    """bitnet.cpp's names, written and read back; Gemma's norms have no offset there."""
    sizes = {"vocab_size": 392, "head_dim": 32, "query_pre_attn_scalar": 32}
    model = reference(family, **(sizes if family == "gemma3_text" else {"vocab_size": 392}))
    folder = write(tmp_path / "model", model, released=True)
    copy_files(checkpoint, folder, TOKENIZER_FILES)
    import_checkpoint(folder, tmp_path / "packed", packed="i2", embeddings="float32")
    config = ExportConfig(format="gguf-q2_0", embeddings="f32")
    assert "llama.cpp does not" in str(
        export(tmp_path / "packed", tmp_path / "out", config).warning
    )
    (file,) = (tmp_path / "out").glob("*.gguf")
    stored = GgufFile(file)
    np.testing.assert_array_equal(
        stored.floats("blk.1.ffn_down_norm_in.weight"),
        model.model.layers[1].mlp.down_proj.rms_norm.weight.detach(),
    )
    import_checkpoint(file, tmp_path / "back", packed="i2", embeddings="float32")
    np.testing.assert_array_equal(
        *(engine_logits(tmp_path / name, TOKENS) for name in ("packed", "back"))
    )


def test_masters_other_folders_and_another_epsilon_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", reference("qwen3"), released=True)
    message = r"norms in its linear layers.*--packed-format auto"
    assert_import_refused(folder, tmp_path / "no", message)
    import_checkpoint(folder, tmp_path / "packed", packed="i2")
    for format in ("dense", "bitnet", "compressed-tensors-w8a8"):
        with pytest.raises(UserError, match=r"proj\.norm\.weight is not part of the model in its"):
            export(tmp_path / "packed", tmp_path / "out", ExportConfig(format=format))
    assert not (tmp_path / "out").exists()
    edit_json(tmp_path / "packed" / "config.json", linear_norms_epsilon=1e-5)
    with pytest.raises(Unsupported, match="norms of two epsilons"):
        Engine.load(tmp_path / "packed")
