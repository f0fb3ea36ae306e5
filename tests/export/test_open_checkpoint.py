# SPDX-License-Identifier: Apache-2.0
"""Opening checkpoints for export."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from factories import edit_json
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint


def test_tensors_beside_the_layers_are_listed_once(source: Checkpoint, checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    names = [*source.others, *(f"{layer}.weight" for layer in source.layers)]
    assert sorted(names) == sorted(stored)
    assert source.dense_linears == ["lm_head"]
    for name, shape in source.others.items():
        assert tuple(stored[name].shape) == shape
        assert torch.equal(source.read(name), stored[name])


@pytest.mark.parametrize("kind", ["trained", "foreign"])
def test_a_head_that_the_config_ties_and_the_files_hold_apart_is_kept(
    kind: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "trained")
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_tied in ((embedding.clone(), True), (-embedding, False)):
        save_file(
            tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"}
        )
        model: Any = from_pretrained(folder)
        assert torch.equal(model.lm_head.weight, head)
        assert model.config.tie_word_embeddings is is_tied
        source = open_checkpoint(folder)
        assert ("lm_head.weight" in source.others) is not is_tied
        assert source.config["tie_word_embeddings"] is is_tied
    if kind == "foreign":
        folder = tmp_path / "bitnet"
        export(tmp_path / "trained", folder, ExportConfig(format="bitnet", embeddings="f32"))
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
        edit_json(folder / "config.json", tie_word_embeddings=True)
        source = open_checkpoint(folder)
    assert torch.equal(source.read("lm_head.weight"), head)
    assert source.model.all_tied_weights_keys == {}


@pytest.mark.parametrize("embeddings", ["bf16", "int8", "float32"])
@pytest.mark.parametrize("packed_format", ["auto", "nm-enum"])
def test_a_packed_folder_is_the_same_source(
    checkpoint: Path, source: Checkpoint, tmp_path: Path, embeddings: str, packed_format: str
) -> None:
    pack_checkpoint(checkpoint, tmp_path / "packed", format=packed_format, embeddings=embeddings)
    packed = open_checkpoint(tmp_path / "packed")
    for field in ("format", "layers", "dense_linears", "others"):
        assert getattr(packed, field) == getattr(source, field)
    for name in source.layers:
        assert torch.equal(packed.ternary(name).codes, source.ternary(name).codes)
        assert packed.ternary(name).weight_scale == source.ternary(name).weight_scale
    for name in source.others:
        tolerance = {"bf16": 2**-8, "int8": 2**-7, "float32": 0}[embeddings]
        original = source.read(name)
        difference = (packed.read(name).float() - original).abs().max()
        assert difference <= tolerance * original.abs().max()


def test_a_folder_may_be_named_as_a_file(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model.gguf")
    assert open_checkpoint(folder).kind == "trained"


def test_folders_without_a_checkpoint_of_ours_are_refused(edited, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match="no such folder: owner/name, and the hub does not provide it"
    ):
        open_checkpoint("owner/name")
    with pytest.raises(UserError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"quant_method 'gptq'.*sparse-bitnet import"):
        open_checkpoint(edited(quantization_config={"quant_method": "gptq"}))


def test_a_checkpoint_of_another_kind_names_what_helps(checkpoint, edited, tmp_path: Path) -> None:
    pack_checkpoint(checkpoint, tmp_path / "packed")
    plain = edited(quantization_config=None)
    distill = f"`sparse-bitnet distill {plain} OUT` \\(in Python, convert_\\)"
    for folder, kinds, said in (
        (plain, ("packed",), f"is not packed: it is a plain model; {distill}"),
        (plain, ("foreign",), f"is not importable: it is a plain model; {distill}"),
        (plain, ("trained", "packed"), f"is not a trained .*: it is a plain model; {distill}"),
        (checkpoint, ("packed",), "is not packed: pack it first: sparse-bitnet pack"),
        (checkpoint, ("foreign",), "is a checkpoint of sparse-bitnet already, which every command"),
        (tmp_path / "packed", ("trained",), "it is packed already, and generate"),
        (tmp_path / "packed", ("foreign",), "it is packed already, and generate"),
    ):
        with pytest.raises(UserError, match=said):
            open_checkpoint(folder, *kinds)
