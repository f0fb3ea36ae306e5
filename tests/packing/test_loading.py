# SPDX-License-Identifier: Apache-2.0
"""Packed folders through from_pretrained: the trained model's logits, or one line of refusal."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from transformers import AutoModelForCausalLM

from factories import MODEL_FAMILIES, edit_quantization
from packed_models import edit_packed
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.packed import packed_layers
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.verify import check_packed
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import FORMATS, PackedMetadata, needs_exact
from sparse_bitnet.packing.tensor_file import TensorFile
from sparse_bitnet.pattern import NMPattern

IDS = torch.arange(24).view(2, 12)
Trained = Callable[..., Path]


@pytest.fixture
def packed(trained: Trained, tmp_path: Path) -> Path:
    pack_checkpoint(trained(), tmp_path / "packed", embeddings="float32")
    return tmp_path / "packed"


def logits(path: Path, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return from_pretrained(path, **options)(IDS).logits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "text", ["ternary-6:8,scale_source=masked", "ternary-2:4,activation=none", "ternary-8:8"]
)
def test_packed_and_trained_logits_are_equal(
    trained: Trained, tmp_path: Path, format: str, text: str
) -> None:
    source = trained(format=f"{text},quantizer=binary" if needs_exact(format) else text)
    pack_checkpoint(source, tmp_path / "out", format=format, embeddings="float32")
    assert torch.equal(logits(tmp_path / "out"), logits(source))


@pytest.mark.parametrize("family", [*MODEL_FAMILIES, "falcon"])
def test_every_family_and_embedding_loads(trained: Trained, tmp_path: Path, family: str) -> None:
    source = trained(family, tie_word_embeddings=family != "gpt_neox")
    for embeddings in ("bf16", "int8"):
        pack_checkpoint(source, tmp_path / embeddings, embeddings=embeddings)
        assert 0 < check_packed(source, tmp_path / embeddings) < 0.1


def test_loaded_model_holds_packed_layers(packed: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(packed)
    layers = packed_layers(model)
    assert len(layers) == 14
    layer = layers["model.layers.1.mlp.down_proj"]
    assert (layer.weight_packed.dtype, layer.weight_scale.dtype) == (torch.uint8, torch.float32)
    assert "packed_format=b3" in repr(layer)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with selected(model), torch.no_grad():
        assert torch.equal(model(IDS).logits, logits(packed))
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(packed / "copy")


def metadata_values() -> dict[str, Any]:
    return {
        "version": 1,
        "packed_format": "i2",
        "pattern": "6:8",
        "format": {
            **{"weight": "ternary", "pattern": "6:8", "activation": "int8", "ste": "identity"},
            **{"mask_source": "master", "scale_source": "dense", "mask_gradient": "dense"},
        },
        "embeddings": "bf16",
        "layers": {"q": [4, 16]},
    }


json_values = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=3)


@given(
    key=st.sampled_from([*metadata_values(), *metadata_values()["format"], "q"]),
    value=json_values | st.dictionaries(st.text(max_size=3), json_values, max_size=2),
)
def test_metadata_is_not_trusted(key: str, value: Any) -> None:
    values = metadata_values()
    assert PackedMetadata.from_json(values, "here").to_json() == values
    for place in (values, values["format"], values["layers"]):
        if key in place:
            place[key] = value
    with contextlib.suppress(UserError):
        metadata = PackedMetadata.from_json(values, "here")
        assert PackedMetadata.from_json(metadata.to_json(), "here") == metadata


def test_rotated_weights_have_a_version_that_older_releases_refuse() -> None:
    rotation = {"block": 8, "signs": {"16": "0ff0"}, "embedding": True, "head": False}
    values = metadata_values() | {"version": 2, "rotation": rotation}
    metadata = PackedMetadata.from_json(values, "here")
    assert (metadata.to_json(), metadata.config_entry()["version"]) == (values, 2)
    damaged: list[Any] = [{"block": block} for block in (12, 32, True, "8", 0)] + [{"head": 1}]
    damaged += [{"signs": signs} for signs in ({}, {"16": "ff"}, {"16": "zz"}, {"x": "ff"}, [16])]
    changes = [{"rotation": rotation | each} for each in (*damaged, {"x": 1})] + [{"version": 1}]
    for each in (*(values | change for change in changes), metadata_values() | {"version": 2}):
        with pytest.raises(UserError, match=r"^here: "):
            PackedMetadata.from_json(each, "here")


PACKED, SCALE = (f"model.layers.0.self_attn.k_proj.weight_{end}" for end in ("packed", "scale"))
OVERFULL = pack(torch.ones(32, 64, dtype=torch.int8), "b3", NMPattern(1, 1))


def flip_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[TensorFile(path).entries[PACKED].begin + 5] ^= 8
    path.write_bytes(raw)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip_bit, f"tensor {PACKED} is damaged"),
        (truncate, "is truncated"),
        (partial(edit_packed, changes={}, version=7), "version 7 is not readable"),
        (partial(edit_quantization, version=7), "its version is 1, .* says 7"),
        (partial(edit_quantization, pattern="2:4"), "its pattern is '6:8'.*'2:4'"),
        (partial(edit_quantization, packed_format="i2"), "its packed_format is"),
        ({PACKED: OVERFULL}, f"tensor {PACKED} is damaged or not b3: a group has more non-zeros"),
        ({SCALE: torch.tensor([torch.nan])}, f"tensor {SCALE} has nan, but"),
        ({SCALE: None}, f"tensor {SCALE} is missing"),
        ({PACKED: None}, f"tensor {PACKED} is missing"),
        ({"extra": torch.zeros(1)}, "tensor extra is not part of the model"),
        (
            {PACKED: OVERFULL[:, :12]},
            rf"{PACKED} is U8 \[32, 12\], its config.json needs uint8 \[32, 13\]",
        ),
        ({PACKED: OVERFULL.view(torch.int8)}, f"{PACKED} is I8"),
        (
            partial(edit_packed, changes={}, layers={"model.norm": [64, 64]}),
            "tensor model.norm.weight_packed is missing",
        ),
    ],
)
def test_damaged_folders_are_refused(packed: Path, tmp_path: Path, change: Any, message: str):
    """`change`: of the folder, or other tensors."""
    if callable(change):
        change(packed)
    else:
        edit_packed(packed, change)
    with pytest.raises(UserError, match=message):
        from_pretrained(packed)
    with pytest.raises(UserError):
        export(packed, tmp_path / "out", ExportConfig(format="dense"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_table_has_scales_of_its_own_rows(trained: Trained, tmp_path: Path, rows: int) -> None:
    pack_checkpoint(trained(), tmp_path / "packed", embeddings="int8")
    scales = torch.ones(1) if rows == 1 else torch.ones(rows, 1)
    edit_packed(tmp_path / "packed", {"model.embed_tokens.weight_scale": scales})
    for read in (from_pretrained, open_checkpoint):
        with pytest.raises(UserError, match=r"model\.embed_tokens\.weight_scale"):
            read(tmp_path / "packed")
