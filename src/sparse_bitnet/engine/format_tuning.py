# SPDX-License-Identifier: Apache-2.0
"""Choice of the fastest run-time weight format on this machine: a short measurement, cached on disk.

One token is multiplied with more weights than caches hold, in each format that holds the pattern:
reading memory competes with unpacking, and which of the two wins differs from machine to machine.
"""

import ctypes
import json
import platform
import time
from contextlib import suppress
from typing import Any

import numpy as np

from sparse_bitnet import __version__, _cpu
from sparse_bitnet.engine.weights import FORMATS, row_bytes, row_stride
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.host import cache_folder, cpu_info
from sparse_bitnet.packing.formats import coded_pattern
from sparse_bitnet.pattern import NMPattern

_BYTES = 64 << 20
COLUMNS = 3840
"""Whole blocks of every format."""
_REPEATS = 6
_SECONDS = 2.0
"""No round begins after this long, so that slow kernels do not hold up the first start."""
_LOOK_UP = ("amx_int8", "avx512vbmi", "i8mm", "neon")
_TIE = 1.02
"""Ratio of times within which formats count as equally fast; the one with the fewest bytes is chosen."""


def choose_format(
    pattern: NMPattern, pool: _cpu.ThreadPool, kernels: _cpu.Kernels, *, exact: bool = False
) -> str:
    """Return the run-time format in which `pool` multiplies one token fastest, measured now or earlier.

    `exact`: every group of weights has n non-zeros.
    """
    processor = cpu_info().get("model name") or platform.processor()
    coded = f"{coded_pattern(pattern)}{' exactly' if exact else ''}"
    key = f"{__version__} | {processor} | {kernels.isa} | {pool.threads} threads | {coded}"
    path, known = cache_folder() / "formats.json", {}
    with suppress(OSError, ValueError, TypeError, RecursionError):
        known = dict(json.loads(path.read_text(encoding="utf-8")))
    if (choice := known.get(key)) in tuple(FORMATS):
        return str(choice)
    seconds = measure_formats(pattern, pool, kernels, exact=exact)
    bound = min(seconds.values()) * _TIE
    close = [name for name, taken in seconds.items() if taken <= bound]
    best = min(close, key=lambda name: (row_bytes(name, pattern, COLUMNS, exact), seconds[name]))
    # A folder that cannot be written costs a measurement at every start, nothing else.
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
    size: int | None = None,
) -> dict[str, float]:
    """Return the seconds that a weight takes in every format that holds the pattern, the least of
    several interleaved measurements.

    `size`: bytes of the weights, which are read again and again until as many were read as by default.
    """
    size = size or _BYTES
    coded = coded_pattern(pattern)
    memory = _cpu.HugeBuffer(size + 512)
    # Random bytes: what they stand for matters to no kernel's speed, that they are not one page does.
    # Each format meets weights it would not write (fields of 3), which kernels do not check.
    view = np.ctypeslib.as_array((ctypes.c_uint8 * memory.size).from_address(memory.address))
    view[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), memory.size)
    x = np.random.default_rng(0).standard_normal(COLUMNS, np.float32)
    codes = np.zeros(COLUMNS + _cpu.ACTIVATION_SLACK, np.int8)
    scales, sums = np.zeros(1, np.float32), np.zeros(1, np.int32)
    activations = _cpu.Activations(
        1, COLUMNS, codes.ctypes.data, 0, scales.ctypes.data, sums.ctypes.data, 0
    )
    kernels.quantize(pool, x.ctypes.data, activations)
    products: dict[str, Any] = {}
    weights, outputs = {}, []
    # lookup is for instruction sets that look 64 bytes up at once, and for whole groups in the columns.
    looks_up = kernels.isa in _LOOK_UP and COLUMNS % coded.m == 0
    for name, format in FORMATS.items():
        if name == "lookup" and not looks_up:
            continue
        stride = row_stride(name, pattern, COLUMNS, exact)
        rows = size // stride // _cpu.STRIP_ROWS * _cpu.STRIP_ROWS
        y = np.empty(rows, np.float32)
        outputs.append(y)
        weights[name] = rows * COLUMNS
        matrix = _cpu.Matrix(
            *(format, coded.n, coded.m, rows, COLUMNS, stride, memory.address),
            exact=exact and name == "lookup",
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
