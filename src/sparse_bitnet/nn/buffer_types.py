# SPDX-License-Identifier: Apache-2.0
"""Buffers whose type is not that of the weights."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class KeepsBufferTypes(nn.Module):
    """Its own buffers keep their type, and their bits, when `half` or `to` gives the weights another."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        held = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in held.items():
            moved = self.get_buffer(name)
            if moved.dtype != buffer.dtype:
                setattr(self, name, buffer.to(moved.device))
        return self
