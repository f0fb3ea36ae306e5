# SPDX-License-Identifier: Apache-2.0
"""CRC-32 of 64 MB in memory on one thread: the standard library, packages, and our C++ beside them.

python benchmarks/checksums.py      (isal is measured where it is installed)
"""

import importlib
import time
import zlib
from collections.abc import Callable
from functools import partial

import numpy as np

from sparse_bitnet import _cpu

ROUNDS = 15


def main() -> None:
    """Print the best of all rounds, taken in turn."""
    data = np.random.default_rng(0).integers(256, size=64 << 20, dtype=np.uint8)
    ways: dict[str, Callable[[], int]] = {
        "zlib": lambda: zlib.crc32(data.data),
        "ours, in the loader": lambda: _cpu.Kernels.choose().crc32(data.ctypes.data, data.size),
    }
    for name, module in {"zlib-ng": "zlib_ng.zlib_ng", "isal": "isal.isal_zlib"}.items():
        try:
            ways[name] = partial(importlib.import_module(module).crc32, data.data)
        except ImportError:
            print(f"{name} is not installed")
    expected = zlib.crc32(data.data)
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for name, way in ways.items():
            start = time.perf_counter()
            checksum = way()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
            assert checksum == expected
    for name, best in seconds.items():
        print(f"| {name} | {data.size / best / 1e9:.1f} |")


if __name__ == "__main__":
    main()
