# SPDX-License-Identifier: Apache-2.0
"""The interface of every source of text, and the two ways to combine sources."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

TRAIN, VALIDATION = SPLITS = ("train", "validation")

State = Any
"""A JSON value that only the source which made it understands: where to continue."""


class Document(NamedTuple):
    """One text of a source."""

    text: str
    split: str
    """`TRAIN` or `VALIDATION`."""
    progress: float | None
    """Fraction of the source read so far, None where its size is unknown."""
    skipped: str = ""
    """Why there is no text: a row that is no document, or a file without any."""
    state: State = None
    """`TextSource.documents(state)` continues after this document; None: not from here."""


class TextSource(Protocol):
    """Text to prepare. It is read in one pass and a fixed order; both splits come mixed.

    A document's split follows from a hash of what it is, never from its position, so that a longer
    or shorter preparation of the same text puts every document on the same side.
    """

    @property
    def name(self) -> str:
        """A short name, for messages."""
        ...

    def describe(self) -> dict[str, Any]:
        """Describe the text as JSON, equal for equal text. The manifest stores it."""
        ...

    def documents(self, state: State = None) -> Iterator[Document]:
        """Yield the documents from the beginning, or from after the one that carried `state`.

        Raises `UserError` for text that cannot be read, and where there is none.
        """
        ...


def numbered(documents: Iterable[Document], state: State) -> Iterator[Document]:
    """Yield the documents after the first `state`, each with its number as its state: reading the others
    again takes a small part of the time that tokenising them took."""
    for number, document in enumerate(documents, 1):
        if number > (state or 0):
            yield document._replace(state=number)


def uniform_hash(content: bytes) -> float:
    """A number in [0, 1) that is fixed by the content; below a fraction means validation."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest()) / 2**48


def split_of(content: bytes, validation_fraction: float) -> str:
    """The split of the document with this content (or this path, where that identifies it)."""
    return VALIDATION if uniform_hash(content) < validation_fraction else TRAIN


@dataclass(frozen=True, kw_only=True)
class LimitedSource:
    """The first part of a source: at most this many documents, and this many bytes of text.

    The document that reaches `bytes` is the last one; it is not cut.
    """

    source: TextSource
    documents_limit: int | None = None
    bytes_limit: int | None = None

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    def describe(self) -> dict[str, Any]:
        """Return the source's description, with these limits."""
        return {
            **self.source.describe(),
            "limit_documents": self.documents_limit,
            "limit_bytes": self.bytes_limit,
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Those of the source up to the first limit."""
        inner, count, size = state or (None, 0, 0)
        documents_limit = self.documents_limit or float("inf")
        bytes_limit = self.bytes_limit or float("inf")
        if count >= documents_limit or size >= bytes_limit:
            return
        for document in self.source.documents(inner):
            count += not document.skipped
            size += len(document.text.encode())
            position = None if document.state is None else [document.state, count, size]
            parts = [document.progress or 0.0, count / documents_limit, size / bytes_limit]
            yield document._replace(state=position, progress=min(1.0, max(parts)))
            if count >= documents_limit or size >= bytes_limit:
                return


@dataclass(frozen=True, kw_only=True)
class PairedSource:
    """Training text of one source and validation text of another, whatever their own splits say."""

    train: TextSource
    validation: TextSource

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.train.name}; validation: {self.validation.name}"

    def describe(self) -> dict[str, Any]:
        """Both descriptions."""
        return {"train": self.train.describe(), "validation": self.validation.describe()}

    def documents(self, state: State = None) -> Iterator[Document]:
        """All of `train` as training text, then all of `validation`."""
        part, inner = state or (0, None)
        sources = (self.train, self.validation)
        for number in range(part, len(sources)):
            for document in sources[number].documents(inner if number == part else None):
                position = None if document.state is None else [number, document.state]
                # The sizes of the two are not comparable: only the long one has a time left.
                progress = document.progress if number == 0 else None
                yield document._replace(split=SPLITS[number], state=position, progress=progress)
