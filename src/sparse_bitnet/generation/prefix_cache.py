# SPDX-License-Identifier: Apache-2.0
"""Sequences kept after their request has ended, so that a later prompt with the same beginning starts
from them instead of being computed again."""

from collections.abc import Iterable

import numpy as np

from sparse_bitnet.engine.protocol import EngineSequence


def shared_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two int32 arrays have in common at their start."""
    size = min(len(a), len(b))
    # Most differ at once, and a server asks for each pair in each step.
    if not size or a[0] != b[0]:
        return 0
    different = a[:size] != b[:size]
    place = int(different.argmax())
    return place if different[place] else size


class PrefixCache:
    """Sequences, the least recently used first. It owns them: evicting one closes it."""

    def __init__(self, most: int = 64) -> None:
        """`most`: sequences kept at once; 0 keeps none."""
        self._most = most
        self._kept: list[tuple[EngineSequence, np.ndarray]] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, sequence: EngineSequence, tokens: np.ndarray) -> None:
        """Take over a sequence that holds `tokens` (int32 [length])."""
        if self._most == 0 or len(tokens) == 0:
            sequence.close()
            return
        for entry in list(self._kept):
            shared = shared_length(entry[1], tokens)
            if shared == len(entry[1]):
                self._drop(entry)
            elif shared == len(tokens):
                # It goes on from there: as recently used, and one is enough.
                sequence.close()
                self._remove(entry)
                self._kept.append(entry)
                return
        self._kept.append((sequence, tokens))
        if len(self._kept) > self._most:
            self.evict()

    def longest(
        self, tokens: np.ndarray, others: Iterable[tuple[EngineSequence | None, np.ndarray]] = ()
    ) -> tuple[EngineSequence | None, int]:
        """The sequence, kept or one of `others`, that shares the longest beginning with `tokens`, and
        the length of that; (None, 0) if none shares any."""
        best: EngineSequence | None = None
        length, used = 0, None
        for entry in self._kept:
            shared = shared_length(entry[1], tokens)
            if shared > length:
                best, length, used = entry[0], shared, entry
        for sequence, held in others:
            shared = shared_length(held, tokens)
            if shared > length:
                best, length, used = sequence, shared, None
        if used is not None:
            self._remove(used)
            self._kept.append(used)
        return best, length

    def evict(self) -> bool:
        """Close the least recently used sequence; False if there is none."""
        if not self._kept:
            return False
        self._drop(self._kept[0])
        return True

    def clear(self) -> None:
        """Close all of them."""
        while self.evict():
            pass

    def _drop(self, entry: tuple[EngineSequence, np.ndarray]) -> None:
        self._remove(entry)
        entry[0].close()

    def _remove(self, entry: tuple[EngineSequence, np.ndarray]) -> None:
        # By identity: comparing arrays has no single truth value.
        self._kept = [other for other in self._kept if other is not entry]
