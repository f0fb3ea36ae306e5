# SPDX-License-Identifier: Apache-2.0
"""Text of local files: `.jsonl` and `.json`, also compressed, `.csv`, `.parquet`, `.txt`, `.md`.

A `.txt` or `.md` file is one document; the others hold one document per line or row. A row without a
readable one is skipped, counted and named; a file that is not of its kind is refused.
"""

import codecs
import csv
import glob
import hashlib
import io
import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from sparse_bitnet.data.documents import (
    TRAIN,
    Document,
    State,
    numbered,
    split_of,
    uniform_hash,
)
from sparse_bitnet.errors import UserError, os_errors_as, reason_of
from sparse_bitnet.progress import say

PIECE_CHARACTERS = 4096
"""Text that is held out of a long document, at most."""

_SMALLEST_PIECE = 64
"""Characters, where a tenth of the text is less."""

_HELD_OUT_DOCUMENTS = 10
"""Number of held-out documents below which, by expectation, pieces of documents are held out instead."""

_ABOUT_DATA = ("README.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files of a data set's folder that are not its text."""


class SkippedRow(UserError):
    """A row that holds no document: it is counted, and the others are read."""


class NoColumn(SkippedRow):
    """A row without the column."""


class Row(NamedTuple):
    """Content of one place in a file."""

    content: object
    """Values by column; bytes are a line of JSON."""
    where: str
    bytes_read: int
    """Bytes of the file as it lies on disk that were read so far, for the progress display."""


Reader = Callable[[Path, str | None], Iterator[Row]]
"""The column is the only one that is wanted; None: all are."""

Check = Callable[[Mapping[str, Any], str, str], str]
"""(row, column, where) -> the document, "" for none; `SkippedRow` for what is not one."""


class Record(NamedTuple):
    """One document of a file."""

    text: str
    bytes_read: int
    skipped: str = ""
    """Why there is no text."""


def check_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """The column's text, "" for null; `SkippedRow` where it is not text that UTF-8 can hold."""
    if column not in row:
        raise NoColumn(f"{where}: {missing_column(column, row)}")
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise SkippedRow(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    check_unicode(value or "", column, where)
    return value or ""


def check_unicode(text: str, column: str, where: str) -> None:
    """Raise `SkippedRow` for text that UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SkippedRow(f"{where}: column {column!r} holds a lone surrogate, not text") from error


def missing_column(column: str, columns: Collection[str]) -> str:
    """The message for a column that is not there; names those that are."""
    chat = "; conversations want --chat" if {"messages", "conversations"} & {*columns} else ""
    return f"no column {column!r}; choose one with --column: {', '.join(columns) or 'none'}{chat}"


def skipped_line(count: int, first: str) -> str:
    """How many rows and files were skipped, and why the first was; "" for none."""
    rows = "rows or files" if count > 1 else "row or file"
    return f"{count:,} {rows} skipped, the first: {first}" if count else ""


def filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table, without the keys inside of its values that only other rows have."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(each) for name, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    return {name: without_nulls(value) for name, value in row.items()}


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Local files in the order given.

    A document goes to validation by the hash of its text, so copies of it stay on one side. Where the
    documents are too few for that, long ones are cut, and pieces are held out instead, at least one.
    """

    name: str
    paths: tuple[Path, ...]
    column: str = "text"
    check: Check = check_text
    validation_fraction: float = 0.01

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.exists():
                is_like_a_hub_name = len(path.parts) == 2 and not path.suffix
                hint = f"; a hub data set is hub:{path}" if is_like_a_hub_name else ""
                raise UserError(f"no such file: {path}{hint}")
            if path.stat().st_size == 0 and len(self.paths) == 1:
                raise UserError(f"{path}: the file is empty")
            _reader(path)

    @classmethod
    def matching(cls, patterns: Sequence[str], **options: Any) -> "FileSource":
        """Every file that the paths, globs (`**` included) and folders name, each once.

        A folder stands for all files of the known kinds below it; what a pattern matches is taken
        in sorted order. Raises `UserError` for a pattern that matches nothing.
        """
        name, paths = ", ".join(patterns), dict[Path, None]()
        with os_errors_as(f"cannot read {name}"):
            for pattern in patterns:
                paths.update(dict.fromkeys(_expand(pattern)))
            return cls(name=name, paths=tuple(paths), **options)

    def describe(self) -> dict[str, Any]:
        """The files and options that identify the text."""
        return {
            "kind": "files",
            "files": [_fingerprint(path) for path in self.paths],
            "column": self.column,
            "validation_fraction": self.validation_fraction,
            **({} if self._of_few is None else {"piece": self._of_few[1]}),
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Documents of all files in order, from after `state`."""
        return numbered(self._documents(), state)

    def _documents(self) -> Iterator[Document]:
        sizes = [path.stat().st_size for path in self.paths]
        before, total, has_text, first_skipped = 0, max(1, sum(sizes)), False, ""
        for path, size in zip(self.paths, sizes, strict=True):
            is_empty = True
            for text, read, skipped in read_records(path, self.column, self.check):
                for part, split in self._parts(text):
                    yield Document(part, split, (before + read) / total, skipped)
                is_empty, has_text = False, has_text or not skipped
                first_skipped = first_skipped or skipped
            before += size
            if is_empty:
                skipped = f"{path}: no text in this file"
                first_skipped = first_skipped or skipped
                yield Document("", TRAIN, before / total, skipped)
        if not has_text:
            raise UserError(first_skipped)

    def _parts(self, text: str) -> Iterable[tuple[str, str]]:
        """A document in parts, each with its split."""
        if not text:
            return [("", TRAIN)]
        if self._of_few is None:
            return [(text, split_of(text.encode(), self.validation_fraction))]
        threshold, size = self._of_few
        if self._is_whole:
            return [(text, split_of(text.encode(), threshold) if len(text) <= size else TRAIN)]
        runs = itertools.groupby(
            pieces(text, size), lambda piece: split_of(piece.encode(), threshold)
        )
        return (("".join(run), split) for split, run in runs)

    @property
    def _is_whole(self) -> bool:
        """Whether documents cannot be cut: conversations."""
        return self.check is not check_text

    @cached_property
    def _of_few(self) -> tuple[float, int] | None:
        """Pieces whose hash is below a number are held out, and how many characters a piece has at most.

        A conversation is a piece, and one that is longer is not held out. None: whole documents are, as
        they are many.
        """
        if not self.validation_fraction:
            return None

        def texts() -> Iterator[str]:
            each = (read_records(path, self.column, self.check) for path in self.paths)
            return (one.text for one in itertools.chain.from_iterable(each) if one.text)

        many = math.ceil(min(_HELD_OUT_DOCUMENTS / self.validation_fraction, sys.maxsize // 2))
        lengths = [len(text) for text in itertools.islice(texts(), many)]
        if len(lengths) == many:
            return None
        # Most of a small text is for training.
        size = sum(lengths) // 2
        if not self._is_whole:
            if size < _SMALLEST_PIECE:
                return 0.0, PIECE_CHARACTERS
            size = min(PIECE_CHARACTERS, max(_SMALLEST_PIECE, sum(lengths) // 10))
        cut = itertools.chain.from_iterable(pieces(text, size) for text in texts())
        smallest, length, seen = 1.0, 0, 0
        for piece in texts() if self._is_whole else cut:
            place = uniform_hash(piece.encode()) if len(piece) <= size else 1.0
            if place <= smallest:  # the same text may stand there again
                length = len(piece) + (length if place == smallest else 0)
                smallest = place
            seen += len(piece)
            if smallest < self.validation_fraction and 2 * length <= seen:
                return self.validation_fraction, size
        has_room = smallest < 1 and 2 * length <= seen
        return math.nextafter(smallest, 1.0) if has_room else 0.0, size


def pieces(text: str, size: int = PIECE_CHARACTERS) -> Iterator[str]:
    """`text` in pieces of at most `size` characters that end with a paragraph, a line or a word, or where
    nothing else is left."""
    start = 0
    while len(text) - start > size:
        end = start + size
        for mark in ("\n\n", "\n", " "):
            if (last := text.rfind(mark, start + size // 2, end)) > 0:
                end = last + len(mark)
                break
        yield text[start:end]
        start = end
    yield text[start:]


def _expand(pattern: str) -> list[Path]:
    if not pattern:
        raise UserError(
            "one of the names of files is empty: leave out its comma, or write . for here"
        )
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        known = tuple(READERS)
        paths = [
            each for each in files if each.name.endswith(known) and each.name not in _ABOUT_DATA
        ]
        if left_out := [str(each.relative_to(path)) for each in files if each not in {*paths}]:
            more = ", ..." if len(left_out) > 5 else ""
            count = f"{len(left_out):,} file{'s' * (len(left_out) > 1)}"
            say(f"{path}: left out {count} of other kinds: {', '.join(left_out[:5])}{more}")
    elif path.exists() or not glob.has_magic(pattern):
        paths = [path]
    else:
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        paths = [file for file in matches if file.is_file()]
    if not paths:
        raise UserError(f"no file matches {pattern!r}")
    return paths


def _fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a hash of both ends: cheap at any size, the same wherever the file lies."""
    with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
        size = path.stat().st_size
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
    digest = hashlib.blake2b(head + tail, digest_size=16).hexdigest()
    return {"name": path.name, "bytes": size, "ends": digest}


def read_records(path: Path, column: str, check: Check = check_text) -> Iterator[Record]:
    """Yield the documents of one file; empty ones are left out.

    Args:
        check: makes a document of a row. A row for which it raises `SkippedRow`, and a line that is no
            JSON object, become a record without text.

    Raises `UserError`, naming the file and where possible the line, for an unknown suffix, a file that is
    truncated or not of its kind, and a column that no row had before the first that lacks it.
    """
    number, has_column = 0, False
    try:
        rows = _reader(path)(path, column if check is check_text else None)
        for content, where, bytes_read in rows:
            number += 1
            text = skipped = ""
            try:
                text = check(_values(content, where), column, where)
                has_column = True
            except SkippedRow as error:
                if isinstance(error, NoColumn) and not has_column:
                    raise  # an option that is wrong for the whole file
                skipped = str(error)
            if text or skipped:
                yield Record(text, bytes_read, skipped)
    except OSError as error:
        place = f", after record {number}" if number else ""
        raise UserError(f"cannot read {path}: {error.strerror or error}{place}") from error


def _values(content: object, where: str) -> Mapping[str, Any]:
    if isinstance(content, bytes):
        try:
            content = json.loads(_decoded(content, where))
        except UserError as error:
            raise SkippedRow(str(error)) from error
        except (ValueError, RecursionError) as error:  # also numbers too long, lists too deep
            raise SkippedRow(f"{where}: not a JSON line: {error}") from error
    if not isinstance(content, dict):
        raise SkippedRow(f"{where}: expected a JSON object, with the text in one of its columns")
    if None in content:
        raise SkippedRow(f"{where}: more values than the first line has columns")
    return content


def _decoded(content: bytes, where: str) -> str:
    if b"\0" in content:
        raise UserError(f"{where}: binary data (a NUL byte); expected UTF-8 text")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not UTF-8 text (byte {error.start}: {error.reason}); convert it first"
        ) from error


def _read_text(path: Path, column: str | None) -> Iterator[Row]:
    content = path.read_bytes()
    if (text := _decoded(content, str(path))).strip():
        yield Row({column or "text": text}, str(path), len(content))


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


def _read_jsonl(path: Path, column: str | None) -> Iterator[Row]:
    with _opened(path) as (file, tell):
        for number, line in enumerate(file, 1):
            if not line.isspace():
                yield Row(line, f"{path}:{number}", tell())


def _read_json(path: Path, column: str | None) -> Iterator[Row]:
    """Rows of a list; without one, a row on each line."""
    with _opened(path) as (file, _):
        is_list = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"["
    if not is_list:
        yield from _read_jsonl(path, column)
        return
    with _opened(path) as (file, _):
        text = _decoded(file.read(), str(path))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    size = path.stat().st_size
    for number, row in enumerate(rows, 1):
        yield Row(row, f"{path}, row {number}", size * number // len(rows))


def _read_csv(path: Path, column: str | None) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    with open(path, "rb") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        try:
            for row in rows:
                yield Row(row, f"{path}:{rows.line_num}", file.tell())
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, after line {rows.line_num}: not CSV text: {error}") from error


def _read_parquet(path: Path, column: str | None) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            size, rows = path.stat().st_size, file.metadata.num_rows
            if rows and column is not None and column not in names:
                raise UserError(f"{path}: {missing_column(column, names)}")
            for batch in file.iter_batches(256, columns=None if column is None else [column]):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(filled(values), f"{path}, row {number}", size * number // rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        place = f"{path}, after row {number}" if number else str(path)
        raise UserError(f"{place}: not a readable parquet file: {reason_of(error)}") from error


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


def _reader(path: Path) -> Reader:
    for suffix, reader in READERS.items():
        if path.name.endswith(suffix):
            return reader
    raise UserError(f"{path}: unknown kind of file; known are {', '.join(READERS)}")
