# SPDX-License-Identifier: Apache-2.0
"""The run-time formats of ternary weights, which the kernels multiply: their sizes, and the choice of the
fastest. No torch."""

import ctypes
import json
import os
import platform
import time
from contextlib import suppress
from typing import Any

import numpy as np

from sparse_bitnet import __version__, _cpu
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.host import cache_folder, cpu_info
from sparse_bitnet.packing.formats import coded_pattern
from sparse_bitnet.pattern import NMPattern

FORMATS = {name: _cpu.WeightFormat[name] for name in ("i2", "b3", "lookup")}
"""Run-time formats of weights."""

ALIGNMENT = 64
_BYTES = 64 << 20
"""Weights of a measurement: more than caches hold, so that reading memory competes with unpacking."""
COLUMNS = 3840
"""Whole blocks of every format."""
_REPEATS = 6
_SECONDS = 2.0
"""No round begins after this long, so that slow kernels do not hold up the first start."""
LARGE_GROUPS = (64, 128, 256)
"""Numbers of weights per scale that b3 and lookup support, besides a row and more."""
_LOOK_UP = ("amx_int8", "avx512vbmi", "i8mm", "neon")
"""Instruction sets that look up 64 bytes at once; with group scales the first two."""
_TIE = 1.02
"""Ratio of times within which formats count as equally fast; the one with the fewest bytes is chosen."""


def choose_format(
    pattern: NMPattern,
    pool: _cpu.ThreadPool,
    kernels: _cpu.Kernels,
    *,
    exact: bool = False,
    group: int = 0,
) -> str:
    """Return the run-time format in which `pool` multiplies one token fastest, measured now or earlier by
    `measure_formats`, which describes the arguments."""
    processor = cpu_info().get("model name") or platform.processor()
    coded = f"{coded_pattern(pattern)}{' exactly' if exact else ''}"
    scaled = f" | scales per {group}" if group else ""
    build = os.stat(_cpu.__file__).st_mtime_ns  # kernels of one version differ, too
    machine = f"{processor} | {kernels.isa} | {pool.threads} threads"
    key = f"{__version__} {build} | {machine} | {coded}{scaled}"
    path, known = cache_folder() / "formats.json", {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    if (choice := known.get(key)) in tuple(FORMATS):
        return str(choice)
    seconds = measure_formats(pattern, pool, kernels, exact=exact, group=group)
    if kernels.isa not in ("avx512", "avx2"):  # elsewhere b3 is half as fast with several tokens
        seconds.pop("b3", None)
    bound = min(seconds.values()) * _TIE
    close = [name for name, taken in seconds.items() if taken <= bound]
    best = min(close, key=lambda f: (row_bytes(f, pattern, COLUMNS, exact, group), seconds[f]))
    # If the folder cannot be written, every start measures again.
    with suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({**known, key: best}, indent=2) + "\n")
    return best


def measure_formats(
    pattern: NMPattern,
    pool: _cpu.ThreadPool,
    kernels: _cpu.Kernels,
    *,
    exact: bool = False,
    group: int = 0,
    size: int | None = None,
) -> dict[str, float]:
    """Return the seconds that a weight takes in every format that supports the pattern, the least of
    several interleaved measurements.

    Args:
        exact: every group of weights has n non-zeros.
        group: number of weights that share a float16 scale; 0: a row or more.
        size: bytes of the weights; by default more than caches hold. Smaller weights are read repeatedly.
    """
    size, coded = size or _BYTES, coded_pattern(pattern)
    memory = _cpu.HugeBuffer(size + 512)
    # Random bytes: kernels are as fast with any values, but not with one page mapped many times.
    # Some are invalid in each format (fields of 3), which kernels do not check.
    view = np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(memory.address))
    view[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), memory.size)
    x = np.random.default_rng(0).standard_normal(COLUMNS, np.float32)
    codes = np.zeros(COLUMNS + 64 + _cpu.ACTIVATION_SLACK, np.int8)
    scales, sums = np.zeros(1, np.float32), np.zeros(1, np.int32)
    activations = _cpu.Activations(
        1, COLUMNS, codes.ctypes.data, 0, scales.ctypes.data, sums.ctypes.data, 0
    )
    kernels.quantize(x.ctypes.data, activations)
    products: dict[str, Any] = {}
    weights: dict[str, int] = {}
    outputs: list[np.ndarray] = []
    isas = {"b3": ("avx", "amx"), "lookup": _LOOK_UP[:2] if group else _LOOK_UP}
    for name, format in FORMATS.items():
        if not kernels.isa.startswith(isas.get(name, "")):
            continue
        if name != "i2" and group not in (0, *LARGE_GROUPS):
            continue
        if name == "lookup" and COLUMNS % coded.m:
            continue
        stride = row_stride(name, pattern, COLUMNS, exact, group)
        rows = size // stride // _cpu.B3_STRIP_ROWS * _cpu.B3_STRIP_ROWS
        outputs.append(y := np.empty(rows, np.float32))
        weights[name] = rows * COLUMNS
        scaled: dict[str, Any] = {}
        if group:
            outputs.append(np.full(rows * COLUMNS // group, 0.5, np.float16))
            kind = _cpu.ScaleType.float16
            scaled = {"scales": outputs[-1].ctypes.data, "group": group, "scale_type": kind}
        matrix = _cpu.Matrix(
            *(format, coded.n, coded.m, rows, COLUMNS, stride, memory.address),
            exact=exact and name == "lookup",
            **scaled,
        )
        products[name] = _cpu.Product(matrix, 0, y.ctypes.data, rows)
    seconds = dict.fromkeys(products, float("inf"))
    repeats, began = -(-_BYTES // size), time.perf_counter()
    for done in range(_REPEATS):
        if done and time.perf_counter() - began > _SECONDS:
            break
        for name, product in products.items():
            started = time.perf_counter()
            kernels.matmul(pool, activations, [product], repeats)
            taken = (time.perf_counter() - started) / (weights[name] * repeats)
            seconds[name] = min(seconds[name], taken)
    return seconds


def row_bytes(name: str, pattern: NMPattern, columns: int, exact: bool, group: int = 0) -> int:
    """Return the bytes of a row in a format of `FORMATS`. exact: every group has n non-zeros. group:
    number of weights that share a scale, 0: all."""
    coded, exact = coded_pattern(pattern), exact and name == "lookup"
    return _cpu.bytes_per_row(FORMATS[name], coded.n, coded.m, columns, exact, group)


def row_stride(name: str, pattern: NMPattern, columns: int, exact: bool, group: int = 0) -> int:
    """Return the bytes between rows: those of a row, for i2 rounded up to whole cache lines."""
    size = row_bytes(name, pattern, columns, exact, group)
    return aligned(size) if name == "i2" else size


def aligned(size: int) -> int:
    """Round up to whole cache lines."""
    return -(-size // ALIGNMENT) * ALIGNMENT
