# SPDX-License-Identifier: Apache-2.0
"""`int8_linear` with a weight that stays packed as i2, for the few tokens of decoding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.int8_linear import int8_linear_reference
from sparse_bitnet.packing.codec import pack, unpack
from sparse_bitnet.packing.formats import I2_BLOCK_WEIGHTS
from sparse_bitnet.pattern import NMPattern

MAX_TOKENS = 64
"""For more, weights that are not packed are the faster choice."""

_ANY = NMPattern(1, 1)


def pack_blocks(codes: Tensor) -> Tensor:
    """The weight operand of `packed_int8_linear`: i2 rows, filled up to whole blocks with zeros.

    Args:
        codes: int8 [out_features, in_features] in {-1, 0, 1}.

    Returns uint8 [out_features, 64 * ceil(in_features / 256)] on the device of `codes`.
    """
    whole = F.pad(codes, (0, -codes.shape[1] % I2_BLOCK_WEIGHTS))
    return pack(whole, "i2", _ANY).to(codes.device)


def packed_int8_linear_reference(
    x_codes: Tensor, activation_scale: Tensor, packed: Tensor, *more: Any
) -> Tensor:
    """`int8_linear` of few tokens, with `packed` of `pack_blocks` in the place of the codes."""
    codes = unpack(packed, "i2", _ANY, (packed.shape[0], 4 * packed.shape[1])).to(x_codes.device)
    codes = codes[:, : x_codes.shape[-1]]
    return int8_linear_reference(x_codes, activation_scale, codes, *more)


def _fake(x_codes, activation_scale, packed, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], packed.shape[0]), dtype=dtype, device=x_codes.device)


packed_int8_linear = define(
    "packed_int8_linear(Tensor x_codes, Tensor activation_scale, Tensor packed, "
    "Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor",
    packed_int8_linear_reference,
    _fake,
    cuda="int8_dot.packed_int8_linear",
)
