# SPDX-License-Identifier: Apache-2.0
"""Prefix cache: keeps sequences of ended requests, so that a later prompt with the same beginning reuses
their keys and values."""

from collections.abc import Iterable

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the longest common prefix of two int32 arrays."""
    size = min(len(a), len(b))
    # Most differ in the first token, and a server compares each pair in each step.
    if not size or a[0] != b[0]:
        return 0
    different = a[:size] != b[:size]
    place = int(different.argmax())
    return place if different[place] else size


class PrefixCache:
    """Sequences with their tokens, the least recently used first; evicting one closes it."""

    def __init__(self, most: int = 64) -> None:
        """`most`: sequences kept at once; 0 keeps none."""
        self._most = most
        self._kept: dict[EngineSequence, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: EngineSequence, tokens: np.ndarray) -> None:
        """Take ownership of a sequence that holds `tokens` (int32 [length])."""
        if self._most == 0 or len(tokens) == 0:
            sequence.close()
            return
        for other, held in list(self._kept.items()):
            if shared_length(held, tokens) == len(held):
                del self._kept[other]
                other.close()
        self._kept[sequence] = tokens
        if len(self._kept) > self._most:
            self.evict()

    def longest(
        self, tokens: np.ndarray, others: Iterable[tuple[EngineSequence | None, np.ndarray]] = ()
    ) -> tuple[EngineSequence | None, int]:
        """Return the sequence, kept or in `others`, with the longest reusable prefix in common with
        `tokens`, and the length of that prefix; (None, 0) if there is none."""
        best: EngineSequence | None = None
        length = 0
        for sequence, held in (*self._kept.items(), *others):
            shared = shared_length(held, tokens)
            if shared > length and sequence is not None:
                shared = sequence.reusable(shared)
            if shared > length:
                best, length = sequence, shared
        if best in self._kept:
            self._kept[best] = self._kept.pop(best)
        return best, length

    def evict(self, first: EngineSequence | None = None) -> bool:
        """Close `first` if it is kept, else the least recently used; return False if there is none."""
        oldest = first if first in self._kept else next(iter(self._kept), None)
        if oldest is None:
            return False
        del self._kept[oldest]
        oldest.close()
        return True

    def clear(self) -> None:
        """Close all sequences."""
        while self.evict():
            pass
