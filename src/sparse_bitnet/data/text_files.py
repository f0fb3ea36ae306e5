# SPDX-License-Identifier: Apache-2.0
"""Documents of one local file: `.jsonl` and `.json`, also compressed, `.csv`, `.parquet`, `.txt`, `.md`.

A `.txt` or `.md` file is one document; the others hold one document per line or row. Every record
carries the place right after it, so that reading can go on there later without parsing what came
before.
"""

import codecs
import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sparse_bitnet.errors import UserError, reason_of


class Place(NamedTuple):
    """Where in a file reading goes on."""

    record: int = 0
    """Lines or rows before this place."""
    offset: int = 0
    """Bytes before it, decompressed ones, where the file has a document on each line; else 0."""


BEGINNING = Place()


class Record(NamedTuple):
    """One document of a file."""

    text: str
    end: Place
    bytes_read: int
    """Bytes of the file as it lies on disk that were read so far, for the progress display."""

    skipped: str = ""
    """Why there is no text."""


class SkippedRow(UserError):
    """A row that holds no document: it is counted, and the others are read."""


def skipped_line(count: int, first: str) -> str:
    """How many rows and files were skipped, and why the first was; "" for none."""
    rows = "rows or files" if count > 1 else "row or file"
    return f"{count:,} {rows} skipped, the first: {first}" if count else ""


class Row(NamedTuple):
    """What a file holds in one place."""

    values: Mapping[str, Any]
    where: str
    end: Place
    bytes_read: int


Reader = Callable[[Path, str | None, Place], Iterator[Row]]
"""The column is the only one that is wanted; None: all are."""

Check = Callable[[Mapping[str, Any], str, str], str]
"""(row, column, where) -> the document, "" for none; `UserError` for what is not one."""


def read_records(
    path: Path, column: str, start: Place = BEGINNING, check: Check | None = None
) -> Iterator[Record]:
    """Yield the documents of one file from `start` on; empty ones are left out.

    Args:
        check: makes a document of a row; default `check_text`. A row for which it raises `SkippedRow`
            becomes a record without text.

    Raises `UserError`, naming the file and where possible the line, for an unknown suffix, binary or
    undecodable text, a broken JSON line, a missing or unreadable column and a truncated file.
    """
    end, check = start, check or check_text
    wanted = column if check is check_text else None
    try:
        for values, where, end, bytes_read in _reader(path)(path, wanted, start):
            try:
                if text := check(values, column, where):
                    yield Record(text, end, bytes_read)
            except SkippedRow as reason:
                yield Record("", end, bytes_read, str(reason))
    except OSError as error:
        place = f", after record {end.record}" if end.record else ""
        raise UserError(f"cannot read {path}: {error.strerror or error}{place}") from error


def is_readable(path: Path) -> bool:
    """Whether the file's name ends in one of the known suffixes."""
    return path.name.endswith(tuple(READERS))


def _reader(path: Path) -> Reader:
    for suffix, reader in READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise UserError(f"{path}: unknown kind of file; known are {', '.join(READERS)}")


def _read_text(path: Path, column: str | None, start: Place) -> Iterator[Row]:
    content = path.read_bytes()
    if start.record == 0 and (text := decode(content, str(path))).strip():
        yield Row({column or "text": text}, str(path), Place(1, len(content)), len(content))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """The decompressed bytes, and how many of the file were read so far."""
    codec = {".zst": "zstd", ".gz": "gzip"}.get(path.suffix)
    if codec is None:
        with open(path, "rb") as file:
            yield file, file.tell
        return
    import pyarrow

    # pyarrow reports a truncated file and reads several frames; zstandard's own stream reader
    # takes a truncated file for a shorter one.
    with (
        pyarrow.OSFile(str(path)) as compressed,
        pyarrow.CompressedInputStream(compressed, codec) as stream,
    ):
        yield io.BufferedReader(stream, 1 << 20), compressed.tell


def _read_jsonl(path: Path, column: str | None, start: Place) -> Iterator[Row]:
    with _opened(path) as (file, tell):
        remaining = start.offset - (file.seek(start.offset) if file.seekable() else 0)
        while remaining and (skipped := len(file.read(min(remaining, 1 << 20)))):
            remaining -= skipped
        offset = start.offset
        for number, line in enumerate(file, start.record + 1):
            offset += len(line)
            where = f"{path}:{number}"
            if line.isspace():
                continue
            text = decode(line, where)
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
                raise UserError(f"{where}: not a JSON line: {error}") from error
            yield Row(_object(row, where), where, Place(number, offset), tell())


def _read_json(path: Path, column: str | None, start: Place) -> Iterator[Row]:
    """Rows of a list; without one, a row on each line."""
    with _opened(path) as (file, _):
        first = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    if first != b"[":
        yield from _read_jsonl(path, column, start)
        return
    with _opened(path) as (file, _):
        text = decode(file.read(), str(path))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    size = path.stat().st_size
    for number, row in enumerate(rows[start.record :], start.record + 1):
        where = f"{path}, row {number}"
        yield Row(_object(row, where), where, Place(number), size * number // len(rows))


def _object(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, with the text in one of its columns")
    return row


def _read_csv(path: Path, column: str | None, start: Place) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    with open(path, "rb") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        try:
            for number, row in enumerate(rows, 1):
                where = f"{path}:{rows.line_num}"
                if None in row:
                    raise UserError(f"{where}: more values than the first line has columns")
                if number > start.record:
                    yield Row(row, where, Place(number), file.tell())
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, after line {rows.line_num}: not CSV text: {error}") from error


def _read_parquet(path: Path, column: str | None, start: Place) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            size, rows = path.stat().st_size, file.metadata.num_rows
            if rows and column is not None and column not in names:
                raise UserError(f"{path}: {missing_column(column, names)}")
            wanted = None if column is None else [column]
            for group in range(file.num_row_groups):
                group_rows = file.metadata.row_group(group).num_rows
                if row + group_rows <= start.record:
                    row += group_rows
                    continue
                for batch in file.iter_batches(256, row_groups=[group], columns=wanted):
                    for values in batch.to_pylist():
                        row += 1
                        if row > start.record:
                            where = f"{path}, row {row}"
                            yield Row(filled(values), where, Place(row), size * row // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        place = f"{path}, after row {row}" if row else str(path)
        raise UserError(f"{place}: not a readable parquet file: {reason_of(error)}") from error


def filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table, without the keys inside of its values that only other rows have."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(each) for name, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    return {name: without_nulls(value) for name, value in row.items()}


READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".json": _read_json,
    ".json.gz": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}


def decode(content: bytes, where: str) -> str:
    """UTF-8 text, without a byte-order mark; `UserError` naming `where` for anything else."""
    if b"\0" in content:
        raise UserError(f"{where}: binary data (a NUL byte); expected UTF-8 text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text (byte {error.start}: {error.reason}); convert it first"
        ) from error


def check_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """The column's text, "" for null; `UserError` where it is not text that UTF-8 can hold."""
    if column not in row:
        raise UserError(f"{where}: {missing_column(column, row)}")
    value = row[column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    check_unicode(value, column, where)
    return value


def check_unicode(text: str, column: str, where: str) -> None:
    """Raise `UserError` for text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: column {column!r} holds a lone surrogate, not text") from error


def missing_column(column: str, columns: Collection[str]) -> str:
    """The message for a column that is not there; names those that are."""
    chat = "; conversations want --chat" if {"messages", "conversations"} & {*columns} else ""
    return f"no column {column!r}; choose one with --column: {', '.join(columns) or 'none'}{chat}"
