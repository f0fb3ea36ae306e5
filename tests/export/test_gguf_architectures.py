# SPDX-License-Identifier: Apache-2.0
"""Every architecture that the engine runs, as GGUF and back, and under llama.cpp itself."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from exported import assert_same_layers, export_gguf
from gguf_models import SIZES
from packed_models import engine_logits, make_packed, reference_logits, relative_error
from serving_thread import sentence_piece_tokenizer
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.model_folder import TOKENIZER_FILES, copy_files, read_config
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.architecture import MODEL_TYPES, read_architecture
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_checkpoint import export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.importer import import_checkpoint
from sparse_bitnet.export.verify import llama_cpp_reader
from sparse_bitnet.generation.text import TextTokenizer

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 3}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {"head_dim": 64, "rope_parameters": YARN}),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "head_dim": 64}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": False}),
    "mistral with a window": ("mistral", {}),
    "gemma3": (
        "gemma3_text",
        GEMMA | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"tie_word_embeddings": False}),
    "qwen35": (
        "qwen3_5_text",
        {
            **{"head_dim": 64, "linear_value_head_dim": 64, "linear_key_head_dim": 64},
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
        },
    ),
    "bitnet": ("bitnet", {"hidden_act": "silu"}),
    "bitnet 2B4T": ("bitnet", {"hidden_act": "relu2"}),
}  # fmt: skip
IN_LLAMA_CPP = ("qwen2", "qwen3", "llama", "mistral", "gemma3", "hunyuan", "bitnet", "qwen35")


@pytest.fixture
def packed(checkpoint: Path, tmp_path: Path):
    """`packed("gemma3")`: a packed random model of `MODELS` with a tokenizer."""

    def make(name: str, **changes: Any) -> Path:
        family, own = MODELS[name]
        options = {"packed_format": "nm-enum", "embeddings": "float32"}
        folder = make_packed(
            tmp_path / "made", family, **options, **(SIZES | HEADS | own | changes)
        )
        copy_files(checkpoint, folder, TOKENIZER_FILES)
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "type"), [*((name, "tq2_0") for name in MODELS), ("bitnet 2B4T", "i2_s")]
)
def test_a_packed_model_comes_back_as_it_was(packed, tmp_path: Path, name: str, type: str) -> None:
    """Codes, scales, pattern, all that the engine reads of config.json, tokens, and so its logits."""
    folder = packed(name)
    file = export_gguf(folder, tmp_path / "out", type, embeddings="f32")
    result = import_checkpoint(file, tmp_path / "back", packed="auto", embeddings="float32")
    assert str(result.format.pattern) == "6:8"
    before, after = open_checkpoint(folder), open_checkpoint(tmp_path / "back")
    assert_same_layers(before, after)
    assert after.others == before.others
    for other in before.others:
        # Gemma's norms have one more in the file: their sums are the same, and these are used.
        has_offset = name in ("gemma3", "qwen35") and not other.endswith("linear_attn.norm.weight")
        offset = 1.0 if has_offset and other.endswith("norm.weight") else 0.0
        ours, theirs = (checkpoint.read(other) + offset for checkpoint in (before, after))
        if other.endswith("A_log"):  # the file holds -exp of it
            ours, theirs = (-values.double().exp().float() for values in (ours, theirs))
        assert torch.equal(ours, theirs), other
    configs = [read_config(path) for path in (folder, tmp_path / "back")]
    if configs[0]["model_type"] in MODEL_TYPES:
        shapes = [dataclasses.asdict(read_architecture(config, "")) for config in configs]
        kept = [{**shape, "model_type": ""} if name == "mistral" else shape for shape in shapes]
        np.testing.assert_equal(*kept)
    text = "def f(x):\n    return 'naïve' + 17 * x\n"
    ids = TextTokenizer.load(tmp_path / "back").encode(text)
    assert ids == load_tokenizer(folder)(text, add_special_tokens=False).input_ids
    run = engine_logits if configs[0]["model_type"] in MODEL_TYPES else reference_logits
    first, second = (run(path, ids) for path in (folder, tmp_path / "back"))
    np.testing.assert_array_equal(first, second)


def centred(values: np.ndarray) -> np.ndarray:
    """Logits, which a constant does not change, without it."""
    return values - values.mean(-1, keepdims=True)


@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_llama_cpp_computes_the_same_model(packed, tmp_path: Path, name: str) -> None:
    """Rows that fill no block are F16 there, so activations are not quantised: norms, ropes, windows and
    scales are compared alone, with transformers' model of the same weights in float32."""
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python builds llama.cpp")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    own = {"head_dim": 12} if "head_dim" in MODELS[name][1] else {}
    own |= {"query_pre_attn_scalar": 12} if name == "gemma3" else {}
    own |= {"linear_key_head_dim": 20, "linear_value_head_dim": 20} if name == "qwen35" else {}
    folder = packed(
        name, format="ternary-2:4", hidden_size=72, intermediate_size=100, **heads, **own
    )
    tokens = np.arange(1, 33) * 7 % 392
    file = export_gguf(folder, tmp_path / "out", "tq2_0", embeddings="f32")
    with llama_cpp_reader(file, 64) as reader:
        theirs = centred(reader.log_probabilities(tokens).numpy())
    export(folder, tmp_path / "dense", ExportConfig(format="dense", embeddings="f32"))
    expected = centred(reference_logits(tmp_path / "dense", tokens.tolist()))
    assert relative_error(theirs, expected) < 5e-3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bitnet 2B4T", {}, "does not read bitnet-b1.58: its activation is the squared ReLU"),
        ("gemma3", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar=24 is not supported"),
        ("bitnet", {"tie_word_embeddings": False}, "tie_word_embeddings=False is not supported"),
    ],
)
def test_settings_that_gguf_cannot_store_are_refused(
    packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, changes: Any, message: str
) -> None:
    monkeypatch.setattr("sparse_bitnet.export.export_checkpoint.absent_reader", lambda format: None)
    config = ExportConfig(format="gguf-tq2_0", verify=True)
    with pytest.raises(UserError, match=message):
        export(packed(name, **changes), tmp_path / "out", config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "note"), [("bitnet 2B4T", "bitnet.cpp"), ("mistral with a window", "no window")]
)
def test_features_that_llama_cpp_lacks_are_noted(packed, tmp_path: Path, name: str, note: str):
    result = export(packed(name), tmp_path / "out", ExportConfig(format="gguf-tq2_0"))
    assert note in str(result.warning)


def test_a_sentence_piece_tokenizer_comes_back(packed, tmp_path: Path) -> None:
    """Merges as scores: what llama.cpp makes of them where it is there, and our reader of the file."""
    from tokenizers import AddedToken

    merges = ["t h", "th e", "▁ the", "i n", "in g", "▁ a", "▁a n"]
    tokenizer = sentence_piece_tokenizer("abcdefghinot", merges, adds_space=False)
    tokenizer.add_tokens([AddedToken("▁▁")])  # as Gemma's: found in "  ", shown as that
    folder = packed("gemma3")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "unk_token": "<unk>"}))
    file = export_gguf(folder, tmp_path / "out", "tq2_0", embeddings="f32")
    import_checkpoint(file, tmp_path / "back", packed="auto", embeddings="float32")
    texts = ("the thing, and an  inn", " naïve ann 東京", "then")
    back = TextTokenizer.load(tmp_path / "back")
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    assert [back.encode(text) for text in texts] == expected
    assert [back.decode(ids) for ids in expected] == list(texts)
    pytest.importorskip("llama_cpp", reason="pip install llama-cpp-python builds llama.cpp")
    from sparse_bitnet.export.verify import llama_cpp_reader

    with llama_cpp_reader(file, 64) as reader:
        assert [reader.tokenise(text) for text in texts] == expected
