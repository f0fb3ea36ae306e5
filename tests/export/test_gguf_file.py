# SPDX-License-Identifier: Apache-2.0
"""GGUF files: what is refused before writing, and what gguf-py reads back."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from factories import changed, tiny_model
from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.hub import save_pretrained
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.cli.main import main
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.gguf_export import check, other_types, plan
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.nn.convert import convert_
from sparse_bitnet.packing.gguf_blocks import Q2_0, TQ1_0, TQ2_0, block_for

gguf = pytest.importorskip("gguf", reason="pip install gguf")


def with_rows(source: Checkpoint, columns: int) -> Checkpoint:
    layers = {name: (rows, columns) for name, (rows, _) in source.layers.items()}
    return changed(source, layers=layers)


def test_rows_that_do_not_fill_a_block_are_stored_in_the_next_type(source: Checkpoint) -> None:
    """The rows of Qwen2.5-0.5B, of the small presets, and of one that nothing fits."""
    rows = {896: "Q2_0", 352: "Q8_0", 172: "F16", 512: None}
    for columns, other in rows.items():
        narrow = with_rows(source, columns)
        check(narrow, TQ1_0, "f16")
        named = other_types(narrow, TQ1_0)
        assert (named is None) if other is None else named.endswith(f"of 14 layers 14 as {other}")
        assert (other_types(narrow, Q2_0) is None) == (columns % 64 == 0)
        size = {tensor.name: tensor.nbytes for tensor in plan(narrow, TQ1_0, "f16")}
        bytes_a_row = {896: 14 * 18, 352: 11 * 34, 172: 344, 512: 2 * 54}[columns]
        assert size["blk.0.attn_q.weight"] == 64 * bytes_a_row


@pytest.mark.parametrize("columns", [96, 68])
def test_codes_are_exact_in_every_type(columns: int, random_codes) -> None:
    codes, scale = random_codes(4, columns, 0).numpy(), 0.0123
    block = block_for(columns, TQ2_0)
    stored = gguf.quants.dequantize(
        block.pack(codes, scale), gguf.GGMLQuantizationType(block.type_id)
    )
    assert np.array_equal(stored, codes * np.float32(np.float16(scale)))


@pytest.mark.parametrize("format", ["gguf-tq1_0", "gguf-tq2_0", "gguf-q2_0"])
def test_the_smallest_preset_is_written(
    make_checkpoint, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make_checkpoint(
        steps=1, hidden_size=96, intermediate_size=352, num_attention_heads=3, num_key_value_heads=1
    )
    main(["export", str(checkpoint), str(tmp_path / "out"), "--format", format])
    printed = " ".join(capsys.readouterr().out.split())
    assert "of 14 layers 14 as Q8_0" in printed
    (file,) = (tmp_path / "out").glob("*.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    down = tensors["blk.0.ffn_down.weight"]
    codes, scale = open_checkpoint(checkpoint).ternary("model.layers.0.mlp.down_proj")
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    assert np.array_equal(values, codes.numpy() * np.float32(np.float16(scale)))
    assert "| bits per sparse weight | 8.5 |" in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_architectures_are_written(family: str, checkpoint: Path, tmp_path: Path) -> None:
    """llama.cpp's llama rotates neighbours: queries and keys have other rows there, the same products."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 392}
    biases = {"attention_bias": True} if family == "llama" else {"head_dim": 40}
    model = convert_(tiny_model(family, seed=1, **sizes, **biases), SparseBitConfig())
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    save_pretrained(model, tmp_path / "model", load_tokenizer(checkpoint))
    export(tmp_path / "model", tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    (file,) = (tmp_path / "out").glob("*.gguf")
    reader = gguf.GGUFReader(file)
    assert reader.fields["general.architecture"].contents() == family
    size = model.config.head_dim
    assert reader.fields[f"{family}.attention.key_length"].contents() == size
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    source = open_checkpoint(tmp_path / "model")
    assert len(tensors) == len(source.layers) + len(source.others)
    x = torch.randn(96, generator=torch.Generator().manual_seed(0)).numpy()

    def product(name: str, ours: str) -> tuple[np.ndarray, np.ndarray]:
        """[heads, head_dim] by the file and by the model."""
        stored = tensors[f"blk.0.attn_{name}.weight"]
        theirs = gguf.quants.dequantize(stored.data, stored.tensor_type) @ x
        expected = source.effective(f"model.layers.0.self_attn.{ours}").numpy() @ x
        if family == "llama":
            theirs = theirs + tensors[f"blk.0.attn_{name}.bias"].data
            expected = expected + source.read(f"model.layers.0.self_attn.{ours}.bias").numpy()
        return theirs.reshape(-1, size), expected.reshape(-1, size)

    def rotated(heads: np.ndarray, position: int, neighbours: bool) -> np.ndarray:
        angle = position / 10_000 ** (np.arange(size // 2) / (size // 2))
        pairs = heads.reshape(-1, size // 2, 2) if neighbours else heads.reshape(-1, 2, size // 2)
        a, b = (pairs[..., 0], pairs[..., 1]) if neighbours else (pairs[:, 0], pairs[:, 1])
        cosine, sine = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)

    (q, own_q), (k, own_k) = product("q", "q_proj"), product("k", "k_proj")
    for position in (0, 3, 50):
        theirs = rotated(q, position, family == "llama")[0] @ rotated(k, 0, family == "llama")[0]
        expected = rotated(own_q, position, False)[0] @ rotated(own_k, 0, False)[0]
        assert theirs == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "llama, mistral, gemma3_text, hunyuan_v1_dense, bitnet, not gpt2"),
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
def test_architectures_it_does_not_cover(source: Checkpoint, changes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(changed(source, config=source.config | changes), Q2_0, "f16")


def test_full_precision_is_refused(make_checkpoint, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Q2_0 holds ternary weights; use --format dense"):
        export(make_checkpoint("full-2:4"), tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    assert list(tmp_path.iterdir()) == []


def test_q8_0_embeddings_need_rows_of_32(source: Checkpoint) -> None:
    narrow = changed(source, others={"model.embed_tokens.weight": (9, 68)})
    with pytest.raises(
        UserError, match=r"embed_tokens.weight has rows of 68.*use --embeddings f16"
    ):
        check(narrow, Q2_0, "q8_0")


def test_scales_beyond_float16_are_refused_and_nothing_is_left(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_bitnet.export import export_checkpoint

    def tiny(layer: str):
        ternary = source.ternary(layer)
        return ternary._replace(weight_scale=ternary.weight_scale * 0 + 1.03e-6)

    faulty = changed(source, ternary=tiny)
    monkeypatch.setattr(export_checkpoint, "open_checkpoint", lambda checkpoint, *kinds: faulty)
    with pytest.raises(UserError, match=r"weight scale 1.03e-06 is too far out for float16"):
        export("any", tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    assert list(tmp_path.iterdir()) == []


def test_the_package_is_named_when_it_is_absent(
    source: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r'pip install "\.\[export\]"'):
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
    merges = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["model"]["merges"]
    assert len(field("tokenizer.ggml.merges")) == len(merges)


def test_absent_biases_become_zeros(source: Checkpoint) -> None:
    kept = {name: shape for name, shape in source.others.items() if "bias" not in name}
    tensors = plan(changed(source, others=kept), Q2_0, "f16")
    biases = {tensor.name: tensor for tensor in tensors if tensor.name.endswith("bias")}
    assert len(biases) == 6
    assert biases["blk.1.attn_k.bias"].shape == (32,)
    assert not biases["blk.1.attn_k.bias"].make().any()


def test_an_untied_head_is_written(make_checkpoint, source: Checkpoint) -> None:
    head = {"lm_head.weight": (392, 64)}
    untied = changed(source, others=source.others | head)
    assert "output.weight" in [tensor.name for tensor in plan(untied, Q2_0, "f16")]
