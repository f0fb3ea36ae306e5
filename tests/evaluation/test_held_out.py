# SPDX-License-Identifier: Apache-2.0
"""Names of held-out text, and text that the checkpoint cannot score."""

import json
import shutil

import numpy as np
import pytest
from transformers import Gemma3Config

from factories import tiny_config
from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, resolve_checkpoint
from sparse_bitnet.cli.evaluate import main
from sparse_bitnet.data.held_out import read_held_out
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.perplexity import read_text


def checkpoint_folder(path, **more):
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (path / "state.json").write_text("{}")
    for name, content in more.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def saved_step(run, name):
    """A checkpoint of a run that has been put together; the folder in which it was."""
    checkpoint_folder(run / "checkpoints" / name)
    made = checkpoint_folder(run / "consolidated" / name)
    (made / "model.safetensors").touch()
    return made


def test_run_folder_stands_for_its_final_model(tmp_path):
    saved_step(tmp_path, "step-00000010")
    latest = saved_step(tmp_path, "step-00000200")
    saved_step(tmp_path, ".tmp-1-step-00000300")
    (tmp_path / "config.json").write_text('{"sequence_length": 128}')
    assert resolve_checkpoint(tmp_path) == str(latest)
    final = checkpoint_folder(tmp_path / "final")
    assert resolve_checkpoint(tmp_path) == str(final)
    assert find_checkpoint(final).trained_context_length == 128
    beside = shutil.copytree(final, final.with_name("copy"))
    assert find_checkpoint(beside).trained_context_length is None


@pytest.mark.parametrize(
    ("config", "message"),
    [(None, "neither a run folder"), ("{}", "neither a run folder"), ("not json", "is damaged")],
)
def test_folder_without_a_model_is_refused(tmp_path, config, message):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        resolve_checkpoint(tmp_path)


def test_files_give_the_tokens_that_preparing_gives(tmp_path, prepared, model_folder):
    text = sorted((prepared.parent / "text").glob("*.txt"))
    # Everything to validation, in the order of the files.
    source = parse_source(",".join(map(str, text)), validation_fraction=0.3)
    kept = [each.text for each in source.documents() if each.split == "validation"]
    path = tmp_path / "held-out.jsonl"
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in kept))
    from_file = read_held_out(path, str(model_folder))
    from_folder = read_held_out(prepared, str(model_folder))
    assert isinstance(from_folder.tokens, TokenDataset)
    assert np.array_equal(
        np.asarray(from_file.tokens), from_folder.tokens[0 : len(from_file.tokens)]
    )
    assert len(from_file.tokens) == len(from_folder.tokens)
    assert from_file.text_bytes == from_folder.text_bytes


def test_every_document_of_a_file_counts(tmp_path, model_folder):
    path = tmp_path / "rows.jsonl"
    rows = [{"body": f"line {i} of <|endoftext|>"} for i in range(600)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read_held_out(path, str(model_folder), column="body")
    assert text.text_bytes == sum(len(row["body"]) for row in rows)
    # The end-of-text token, id 0, follows each document; spelled out in one it is text.
    assert int((np.asarray(text.tokens) == 0).sum()) == 600
    with pytest.raises(UserError, match="no column 'text'"):
        read_held_out(path, str(model_folder))


def test_rows_that_cannot_be_read_are_named(tmp_path, model_folder, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"\n{"text": "three"}\n')
    text = read_held_out(path, str(model_folder))
    assert text.text_bytes == len("onethree")
    assert f"1 row or file skipped, the first: {path}:2: not a JSON line" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused(tmp_path, prepared, model_folder):
    source = parse_source(str(prepared.parent / "text" / "*.txt"), validation_fraction=0.3)
    prepare(source, tmp_path / "other", vocab_size=290)
    with pytest.raises(UserError, match="prepared with another tokenizer"):
        read_held_out(tmp_path / "other", str(model_folder))


def test_another_end_token_is_accepted(tmp_path, prepared, model_folder):
    both = load_tokenizer(prepared / "tokenizer")
    both.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    both.save_pretrained(tmp_path / "tokenizer")
    shutil.copytree(model_folder, tmp_path / "model")
    both.save_pretrained(tmp_path / "model")
    source = parse_source(str(prepared.parent / "text" / "*.txt"), validation_fraction=0.3)
    prepare(source, tmp_path / "other", tokenizer=tmp_path / "tokenizer", eos_token="<|end|>")
    assert read_held_out(tmp_path / "other", str(tmp_path / "model")).vocab_size == 301


def test_vocabulary_beyond_the_model_is_refused(tmp_path, prepared, model_folder):
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    source = parse_source(str(prepared.parent / "text" / "*.txt"), validation_fraction=0.3)
    prepare(source, tmp_path / "other", vocab_size=400)
    with pytest.raises(UserError, match=r"vocabulary has 3\d\d tokens, that of .*bare 300"):
        read_text(bare, tmp_path / "other")


def test_every_model_is_checked_before_one_is_scored(tmp_path, prepared, model_folder, monkeypatch):
    monkeypatch.setattr("sparse_bitnet.evaluation.perplexity.perplexity", None)
    short = shutil.copytree(model_folder, tmp_path / "short")
    text = tiny_config("gemma3_text", vocab_size=300).to_dict()
    Gemma3Config(text_config=text).save_pretrained(short)  # as with an image encoder
    with pytest.raises(
        UserError, match=r"context_length=2048: .*short has 64 positions; give at most"
    ):
        main([str(model_folder), str(short), "--data", str(prepared)])


def test_chat_is_refused_for_prepared_text(prepared, model_folder):
    with pytest.raises(UserError, match="holds text, not conversations: leave out --chat"):
        read_held_out(prepared, str(model_folder), chat=True)
