# SPDX-License-Identifier: Apache-2.0
import csv
import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from sparse_bitnet.data.text_files import BEGINNING, read_records
from sparse_bitnet.errors import UserError

TEXTS = ["first", "zweiter\nüber zwei Zeilen", "third 漢字", "fourth 🙂"]
LINES = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in TEXTS).encode()


def write(folder: Path, kind: str) -> Path:
    path = folder / f"file{kind}"
    if kind == ".jsonl":
        path.write_bytes(LINES)
    elif kind == ".jsonl.zst":
        # Two frames, as parallel compressors write them.
        middle = LINES.index(b"\n") + 10
        path.write_bytes(zstandard.compress(LINES[:middle]) + zstandard.compress(LINES[middle:]))
    elif kind == ".jsonl.gz":
        middle = LINES.index(b"\n") + 10
        path.write_bytes(gzip.compress(LINES[:middle]) + gzip.compress(LINES[middle:]))
    elif kind == ".json":
        path.write_text(json.dumps([json.loads(line) for line in LINES.splitlines()], indent=1))
    elif kind == "-lines.json":
        path.write_bytes(LINES)
    elif kind == ".csv":
        with open(path, "w", encoding="utf-8-sig", newline="") as file:
            csv.writer(file).writerows([("id", "text"), *((7, text) for text in TEXTS)])
    elif kind == ".parquet":
        table = pyarrow.table({"id": [7] * 4, "text": TEXTS})
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def read(path: Path, column: str = "text") -> list[str]:
    return [record.text for record in read_records(path, column)]


@pytest.mark.parametrize(
    "kind", [".jsonl", ".jsonl.zst", ".jsonl.gz", ".json", "-lines.json", ".csv", ".parquet"]
)
def test_reads_every_document_and_goes_on_after_any(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    records = list(read_records(path, "text"))
    assert [record.text for record in records] == TEXTS
    assert records[-1].bytes_read == path.stat().st_size
    for number, record in enumerate(records, 1):
        assert list(read_records(path, "text", record.end)) == records[number:]
    assert list(read_records(path, "text", BEGINNING)) == records


@pytest.mark.parametrize("name", ["book.txt", "page.md"])
def test_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes("\ufeffOne.\n\nTwo.\n".encode())
    (record,) = read_records(path, "ignored")
    assert record.text == "One.\n\nTwo.\n"
    assert list(read_records(path, "ignored", record.end)) == []


def test_blank_lines_nulls_and_empty_texts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n  \n{"text": null}\n{"text": ""}\n{"text": "b"}')
    records = list(read_records(path, "text"))
    assert [record.text for record in records] == ["a", "b"]
    assert records[-1].end.record == 6


def test_another_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"content": "x", "text": "y"}\n')
    assert read(path, "content") == ["x"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl:2: not a JSON line"),
        (b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2: expected a JSON object"),
        (b'{"content": "a", "url": "b"}\n', r"a\.jsonl:1: no column 'text'.*: content, url$"),
        (b'{"text": ["a"]}\n', r"a\.jsonl:1: column 'text' holds list, not text"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl:1: column 'text' holds a lone surrogate"),
        (b'{"text": "\xe4"}\n', r"a\.jsonl:1: not UTF-8 text"),
        (b"[" * 200_000, r"a\.jsonl:1: not a JSON line: maximum recursion depth"),
        (b'{"n": ' + b"1" * 5000 + b"}", r"a\.jsonl:1: not a JSON line: Exceeds the limit"),
        (b"\x7fELF\0\0\0\n", r"a\.jsonl:1: binary data \(a NUL byte\)"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text\0text", "NUL byte"), ("naïve".encode("latin-1"), "not UTF-8 text")],
)
def test_binary_text_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.txt: .*{message}"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "id,text\n7,a,b\n", r"a\.csv:2: more values than the first line has columns"),
        ("a.csv", 'id,text\n7,"a\n', r"a\.csv, after line 1: not CSV text"),
        ("a.csv", "id,words\n7,a\n", r"a\.csv:2: no column 'text'; .*: id, words$"),
        ("a.json", '[{"text": "a"}', r"a\.json: not JSON: Expecting"),
        ("a.json", '[{"text": "a"}, "b"]', r"a\.json, row 2: expected a JSON object"),
        (
            "a.jsonl",
            '{"messages": []}',
            r"no column 'text'; .*: messages; conversations want --chat$",
        ),
    ],
)
def test_broken_tables_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / name)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.999])
def test_truncated_gz(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(LINES * 50)
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.gz: "):
        read(path)


@pytest.mark.parametrize("kept", [0.3, 0.6, 0.999])
def test_truncated_zst(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "a.jsonl.zst"
    whole = zstandard.compress(LINES * 50)
    path.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.zst: Truncated"):
        read(path)


def test_a_broken_place_is_said_by_what_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(LINES * 20_000) + b"no frame")
    with pytest.raises(UserError, match=r"a\.jsonl\.zst: .*, after record [0-9]{4,5}$"):
        read(path)
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 2, 5))
    buffers = [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"okab\xff")]
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 2, buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=r"b\.parquet: not a readable parquet file: 'utf-8' codec"):
        read(tmp_path / "b.parquet")


def test_no_zst_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(LINES)
    with pytest.raises(UserError, match=r"cannot read .*a\.jsonl\.zst: "):
        read(path)


def test_parquet_errors(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet")
    with pytest.raises(UserError, match=r"no column 'content'.*: id, text$"):
        read(path, "content")
    with pytest.raises(UserError, match="row 1: column 'id' holds int, not text"):
        read(path, "id")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"file\.parquet"):
        read(path)


def test_unreadable_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*absent\.jsonl: No such file"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match=r"unknown kind of file; known are \.jsonl, "):
        read(tmp_path / "image.png")
