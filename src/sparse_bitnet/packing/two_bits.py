# SPDX-License-Identifier: Apache-2.0
"""Ternary codes in two bits outside our packed files: as processes exchange them, and as other tools
store them (bitnet's planes, compressed-tensors' words)."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

CODES_PER_BYTE = 4
CODES_PER_WORD = 16

W2A8 = "pack-quantized"
W8A8 = "int-quantized"
"""compressed-tensors' names of its formats with two- and eight-bit weights."""


def pack_codes(codes: Tensor) -> Tensor:
    """Pack four codes per byte, the first in the lowest bits, each stored as code + 1.

    Args:
        codes: int8 [rows, in_features] in {-1, 0, 1}.

    Returns uint8 [rows, ceil(in_features / 4)]; the last byte of a row is filled up with zero bits.
    """
    rows, width = codes.shape
    padded = F.pad(codes + 1, (0, -width % CODES_PER_BYTE)).to(torch.uint8)
    return _joined(padded.view(rows, -(-width // CODES_PER_BYTE), CODES_PER_BYTE).unbind(-1))


def unpack_codes(packed: Tensor, in_features: int) -> Tensor:
    """Inverse of `pack_codes`: int8 [rows, in_features]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    lanes = (packed.unsqueeze(-1) >> shifts) & 3
    return lanes.flatten(-2)[..., :in_features].to(torch.int8) - 1


def pack_row_planes(codes: Tensor) -> Tensor:
    """int8 codes [out_features, in_features] -> uint8 [out_features / 4, in_features].

    With R = out_features / 4, byte[r, c] = sum over i of (code[r + i * R, c] + 1) << 2i.
    """
    return _joined((codes + 1).to(torch.uint8).unflatten(0, (CODES_PER_BYTE, -1)))


def unpack_row_planes(packed: Tensor) -> Tensor:
    """Inverse of `pack_row_planes`; the fourth value of two bits comes back as 2."""
    planes = [(packed >> 2 * i) & 3 for i in range(CODES_PER_BYTE)]
    return torch.cat(planes).to(torch.int8) - 1


def pack_words(codes: Tensor) -> Tensor:
    """int8 codes [out, in] -> int32 [out, ceil(in / 16)]; code + 2 along the row, least significant
    bits first; the last word of a row ends in zero bits."""
    # Four codes to a byte; four bytes, little end first, are the word.
    packed = pack_codes(codes + 1)
    return F.pad(packed, (0, -packed.shape[1] % 4)).view(torch.int32)


def unpack_words(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_words` for rows of `columns` codes; a code -2 comes back as it is."""
    return unpack_codes(packed.contiguous().view(torch.uint8), columns) - 1


def _joined(fields: Iterable[Tensor]) -> Tensor:
    """Four fields of two bits as a byte, the first in the lowest bits."""
    first, second, third, fourth = fields
    return first | second << 2 | third << 4 | fourth << 6
