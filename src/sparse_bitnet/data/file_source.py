# SPDX-License-Identifier: Apache-2.0
"""Text of local files."""

import glob
import hashlib
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparse_bitnet.data.documents import (
    PIECE_CHARACTERS,
    Document,
    State,
    by_pieces,
    check_fraction,
    pieces,
    split_of,
    uniform_hash,
)
from sparse_bitnet.data.text_files import (
    BEGINNING,
    READERS,
    Check,
    Place,
    Record,
    check_text,
    is_readable,
    read_records,
)
from sparse_bitnet.errors import UserError, os_errors_as

_HELD_OUT_DOCUMENTS = 10
"""Where fewer whole documents can be expected to be held out, pieces of them are."""


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

        many = math.ceil(min(_HELD_OUT_DOCUMENTS / self.validation_fraction, sys.maxsize // 2))
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
    if not pattern:
        raise UserError(
            "one of the names of files is empty: leave out its comma, or write . for here"
        )
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
    with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
        size = path.stat().st_size
        head = file.read(1 << 16)
        file.seek(max(0, size - (1 << 16)))
        tail = file.read()
    digest = hashlib.blake2b(head + tail, digest_size=16).hexdigest()
    return {"name": path.name, "bytes": size, "ends": digest}
