# SPDX-License-Identifier: Apache-2.0
"""Embeddings and heads that are ternary: kept so from their file to the engine's logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exported import assert_import_refused
from packed_models import engine_logits
from sparse_bitnet.checkpoint.load import from_pretrained
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
from sparse_bitnet.ops.quantize_int8 import quantize_int8_reference
from sparse_bitnet.packing.ternary import TernaryWeight

pytest.importorskip("sparse_bitnet._cpu", reason="the extension is not built")
pytest.importorskip("gguf")
from gguf_models import add_tokenizer, by_our_layout, ternary_model, write_gguf
from sparse_bitnet.engine.engine import Engine

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OPTIONS: dict[str, Any] = {"kv_cache": "float32", "threads": 2, "weight_format": "i2"}
TOKENS = [number * 7 % 392 for number in range(1, 40)]


def with_ternary_tables(group: int, family: str = "qwen3", **changes: Any) -> Any:
    return ternary_tables_(ternary_model(family, group, num_attention_heads=8, **changes), group)


def ternary_tables_(model: Any, group: int) -> Any:
    """The model, its embedding and head ternary, too, and a run of one row all zero."""
    for table in {model.model.embed_tokens.weight, model.lm_head.weight}:
        codes = torch.randint(-1, 2, table.shape).float()
        codes[3, :group] = 0
        scales = (torch.rand(len(codes), table.shape[1] // group, 1) * 0.1 + 0.02).half()
        table.data = (codes.unflatten(1, (-1, group)) * scales.float()).flatten(1)
    return model


def forward(folder: Path, logits: Any, **options: Any) -> np.ndarray:
    return engine_logits(folder, TOKENS, logits, **({"head": "auto"} | OPTIONS | options))


def reference_logits(table: TernaryWeight, hidden: np.ndarray, group: int) -> np.ndarray:
    """In the order of csrc/packed_format.h, activations with a scale for each group of weights."""
    codes, scales = table.codes.numpy().astype(np.float64), table.weight_scale.float().numpy()
    logits = np.zeros((len(hidden), len(codes)), np.float32)
    for g in range(scales.shape[1]):
        part = slice(g * group, g * group + group)
        x, x_scale = quantize_int8_reference(torch.from_numpy(hidden[:, part]).contiguous())
        dot = (x.numpy().astype(np.float64) @ codes[:, part].T).astype(np.float32)
        logits += dot * scales[:, g] * x_scale.numpy().reshape(-1, 1)
    return logits


@pytest.mark.parametrize(("group", "ties"), [(128, True), (128, False), (64, True)])
def test_a_gguf_file_stays_ternary_to_its_logits(tmp_path: Path, group: int, ties: bool) -> None:
    model = with_ternary_tables(group, tie_word_embeddings=ties)
    write = by_our_layout("Q2_0", group)
    path = write_gguf(tmp_path / "m.gguf", model, "qwen3", write, add_tokenizer, tables=write)
    import_checkpoint(path, tmp_path / "packed", packed="auto")
    packed = open_checkpoint(tmp_path / "packed")
    assert packed.metadata.embeddings == "ternary"
    names = [EMBEDDING] if ties else [EMBEDDING, HEAD]
    for name in names:
        assert packed.file.entries[name].shape == (392, 64)
        assert packed.file.entries[f"{name}_scale"].dtype == "F16"
        assert torch.equal(packed.read(name), model.state_dict()[name])
        assert torch.equal(packed.read(name, slice(5, 9)), model.state_dict()[name][5:9])
    restored = from_pretrained(tmp_path / "packed", dtype=torch.float32)
    assert torch.equal(restored.get_input_embeddings().weight, model.model.embed_tokens.weight)

    # Rows are decoded as they are looked up: states are those of float embeddings.
    import_checkpoint(path, tmp_path / "floats", packed="auto", embeddings="float32")
    hidden = forward(tmp_path / "packed", "hidden")
    np.testing.assert_array_equal(hidden, forward(tmp_path / "floats", "hidden", head="stored"))
    (table,) = packed.ternary_pieces(names[-1])
    # Attention and norms are floats: each instruction set has states of its own.
    for isa in ("generic", ""):
        hidden = forward(tmp_path / "packed", "hidden", isa=isa)
        logits = forward(tmp_path / "packed", "all", isa=isa, head="stored")
        expected = reference_logits(table, hidden, group)
        np.testing.assert_array_equal(logits.view(np.int32), expected.view(np.int32))
    exact = hidden @ table.values().numpy().T
    assert np.linalg.norm(logits - exact) < 0.02 * np.linalg.norm(exact)

    engine = Engine.load(tmp_path / "packed", **OPTIONS)
    assert engine.head_format == "i2"
    assert engine.head_bytes == 392 * 64 + 400 * (256 // group) * 2
    with pytest.raises(UserError, match=r"head int8: the head of .* is ternary and stays so"):
        Engine.load(tmp_path / "packed", head="int8")
    pack_checkpoint(packed, tmp_path / "again", format="i2")
    again = open_checkpoint(tmp_path / "again").file
    for name in (EMBEDDING, f"{EMBEDDING}_scale"):
        assert np.array_equal(again.array(name), packed.file.array(name))


@pytest.mark.parametrize("ternary", [EMBEDDING, HEAD])
def test_a_ternary_table_beside_a_dense_one_is_kept(tmp_path: Path, ternary: str) -> None:
    model = with_ternary_tables(64, tie_word_embeddings=False)
    (other,) = {EMBEDDING, HEAD} - {ternary}
    table = model.get_parameter(other)
    table.data = torch.randn_like(table).bfloat16().float()
    model.save_pretrained(tmp_path / "hf")
    import_checkpoint(tmp_path / "hf", tmp_path / "packed", packed="auto")
    packed = open_checkpoint(tmp_path / "packed")
    assert packed.metadata.embeddings == "ternary"
    assert [packed.file.entries[name].dtype for name in (ternary, other)] == ["U8", "BF16"]
    restored = from_pretrained(tmp_path / "packed", dtype=torch.float32)
    for name in (EMBEDDING, HEAD):
        assert torch.equal(packed.read(name), model.state_dict()[name])
        assert torch.equal(restored.get_parameter(name), model.state_dict()[name])
    import_checkpoint(tmp_path / "hf", tmp_path / "floats", packed="auto", embeddings="float32")
    hidden = forward(tmp_path / "packed", "hidden", head="stored")
    np.testing.assert_array_equal(hidden, forward(tmp_path / "floats", "hidden", head="stored"))
    if ternary == EMBEDDING:
        logits = forward(tmp_path / "packed", "all", head="stored")
        expected = hidden @ model.lm_head.weight.detach().numpy().T
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
        table = model.get_parameter(ternary)
        table.data[-1, 0] = 0.3
        model.save_pretrained(tmp_path / "none")
        import_checkpoint(tmp_path / "none", tmp_path / "bf16", packed="auto")
        assert open_checkpoint(tmp_path / "bf16").metadata.embeddings == "bf16"
        message = r"tensor model.embed_tokens.weight is not ternary .* --embeddings auto"
        options = {"packed": "auto", "embeddings": "ternary"}
        assert_import_refused(tmp_path / "none", tmp_path / "no", message, **options)
