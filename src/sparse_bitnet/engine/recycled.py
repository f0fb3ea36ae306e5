# SPDX-License-Identifier: Apache-2.0
"""Arrays whose memory is used again: a system gives new memory slowly, page by page."""

import weakref

import numpy as np

_MOST = 2
"""Arrays kept: those of the step before are often still held while the next one is computed."""
_MOST_BYTES = 64 << 20


class RecycledArrays:
    """Makes float32 arrays in the memory of earlier ones, of which nobody holds a view any more."""

    def __init__(self) -> None:
        self._left: list[np.ndarray] = []

    def empty(self, rows: int, columns: int) -> np.ndarray:
        """float32 [rows, columns] of any content."""
        count = rows * columns
        if not 0 < 4 * count <= _MOST_BYTES:
            return np.empty((rows, columns), np.float32)
        memory = self._left.pop() if self._left else None
        if memory is None or memory.size < count:
            memory = np.empty(count, np.float32)
        # Views refer to this array, which owns no memory and tells when the last of them is gone.
        lent = np.frombuffer(memory.data, np.float32, count)
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent.reshape(rows, columns)

    def _take_back(self, memory: np.ndarray) -> None:
        if len(self._left) < _MOST:
            self._left.append(memory)
