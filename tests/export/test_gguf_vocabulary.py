# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as GGUF metadata."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from factories import edit_json
from sparse_bitnet.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.gguf_vocabulary import TokenType, add_vocabulary


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path):
    """`changed(normalizer=None)`: a folder whose tokenizer.json has other values."""

    def change(**changes: Any) -> Path:
        shutil.copytree(checkpoint, tmp_path / "tokenizer", dirs_exist_ok=True)
        path = tmp_path / "tokenizer" / "tokenizer.json"
        content = json.loads(path.read_text("utf-8"))
        model = changes.pop("model", {})
        content["model"] |= model
        path.write_text(json.dumps(content | changes))
        return path.parent

    return change


def read_vocabulary(folder: Path) -> dict[str, Any]:
    """The metadata of a folder's tokenizer, without what all keys begin with."""
    add_vocabulary(writer := GGUFWriter("unused", "qwen2"), folder, 392)
    fields = writer.kv_data[0].items()
    return {key.removeprefix("tokenizer.ggml."): field.value for key, field in fields}


def test_trained_tokenizers_have_a_name_that_llama_cpp_knows(checkpoint: Path, changed) -> None:
    vocabulary = read_vocabulary(checkpoint)
    assert vocabulary["pre"] == "qwen2"
    split = json.loads((checkpoint / "tokenizer.json").read_text("utf-8"))["pre_tokenizer"]
    for pre in (split, split["pretokenizers"][-1] | {"use_regex": True}):
        for normalizer, name in ((None, "None"), ({"type": "NFC"}, "NFC()")):
            fields = read_vocabulary(changed(pre_tokenizer=pre, normalizer=normalizer))
            assert str(read_tokenizer(fields, "").normalizer) == name
    assert len(vocabulary["tokens"]) == len(vocabulary["token_type"]) == 392
    for token, index in load_tokenizer(checkpoint).get_vocab().items():
        assert vocabulary["tokens"][index] == token
    assert vocabulary["token_type"][0] == TokenType.CONTROL
    assert vocabulary["token_type"][1] == TokenType.NORMAL
    assert vocabulary["token_type"][-1] == TokenType.UNUSED
    assert vocabulary["tokens"][-1] == "[PAD391]"


def test_added_tokens_that_are_not_special_are_written(changed) -> None:
    content = json.loads((changed() / "tokenizer.json").read_text("utf-8"))
    flags = dict.fromkeys(("special", "normalized", "single_word", "lstrip", "rstrip"), False)
    tags = [{"id": 384 + n, "content": f"<{n}>", **flags} for n in range(2)]
    folder = changed(added_tokens=[*content["added_tokens"], *tags])
    more = {"pad_token": "<1>", "bos_token": "<new>", "add_bos_token": True}
    edit_json(folder / "tokenizer_config.json", **more)
    vocabulary = read_vocabulary(folder)
    assert vocabulary["tokens"][384:387] == ["<0>", "<1>", "<new>"]
    assert vocabulary["token_type"][384:388] == [
        *(TokenType.USER_DEFINED, TokenType.CONTROL),
        *(TokenType.CONTROL, TokenType.UNUSED),
    ]
    ids = [vocabulary.get(f"{name}_token_id") for name in ("bos", "eos", "padding", "unknown")]
    assert ids == [386, 0, 385, None]
    assert {vocabulary[f"add_{name}_token"] for name in ("bos", "eos")} == {False}, "as the engine"


def test_more_end_tokens_than_gguf_has_names_for_are_refused(changed) -> None:
    folder = changed()
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2, 3]}')
    with pytest.raises(UserError, match="4 end tokens, but GGUF stores at most 3"):
        read_vocabulary(folder)


@pytest.mark.parametrize("around", [("", ""), ("", "<|endoftext|>"), ("a", "")])
def test_bos_and_eos_flags_follow_the_post_processor(changed, checkpoint, around) -> None:
    backend = load_tokenizer(checkpoint).backend_tokenizer
    first, last = around
    backend.post_processor = TemplateProcessing(
        single=[part for part in (first, "$A", last) if part],
        special_tokens=[(part, backend.token_to_id(part)) for part in around if part],
    )
    folder = changed(post_processor=json.loads(backend.to_str())["post_processor"])
    contrary = {"add_eos_token": not last, "add_bos_token": True}
    edit_json(folder / "tokenizer_config.json", **contrary)
    if first:
        with pytest.raises(UserError, match="tokens other than bos and eos to a text"):
            read_vocabulary(folder)
    else:
        vocabulary = read_vocabulary(folder)
        assert [vocabulary["add_bos_token"], vocabulary["add_eos_token"]] == [False, bool(last)]


@pytest.mark.parametrize("row", PRE_TOKENIZERS, ids=lambda row: row.names[0])
def test_a_pre_tokenizer_comes_back_by_its_name(changed, row) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fields = {"model": "gpt2", "tokens": alphabet, "merges": []}
    for name in row.names:
        own = read_tokenizer(fields | {"pre": name}, "model.gguf")
    content = json.loads(own.to_str())
    model = {"ignore_merges": content["model"]["ignore_merges"]}
    folder = changed(pre_tokenizer=content["pre_tokenizer"], normalizer=None, model=model)
    name = read_vocabulary(folder)["pre"]
    again = next(each for each in PRE_TOKENIZERS if name in each.names)
    assert again[1:3] == row[1:3]


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        ([BYTE_LEVEL], "gpt-2"),
        ([BYTE_LEVEL | {"use_regex": True}], "gpt-2"),
        ([DIGITS, BYTE_LEVEL | {"use_regex": True}], "smollm"),
        ([DIGITS | {"individual_digits": False}, BYTE_LEVEL], None),
        ([BYTE_LEVEL, DIGITS], None),
        ([DIGITS, BYTE_LEVEL | {"add_prefix_space": True}], None),
    ],
)
def test_pre_tokenizers_as_published_tokenizers_spell_them(changed, steps, name) -> None:
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]
    folder = changed(pre_tokenizer=pre_tokenizer, normalizer=None)
    if name is None:
        with pytest.raises(UserError, match="is not one that llama"):
            read_vocabulary(folder)
        return
    assert read_vocabulary(folder)["pre"] == name
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["1 2", "Ġ 1", "Ġ a", "Â ½", "Ċ Ċ"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges)]
    fields = {"model": "gpt2", "pre": name, "tokens": tokens, "merges": merges}
    read = read_tokenizer(fields, "model.gguf")
    expected = Tokenizer.from_str(read.to_str())
    expected.pre_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    for text in ("a12 12 1½ ½ 3٣ aⅧ\n\n 1", "it's 1'2 a\n\n\n1a"):
        assert read.encode(text).tokens == expected.encode(text).tokens


def test_a_space_that_only_some_texts_get_is_warned_about(changed) -> None:
    step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    folder = changed(pre_tokenizer=step, normalizer=None, model={"byte_fallback": True})
    with pytest.warns(UserWarning, match="also puts a space before texts that begin with one"):
        assert read_vocabulary(folder)["add_space_prefix"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pre_tokenizer": {"type": "Whitespace"}},
            "is not one that llama",
        ),
        ({"normalizer": {"type": "Lowercase"}}, "normaliser Lowercase is not available"),
        ({"model": {"type": "Unigram"}}, "not a plain BPE"),
        ({"model": {"byte_fallback": True}}, "splits text, unlike llama.cpp's SentencePiece"),
        ({"model": {"ignore_merges": True}}, "with ignore_merges True, is not one that"),
    ],
)
def test_tokenizers_that_llama_cpp_would_read_differently_are_refused(
    changed, changes, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        read_vocabulary(changed(**changes))
