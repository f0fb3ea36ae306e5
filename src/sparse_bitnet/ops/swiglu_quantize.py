# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the int8 quantisation of what follows it, in one pass over memory."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.ops.backends import define
from sparse_bitnet.ops.quantize_windows import empty_in_order, order_of, quantize_in_order
from sparse_bitnet.pattern import NMPattern


def swiglu_quantize(gate_up: Tensor, windows: NMPattern | None) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, then int8 per token, ordered as in `norm_quantize`.

    Args:
        gate_up: float [..., 2 * features], the gate first.
        windows: as in `norm_quantize`.

    Returns (int8 [..., features or K'], float32 activation_scale [..., 1]).
    """
    return torch.ops.sparse_bitnet.swiglu_quantize(gate_up, *order_of(windows))


def swiglu_quantize_reference(gate_up: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """What transformers and `quantize_int8` compute one after the other, in the same types."""
    gate, up = gate_up.chunk(2, -1)
    return quantize_in_order(F.silu(gate) * up, n, m)


define(
    "swiglu_quantize(Tensor gate_up, int n, int m) -> (Tensor codes, Tensor activation_scale)",
    swiglu_quantize_reference,
    lambda gate_up, n, m: empty_in_order(gate_up, gate_up.shape[-1] // 2, n, m),
    cuda="quantize.swiglu_quantize",
)
