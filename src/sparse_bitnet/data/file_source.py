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
    TRAIN,
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
from sparse_bitnet.progress import say

_HELD_OUT_DOCUMENTS = 10
"""Where fewer whole documents can be expected to be held out, pieces of them are."""

_SMALLEST_PIECE = 64
"""Characters, where a tenth of the text is less."""

_ABOUT_DATA = ("README.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files of a data set's folder that are not its text."""


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
            if path.stat().st_size == 0 and len(self.paths) == 1:
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
            **({} if self._of_few is None else {"piece": self._of_few[1]}),
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Documents of all files in order, from `state`."""
        # Of a document that is cut, the state is the place before it and how many parts are done.
        first, place, done = (
            (state[0], Place(*state[1:3]), state[3]) if state else (0, BEGINNING, 0)
        )
        sizes = [path.stat().st_size for path in self.paths]
        before, total = sum(sizes[:first]), sum(sizes)
        has_text, skipped = state is not None, ""
        for number in range(first, len(self.paths)):
            start = place if number == first else BEGINNING
            end = start
            for text, after, read, why in self._records(self.paths[number], start):
                parts = list(self._parts(text))
                for count, (part, split) in enumerate(parts[done:], done + 1):
                    position = [number, *after, 0] if count == len(parts) else [number, *end, count]
                    yield Document(part, split, position, (before + read) / total, why)
                end, done = after, 0
                has_text = has_text or not why
                skipped = skipped or why
            before += sizes[number]
            if end == BEGINNING:
                why = f"{self.paths[number]}: no text in this file"
                skipped = skipped or why
                yield Document("", TRAIN, [number + 1, *BEGINNING, 0], before / total, why)
        if not has_text:
            raise UserError(skipped)

    def _records(self, path: Path, start: Place = BEGINNING) -> Iterator[Record]:
        return read_records(path, self.column, start, self.check)

    def _parts(self, text: str) -> Iterable[tuple[str, str]]:
        if not text:
            return [("", TRAIN)]
        if self._of_few is None:
            return [(text, split_of(text.encode(), self.validation_fraction))]
        threshold, size = self._of_few
        if not self._is_whole:
            return by_pieces(text, threshold, size)
        return [(text, split_of(text.encode(), threshold) if len(text) <= size else TRAIN)]

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
            records = (each for path in self.paths for each in self._records(path))
            return (each.text for each in records if each.text)

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


def _expand(pattern: str) -> list[Path]:
    if not pattern:
        raise UserError(
            "one of the names of files is empty: leave out its comma, or write . for here"
        )
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        found = [each for each in files if is_readable(each) and each.name not in _ABOUT_DATA]
        if left_out := [str(each.relative_to(path)) for each in files if each not in {*found}]:
            more = ", ..." if len(left_out) > 5 else ""
            count = f"{len(left_out):,} file{'s' * (len(left_out) > 1)}"
            say(f"{path}: left out {count} of other kinds: {', '.join(left_out[:5])}{more}")
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
