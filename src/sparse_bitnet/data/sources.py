# SPDX-License-Identifier: Apache-2.0
"""The sources of text: installed Python files, local files, data sets of the Hugging Face hub."""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from sparse_bitnet.data.chat import check_conversation
from sparse_bitnet.data.documents import (
    TRAIN,
    Document,
    LimitedSource,
    PairedSource,
    State,
    TextSource,
    numbered,
    split_of,
)
from sparse_bitnet.data.file_source import (
    Check,
    FileSource,
    NoColumn,
    SkippedRow,
    check_text,
    filled,
    missing_column,
)
from sparse_bitnet.data.near_duplicates import SeparatedSource
from sparse_bitnet.errors import UserError, reason_of

_SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
# Tables of characters, one much like the other, and the language reference as one string.
_SKIPPED_FOLDERS |= {"encodings", "pydoc_data"}
_GENERATED = ("/stringprep.py", "/html/entities.py")


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
            (`near_duplicates.SeparatedSource`).
        chat: the column, "messages" if not given, holds conversations, which become documents of JSON.

    Raises:
        UserError: for a name that matches nothing, an empty or unknown file, and contradictions.
    """
    if validation is not None and validation_fraction is not None:
        raise UserError("give --validation or --validation-fraction, not both")
    if not 0 <= (validation_fraction or 0) < 1:
        raise UserError(
            f"validation fraction {validation_fraction} is not in [0, 1): 0.01 means one percent"
        )
    for what, limit in (("documents", limit_documents), ("bytes", limit_bytes)):
        if limit is not None and limit < 1:
            raise UserError(f"a limit of {limit} {what} leaves nothing to prepare")
    named = [each for each in (spec, validation) if each is not None]
    python = [each for each in named if each in ("python-stdlib", "python-packages")]
    if python and (chat or (column and python == named)):
        raise UserError(f"{python[0]} has no columns; leave out {'--chat' if chat else '--column'}")
    if chat and column is None:
        column = "messages"
    source = _parse(spec, column, 0.0 if validation is not None else validation_fraction, chat)
    if limit_documents is not None or limit_bytes is not None:
        source = LimitedSource(
            source=source, documents_limit=limit_documents, bytes_limit=limit_bytes
        )
    if validation is not None:
        source = PairedSource(train=source, validation=_parse(validation, column, 0.0, chat))
    return _separated(source, afterwards=spec.startswith("hub:")) if near_duplicates else source


def _parse(
    spec: str, column: str | None, validation_fraction: float | None, chat: bool
) -> TextSource:
    options: dict[str, Any] = {}
    if validation_fraction is not None:
        options["validation_fraction"] = validation_fraction
    paths = sysconfig.get_paths()
    if spec == "python-stdlib":
        return PythonSource(name=spec, roots=(Path(paths["stdlib"]),), **options)
    if spec == "python-packages":
        roots = dict.fromkeys(Path(paths[key]).resolve() for key in ("purelib", "platlib"))
        return PythonSource(name=spec, roots=tuple(roots), **options)
    if column is not None:
        options.update(column=column, check=check_conversation if chat else check_text)
    if spec.startswith("hub:"):
        return HubSource.parse(spec.removeprefix("hub:"), **options)
    return FileSource.matching([spec] if os.path.exists(spec) else spec.split(","), **options)


def _separated(source: TextSource, *, afterwards: bool) -> TextSource:
    """Without near-duplicates on both sides; a text that the user gave to be held out stays whole."""
    if afterwards and isinstance(source, PairedSource):
        return source
    return SeparatedSource(source=source, afterwards=afterwards)


def part_of(source: TextSource, part: int, parts: int) -> TextSource:
    """One of `parts` disjoint parts of a source, which together are all of it.

    Files are dealt out in turn, those of a hub data set too; a separate validation source goes to the
    first part. Near-duplicates are looked for when the parts are joined. Raises `UserError` for a source
    that has fewer files than parts, or no files.
    """
    if isinstance(source, SeparatedSource):
        return _separated(part_of(source.source, part, parts), afterwards=True)
    if isinstance(source, PairedSource):
        train = part_of(source.train, part, parts)
        return replace(source, train=train) if part == 0 else train
    if isinstance(source, HubSource):
        return replace(source, part=part, parts=parts)
    if isinstance(source, LimitedSource):
        raise UserError(
            "limits of documents or bytes are those of a whole text: no parts with them"
        )
    if not isinstance(source, FileSource):
        raise UserError(f"{source.name} cannot be prepared in parts: give files or a hub data set")
    if len(source.paths) < parts:
        raise UserError(f"{source.name}: {len(source.paths)} files do not make {parts} parts")
    return replace(source, paths=source.paths[part::parts])


@dataclass(frozen=True, kw_only=True)
class PythonSource:
    """The `.py` files below some folders, one document each, ordered by a hash of their paths.

    The standard library of Python 3.11.7 gives 577 files with 9.46 MB for training and 25 files with
    0.36 MB (3.7 %) for validation; a Python without tkinter or distutils somewhat less.

    Left out: tests, because distributions of Python ship them or not (they are 60 % of the bytes of
    a full installation); generated tables; build settings, which differ between machines; files that
    are empty, binary or not UTF-8; and further copies of the same content. A file's split follows from
    its path below its root.
    """

    name: str
    roots: tuple[Path, ...]
    validation_fraction: float = 0.03

    def describe(self) -> dict[str, Any]:
        """Version, number, size and content of the files: what identifies the text."""
        content = hashlib.blake2b(digest_size=16)
        for file in self._files:
            content.update(file.content_hash)
        return {
            "kind": self.name,
            "python": ".".join(map(str, sys.version_info[:3])),
            "files": len(self._files),
            "bytes": sum(file.size for file in self._files),
            "content": content.hexdigest(),
            "validation_fraction": self.validation_fraction,
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """A document a file, from the file after `state`."""
        return numbered(self._documents(), state)

    def _documents(self) -> Iterator[Document]:
        read, total = 0, sum(file.size for file in self._files)
        for file in self._files:
            read += file.size
            split = split_of(file.relative.encode(), self.validation_fraction)
            yield Document(file.text, split, read / total)

    @cached_property
    def _files(self) -> list["_PythonFile"]:
        files = []
        for root in self.roots:
            for path in _python_paths(root):
                if text := _python_text(path):
                    content, relative = text.encode(), path.relative_to(root).as_posix()
                    # Salted, so that the order says nothing about the split: unsalted, the smallest
                    # hashes would be both the first files and the validation files.
                    order = hashlib.blake2b(relative.encode(), digest_size=16, salt=b"order")
                    digest = hashlib.blake2b(content, digest_size=16).digest()
                    files.append(_PythonFile(order.digest(), digest, relative, text, len(content)))
        if not files:
            folders = ", ".join(map(str, self.roots))
            raise UserError(f"{self.name}: no Python source files under {folders}")
        unique: dict[bytes, _PythonFile] = {}
        for file in sorted(files):
            unique.setdefault(file.content_hash, file)
        return list(unique.values())


class _PythonFile(NamedTuple):
    order: bytes
    content_hash: bytes
    relative: str
    text: str
    size: int


def _python_paths(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _SKIPPED_FOLDERS and name[:7] != "config-"
        )
        for name in sorted(names):
            path = Path(folder, name)
            generated = path.as_posix().endswith(_GENERATED) or name.startswith("_sysconfigdata")
            if name.endswith(".py") and not generated:
                yield path


def _python_text(path: Path) -> str | None:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (UnicodeDecodeError, OSError):
        return None
    return None if "\0" in text else text.replace("\r\n", "\n")


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
        """The data set and the options that identify the text."""
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
        has_text, characters, rows = state is not None, 0, iter(stream)
        while (row := self._next(rows)) is not None:
            try:
                text = self.check(filled(row), self.column, self.name)
            except SkippedRow as reason:
                if isinstance(reason, NoColumn) and not has_text:
                    raise  # an option that is wrong for the whole data set
                yield Document("", TRAIN, None, str(reason))
                continue
            if not text:
                continue
            has_text, characters, position = True, characters + len(text), None
            # A state is a few nested dictionaries: cheap for each MB of text, not for each document.
            if characters >= 1 << 20:
                position, characters = stream.state_dict(), 0
            split = split_of(text.encode(), self.validation_fraction)
            yield Document(text, split, None, state=position)
        if not has_text:
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
                f"cannot open the hub data set {self.name!r}: {reason_of(error)}"
            ) from error
        if self.parts > 1:
            if stream.num_shards < self.parts:
                raise UserError(
                    f"{self.name}: {stream.num_shards} files do not make {self.parts} parts"
                )
            stream = stream.shard(num_shards=self.parts, index=self.part)
        names = stream.column_names
        if names is None or self.check is not check_text:
            return stream
        if self.column not in names:
            raise UserError(f"{self.name}: {missing_column(self.column, names)}")
        return stream.select_columns([self.column])

    def _next(self, rows: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        try:
            return next(rows, None)
        except Exception as error:
            raise UserError(
                f"reading {self.name!r} stopped: {reason_of(error)}; the same command resumes from here"
            ) from error
