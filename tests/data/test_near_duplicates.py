# SPDX-License-Identifier: Apache-2.0
import random
from pathlib import Path

from texts import write_jsonl

from sparse_bitnet.data.documents import TRAIN, VALIDATION
from sparse_bitnet.data.manifest import Manifest, Overlap
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source

_CHOOSE = random.Random(0)
_WORDS = ["".join(_CHOOSE.choices("abcdefghij", k=6)) for _ in range(3000)]


def text_of(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def edited(text: str) -> str:
    """Every 60th word is another, and words were put before it."""
    words = text.split()
    words[::60] = ["edited"] * len(words[::60])
    return "put before " + " ".join(words)


# 40 pairs of near-duplicates, a passage that stands in two texts which differ, and short copies.
PAIRS = [(text_of(seed, 300), edited(text_of(seed, 300))) for seed in range(40)]
PASSAGE = text_of(999, 4000)
QUOTING = [text_of(1000 + seed, 900) + PASSAGE + text_of(2000 + seed, 900) for seed in range(2)]
OTHERS = [text_of(3000 + seed, 200) for seed in range(60)] + ["", "short", "short one"]


def sides(path: Path, **options: object) -> dict[str, str]:
    source = parse_source(str(path), validation_fraction=0.3, **options)
    return {document.text: document.split for document in source.documents()}


def test_near_duplicates_are_on_one_side(tmp_path: Path) -> None:
    texts = [text for pair in PAIRS for text in pair] + QUOTING + OTHERS
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    alone, together = sides(path, near_duplicates=False), sides(path)
    assert sum(alone[a] != alone[b] for a, b in PAIRS) > 5
    assert all(together[a] == together[b] for a, b in (*PAIRS, QUOTING))
    # Groups are split as often as documents, and what has no near-duplicate stays where it was.
    assert 4 <= sum(together[a] == VALIDATION for a, _ in PAIRS) <= 20
    assert all(together[text] == alone[text] for text in OTHERS if text)


def test_a_text_of_near_duplicates_alone_keeps_its_held_out_part(tmp_path: Path) -> None:
    texts = [text_of(0, 300) + f" {number}" for number in range(30)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    assert sides(path) == sides(path, near_duplicates=False)


def test_training_text_near_a_given_validation_text_is_left_out(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "a.jsonl", [first for first, _ in PAIRS[:5]] + OTHERS)
    held_out = write_jsonl(tmp_path / "b.jsonl", [b for _, b in PAIRS[3:8]] + ["short one"])
    documents = list(parse_source(str(train), validation=str(held_out)).documents())
    assert [d.text for d in documents if d.split == VALIDATION][:-1] == [b for _, b in PAIRS[3:8]]
    kept = [d.text for d in documents if d.split == TRAIN]
    assert kept == [a for a, _ in PAIRS[:3]] + [text for text in OTHERS[:-1] if text]
    again = write_jsonl(tmp_path / "again.jsonl", [first for first, _ in PAIRS[:5]] + OTHERS)
    documents = list(parse_source(str(train), validation=str(again)).documents())
    assert {document.split for document in documents} == {VALIDATION}


def test_overlap_is_measured_and_stored(tmp_path: Path, tokenizer_folder: Path) -> None:
    train = [text_of(1, 150), text_of(2, 150)]
    held_out = [train[1], text_of(3, 60) + train[0][200:700], text_of(4, 100), "short"]
    source = parse_source(
        str(write_jsonl(tmp_path / "a.jsonl", train)),
        validation=str(write_jsonl(tmp_path / "b.jsonl", held_out)),
        near_duplicates=False,
    )
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer_folder, shard_tokens=777)
    assert manifest == Manifest.read(tmp_path / "out")
    splits = [TokenDataset.open(tmp_path / "out", split) for split in (TRAIN, VALIDATION)]
    overlap = manifest.overlap
    assert overlap is not None
    tokens = [dataset[:].tolist() for dataset in splits]
    known = {tuple(tokens[0][i : i + 64]) for i in range(len(tokens[0]))}
    asked = [tuple(tokens[1][i : i + 64]) for i in range(len(tokens[1]) - 63)]
    asked = [window for window in asked if 0 not in window]
    assert overlap == Overlap(
        window_tokens=64,
        windows=len(asked),
        windows_in_training=sum(window in known for window in asked),
        documents=3,
        documents_in_training=1,
    )
    assert overlap.windows_in_training > 100
    assert "1 of 3 documents whole" in str(overlap)


def test_hub_data_sets_are_not_regrouped_but_overlap_is_measured(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "a.jsonl", [text for pair in PAIRS for text in pair])
    source = parse_source(f"hub:{tmp_path / 'set'}", validation_fraction=0.3)
    manifest = prepare(source, tmp_path / "out", tokenizer=tokenizer_folder)
    assert manifest.overlap is not None
    assert manifest.overlap.windows_in_training > 100
    assert "near_duplicates" not in manifest.settings["source"]
