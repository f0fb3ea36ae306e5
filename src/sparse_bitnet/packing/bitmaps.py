# SPDX-License-Identifier: Apache-2.0
"""Ternary rows as bitmaps of the weights that are not zero, and bits as bytes and words."""

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import numpy as np

from sparse_bitnet.host import available_cores
from sparse_bitnet.pattern import NMPattern

Bytes = np.ndarray
"""uint8 array."""

SLICE_WEIGHTS = 1 << 19
"""Weights coded at a time: intermediate results stay in the cache, and memory stays bounded."""

POPCOUNT: Bytes = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, np.uint8)
"""[256]: set bits of a byte."""


T = TypeVar("T")


class DamagedBytes(Exception):
    """Bytes to which no matrix of codes is packed. The message says why."""


def by_slices(rows: int, in_features: int, work: Callable[[slice], T]) -> list[T]:
    """What `work` returns for consecutive rows, `SLICE_WEIGHTS` at a time, on as many threads as torch
    has, without it as there are processors."""
    torch = sys.modules.get("torch")
    step = max(1, SLICE_WEIGHTS // in_features)
    slices = [slice(first, min(first + step, rows)) for first in range(0, rows, step)]
    threads = min(torch.get_num_threads() if torch else available_cores(), len(slices))
    if threads <= 1:
        return [work(part) for part in slices]
    # numpy releases the interpreter's lock in all that takes time here.
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, slices))


def nonzero_bitmap(codes: np.ndarray) -> Bytes:
    """int8 [rows, in_features] -> [rows, ceil(in_features / 8)], bit i of byte j for weight 8 j + i."""
    return np.packbits(codes.view(np.uint8), axis=-1, bitorder="little")


def bits_of(bitmap: Bytes, count: int) -> Bytes:
    """[rows, bytes] -> [rows, count] of 0 and 1: the first `count` bits of every row."""
    return np.unpackbits(bitmap, axis=-1, count=count, bitorder="little")


def bits_of_words(words: np.ndarray, count: int) -> Bytes:
    """uint64 [...] -> [..., count] of 0 and 1: the lowest bits of every word."""
    as_bytes = words.astype("<u8", copy=False).view(np.uint8).reshape(*words.shape, 8)
    return np.unpackbits(as_bytes, axis=-1, count=count, bitorder="little")


def words_of_bits(bits: Bytes) -> np.ndarray:
    """Inverse of `bits_of_words`."""
    as_bytes = np.zeros((*bits.shape[:-1], 8), np.uint8)
    packed = np.packbits(bits, axis=-1, bitorder="little")
    as_bytes[..., : packed.shape[-1]] = packed
    return as_bytes.view("<u8")[..., 0].astype(np.uint64)


def fits_pattern(bitmap: Bytes, pattern: NMPattern, in_features: int) -> bool:
    """Whether every group of m has at most n bits set in a bitmap [rows, ceil(in_features / 8)]."""
    m = pattern.m
    if pattern.is_dense:
        return True
    if 8 % m == 0:
        return not _overfull_bytes(pattern)[bitmap].any()
    counts, span = (POPCOUNT[bitmap], m // 8) if m % 8 == 0 else (bits_of(bitmap, in_features), m)
    totals = counts[:, 0::span].copy()
    for i in range(1, span):
        totals += counts[:, i::span]
    return bool((totals <= pattern.n).all())


@cache
def _overfull_bytes(pattern: NMPattern) -> np.ndarray:
    """bool [256]: bytes that hold a group of m with more than n bits set; m divides 8."""
    groups = bits_of(np.arange(256, dtype=np.uint8)[:, None], 8).reshape(256, -1, pattern.m)
    return (groups.sum(-1) > pattern.n).any(-1)
