# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents share a side of the split, so that held-out text is not trained on.

A text is cut where a rolling hash of its bytes says so, so that a passage is cut alike wherever it
stands and whatever surrounds it. Documents of which some piece is nearly the same (MinHash over the
32-byte shingles of the piece) form a group, and a group lies on one side of the split.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from sparse_bitnet.data.documents import (
    TRAIN,
    VALIDATION,
    Document,
    PairedSource,
    State,
    WrappedSource,
)

LEFT_OUT = "left out of the held-out text"
"""What becomes of near-duplicates in a `ReadOnceSource`; as the manifest's settings have it."""

_SHINGLE = 32
_PIECE_BITS = 12
"""Pieces have 2 ** this bytes in the mean."""

_SHORTEST_PIECE = 512
_BANDS, _ROWS = 16, 6
"""Of the MinHash: pieces with 6 in 10 shingles in common share one of the bands more often than not."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


@dataclass(frozen=True, kw_only=True)
class GroupedSource(WrappedSource):
    """A source whose near-duplicate documents are on the same side of the split.

    A group goes where the hash of one of its documents sends it, which is chosen by another hash; one of
    more than half of the text is for training. Of a source with a validation text of its own, training
    documents near a held-out one are left out. Where that would leave a side empty, each document stays
    where it was (the measured overlap tells). The text is read once more for it, with 3 % of its size in
    memory, or some 500 bytes a document.
    """

    def describe(self) -> dict[str, Any]:
        """As the source, and that its near-duplicates are grouped."""
        return {**self.source.describe(), "near_duplicates": "grouped"}

    def documents(self, state: State = None) -> Iterator[Document]:
        """Those of the source, near-duplicates on one side of the split."""
        first, inner = state or (0, None)
        for number, document in enumerate(self.source.documents(inner), first):
            if (side := self._moved.get(number, document.split)) is not None:
                position = None if document.state is None else [number + 1, document.state]
                yield document._replace(split=side, state=position)

    def find(self, on_bytes: Callable[[int], None]) -> None:
        """Read the whole text and find the groups now; `documents` does it otherwise."""
        vars(self)["_moved"] = self._find(on_bytes)

    @cached_property
    def _moved(self) -> dict[int, str | None]:
        return self._find(lambda size: None)

    def _find(self, on_bytes: Callable[[int], None]) -> dict[int, str | None]:
        """Documents, by number, that change sides, and to which; None: they are left out."""
        held_out, order, keys, sizes = [], [], [], []
        size = 0
        for document in self.source.documents():
            text = document.text.encode()
            held_out.append(document.split == VALIDATION)
            # Salted: by the hash that splits, the smallest of a group would mostly be held out.
            order.append(hashlib.blake2b(text, digest_size=8, salt=b"group").digest())
            keys.append(_band_keys(text))
            sizes.append(len(text))
            size += len(text)
            on_bytes(size)
        if not any(held_out) or all(held_out):
            return {}
        owners = np.repeat(np.arange(len(keys)), list(map(len, keys)))
        groups = _groups(np.concatenate(keys), owners, len(held_out))
        moved: dict[int, str | None] = {}
        for group in groups:
            if len({held_out[number] for number in group}) == 1:
                continue
            if isinstance(self.source, PairedSource):
                moved |= {number: None for number in group if not held_out[number]}
                continue
            chosen = held_out[min(group, key=lambda number: order[number])]
            chosen = chosen and 2 * sum(sizes[number] for number in group) <= size
            side = VALIDATION if chosen else TRAIN
            moved |= {number: side for number in group if held_out[number] != chosen}
        before = enumerate(VALIDATION if held else TRAIN for held in held_out)
        sides = {moved.get(number, side) for number, side in before}
        return moved if sides >= {TRAIN, VALIDATION} else {}


@dataclass(frozen=True, kw_only=True)
class ReadOnceSource(WrappedSource):
    """A source that no process reads as a whole before it is tokenised: a stream, or a part of a text.

    Its held-out documents that occur in the training text are left out afterwards (`overlap`).
    """

    def describe(self) -> dict[str, Any]:
        """As the source, and what becomes of its near-duplicates."""
        return {**self.source.describe(), "near_duplicates": LEFT_OUT}


def rolling_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Of every `length` consecutive values a hash that only they determine; uint64
    [len(values) - length + 1]."""
    if len(values) < length:
        return np.empty(0, np.uint64)
    powers, inverses = (np.cumprod(np.full(len(values), factor)) for factor in (_BASE, _INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((values + np.uint64(1)) * powers)])
    return (sums[length:] - sums[:-length]) * inverses[: len(values) - length + 1]


def _band_keys(text: bytes) -> np.ndarray:
    """A text's pieces as uint64 [pieces, bands]: two that are nearly the same agree in some band."""
    from rensa import RMinHash

    shingles = rolling_hashes(np.frombuffer(text, np.uint8).astype(np.uint64), _SHINGLE)
    cuts = np.flatnonzero(shingles >> np.uint64(64 - _PIECE_BITS) == 0)
    ends = np.unique(np.concatenate([[0], cuts, [len(shingles)]]))
    long = np.flatnonzero(np.diff(ends) >= _SHORTEST_PIECE)
    if not len(long):  # a short document is one piece
        ends, long = np.array([0, len(shingles)]), np.arange(1 if len(shingles) else 0)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        shingles, ends.tolist(), _BANDS * _ROWS, 0
    )
    digests = np.array(matrix.to_rows(), np.uint64).reshape(-1, _BANDS, _ROWS)[long]
    powers = np.cumprod(np.full(_ROWS, _BASE))
    return (digests * powers).sum(-1, dtype=np.uint64)


def _groups(keys: np.ndarray, owners: np.ndarray, documents: int) -> Iterator[list[int]]:
    """Documents connected by pieces that agree in a band, of at least two documents each."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    pairs = []
    for band in keys.T:
        place = np.argsort(band, kind="stable")
        same = np.flatnonzero(np.diff(band[place]) == 0)
        pairs.append(owners[np.stack([place[same], place[same + 1]])])
    ends = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(ends.shape[1], bool), tuple(ends)), shape=(documents, documents))
    _, labels = connected_components(graph, directed=False)
    place = np.flatnonzero(np.bincount(labels)[labels] > 1)
    place = place[np.argsort(labels[place], kind="stable")]
    for group in np.split(place, np.flatnonzero(np.diff(labels[place])) + 1):
        if len(group):
            yield group.tolist()
