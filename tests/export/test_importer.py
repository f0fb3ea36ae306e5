# SPDX-License-Identifier: Apache-2.0
"""Import of other tools' folders, and of our own exports."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from exported import assert_import_refused, assert_same_layers
from factories import edit_json, edit_quantization, edit_tensors, logits_of, tiny_model
from packed_models import reference_logits
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.model_folder import read_config
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint, masters_of
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.pattern import NMPattern

FORMATS = ["bitnet", "compressed-tensors-w2a8", "compressed-tensors-w8a8"]
LAYER = "model.layers.0.mlp.gate_proj"
IDS = list(range(32))
AUTOBITLINEAR = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
Exported = Callable[[str], Path]


@given(
    rows=st.integers(1, 6),
    columns=st.integers(1, 40),
    zeros=st.floats(0, 0.99),
    scale=st.floats(2**-16, 100, width=32),
    seed=st.integers(0, 2**32 - 1),
)
def test_masters_give_back_exactly_their_codes_and_scale(
    rows: int, columns: int, zeros: float, scale: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    signs = random.choice([-1, 1], (rows, columns)) * (random.random((rows, columns)) >= zeros)
    codes = torch.from_numpy(signs.astype(np.int8))
    ternary = TernaryWeight(codes, torch.tensor(scale, dtype=torch.float32))
    selection = select(masters_of(ternary), SparseBitConfig(pattern=NMPattern(1, 1)))
    assert torch.equal(selection.codes, codes)
    if codes.any():
        assert selection.weight_scale == ternary.weight_scale


@pytest.fixture(scope="module")
def exports(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of exports to copy, by their format."""
    folder = tmp_path_factory.mktemp("exports")
    for format in (*FORMATS, "dense"):
        export(checkpoint, folder / format, ExportConfig(format=format))
    return folder


@pytest.fixture
def exported(exports: Path, tmp_path: Path) -> Exported:
    """`exported("bitnet")`: a copy, out/ in the test's own folder."""
    return lambda format: shutil.copytree(exports / format, tmp_path / "out")


@pytest.fixture
def w2a8(exported: Exported) -> Path:
    return exported("compressed-tensors-w2a8")


def test_pattern_of_an_export_is_kept_without_its_registered_functions(exported: Exported) -> None:
    """Readers of an export need not have the functions that its training registered."""
    folder = exported("bitnet")
    edit_json(folder / "config.json", sparse_bitnet_format="ternary-6:8,quantizer=mine")
    assert open_checkpoint(folder).format == SparseBitConfig(pattern=NMPattern(6, 8))


@pytest.mark.parametrize("format", FORMATS)
def test_exports_are_imported_exactly(checkpoint: Path, tmp_path: Path, format: str) -> None:
    export(checkpoint, tmp_path / "out", ExportConfig(format=format, embeddings="f32"))
    result = import_checkpoint(tmp_path / "out", tmp_path / "back")
    assert result.format == SparseBitConfig(pattern=NMPattern(6, 8))
    assert result.layers == 14
    before, after = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "back")
    # The reciprocal that bitnet stores is rounded once more.
    assert_same_layers(before, after, rtol=2**-22 if format == "bitnet" else 0)
    assert before.dense_linears == after.dense_linears
    difference = reference_logits(tmp_path / "back", IDS) - reference_logits(checkpoint, IDS)
    assert np.abs(difference).max() <= (0.01 if format == "bitnet" else 0)


def test_packing_at_once_writes_what_packing_masters_writes(w2a8: Path, tmp_path: Path) -> None:
    import_checkpoint(w2a8, tmp_path / "masters")
    pack_checkpoint(tmp_path / "masters", tmp_path / "twice")
    import_checkpoint(w2a8, tmp_path / "once", packed="auto")
    once, twice = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("once", "twice")
    )
    assert once == twice


def test_codes_outside_a_given_pattern_are_refused(exported: Exported, tmp_path: Path) -> None:
    folder = exported("compressed-tensors-w8a8")
    edit_json(folder / "config.json", sparse_bitnet_format="ternary-6:8,activation=none")
    dense = import_checkpoint(folder, tmp_path / "dense", pattern=NMPattern(8, 8))
    assert dense.format == SparseBitConfig(pattern=NMPattern(8, 8), activation="none")
    no, message = tmp_path / "no", r"codes do not fit the pattern 2:8.*--pattern 8:8"
    assert_import_refused(folder, no, message, pattern=NMPattern(2, 8))
    assert_import_refused(folder, no, "64 is not a multiple of 5", pattern=NMPattern(2, 5))


def hugging_face(folder: Path, entry: dict[str, str], tensors: dict[str, torch.Tensor]) -> Path:
    """Another config entry and other tensors in an export."""
    edit_json(folder / "config.json", quantization_config=entry, sparse_bitnet_format=...)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def assert_close_to_transformers(imported: Path, folder: Path, atol: float) -> None:
    """Require the logits that transformers' own classes compute from the folder before its import."""
    with torch.compiler.set_stance("force_eager"):
        expected = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), IDS)
    np.testing.assert_allclose(reference_logits(imported, IDS), expected, rtol=0, atol=atol)


def test_autobitlinear_is_imported_with_its_bias(checkpoint: Path, tmp_path: Path) -> None:
    """The packed published form: the scale multiplies, and the bias with it."""
    export(checkpoint, tmp_path / "out", ExportConfig(format="bitnet", embeddings="f32"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in list(tensors):
        if name.endswith("weight_scale"):
            tensors[name] = 1 / tensors[name]
    entry = AUTOBITLINEAR | {"quantization_mode": "offline", "modules_to_not_convert": ["lm_head"]}
    folder = hugging_face(tmp_path / "out", entry, tensors)
    import_checkpoint(folder, tmp_path / "back")
    assert_close_to_transformers(tmp_path / "back", folder, 0.01)
    edit_quantization(folder, linear_class="BitLinear")
    assert_import_refused(folder, tmp_path / "no", "bitnet has no 'offline' 'BitLinear'")


def test_published_masters_in_bfloat16_are_imported(
    checkpoint: Path, exported: Exported, tmp_path: Path
) -> None:
    """BitNet b1.58's form for training: bf16 weights that the reader quantises in every forward."""
    trained = load_file(checkpoint / "model.safetensors")
    masters = {name: tensor.bfloat16() for name, tensor in trained.items()}
    entry = AUTOBITLINEAR | {"quantization_mode": "online"}
    folder = hugging_face(exported("dense"), entry, masters)
    result = import_checkpoint(folder, tmp_path / "back")
    assert (result.kind, result.layers) == ("bitnet masters", 14)
    stored = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(stored[name], master.float()) for name, master in masters.items())
    assert_close_to_transformers(tmp_path / "back", folder, 0.02)


def test_bitnet_b1_58_keeps_its_architecture(tmp_path: Path) -> None:
    """Its published masters, with the norms inside the blocks, made small."""
    model = tiny_model("bitnet", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "published")
    result = import_checkpoint(tmp_path / "published", tmp_path / "ours", pattern=NMPattern(8, 8))
    assert result.layers == 14
    ours = from_pretrained(tmp_path / "ours")
    name = "model.layers.1.self_attn.o_proj"
    assert torch.equal(ours.get_submodule(name).weight, model.get_submodule(name).weight.float())
    import_checkpoint(tmp_path / "published", tmp_path / "packed", packed="b3")
    source = open_checkpoint(tmp_path / "packed")
    assert torch.equal(source.ternary(name).codes, ours.get_submodule(name).select().codes)
    for packed in (None, "auto"):
        message, pattern = r"codes do not fit the pattern 2:4.*--pattern 8:8", NMPattern(2, 4)
        assert_import_refused(
            tmp_path / "published", tmp_path / "no", message, pattern=pattern, packed=packed
        )


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("weight_packed", lambda t: t * 0, "is not ternary: it has codes from -2 to -2"),
        (
            "weight_scale",
            lambda t: t * torch.arange(1, 193)[:, None],
            "several scales, which only packed folders hold: import it with --packed-format auto",
        ),
        ("weight_scale", lambda t: t * 0, "weight scale is not a positive number"),
        ("weight_shape", lambda t: t + 1, "weight_shape is not"),
        (
            "weight_scale",
            lambda t: t * 0 + 3e38,
            "the range of master weights: import it with --packed-format auto",
        ),
        (
            "weight_scale",
            lambda t: t * 0 + 3e-6,
            "the range of master weights: import it with --packed-format auto",
        ),
    ],
)
def test_tensors_without_counterpart_are_refused(
    w2a8: Path, tmp_path: Path, suffix: str, change, message: str
) -> None:
    edit_tensors(w2a8, {f"{LAYER}.{suffix}": change})
    assert_import_refused(w2a8, tmp_path / "no", f"layer {LAYER}.*{message}")
    assert os.listdir(tmp_path) == ["out"]


def test_settings_without_counterpart_are_refused(w2a8: Path, tmp_path: Path) -> None:
    (group,) = read_config(w2a8)["quantization_config"]["config_groups"].values()
    group["weights"]["strategy"] = "group"
    for changes, message in (
        ({"config_groups": {"group_0": group}}, "have strategy 'group' and group_size None"),
        ({"sparsity_config": {"format": "dense"}}, r"sparsity_config = \{.*\} is not supported"),
        ({"quant_method": "awq"}, "quant_method 'awq' .* not importable"),
    ):
        edit_quantization(w2a8, **changes)
        assert_import_refused(w2a8, tmp_path / "no", message)


def test_dense_weights_are_imported_only_if_they_are_ternary(
    checkpoint: Path, exported: Exported, tmp_path: Path
) -> None:
    folder = exported("dense")
    import_checkpoint(folder, tmp_path / "packed", packed="auto")
    before, after = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "packed")
    assert after.format.pattern == NMPattern(6, 8)
    assert torch.equal(before.ternary(LAYER).codes, after.ternary(LAYER).codes)
    edit_tensors(folder, dict.fromkeys(load_file(folder / "model.safetensors"), torch.randn_like))
    message = r"no quantization_config in config.json\) is not importable"
    assert_import_refused(folder, tmp_path / "no", message)
    with pytest.raises(UserError, match="exists already"):
        import_checkpoint(folder, folder)


def test_command_imports_a_folder(w2a8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["import", str(w2a8), str(tmp_path / "back")])
    assert "14 ternary layers, read from compressed-tensors pack-quantized, written as" in " ".join(
        capsys.readouterr().out.split()
    )
    shutil.rmtree(tmp_path / "back")
    main(
        ["import", str(w2a8), str(tmp_path / "back"), "--pattern", "8:8", "--packed-format", "auto"]
    )


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("packed", [None, "auto"])
@pytest.mark.parametrize("format", [*FORMATS, "dense"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"lacks {NORM}"),
        ({f"{LAYER}.weight_scale": None}, rf"{LAYER}\.weight"),
        ({f"{LAYER}.weight_zero_point": torch.ones(1)}, "weight_zero_point"),
        ({"model.layers.2.mlp.up_proj.weight": torch.ones(2, 2)}, r"layers\.2\.mlp"),
        ({NORM: torch.ones(63)}, r"layernorm.weight is F32 \[63\], its config.json needs"),
        ({NORM: torch.ones(64, dtype=torch.int32)}, "needs floats"),
        ({f"{LAYER}.weight_scale": torch.ones(3)}, r"weight_scale|is not part of"),
        ({f"{LAYER}.weight_scale": torch.ones(0)}, r"weight_scale|is not part of"),
        ({f"{LAYER}.weight_scale": torch.tensor([-1.0])}, r"not a positive|is not part of"),
        ({f"{LAYER}.weight_scale": torch.tensor([torch.nan])}, r"not a positive|is not part of"),
    ],
)
def test_other_tensors_than_those_of_the_model_are_refused(
    exported: Exported,
    tmp_path: Path,
    format: str,
    packed: str | None,
    change: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    exported(format)
    if format == "dense" and change == {f"{LAYER}.weight_scale": None}:
        change = {f"{LAYER}.weight": None}
    edit_tensors(tmp_path / "out", change)
    assert_import_refused(tmp_path / "out", tmp_path / "no", message, packed=packed)
