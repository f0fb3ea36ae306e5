# SPDX-License-Identifier: Apache-2.0
"""Models trained with a scale for each row or group: packed, run and exported as they are, or refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from factories import changed, tiny_model
from packed_models import engine_logits, typical_error
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.checkpoint.trained import save_pretrained
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.export.verify import check_packed
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.packing.formats import FORMATS
from sparse_bitnet.packing.ternary import TernaryWeight


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with a model of a quantiser, whose weights are not all of one size."""
    tokenizer = train_tokenizer(iter(["some text"]), 280)

    def make(quantizer: str) -> Path:
        folder = tmp_path_factory.mktemp("trained")
        model = tiny_model("qwen2", intermediate_size=128, vocab_size=len(tokenizer))
        for parameter in model.parameters():
            parameter.data *= 10 ** torch.rand(len(parameter), *[1] * (parameter.dim() - 1))
        model.config.eos_token_id = tokenizer.eos_token_id
        convert_(model, SparseBitConfig.parse(f"ternary-6:8,quantizer={quantizer}"))
        save_pretrained(model, folder / "final", tokenizer)
        return folder / "final"

    return make


def assert_same_weights(before: Checkpoint, after: Checkpoint) -> None:
    """Require the weights of every layer up to the rounding of their scales to float16."""
    assert before.layers.keys() == after.layers.keys()
    for layer in before.layers:
        torch.testing.assert_close(
            after.effective(layer).float(), before.effective(layer), rtol=2**-11, atol=0
        )


@pytest.mark.parametrize("quantizer", ["per-channel", "per-group:size=32", "per-group:size=64"])
def test_every_packed_format_computes_what_was_trained(
    trained: Callable[[str], Path], tmp_path: Path, quantizer: str
) -> None:
    source = trained(quantizer)
    expected = from_pretrained(source).eval()(torch.arange(1, 33)[None]).logits.detach()
    with torch.no_grad():
        evaluated = from_pretrained(source).eval()(torch.arange(1, 33)[None]).logits
    # What trains multiplies floats, what is evaluated integers.
    assert typical_error(evaluated.numpy(), expected.numpy()) < 1e-5
    for format in sorted({*FORMATS} - {"nm-sign"}):
        packed = tmp_path / format
        pack_checkpoint(source, packed, format=format, embeddings="float32")
        assert check_packed(source, packed) == 0
        logits = engine_logits(packed, list(range(1, 33)))
        assert typical_error(logits, evaluated[0].numpy()) < 1e-5
    assert not open_checkpoint(packed).has_one_scale


def exported(source: Path, out: Path, format: str) -> Path:
    export(source, out, ExportConfig(format=format, embeddings="f32"))  # type: ignore[arg-type]
    return out


@pytest.mark.parametrize(
    ("format", "quantizer"),
    [
        ("compressed-tensors-w2a8", "per-channel"),
        ("compressed-tensors-w2a8", "per-group:size=64"),
        ("compressed-tensors-w8a8", "per-channel"),
        ("gguf-q2_0", "per-channel"),
        ("gguf-q2_0", "per-group:size=64"),
        ("gguf-tq2_0", "per-channel"),
    ],
)
def test_formats_with_these_scales_store_them(
    trained: Callable[[str], Path], tmp_path: Path, format: str, quantizer: str
) -> None:
    source = trained(quantizer)
    folder = exported(source, tmp_path / "out", format)
    file = next(folder.glob("*.gguf"), folder)
    import_checkpoint(file, tmp_path / "back", packed="i2")
    assert_same_weights(open_checkpoint(source), open_checkpoint(tmp_path / "back"))


@pytest.mark.parametrize(
    ("format", "quantizer"),
    [
        ("bitnet", "per-channel"),
        ("bitnet", "per-group:size=32"),
        ("compressed-tensors-w8a8", "per-group:size=32"),
        ("gguf-tq2_0", "per-group:size=32"),
        ("gguf-i2_s", "per-channel"),
    ],
)
def test_formats_without_these_scales_refuse(
    trained: Callable[[str], Path], tmp_path: Path, format: str, quantizer: str
) -> None:
    source = trained(quantizer)
    with pytest.raises(UserError, match=r"has one scale per \d+ weights of a row, .* one per"):
        exported(source, tmp_path / "out", format)
    pack_checkpoint(source, tmp_path / "packed")
    with pytest.raises(UserError, match="has one scale per"):
        exported(tmp_path / "packed", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_groups_that_no_packed_format_has_are_refused(
    trained: Callable[[str], Path], tmp_path: Path
) -> None:
    source = trained("per-group:size=16")
    with pytest.raises(UserError, match=r"q_proj scales \[64, 4\] for .*export --to dense"):
        pack_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    exported(source, tmp_path / "dense", "dense")


@pytest.mark.parametrize("format", ["gguf-q2_0", "dense"])
def test_a_model_may_have_scales_of_several_kinds(
    trained: Callable[[str], Path], tmp_path: Path, format: str
) -> None:
    """The first matrix has one, the others one for 64 weights."""
    source = open_checkpoint(trained("per-group:size=64"))
    first = next(iter(source.layers))

    def ternary(layer: str) -> TernaryWeight:
        codes, scale = source.ternary(layer)
        return TernaryWeight(codes, scale.mean() if layer == first else scale)

    pack_checkpoint(changed(source, ternary=ternary), tmp_path / "packed", format="i2")
    with pytest.raises(UserError, match="has one scale per 64 weights of a row"):
        exported(tmp_path / "packed", tmp_path / "no", "compressed-tensors-w8a8")
    folder = exported(tmp_path / "packed", tmp_path / "out", format)
    import_checkpoint(next(folder.glob("*.gguf"), folder), tmp_path / "back", packed="i2")
    assert_same_weights(open_checkpoint(tmp_path / "packed"), open_checkpoint(tmp_path / "back"))


@pytest.mark.parametrize("format", ["dense", "gguf-q2_0"])
def test_inputs_that_are_transformed_are_refused(tmp_path: Path, format: str) -> None:
    model = convert_(
        tiny_model("qwen2"), SparseBitConfig.parse("ternary-6:8,activation=int4-hadamard")
    )
    save_pretrained(model, tmp_path / "final")
    with pytest.raises(UserError, match="transforms inputs of layers"):
        exported(tmp_path / "final", tmp_path / "out", format)
