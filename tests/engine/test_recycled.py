# SPDX-License-Identifier: Apache-2.0
"""Memory of arrays is used again when, and only when, nobody holds it."""

import numpy as np

from sparse_bitnet.engine.recycled import RecycledArrays


def test_memory_is_used_again_when_its_last_view_is_gone():
    arrays = RecycledArrays()
    rows = list(arrays.empty(4, 8))
    addresses = [row.ctypes.data for row in rows]
    del rows[1:]
    other = arrays.empty(4, 8)
    assert other.ctypes.data != addresses[0]
    rows.clear()
    again = arrays.empty(2, 8)
    assert again.ctypes.data == addresses[0]
    assert not np.shares_memory(again, other)
    assert again.shape == (2, 8)
    assert again.flags.writeable
    assert again.dtype == np.float32


def test_what_is_too_small_or_too_large_is_not_kept():
    arrays = RecycledArrays()
    small = arrays.empty(1, 3)
    del small
    assert arrays.empty(5, 3).shape == (5, 3)
    large = arrays.empty(1, 17 << 20)
    del large
    assert not any(memory.size > 16 << 20 for memory in arrays._left)
    kept = len(arrays._left)
    assert arrays.empty(0, 7).shape == (0, 7)
    assert len(arrays._left) == kept == 1
