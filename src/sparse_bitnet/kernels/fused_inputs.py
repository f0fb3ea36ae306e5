"""Ops that end in int8 activations: RMSNorm and SwiGLU with the quantisation of what follows them.

One pass over memory instead of the five to eight that the operators take one by one. The references
compose what transformers and `quantize_int8` compute, in the same types.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from sparse_bitnet.kernels.int8_linear import quantize_windows_reference
from sparse_bitnet.kernels.windows import window_layout
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.quantizer import quantize_int8_reference


def norm_quantize(
    x: Tensor, weight: Tensor, epsilon: float, windows: NMPattern | None
) -> tuple[Tensor, Tensor]:
    """RMSNorm, then int8 per token, in the order of a pattern's windows or in its own.

    Args:
        x: float [..., features].
        weight: of the norm, [features].
        epsilon: added to the mean of the squares.
        windows: pattern of the weights that the product is with, None for the features' own order.

    Returns (int8 [..., features or K'], float32 scale [..., 1]).
    """
    n, m = (windows.n, windows.m) if windows is not None else (0, 0)
    return torch.ops.sparse_bitnet.norm_quantize(x, weight, epsilon, n, m)


def swiglu_quantize(gate_up: Tensor, windows: NMPattern | None) -> tuple[Tensor, Tensor]:
    """silu(gate) * up, then int8 per token, ordered as in `norm_quantize`.

    Args:
        gate_up: float [..., 2 * features], the gate first.
        windows: as in `norm_quantize`.

    Returns (int8 [..., features or K'], float32 scale [..., 1]).
    """
    n, m = (windows.n, windows.m) if windows is not None else (0, 0)
    return torch.ops.sparse_bitnet.swiglu_quantize(gate_up, n, m)


def norm_quantize_reference(
    x: Tensor, weight: Tensor, epsilon: float, n: int, m: int
) -> tuple[Tensor, Tensor]:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return _quantize(weight * normed.to(x.dtype), n, m)


def swiglu_quantize_reference(gate_up: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, -1)
    return _quantize(F.silu(gate) * up, n, m)


def _quantize(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    return quantize_windows_reference(x, n, m) if m else quantize_int8_reference(x)


def _outputs(x: Tensor, features: int, n: int, m: int) -> tuple[Tensor, Tensor]:
    width = window_layout(NMPattern(n, m)).padded_width(features) if m else features
    codes = torch.empty((*x.shape[:-1], width), dtype=torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")
_LIBRARY.define(
    "norm_quantize(Tensor x, Tensor weight, float epsilon, int n, int m) -> "
    "(Tensor codes, Tensor activation_scale)"
)
_LIBRARY.define(
    "swiglu_quantize(Tensor gate_up, int n, int m) -> (Tensor codes, Tensor activation_scale)"
)
_LIBRARY.impl("norm_quantize", norm_quantize_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("swiglu_quantize", swiglu_quantize_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sparse_bitnet::norm_quantize", lib=_LIBRARY)
def _(x, weight, epsilon, n, m):
    return _outputs(x, x.shape[-1], n, m)


@torch.library.register_fake("sparse_bitnet::swiglu_quantize", lib=_LIBRARY)
def _(gate_up, n, m):
    return _outputs(gate_up, gate_up.shape[-1] // 2, n, m)
