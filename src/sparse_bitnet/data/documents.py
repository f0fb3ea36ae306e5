# SPDX-License-Identifier: Apache-2.0
"""Documents of a text, and the split that each belongs to.

A document's split follows from a hash of its content, never from its position, so that a longer or
shorter preparation of the same text puts every document on the same side.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

TRAIN, VALIDATION = SPLITS = ("train", "validation")

PIECE_CHARACTERS = 4096
"""Text that is held out of a long document, at most."""

_SMALLEST_PIECE = 64
"""Characters, where a tenth of the text is less."""

_HELD_OUT_DOCUMENTS = 10
"""Number of held-out documents below which, by expectation, pieces of documents are held out instead."""


class Document(NamedTuple):
    """One text of a source."""

    text: str
    split: str
    """`TRAIN` or `VALIDATION`."""
    progress: float | None
    """Fraction of the source read so far, None where its size is unknown."""
    skipped: str = ""
    """Reason why there is no text: a row that is not a document, or a file without any."""
    beside: bool = False
    """Whether this is plain text beside conversations."""


def uniform_hash(content: bytes) -> float:
    """Return a number in [0, 1) that is fixed by the content; below a fraction means validation."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest()) / 2**48


def split_of(content: bytes, validation_fraction: float) -> str:
    """Return the split of the document with this content (or this path, where that identifies it)."""
    return VALIDATION if uniform_hash(content) < validation_fraction else TRAIN


def pieces_of_few(
    texts: Callable[[], Iterator[str]], fraction: float, *, whole: bool
) -> tuple[float, int] | None:
    """Return an upper limit for the hash of held-out pieces, and their maximum length in characters.

    Args:
        texts: yields the documents, again at each call.
        fraction: share of the text for validation.
        whole: documents cannot be cut: each is a piece, and longer ones are not held out.

    Returns None if there are enough documents to hold out whole ones.
    """
    if not fraction:
        return None
    many = math.ceil(min(_HELD_OUT_DOCUMENTS / fraction, 1e18))
    lengths = [len(text) for text in itertools.islice(texts(), many)]
    if len(lengths) == many:
        return None
    # Most of a small text is for training.
    size = sum(lengths) // 2
    if not whole:
        if size < _SMALLEST_PIECE:
            return 0.0, PIECE_CHARACTERS
        size = min(PIECE_CHARACTERS, max(_SMALLEST_PIECE, sum(lengths) // 10))
    cut = itertools.chain.from_iterable(pieces(text, size) for text in texts())
    smallest, length, seen = 1.0, 0, 0
    for piece in texts() if whole else cut:
        place = uniform_hash(piece.encode()) if len(piece) <= size else 1.0
        if place <= smallest:  # the same text may occur again
            length = len(piece) + (length if place == smallest else 0)
            smallest = place
        seen += len(piece)
        if smallest < fraction and 2 * length <= seen:
            return fraction, size
    has_room = smallest < 1 and 2 * length <= seen
    return math.nextafter(smallest, 1.0) if has_room else 0.0, size


def pieces(text: str, size: int) -> Iterator[str]:
    """Yield pieces of at most `size` characters that end at a paragraph, a line or a word if possible."""
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


def skipped_line(count: int, first: str) -> str:
    """Return a line that counts skipped rows and files and gives the first one's reason; "" for none."""
    rows = "rows or files" if count > 1 else "row or file"
    return f"{count:,} {rows} skipped, the first: {first}" if count else ""
