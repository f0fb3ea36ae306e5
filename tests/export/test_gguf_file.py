"""GGUF files: what is refused before writing, and what gguf-py reads back."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.config import ExportConfig
from sparse_bitnet.export.formats import export
from sparse_bitnet.export.gguf import check, plan
from sparse_bitnet.export.gguf_blocks import Q2_0, TQ1_0, TQ2_0

gguf = pytest.importorskip("gguf", reason="pip install gguf")


def with_rows(source: Checkpoint, columns: int) -> Checkpoint:
    layers = {name: (rows, columns) for name, (rows, _) in source.layers.items()}
    return dataclasses.replace(source, layers=layers)


def test_rows_that_do_not_fill_a_block_name_the_type_that_fits(source: Checkpoint) -> None:
    """The rows of Qwen2.5-0.5B: 896 is 3.5 x 256 and 14 x 64."""
    narrow = with_rows(source, 896)
    message = r"layer model.layers.0.self_attn.q_proj has rows of 896.*14 of 14 layers.*gguf-q2_0"
    for block in (TQ1_0, TQ2_0):
        with pytest.raises(UserError, match=message):
            check(narrow, block, "f16")
    check(narrow, Q2_0, "f16")
    with pytest.raises(UserError, match=r"no ternary type of GGUF fits; use --format bitnet"):
        check(with_rows(source, 352), Q2_0, "f16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "covers the architecture qwen2, not llama"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type=yarn"),
        ({"head_dim": 32}, "head_dim=32"),
        ({"vocab_size": 100}, "vocabulary ends at 100"),
    ],
)
def test_architectures_it_does_not_cover(source: Checkpoint, changes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(dataclasses.replace(source, config=source.config | changes), Q2_0, "f16")


def test_full_precision_is_refused(make_checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Q2_0 holds ternary weights; use --format dense"):
        export(make_checkpoint("full-2:4"), tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    assert list(tmp_path.iterdir()) == []


def test_q8_0_embeddings_need_rows_of_32(source: Checkpoint) -> None:
    narrow = dataclasses.replace(source, others={"model.embed_tokens.weight": (9, 68)})
    with pytest.raises(
        UserError, match=r"embed_tokens.weight has rows of 68.*use --embeddings f16"
    ):
        check(narrow, Q2_0, "q8_0")


def test_scales_beyond_float16_are_refused_and_nothing_is_left(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_bitnet.export import formats

    def tiny(layer: str):
        ternary = source.ternary(layer)
        return ternary._replace(weight_scale=ternary.weight_scale * 0 + 1.03e-6)

    faulty = dataclasses.replace(source, ternary=tiny)
    monkeypatch.setattr(formats, "open_checkpoint", lambda checkpoint, *kinds: faulty)
    with pytest.raises(UserError, match=r"weight scale 1.03e-06 is too far out for float16"):
        export("any", tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_named_when_it_is_absent(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'sparse-bitnet\[export\]'"):
        check(source, Q2_0, "f16")


@pytest.mark.parametrize("block", [TQ1_0, TQ2_0], ids=lambda block: block.name)
@pytest.mark.parametrize("embeddings", ["f16", "q8_0", "bf16", "f32"])
def test_gguf_py_reads_it_back(make_checkpoint, tmp_path: Path, block, embeddings: str) -> None:
    checkpoint = make_checkpoint(steps=1, hidden_size=256, intermediate_size=768)
    config = ExportConfig(format=f"gguf-{block.name.lower()}", embeddings=embeddings)
    export(checkpoint, tmp_path / "out", config)
    reader = gguf.GGUFReader(tmp_path / "out" / f"model-{block.name}.gguf")
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
    merges = json.loads((checkpoint / "tokenizer.json").read_text())["model"]["merges"]
    assert len(field("tokenizer.ggml.merges")) == len(merges)


def test_absent_biases_become_zeros(source: Checkpoint) -> None:
    kept = {name: shape for name, shape in source.others.items() if "bias" not in name}
    tensors = plan(dataclasses.replace(source, others=kept), Q2_0, "f16")
    biases = {tensor.name: tensor for tensor in tensors if tensor.name.endswith("bias")}
    assert len(biases) == 6
    assert biases["blk.1.attn_k.bias"].shape == (32,)
    assert not biases["blk.1.attn_k.bias"].make().any()


def test_an_untied_head_is_written(make_checkpoint, source: Checkpoint) -> None:
    head = {"lm_head.weight": (392, 64)}
    untied = dataclasses.replace(source, others=source.others | head)
    assert "output.weight" in [tensor.name for tensor in plan(untied, Q2_0, "f16")]
