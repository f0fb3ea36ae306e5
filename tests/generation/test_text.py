# SPDX-License-Identifier: Apache-2.0
"""Tokens to text, one at a time: whole characters, as the tokenizer itself, up to a stop string."""

import itertools
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from serving_thread import sentence_piece_tokenizer
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.tokenizer import train_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.generation.text import StopStrings, TextStream, TextTokenizer

TEXTS = [
    "plain words, and some   spaces\n\n",
    "Ünïcödé, 中文字, 👍🏽 family 👨‍👩‍👧",
    "",
    " leading space",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level tokenizer that knows no characters beyond ASCII: each of their bytes is a token."""
    tokenizer = train_tokenizer(["plain words and words again"] * 5, 270)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["two words"])
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_are_those_of_transformers(folder, text):
    ours, theirs = TextTokenizer.load(folder), load_tokenizer(folder)
    for given_text in (text, f"<|im_start|>{text}two words<|endoftext|>"):
        tokens = ours.encode(given_text)
        assert tokens == theirs(given_text).input_ids
        assert tokens == ours.encode(given_text, add_special_tokens=False)
        for skip in (True, False):
            decoded = ours.decode(tokens, skip_special_tokens=skip)
            assert decoded == theirs.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_gives_each_character_with_its_last_byte(folder, text):
    tokenizer = TextTokenizer.load(folder)
    stream, shown, fed = TextStream(tokenizer), "", b""
    for token in tokenizer.encode(text):
        shown += stream.feed(token)
        fed += tokenizer.token_bytes(token)
        assert shown == fed.decode(errors="ignore")
    assert shown == text
    assert stream.flush() == ""


@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_tokens_at_all_give_what_the_tokenizer_gives(tokens):
    tokenizer = train_tokenizer(["plain words"], 260)
    ours = TextTokenizer(tokenizer.backend_tokenizer)
    assert ours.decode(tokens) == tokenizer.backend_tokenizer.decode(tokens)


def test_bytes_that_are_no_character_are_shown_as_such(folder):
    tokenizer = TextTokenizer.load(folder)
    by_byte = {tokenizer.token_bytes(token): token for token in range(257)}
    tokens = [by_byte[bytes([byte])] for byte in b"a\xe4\xb8b\xff\xe4"]
    stream = TextStream(tokenizer)
    assert [stream.feed(token) for token in tokens] == ["a", "", "", "\ufffdb", "\ufffd", ""]
    assert stream.flush() == "\ufffd"


def test_byte_tokens_of_sentencepiece_become_characters():
    tokenizer = TextTokenizer(sentence_piece_tokenizer("ab", ["▁ a"], adds_space=True))
    tokens = tokenizer.encode("a 中b")
    assert tokenizer.decode(tokens) == "a 中b"
    whole = TextStream(tokenizer)
    assert "".join(map(whole.feed, tokens)) == " a 中b", "as it continues another text"
    assert tokenizer.token_bytes(tokens[0]) == b" a"


def test_decoders_that_look_at_neighbours_stream_the_same_text():
    words = Tokenizer(
        models.WordPiece({"un": 0, "##do": 1, "it": 2, "[UNK]": 3}, unk_token="[UNK]")
    )
    words.decoder = decoders.WordPiece()
    tokenizer = TextTokenizer(words)
    stream = TextStream(tokenizer)
    assert "".join(map(stream.feed, [0, 1, 2])) + stream.flush() == "undo it"
    assert tokenizer.decode([0, 1, 2]) == "undo it"


def test_numbers_beyond_the_vocabulary_give_no_text(folder):
    tokenizer = TextTokenizer.load(folder)
    assert tokenizer.token_bytes(5000) == b""
    assert tokenizer.decode([5000]) == ""
    assert tokenizer.token_id("<|im_start|>") in tokenizer.special_tokens
    assert tokenizer.token_id("nowhere") is None


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged"):
        TextTokenizer.load(tmp_path)
    assert os.listdir(tmp_path) == ["tokenizer.json"]


@pytest.mark.parametrize("fault", ["no unknown token", "no such special token"])
def test_a_tokenizer_that_cannot_encode_is_an_error_of_the_user(folder, tmp_path, fault):
    content = json.loads((folder / "tokenizer.json").read_text())
    if fault == "no unknown token":
        content["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    else:
        single = [{"SpecialToken": {"id": "X", "type_id": 0}}]
        template = {"type": "TemplateProcessing", "single": single, "pair": single}
        content["post_processor"] = template | {"special_tokens": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"^the model's tokenizer.json cannot encode this text: "):
        TextTokenizer.load(tmp_path).encode("word")


def shown_until(pieces, stop):
    """Texts let through one by one, and the stop string that ended them."""
    strings = StopStrings(stop)
    shown = [strings.feed(piece) for piece in pieces]
    return [*shown, strings.flush()], strings.ended_by


@pytest.mark.parametrize(
    ("pieces", "stop", "shown", "ended_by"),
    [
        (["one ", "two"], [], ["one ", "two", ""], None),
        (["one", " two\n", "\nthree"], ["\n\n"], ["one", " two", "", ""], "\n\n"),
        (["a<|e", "nd|>b"], ["<|end|>"], ["a", "", ""], "<|end|>"),
        (["a<|e", "x"], ["<|end|>"], ["a", "<|ex", ""], None),
        (["a<|e"], ["<|end|>"], ["a", "<|e"], None),
        (["aab"], ["ab"], ["a", ""], "ab"),
        (["aa", "b"], ["aab", "ab"], ["", "", ""], "aab"),
        (["abcd"], ["abcd", "bc"], ["a", ""], "bc"),
        (["stop", "more"], ["stop"], ["", "", ""], "stop"),
    ],
)
def test_no_part_of_a_stop_string_is_shown(pieces, stop, shown, ended_by):
    assert shown_until(pieces, stop) == (shown, ended_by)


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 20), max_size=6),
)
def test_stop_strings_do_not_depend_on_the_cutting_of_the_text(text, stop, cuts):
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    shown, ended_by = shown_until(pieces, stop)
    assert ("".join(shown), ended_by) == (
        "".join(shown_until(text, stop)[0]),
        shown_until(text, stop)[1],
    )
    whole = "".join(shown)
    assert text.startswith(whole)
    assert not any(string in whole for string in stop)
    assert whole == text or text.startswith(whole + ended_by)


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["<|end|>"], ["a", "", ""]),
        (["a<|end|>b"], ["", "", ""]),
        (["<|end|>b"], ["a", "", ""]),
        (["<|end|>c", "b"], ["a", "", ""]),
        (["<|end|>c"], ["a", "", "b"]),
        (["ab"], ["", "a", "b"]),
    ],
)
def test_a_stop_string_may_name_a_special_token_which_is_not_shown(stop, shown):
    strings = StopStrings(stop)
    assert [
        strings.feed("a"),
        strings.feed("<|end|>", is_shown=False),
        strings.feed("b") + strings.flush(),
    ] == shown
