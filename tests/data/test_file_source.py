# SPDX-License-Identifier: Apache-2.0
"""Files of every kind: their documents, skipped rows, and refused files."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from sparse_bitnet.data.file_source import read_documents
from sparse_bitnet.errors import UserError

TEXTS = ["first", "zweiter\nüber zwei Zeilen", "third 漢字", "fourth 🙂"]
LINES = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS).encode()
FRAMES = LINES[:80], LINES[80:]
"""Two, as parallel compressors write them."""


def write(folder: Path, kind: str) -> Path:
    path = folder / f"file{kind}"
    if kind == ".csv":
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *((7, text) for text in TEXTS)])
    elif kind == ".parquet":
        table = pyarrow.table({"id": [7] * 4, "text": TEXTS})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    else:
        as_list = json.dumps([json.loads(line) for line in LINES.splitlines()], indent=1)
        contents = {
            ".jsonl.zst": b"".join(map(zstandard.compress, FRAMES)),
            ".jsonl.gz": b"".join(map(gzip.compress, FRAMES)),
            ".json": as_list.encode(),
            ".json.gz": gzip.compress(as_list.encode()),
        }
        path.write_bytes(contents.get(kind, LINES))
    return path


def read(path: Path, column: str = "text") -> list[str]:
    return [record.text for record in read_documents(path, column)]


@pytest.mark.parametrize(
    "kind",
    [".jsonl", ".jsonl.zst", ".jsonl.gz", ".json", ".json.gz", "-lines.json", ".csv", ".parquet"],
)
def test_reads_every_document(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    records = list(read_documents(path, "text"))
    assert [record.text for record in records] == TEXTS
    assert records[-1].progress == 1.0


@pytest.mark.parametrize("name", ["book.txt", "page.md"])
def test_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes("\ufeffOne.\n\nTwo.\n".encode())
    assert read(path, "ignored") == ["One.\n\nTwo.\n"]


def test_blank_lines_nulls_and_empty_texts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n  \n{"text": null}\n{"text": ""}\n{"text": "b"}')
    assert read(path) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "row", "reason"),
    [
        ("a.jsonl", b'{"text": "b"', r"a\.jsonl:2: not a JSON line: Expecting"),
        ("a.jsonl", b"[" * 200_000, r"a\.jsonl:2: not a JSON line: maximum recursion depth"),
        ("a.jsonl", b'{"n": ' + b"1" * 5000 + b"}", r"a\.jsonl:2: not a JSON line: Exceeds"),
        ("a.jsonl", b'["b"]', r"a\.jsonl:2: expected a JSON object"),
        ("a.jsonl", b'{"url": "b"}', r"a\.jsonl:2: no column 'text'.*: url$"),
        ("a.jsonl", b'{"text": ["a"]}', r"a\.jsonl:2: column 'text' holds list, not text"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"a\.jsonl:2: column 'text' holds a lone surrogate"),
        ("a.jsonl", b'{"text": "\xe4"}', r"a\.jsonl:2: not UTF-8 text"),
        ("a.jsonl", b"\x7fELF\0\0\0", r"a\.jsonl:2: binary data \(a NUL byte\)"),
        ("a.json", b"5", r"a\.json, row 2: expected a JSON object"),
        ("a.json", b'{"text": 5}', r"a\.json, row 2: column 'text' holds int, not text"),
        ("a.csv", b"b,c", r"a\.csv:3: more values than the first line has columns"),
    ],
)
def test_a_row_that_cannot_be_read_is_skipped_and_named(tmp_path, name, row, reason):
    path, good = tmp_path / name, b'{"text": "good"}'
    contents = {
        "a.jsonl": b"\n".join([good, row, good]),
        "a.json": b"[" + b",".join([good, row, good]) + b"]",
        "a.csv": b"\n".join([b"text", b"good", row, b"good"]),
    }
    path.write_bytes(contents[name])
    before, skipped, after = read_documents(path, "text")
    assert before.text == after.text == "good"
    assert (before.skipped, skipped.text, after.skipped) == ("", "", "")
    with pytest.raises(UserError, match=reason):
        raise UserError(skipped.skipped)
    assert "\n" not in skipped.skipped


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\0text", r"a\.txt: binary data \(a NUL byte\)"),
        ("a.txt", "naïve".encode("latin-1"), r"a\.txt: not UTF-8 text"),
        ("a.csv", b'id,text\n7,"a\n', r"a\.csv, after line 1: not CSV text"),
        ("a.csv", b"id,words\n7,a\n", r"a\.csv:2: no column 'text'; .*: id, words$"),
        ("a.json", b'[{"text": "a"}', r"a\.json: not JSON: Expecting"),
        ("a.jsonl", b'{"messages": []}', r"no column 'text'; .*; conversations want --chat$"),
        ("a.jsonl", b'x\n{"content": "a"}', r"a\.jsonl:2: no column 'text'.*: content$"),
        ("a.jsonl.zst", LINES, r"cannot read .*a\.jsonl\.zst: "),
        ("a.jsonl.zst", zstandard.compress(LINES * 50)[:-1], "cannot read .*: Truncated"),
        ("a.jsonl.gz", gzip.compress(LINES * 50)[:-9], r"cannot read .*a\.jsonl\.gz: "),
        ("a.jsonl.zst", zstandard.compress(LINES * 20_000) + b"no frame", "cannot read .*zst: "),
        ("a.parquet", b"PAR1", r"a\.parquet: not a readable parquet file"),
        ("image.png", b"", r"unknown kind of file; known are \.jsonl, "),
    ],
)
def test_a_file_that_is_not_of_its_kind_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_parquet_errors_name_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet")
    with pytest.raises(UserError, match=r"no column 'content'.*: id, text$"):
        read(path, "content")
    skipped = [record.skipped for record in read_documents(path, "id")]
    assert skipped[0] == f"{path}, row 1: column 'id' holds int, not text"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"file\.parquet"):
        read(path)
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 2, 5))
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"okab\xff")]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path)
    with pytest.raises(UserError, match=r"parquet: not a readable parquet file: 'utf-8' codec"):
        read(path)
