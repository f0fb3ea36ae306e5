# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what is refused before writing, and what gguf-py reads back, as we read its tables."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from exported import export_gguf
from factories import changed, edit_tensors
from gguf_models import gguf, gguf_writer
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.gguf_export import gguf_tensors, write
from sparse_bitnet.packing.gguf_blocks import Q2_0, TQ1_0, TQ2_0


@pytest.mark.parametrize("format", ["gguf-tq1_0", "gguf-tq2_0", "gguf-q2_0"])
def test_the_smallest_preset_is_written(
    make_checkpoint, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(
        steps=1, hidden_size=96, intermediate_size=352, num_attention_heads=3, num_key_value_heads=1
    )
    main(["export", str(checkpoint), str(tmp_path / "out"), "--to", format])
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 14 layers 14 as Q8_0" in printed
    (file,) = (tmp_path / "out").glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    down = tensors["blk.0.ffn_down.weight"]
    codes, scale = open_checkpoint(checkpoint).ternary("model.layers.0.mlp.down_proj")
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(values, codes.numpy() * np.float32(np.float16(scale)))
    assert "| bits per sparse weight | 8.5 |" in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gemma3_text, qwen3_5_text, hunyuan_v1_dense, bitnet, not gpt2"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias=True"),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": None,
                "max_window_layers": 1,
            },
            "sliding_window=8",
        ),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "factor is None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor is None"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, "rope_theta is '1e6'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e6}}, "rope_type=dynamic"),
        ({"head_dim": 32}, "head_dim=32"),
        ({"vocab_size": 100}, "vocabulary ends at 100"),
    ],
)
def test_unsupported_architectures_are_refused(
    source: Checkpoint, tmp_path: Path, changes, message: str
) -> None:
    other = changed(source, config=source.config | changes)
    with pytest.raises(UserError, match=message):
        write(tmp_path / "model.gguf", other, Q2_0, "f16")


def test_q8_0_embeddings_need_rows_of_32(source: Checkpoint) -> None:
    narrow = changed(source, others={"model.embed_tokens.weight": (9, 68)})
    with pytest.raises(
        UserError, match=r"embed_tokens.weight has rows of 68.*use --embeddings f16"
    ):
        gguf_tensors(narrow, Q2_0, "q8_0")


def test_a_table_that_begins_with_zeros_stays_float(make_checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint(steps=1, hidden_size=256, intermediate_size=768), folder)
    rows = torch.ones(392, 1).index_fill(0, torch.tensor([0]), 0)
    edit_tensors(folder, {"model.embed_tokens.weight": rows.mul})
    file = GgufFile(export_gguf(folder, tmp_path / "out", "tq2_0"))
    assert file.type_name("token_embd.weight") == "F16"


@pytest.mark.parametrize("block", [TQ1_0, TQ2_0], ids=lambda block: block.name)
@pytest.mark.parametrize("embeddings", ["f16", "q8_0", "bf16", "f32"])
def test_gguf_py_reads_it_back(make_checkpoint, tmp_path: Path, block, embeddings: str) -> None:
    checkpoint = make_checkpoint(steps=1, hidden_size=256, intermediate_size=768)
    type = block.name.lower()
    reader = gguf.GGUFReader(export_gguf(checkpoint, tmp_path / "out", type, embeddings=embeddings))
    source = open_checkpoint(checkpoint)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(source.layers) + len(source.others)

    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type == block.type_id
    assert down.shape.tolist() == [768, 256]
    codes, weight_scale = source.ternary("model.layers.1.mlp.down_proj")
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(values, codes.numpy() * np.float32(np.float16(weight_scale)))

    table = tensors["token_embd.weight"]
    assert table.tensor_type.name == embeddings.upper()
    stored = gguf.quants.dequantize(table.data, table.tensor_type)
    original = source.read("model.embed_tokens.weight").numpy()
    assert np.abs(stored - original).max() <= np.abs(original).max() * 2**-7
    bias = tensors["blk.0.attn_q.bias"]
    assert bias.tensor_type.name == "F32"
    assert np.array_equal(bias.data, source.read("model.layers.0.self_attn.q_proj.bias").numpy())

    def field(key: str):
        return reader.fields[key].contents()

    assert field("general.architecture") == "qwen2"
    assert field("general.file_type") == block.file_type
    assert field("qwen2.block_count") == 2
    assert field("qwen2.attention.head_count_kv") == 2
    assert field("qwen2.rope.freq_base") == 1_000_000.0
    assert field("qwen2.context_length") == 256
    assert field("tokenizer.ggml.pre") == "qwen2"
    assert field("tokenizer.ggml.eos_token_id") == field("tokenizer.ggml.bos_token_id") == 0
    assert field("tokenizer.ggml.add_bos_token") is False
    assert len(field("tokenizer.ggml.tokens")) == 392
    merges = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    assert len(field("tokenizer.ggml.merges")) == len(merges)


def test_embeddings_of_any_type_are_read(tmp_path: Path) -> None:
    """The values are those that gguf-py dequantises; read some rows at a time."""
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    Kind = gguf.GGMLQuantizationType
    data = {kind: gguf.quants.quantize(values, kind) for kind in (Kind.Q8_0, Kind.Q4_0, Kind.BF16)}
    random = np.random.default_rng(1)
    for kind in (Kind.Q4_K, Kind.Q6_K):
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 60, (64, size), np.uint8)
        data[kind] = blocks
    with gguf_writer(tmp_path / "t.gguf", "qwen2") as writer:
        for kind, stored in data.items():
            writer.add_tensor(kind.name, stored, raw_dtype=kind)
    file = GgufFile(tmp_path / "t.gguf")
    for kind, stored in data.items():
        expected = gguf.quants.dequantize(stored, kind)
        np.testing.assert_array_equal(file.floats(kind.name), expected)
        np.testing.assert_array_equal(file.floats(kind.name, slice(3, 9)), expected[3:9])
