# SPDX-License-Identifier: Apache-2.0
"""Floats of any input type as the bits of float32, exactly: magnitudes are then compared as integers."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def readable(x: Tensor) -> Tensor:
    """`x` as kernels read it: bfloat16 as int16, whose bits `float32_bits` moves into place."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


@triton.jit
def float32_bits(value):
    """int32 bits of what was loaded from a `readable` tensor.

    Shifting a bfloat16 is exact for denormals and NaN too, which conversions do not promise.
    """
    if value.dtype == tl.int16:
        bits = value.to(tl.int32) << 16
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    return bits
