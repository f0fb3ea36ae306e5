# SPDX-License-Identifier: Apache-2.0
"""Tokenizers as GGUF metadata, written and read."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from factories import edit_json
from sparse_bitnet.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, read_tokenizer, write_tokenizer
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.gguf_vocabulary import TokenType, add_vocabulary
from sparse_bitnet.generation.pooling import read_pooling
from sparse_bitnet.generation.text import TextTokenizer


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


def byte_tokens(merges: list[str]) -> list[str]:
    """The bytes as tokens, then those that merges make."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*alphabet, *(merge.replace(" ", "") for merge in merges)]


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
    fields = {"model": "gpt2", "tokens": byte_tokens([]), "merges": []}
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
    merges = ["1 2", "Ġ 1", "Ġ a", "Â ½", "Ċ Ċ"]
    fields = {"model": "gpt2", "pre": name, "tokens": byte_tokens(merges), "merges": merges}
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
        ({"pre_tokenizer": {"type": "Whitespace"}}, "is not one that llama"),
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


def write_fields(folder: Path, **fields: Any) -> None:
    """Write the tokenizer of a GGUF file with these fields into a folder."""
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    metadata |= {"general.architecture": "qwen3", "qwen3.pooling_type": 1}
    write_tokenizer(metadata, folder / "model.gguf", folder)


def described(kind: str, tokens: list[str], **more: Any) -> dict[str, Any]:
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
    write_fields(tmp_path, tokens=["<unk>", "<s>", "</s>", *"abcde", "<|im_end|>"], **fields, **ids)
    ends = json.loads((tmp_path / "generation_config.json").read_text())
    assert ends["eos_token_id"] == [2, 8]
    assert read_pooling(tmp_path) == "mean"
    encoded = TextTokenizer.load(tmp_path).encode("a")
    assert (encoded.count(1), encoded.count(2), 3 in encoded) == (first, last, True)


def test_bos_and_eos_tokens_may_have_any_spelling(tmp_path: Path) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "add_bos_token": True, "add_eos_token": True}
    write_fields(tmp_path, model="gpt2", pre="gpt-2", tokens=["a", ":", "$A"], **ids)
    assert load_tokenizer(tmp_path)("a").input_ids == [1, 0, 2]


@pytest.mark.parametrize("pre", [None, "default", "of-tomorrow", 7])
def test_without_a_known_pre_tokenizer_the_vocabulary_tells_and_a_warning_says_so(pre: Any) -> None:
    merges = ["1 2", "12 3", ". Ċ", "a b", "Ġ ab"]
    fields = described("gpt2", byte_tokens(merges), merges=merges)
    with pytest.warns(UserWarning, match=r"^model.gguf: its pre-tokenizer is .*, so text is"):
        tokenizer = read_tokenizer(fields | ({} if pre is None else {"pre": pre}), "model.gguf")
    assert tokenizer.encode("1231 ab.\n").tokens == ["123", "1", "Ġab", ".Ċ"]


@pytest.mark.parametrize("model", [None, 7, "t5", ["gpt2"]])
def test_other_kinds_of_tokenizers_are_refused(tmp_path: Path, model: object) -> None:
    with pytest.raises(UserError, match=r"model\.gguf: a tokenizer .* is not supported; gpt2 and"):
        write_fields(tmp_path, model=model, tokens=["a"])


@pytest.mark.parametrize("types", [[1, 1, 1, 3, 3, 4], []])
def test_special_tokens_are_spelled_as_in_texts(tmp_path: Path, types: list[int]) -> None:
    """DeepSeek's, whose characters are none of the byte alphabet."""
    tokens = ["a", "b", "c", "<\uff5cbegin▁of▁sentence\uff5c>", "</s\uff5c>", "東 "]
    ids = {"bos_token_id": 3, "eos_token_id": 4, "add_bos_token": True}
    write_fields(tmp_path, model="gpt2", pre="deepseek-v3", tokens=tokens, token_type=types, **ids)
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
    from transformers.integrations.gguf import convert_gguf_tokenizer

    specials = ["<|endoftext|>", "<think>"]
    if pre == "llama":
        letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        words = ["▁", *"abcdefghinot", "th", "the", "▁th", "▁the", "in", "ing", "▁a", "an", "▁an"]
        tokens = [*letters, *words, *specials]
        fields = described("llama", tokens, scores=[-float(n % 17) for n in range(len(tokens))])
    else:
        merges = ["t h", "th e", "Ġ the", "i n", "in g", "1 2", "12 3", "Ġ a", "Ġ Ġ"]
        tokens = [*byte_tokens(merges), *specials]
        fields = described("gpt2", tokens, merges=merges, pre=pre)
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
