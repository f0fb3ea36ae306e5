# SPDX-License-Identifier: Apache-2.0
"""Documents of one local file: `.jsonl`, `.jsonl.zst`, `.parquet` (one column) and `.txt`.

A `.txt` file is one document; the others hold one document per line or row. Every record carries the
place right after it, so that reading can go on there later without parsing what came before.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sparse_bitnet.errors import UserError, reason_of


class Place(NamedTuple):
    """Where in a file reading goes on."""

    record: int = 0
    """Lines or rows before this place."""
    offset: int = 0
    """Bytes before it: decompressed ones for `.jsonl.zst`, always 0 for `.parquet`."""


BEGINNING = Place()


class Record(NamedTuple):
    """One document of a file."""

    text: str
    end: Place
    bytes_read: int
    """Bytes of the file as it lies on disk that were read so far, for the progress display."""


class Row(NamedTuple):
    """What a file holds in one place of the column."""

    value: object
    where: str
    end: Place
    bytes_read: int


Reader = Callable[[Path, str, Place], Iterator[Row]]

Check = Callable[[object, str, str], str]
"""(value, column, where) -> the document, "" for none; `UserError` for what is not one."""


def read_records(
    path: Path, column: str, start: Place = BEGINNING, check: Check | None = None
) -> Iterator[Record]:
    """Yield the documents of one file from `start` on; empty ones are left out.

    Args:
        check: makes documents of what the column holds; default `check_text`.

    Raises `UserError`, naming the file and where possible the line, for an unknown suffix, binary or
    undecodable text, a broken JSON line, a missing or unreadable column and a truncated file.
    """
    end = start
    try:
        for value, where, end, bytes_read in _reader(path)(path, column, start):
            if text := (check or check_text)(value, column, where):
                yield Record(text, end, bytes_read)
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


def _read_text(path: Path, column: str, start: Place) -> Iterator[Row]:
    content = path.read_bytes()
    if start.record == 0 and (text := decode(content, str(path))).strip():
        yield Row(text, str(path), Place(1, len(content)), len(content))


def _read_jsonl(path: Path, column: str, start: Place) -> Iterator[Row]:
    with open(path, "rb") as file:
        file.seek(start.offset)
        yield from _parse_lines(path, file, column, start, file.tell)


def _read_jsonl_zst(path: Path, column: str, start: Place) -> Iterator[Row]:
    import pyarrow

    # pyarrow reports a truncated file and reads several frames; zstandard's own stream reader
    # takes a truncated file for a shorter one.
    with (
        pyarrow.OSFile(str(path)) as compressed,
        pyarrow.CompressedInputStream(compressed, "zstd") as stream,
    ):
        file = io.BufferedReader(stream, 1 << 20)
        remaining = start.offset
        while remaining and (skipped := len(file.read(min(remaining, 1 << 20)))):
            remaining -= skipped
        yield from _parse_lines(path, file, column, start, compressed.tell)


def _parse_lines(
    path: Path, file: BinaryIO, column: str, start: Place, tell: Callable[[], int]
) -> Iterator[Row]:
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
        if not isinstance(row, dict):
            raise UserError(f"{where}: expected a JSON object with the column {column!r}")
        if column not in row:
            raise UserError(missing_column(where, column, row))
        yield Row(row[column], where, Place(number, offset), tell())


def _read_parquet(path: Path, column: str, start: Place) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(missing_column(str(path), column, names))
            size, rows = path.stat().st_size, file.metadata.num_rows
            for group in range(file.num_row_groups):
                group_rows = file.metadata.row_group(group).num_rows
                if row + group_rows <= start.record:
                    row += group_rows
                    continue
                for batch in file.iter_batches(256, row_groups=[group], columns=[column]):
                    for value in batch.column(0).to_pylist():
                        row += 1
                        if row > start.record:
                            yield Row(value, f"{path}, row {row}", Place(row), size * row // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        place = f"{path}, after row {row}" if row else str(path)
        raise UserError(f"{place}: not a readable parquet file: {reason_of(error)}") from error


READERS: dict[str, Reader] = {
    ".jsonl": _read_jsonl,
    ".jsonl.zst": _read_jsonl_zst,
    ".parquet": _read_parquet,
    ".txt": _read_text,
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


def check_text(value: object, column: str, where: str) -> str:
    """The column's text, "" for null; `UserError` where it is not text that UTF-8 can hold."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: column {column!r} holds a lone surrogate, not text") from error
    return value


def missing_column(where: str, column: str, columns: Iterable[str]) -> str:
    """The message for a column that is not there; names those that are."""
    names = ", ".join(columns) or "none"
    return f"{where}: no column {column!r}; choose one with --column: {names}"
