# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest
from texts import some_texts
from transformers import AutoTokenizer, Qwen2Config

from factories import edit_json
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data.tokenizer import tokenizer_hash, train_tokenizer, vocabulary_size
from sparse_bitnet.errors import UserError

HARD = [
    *some_texts(50, seed=3),
    "e\u0301 \u1e9b\u0323 \ufb01",
    "It's WE'LL don'T",
    "x = 1234567\r\n\r\n\tif  y :   # \u3000 end \n ",
    "<|endoftext|> in the middle",
    "\x00\x7f \U0001f468\u200d\U0001f469",
]


def test_the_tokenizer_of_a_run_or_of_prepared_data_is_named_by_their_folder(tmp_path):
    own = train_tokenizer(["some words and some more words"], 270)
    for place in ("run/final", "data/tokenizer"):
        own.save_pretrained(tmp_path / place)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.json").write_text(json.dumps({"data": str(tmp_path / "data")}))
    for name in ("run", "data", "begun"):
        assert tokenizer_hash(load_tokenizer(tmp_path / name)) == tokenizer_hash(own)


def test_trained_tokenizer_round_trips_text(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    assert vocabulary_size(tokenizer) == len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.eos_token_id == 0
    for text in ["plain text", "naïve 漢字 🙂\n\tend", "<|endoftext|>"]:
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    decomposed, composed = "e\u0301", "\u00e9"
    assert tokenizer(decomposed).input_ids == tokenizer(composed).input_ids


def test_agrees_with_what_transformers_makes_of_a_qwen2_folder(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    ours = load_tokenizer(tokenizer_folder)
    ours.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=300).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert type(theirs).__name__.startswith("Qwen2Tokenizer")
    for text in HARD:
        assert theirs(text).input_ids == ours(text).input_ids
    assert theirs.eos_token_id == ours.eos_token_id


def test_a_tokenizer_is_loaded_as_it_was_saved_beside_a_qwen2_config(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    from tokenizers import normalizers, pre_tokenizers

    other = load_tokenizer(tokenizer_folder)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    other.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=300).save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("The QUICK").input_ids == other("The QUICK").input_ids
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("The QUICK").input_ids
        != loaded("The QUICK").input_ids
    )


def test_hash_depends_on_vocabulary_and_end_token_only(tokenizer_folder: Path, tmp_path: Path):
    tokenizer = load_tokenizer(tokenizer_folder)
    first = tokenizer_hash(tokenizer)
    for number in range(2):
        tokenizer.save_pretrained(tmp_path / str(number))
        tokenizer = load_tokenizer(tmp_path / str(number))
        assert tokenizer_hash(tokenizer) == first
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenizer_hash(tokenizer) == first
    assert tokenizer_hash(train_tokenizer(some_texts(200, seed=1), 299)) != first
    other_end = next(token for token in tokenizer.get_vocab() if token != "<|endoftext|>")
    assert tokenizer_hash(load_tokenizer(tokenizer_folder, eos_token=other_end)) != first


def test_end_token_can_be_chosen(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder, eos_token="a")
    assert tokenizer.eos_token_id == tokenizer.get_vocab()["a"]
    with pytest.raises(UserError, match="has no token '<absent>'"):
        load_tokenizer(tokenizer_folder, eos_token="<absent>")
    tokenizer.save_pretrained(tmp_path)
    edit_json(tmp_path / "tokenizer_config.json", eos_token=...)
    with pytest.raises(UserError, match="names no end-of-text token"):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no readable tokenizer in"):
        load_tokenizer(tmp_path)
    for absent in ("no-one/nothing", str(tmp_path / "absent")):
        with pytest.raises(
            UserError, match=r"no such folder: .*(nothing, and the hub|absent)"
        ) as caught:
            load_tokenizer(absent)
        assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UserError, match="no readable tokenizer in"):
        load_tokenizer(tmp_path)
