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

from exported import assert_import_refused, assert_same_layers, export_gguf
from factories import edit_json, tiny_model
from gguf_models import (
    SIZES,
    TOKENS,
    Write,
    add_bytes,
    add_tokenizer,
    by_our_layout,
    gguf,
    gguf_writer,
    quantised,
    ternary_model,
    write_gguf,
)
from packed_models import reference_logits
from sparse_bitnet.checkpoint.build_model import build_model
from sparse_bitnet.checkpoint.checkpoint import embedding_weights, linear_shapes, stored_tensors
from sparse_bitnet.checkpoint.gguf_file import GgufFile
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, fingerprint, open_checkpoint
from sparse_bitnet.cli.evaluate import main as evaluate
from sparse_bitnet.cli.main import main
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.packing.gguf_blocks import READ_TYPES
from sparse_bitnet.training.distillation import Teacher


def sherry(writer: Any, name: str, values: np.ndarray) -> None:
    """STQ1_0, of which any bytes are weights: the model gets theirs."""
    block = next(each for each in READ_TYPES if (each.name, each.type_id) == ("STQ1_0", 43))
    random = np.random.default_rng(values.size)
    data = random.integers(0, 256, (values.size // 256, block.nbytes), np.uint8)
    data[:, -2:] = random.uniform(0.02, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
    codes, scales = block.unpack(data.reshape(-1), *values.shape)
    values[:] = codes * np.repeat(scales.astype(np.float32), 256, 1)
    add_bytes(writer, name, values.shape, data.reshape(len(values), -1), block.type_id)


def i2_s(run: int) -> Write:
    """I2_S of bitnet.cpp: four runs of 32 codes to 32 bytes (x86), or of 16 to 16 (ARM)."""

    def write(writer: Any, name: str, values: np.ndarray) -> None:
        t = (np.sign(values).astype(np.int8) + 1).astype(np.uint8).reshape(-1, 4, run)
        packed = t[:, 0] << 6 | t[:, 1] << 4 | t[:, 2] << 2 | t[:, 3]
        tail = np.zeros(8, "f4")
        tail[0] = np.abs(values).max()
        data = np.concatenate([packed.reshape(-1), tail.view(np.uint8)])
        add_bytes(writer, name, values.shape, data, 36)

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


@pytest.mark.parametrize(
    ("family", "architecture", "group", "write"),
    [
        ("qwen2", "qwen2", 256, quantised("TQ2_0")),
        ("llama", "llama", 256, quantised("TQ1_0")),
        ("qwen3", "qwen3", 128, by_our_layout("Q2_0", 128)),
        ("bitnet", "bitnet-b1.58", 64, by_our_layout("Q2_0", 64)),
        ("qwen2", "qwen2", 32, quantised("F16")),
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
    templates = {"default": "{{ messages[0]['content'] }}", "tool_use": "{{ tools }}"}
    listed = [{"name": name, "template": text} for name, text in templates.items()]
    edit_json(checkpoint / "tokenizer_config.json", chat_template=listed)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [300, 0, 7]}')
    file = export_gguf(checkpoint, tmp_path / "out", "tq2_0", embeddings="f32")
    result = import_checkpoint(file, tmp_path / "packed", packed="i2", embeddings="float32")
    assert (result.kind, result.layers) == ("GGUF TQ2_0", 14)
    assert_same_layers(open_checkpoint(checkpoint), open_checkpoint(tmp_path / "packed"))
    text = "def f(x):\n    return 'naïve' + 17 * x\n"
    tokenizer, stored = TextTokenizer.load(tmp_path / "packed"), load_tokenizer(checkpoint)
    assert tokenizer.encode(text) == stored(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert load_tokenizer(tmp_path / "packed").chat_template == templates
    ends = json.loads((tmp_path / "packed" / "generation_config.json").read_text())
    assert ends["eos_token_id"] == [0, 7, 300]
    imported = reference_logits(tmp_path / "packed", TOKENS)
    expected = reference_logits(checkpoint, TOKENS)
    assert np.linalg.norm(imported - expected) < 2e-3 * np.linalg.norm(expected)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = ternary_model("qwen2", 256)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return write_gguf(path, model, "qwen2", quantised("TQ2_0"), add_tokenizer)


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
    assert_import_refused(tmp_path / "bad.gguf", tmp_path / "no", message, packed="i2")


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen2", "Q4_1"), ("llama", "Q5_0"), ("qwen3", "F16")]
)
def test_an_ordinary_file_is_a_start_and_a_teacher(tmp_path: Path, family: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model(family, seed=5, **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(path, model, family, quantised(kind))
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
    path = write_gguf(tmp_path / "model.gguf", model, "qwen2", quantised("Q4_1"))
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


@pytest.mark.parametrize(("kind", "parts"), [("add_uint16", 3), ("add_string", "many")])
def test_one_part_of_several_is_named(tmp_path: Path, kind: str, parts: object) -> None:
    path = tmp_path / "model-00002-of-00003.gguf"
    with gguf_writer(path, "llama") as writer:
        getattr(writer, kind)("split.count", parts)
    with pytest.raises(UserError, match=f"it is one of {parts} parts: llama-gguf-split --merge"):
        open_checkpoint(path)


@pytest.mark.parametrize("place", ["", "snapshots/abc"])
def test_a_folder_that_has_a_gguf_file_alone_names_it(small_file: Path, tmp_path: Path, place: str):
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
    path = write_gguf(tmp_path / "model.gguf", model, "qwen2", quantised("TQ2_0"), add)
    assert_import_refused(path, tmp_path / "no", message, packed="i2")


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
            tmp_path / "model.gguf", model, "qwen2", quantised("TQ2_0"), add_tokenizer
        )
    assert_import_refused(path, tmp_path / "no", message, packed="i2")


def test_a_scale_that_is_not_finite_is_named(small_file: Path, tmp_path: Path) -> None:
    entry = GgufFile(small_file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(small_file.read_bytes())
    data[entry.begin + 64 : entry.begin + 66] = np.array([np.nan], "<f2").tobytes()
    (tmp_path / "bad.gguf").write_bytes(data)
    message = r"layers\.0\.mlp\.up_proj: its weight scale is not finite"
    assert_import_refused(tmp_path / "bad.gguf", tmp_path / "no", message, packed="i2")


def test_a_file_is_a_tokenizer_and_its_model_goes_with_data_of_it(checkpoint: Path, tmp_path: Path):
    path = export_gguf(checkpoint, tmp_path / "out", "q2_0")
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
