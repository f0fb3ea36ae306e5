# SPDX-License-Identifier: Apache-2.0
"""Batches of token windows: shuffled over the whole data set, and computed from the step alone.

Prepared data is cut into windows, the sequences that a model sees. Text is one stream: windows lie
`length` tokens apart, so that each token but the first and a remainder at the end is predicted once. A
window holds as many whole conversations as fit, in order; a longer one continues in the next window.
Positions restart with each conversation, which keeps the attention of transformers' models inside it.

The samples of a run are one endless stream, epoch after epoch, each with its own permutation of all
windows. Global step t holds samples `t * batch_size` to `(t + 1) * batch_size - 1`, and rank r of w the
r-th of w equal contiguous parts of them. So the global batch is the same at every number of ranks, and
any step is reached at once, without iterating or saved state.

The permutation is a balanced Feistel network over the next power of four, keyed by seed and epoch; an
image outside the data is mapped again until it falls inside ("cycle walking", Black and Rogaway 2002),
which keeps it a bijection. It needs no memory that grows with the data.
"""

import hashlib
import itertools
from typing import TYPE_CHECKING

import numpy as np

from sparse_bitnet.data.chat import BEGINS, IDS, LEARNT
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a token whose prediction does not count."""

_ROUNDS = 8

# Smaller halves have too few bits to mix; walking through 64 values costs little.
_SMALLEST_HALF = 3


class Windows:
    """The windows of one data set, by index."""

    def __init__(self, dataset: TokenDataset, length: int) -> None:
        """`length`: number of tokens that the model sees at once. Raises `UserError` for shorter text."""
        if len(dataset) <= length and not dataset.is_chat:
            raise UserError(
                f"{dataset.folder}: its {len(dataset):,} {dataset.split} tokens are fewer than a window "
                f"of {length + 1:,}: shorten --sequence-length, or prepare more text (for validation, "
                "with --validation or a larger --validation-fraction)"
            )
        self.dataset, self.length = dataset, length
        self._starts = self._learnt = None
        self.learnt_ids = np.empty(0, np.uint32)
        """Token ids of which some prediction counts, in conversations."""
        if dataset.is_chat:
            tokens = dataset.stored(slice(None))
            starts = np.flatnonzero(tokens & BEGINS)
            self._starts = np.array(_packed([*starts.tolist(), len(tokens)], length))
            learnt = tokens & LEARNT != 0
            self.learnt_ids = np.unique(tokens[learnt] & IDS)
            counts = np.concatenate([[0], np.cumsum(learnt)])
            # The first token of a window is not predicted; where text continues, the window before did.
            self._learnt = counts[self._ends()] - counts[self._starts + 1]

    def __len__(self) -> int:
        if self._starts is None:
            return (len(self.dataset) - 1) // self.length
        return len(self._starts)

    def batch(self, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return `(input_ids, labels)` of some windows, int64 [windows, length] each; for conversations
        also the positions. `labels[i, t]` is the token after `input_ids[i, t]`, or `IGNORE_INDEX`."""
        length = self.length
        if self._starts is None:
            text = np.empty((len(windows), length + 1), np.int64)
            for place, window in enumerate(windows.tolist()):
                text[place] = self.dataset[window * length : (window + 1) * length + 1]
            self.dataset.check_ids(text)
            return text[:, :-1], text[:, 1:]
        tokens = np.full((len(windows), length + 1), BEGINS)
        starts, ends = self._starts[windows].tolist(), self._ends()[windows].tolist()
        for row, start, end in zip(tokens, starts, ends, strict=True):
            row[: end - start] = self.dataset.stored(slice(start, end))
        ids = (tokens & IDS).astype(np.int64)
        self.dataset.check_ids(ids)
        labels = np.where(tokens & LEARNT, ids, IGNORE_INDEX)
        places = np.arange(length + 1)
        begins = np.maximum.accumulate(np.where(tokens & BEGINS, places, 0), 1)
        return ids[:, :-1], labels[:, 1:], (places - begins)[:, :-1]

    def learnt(self, windows: np.ndarray) -> int:
        """Return the number of predictions that count in some windows of conversations."""
        assert self._learnt is not None
        return int(self._learnt[windows].sum())

    def unlearnt(self) -> str:
        """Return a line that names windows of conversations without a counted prediction; "" for none."""
        empty = [] if self._learnt is None else np.flatnonzero(self._learnt == 0).tolist()
        if not empty:
            return ""
        named = ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5)
        return (
            f"{self.dataset.folder}: {len(empty):,} of {len(self):,} {self.dataset.split} windows of "
            f"{self.length:,} tokens hold no answer to learn ({named}): raise --sequence-length to keep "
            "prompts and answers together"
        )

    def _ends(self) -> np.ndarray:
        assert self._starts is not None
        following = np.append(self._starts[1:], len(self.dataset))
        most = np.minimum(self._starts + self.length + 1, len(self.dataset))
        return np.minimum(following + 1, most)


def _packed(bounds: list[int], length: int) -> list[int]:
    """Return where windows of `length` + 1 tokens start. `bounds`: token positions at which the
    conversations begin and end."""
    starts = [bounds[0]]
    for begin, end in itertools.pairwise(bounds):
        if end - starts[-1] <= length + 1:
            continue
        if begin > starts[-1]:
            starts.append(begin)
        while end - starts[-1] > length + 1:
            starts.append(starts[-1] + length)
    return starts


class TokenLoader:
    """The batches of one rank. Stateless: `batch(step)` depends on nothing called before."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Load windows of `sequence_length` tokens, shuffled by `seed`; `batch_size` of them are one step
        of all ranks together.

        Raises `UserError` for data shorter than one window, and for a batch that does not divide over the
        ranks.
        """
        if batch_size % world_size:
            raise UserError(
                f"a batch of {batch_size} sequences does not divide over {world_size} processes"
            )
        assert 0 <= rank < world_size
        self.dataset, self.sequence_length, self.batch_size = dataset, sequence_length, batch_size
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.cut = Windows(dataset, sequence_length)
        self.windows = len(self.cut)

    def batch(self, step: int) -> "tuple[torch.Tensor, ...]":
        """Return `(input_ids, labels)`, each int64 [batch_size / world_size, sequence_length]; for
        conversations also the positions.

        `labels[i, t]` is the token after `input_ids[i, t]`: already shifted, unlike the labels of
        transformers models.
        """
        import torch

        arrays = self.cut.batch(self.windows_of(step))
        return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in arrays)

    def learnt(self, step: int) -> int:
        """Return the number of predictions that count in a step, over all ranks; 0 without an answer."""
        if not self.dataset.is_chat:
            return self.batch_size * self.sequence_length
        return self.cut.learnt(self._windows(step * self.batch_size, self.batch_size))

    def windows_of(self, step: int) -> np.ndarray:
        """Return the indices of the windows in the rank's batch, int64 [batch_size / world_size]."""
        size = self.batch_size // self.world_size
        return self._windows(step * self.batch_size + self.rank * size, size)

    def _windows(self, first: int, count: int) -> np.ndarray:
        assert first >= 0
        epochs, positions = np.divmod(np.arange(first, first + count), self.windows)
        windows = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            windows[chosen] = permuted(positions[chosen], self.windows, seed=self.seed, epoch=epoch)
        return windows


def permuted(positions: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the images of some positions, integers in [0, size), under the permutation of range(size)
    that seed and epoch choose; int64, as long as `positions`."""
    digest = hashlib.blake2b(f"window order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS)
    keys = np.frombuffer(digest.digest(), "<u8").astype(np.uint64)
    half = max(_SMALLEST_HALF, (max(size - 1, 1).bit_length() + 1) // 2)
    images = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """Return a permutation of [0, 4^half), uint64 [n]: each round is undone by repeating it."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """Return the finaliser of splitmix64 (Steele, Lea and Flood 2014); arithmetic modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
