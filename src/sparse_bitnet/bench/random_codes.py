# SPDX-License-Identifier: Apache-2.0
"""Random ternary matrices with the zeros and the groups of a model whose masters are Gaussian, as before
training and, nearly, after: groups of codes are drawn from a table of 65,536 that were selected as
training selects them."""

from collections.abc import Iterator

import numpy as np

from sparse_bitnet.pattern import NMPattern

WEIGHT_STD = 0.02
TABLE_GROUPS = 1 << 16
PIECE_WEIGHTS = 1 << 22
"""Weights that are made at a time."""


class RandomCodes:
    """Ternary matrices within a pattern, from Gaussian masters of `WEIGHT_STD`."""

    def __init__(self, pattern: NMPattern, seed: int, *, binary: bool = False) -> None:
        """`binary`: no code is zero but those that the pattern drops."""
        self._rng = np.random.Generator(np.random.SFC64([seed, 0]))
        # Eight codes are one word of the table wherever groups fill it; every preset's rows do.
        self._unit = pattern.m if pattern.m % 8 == 0 else 8 if 8 % pattern.m == 0 else pattern.m
        if pattern.is_dense:
            self._unit = 8
        masters = self._rng.standard_normal((TABLE_GROUPS, self._unit), np.float32)
        mean = np.abs(masters).mean()
        codes = np.sign(masters) if binary else np.clip(np.rint(masters / mean), -1, 1)
        codes = codes.astype(np.int8)
        if not pattern.is_dense:
            groups = np.abs(masters).reshape(-1, pattern.m)
            dropped = np.argsort(groups, axis=1, kind="stable")[:, : pattern.m - pattern.n]
            np.put_along_axis(codes.reshape(-1, pattern.m), dropped, 0, axis=1)
        self._table = codes
        self.weight_scale = float(mean) * WEIGHT_STD

    def pieces(self, rows: int, in_features: int) -> Iterator[np.ndarray]:
        """int8 [some rows, in_features] until all are there."""
        step = max(1, PIECE_WEIGHTS // in_features)
        for first in range(0, rows, step):
            count = min(step, rows - first)
            units = -(-in_features // self._unit)
            drawn = self._rng.integers(0, TABLE_GROUPS, (count, units), np.uint16)
            if self._unit == 8:
                codes = self._table.view(np.uint64)[:, 0][drawn].view(np.int8)
            else:
                codes = self._table[drawn].reshape(count, -1)
            yield np.ascontiguousarray(codes[:, :in_features])
