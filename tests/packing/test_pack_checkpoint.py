# SPDX-License-Identifier: Apache-2.0
"""Packing a checkpoint: a complete folder, exact codes, and a refusal for everything else."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from factories import edit_tensors
from sparse_bitnet.checkpoint import checkpoint as source_module
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export import pack_checkpoint as checkpoint_module
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint, packed_sizes
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.ops.quantize_int8 import quantize_int8
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.packing.formats import FORMATS, needs_exact
from sparse_bitnet.pattern import NMPattern

Trained = Callable[..., Path]
NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("format", FORMATS)
def test_packed_folder_holds_every_tensor(trained: Trained, tmp_path: Path, format: str) -> None:
    config = SparseBitConfig(quantizer="binary") if needs_exact(format) else SparseBitConfig()
    source = trained(format=str(config))
    masters = load_file(source / "model.safetensors")
    result = pack_checkpoint(source, tmp_path / "out", format=format, embeddings="float32")
    assert result.metadata.packed_format == format
    packed = load_file(tmp_path / "out" / "model.safetensors")
    layers = result.metadata.layers
    assert len(layers) == 14
    for name, shape in layers.items():
        selection = select(masters[f"{name}.weight"], config)
        codes = unpack(packed.pop(f"{name}.weight_packed"), format, NMPattern(6, 8), shape)
        assert torch.equal(codes, selection.codes)
        assert torch.equal(packed.pop(f"{name}.weight_scale"), selection.weight_scale.view(1))
        masters.pop(f"{name}.weight")
    assert packed.keys() == masters.keys()
    assert all(torch.equal(packed[name], masters[name]) for name in masters)
    assert result.metadata.weights == sum(rows * columns for rows, columns in layers.values())
    assert result.file_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (NORM, lambda values: values * torch.nan, f"{NORM} has values that are not finite"),
        (UP, lambda values: values + torch.inf, f"{UP} has values that"),
        (EMBEDDING, lambda values: values / 0, f"{EMBEDDING} has values that are not finite"),
        (NORM, torch.Tensor.int, rf"{NORM} is I32 \[64\], its config.json needs floats"),
        (NORM, torch.zeros(3), r"is F32 \[3\], its config.json needs"),
        (NORM, None, f"lacks {NORM}"),
        (UP, None, f"lacks {UP}"),
        (UP, torch.zeros(4, 64), rf"{UP} is F32 \[4, 64\], its config.json needs .*\[96, 64\]"),
        ("extra", torch.zeros(1), "tensor extra is not part of the model"),
    ],
)
def test_tensors_that_are_not_the_weights_of_the_model_are_named(
    trained: Trained, tmp_path: Path, name: str, change: Any, message: str
) -> None:
    source = Path(shutil.copytree(trained(), tmp_path / "source"))
    edit_tensors(source, {name: change})
    for write in (pack_checkpoint, partial(export, config=ExportConfig(format="dense"))):
        with pytest.raises(UserError, match=message):
            write(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("quantizer", ["absmean", "binary"])
def test_sizes_are_those_of_the_packed_folders(trained: Trained, tmp_path: Path, quantizer: str):
    source = trained(format=str(SparseBitConfig(quantizer=quantizer)))
    sizes = packed_sizes(source, embeddings="int8")
    names = [size.metadata.packed_format for size in sizes]
    assert names == ["b3", "i2", "nm-enum", *(["nm-sign"] if quantizer == "binary" else [])]
    for size, name in zip(sizes, names, strict=True):
        out = tmp_path / name
        result = pack_checkpoint(source, out, format=name, embeddings="int8")
        assert size.weight_bytes == result.weight_bytes
        assert size.file_bytes < result.file_bytes < size.file_bytes + 20_000


@pytest.mark.parametrize("format", ["dense", "gguf-q2_0"])
def test_values_beyond_float16_are_not_exported_in_it(
    trained: Trained, tmp_path: Path, format: Any
) -> None:
    pytest.importorskip("gguf")
    source = Path(shutil.copytree(trained(vocab_size=300), tmp_path / "source"))
    large = torch.zeros(300, 64)
    large[5, 3] = 1e5
    edit_tensors(source, {"model.embed_tokens.weight": large.add})
    with pytest.raises(UserError, match=r"has values beyond .*float16; use --embeddings bf16"):
        export(source, tmp_path / "out", ExportConfig(format=format, embeddings="f16"))
    assert os.listdir(tmp_path) == ["source"]


def test_packed_folder_is_complete(trained: Trained, tmp_path: Path) -> None:
    source = Path(shutil.copytree(trained(), tmp_path / "source"))
    (source / "train_config.json").write_text('{"sequence_length": 96}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    pack_checkpoint(source, tmp_path / "out")
    assert find_checkpoint(tmp_path / "out").trained_context_length == 96
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json", "README.md"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    }
    text = "a small text"
    before, after = load_tokenizer(source), load_tokenizer(tmp_path / "out")
    assert before(text).input_ids == after(text).input_ids
    entry = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert entry["quant_method"] == "sparse_bitnet_packed"
    assert (entry["version"], entry["packed_format"], entry["pattern"]) == (1, "b3", "6:8")
    assert open_checkpoint(tmp_path / "out").format == SparseBitConfig()


@pytest.mark.parametrize(
    ("pair", "written"),
    [(("b", "a"), "b a"), ((" b", "a"), [" b", "a"]), (("#version", "a"), ["#version", "a"])],
)
def test_the_tokenizer_is_the_same_in_the_order_that_is_read_fastest(
    trained: Trained, tmp_path: Path, pair: tuple[str, str], written: object
) -> None:
    source, out = tmp_path / "source" / "tokenizer.json", tmp_path / "out" / "tokenizer.json"
    shutil.copytree(trained(), source.parent)
    words = {word: number for number, word in enumerate([*pair, "".join(pair)])}
    before = Tokenizer(BPE(words, [pair]))
    before.save(str(source))
    pack_checkpoint(source.parent, out.parent)
    assert Tokenizer.from_file(str(out)).to_str() == before.to_str()
    model = json.loads(out.read_text())["model"]
    assert [*model["vocab"]] == sorted(words)
    assert model["merges"] == [written]


@pytest.mark.parametrize("embeddings", ["bf16", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_stored_in_every_precision(
    trained: Trained, tmp_path: Path, embeddings: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_PIECE_VALUES", 1000)
    source = trained(tie_word_embeddings=tied)
    masters = load_file(source / "model.safetensors")
    result = pack_checkpoint(source, tmp_path / "out", embeddings=embeddings)
    packed = load_file(tmp_path / "out" / "model.safetensors")
    names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    stored = {name.removesuffix("_scale") for name in packed}
    assert {name for name in stored if "embed" in name or "head" in name} == {*names}
    size = 0
    for name in names:
        if embeddings == "bf16":
            assert torch.equal(packed[name], masters[name].bfloat16())
            size += packed[name].numel() * 2
        else:
            codes, scale = quantize_int8(masters[name])
            assert torch.equal(packed[name], codes)
            assert torch.equal(packed[f"{name}_scale"], scale)
            size += codes.numel() + 4 * len(codes)
    assert result.embedding_bytes == size


def test_run_folders_and_split_files_are_packed(trained: Trained, tmp_path: Path) -> None:
    run = tmp_path / "run"
    model = from_pretrained(trained())
    model.save_pretrained(run / "final", max_shard_size="100KB")
    assert (run / "final" / "model.safetensors.index.json").is_file()
    seen: list[tuple[int, int]] = []
    pack_checkpoint(run, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    pack_checkpoint(trained(), tmp_path / "whole")
    split, whole = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("out", "whole"))
    assert split == whole
    assert len(seen) == 14
    assert seen[-1][0] == seen[-1][1]


def test_invalid_sources_and_options_are_refused(trained: Trained, tmp_path: Path) -> None:
    pack_checkpoint(trained(), tmp_path / "packed")
    for source, options, message in (
        (trained(format="full-6:8"), {}, "full-precision weights"),
        (trained(), {"format": "q4"}, "packed format 'q4' is unknown"),
        (trained(), {"embeddings": "int4"}, "embeddings 'int4': choose one of"),
        (tmp_path / "packed", {}, "it is packed already"),
    ):
        with pytest.raises(UserError, match=message):
            pack_checkpoint(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_a_failed_attempt_leaves_no_files(
    trained: Trained,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    raised: Any,
) -> None:
    monkeypatch.setattr(checkpoint_module, "pack", Mock(side_effect=error))
    with pytest.raises(raised):
        pack_checkpoint(trained(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
