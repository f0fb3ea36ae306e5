# SPDX-License-Identifier: Apache-2.0
"""Near-duplicate documents share a side of the split, so that held-out text is not trained on.

**Before tokenising**, where the whole text can be read twice: a text is cut where a rolling hash of its
bytes says so, so that a passage is cut alike wherever it stands and whatever surrounds it. Documents of
which some piece is nearly the same (MinHash over the 32-byte shingles of the piece) form a group, and a
group lies on one side of the split.

**Afterwards**, whoever wrote the tokens: held-out and training text are compared window by window. What
of the held-out text stands in the training text is measured, and left out of a text that was read once.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.data.documents import (
    SPLITS,
    TRAIN,
    VALIDATION,
    Document,
    PairedSource,
    State,
    TextSource,
)
from sparse_bitnet.data.manifest import Manifest, Overlap, SplitManifest
from sparse_bitnet.data.shards import ShardWriter, TokenDataset
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LEFT_OUT = "left out of the held-out text"
"""Value of "near_duplicates" in the manifest's settings if they are looked for after tokenising."""

_SHINGLE = 32
_PIECE_BITS = 12
"""Pieces have 2 ** this bytes in the mean."""

_SHORTEST_PIECE = 512
_BANDS, _ROWS = 16, 6
"""MinHash bands and rows: pieces with 6 in 10 shingles in common share a band more often than not."""

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))

WINDOW = 64
"""Tokens of a held-out window that is looked for in the training text."""

_KNOWN_SHARE = 0.01
"""Held-out documents with more of their windows in the training text are near-duplicates."""

_CHUNK_TOKENS = 1 << 20


@dataclass(kw_only=True)
class SeparatedSource:
    """A source of which near-duplicates do not lie on both sides of the split.

    A group goes where the hash of one of its documents sends it, which is chosen by another hash; one of
    more than half of the text is for training. Of a source with a validation text of its own, training
    documents near a held-out one are left out. Where that would leave a side empty, each document stays
    where it was (the measured overlap tells). The text is read once more for it, with 3 % of its size in
    memory, or some 500 bytes a document.
    """

    source: TextSource
    afterwards: bool = False
    """The text is read once, and held-out documents that occur in the training text are left out."""
    _moved: dict[int, str | None] | None = field(default=None, init=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the source."""
        return self.source.name

    def describe(self) -> dict[str, Any]:
        """Return the source's description, and how its near-duplicates are treated."""
        return {
            **self.source.describe(),
            "near_duplicates": LEFT_OUT if self.afterwards else "grouped",
        }

    def documents(self, state: State = None) -> Iterator[Document]:
        """Those of the source, near-duplicates on one side of the split."""
        moved = self.find() if self._moved is None else self._moved
        first, inner = state or (0, None)
        for number, document in enumerate(self.source.documents(inner), first):
            if (side := moved.get(number, document.split)) is not None:
                position = None if document.state is None else [number + 1, document.state]
                yield document._replace(split=side, state=position)

    def find(self, on_bytes: Callable[[int], None] = lambda size: None) -> dict[int, str | None]:
        """Read the whole text for its groups, as `documents` does otherwise.

        Returns the documents, by number, that change sides, and to which; None: they are left out.
        """
        self._moved = {} if self.afterwards else self._find(on_bytes)
        return self._moved

    def _find(self, on_bytes: Callable[[int], None]) -> dict[int, str | None]:
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
        moved: dict[int, str | None] = {}
        for group in _groups(keys):
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


def rolling_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Hash every `length` consecutive values, which alone determine it; uint64
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


def _groups(keys: list[np.ndarray]) -> Iterator[list[int]]:
    """Documents, given by their band keys, that are connected by pieces which agree in a band; of at
    least two documents each."""
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
    place = np.flatnonzero(np.bincount(labels)[labels] > 1)
    place = place[np.argsort(labels[place], kind="stable")]
    for group in np.split(place, np.flatnonzero(np.diff(labels[place])) + 1):
        if len(group):
            yield group.tolist()


def compare_splits(
    folder: Path, manifest: Manifest, tokenizer: "PreTrainedTokenizerFast", show: OnProgress
) -> Manifest:
    """The manifest with the `Overlap` of its splits, without held-out near-duplicates if it says so.

    Those are left out unless nothing would be left. The others are written to shards of another name.

    Args:
        folder: of the shards.
        manifest: complete but for this.
        tokenizer: counts the bytes of what is left out.
        show: is given the bytes of training tokens that are compared.
    """
    if manifest.is_chat or not manifest.splits[VALIDATION].tokens:
        return manifest
    train, held_out = (TokenDataset(folder, split, manifest) for split in SPLITS)
    last = np.flatnonzero(held_out[: len(held_out)] == held_out.eos_token_id)
    spans = list(itertools.pairwise([0, *(last + 1).tolist()]))
    windows, known = _windows_in_training(train, held_out, spans, show)
    kept = known <= _KNOWN_SHARE * windows
    # Text that the user gave to be held out goes to the first part, whose source says so.
    is_asked = all(part["source"].get("near_duplicates") == LEFT_OUT for part in manifest.parts)
    if is_asked and kept.any() and not kept.all():
        split = _kept_documents(folder, manifest, tokenizer, held_out, spans, kept)
        manifest = replace(manifest, splits={TRAIN: manifest.splits[TRAIN], VALIDATION: split})
    else:
        kept[:] = True
    overlap = Overlap(
        window_tokens=WINDOW,
        windows=int(windows[kept].sum()),
        windows_in_training=int(known[kept].sum()),
        documents=int((windows[kept] > 0).sum()),
        documents_in_training=int(((known == windows) & (windows > 0))[kept].sum()),
        left_out=int((~kept).sum()),
    )
    return replace(manifest, overlap=overlap)


def _windows_in_training(
    train: TokenDataset,
    held_out: TokenDataset,
    spans: list[tuple[int, int]],
    show: OnProgress,
) -> tuple[np.ndarray, np.ndarray]:
    """Count, for each held-out document (its `spans`: where it begins and ends), the windows and those
    that stand in the training text; int64 [documents] each."""
    # A window that goes on into the next document is none.
    texts = [rolling_hashes(held_out[a : b - 1].astype(np.uint64), WINDOW) for a, b in spans]
    wanted = np.unique(np.concatenate(texts)) if texts else np.empty(0, np.uint64)
    in_training = np.zeros(len(wanted), bool)
    # Few of the training windows pass: looking up all of them would take the time.
    likely, shift = np.zeros(1 << 22, bool), np.uint64(64 - 22)
    likely[wanted >> shift] = True
    for start in range(0, len(train) if len(wanted) else 0, _CHUNK_TOKENS):
        if start:
            show(start * train.dtype.itemsize, len(train) * train.dtype.itemsize)
        part = train[start : start + _CHUNK_TOKENS + WINDOW - 1].astype(np.uint64)
        hashes = rolling_hashes(part, WINDOW)
        hashes = hashes[likely[hashes >> shift]]
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        in_training[place[wanted[place] == hashes]] = True
    known = [in_training[np.searchsorted(wanted, hashes)].sum() for hashes in texts]
    return np.array([len(hashes) for hashes in texts], np.int64), np.array(known, np.int64)


def _kept_documents(
    folder: Path,
    manifest: Manifest,
    tokenizer: "PreTrainedTokenizerFast",
    held_out: TokenDataset,
    spans: list[tuple[int, int]],
    kept: np.ndarray,
) -> SplitManifest:
    """Write the held-out documents that are kept to shards of their own."""
    largest = max(shard.tokens for shard in manifest.shards)
    writer = ShardWriter(folder, "held-out", held_out.dtype, largest)
    text_bytes = manifest.splits[VALIDATION].text_bytes
    for (start, end), keep in zip(spans, kept, strict=True):
        if keep:
            writer.append(held_out[start:end])
        else:
            tokens = held_out[start : end - 1]
            text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
            text_bytes -= len(str(text).encode())
    return SplitManifest(
        documents=int(kept.sum()),
        tokens=writer.tokens,
        text_bytes=max(0, text_bytes),  # normalised text may be longer than what was read
        shards=writer.finish(),
    )
