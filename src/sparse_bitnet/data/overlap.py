# SPDX-License-Identifier: Apache-2.0
"""How much of the held-out text stands in the training text, compared window by window."""

import itertools
from pathlib import Path

import numpy as np

from sparse_bitnet.data.documents import SPLITS
from sparse_bitnet.data.manifest import Manifest, Overlap
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.progress import OnProgress

WINDOW = 64
"""Tokens of a held-out window that is looked for in the training text."""

_CHUNK_TOKENS = 1 << 20

_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(int(_BASE), -1, 1 << 64))


def measure_overlap(folder: Path, manifest: Manifest, show: OnProgress) -> Overlap:
    """Measure how much of the held-out text of prepared data stands in its training text.

    Args:
        folder, manifest: the data, whose splits both have text.
        show: is given the bytes of training tokens that are compared, and of all.
    """
    train, held_out = (TokenDataset(folder, split, manifest) for split in SPLITS)
    tokens = held_out[:].astype(np.uint64)
    ends = np.flatnonzero(tokens == held_out.eos_token_id)
    # A window that goes on into the next document is none.
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


def rolling_hashes(values: np.ndarray, length: int) -> np.ndarray:
    """Hash every `length` consecutive values, which alone determine it; uint64
    [len(values) - length + 1]."""
    if len(values) < length:
        return np.empty(0, np.uint64)
    powers, inverses = (np.cumprod(np.full(len(values), factor)) for factor in (_BASE, _INVERSE))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((values + np.uint64(1)) * powers)])
    return (sums[length:] - sums[:-length]) * inverses[: len(values) - length + 1]
