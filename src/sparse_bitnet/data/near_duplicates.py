# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents go to the same side of the split, so that held-out text is not trained on.

**Before tokenising,** a rolling hash of the bytes cuts each text into pieces, so that a passage is cut
alike wherever it occurs. Documents with nearly the same piece (MinHash over its 32-byte shingles) form a
group, and a group lies on one side of the split.

**Afterwards,** held-out and training tokens are compared window by window: the share of the held-out
text that also occurs in the training text is printed and stored.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from sparse_bitnet.data.documents import SPLITS, TRAIN, VALIDATION, Document
from sparse_bitnet.data.manifest import Manifest, Overlap
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.progress import OnProgress

_SHINGLE = 32
_PIECE_BITS = 12
"""Log2 of the mean length of a piece in bytes."""

_SHORTEST_PIECE = 512
_BANDS, _ROWS = 16, 6
"""MinHash bands and rows: pieces that share 6 of 10 shingles share a band more often than not."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))

WINDOW = 64
"""Length in tokens of the held-out windows that are searched in the training text."""

_CHUNK_TOKENS = 1 << 20


def regrouped(
    documents: Iterable[Document], *, keep_held_out: bool, on_bytes: Callable[[int], None]
) -> dict[int, str | None]:
    """Return the documents that must change sides, so that near-duplicates are on one side.

    A hash of one of its documents, chosen by another hash, decides where a group goes; a group with more
    than half of the text is for training. If that would leave a side empty, no document changes (the
    measured overlap shows it). Needs memory for 3 % of the text, or some 500 bytes per document.

    Args:
        documents: the whole text.
        keep_held_out: held-out documents stay, and training documents near them are left out, even all.
        on_bytes: called with the bytes read so far.

    Returns the new side of each document that changes, by its number; None: it is left out.
    """
    held_out, order, keys, sizes = [], [], [], []
    size = 0
    for document in documents:
        text = document.text.encode()
        held_out.append(document.split == VALIDATION)
        # Salted: by the hash that splits, the smallest of a group would mostly be held out.
        order.append(hashlib.blake2b(text, digest_size=8, salt=b"group").digest())
        keys.append(_band_keys(text and text.ljust(_SHINGLE)))
        sizes.append(len(text))
        size += len(text)
        on_bytes(size)
    if not any(held_out) or all(held_out):
        return {}
    moved: dict[int, str | None] = {}
    for group in _groups(keys):
        if len({held_out[number] for number in group}) == 1:
            continue
        if keep_held_out:
            moved |= {number: None for number in group if not held_out[number]}
            continue
        chosen = held_out[min(group, key=lambda number: order[number])]
        chosen = chosen and 2 * sum(sizes[number] for number in group) <= size
        side = VALIDATION if chosen else TRAIN
        moved |= {number: side for number in group if held_out[number] != chosen}
    before = enumerate(VALIDATION if held else TRAIN for held in held_out)
    sides = {moved.get(number, side) for number, side in before}
    return moved if keep_held_out or sides >= {TRAIN, VALIDATION} else {}


def rolling_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Hash every `length` consecutive values by these alone; uint64 [len(values) - length + 1]."""
    if len(values) < length:
        return np.empty(0, np.uint64)
    powers, inverses = (np.cumprod(np.full(len(values), factor)) for factor in (_BASE, _INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((values + np.uint64(1)) * powers)])
    return (sums[length:] - sums[:-length]) * inverses[: len(values) - length + 1]


def _band_keys(text: bytes) -> np.ndarray:
    """Return a text's pieces as uint64 [pieces, bands]: two that are nearly the same agree in a band."""
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


def _groups(keys: list[np.ndarray]) -> Iterator[list[int]]:
    """Yield the groups of at least two documents, given by their band keys, that are connected by pieces
    which agree in a band."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    owners = np.repeat(np.arange(len(keys)), list(map(len, keys)))
    pairs = []
    for band in np.concatenate(keys).T:
        place = np.argsort(band, kind="stable")
        same = np.flatnonzero(np.diff(band[place]) == 0)
        pairs.append(owners[np.stack([place[same], place[same + 1]])])
    ends = np.concatenate(pairs, axis=1)
    graph = coo_array((np.ones(ends.shape[1], bool), tuple(ends)), shape=(len(keys), len(keys)))
    _, labels = connected_components(graph, directed=False)
    place = np.argsort(labels, kind="stable")
    for group in np.split(place, np.flatnonzero(np.diff(labels[place])) + 1):
        if len(group) > 1:
            yield group.tolist()


def measure_overlap(folder: Path, manifest: Manifest, show: OnProgress) -> Overlap:
    """Measure how much of the held-out text of prepared data stands in its training text; both have text.

    `show` is called with the bytes of training tokens that are compared, and of all.
    """
    train, held_out = (TokenDataset(folder, split, manifest) for split in SPLITS)
    tokens = held_out[:].astype(np.uint64)
    ends = np.flatnonzero(tokens == held_out.eos_token_id)
    # A window must not continue into the next document.
    texts = [
        rolling_hashes(tokens[before + 1 : end], WINDOW)
        for before, end in itertools.pairwise([-1, *ends.tolist()])
    ]
    wanted = np.unique(np.concatenate(texts))
    in_training = np.zeros(len(wanted), bool)
    # Few of the training windows pass: looking up all of them would take the time.
    likely, shift = np.zeros(1 << 22, bool), np.uint64(64 - 22)
    likely[wanted >> shift] = True
    for start in range(0, len(train) if len(wanted) else 0, _CHUNK_TOKENS):
        show(start * train.dtype.itemsize, len(train) * train.dtype.itemsize)
        part = train[start : start + _CHUNK_TOKENS + WINDOW - 1].astype(np.uint64)
        hashes = rolling_hashes(part, WINDOW)
        hashes = hashes[likely[hashes >> shift]]
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        in_training[place[wanted[place] == hashes]] = True
    known = [in_training[np.searchsorted(wanted, hashes)] for hashes in texts if len(hashes)]
    return Overlap(
        window_tokens=WINDOW,
        windows=sum(map(len, known)),
        windows_in_training=int(sum(each.sum() for each in known)),
        documents=len(known),
        documents_in_training=sum(bool(each.all()) for each in known),
    )
