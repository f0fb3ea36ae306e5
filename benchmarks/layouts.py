# SPDX-License-Identifier: Apache-2.0
"""Time of a weight in each run-time layout, from a cache and from memory.

    python benchmarks/layouts.py

One token times a matrix, as in decoding, without the rest of a model. Layouts are measured in turns,
each pattern several times; the least counts. Appends rows to benchmarks/results/.
"""

import argparse
from pathlib import Path

from recorded import record
from rich.console import Console

from sparse_bitnet import _cpu
from sparse_bitnet.engine.run_time_formats import COLUMNS, measure_formats, row_bytes
from sparse_bitnet.pattern import NMPattern

PATTERNS = {"8:8": False, "6:8": False, "2:4": False, "2:8": False, "3:4": True}
"""Patterns, and whether each of their groups has exactly n non-zeros."""
SIZES = {"cache": 256 << 10, "memory": 256 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--isa", default="", help="default: the best")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON lines; default: in benchmarks/results/")
    options = parser.parse_args()
    kernels, rows = _cpu.Kernels.choose(options.isa), []
    for threads in options.threads:
        pool = _cpu.ThreadPool(threads)
        best: dict[tuple[str, str, str], float] = {}
        for _ in range(options.turns):
            for name, exact in PATTERNS.items():
                pattern = NMPattern.parse(name)
                for place, size in SIZES.items():
                    by_format = measure_formats(pattern, pool, kernels, exact=exact, size=size)
                    for format, seconds in by_format.items():
                        key = (name, format, place)
                        best[key] = min(seconds, best.get(key, seconds))
        for name, format in dict.fromkeys(key[:2] for key in best):
            pattern, exact = NMPattern.parse(name), PATTERNS[name]
            rows.append(
                {
                    "isa": kernels.isa,
                    "threads": threads,
                    "pattern": name + " exactly" * exact,
                    "layout": format,
                    "bits": 8 * row_bytes(format, pattern, COLUMNS, exact) / COLUMNS,
                    "seconds_in_cache": best[name, format, "cache"] * threads,
                    "weights_per_second": 1 / best[name, format, "memory"],
                    "over_i2": best[name, "i2", "memory"] / best[name, format, "memory"],
                }
            )
    record("layouts", rows, options.out)
    Console().print(rows)


if __name__ == "__main__":
    main()
