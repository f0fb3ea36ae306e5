# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as GGUF metadata."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.gguf_vocabulary import TokenType, read_vocabulary


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path):
    """`changed(normalizer=None)`: a folder whose tokenizer.json has other values."""

    def change(**changes: Any) -> Path:
        shutil.copytree(checkpoint, tmp_path / "tokenizer", dirs_exist_ok=True)
        path = tmp_path / "tokenizer" / "tokenizer.json"
        content = json.loads(path.read_text())
        model = changes.pop("model", {})
        content["model"] |= model
        path.write_text(json.dumps(content | changes))
        return path.parent

    return change


def test_trained_tokenizers_have_a_name_that_llama_cpp_knows(checkpoint: Path) -> None:
    vocabulary = read_vocabulary(checkpoint, 392)
    assert vocabulary.pre_tokenizer == "qwen2"
    assert len(vocabulary.tokens) == len(vocabulary.types) == 392
    for token, index in load_tokenizer(checkpoint).get_vocab().items():
        assert vocabulary.tokens[index] == token
    assert vocabulary.types[0] == TokenType.CONTROL
    assert vocabulary.types[1] == TokenType.NORMAL
    assert vocabulary.types[-1] == TokenType.UNUSED
    assert vocabulary.tokens[-1] == "[PAD391]"


def test_added_tokens_that_are_not_special(changed) -> None:
    content = json.loads((changed() / "tokenizer.json").read_text())
    tag = {"id": 384, "content": "<tag>", "special": False, "normalized": False}
    vocabulary = read_vocabulary(changed(added_tokens=[*content["added_tokens"], tag]), 392)
    assert (vocabulary.tokens[384], vocabulary.types[384]) == ("<tag>", TokenType.USER_DEFINED)


def test_gpt_2_pre_tokenizer(changed) -> None:
    step = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
    folder = changed(pre_tokenizer=step, normalizer=None)
    assert read_vocabulary(folder, 392).pre_tokenizer == "gpt-2"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "not one of those that the GGUF export knows"),
        ({"normalizer": {"type": "Lowercase"}}, "normaliser Lowercase is not available"),
        ({"model": {"type": "Unigram"}}, "not a plain BPE"),
        ({"model": {"byte_fallback": True}}, "splits text as llama.cpp's SentencePiece does not"),
        ({"model": {"ignore_merges": True}}, "ignore_merges is True"),
    ],
)
def test_what_llama_cpp_would_read_differently_is_refused(changed, changes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_vocabulary(changed(**changes), 392)


def test_a_vocabulary_beyond_the_embedding_is_refused(checkpoint: Path) -> None:
    with pytest.raises(UserError, match="has id 383, but the model's vocabulary ends at 383"):
        read_vocabulary(checkpoint, 383)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json"):
        read_vocabulary(tmp_path, 392)
