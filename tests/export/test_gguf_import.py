# SPDX-License-Identifier: Apache-2.0
"""GGUF files become packed models, weights, tokenizer and template exact."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from factories import edit_json, tiny_model
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.checkpoint import embedding_weights, linear_shapes, stored_tensors
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer, write_tokenizer
from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, fingerprint, open_checkpoint
from sparse_bitnet.cli.evaluate import main as evaluate
from sparse_bitnet.cli.main import main
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.packing.gguf_blocks import READ_TYPES
from sparse_bitnet.training.distillation import Teacher

gguf = pytest.importorskip("gguf", reason="pip install gguf")
Kind = gguf.GGMLQuantizationType

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
}

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 392}
Write = Callable[[Any, str, np.ndarray], None]


def gguf_name(name: str) -> str:
    stem, _, end = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{end}"


def ternary_model(family: str, group: int, **changes: Any) -> Any:
    """A random model of the family whose linears are ternary with a scale for every `group` weights."""
    model: Any = tiny_model(family, seed=3, **(SIZES | changes))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
        elif name.endswith("proj.weight"):
            codes = torch.randint(-1, 2, parameter.shape).float()
            scales = (torch.rand(len(codes), parameter.shape[1] // group, 1) * 0.1 + 0.02).half()
            parameter.data = (codes.unflatten(1, (-1, group)) * scales.float()).flatten(1)
        else:
            parameter.data = parameter.data.half().float()
    return model.eval()


def write_gguf(
    path: Path, model: Any, name: str, write: Write, extra: Any = None, tables: Write | None = None
) -> Path:
    """Write what a converter of llama.cpp writes: metadata, floats as they are, linears through `write`,
    embedding and head through `tables`."""
    config = model.config
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if (size := getattr(config, "head_dim", None)) is not None:
        writer.add_key_length(size)
    if extra is not None:
        extra(writer)
    for own, tensor in model.state_dict().items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if (name == "llama" and ".q_proj" in own) or (name == "llama" and ".k_proj" in own):
            heads = config.num_attention_heads if ".q_" in own else config.num_key_value_heads
            by_head = values.reshape(heads, 2, -1, values.shape[-1])
            values = by_head.swapaxes(1, 2).reshape(values.shape)
        if own.endswith("proj.weight"):
            write(writer, gguf_name(own), values)
        elif values.ndim == 2 and tables is not None:
            tables(writer, gguf_name(own), values)
        elif values.ndim == 2:
            writer.add_tensor(gguf_name(own), values.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(own), values)
    finish(writer)
    return path


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(kind: Any) -> Write:
    def write(writer: Any, name: str, values: np.ndarray) -> None:
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    return write


def by_our_layout(name: str, codes: int) -> Write:
    """A type that gguf-py lacks, from the scales of its blocks."""
    block = next(each for each in READ_TYPES if (each.name, each.codes) == (name, codes))

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        runs = values.reshape(-1, codes)
        scales = np.abs(runs).max(1, keepdims=True)
        data = block.pack(np.sign(runs).astype(np.int8), scales).reshape(len(values), -1)
        kind = np.dtype(np.int8)
        writer.add_tensor_info(name, values.shape, kind, data.nbytes, raw_dtype=block.type_id)
        writer.tensors[-1][name].tensor = data

    return write


def sherry(writer: Any, name: str, values: np.ndarray) -> None:
    """STQ1_0, of which any bytes are weights: the model gets theirs."""
    block = next(each for each in READ_TYPES if (each.name, each.type_id) == ("STQ1_0", 43))
    random = np.random.default_rng(values.size)
    data = random.integers(0, 256, (values.size // 256, block.nbytes), np.uint8)
    data[:, -2:] = random.uniform(0.02, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
    codes, scales = block.unpack(data.reshape(-1), *values.shape)
    values[:] = codes * np.repeat(scales.astype(np.float32), 256, 1)
    kind = np.dtype(np.int8)
    writer.add_tensor_info(name, values.shape, kind, data.nbytes, raw_dtype=block.type_id)
    writer.tensors[-1][name].tensor = data.reshape(len(values), -1)


def i2_s(run: int) -> Write:
    """I2_S of bitnet.cpp: four runs of 32 codes to 32 bytes (x86), or of 16 to 16 (ARM)."""

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        t = (np.sign(values).astype(np.int8) + 1).astype(np.uint8).reshape(-1, 4, run)
        packed = t[:, 0] << 6 | t[:, 1] << 4 | t[:, 2] << 2 | t[:, 3]
        tail = np.zeros(8, "f4")
        tail[0] = np.abs(values).max()
        data = np.concatenate([packed.reshape(-1), tail.view(np.uint8)])
        writer.add_tensor_info(name, values.shape, np.dtype(np.int8), data.nbytes, raw_dtype=36)
        writer.tensors[-1][name].tensor = data

    return write


@pytest.mark.parametrize(("run", "name"), [(32, "I2_S"), (16, "I2_S of ARM")])
def test_weights_show_the_order_of_i2_s(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, run: int, name: str
) -> None:
    model = ternary_model("bitnet", 256)
    for key, parameter in model.named_parameters():
        if key.endswith("proj.weight"):
            parameter.data = parameter.data.sign() * 0.5
    path = write_gguf(tmp_path / "random.gguf", model, "bitnet-b1.58", i2_s(run))
    assert open_checkpoint(path).tool == "GGUF I2_S"
    assert "bitnet.cpp for ARM wrote the file, which its weights do not show" in str(
        recwarn.pop(UserWarning).message
    )
    for layer in model.model.layers:
        # Hidden features differ in how many weights they have, before them and behind.
        share = torch.linspace(0.2, 0.9, 512)[torch.randperm(512)]
        layer.mlp.up_proj.weight.data *= torch.rand(512, 256) < share[:, None]
        layer.mlp.down_proj.weight.data *= torch.rand(256, 512) < share
    path = write_gguf(tmp_path / "trained.gguf", model, "bitnet-b1.58", i2_s(run))
    source = open_checkpoint(path)
    assert source.tool == f"GGUF {name}"
    for layer in source.layers:
        weight = model.get_parameter(f"{layer}.weight").detach()
        assert np.array_equal(source.ternary(layer).values(), weight), layer
    assert not recwarn.list


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(1, 33)[None] * 7 % 392).logits[0]


@pytest.mark.parametrize(
    ("family", "architecture", "group", "write"),
    [
        ("qwen2", "qwen2", 256, quantised(Kind.TQ2_0)),
        ("llama", "llama", 256, quantised(Kind.TQ1_0)),
        ("qwen3", "qwen3", 128, by_our_layout("Q2_0", 128)),
        ("bitnet", "bitnet-b1.58", 64, by_our_layout("Q2_0", 64)),
        ("qwen2", "qwen2", 32, quantised(Kind.F16)),
        ("hunyuan_v1_dense", "hunyuan-dense", 256, sherry),
    ],
)
def test_weights_come_back_exactly(
    tmp_path: Path, family: str, architecture: str, group: int, write: Write
) -> None:
    """Every weight, and the logits of the folder in floats against those of the model."""
    changes: dict[str, Any] = {} if family == "bitnet" else {"num_attention_heads": 8}
    if family == "hunyuan_v1_dense":
        changes |= {"head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    model = ternary_model(family, group, **changes)
    path = write_gguf(tmp_path / "model.gguf", model, architecture, write)
    source = open_checkpoint(path)
    weights = model.state_dict()
    assert len(source.layers) == 14
    for layer, (_, columns) in source.layers.items():
        ternary = source.ternary(layer)
        assert np.array_equal(ternary.values(), weights[f"{layer}.weight"]), layer
        assert ternary.weight_scale.shape[1] == columns // group
    for name in source.others:
        assert np.array_equal(source.read(name), weights[name]), name
    skeleton: Any = source.model
    names = [
        name
        for name in stored_tensors(skeleton)
        if name.removesuffix(".weight") not in source.layers
    ]
    assert source.stored == names
    assert list(source.layers) == [
        n for n in linear_shapes(skeleton) if n not in source.dense_linears
    ]
    assert source.embeddings == [n for n in embedding_weights(skeleton) if n in source.others]
    for key in ("hidden_act", "rms_norm_eps", "num_key_value_heads"):
        assert source.config[key] == pytest.approx(getattr(model.config, key)), key


def test_a_file_of_an_export_comes_back_as_it_was(make_checkpoint: Any, tmp_path: Path) -> None:
    """Codes, tokens, template, end of text, and the packed model's logits."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(make_checkpoint(steps=1, hidden_size=256, intermediate_size=768), checkpoint)
    template = "{{ messages[0]['content'] }}"
    edit_json(checkpoint / "tokenizer_config.json", chat_template=template)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [300, 0, 7]}')
    export(checkpoint, tmp_path / "out", ExportConfig(format="gguf-tq2_0", embeddings="f32"))
    (file,) = (tmp_path / "out").glob("*.gguf")
    result = import_checkpoint(file, tmp_path / "packed", packed="i2", embeddings="float32")
    assert (result.kind, result.layers) == ("GGUF TQ2_0", 14)
    before, after = open_checkpoint(checkpoint), open_checkpoint(tmp_path / "packed")
    for layer in before.layers:
        ours, theirs = before.ternary(layer), after.ternary(layer)
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(theirs.weight_scale, ours.weight_scale)
    text = "def f(x):\n    return 'naïve' + 17 * x\n"
    tokenizer, stored = TextTokenizer.load(tmp_path / "packed"), load_tokenizer(checkpoint)
    assert tokenizer.encode(text) == stored(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    written = json.loads((tmp_path / "packed" / "tokenizer_config.json").read_text())
    assert written["chat_template"] == template
    ends = json.loads((tmp_path / "packed" / "generation_config.json").read_text())
    assert ends["eos_token_id"] == [0, 7, 300]
    imported = logits(from_pretrained(tmp_path / "packed", dtype=torch.float32))
    expected = logits(from_pretrained(checkpoint, dtype=torch.float32))
    assert (imported - expected).norm() < 2e-3 * expected.norm()


def add_tokenizer(writer: Any) -> None:
    alphabet = [chr(code) for code in range(33, 127)]
    tokens = [*alphabet, "ab", *(f"[PAD{index}]" for index in range(len(alphabet), 391))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(alphabet) + 1) + [5] * (391 - len(alphabet)))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(5)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ternary_model("qwen2", 256)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, model, "qwen2", quantised(Kind.TQ2_0), add_tokenizer)


def test_embeddings_of_any_type_are_read(tmp_path: Path) -> None:
    """The values are those that gguf-py dequantises; read some rows at a time."""
    values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen2")
    data = {kind: gguf.quants.quantize(values, kind) for kind in (Kind.Q8_0, Kind.Q4_0, Kind.BF16)}
    random = np.random.default_rng(1)
    for kind in (Kind.Q4_K, Kind.Q6_K):
        _, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = random.integers(0, 60, (64, size), np.uint8)
        data[kind] = blocks
    for kind, stored in data.items():
        writer.add_tensor(kind.name, stored, raw_dtype=kind)
    finish(writer)
    file = GgufFile(tmp_path / "t.gguf")
    for kind, stored in data.items():
        expected = gguf.quants.dequantize(stored, kind)
        np.testing.assert_array_equal(file.floats(kind.name), expected)
        np.testing.assert_array_equal(file.floats(kind.name, slice(3, 9)), expected[3:9])


def _place(data: bytes, name: bytes) -> int:
    """Place of the type of a tensor of block 0: behind its name, the number of dimensions, and two of
    them. The offset follows."""
    return data.index(b"blk.0.attn_%s.weight" % name) + 19 + 4 + 16


def _at_the_same_offset(data: bytes) -> bytes:
    k, v = _place(data, b"k") + 4, _place(data, b"v") + 4
    return data[:k] + data[v : v + 8] + data[k + 8 :]


def _of_type(type_id: int) -> Callable[[bytes], bytes]:
    return lambda data: (
        data[: (at := _place(data, b"k"))] + type_id.to_bytes(4, "little") + data[at + 4 :]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_at_the_same_offset, "a tensor name is repeated, or tensors overlap"),
        (lambda data: b"GGML" + data[4:], "not a GGUF file, or is damaged: it does not begin with GGUF"),
        (lambda data: data[:4] + b"\x09" + data[5:], "version 9"),
        (lambda data: data[:200], "damaged"),
        (lambda data: data[: len(data) // 2], "lies outside the file|is cut off|has .* bytes"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "a count of"),
        (lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "is repeated"),
        (lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ex.weight"), "is not supported"),
        (lambda data: data.replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"), "is not supported"),
        (lambda data: data.replace(b"\x05\0\0\0\0\0\0\0qwen2", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba'"),
        (_of_type(144), r"attn_k\.weight is type 144, which neither"),
        (_of_type(155), r"attn_k\.weight is type 155, which neither"),
        (lambda data: data[:4] + data[4:8][::-1] + data[8:], "it is big-endian"),
        (lambda data: b"FUGG" + data[4:], "it is big-endian"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (lambda data: b"tjgg" + data[4:], "GGML from before GGUF"),
    ],
)  # fmt: skip
def test_damaged_and_other_files_are_named_for_what_they_are(
    small_file: Path, tmp_path: Path, change: Any, message: str
) -> None:
    (tmp_path / "bad.gguf").write_bytes(change(small_file.read_bytes()))
    with pytest.raises(UserError, match=message):
        import_checkpoint(tmp_path / "bad.gguf", tmp_path / "no", packed="i2")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "Q4_1"), ("llama", "Q5_0"), ("qwen3", "F16")]
)
def test_an_ordinary_file_is_a_start_and_a_teacher(tmp_path: Path, family: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, seed=5, **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, family, quantised(Kind[kind]))
    theirs = {"config": model.config, "gguf_file": path.name}
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, **theirs).state_dict()
    path = path.rename(tmp_path / "no suffix")
    stored = find_checkpoint(path)
    assert stored.kind == "dense"
    own = stored.load(dtype=torch.float32)
    assert own.state_dict().keys() == expected.keys()
    assert all(torch.equal(own.state_dict()[name], expected[name]) for name in expected)
    student = build_model("", "ternary-6:8", init=path)
    assert sparse_layers(student).keys() == linear_shapes(own).keys() - {"lm_head"}
    Teacher(path, torch.float32, torch.device("cpu"), SIZES["vocab_size"])
    assert len(fingerprint(str(path))) == 16
    with pytest.raises(UserError, match="unknown kind of file"):  # it reads the text
        evaluate([str(path), "--data", __file__])


@pytest.mark.parametrize(
    "command",
    ["pack IN OUT", "import IN OUT", "export IN OUT --to dense", "generate IN --prompt a"]
    + [f"generate IN --prompt a --engine {engine}" for engine in ("cpu", "transformers")],
)
def test_commands_that_need_ternary_files_name_distill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any, command: str
) -> None:
    model = tiny_model("qwen2", **SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, "qwen2", quantised(Kind.Q4_1))
    if command.startswith(("import", "generate")):
        # The light core needs no other package to say so.
        monkeypatch.setitem(sys.modules, "gguf", None)
        monkeypatch.setitem(sys.modules, "torch", None)
    places = {"IN": str(path), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as stopped:
        main([places.get(word, word) for word in command.split()])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"sparse-bitnet: .*is Q4_1 and not ternary.*sparse-bitnet distill .*\n", said
    )
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_one_part_of_several_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model-00002-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(UserError, match="it is one of 3 parts: llama-gguf-split --merge"):
        open_checkpoint(tmp_path / "model-00002-of-00003.gguf")


@pytest.mark.parametrize("place", ["", "snapshots/abc"])
def test_a_folder_that_has_a_gguf_file_alone_names_it(
    small_file: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / "folder" / place).mkdir(parents=True)
    path = shutil.copy(small_file, tmp_path / "folder" / place / "m.gguf")
    with pytest.raises(UserError, match=f"it holds {path}: name that file"):
        open_checkpoint(tmp_path / "folder")
    with pytest.raises(UserError, match=r"OWNER/NAME/FILE.gguf \(not :TAG\)"):
        open_checkpoint("owner/name:Q4_K_M")


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda w: w.add_tensor("blk.0.attn_q.scale", np.ones(2, "f4")), "is not one non-zero"),
        (lambda w: w.add_tensor("blk.0.attn_norm.scale", np.ones(1, "f4")), "is not supported"),
        (lambda w: w.add_tensor("rope_freqs.weight", np.ones(3, "f")), "no supported rope scaling"),
        (lambda w: w.add_uint32("qwen2.rope.dimension_count", 8), "rotates all values of a head"),
        (lambda w: w.add_float32("qwen2.rope.scaling.attn_factor", 2), "attn_factor = 2.0 is not"),
        (lambda w: w.add_string("qwen2.rope.scaling.type", "longrope"), "'longrope' is not"),
        (lambda w: w.add_token_list(["a"] * 1000), "1000 tokens, but rows of token_embd.weight"),
        (lambda w: w.add_uint64("qwen2.attention.key_length", 1 << 40), "is above"),
        (lambda w: w.add_uint32("qwen2.attention.key_length", 5), "an even number"),
        (
            lambda w: w.add_tensor(f"blk.{'1' * 5000}.attn_q.weight", np.ones((2, 2), "f4")),
            "attn_q.weight is not supported",
        ),
        (lambda w: w.add_uint32("prism.hadamard.block_size", 64), "rotated weights.*its arch"),
        (lambda w: w.add_expert_count(8), "qwen2.expert_count = 8 .* a mixture of experts"),
        (lambda w: w.add_uint32("acme.fold", 3), "acme.fold = 3 is not supported and may change"),
        (lambda w: w.add_bool("qwen2.attention.causal", False), "causal = False is not supported"),
        (lambda w: w.add_uint32("qwen2.attention.sliding_window", 9), "window = 9 is not"),
        (
            lambda w: w.add_array("qwen2.attention.key_length", [7] * 999),
            r"key_length is \[[7, ]{39}, not a positive size",
        ),
    ],
)
def test_settings_that_would_be_dropped_are_refused(tmp_path: Path, add: Any, message: str) -> None:
    model = tiny_model("qwen2", **SIZES)
    path = write_gguf(tmp_path / "model.gguf", model, "qwen2", quantised(Kind.TQ2_0), add)
    with pytest.raises(UserError, match=message):
        import_checkpoint(path, tmp_path / "no", packed="i2")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("token_embd.weight", lambda values: values[0, 0], "has no matrix token_embd.weight"),
        ("token_embd.weight", lambda values: values.astype("i4"), "token_embd.weight is I32"),
        (
            "output_norm.weight",
            lambda values: values * np.nan,
            "norm.weight has values that are not",
        ),
        (
            "blk.0.attn_q.bias",
            lambda values: values + np.inf,
            "q_proj.bias has values that are not",
        ),
    ],
)
def test_tensors_that_hold_no_weights_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Any, message: str
) -> None:
    model = tiny_model("qwen2", **SIZES)
    write = gguf.GGUFWriter.add_tensor

    def changed(self: Any, own: str, values: np.ndarray, **more: Any) -> None:
        write(self, own, np.asarray(change(values) if own == name else values), **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", changed)
    with np.errstate(invalid="ignore"):
        path = write_gguf(
            tmp_path / "model.gguf", model, "qwen2", quantised(Kind.TQ2_0), add_tokenizer
        )
    with pytest.raises(UserError, match=message):
        import_checkpoint(path, tmp_path / "no", packed="i2")
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_a_scale_that_is_not_finite_is_named(small_file: Path, tmp_path: Path) -> None:
    entry = GgufFile(small_file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(small_file.read_bytes())
    data[entry.begin + 64 : entry.begin + 66] = np.array([np.nan], "<f2").tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.up_proj: its weight scale is not finite"):
        import_checkpoint(tmp_path / "bad.gguf", tmp_path / "no", packed="i2")


def _described(kind: str, tokens: list[str], **more: Any) -> dict[str, Any]:
    types = [
        3 if token.startswith("<|") else 4 if token.startswith("<t") else 1 for token in tokens
    ]
    return {"model": kind, "tokens": tokens, "token_type": types, **more}


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({"model": "gpt2", "pre": "gpt-2"}, 0, 0),
        ({"model": "gpt2", "pre": "llama-bpe"}, 1, 0),
        ({"model": "gpt2", "pre": "glm4"}, 0, 0),
        ({"model": "gpt2", "pre": "llama-bpe", "add_bos_token": False}, 0, 0),
        ({"model": "gpt2", "pre": "gpt-2", "add_eos_token": True}, 0, 1),
        ({"model": "llama", "scores": [0.0] * 9}, 1, 0),
    ],
)
def test_missing_metadata_has_llama_cpps_defaults(
    tmp_path: Path, fields: dict[str, Any], first: int, last: int
) -> None:
    ids = {} if fields["model"] == "llama" else {"bos_token_id": 1, "eos_token_id": 2}
    fields = fields | ids | {"tokens": ["<unk>", "<s>", "</s>", *"abcdef"]}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    write_tokenizer(metadata, tmp_path / "model.gguf", tmp_path)
    encoded = TextTokenizer.load(tmp_path).encode("a")
    assert (encoded.count(1), encoded.count(2), 3 in encoded) == (first, last, True)


def test_a_file_is_a_tokenizer_and_its_model_goes_with_data_of_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    export(checkpoint, tmp_path / "out", ExportConfig(format="gguf-q2_0"))
    (path,) = (tmp_path / "out").glob("*.gguf")
    assert (
        load_tokenizer(path).get_vocab().items() >= load_tokenizer(checkpoint).get_vocab().items()
    )
    text = tmp_path / "text.txt"
    text.write_text("def some(words):\n    return 1234\n" * 2000)
    for name, tokenizer in (("own", path), ("hub", checkpoint), ("other", None)):
        prepare(
            parse_source(str(text)),
            tmp_path / name,
            tokenizer=tokenizer,
            vocab_size=None if tokenizer else 300,
        )
        data = TokenDataset.open(tmp_path / name, "train")
        if name == "other":
            with pytest.raises(UserError, match="prepared with another tokenizer than that of"):
                data.check_tokenizer(path, "model.gguf")
        else:
            assert data.check_tokenizer(path, "model.gguf")


def test_bos_and_eos_tokens_may_have_any_spelling(tmp_path: Path) -> None:
    fields = {"model": "gpt2", "tokens": ["a", ":", "$A"], "bos_token_id": 1, "eos_token_id": 2}
    fields |= {"add_bos_token": True, "add_eos_token": True, "pre": "gpt-2"}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    write_tokenizer(metadata, tmp_path / "model.gguf", tmp_path)
    assert load_tokenizer(tmp_path)("a").input_ids == [1, 0, 2]


@pytest.mark.parametrize("pre", [None, "default", "of-tomorrow", 7])
def test_without_a_known_pre_tokenizer_the_vocabulary_tells_and_a_warning_says_so(pre: Any) -> None:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "12 3", ". Ċ", "a b", "Ġ ab"]
    fields = _described(
        "gpt2", [*alphabet, *(merge.replace(" ", "") for merge in merges)], merges=merges
    )
    with pytest.warns(UserWarning, match=r"^model.gguf: its pre-tokenizer is .*, so text is"):
        tokenizer = read_tokenizer(fields | ({} if pre is None else {"pre": pre}), "model.gguf")
    assert tokenizer.encode("1231 ab.\n").tokens == ["123", "1", "Ġab", ".Ċ"]


@pytest.mark.parametrize("model", [None, 7, "t5", ["gpt2"]])
def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path, model: object) -> None:
    metadata = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(UserError, match=r"model\.gguf: a tokenizer .* is not supported; gpt2 and"):
        write_tokenizer(metadata, tmp_path / "model.gguf", tmp_path)


@pytest.mark.parametrize("types", [[1, 1, 1, 3, 3, 4], []])
def test_special_tokens_are_spelled_as_in_texts(tmp_path: Path, types: list[int]) -> None:
    """DeepSeek's, whose characters are none of the byte alphabet."""
    tokens = ["a", "b", "c", "<\uff5cbegin▁of▁sentence\uff5c>", "</s\uff5c>", "東 "]
    ids = {"bos_token_id": 3, "eos_token_id": 4, "add_bos_token": True}
    fields = {"model": "gpt2", "pre": "deepseek-v3", "tokens": tokens, "token_type": types} | ids
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    write_tokenizer(metadata, tmp_path / "model.gguf", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (6, 3, 4)
    text = f"a{tokens[4]}b"
    assert tokenizer(text).input_ids == [3, 0, 4, 1]
    assert tokenizer.decode([3, 0, 4, 1]) == tokens[3] + text
    if types:
        assert tokenizer(f"c{tokens[5]}b").input_ids == [3, 2, 5, 1]


def test_qwen35_splits_texts_as_transformers_does() -> None:
    theirs = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    (row,) = (row for row in PRE_TOKENIZERS if row.names == ("qwen35",))
    assert row.regexes == (theirs.PRETOKENIZE_REGEX,)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "tekken", "gpt-2", "llama"])
def test_tokenizers_are_read_as_transformers_reads_them(pre: str) -> None:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers.integrations.gguf import convert_gguf_tokenizer

    specials = ["<|endoftext|>", "<think>"]
    if pre == "llama":
        letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        words = ["▁", *"abcdefghinot", "th", "the", "▁th", "▁the", "in", "ing", "▁a", "an", "▁an"]
        tokens = [*letters, *words, *specials]
        fields = _described("llama", tokens, scores=[-float(n % 17) for n in range(len(tokens))])
    else:
        merges = ["t h", "th e", "Ġ the", "i n", "in g", "1 2", "12 3", "Ġ a", "Ġ Ġ"]
        tokens = [*sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges), *specials]
        fields = _described("gpt2", tokens, merges=merges, pre=pre)
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    expected, _ = convert_gguf_tokenizer(
        "llama", {names.get(key, key): value for key, value in fields.items()}
    )
    read = read_tokenizer(fields, "model.gguf")
    texts = ["The thing, the  inn\n\n12345 don't\t", "", " naïve <think> Ünï<|endoftext|>ann 東京"]
    if pre == "llama":
        # Transformers puts no space before one, nor after a special token; SentencePiece does.
        texts.pop()
        for text in (" the", "<|endoftext|> the"):
            assert read.encode(text).tokens[-2:] == ["▁", "▁the"]
        assert read.encode("the<think>the").tokens == ["▁the", "<think>", "▁the"]
    for text in texts:
        ids = read.encode(text, add_special_tokens=False).ids
        assert ids == expected.encode(text, add_special_tokens=False).ids
        for skip in (True, False):
            decoded = expected.decode(ids, skip_special_tokens=skip)
            assert read.decode(ids, skip_special_tokens=skip) == decoded
