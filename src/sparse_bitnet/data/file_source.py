# SPDX-License-Identifier: Apache-2.0
"""Text of local files: `.jsonl` and `.json`, also compressed, `.csv`, `.parquet`, `.txt`, `.md`.

A `.txt` or `.md` file is one document; the others hold one document per line or row. A row without a
readable document is skipped, counted and named; a file of another format is refused.
"""

import codecs
import csv
import glob
import hashlib
import io
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sparse_bitnet.data.documents import TRAIN, Document, pieces, pieces_of_few, split_of
from sparse_bitnet.errors import UserError, library_errors_as, os_errors_as, reason_of
from sparse_bitnet.progress import say

_ABOUT_DATA = {"README.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
_ABOUT_DATA |= {"manifest.json", "preparation.json", "tokenizer.json", "tokenizer_config.json"}
"""Files of a data set's folder, and of prepared data in it, that are not its text."""


class SkippedRow(UserError):
    """Raised for a row without a document: it is counted, and reading continues."""


class NoColumn(SkippedRow):
    """Raised for a row without the column."""


class Row(NamedTuple):
    """Content of one place in a file."""

    content: object
    """Values by column; bytes are a line of JSON."""
    where: str
    progress: float | None
    """Fraction of the file read so far."""


Reader = Callable[[Path, str | None], Iterator[Row]]
"""Reads a file; with a column, that one alone is needed."""

Check = Callable[[Mapping[str, Any], str, str], str]
"""(row, column, where) -> the document, "" for none. Raises `SkippedRow` for a row without one."""


def check_text(row: Mapping[str, Any], column: str, where: str) -> str:
    """Return the column's text, "" for null. Raises `SkippedRow` for anything else."""
    if column not in row:
        raise NoColumn(f"{where}: {missing_column(column, row)}")
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise SkippedRow(f"{where}: column {column!r} holds {type(value).__name__}, not text")
    return value or ""


def missing_column(column: str, columns: Collection[str]) -> str:
    """Return the message for a column that is not there; it names those that are."""
    chat = "; conversations want --chat" if {"messages", "conversations"} & {*columns} else ""
    return f"no column {column!r}; choose one with --column: {', '.join(columns) or 'none'}{chat}"


def filled(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a table without the null keys inside its values that only other rows have."""

    def without_nulls(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without_nulls(each) for name, each in value.items() if each is not None}
        return [without_nulls(each) for each in value] if isinstance(value, list) else value

    return {name: without_nulls(value) for name, value in row.items()}


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Local files in the order given.

    A document goes to validation by the hash of its text, so copies of it stay on one side. If there are
    too few documents for that, long ones are cut, and pieces are held out instead, at least one.
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
        """Return every file that the paths, globs (`**` included) and folders name, each once.

        A folder stands for all files of the known kinds below it. Neither it nor `**` follows links to
        folders; `*` matches no hidden files. Raises `UserError` for a pattern that matches nothing.
        """
        name, paths = ", ".join(patterns), dict[Path, None]()
        with os_errors_as(f"cannot read {name}"):
            for pattern in patterns:
                paths.update(dict.fromkeys(_expand(pattern)))
            return cls(name=name, paths=tuple(paths), **options)

    def describe(self) -> dict[str, Any]:
        """Return the files and options that identify the text."""
        return {
            "kind": "files",
            "files": [_fingerprint(path) for path in self.paths],
            "column": self.column,
            "validation_fraction": self.validation_fraction,
            **({} if self._pieces is None else {"piece": self._pieces[1]}),
        }

    def documents(self) -> Iterator[Document]:
        """Yield the documents of all files in order."""
        sizes = [path.stat().st_size for path in self.paths]
        before, total, has_text, first_skipped = 0, max(1, sum(sizes)), False, ""
        for path, size in zip(self.paths, sizes, strict=True):
            for text, _, progress, skipped, _ in self._read(path):
                has_text = has_text or bool(text)
                first_skipped = first_skipped or skipped
                for part, split in self._parts(text):
                    yield Document(part, split, (before + size * (progress or 0)) / total, skipped)
            before += size
        if not has_text:
            raise UserError(first_skipped)

    def _read(self, path: Path) -> Iterator[Document]:
        return read_documents(path, self.column, self.check)

    def _parts(self, text: str) -> Iterable[tuple[str, str]]:
        """Return a document in parts, each with its split."""
        if not text:
            return [("", TRAIN)]
        if self._pieces is None:
            return [(text, split_of(text.encode(), self.validation_fraction))]
        threshold, size = self._pieces
        if self.check is not check_text:
            return [(text, split_of(text.encode(), threshold) if len(text) <= size else TRAIN)]
        runs = itertools.groupby(
            pieces(text, size), lambda piece: split_of(piece.encode(), threshold)
        )
        return (("".join(run), split) for split, run in runs)

    @cached_property
    def _pieces(self) -> tuple[float, int] | None:
        def texts() -> Iterator[str]:
            documents = itertools.chain.from_iterable(map(self._read, self.paths))
            return (document.text for document in documents if document.text)

        return pieces_of_few(texts, self.validation_fraction, whole=self.check is not check_text)


def _expand(pattern: str) -> list[Path]:
    if not pattern:
        raise UserError("empty name between commas: remove a comma, or write . for this folder")
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() or each.is_symlink())
        known = [each for each in files if each.is_file() and each.name.endswith(tuple(READERS))]
        paths = [each for each in known if each.name not in _ABOUT_DATA]
        if others := [str(each.relative_to(path)) for each in files if each not in {*paths}]:
            say(f"{path}: skipped, not text ({len(others):,}): {', '.join(others[:5])}")
    elif path.exists() or not glob.has_magic(pattern):
        paths = [path]
    else:
        # Unlike glob's, pathlib's ** does not follow links to folders, which may lead back.
        base = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        rest = path.relative_to(base).as_posix()
        with library_errors_as(f"the pattern {pattern!r} cannot be read"):
            paths = sorted(each for each in base.glob(rest) if each.is_file())
        if "/." not in f"/{rest}":
            paths = [each for each in paths if "/." not in f"/{each.relative_to(base).as_posix()}"]
    if not paths:
        raise UserError(f"no file matches {pattern!r}")
    return paths


def _fingerprint(path: Path) -> dict[str, Any]:
    """Return name, size and a hash of both ends: cheap at any size, and independent of the folder."""
    with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
        size = path.stat().st_size
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
    digest = hashlib.blake2b(head + tail, digest_size=16).hexdigest()
    name = path.name.encode(errors="replace").decode()  # JSON holds no other bytes than UTF-8
    return {"name": name, "bytes": size, "ends": digest}


def read_documents(path: Path, column: str, check: Check = check_text) -> Iterator[Document]:
    """Yield the documents of one file, as `checked` does; a skipped one for a file without any.

    Raises `UserError`, naming the file and where possible the line, for an unknown suffix, a file that is
    truncated or not of its kind, and as `checked`.
    """
    is_empty = True
    with os_errors_as(f"cannot read {path}"):
        rows = _reader(path)(path, column if check is check_text else None)
        for document in checked(rows, column, check):
            is_empty = False
            yield document
    if is_empty:
        yield Document("", TRAIN, 1.0, f"{path}: no text in this file")


def checked(rows: Iterable[Row], column: str, check: Check) -> Iterator[Document]:
    """Yield the documents that `check` makes of rows, all of split `TRAIN`, without empty ones.

    A row for which it raises `SkippedRow`, and a line that is not a JSON object, become a skipped
    document. Raises `UserError` for a column that no row had before the first row that lacks it.
    """
    has_column = False
    for content, where, progress in rows:
        text = skipped = ""
        try:
            text = check(_values(content, where), column, where)
            has_column = True
            text.encode()
        except UnicodeEncodeError:
            text, skipped = "", f"{where}: column {column!r} holds a lone surrogate, not text"
        except SkippedRow as error:
            if isinstance(error, NoColumn) and not has_column:
                raise  # an option that is wrong for the whole text
            skipped = str(error)
        if text or skipped:
            yield Document(text, TRAIN, progress, skipped)


def _values(content: object, where: str) -> Mapping[str, Any]:
    if isinstance(content, bytes):
        try:
            content = json.loads(_decoded(content, where))
        except UserError as error:
            raise SkippedRow(str(error)) from error
        except (ValueError, RecursionError) as error:  # also for very long numbers and deep lists
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
    if (text := _decoded(path.read_bytes(), str(path))).strip():
        yield Row({column or "text": text}, str(path), 1.0)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open a file; yield its decompressed bytes, and a function that counts those read from it."""
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


def _read_json(path: Path, column: str | None) -> Iterator[Row]:
    """Read a row a line, or the rows of a `.json` file that is a list."""
    size = path.stat().st_size
    with _opened(path) as (file, tell):
        begin = file.peek().removeprefix(codecs.BOM_UTF8).lstrip()[:1]
        if begin != b"[" or not path.name.endswith((".json", ".json.gz")):
            for number, line in enumerate(file, 1):
                if not line.isspace():
                    yield Row(line, f"{path}:{number}", tell() / size)
            return
        text = _decoded(file.read(), str(path))
    with library_errors_as(f"{path}: not JSON"):
        rows = json.loads(text)
    for number, row in enumerate(rows, 1):
        yield Row(row, f"{path}, row {number}", number / len(rows))


def _read_csv(path: Path, column: str | None) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    size = path.stat().st_size
    with open(path, "rb") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        try:
            for row in rows:
                yield Row(row, f"{path}:{rows.line_num}", file.tell() / size)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{path}, after line {rows.line_num}: not CSV text: {error}") from error


def _read_parquet(path: Path, column: str | None) -> Iterator[Row]:
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            rows = file.metadata.num_rows
            if rows and column is not None and column not in names:
                raise UserError(f"{path}: {missing_column(column, names)}")
            for batch in file.iter_batches(256, columns=None if column is None else [column]):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(filled(values), f"{path}, row {number}", number / rows)
    except (pyarrow.ArrowException, UnicodeDecodeError, OverflowError) as error:
        place = f"{path}, after row {number}" if number else str(path)
        raise UserError(f"{place}: not a readable parquet file: {reason_of(error)}") from error


READERS: dict[str, Reader] = {
    ".jsonl": _read_json,
    ".jsonl.zst": _read_json,
    ".jsonl.gz": _read_json,
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
