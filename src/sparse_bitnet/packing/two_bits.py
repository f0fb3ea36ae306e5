# SPDX-License-Identifier: Apache-2.0
"""Two bits a code as other tools lay them out: bitnet's planes, compressed-tensors' words."""

import torch
from torch import Tensor

CODES_PER_BYTE = 4
CODES_PER_WORD = 16

W2A8 = "pack-quantized"
W8A8 = "int-quantized"
"""compressed-tensors' names of its formats with two- and eight-bit weights."""

_OFFSET = 2
"""Stored value of the code 0 in a word: half the range of two bits."""


def pack_row_planes(codes: Tensor) -> Tensor:
    """int8 codes [out_features, in_features] -> uint8 [out_features / 4, in_features].

    With R = out_features / 4, byte[r, c] = sum over i of (code[r + i * R, c] + 1) << 2i.
    """
    planes = (codes + 1).to(torch.uint8).unflatten(0, (CODES_PER_BYTE, -1))
    packed = planes[0].clone()
    for i in range(1, CODES_PER_BYTE):
        packed |= planes[i] << 2 * i
    return packed


def unpack_row_planes(packed: Tensor) -> Tensor:
    """Inverse of `pack_row_planes`; the fourth value of two bits comes back as 2."""
    planes = [(packed >> 2 * i) & 3 for i in range(CODES_PER_BYTE)]
    return torch.cat(planes).to(torch.int8) - 1


def pack_words(codes: Tensor) -> Tensor:
    """int8 codes [out, in] -> int32 [out, ceil(in / 16)]; code + 2 along the row, least significant
    bits first; the last word of a row ends in zero bits."""
    rows, columns = codes.shape
    words = -(-columns // CODES_PER_WORD)
    values = torch.zeros(rows, words * CODES_PER_WORD, dtype=torch.uint8)
    values[:, :columns] = (codes + _OFFSET).to(torch.uint8)
    # Four codes to a byte; four bytes, little end first, are the word.
    quads = values.view(rows, -1, 4)
    packed = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    return packed.contiguous().view(torch.int32)


def unpack_words(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_words` for rows of `columns` codes; a code -2 comes back as it is."""
    quads = packed.contiguous().view(torch.uint8)
    values = torch.stack([(quads >> 2 * i) & 3 for i in range(4)], -1).flatten(1)
    return values[:, :columns].to(torch.int8) - _OFFSET
