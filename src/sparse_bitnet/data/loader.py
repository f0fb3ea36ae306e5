# SPDX-License-Identifier: Apache-2.0
"""Batches of token windows: shuffled over the whole data set, and computed from the step alone.

The data is cut into windows (`windows`). The samples of a run are one endless stream, epoch after
epoch, each with its own permutation of all windows; global step t holds samples `t * batch_size` to
`(t + 1) * batch_size - 1`, and rank r of w the r-th of w equal contiguous parts of them. So the global
batch is the same at every number of ranks, and any step is reached at once: there is nothing to iterate
and no state to save.

The permutation is a balanced Feistel network over the next power of four, keyed by seed and epoch; an
image outside the data is mapped again until it falls inside ("cycle walking", Black and Rogaway 2002),
which keeps it a bijection. Nothing of the size of the data is ever stored.
"""

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.windows import Windows
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    import torch

_ROUNDS = 8
_AT_ONCE = 512

# Smaller halves have too few bits to mix; walking through 64 values costs little.
_SMALLEST_HALF = 3


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
        """Check the sizes.

        Args:
            dataset: the tokens.
            sequence_length: tokens the model sees at once.
            batch_size: sequences of one step over all ranks together.
            seed: of the shuffling.
            rank, world_size: which part of each batch this loader returns.

        Raises:
            UserError: the data is shorter than one window, or `batch_size` is not a multiple of
                `world_size`.
        """
        if sequence_length < 1 or batch_size < 1:
            raise UserError(
                f"sequence length {sequence_length} and batch size {batch_size} must be at least 1"
            )
        if batch_size % world_size:
            raise UserError(
                f"a batch of {batch_size} sequences does not divide over {world_size} processes"
            )
        if len(dataset) <= sequence_length and not dataset.is_chat:
            raise UserError(
                f"{dataset.folder}: {len(dataset):,} {dataset.split} tokens are fewer than one window of "
                f"{sequence_length + 1:,}; prepare more text or shorten the sequences"
            )
        assert 0 <= rank < world_size
        self.dataset = dataset
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.cut = Windows(dataset, sequence_length)
        self.windows = len(self.cut)

    def batch(self, step: int) -> "tuple[torch.Tensor, ...]":
        """`(input_ids, labels)`, each int64 [batch_size / world_size, sequence_length]; of conversations
        also the positions.

        `labels[i, t]` is the token after `input_ids[i, t]`: already shifted, unlike the labels that
        transformers models take.
        """
        import torch

        found = self.cut.batch(self.windows_of(step))
        return tuple(torch.from_numpy(np.ascontiguousarray(each)) for each in found)

    def learnt(self, step: int) -> int:
        """Predictions of a step that count, over all ranks together; 0 where no answer is in it."""
        if not self.dataset.is_chat:
            return self.batch_size * self.sequence_length
        windows = [self._windows(step, rank)[1] for rank in range(self.world_size)]
        return self.cut.learnt(np.concatenate(windows))

    def windows_of(self, step: int) -> np.ndarray:
        """Which windows the rank's batch is, int64 [batch_size / world_size]."""
        return self._windows(step)[1]

    def identity(self, step: int) -> dict[str, Any]:
        """Which text the rank's batch is, as JSON, for messages: window w starts at token w * length."""
        epochs, windows = self._windows(step)
        return {
            "data": str(self.dataset.folder),
            "split": self.dataset.split,
            "step": step,
            "rank": self.rank,
            "epoch": int(epochs[0]),
            "sequence_length": self.sequence_length,
            "windows": windows.tolist(),
        }

    def _windows(self, step: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        assert step >= 0
        size = self.batch_size // self.world_size
        first = step * self.batch_size + (self.rank if rank is None else rank) * size
        samples = np.arange(first, first + size)
        runs = range(first // _AT_ONCE, (first + size - 1) // _AT_ONCE + 1)
        shuffled = np.concatenate([_shuffled(run, self.windows, self.seed) for run in runs])
        return samples // self.windows, shuffled[samples - runs.start * _AT_ONCE]


@lru_cache(maxsize=8)
def _shuffled(run: int, windows: int, seed: int) -> np.ndarray:
    """The windows of `_AT_ONCE` samples in a row; those of one step alone would take as long."""
    first = run * _AT_ONCE
    epochs, positions = np.divmod(np.arange(first, first + _AT_ONCE), windows)
    found = np.empty_like(positions)
    for epoch in np.unique(epochs).tolist():
        chosen = epochs == epoch
        found[chosen] = permuted(positions[chosen], windows, seed=seed, epoch=epoch)
    return found


def permuted(positions: np.ndarray, size: int, *, seed: int, epoch: int) -> np.ndarray:
    """The images of some positions under the permutation of range(size) that seed and epoch choose.

    Args:
        positions: integers in [0, size), one dimension.

    Returns:
        int64, as long as `positions`.
    """
    keys = _round_keys(seed, epoch)
    half = max(_SMALLEST_HALF, (max(size - 1, 1).bit_length() + 1) // 2)
    images = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := images >= size).any():
        images[outside] = _feistel(images[outside], half, keys)
    return images.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"window order {seed} {epoch}".encode(), digest_size=8 * _ROUNDS)
    return np.frombuffer(digest.digest(), "<u8").astype(np.uint64)


def _feistel(values: np.ndarray, half: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, 4^half), uint64 [n]: each round is undone by repeating it."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014); arithmetic modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
