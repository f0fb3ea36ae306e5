# SPDX-License-Identifier: Apache-2.0
"""The sources of text: installed Python files, local files, data sets of the Hugging Face hub."""

import glob
import hashlib
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sparse_bitnet.data.chat import check_messages
from sparse_bitnet.data.documents import (
    PIECE_CHARACTERS,
    Document,
    LimitedSource,
    PairedSource,
    State,
    TextSource,
    by_pieces,
    check_fraction,
    pieces,
    split_of,
    uniform_hash,
)
from sparse_bitnet.data.near_duplicates import GroupedSource, ReadOnceSource
from sparse_bitnet.data.python_files import PythonSource
from sparse_bitnet.data.text_files import (
    BEGINNING,
    READERS,
    Check,
    Place,
    Record,
    check_text,
    first_line,
    is_readable,
    missing_column,
    read_records,
)
from sparse_bitnet.errors import UserError

_HELD_OUT_DOCUMENTS = 10
"""Where fewer whole documents can be expected to be held out, pieces of them are."""


def parse_source(
    spec: str,
    *,
    column: str | None = None,
    validation: str | None = None,
    validation_fraction: float | None = None,
    limit_documents: int | None = None,
    limit_bytes: int | None = None,
    near_duplicates: bool = True,
    chat: bool = False,
) -> TextSource:
    """The source that a command line names.

    `spec` is "python-stdlib"; "python-packages"; a path, glob or folder, or several separated by
    commas; or "hub:OWNER/NAME[/CONFIG][@SPLIT]".

    Args:
        column: of the text in .jsonl, .parquet and hub data sets; default "text".
        validation: another source, whose documents are the validation text.
        validation_fraction: of the documents, by hash; default 0.03 for Python files, 0.01 for
            local files, 0.0005 for hub data sets.
        limit_documents, limit_bytes: stop after this many; `validation` is not limited.
        near_duplicates: keep documents that are nearly the same on one side of the split
            (`near_duplicates.GroupedSource`); of hub data sets, leave those held out that are near
            training text (`near_duplicates.ReadOnceSource`).
        chat: the column, "messages" if not given, holds conversations, which become documents of JSON.

    Raises:
        UserError: for a name that matches nothing, an empty or unknown file, and contradictions.
    """
    if validation is not None and validation_fraction is not None:
        raise UserError("give --validation or --validation-fraction, not both")
    if {spec, validation} <= {"python-stdlib", "python-packages", None} and (column or chat):
        option = "--chat" if chat else "--column"
        raise UserError(f"{spec} has no columns; leave out {option}")
    if chat and column is None:
        column = "messages"
    fraction = 0.0 if validation is not None else validation_fraction
    source = _parse(spec, column, fraction, chat)
    if limit_documents is not None or limit_bytes is not None:
        source = LimitedSource(
            source=source, documents_limit=limit_documents, bytes_limit=limit_bytes
        )
    if validation is not None:
        source = PairedSource(train=source, validation=_parse(validation, column, 0.0, chat))
    if not near_duplicates:
        return source
    return _read_once(source) if spec.startswith("hub:") else GroupedSource(source=source)


def part_of(source: TextSource, part: int, parts: int) -> TextSource:
    """One of `parts` disjoint parts of a source, which together are all of it.

    Files are dealt out in turn, those of a hub data set too; a separate validation source goes to the
    first part. Near-duplicates are looked for when the parts are joined. Raises `UserError` for a source
    that has fewer files than parts, or no files.
    """
    if not 0 <= part < parts:
        raise UserError(f"part {part} of {parts}: parts are numbered 0 to {parts - 1}")
    if isinstance(source, GroupedSource | ReadOnceSource):
        return _read_once(part_of(source.source, part, parts))
    if isinstance(source, PairedSource):
        train = part_of(source.train, part, parts)
        return replace(source, train=train) if part == 0 else train
    if isinstance(source, HubSource):
        return replace(source, part=part, parts=parts)
    if not isinstance(source, FileSource):
        raise UserError(f"{source.name} cannot be prepared in parts: give files or a hub data set")
    if len(source.paths) < parts:
        raise UserError(f"{source.name}: {len(source.paths)} files do not make {parts} parts")
    return replace(source, paths=source.paths[part::parts])


def _read_once(source: TextSource) -> TextSource:
    """Without near-duplicates in the end; a text that the user gave to be held out stays whole."""
    return source if isinstance(source, PairedSource) else ReadOnceSource(source=source)


def _parse(
    spec: str, column: str | None, validation_fraction: float | None, chat: bool
) -> TextSource:
    options: dict[str, Any] = {}
    if validation_fraction is not None:
        options["validation_fraction"] = validation_fraction
    if spec == "python-stdlib":
        return PythonSource.standard_library(**options)
    if spec == "python-packages":
        return PythonSource.installed_packages(**options)
    if column is not None:
        options.update(column=column, check=check_messages if chat else check_text)
    if spec.startswith("hub:"):
        return HubSource.parse(spec.removeprefix("hub:"), **options)
    return FileSource.matching([spec] if os.path.exists(spec) else spec.split(","), **options)


@dataclass(frozen=True, kw_only=True)
class FileSource:
    """Local files in the order given; see `text_files` for the kinds.

    A document goes to validation by the hash of its text, so copies of it stay on one side. Where the
    documents are too few for that, long ones are cut, and pieces are held out instead, at least one.
    """

    name: str
    paths: tuple[Path, ...]
    column: str = "text"
    check: Check = check_text
    validation_fraction: float = 0.01

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)
        for path in self.paths:
            if not path.exists():
                is_like_a_hub_name = len(path.parts) == 2 and not path.suffix
                hint = f"; a hub data set is hub:{path}" if is_like_a_hub_name else ""
                raise UserError(f"no such file: {path}{hint}")
            if path.stat().st_size == 0:
                raise UserError(f"{path}: the file is empty")
            if not is_readable(path):
                raise UserError(f"{path}: unknown kind of file; known are {', '.join(READERS)}")

    @classmethod
    def matching(cls, patterns: Sequence[str], **options: Any) -> "FileSource":
        """Every file that the paths, globs (`**` included) and folders name, each once.

        A folder stands for all files of the known kinds below it; what a pattern matches is taken
        in sorted order. Raises `UserError` for a pattern that matches nothing.
        """
        paths: dict[Path, None] = {}
        for pattern in patterns:
            paths.update(dict.fromkeys(_expand(pattern)))
        return cls(name=", ".join(patterns), paths=tuple(paths), **options)

    def describe(self) -> dict[str, Any]:
        """The files and options that identify the text."""
        return {
            "kind": "files",
            "files": [_fingerprint(path) for path in self.paths],
            "column": self.column,
            "validation_fraction": self.validation_fraction,
            **({} if self._piece_threshold is None else {"piece": PIECE_CHARACTERS}),
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Documents of all files in order, from `state`."""
        # Of a document that is cut, the state is the place before it and how many parts are done.
        first, place, done = (
            (state[0], Place(*state[1:3]), state[3]) if state else (0, BEGINNING, 0)
        )
        sizes = [path.stat().st_size for path in self.paths]
        before, total = sum(sizes[:first]), sum(sizes)
        for number in range(first, len(self.paths)):
            start = place if number == first else BEGINNING
            end = start
            for text, after, read in self._records(self.paths[number], start):
                parts = list(self._parts(text))
                for count, (part, split) in enumerate(parts[done:], done + 1):
                    position = [number, *after, 0] if count == len(parts) else [number, *end, count]
                    yield Document(part, split, position, (before + read) / total)
                end, done = after, 0
            if end == BEGINNING:
                raise UserError(f"{self.paths[number]}: no text in this file")
            before += sizes[number]

    def _records(self, path: Path, start: Place = BEGINNING) -> Iterator[Record]:
        return read_records(path, self.column, start, self.check)

    def _parts(self, text: str) -> Iterable[tuple[str, str]]:
        threshold = self._piece_threshold
        if threshold is None or self._is_whole:
            fraction = self.validation_fraction if threshold is None else threshold
            return [(text, split_of(text.encode(), fraction))]
        return by_pieces(text, threshold)

    @property
    def _is_whole(self) -> bool:
        """Whether documents cannot be cut: conversations."""
        return self.check is not check_text

    @cached_property
    def _piece_threshold(self) -> float | None:
        """Pieces whose hash is below it are held out; None: whole documents are, as they are many."""
        if not self.validation_fraction:
            return None

        def texts() -> Iterator[str]:
            return (each.text for path in self.paths for each in self._records(path))

        many = math.ceil(_HELD_OUT_DOCUMENTS / self.validation_fraction)
        if sum(1 for _ in itertools.islice(texts(), many)) == many:
            return None
        smallest, count = 1.0, 0
        cut = itertools.chain.from_iterable(map(pieces, texts()))
        for piece in texts() if self._is_whole else cut:
            smallest, count = min(smallest, uniform_hash(piece.encode())), count + 1
            if smallest < self.validation_fraction and count > 1:
                return self.validation_fraction
        return math.nextafter(smallest, 1.0) if count > 1 else 0.0


def _expand(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.is_file() and is_readable(file))
    elif path.exists() or not glob.has_magic(pattern):
        found = [path]
    else:
        found = sorted(map(Path, glob.glob(str(path), recursive=True)))
        found = [file for file in found if file.is_file()]
    if not found:
        raise UserError(f"no file matches {pattern!r}")
    return found


def _fingerprint(path: Path) -> dict[str, Any]:
    """Name, size and a hash of both ends: cheap at any size, the same wherever the file lies."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(1 << 16)
            file.seek(max(0, size - (1 << 16)))
            tail = file.read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    digest = hashlib.blake2b(head + tail, digest_size=16).hexdigest()
    return {"name": path.name, "bytes": size, "ends": digest}


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A data set of the Hugging Face hub (or a local folder of one), streamed.

    RefinedWeb is `HubSource(name="tiiuae/falcon-refinedweb", column="content")`.
    """

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"
    check: Check = check_text
    validation_fraction: float = 0.0005
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        check_fraction(self.validation_fraction)

    @classmethod
    def parse(cls, spec: str, **options: Any) -> "HubSource":
        """`OWNER/NAME[/CONFIG][@SPLIT]`, or the path of a local folder."""
        if os.path.isdir(spec):
            return cls(name=spec, **options)
        path, _, split = spec.partition("@")
        parts = path.split("/")
        if len(parts) > 3 or not all(parts):
            raise UserError(f"not a hub data set: {spec!r}; expected OWNER/NAME[/CONFIG][@SPLIT]")
        config = parts[2] if len(parts) == 3 else None
        return cls(name="/".join(parts[:2]), config=config, split=split or "train", **options)

    def describe(self) -> dict[str, Any]:
        """The data set, its revision and the options that identify the text."""
        return {
            "kind": "hub",
            "name": self.name,
            "config": self.config,
            "split": self.split,
            "column": self.column,
            "validation_fraction": self.validation_fraction,
            **({"part": self.part, "parts": self.parts} if self.parts > 1 else {}),
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Documents as the hub streams them, from `state`."""
        stream = self._open()
        if state:
            stream.load_state_dict(state)
        found = state is not None
        characters = 0
        rows = iter(stream)
        while (row := self._next(rows)) is not None:
            if self.column not in row:
                raise UserError(missing_column(self.name, self.column, row))
            if not (text := self.check(row[self.column], self.column, self.name)):
                continue
            found = True
            characters += len(text)
            position = None
            # A state is a few nested dictionaries: cheap for each MB of text, not for each document.
            if characters >= 1 << 20:
                position, characters = stream.state_dict(), 0
            split = split_of(text.encode(), self.validation_fraction)
            yield Document(text, split, position, None)
        if not found:
            raise UserError(f"{self.name}: no documents")

    def _open(self) -> Any:
        import datasets
        import huggingface_hub

        # Whatever the network, the hub client or a broken file raises, the user's question is which
        # data set and why.
        try:
            if not os.path.isdir(self.name):
                # One request that answers at once where there is no network: load_dataset tries for long.
                huggingface_hub.dataset_info(self.name, timeout=10)
            stream = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        except Exception as error:
            raise UserError(
                f"cannot open the hub data set {self.name!r}: {first_line(error)}"
            ) from error
        if self.parts > 1:
            if stream.num_shards < self.parts:
                raise UserError(
                    f"{self.name}: {stream.num_shards} files do not make {self.parts} parts"
                )
            stream = stream.shard(num_shards=self.parts, index=self.part)
        if (names := stream.column_names) is None:
            return stream
        if self.column not in names:
            raise UserError(missing_column(self.name, self.column, names))
        return stream.select_columns([self.column])

    def _next(self, rows: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return next(rows, None)
        except Exception as error:
            raise UserError(
                f"reading {self.name!r} stopped: {first_line(error)}; the same command goes on from here"
            ) from error
