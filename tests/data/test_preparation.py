# SPDX-License-Identifier: Apache-2.0
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from texts import contents, some_texts, write_jsonl
from tokenizers import Tokenizer, models, normalizers
from transformers import PreTrainedTokenizerFast

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.data import preparation
from sparse_bitnet.data.manifest import Manifest
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.data.tokenizer import tokenizer_hash
from sparse_bitnet.errors import UserError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text.jsonl", some_texts(300))


def test_prepared_folder_holds_the_tokens_and_text_of_the_manifest(prepared: Path) -> None:
    manifest = Manifest.read(prepared)
    tokenizer = load_tokenizer(prepared / "tokenizer")
    assert manifest.tokenizer_hash == tokenizer_hash(tokenizer)
    assert (manifest.dtype, manifest.vocab_size, manifest.eos_token_id) == ("uint16", 300, 0)
    written = []
    for split, info in manifest.splits.items():
        dataset = TokenDataset.open(prepared, split)
        tokens = dataset[:]
        assert len(tokens) == info.tokens
        assert [shard.tokens for shard in info.shards[:-1]] == [1000] * (len(info.shards) - 1)
        parts = np.split(tokens, np.flatnonzero(tokens == 0) + 1)
        assert len(parts) == info.documents + 1
        assert parts.pop().size == 0
        texts = [tokenizer.decode(part[:-1]) for part in parts]
        assert sum(len(text.encode()) for text in texts) <= info.text_bytes
        written += texts
    nfc = tokenizer.backend_tokenizer.normalizer.normalize_str
    assert sorted(written) == sorted(nfc(text) for text in some_texts(300))
    assert sorted(contents(prepared)) == [
        "manifest.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        *[f"train-{n:05}.bin" for n in range(len(manifest.splits["train"].shards))],
        *[f"validation-{n:05}.bin" for n in range(len(manifest.splits["validation"].shards))],
    ]


def test_truncation_and_padding_saved_with_a_tokenizer_are_ignored(
    text: Path, tmp_path: Path, tokenizer_folder: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding(length=500)
    source = parse_source(str(text))
    first = prepare(source, tmp_path / "a", tokenizer=tokenizer)
    assert first == prepare(source, tmp_path / "b", tokenizer=str(tokenizer_folder))


def test_a_tokenizer_that_cannot_encode_is_an_error_of_the_user(text: Path, tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="b")
    with pytest.raises(UserError, match=r"^the tokenizer.json cannot encode this text: Word"):
        prepare(parse_source(str(text)), tmp_path / "out", tokenizer=tokenizer)


def test_end_token_can_be_chosen(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    source = parse_source(str(text))
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer_folder, eos_token="z")
    expected = load_tokenizer(tokenizer_folder).get_vocab()["z"]
    assert manifest.eos_token_id == expected
    assert load_tokenizer(tmp_path / "out" / "tokenizer").eos_token_id == expected
    assert TokenDataset.open(tmp_path / "out")[-1:][0] == expected


def test_other_settings_are_refused_and_named(text: Path, tmp_path: Path, tokenizer_folder: Path):
    out = tmp_path / "out"
    prepare(parse_source(str(text)), out, tokenizer=tokenizer_folder)
    other_text = write_jsonl(tmp_path / "other.jsonl", some_texts(3))
    for spec, options, message in [
        (text, {"shard_tokens": 7}, r"shard_tokens is 134217728 there, 7 here; choose another"),
        (text, {"eos_token": "z"}, r"tokenizer\.hash is "),
        (other_text, {}, r"source\.files is "),
    ]:
        with pytest.raises(UserError, match=f"prepared with other settings: {message}"):
            prepare(parse_source(str(spec)), out, **{"tokenizer": tokenizer_folder, **options})
    source = parse_source(str(text), validation_fraction=0.5)
    with pytest.raises(UserError, match=r"source\.validation_fraction is 0\.01 there, 0\.5 here"):
        prepare(source, out, tokenizer=tokenizer_folder)
    with pytest.raises(UserError, match=r"tokenizer\.vocab_size is null there, 300 here"):
        prepare(parse_source(str(text)), out, vocab_size=300)


class Stopped(BaseException):
    """Stands for the death of the process."""


def stop_at(monkeypatch: pytest.MonkeyPatch, operation: int, failure: BaseException | None = None):
    """Let the `operation`-th step that reaches the disk fail."""
    steps = itertools.count(1)

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(steps) == operation:
                raise failure or Stopped
            return real(*arguments)

        return call

    for name in ("replace", "fsync"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))


def test_resuming_after_a_kill_at_any_disk_operation_gives_the_same_bytes(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop, resume, compare with a preparation never stopped; for every place to stop at."""
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 4000)
    source = parse_source(str(text), validation_fraction=0.1)
    options: dict[str, Any] = {"tokenizer": tokenizer_folder, "shard_tokens": 3000}
    prepare(source, tmp_path / "whole", **options)
    whole = contents(tmp_path / "whole")
    operation, stopped, resumed = 0, True, 0
    while stopped:
        operation += 3
        out = tmp_path / f"out{operation}"
        with monkeypatch.context() as patch:
            stop_at(patch, operation)
            try:
                prepare(source, out, **options)
                stopped = False
            except Stopped:
                pass
        if stopped and not (out / "manifest.json").exists():
            with pytest.raises(UserError, match=r"not finished|no prepared data"):
                TokenDataset.open(out)
        state = out / "preparation.json"
        resumed += state.exists() and bool(json.loads(state.read_text())["splits"])
        prepare(source, out, **options)
        assert contents(out) == whole, f"stopped at operation {operation}"
        shutil.rmtree(out)
    assert operation > 30
    assert resumed > 2


def test_unfinished_folder_with_other_settings_is_refused(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_BATCH_BYTES", 4000)
    source, out = parse_source(str(text)), tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 40)
        with pytest.raises(Stopped):
            prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=1000)
    with pytest.raises(UserError, match="shard_tokens is 1000 there, 999 here"):
        prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=999)
    written = (out / "preparation.json").read_text()
    leading = written.replace('"file": "', '"file": "../')
    for damaged in ("{", "{}", written.replace('"seen": ', '"seen": -'), leading):
        (out / "preparation.json").write_text(damaged)
        with pytest.raises(UserError, match="json is damaged, remove "):
            prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=1000)
    (out / "preparation.json").write_text(written)
    other = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    other.normalizer = normalizers.Lowercase()
    shutil.copytree(out, tmp_path / "other")
    other.save(str(tmp_path / "other" / "tokenizer" / "tokenizer.json"))
    with pytest.raises(UserError, match="not that of the shards; remove "):
        prepare(source, tmp_path / "other", tokenizer=tokenizer_folder, shard_tokens=1000)
    (out / "train-00000.bin").write_bytes(bytes(2000))
    with pytest.raises(UserError, match=r"train-00000.bin: corrupt \(checksum"):
        prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=1000)


def test_tokenizer_of_an_abandoned_try_is_not_used(text: Path, tmp_path: Path) -> None:
    out, source = tmp_path / "out", parse_source(str(text))
    all_out = parse_source(str(text), validation_fraction=0.9999999)
    with pytest.raises(UserError, match="no training text; give more documents, or less"):
        prepare(all_out, out, vocab_size=280)
    assert (out / "tokenizer").exists()
    assert prepare(source, out, vocab_size=300) == prepare(source, tmp_path / "b", vocab_size=300)
    assert contents(out) == contents(tmp_path / "b")


@pytest.mark.parametrize("operation", [1, 4, 9, 16, 25])
def test_a_full_disk_is_one_line_and_can_be_resumed(
    text: Path, tmp_path: Path, tokenizer_folder: Path, monkeypatch: Any, operation: int
) -> None:
    source, out = parse_source(str(text)), tmp_path / "out"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patch:
        stop_at(patch, operation, full)
        with pytest.raises(UserError, match=r"cannot write .*: No space left on device"):
            prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=1000)
    prepare(source, out, tokenizer=tokenizer_folder, shard_tokens=1000)
    prepare(source, tmp_path / "whole", tokenizer=tokenizer_folder, shard_tokens=1000)
    assert contents(out) == contents(tmp_path / "whole")


def test_folders_with_other_files_are_refused(text: Path, tmp_path: Path, tokenizer_folder: Path):
    source = parse_source(str(text))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="neither empty nor prepared data; choose another folder"):
        prepare(source, other, tokenizer=tokenizer_folder)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match=r"cannot write .*thesis\.tex"):
        prepare(source, other / "thesis.tex", tokenizer=tokenizer_folder)


def test_a_folder_in_use_is_refused(text: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    from filelock import FileLock

    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / ".lock"):
        with pytest.raises(UserError, match="another process is working there"):
            prepare(parse_source(str(text)), tmp_path / "out", tokenizer=tokenizer_folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "x", "vocab_size": 300}, "give either --tokenizer"),
        ({"vocab_size": 300, "eos_token": "z"}, "--eos-token has no effect without --tokenizer"),
        ({"vocab_size": 100}, "--vocab-size 100: must be 257"),
        ({"vocab_size": 10**12}, "--vocab-size 1000000000000: must be 257 .* to 16777216"),
    ],
)
def test_bad_options_are_refused(text: Path, tmp_path: Path, options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        prepare(parse_source(str(text)), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_command_prepares_a_folder(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer_folder: Path
) -> None:
    from sparse_bitnet.cli.prepare import main

    out = str(tmp_path / "out")
    command = [str(text), out, "--tokenizer", str(tokenizer_folder), "--validation-fraction", "0.1"]
    main(command)
    printed = capsys.readouterr().out
    manifest = Manifest.read(Path(out))
    assert f"train: {manifest.splits['train'].documents} documents" in printed
    assert "vocabulary 300, uint16, written in" in printed
    main(command)
    assert "already there, shards verified\n" in capsys.readouterr().out
    shard = tmp_path / "out" / "train-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(UserError, match=r"train-00000\.bin: corrupt"):
        main(command)
    main([str(text), f"{out}2", "--vocab-size", "300", "--validation-fraction", "0"])
    assert "no validation text: add --validation SOURCE" in capsys.readouterr().out
    with pytest.raises(UserError, match="give either --tokenizer PATH_OR_HUB_ID or --vocab-size N"):
        main([str(text), out])
    for names in (("x" * 5000, out), ("x" * 5000, "x" * 5000), (str(text), "x" * 5000)):
        with pytest.raises(UserError, match="File name too long"):
            main([*names, "--vocab-size", "300"])
    main([str(text), f"{out}3", "--vocab-size", "300", "--validation-fraction", "1e-320"])


def test_rows_that_cannot_be_read_are_skipped_counted_and_named(
    tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ['{"text": "one"}', '{"text": "two"', "[]", '{"words": 3}', '{"text": "three"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b\udcff.jsonl").write_text('{"text": "four"}')
    for _ in range(2):  # the second time, OUT lies inside SOURCE
        source = parse_source(str(tmp_path), validation_fraction=0.0)
        manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer_folder)
    assert manifest.splits["train"].documents == 3
    said = capsys.readouterr().err
    assert f"3 rows or files skipped, the first: {tmp_path}/a.jsonl:2: not a JSON line: " in said
