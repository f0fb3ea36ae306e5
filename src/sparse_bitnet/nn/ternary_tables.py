# SPDX-License-Identifier: Apache-2.0
"""Ternary embedding and output head: each forward quantises the rows that it uses, and the gradient goes
straight through to the dense masters, as in `SparseBitLinear`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.straight_through import straight_through
from sparse_bitnet.packing.ternary import TernaryWeight
from sparse_bitnet.variants.built_in import per_group

_GROUPS = (128, 64, 32)
"""Weights of a row that share a scale: the first that divides the row. 128 is Bonsai's."""


def quantize_table(rows: Tensor) -> TernaryWeight:
    """Return the codes of rows [rows, hidden], and the mean |w| of each group in float16, as files do."""
    group = next(size for size in _GROUPS if rows.shape[-1] % size == 0)
    codes, scale = per_group(rows.detach(), None, size=group)
    return TernaryWeight(codes, scale.half())


def _ternary(rows: Tensor) -> Tensor:
    values = quantize_table(rows.flatten(0, -2)).values().to(rows.dtype)
    return straight_through(rows, values.view_as(rows))


class TernaryEmbedding(nn.Embedding):
    """`nn.Embedding` whose forward returns ternary rows."""

    def forward(self, input: Tensor) -> Tensor:
        return _ternary(super().forward(input))


class TernaryHead(nn.Linear):
    """`nn.Linear` that multiplies by the ternary weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, head_weight(self), self.bias)


_TERNARY: dict[type, type] = {nn.Embedding: TernaryEmbedding, nn.Linear: TernaryHead}
_PLAIN = {ternary: plain for plain, ternary in _TERNARY.items()}


def head_weight(head: Any) -> Tensor:
    """Return the weight that an output head multiplies by, with a gradient to its parameter."""
    return _ternary(head.weight) if isinstance(head, TernaryHead) else head.weight


@torch.no_grad()
def round_tables_(model: Any) -> None:
    """Replace the masters of ternary tables by the values that they stand for, and make the tables plain:
    for inference, where each token would quantise them again."""
    for weight in {table.weight for table in model.modules() if type(table) in _PLAIN}:
        weight.copy_(_ternary(weight))
    set_tables_(model, ternary=False)


@contextmanager
def rounded_tables(model: Any) -> Iterator[None]:
    """Apply `round_tables_` inside; afterwards the tables are ternary again, with the same masters."""
    tables = [table for table in model.modules() if type(table) in _PLAIN]
    masters = {table.weight: table.weight.data for table in tables}
    try:
        for weight, values in masters.items():
            weight.data = values.clone()
        round_tables_(model)
        yield
    finally:
        for weight, values in masters.items():
            weight.data = values
        if tables:
            set_tables_(model, ternary=True)


def set_tables_(model: Any, ternary: bool) -> None:
    """Make a model's embedding and head ternary or plain; they keep their parameters, tied or not.

    Raises `UserError` for tables that cannot be ternary.
    """
    for module in model.modules():
        module.__class__ = _PLAIN.get(type(module), type(module))
    if not ternary:
        return
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    tables = [table for table in ends if table is not None]
    fit = [type(table) in _TERNARY and table.weight.shape[-1] % 32 == 0 for table in tables]
    if not (fit and all(fit)):
        raise UserError(
            "embeddings=ternary needs an ordinary embedding and head, with rows in groups of 32; "
            f"{type(model).__name__} has {tables or 'none'}: leave it out"
        )
    for table in tables:
        table.__class__ = _TERNARY[type(table)]
