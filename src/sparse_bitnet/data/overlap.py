# SPDX-License-Identifier: Apache-2.0
"""How much of the held-out text stands in the training text, verbatim; what does may be left out.

Both are compared as tokens, window by window, after everything is written: it takes one more reading of
the tokens, whoever wrote them. `near_duplicates` keeps copies apart beforehand, where the whole text can
be read twice.
"""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sparse_bitnet.data.documents import SPLITS, TRAIN, VALIDATION
from sparse_bitnet.data.manifest import Manifest, Overlap, SplitManifest
from sparse_bitnet.data.near_duplicates import LEFT_OUT, rolling_hashes
from sparse_bitnet.data.shards import ShardWriter, TokenDataset
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WINDOW = 64
"""Tokens of a held-out window that is looked for in the training text."""

_KNOWN_SHARE = 0.01
"""Held-out documents with more of their windows in the training text are near-duplicates."""

_CHUNK_TOKENS = 1 << 20


def compare_splits(
    folder: Path,
    manifest: Manifest,
    tokenizer: "PreTrainedTokenizerFast",
    show: OnProgress,
) -> Manifest:
    """The manifest with the `Overlap` of its splits, without held-out near-duplicates if it says so.

    Those are left out of sources that are read once (`near_duplicates.ReadOnceSource`), unless nothing
    would be left. The others are written to shards of another name.

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
    ends = [0, *(last + 1).tolist()]
    spans = list(itertools.pairwise(ends))
    windows, known = windows_in_training(train, held_out, spans, show)
    kept = known <= _KNOWN_SHARE * windows
    sources = [each["source"] for each in manifest.settings.get("parts", [manifest.settings])]
    # Text that the user gave to be held out goes to the first part, whose source says so.
    asked = all(source.get("near_duplicates") == LEFT_OUT for source in sources)
    if not asked or not kept.any() or kept.all():
        kept[:] = True
    else:
        manifest = _without(folder, manifest, tokenizer, held_out, spans, kept)
    overlap = Overlap(
        window_tokens=WINDOW,
        windows=int(windows[kept].sum()),
        windows_in_training=int(known[kept].sum()),
        documents=int((windows[kept] > 0).sum()),
        documents_in_training=int(((known == windows) & (windows > 0))[kept].sum()),
        left_out=int((~kept).sum()),
    )
    return replace(manifest, overlap=overlap)


def windows_in_training(
    train: TokenDataset,
    held_out: TokenDataset,
    spans: list[tuple[int, int]],
    show: OnProgress,
) -> tuple[np.ndarray, np.ndarray]:
    """Of each held-out document, where it begins and ends, the number of windows and of those that stand
    in the training text; int64 [documents] each."""
    # A window that goes on into the next document is none.
    texts = [rolling_hashes(held_out[a : b - 1].astype(np.uint64), WINDOW) for a, b in spans]
    wanted = np.unique(np.concatenate(texts)) if texts else np.empty(0, np.uint64)
    found = np.zeros(len(wanted), bool)
    likely = np.zeros(1 << 22, bool)
    shift = np.uint64(64 - 22)
    likely[wanted >> shift] = True
    for start in range(0, len(train) if len(wanted) else 0, _CHUNK_TOKENS):
        if start:
            show(start * train.dtype.itemsize, len(train) * train.dtype.itemsize)
        part = train[start : start + _CHUNK_TOKENS + WINDOW - 1].astype(np.uint64)
        hashes = rolling_hashes(part, WINDOW)
        hashes = hashes[likely[hashes >> shift]]
        place = np.minimum(np.searchsorted(wanted, hashes), len(wanted) - 1)
        found[place[wanted[place] == hashes]] = True
    known = [found[np.searchsorted(wanted, hashes)].sum() for hashes in texts]
    return np.array([len(hashes) for hashes in texts], np.int64), np.array(known, np.int64)


def _without(
    folder: Path,
    manifest: Manifest,
    tokenizer: "PreTrainedTokenizerFast",
    held_out: TokenDataset,
    spans: list[tuple[int, int]],
    kept: np.ndarray,
) -> Manifest:
    largest = max(shard.tokens for split in manifest.splits.values() for shard in split.shards)
    writer = ShardWriter(folder, "held-out", held_out.dtype, largest)
    text_bytes = manifest.splits[VALIDATION].text_bytes
    for (start, end), keep in zip(spans, kept, strict=True):
        if keep:
            writer.append(held_out[start:end])
        else:
            text = str(
                tokenizer.decode(held_out[start : end - 1], clean_up_tokenization_spaces=False)
            )
            text_bytes -= len(text.encode())
    split = SplitManifest(
        documents=int(kept.sum()),
        tokens=writer.tokens,
        text_bytes=max(0, text_bytes),  # normalised text may be longer than what was read
        shards=writer.finish(),
    )
    return replace(manifest, splits={TRAIN: manifest.splits[TRAIN], VALIDATION: split})
