# SPDX-License-Identifier: Apache-2.0
"""N:M codes in the 2:4 layout of sparse tensor cores, and the activations in the matching order.

A group of m = 2k weights with at most 2k - 2 non-zeros splits into k - 1 windows of four at offsets 0,
2, 4, ..., each with at most two non-zeros: from left to right, every non-zero goes to the first window
that covers its position and has room. So 6:8 becomes three windows, 12 columns for 8, and half of the 12
are computed: 0.75 of the dense multiply-adds. Patterns in which any aligned four weights hold at most
two non-zeros (2:4, 2:8, 1:m) are used unchanged.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.pattern import NMPattern

WINDOW = 4
"""Columns of a window; two of them may be other than zero."""

COLUMN_MULTIPLE = 32
"""Widths of sparse int8 operands are multiples of this (cuSPARSELt); zero columns fill up."""


class WindowLayout(NamedTuple):
    """Map from expanded columns to their source columns. Column c of an expanded row is lane
    c % 4 of window c // 4 % windows of group c // (4 * windows); its source is group * m + 2 * window
    + lane, or c itself where the pattern passes through."""

    m: int
    """Source columns of a group; 4 where the pattern passes through."""
    windows: int
    """Windows of a group; 1 where the pattern passes through."""

    def width(self, in_features: int) -> int:
        """Expanded columns, K' of K, with those that fill up."""
        columns = -(-in_features // self.m) * self.windows * WINDOW
        return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def window_layout(pattern: NMPattern) -> WindowLayout:
    """Return how a pattern maps to 2:4.

    Raises `UserError` with the reason for patterns that do not: 7:8, 8:8, odd m with n > 1.
    """
    n, m = pattern.n, pattern.m
    if not pattern.is_dense and (n == 1 or (n == 2 and m % WINDOW == 0)):
        return WindowLayout(WINDOW, 1)
    if m % 2 == 0 and m >= WINDOW and n <= m - 2:
        return WindowLayout(m, m // 2 - 1)
    raise UserError(
        f"pattern {pattern} has no 2:4 form, which needs an even m and at most m - 2 of m weights; "
        "run it on the dense kernels"
    )


def gather_index(
    pattern: NMPattern, in_features: int, device: torch.device | None = None
) -> Tensor:
    """Return the source column of every expanded column of K = `in_features`: int64 [K'], -1 for added
    columns. Raises `UserError` as `window_layout` does."""
    layout = window_layout(pattern)
    column = torch.arange(layout.width(in_features), device=device)
    window, lane = column // WINDOW, column % WINDOW
    source = window // layout.windows * layout.m + 2 * (window % layout.windows) + lane
    return torch.where(source < in_features, source, -1)


def window_expand(codes: Tensor, pattern: NMPattern, *, name: str = "(unnamed)") -> Tensor:
    """Return codes in 2:4 layout: `expanded @ x[gather_index]` equals `codes @ x`, exactly.

    Args:
        codes: int8 [rows, in_features], at most n non-zeros in every group of m.
        pattern: n:m of the codes.
        name: of the layer, for error messages.

    Returns int8 [rows, K'], K' a multiple of 32.

    Raises `UserError` for a pattern without 2:4 layout and for codes outside the pattern.
    """
    layout = window_layout(pattern)
    pattern.check_divides(codes.shape[1], name)
    grouped = F.pad(codes, (0, -codes.shape[1] % layout.m)).unflatten(1, (-1, layout.m))
    windows = codes.new_zeros(*grouped.shape[:2], layout.windows, WINDOW)
    used = torch.zeros(windows.shape[:3], dtype=torch.int8, device=codes.device)
    for position in range(layout.m):
        # A code that has its window becomes zero here.
        code = grouped[:, :, position]
        for window in range(max(0, position // 2 - 1), min(layout.windows, position // 2 + 1)):
            here = torch.where(used[:, :, window] < 2, code, 0)
            windows[:, :, window, position - 2 * window] = here
            used[:, :, window] += here != 0
            code = code - here
        if code.any():
            raise UserError(
                f"layer {name}: a group of {pattern.m} has more than {pattern.n} non-zero codes"
            )
    return F.pad(windows.flatten(1), (0, -windows[0].numel() % COLUMN_MULTIPLE))
