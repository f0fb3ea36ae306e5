# SPDX-License-Identifier: Apache-2.0
"""int8 activations times ternary codes in int32, exactly, then scales and bias in float32.

`sparse_int8_linear` and `packed_int8_linear` compute the same; they differ in how the weight lies in
memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import define

# 2**24 / 128: sums of this many int8 products are integers that float32 holds, in any order.
_EXACT_IN_FLOAT32 = 1 << 17


def int8_linear_reference(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    ternary: bool = True,
) -> Tensor:
    """x_codes @ codes.T in int32, times activation_scale * weight_scale, plus bias, rounded to `dtype`:
    what every kernel returns, bit for bit.

    Args:
        x_codes: int8 [..., in_features].
        activation_scale: float32 [..., 1].
        codes: int8 [out_features, in_features].
        weight_scale: float32, one value or [out_features]. Here, and not in kernels, also
            [out_features, groups], one for each run of in_features / groups weights: the runs are added
            up in ascending order, as csrc/packed_format.h has it.
        bias: [out_features] or None.
        dtype: of the output; all before it is float32.
        ternary: codes are in {-1, 0, 1}; else any int8, as a head's are.

    Returns [..., out_features]. No gradient flows.
    """
    # Not even float32 products may become bfloat16 ones here.
    with torch.autocast(x_codes.device.type, enabled=False):
        if weight_scale.dim() == 2:
            y = grouped_product(x_codes, codes, weight_scale) * activation_scale
        else:
            y = integer_product(x_codes, codes, ternary) * (activation_scale * weight_scale)
    return (y if bias is None else y + bias).to(dtype)


def integer_product(x_codes: Tensor, codes: Tensor, ternary: bool = True) -> Tensor:
    """x_codes @ codes.T exactly, rounded to float32; that of ternary codes stays below 2**24.

    Args:
        x_codes: int8 [..., in_features].
        codes: int8 [out_features, in_features].
        ternary: they are in {-1, 0, 1}.
    """
    fits = ternary and codes.shape[-1] <= _EXACT_IN_FLOAT32
    wide = torch.float32 if fits else torch.float64
    return F.linear(x_codes.to(wide), codes.to(wide)).float()


def grouped_product(x_codes: Tensor, codes: Tensor, weight_scale: Tensor) -> Tensor:
    """x_codes @ (codes * weight_scale).T in float32, the scales [out_features, groups] of runs of a row:
    the exact sum of each run times its scale, added up in ascending order."""
    groups = weight_scale.shape[1]
    y = None
    for x_run, run, scale in zip(
        x_codes.chunk(groups, -1),
        codes.chunk(groups, -1),
        weight_scale.float().unbind(1),
        strict=True,
    ):
        part = integer_product(x_run, run) * scale
        y = part if y is None else y + part
    assert y is not None
    return y


def _fake(x_codes, activation_scale, codes, weight_scale, bias, dtype, ternary=True):
    shape = (*x_codes.shape[:-1], codes.shape[0])
    return torch.empty(shape, dtype=dtype, device=x_codes.device)


int8_linear = define(
    "int8_linear(Tensor x_codes, Tensor activation_scale, Tensor codes, Tensor weight_scale, "
    "Tensor? bias, ScalarType dtype, bool ternary=True) -> Tensor",
    int8_linear_reference,
    _fake,
    cuda="int8_dot.int8_linear",
)
