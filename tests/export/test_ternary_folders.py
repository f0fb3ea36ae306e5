# SPDX-License-Identifier: Apache-2.0
"""Model folders without quantization settings whose weights are ternary: detected, and read exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from exported import assert_import_refused
from factories import edit_json, edit_tensors, logits_of, tiny_model
from packed_models import engine_logits, reference_logits, typical_error
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.importer import import_checkpoint

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
UP = "model.layers.1.mlp.up_proj.weight"
IDS = list(range(32))


def save_model(folder: Path, family: str, scales_of: Any, dtype: torch.dtype) -> Any:
    """A random model with ternary linears; `scales_of`(rows, columns) gives what codes are times."""
    model: Any = tiny_model(family, seed=5, **SIZES).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            codes = torch.randint(-1, 2, parameter.shape)
            parameter.data = (codes * scales_of(*parameter.shape).to(dtype)).to(dtype)
    model.save_pretrained(folder)
    return model.float().eval()


def by_matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.rand(1, 1) * 0.05 + 0.01


def by_row(rows: int, columns: int) -> torch.Tensor:
    """TriLM has one scale for each part that a device held."""
    return (torch.rand(2, 1) * 0.05 + 0.01).repeat_interleave(rows // 2, 0)


def by_group(rows: int, columns: int) -> torch.Tensor:
    return (torch.rand(rows, columns // 64) * 0.05 + 0.01).repeat_interleave(64, 1)


def by_either(rows: int, columns: int) -> torch.Tensor:
    """Matrices beside each other, those of k and v with scales of rows, that of q with groups."""
    return by_row(rows, columns) if rows == 128 else by_group(rows, columns)


@pytest.mark.parametrize(
    ("family", "scales_of", "dtype"),
    [
        ("llama", by_either, torch.float16),
        ("llama", by_row, torch.float16),
        ("qwen3", by_group, torch.bfloat16),
        ("bitnet", by_matrix, torch.bfloat16),
    ],
)
def test_ternary_floats_are_imported_exactly(
    tmp_path: Path, family: str, scales_of: Any, dtype: torch.dtype
) -> None:
    model = save_model(tmp_path / "model", family, scales_of, dtype)
    assert find_checkpoint(tmp_path / "model").kind == "foreign"
    folder, out = tmp_path / "model", tmp_path / "packed"
    result = import_checkpoint(folder, out, packed="i2", embeddings="float32")
    assert (result.kind, result.layers) == ("ternary floats", 14)
    packed = open_checkpoint(tmp_path / "packed", "packed")
    for layer in packed.layers:
        ternary = packed.ternary(layer)
        assert torch.equal(ternary.values(), model.state_dict()[f"{layer}.weight"])
        assert ternary.weight_scale.dtype in (torch.float32, dtype)
    imported = reference_logits(tmp_path / "packed", IDS)
    assert typical_error(engine_logits(tmp_path / "packed", IDS), imported) < 1e-5
    expected = logits_of(model, IDS)
    assert np.linalg.norm(imported - expected) < 0.05 * np.linalg.norm(expected)


def test_a_matrix_that_is_ternary_only_at_first_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", by_row, torch.float16)
    noise = torch.randn(512, 256).half() * (torch.arange(512) == 100)[:, None]
    edit_tensors(tmp_path / "model", {UP: lambda weight: weight + noise})
    for packed, message in (
        ("i2", r"layers\.1\.mlp\.up_proj .* is not ternary, though"),
        (None, "has several scales, which only packed folders hold"),
    ):
        assert_import_refused(tmp_path / "model", tmp_path / "no", message, packed=packed)


def test_layers_of_zeros_are_named(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", by_row, torch.float16)
    edit_tensors(tmp_path / "model", {UP: torch.zeros_like})
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.up_proj .* only zero weights"):
        import_checkpoint(tmp_path / "model", tmp_path / "packed", packed="i2")
    assert not open_checkpoint(tmp_path / "packed").effective("model.layers.1.mlp.up_proj").any()


def test_tensors_in_two_files_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "llama", by_row, torch.float16)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    some = {"model.norm.weight": tensors["model.norm.weight"]}
    save_file(some, tmp_path / "model" / "model-2.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"tensor model\.norm\.weight is in model.* and model"):
        open_checkpoint(tmp_path / "model")


def test_first_published_bitnet_is_imported(tmp_path: Path) -> None:
    """Llama by its config, two norms more by its tensors; masters in float16."""
    model: Any = tiny_model("bitnet", seed=5, hidden_act="silu", **SIZES).half()
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    old = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
    tensors = {
        ".".join(old.get(part, part) for part in name.split(".")): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    values = {"model_type": "llama", "architectures": ["BitnetForCausalLM"], "weight_bits": 1}
    edit_json(tmp_path / "model" / "config.json", **values)
    result = import_checkpoint(tmp_path / "model", tmp_path / "packed", packed="i2")
    assert (result.kind, result.layers) == ("bitnet masters", 14)
    packed = open_checkpoint(tmp_path / "packed")
    weight = model.model.layers[0].mlp.up_proj.weight.float()
    scale = weight.abs().mean()
    expected = (weight / scale).round().clamp(-1, 1)
    assert torch.equal(packed.ternary("model.layers.0.mlp.up_proj").codes.float(), expected)
    assert packed.config["hidden_act"] == "silu"


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("revision", ["main", "bfloat16"])
def test_published_falcon_e_is_imported(tmp_path: Path, head_dim: int, revision: str) -> None:
    """A Llama without a bias whose heads need not share out its hidden size. On main rows of four codes a
    byte with the scale's inverse in bfloat16; in the other revision bfloat16 weights."""
    changes = {"head_dim": head_dim, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model: Any = tiny_model("llama", seed=6, rms_norm_eps=1e-5, **(SIZES | changes)).bfloat16()
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        packed[name] = tensor.clone()
        if name.endswith("proj.weight"):
            codes = torch.randint(-1, 2, tensor.shape, dtype=torch.int8)
            inverse = (torch.rand(1) * 50 + 20).bfloat16()
            tensor.copy_(codes / inverse.float())
            # Row r of a quarter lies in the bits 2 * quarter of byte r.
            quarters = (codes + 1).to(torch.uint8).view(4, -1, codes.shape[1]).unbind()
            packed[name] = sum(part << 2 * place for place, part in enumerate(quarters))
            packed[f"{name}_scale"] = inverse
    model.save_pretrained(tmp_path / "model")
    if revision == "main":
        save_file(packed, tmp_path / "model" / "model.safetensors", {"format": "pt"})
        entry = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}
        edit_json(tmp_path / "model" / "config.json", quantization_config=entry)
    folder, out = tmp_path / "model", tmp_path / "packed"
    result = import_checkpoint(folder, out, packed="i2", embeddings="float32")
    kind = "bitnet" if revision == "main" else "ternary floats"
    assert (result.kind, result.layers) == (kind, 14)
    checkpoint = open_checkpoint(tmp_path / "packed", "packed")
    for layer in checkpoint.layers:
        values = checkpoint.ternary(layer).values().bfloat16()
        assert torch.equal(values, model.state_dict()[f"{layer}.weight"])
    expected = reference_logits(tmp_path / "packed", IDS)
    assert typical_error(engine_logits(tmp_path / "packed", IDS), expected) < 1e-5
