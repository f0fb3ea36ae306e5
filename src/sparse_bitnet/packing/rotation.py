# SPDX-License-Identifier: Apache-2.0
"""Rotated weights: ternary matrices that are stored in another basis than that of their inputs.

A matrix is stored as W S H and multiplies H(s x), which equals W x. H is block-diagonal: the normalised
Hadamard matrix (-1)^popcount(r & c) / sqrt(block) for each run of `block` values. S is the diagonal of
the signs s, one vector for each width of inputs. A row of a rotated embedding is looked up as s H(row).
The transform is computed in float32, as butterflies of strides 1, 2, 4, ... in this order.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.variants.built_in import hadamard, sign

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """Rotation of all ternary matrices of a model."""

    block: int
    """Values that one Hadamard matrix mixes, a power of two."""
    signs: dict[int, bytes]
    """Width of inputs -> a bit for each value, 1 for minus, the first in the lowest bit of a byte."""
    embedding: bool
    """Whether the embedding is rotated."""
    head: bool
    """Whether the output head is rotated."""

    @classmethod
    def of_format(cls, format: SparseBitConfig, widths: Iterable[int]) -> Self | None:
        """Return the rotation of trained weights with such inputs; None where the format has none."""
        activation = format.variant("activation")
        if activation.name != "int8-hadamard":
            return None
        block = (activation.fields | activation.values)["block"]
        signs = {
            w: np.packbits(sign(np.arange(w)) < 0, bitorder="little").tobytes() for w in widths
        }
        return cls(block=block, signs=signs, embedding=False, head=False)

    def values(self, width: int) -> np.ndarray:
        """Return the signs of inputs of this width: 1 and -1, float32 [width]."""
        bits = np.frombuffer(self.signs[width], np.uint8)
        return 1 - 2 * np.unpackbits(bits, count=width, bitorder="little").astype(np.float32)

    def tables(self, names: Sequence[str]) -> list[str]:
        """Return the rotated ones of `names`: of the embedding and, unless it is shared, of the head."""
        are_rotated = (self.embedding, self.head)
        return [name for name, is_rotated in zip(names, are_rotated, strict=False) if is_rotated]

    def inputs(self, x: "Tensor") -> "Tensor":
        """Return H(s x), which a stored matrix multiplies; floats [..., width]."""
        import torch

        op = hadamard if torch.is_grad_enabled() else torch.ops.sparse_bitnet.hadamard
        return op(x.float() * self._signs(x), self.block).to(x.dtype)

    def rows(self, stored: "Tensor") -> "Tensor":
        """Return s H(row) for each stored row: the matrix before its rotation, float32 [rows, width]."""
        import torch

        op, signs = torch.ops.sparse_bitnet.hadamard, self._signs(stored)
        # Some rows at a time: where the plain form runs, each step makes a copy of them.
        return torch.cat([op(part.float(), self.block) * signs for part in stored.split(4096)])

    def _signs(self, x: "Tensor") -> "Tensor":
        import torch

        return torch.from_numpy(self.values(x.shape[-1])).to(x.device)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the metadata of a packed file stores them."""
        return {**vars(self), "signs": {str(w): bits.hex() for w, bits in self.signs.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any], layers: dict[str, tuple[int, int]]) -> Self:
        """Inverse of `to_json`. Raises `UserError`, or another error of unreadable values, for a rotation
        that these layers, name -> (rows, inputs), cannot have."""
        signs = {int(width): bytes.fromhex(bits) for width, bits in values["signs"].items()}
        made = cls(**{**values, "signs": signs})
        block, types = made.block, (type(made.block), type(made.embedding), type(made.head))
        fits = types == (int, bool, bool) and block > 0 and not block & block - 1
        fits = fits and all(w % block == 0 and len(signs[w]) == -(-w // 8) for w in signs)
        if not fits or not {width for _, width in layers.values()} <= signs.keys():
            raise UserError("its rotation does not fit its layers")
        return made
