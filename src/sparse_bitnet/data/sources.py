# SPDX-License-Identifier: Apache-2.0
"""The sources of text: installed Python files, local files, data sets of the Hugging Face hub."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from sparse_bitnet.data.chat import check_conversation
from sparse_bitnet.data.documents import TRAIN, VALIDATION, Document, split_of
from sparse_bitnet.data.file_source import (
    Check,
    FileSource,
    Row,
    check_text,
    checked,
    filled,
    missing_column,
)
from sparse_bitnet.data.near_duplicates import regrouped
from sparse_bitnet.errors import UserError, library_errors_as, reason_of

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
# Repetitive tables of characters, and the language reference as one string.
_SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
_GENERATED = ("/stringprep.py", "/html/entities.py")


@dataclass(kw_only=True)
class TextSource:
    """Text to prepare: one source, or one for training and one for validation.

    It is read in a fixed order, and the splits of a single source come mixed.
    """

    train: "Source"
    validation: "Source | None" = None
    """Source of the validation text; None: the part that `train` holds out."""

    limit_bytes: int | None = None
    """Stop `train` after the document that reaches this many bytes of text; it is not cut."""

    grouped: bool = False
    """Near-duplicates do not lie on both sides of the split (`near_duplicates`)."""

    beside: tuple["Source", ...] = ()
    """Plain text that follows the conversations of `train`, all of it for training. The sources take
    turns: next comes the one of which the fewest bytes have been read."""

    beside_bytes: int | None = None
    """Stop `beside` after the document that reaches this many bytes of text."""

    _moved: dict[int, str | None] | None = field(default=None, init=False, repr=False)

    def describe(self) -> dict[str, Any]:
        """Describe the text as JSON, equal for equal text. The manifest stores it."""
        text = self.train.describe()
        if self.limit_bytes is not None:
            text["limit_bytes"] = self.limit_bytes
        if self.validation is not None:
            text = {"train": text, "validation": self.validation.describe()}
        if self.beside:
            sources = [each.describe() for each in self.beside]
            text["beside"] = {"sources": sources, "limit_bytes": self.beside_bytes}
        return {**text, "near_duplicates": "grouped"} if self.grouped else text

    def documents(self) -> Iterator[Document]:
        """Yield the documents; every call yields the same ones.

        Raises `UserError` for text that cannot be read, or without any document.
        """
        moved = self.regroup()
        for number, document in enumerate(self._documents()):
            if (side := moved.get(number, document.split)) is not None:
                yield document._replace(split=side)
        size, read = 0, {each.documents(): 0 for each in self.beside}
        while read and size < (self.beside_bytes or float("inf")):
            turn = min(read, key=read.__getitem__)
            if plain := next(turn, None):
                yield plain._replace(progress=None, beside=True)
                size += (length := len(plain.text.encode()))
                read[turn] += length
            else:
                del read[turn]

    def regroup(self, on_bytes: Callable[[int], None] = lambda size: None) -> dict[int, str | None]:
        """Return `near_duplicates.regrouped` of the text, which the first call reads for that."""
        if self._moved is None:
            self._moved = {}
            if self.grouped:
                paired = self.validation is not None
                self._moved = regrouped(self._documents(), keep_held_out=paired, on_bytes=on_bytes)
        return self._moved

    def _documents(self) -> Iterator[Document]:
        size, limit = 0, self.limit_bytes or float("inf")
        for document in self.train.documents():
            size += len(document.text.encode())
            progress = max(document.progress or 0.0, min(1.0, size / limit))
            split = TRAIN if self.validation is not None else document.split
            yield document._replace(split=split, progress=progress)
            if size >= limit:
                break
        if self.validation is not None:
            # The two sizes are not comparable: only the larger source shows a remaining time.
            for document in self.validation.documents():
                yield document._replace(split=VALIDATION, progress=None)


def parse_source(
    spec: str,
    *,
    column: str | None = None,
    validation: str | None = None,
    validation_fraction: float | None = None,
    limit_bytes: int | None = None,
    near_duplicates: bool = True,
    chat: bool = False,
    beside: str | None = None,
    beside_bytes: int | None = None,
) -> TextSource:
    """Return the text that a command line names: the options of `sparse-bitnet prepare`.

    `spec` is "python-stdlib"; "python-packages"; a path, glob or folder, or several separated by
    commas; or "hub:OWNER/NAME[/CONFIG][@SPLIT]".

    Raises `UserError` for a name that matches nothing, an empty or unknown file, and contradictions.
    """
    if validation is not None and validation_fraction is not None:
        raise UserError("give --validation or --validation-fraction, not both")
    if not 0 <= (validation_fraction or 0) < 1:
        raise UserError(
            f"validation fraction {validation_fraction} is not in [0, 1): 0.01 means one percent"
        )
    for name, limit in (("limit", limit_bytes), ("beside", beside_bytes)):
        if limit is not None and limit < 1:
            raise UserError(f"--{name}-bytes {limit}: must be at least 1")
    if (beside or beside_bytes) and not (chat and beside):
        raise UserError("--beside needs --chat, and --beside-bytes needs --beside")
    python = [each for each in (spec, validation) if each in ("python-stdlib", "python-packages")]
    if python and (chat or (column and {*python} == {spec, validation or spec})):
        raise UserError(f"{python[0]} has no columns; leave out {'--chat' if chat else '--column'}")
    column = column or ("messages" if chat else None)
    held_out = None if validation is None else _parse(validation, column, 0.0, chat)
    train = _parse(spec, column, validation_fraction if held_out is None else 0.0, chat)
    is_same = held_out is not None and train.describe() == held_out.describe()
    if isinstance(train, FileSource) and isinstance(held_out, FileSource):
        is_same |= {*map(os.path.realpath, train.paths)} == {*map(os.path.realpath, held_out.paths)}
    if is_same:
        raise UserError(f"--validation {validation} is SOURCE itself: name other text")
    return TextSource(
        train=train,
        validation=held_out,
        limit_bytes=limit_bytes,
        grouped=near_duplicates and not spec.startswith("hub:"),
        beside=tuple(_parse(each, None, 0.0, False) for each in (_names(beside) if beside else ())),
        beside_bytes=beside_bytes,
    )


def _names(spec: str) -> list[str]:
    """Return the sources that commas separate in a name, once each."""
    return [spec] if os.path.exists(spec) else [*dict.fromkeys(spec.split(","))]


def _parse(spec: str, column: str | None, held_out: float | None, chat: bool) -> "Source":
    options: dict[str, Any] = {} if held_out is None else {"validation_fraction": held_out}
    if spec in ("python-stdlib", "python-packages"):
        keys = ("stdlib",) if spec == "python-stdlib" else ("purelib", "platlib")
        roots = dict.fromkeys(Path(sysconfig.get_path(key)).resolve() for key in keys)
        return PythonSource(name=spec, roots=tuple(roots), **options)
    if column is not None:
        options.update(column=column, check=check_conversation if chat else check_text)
    if spec.startswith("hub:"):
        return HubSource.parse(spec.removeprefix("hub:"), **options)
    return FileSource.matching(_names(spec), **options)


@dataclass(frozen=True, kw_only=True)
class PythonSource:
    """The `.py` files below some folders, one document each, ordered by a hash of their paths.

    Left out: tests, because distributions of Python ship them or not (they are 60 % of the bytes of
    a full installation); generated tables; build settings, which differ between machines; files that
    are empty, binary or not UTF-8; and further copies of the same content. A file's split follows from
    its path below its root.
    """

    name: str
    roots: tuple[Path, ...]
    validation_fraction: float = 0.03

    def describe(self) -> dict[str, Any]:
        """Return version, number, size and content of the files: what identifies the text."""
        content = hashlib.blake2b(b"".join(map(_digest, self._files)), digest_size=16)
        return {
            "kind": self.name,
            "python": ".".join(map(str, sys.version_info[:3])),
            "files": len(self._files),
            "bytes": sum(len(text.encode()) for text in self._files),
            "content": content.hexdigest(),
            "validation_fraction": self.validation_fraction,
        }

    def documents(self) -> Iterator[Document]:
        """Yield one document per file."""
        read, total = 0, sum(map(len, self._files))
        for text, relative in self._files.items():
            read += len(text)
            split = split_of(relative.encode(), self.validation_fraction)
            yield Document(text, split, read / total)

    @cached_property
    def _files(self) -> dict[str, str]:
        """Return the texts in order, by path below the root."""

        def order(file: tuple[str, str]) -> tuple[bytes, bytes]:
            # Salted, so that the order says nothing about the split: unsalted, the smallest hashes
            # would be both the first files and the validation files.
            return _digest(file[0], salt=b"order"), _digest(file[1])

        unique: dict[str, str] = {}
        files = chain.from_iterable(map(_python_files, self.roots))
        for relative, text in sorted(files, key=order):
            unique.setdefault(text, relative)
        if not unique:
            folders = ", ".join(map(str, self.roots))
            raise UserError(f"{self.name}: no Python source files under {folders}")
        return unique


def _digest(text: str, salt: bytes = b"") -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, salt=salt).digest()


def _python_files(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the path below `root` and the text of each file."""
    for folder, folders, names in os.walk(root):
        kept = {*folders} - _SKIPPED_FOLDERS
        folders[:] = [name for name in kept if not name.startswith("config-")]
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            if path.as_posix().endswith(_GENERATED) or path.name.startswith("_sysconfigdata"):
                continue
            try:
                text = path.read_bytes().decode("utf-8-sig")
            except (UnicodeDecodeError, OSError):
                continue
            if text and "\0" not in text:
                yield path.relative_to(root).as_posix(), text.replace("\r\n", "\n")


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

    @classmethod
    def parse(cls, spec: str, **options: Any) -> "HubSource":
        """Parse `OWNER/NAME[/CONFIG][@SPLIT]`, or the path of a local folder."""
        if os.path.isdir(spec):
            return cls(name=spec, **options)
        path, _, split = spec.partition("@")
        parts = path.split("/")
        if len(parts) > 3 or not all(parts):
            raise UserError(f"not a hub data set: {spec!r}; expected OWNER/NAME[/CONFIG][@SPLIT]")
        config = parts[2] if len(parts) == 3 else None
        return cls(name="/".join(parts[:2]), config=config, split=split or "train", **options)

    def describe(self) -> dict[str, Any]:
        """Return the data set and the options that identify the text."""
        return {"kind": "hub"} | {key: each for key, each in vars(self).items() if key != "check"}

    def documents(self) -> Iterator[Document]:
        """Yield the documents as the hub streams them."""
        has_text = False
        for text, _, _, skipped, _ in checked(self._rows(self._open()), self.column, self.check):
            has_text = has_text or bool(text)
            split = TRAIN if skipped else split_of(text.encode(), self.validation_fraction)
            yield Document(text, split, None, skipped)
        if not has_text:
            raise UserError(f"{self.name}: no documents")

    def _open(self) -> Any:
        import datasets
        import huggingface_hub

        with library_errors_as(f"cannot open the hub data set {self.name!r}"):
            if not os.path.isdir(self.name):
                # One request fails at once without network, whereas load_dataset keeps trying.
                huggingface_hub.dataset_info(self.name, timeout=10)
            stream = datasets.load_dataset(self.name, self.config, split=self.split, streaming=True)
        names = stream.column_names
        if names is None or self.check is not check_text:
            return stream
        if self.column not in names:
            raise UserError(f"{self.name}: {missing_column(self.column, names)}")
        return stream.select_columns([self.column])

    def _rows(self, stream: Any) -> Iterator[Row]:
        try:
            for values in stream:
                yield Row(filled(values), self.name, 0)
        except Exception as error:  # whatever the network, the hub client or a broken file raises
            raise UserError(
                f"reading {self.name!r} stopped: {reason_of(error)}; the same command resumes"
            ) from error


Source = FileSource | PythonSource | HubSource
"""A source has a name, describes its text, and yields documents, of which it holds some out."""
