# SPDX-License-Identifier: Apache-2.0
"""MLX's folders of two bits: plain, and with rotated weights, of Qwen3.5 and of other models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from factories import edit_json
from packed_models import typical_error
from sparse_bitnet.checkpoint.declared_rotation import PREFIX
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.packing.two_bits import pack_words

pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")
pytest.importorskip("gguf")
from test_gguf_qwen35 import TERNARY, assert_same_model, ternary_qwen35
from test_rotated_models import before, keys_of, logits, rotation_of, unquantised
from test_ternary_folders import by_group, save_model
from test_ternary_tables import EMBEDDING, HEAD

DECLARED = {
    **{"model_type": "prism_hadamard_qwen35", "base_model_type": "qwen3_5", "schema_version": 2},
    **{"tensor_namespace": "mlx-vlm-qwen3_5", "gdn_activation_layout": "grouped"},
    "hadamard_config": "hadamard.json",
}


def write_mlx(folder: Path, model: Any, group: int, rotation: Any = None) -> None:
    """Write a model whose matrices are ternary, and with a rotation the embeddings too."""
    model.save_pretrained(folder)
    text, base, modules = json.loads((folder / "config.json").read_text()), "", []
    config: dict[str, Any] = {"quantization": {"bits": 2, "group_size": group, "mode": "affine"}}
    stored: dict[str, torch.Tensor] = {}
    if is_qwen35 := text["model_type"] == "qwen3_5_text":
        config |= {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1}}
        base, stored = "language_model.", {"vision_tower.x.scales": torch.ones(2, 2)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        path = name.removesuffix(".weight")
        if name.endswith((*TERNARY, *((EMBEDDING, HEAD) if rotation else ()))):
            scales = tensor.abs().unflatten(1, (-1, group)).amax(-1).half()
            affine = [pack_words(tensor.sign().to(torch.int8) - 1), scales, -scales]
        elif name.endswith("in_proj_a.weight") and not rotation:  # dense: 2 q - 1 is not ternary
            scales = torch.full((len(tensor), tensor.shape[1] // group), 2.0)
            affine = [pack_words((tensor > 0).to(torch.int8) - 2), scales, scales - 3]
        else:
            is_norm = name.endswith("norm.weight") and "linear_attn" not in name
            tensor = tensor.swapaxes(1, -1) if name.endswith("conv1d.weight") else tensor
            stored[base + name] = (tensor + (is_norm and is_qwen35)).contiguous()
            continue
        affine[0] = affine[0].view(torch.uint32)
        if rotation:
            affine.append(torch.from_numpy(rotation.values(tensor.shape[1])))
            record = {"block": rotation.block, "dtype": "float16", "embedding": "embed" in path}
            modules.append({"path": path, **record})
        ends = ("weight", "scales", "biases", "signs")
        stored |= {f"{base}{path}.{end}": each for end, each in zip(ends, affine, strict=False)}
    save_file(stored, folder / "model.safetensors", {"format": "mlx"})
    if rotation:
        config |= {**DECLARED, "modules": modules, "requires_runtime": "artifact.py"}
        folded = [f"{base}{each['path']}.weight" for each in modules if not each["embedding"]]
        ties, inverse = model.config.tie_word_embeddings, [base + EMBEDDING]
        more = {"version": 1 + ties, "tied_output": ties, "inverse_weight_names": inverse}
        keys = keys_of(rotation, folded, gdn_v_grouped=True, **more)
        keys = {PREFIX + key: value for key, value in keys.items()}
        (folder / "hadamard.json").write_text(json.dumps(keys))
    (folder / "config.json").write_text(json.dumps(config if is_qwen35 else text | config))


@pytest.mark.parametrize("group", [64, 128], ids=["qwen3", "qwen3_5"])
def test_two_bits_are_imported_exactly(tmp_path: Path, group: int) -> None:
    """Qwen3.5's norms and convolutions have another form; its image encoder is ignored."""
    folder, packed = tmp_path / "model", tmp_path / "packed"
    qwen3 = save_model(folder, "qwen3", by_group, torch.half)
    model = qwen3 if group == 64 else ternary_qwen35(group)
    write_mlx(folder, model, group)
    import_checkpoint(folder, packed, packed="i2", embeddings="float32")
    for path in (folder, packed):
        assert_same_model(open_checkpoint(path), model)


@pytest.mark.parametrize("ties", [True, False])
def test_rotated_qwen35_computes_the_model_from_before(tmp_path: Path, ties: bool) -> None:
    model = ternary_qwen35(128, tie_word_embeddings=ties)
    for table in {model.model.embed_tokens.weight, model.lm_head.weight}:
        codes = torch.randint(-1, 2, table.shape)
        table.data = codes * (torch.rand(len(codes), 1) * 0.1 + 0.02).half().float()
    rotation = rotation_of((256, 512, 768), 64, True, True)
    folder = tmp_path / "mlx"
    write_mlx(folder, model, 128, rotation)
    import_checkpoint(folder, tmp_path / "packed", packed="i2")
    packed = open_checkpoint(tmp_path / "packed")
    assert (packed.rotation, packed.metadata.embeddings) == (rotation, "ternary")
    assert typical_error(unquantised(tmp_path / "packed"), logits(before(model, rotation))) < 1e-4
    with pytest.raises(UserError, match="in a rotated basis"):
        from_pretrained(folder)
    wrong = {"block_size": 32, "version": 3, "sign_values": [1] * 1536, "gdn_v_grouped": False}
    wrong = {PREFIX + key: value for key, value in wrong.items()} | dict.fromkeys(DECLARED)
    for key, value in (wrong | {"modules": []}).items():
        path = folder / ("hadamard.json" if key.startswith(PREFIX) else "config.json")
        text = path.read_text()
        edit_json(path, **{key: value})
        with pytest.raises(UserError, match=rf"{key}|modules does not fit|signs are not"):
            open_checkpoint(folder).ternary("model.layers.0.mlp.up_proj")
        path.write_text(text)
