# SPDX-License-Identifier: Apache-2.0
"""Text prepared by many processes, and reading of very much of it."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from texts import some_texts, write_jsonl

from sparse_bitnet.cli.prepare import main
from sparse_bitnet.data.manifest import MANIFEST, Manifest
from sparse_bitnet.data.parts import prepare_part
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import HubSource, parse_source, part_of
from sparse_bitnet.errors import UserError


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        write_jsonl(folder / f"{number}.jsonl", some_texts(40, seed=number))
    return folder


def documents(folder: Path, split: str) -> list[tuple[int, ...]]:
    data = TokenDataset.open(folder, split)
    tokens = np.array(data[0 : len(data)])
    ends = np.flatnonzero(tokens == data.eos_token_id) + 1
    return sorted(tuple(part.tolist()) for part in np.split(tokens, ends)[:-1])


def one_part(texts: Path, out: Path, part: int, tokenizer: Path) -> None:
    source = parse_source(str(texts), validation_fraction=0.2)
    prepare_part(source, out, part=part, parts=3, tokenizer=tokenizer, shard_tokens=500)


def test_parts_prepared_at_once_are_the_same_documents(texts, tmp_path, tokenizer_folder):
    whole = tmp_path / "whole"
    prepare(
        parse_source(str(texts), validation_fraction=0.2),
        whole,
        tokenizer=tokenizer_folder,
        shard_tokens=500,
    )
    out = tmp_path / "parts"
    processes = [
        multiprocessing.get_context("forkserver").Process(
            target=one_part, args=(texts, out, part, tokenizer_folder)
        )
        for part in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    for split in ("train", "validation"):
        assert documents(out, split) == documents(whole, split)
        found, expected = (Manifest.read(folder).splits[split] for folder in (out, whole))
        assert found.text_bytes == expected.text_bytes
        assert found.documents == expected.documents
    TokenDataset.open(out)
    assert (out / "tokenizer" / "tokenizer.json").is_file()


def test_the_whole_appears_with_its_last_part(texts, tmp_path, tokenizer_folder, capsys):
    out = tmp_path / "out"
    command = [str(texts), str(out), "--tokenizer", str(tokenizer_folder), "--parts", "2"]
    main([*command, "--part", "1", "--validation-fraction", "0.2"])
    assert "part 1 of 2 is done" in capsys.readouterr().out
    assert not (out / MANIFEST).exists()
    for _ in range(2):
        main([*command, "--part", "0", "--validation-fraction", "0.2"])
        printed = capsys.readouterr().out
        assert "train: " in printed
        assert "% of its 64-token windows also occur in training" in printed
    before = (out / MANIFEST).read_bytes()
    (out / MANIFEST).unlink()
    main([*command, "--part", "1", "--validation-fraction", "0.2"])
    assert (out / MANIFEST).read_bytes() == before


def test_parts_of_other_options_are_not_joined(texts, tmp_path, tokenizer_folder):
    out = tmp_path / "out"
    options = {"parts": 2, "tokenizer": tokenizer_folder}
    prepare_part(parse_source(str(texts), validation_fraction=0.2), out, part=0, **options)
    with pytest.raises(
        UserError, match=r"part-00000.*source.validation_fraction is 0.2 there, 0.3"
    ):
        prepare_part(parse_source(str(texts), validation_fraction=0.3), out, part=1, **options)
    assert not (out / "part-00001-of-00002").exists(), "said before the work is done"
    with pytest.raises(UserError, match="holds part-00000-of-00002, of another number of parts"):
        prepare_part(parse_source(str(texts)), out, part=0, parts=3, tokenizer=tokenizer_folder)
    source = parse_source(str(texts), validation_fraction=0.2)
    with pytest.raises(UserError, match="shard_tokens is 134217728 there, 500 here"):
        prepare_part(source, out, part=1, shard_tokens=500, **options)
    write_jsonl(texts / "0a.jsonl", some_texts(40, seed=7))  # deals the files out anew
    with pytest.raises(UserError, match=r"part-00000.*source.files is "):
        prepare_part(parse_source(str(texts), validation_fraction=0.2), out, part=1, **options)


def test_a_damaged_part_is_not_joined_and_a_whole_is_left_alone(texts, tmp_path, tokenizer_folder):
    source, out = parse_source(str(texts), validation_fraction=0.2), tmp_path / "out"
    options = {"parts": 2, "tokenizer": tokenizer_folder}
    prepare_part(source, out, part=0, **options)
    shard = (out / "part-00000-of-00002") / "train-00000.bin"
    content = shard.read_bytes()
    for damaged, message in ((b"\1\1" + content[2:], "corrupt"), (content[2:], "truncated")):
        shard.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"part-00000-of-00002/train-00000.bin: {message}"):
            prepare_part(source, out, part=1, **options)
    shard.write_bytes(content)
    assert prepare_part(source, out, part=1, **options) is not None
    before = (out / MANIFEST).stat().st_mtime_ns
    assert prepare_part(source, out, part=0, **options) == Manifest.read(out)
    assert (out / MANIFEST).stat().st_mtime_ns == before


def test_what_cannot_be_divided_is_refused(texts, tmp_path):
    source = parse_source(str(texts), near_duplicates=False)
    assert {path for part in range(5) for path in part_of(source, part, 5).paths} == set(
        source.paths
    )
    with pytest.raises(UserError, match="5 files do not make 6 parts"):
        part_of(source, 0, 6)
    with pytest.raises(UserError, match="cannot be prepared in parts"):
        part_of(parse_source("python-stdlib"), 0, 2)
    with pytest.raises(UserError, match="limits of documents or bytes are those of a whole text"):
        part_of(parse_source(str(texts), limit_documents=3), 0, 2)
    with pytest.raises(UserError, match="needs --tokenizer"):
        main([str(texts), str(tmp_path / "out"), "--vocab-size", "300", "--parts", "2"])


def test_text_given_to_be_held_out_stays_whole(texts, tmp_path, tokenizer_folder):
    own = write_jsonl(tmp_path / "held.jsonl", [*some_texts(3, seed=0), *some_texts(2, seed=9)])
    source = parse_source(str(texts), validation=str(own))
    for part in (0, 1):
        whole = prepare_part(
            source, tmp_path / "out", part=part, parts=2, tokenizer=tokenizer_folder
        )
    assert whole is not None
    assert whole.splits["validation"].documents == 5
    assert whole.overlap is not None
    assert whole.overlap.documents_in_training > 0


def test_hub_data_sets_are_divided_by_files(texts):
    pytest.importorskip("datasets")
    source = HubSource(name=str(texts), validation_fraction=0.0)
    found = [
        [document.text for document in part_of(source, part, 2).documents()] for part in (0, 1)
    ]
    assert sorted(found[0] + found[1]) == sorted(found.text for found in source.documents())
    assert not set(found[0]) & set(found[1])
    assert "parts" not in source.describe()
