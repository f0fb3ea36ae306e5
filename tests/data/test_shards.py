# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sparse_bitnet.data import shards
from sparse_bitnet.data.manifest import Manifest, SplitManifest, token_dtype
from sparse_bitnet.data.shards import ShardWriter, TokenDataset
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import file_crc32


def write(folder: Path, tokens: np.ndarray, shard_tokens: int, vocab_size: int = 1000) -> None:
    writer = ShardWriter(folder, "train", token_dtype(vocab_size), shard_tokens)
    for part in np.array_split(tokens, 7):
        writer.append(part)
    split = writer.finish()
    empty = SplitManifest(0, 0, 0, ())
    dtype = token_dtype(vocab_size).name
    splits = {"train": split, "validation": empty}
    Manifest(1, {}, "hash", vocab_size, dtype, 0, splits).write(folder)


@pytest.fixture
def data(prepared: Path, tmp_path: Path) -> Path:
    """A copy of prepared data, to be damaged."""
    return shutil.copytree(prepared, tmp_path / "data")


@hypothesis.given(
    length=st.integers(1, 300),
    shard_tokens=st.integers(20, 120),
    data=st.data(),
    wide=st.booleans(),
)
@hypothesis.settings(max_examples=25)
def test_slices_cross_shard_boundaries(
    tmp_path_factory: pytest.TempPathFactory,
    length: int,
    shard_tokens: int,
    data: st.DataObject,
    wide: bool,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    vocab_size = 70_000 if wide else 1 << 16
    tokens = np.random.default_rng(length).integers(0, vocab_size, length)
    write(folder, tokens, shard_tokens, vocab_size)
    dataset = TokenDataset.open(folder)
    assert len(dataset) == length
    assert dataset[:].dtype == (np.uint32 if wide else np.uint16)
    assert len(dataset.shards) == -(-length // shard_tokens)
    assert np.array_equal(dataset[:], tokens)
    start = data.draw(st.integers(-length, length))
    stop = data.draw(st.integers(-length, 2 * length))
    assert np.array_equal(dataset[start:stop], tokens[start:stop])


def test_bytes_on_disk_are_little_endian(tmp_path: Path) -> None:
    write(tmp_path, np.array([1, 0x1234]), 10, 1 << 16)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"\x01\x00\x34\x12"
    write(tmp_path, np.array([1, 0x12345]), 10, 1 << 17)
    assert (tmp_path / "train-00000.bin").read_bytes() == b"\x01\x00\x00\x00\x45\x23\x01\x00"


@hypothesis.given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    stop=st.integers(0, 8),
    shard_tokens=st.integers(8, 40),
)
@hypothesis.settings(max_examples=25)
def test_writer_continues_after_its_last_full_shard(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], stop: int, shard_tokens: int
) -> None:
    folder = tmp_path_factory.mktemp("writer")
    documents = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    writer = ShardWriter(folder, "train", token_dtype(1000), shard_tokens)
    for document in documents[:stop]:
        writer.append(document, 3)
    writer.close()
    writer = ShardWriter(folder, "train", token_dtype(1000), shard_tokens, writer.state)
    for document in documents[writer.seen :]:
        writer.append(document, 3)
    written = writer.finish()
    assert (written.documents, written.text_bytes) == (len(sizes), 3 * len(sizes))
    names = sorted(path.name for path in folder.iterdir())
    assert names == [shard.file for shard in written.shards]
    content = b"".join((folder / name).read_bytes() for name in names)
    assert np.array_equal(np.frombuffer(content, "<u2"), np.concatenate(documents))
    for shard in written.shards:
        assert shard.crc32 == f"{file_crc32(folder / shard.file):08x}"


def flip_a_bit(path: Path) -> None:
    with open(path, "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 4]))


def test_corrupt_shard_is_named_on_opening(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flip_a_bit(data / "train-00001.bin")
    with pytest.raises(UserError, match=r"train-00001\.bin: corrupt \(checksum"):
        TokenDataset.open(data)
    TokenDataset.open(data, "validation")
    TokenDataset.open(data, verify=False)
    monkeypatch.setattr(shards, "_VERIFIED_BYTES", 1000)
    TokenDataset.open(data)


@pytest.mark.parametrize(("change", "message"), [(-1, "truncated"), (2, "too long")])
def test_wrong_size_is_named_on_opening(data: Path, change: int, message: str) -> None:
    path = data / "train-00002.bin"
    os.truncate(path, path.stat().st_size + change)
    for verify in (True, False):
        with pytest.raises(UserError, match=rf"train-00002\.bin: {message} \("):
            TokenDataset.open(data, verify=verify)


def test_missing_shard_is_named(data: Path) -> None:
    (data / "train-00000.bin").unlink()
    with pytest.raises(UserError, match=r"train-00000\.bin: this shard is missing"):
        TokenDataset.open(data)


def test_damaged_manifests_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no prepared data here .*: sparse-bitnet prepare TEXT"):
        TokenDataset.open(tmp_path / "nowhere")
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(UserError, match=rf"no prepared data here .* prepare {tmp_path} DATA"):
        TokenDataset.open(tmp_path)
    with pytest.raises(UserError, match=r"prepare .*chats\.jsonl DATA, with --chat"):
        TokenDataset.open(tmp_path / "chats.jsonl")
    with pytest.raises(UserError, match=r"cannot read .*: File name too long"):
        TokenDataset.open(tmp_path / ("name" * 99))
    path = data / "manifest.json"
    good = json.loads(path.read_text())
    for content, message in {
        "{broken": r"manifest\.json: damaged",
        "[]": r"manifest\.json: damaged",
        json.dumps({**good, "version": 2}): r"damaged \(version: Input should be 1\)",
        json.dumps({**good, "surplus": 2}): r"manifest\.json: damaged .*surplus",
        json.dumps({"version": 1}): r"manifest\.json: damaged \(settings: Field required",
        json.dumps({**good, "vocab_size": "many"}): r"damaged \(vocab_size: .* a valid integer",
        json.dumps({**good, "vocab_size": 10**40}): r"damaged \(vocab_size: .* less than 92233",
        json.dumps({**good, "dtype": "float64"}): r"damaged \(dtype: .* pattern",
        json.dumps({**good, "overlap": {"a": 1}}): r"damaged \(overlap\.",
        json.dumps(good).replace(
            '"text_bytes": ', '"text_bytes": -', 1
        ): r"damaged \(splits\.train\.text_bytes: .* greater than or equal to 0",
        json.dumps(good).replace(
            '"shards": [', '"shards": [{"file": "x", "tokens": 0, "crc32": ""}, ', 1
        ): r"damaged \(splits\.train\.shards\.0\.tokens: .* greater than 0",
        json.dumps(good).replace(
            "train-00000", "../train-00000"
        ): r"damaged \(.*a shard lies outside",
        json.dumps(good).replace(
            '"tokens": 1000,', '"tokens": 999,', 1
        ): r"damaged \(.*the shards' token counts do not",
    }.items():
        path.write_text(content)
        with pytest.raises(UserError, match=message):
            TokenDataset.open(data)
    path.rename(data / "preparation.json")
    with pytest.raises(UserError, match="was not finished; run the same prepare command again"):
        TokenDataset.open(data)


def test_split_without_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, np.arange(10), 5)
    with pytest.raises(UserError, match="no validation text; prepare with --validation or"):
        TokenDataset.open(tmp_path, "validation")
    with pytest.raises(UserError, match="no test text"):
        TokenDataset.open(tmp_path, "test")


def test_vocabulary_must_fit_the_model(prepared: Path) -> None:
    dataset = TokenDataset.open(prepared)
    dataset.check_vocab(300)
    dataset.check_vocab(151_936)
    with pytest.raises(UserError, match="vocabulary has 300 tokens, the model's 299"):
        dataset.check_vocab(299)


def test_identity_is_equal_for_equal_data_only(prepared: Path, data: Path) -> None:
    train, validation = (TokenDataset.open(prepared, split) for split in ("train", "validation"))
    assert TokenDataset.open(data).identity() == train.identity() != validation.identity()
    assert json.loads(json.dumps(train.identity())) == train.identity()
