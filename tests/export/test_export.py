# SPDX-License-Identifier: Apache-2.0
"""Exporting: folders that are complete, appear whole, and replace nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factories import changed
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export, write
from sparse_bitnet.export.export_config import FORMATS, ExportConfig
from sparse_bitnet.export.hf_folder import copy_tokenizer

FITTING = [name for name in FORMATS if not name.startswith("gguf-tq")]


@pytest.mark.parametrize("format", FITTING)
def test_a_folder_is_complete_and_always_the_same(checkpoint: Path, tmp_path: Path, format: str):
    seen: list[tuple[int, int]] = []
    config = ExportConfig(format=format)
    export(checkpoint, tmp_path / "again", config, on_progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    out = tmp_path / "out"
    result = export(checkpoint, out, config)
    for file in (tmp_path / "again").iterdir():
        assert (out / file.name).read_bytes() == file.read_bytes(), file.name
    files = {file.name: file for file in out.iterdir()}
    assert result.nbytes == sum(file.stat().st_size for file in files.values())
    if format.startswith("gguf"):
        assert files.keys() == {"README.md", f"model-{format[5:].upper()}.gguf"}
        return
    assert {*files} == {
        *("README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    generation = json.loads(files["generation_config.json"].read_text("utf-8"))
    assert generation["eos_token_id"] == 0
    tokenizer = json.loads(files["tokenizer_config.json"].read_text("utf-8"))
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    texts = [file.read_text("utf-8") for file in files.values() if file.suffix != ".safetensors"]
    assert str(tmp_path) not in "".join(texts)


BY_KIND = {"full_attention": {"rope_theta": 2.0}, "sliding_attention": {"rope_theta": 3.0}}


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1e6}),
        (BY_KIND, {"model_type": "gemma3_text", "rope_theta": 2.0, "rope_local_base_freq": 3.0}),
        (BY_KIND, {"model_type": "olmo3", "rope_theta": 2.0}),
        ({"full_attention": {}, "sliding_attention": None}, {"model_type": "gemma3_text"}),
        ({"rope_theta": 2.0}, {"model_type": "gemma3_text"}),
        ({"rope_theta": 2.0}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (
            {"rope_theta": 2.0, "partial_rotary_factor": 0.5},
            {"model_type": "gpt_neox", "rotary_emb_base": 2.0, "rotary_pct": 0.5},
        ),
    ],
)
def test_rope_is_also_stored_where_transformers_4_looks(source, tmp_path, rope, expected):
    family = expected.get("model_type", "qwen2")
    given = source.config | {"model_type": family, "rope_parameters": rope}
    scaling = {name: expected[name] for name in expected if name == "rope_scaling"}
    own = changed(source, config=given | scaling)
    write(own, tmp_path / "out", ExportConfig(format="dense"))
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    assert config.items() >= expected.items()
    assert ("rope_theta" in config) == ("rope_theta" in expected)
    assert config["rope_parameters"] == own.config["rope_parameters"]


def test_special_tokens_are_named_as_transformers_4_and_5_read_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(checkpoint)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|im_end|>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    copy_tokenizer(tmp_path / "model", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
    assert config["additional_special_tokens"] == ["<|im_end|>"]
    assert "extra_special_tokens" not in config
    assert "<|im_end|>" in load_tokenizer(tmp_path / "out").all_special_tokens


@pytest.mark.parametrize(
    ("format", "scale", "message"),
    [
        ("bitnet", 1.2e-5, "1 / its weight scale .* too large for float16; use --embeddings bf16"),
        ("gguf-q2_0", 1.03e-6, "weight scale 1.03e-06 is out of range for the float16"),
    ],
)
def test_scales_that_float16_cannot_store_are_refused(
    source, tmp_path: Path, format: str, scale: float, message: str
) -> None:
    def ternary(name: str):
        return source.ternary(name)._replace(weight_scale=torch.tensor(scale))

    tiny, layer = changed(source, ternary=ternary), next(iter(source.layers))
    for embeddings in ("f32", "bf16") if format == "bitnet" else ():
        write(tiny, tmp_path / embeddings, ExportConfig(format=format, embeddings=embeddings))
    with pytest.raises(UserError, match=f"{layer}: .*{message}"):
        write(tiny, tmp_path / "out", ExportConfig(format=format, embeddings="f16"))
    assert not (tmp_path / "out").exists()


def test_dense_weights_are_the_effective_ones_and_come_with_a_warning(
    checkpoint: Path, tmp_path: Path
) -> None:
    result = export(checkpoint, tmp_path / "out", ExportConfig(format="dense", embeddings="f32"))
    assert result.warning is not None
    assert "wrong scale" in result.warning
    source = open_checkpoint(checkpoint)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in source.layers:
        assert torch.equal(tensors[f"{name}.weight"], source.effective(name))
    assert "quantization_config" not in json.loads(
        (tmp_path / "out" / "config.json").read_text("utf-8")
    )


def test_full_precision_models_go_to_dense_without_a_warning(make_checkpoint, tmp_path: Path):
    folder = make_checkpoint("full-2:4")
    config = ExportConfig(format="dense", verify=True)
    result = export(folder, tmp_path / "out", config)
    assert result.warning is None
    assert result.verification is not None
    assert result.verification.failures == []
    weight = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert ((weight.view(-1, 4) != 0).sum(1) == 2).all()
    for format in FITTING:
        if format != "dense":
            with pytest.raises(
                UserError, match=r"full-2:4: .* stores ternary weights; use --to dense"
            ):
                export(folder, tmp_path / "no", ExportConfig(format=format))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("format", ["bitnet", "gguf-q2_0"])
def test_nothing_is_replaced(checkpoint: Path, tmp_path: Path, format: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="exists already; choose another folder or remove it"):
        export(checkpoint, tmp_path / "run", ExportConfig(format=format))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists already"):
        export(checkpoint, tmp_path / "file", ExportConfig(format=format))
    (tmp_path / "empty").mkdir()
    export(checkpoint, tmp_path / "empty", ExportConfig(format=format))
    assert (tmp_path / "empty" / "README.md").is_file()


def test_a_file_name_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"leave \.gguf out of its name"):
        export(checkpoint, tmp_path / "model.gguf", ExportConfig(format="gguf-q2_0"))
    with pytest.raises(UserError, match=r"cannot write .*: File name too long"):
        export(checkpoint, tmp_path / ("long" * 99), ExportConfig(format="bitnet"))


@pytest.mark.parametrize("format", ["bitnet", "gguf-q2_0"])
def test_an_interrupted_export_leaves_nothing(checkpoint: Path, tmp_path: Path, format: str):
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(checkpoint, tmp_path / "out", ExportConfig(format=format), on_progress=interrupt)
    assert os.listdir(tmp_path) == []


def test_unknown_formats_and_embeddings_name_the_choices() -> None:
    with pytest.raises(UserError, match="choose one of bitnet"):
        ExportConfig(format="gguf")
    with pytest.raises(
        UserError, match=r"embeddings=q8_0 is not possible in bitnet.*bf16, f16, f32"
    ):
        ExportConfig(format="bitnet", embeddings="q8_0")


def test_command_prints_the_size_and_the_warning(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["export", str(checkpoint), str(tmp_path / "out"), "--to", "dense"])
    printed = capsys.readouterr().out
    assert "dense, 0." in printed
    assert "note: these are the effective weights" in printed.replace("\n", " ")
