# SPDX-License-Identifier: Apache-2.0
import random
from pathlib import Path

from texts import write_jsonl

from sparse_bitnet.data.documents import TRAIN, VALIDATION
from sparse_bitnet.data.manifest import Manifest, Overlap
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source


def text_of(seed: int, words: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij ", k=7 * words))


def test_overlap_is_measured_and_stored(tmp_path: Path, tokenizer_folder: Path) -> None:
    train = [text_of(1, 150), text_of(2, 150)]
    held_out = [train[1], text_of(3, 60) + train[0][200:700], text_of(4, 100), "short"]
    source = parse_source(
        str(write_jsonl(tmp_path / "a.jsonl", train)),
        validation=str(write_jsonl(tmp_path / "b.jsonl", held_out)),
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
