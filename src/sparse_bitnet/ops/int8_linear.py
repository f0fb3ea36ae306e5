"""int8 activations times ternary codes in int32, exactly, then scales and bias in float32.

`sparse_int8_linear` and `packed_int8_linear` compute the same; they differ in how the weight lies in
memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import define

# 2**24 / 128: sums of so many int8 products are integers that float32 holds, in any order.
_EXACT_IN_FLOAT32 = 1 << 17


def int8_linear(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    ternary: bool = True,
) -> Tensor:
    """x_codes @ codes.T in int32, times activation_scale * weight_scale, plus bias, rounded to `dtype`.

    Args:
        x_codes: int8 [..., in_features].
        activation_scale: float32 [..., 1].
        codes: int8 [out_features, in_features].
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output; all before it is float32.
        ternary: codes are in {-1, 0, 1}; else any int8, as a head's are.

    Returns [..., out_features]. No gradient flows.
    """
    return torch.ops.sparse_bitnet.int8_linear(
        x_codes, activation_scale, codes, weight_scale, bias, dtype, ternary
    )


def int8_linear_reference(
    x_codes: Tensor,
    activation_scale: Tensor,
    codes: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    ternary: bool = True,
) -> Tensor:
    """`int8_linear` in plain PyTorch: what every kernel returns, bit for bit."""
    # Not even float32 products may become bfloat16 ones here.
    with torch.autocast(x_codes.device.type, enabled=False):
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


def _fake(x_codes, activation_scale, codes, weight_scale, bias, dtype, ternary=True):
    shape = (*x_codes.shape[:-1], codes.shape[0])
    return torch.empty(shape, dtype=dtype, device=x_codes.device)


define(
    "int8_linear(Tensor x_codes, Tensor activation_scale, Tensor codes, Tensor weight_scale, "
    "Tensor? bias, ScalarType dtype, bool ternary=True) -> Tensor",
    int8_linear_reference,
    _fake,
    cuda="int8_dot.int8_linear",
)
