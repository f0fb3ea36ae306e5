# SPDX-License-Identifier: Apache-2.0
"""How prepared data is cut into the windows that a model sees.

Text is one stream: windows lie `length` tokens apart, so that every token but the first, and those that
are left at the end, is predicted once. Of conversations as many whole ones as fit share a window, in
their order; one that is longer than a window goes on in the next. Positions begin anew with each, by
which transformers' models keep attention inside of it.
"""

import itertools

import numpy as np

from sparse_bitnet.data.chat import BEGINS, IDS, LEARNT
from sparse_bitnet.data.shards import TokenDataset

NOT_LEARNT = -100
"""Label of a token whose prediction does not count."""


class Windows:
    """The windows of one data set, by number."""

    def __init__(self, dataset: TokenDataset, length: int) -> None:
        """`length`: tokens that the model sees at once; the data has one more, at least."""
        self.dataset, self.length = dataset, length
        self._starts = self._learnt = None
        if dataset.is_chat:
            tokens = dataset.stored(slice(None))
            starts = np.flatnonzero(tokens & BEGINS)
            self._starts = np.array(_packed([*starts.tolist(), len(tokens)], length))
            counts = np.concatenate([[0], np.cumsum(tokens & LEARNT != 0)])
            # The first token of a window is not predicted; where text goes on, it was before.
            self._learnt = counts[self._ends()] - counts[self._starts + 1]

    def __len__(self) -> int:
        if self._starts is None:
            return (len(self.dataset) - 1) // self.length
        return len(self._starts)

    def batch(self, windows: np.ndarray) -> tuple[np.ndarray, ...]:
        """`(input_ids, labels)` of some windows, int64 [windows, length] each; of conversations also
        the positions. `labels[i, t]` is the token after `input_ids[i, t]`, or `NOT_LEARNT`."""
        length = self.length
        if self._starts is None:
            text = np.empty((len(windows), length + 1), np.int64)
            for place, window in enumerate(windows.tolist()):
                text[place] = self.dataset[window * length : (window + 1) * length + 1]
            self.dataset.check_ids(text)
            return text[:, :-1], text[:, 1:]
        tokens = np.full((len(windows), length + 1), BEGINS)
        for row, start, end in zip(
            tokens, self._starts[windows].tolist(), self._ends()[windows].tolist(), strict=True
        ):
            row[: end - start] = self.dataset.stored(slice(start, end))
        ids = (tokens & IDS).astype(np.int64)
        self.dataset.check_ids(ids)
        labels = np.where(tokens & LEARNT, ids, NOT_LEARNT)
        places = np.arange(length + 1)
        begins = np.maximum.accumulate(np.where(tokens & BEGINS, places, 0), 1)
        return ids[:, :-1], labels[:, 1:], (places - begins)[:, :-1]

    def learnt(self, windows: np.ndarray) -> int:
        """How many predictions of some windows of conversations count."""
        assert self._learnt is not None
        return int(self._learnt[windows].sum())

    def unlearnt(self) -> str:
        """Count and name the windows of conversations of which no prediction counts; "" for none."""
        empty = [] if self._learnt is None else np.flatnonzero(self._learnt == 0).tolist()
        if not empty:
            return ""
        named = ", ".join(map(str, empty[:5])) + ", ..." * (len(empty) > 5)
        return (
            f"{self.dataset.folder}: {len(empty):,} of {len(self):,} {self.dataset.split} windows of "
            f"{self.length:,} tokens hold nothing to learn ({named}): a longer --sequence-length joins "
            "them to their answers"
        )

    def _ends(self) -> np.ndarray:
        assert self._starts is not None
        following = np.append(self._starts[1:], len(self.dataset))
        return np.minimum(
            following + 1, np.minimum(self._starts + self.length + 1, len(self.dataset))
        )


def _packed(bounds: list[int], length: int) -> list[int]:
    """Where windows of `length` + 1 tokens start: `bounds` are those of the conversations, one after
    another."""
    starts = [bounds[0]]
    for begin, end in itertools.pairwise(bounds):
        if end - starts[-1] <= length + 1:
            continue
        if begin > starts[-1]:
            starts.append(begin)
        while end - starts[-1] > length + 1:
            starts.append(starts[-1] + length)
    return starts
