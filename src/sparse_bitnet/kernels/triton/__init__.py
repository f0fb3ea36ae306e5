"""Triton kernels as the CUDA implementation of our ops, compiled on first use.

Registering imports no triton: each op does when it is first called, so a process that never touches a
GPU pays nothing. Inputs outside what a kernel takes go to the reference.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.kernels.launch_device import on_its_device
from sparse_bitnet.pattern import MAX_GROUP, NMPattern

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PACKAGE = "sparse_bitnet.kernels.triton"


def unavailable() -> str:
    """Why the kernels cannot run on this machine; empty where they can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if torch.cuda.get_device_capability()[0] < 8:
        return "the kernels are for compute capability 8.0 and later"
    return ""


def supports(tensor: Tensor) -> bool:
    """Whether the kernels take this weight or activation; the references take all."""
    return tensor.dtype in _DTYPES and tensor.dim() > 0 and tensor.numel() > 0


def supports_groups(weight: Tensor, n: int, m: int) -> bool:
    """The same for a weight and a pattern."""
    return supports(weight) and 1 <= n <= m <= MAX_GROUP and weight.shape[-1] % m == 0


def supports_select(
    weight: Tensor, weight_scale: Tensor, n: int, m: int, previous: Tensor | None = None
) -> bool:
    """The same for a weight, its scale, a pattern and the mask bits of the step before."""
    if weight_scale.device != weight.device or weight_scale.dtype != torch.float32:
        return False
    if previous is not None and previous.device != weight.device:
        return False
    return weight_scale.dim() == 0 and supports_groups(weight, n, m)


def packed_int8_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    packed: Tensor,
    packed_format: str,
    n: int,
    m: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `int8_linear.packed_int8_linear`."""
    from sparse_bitnet.kernels.triton import packed_matvec

    x = x_codes.reshape(-1, x_codes.shape[-1])
    shape = (*x_codes.shape[:-1], packed.shape[0])
    if not x.shape[0]:
        return x_codes.new_empty(shape, dtype=dtype)
    scales = (x_scale.reshape(-1, 1), weight_scale.contiguous())
    if packed_format == "i2":
        y = packed_matvec.i2_linear(x, scales[0], packed, scales[1], bias, dtype)
    else:
        pattern = NMPattern(n, m)
        y = packed_matvec.nm_bitmap_linear(x, scales[0], packed, pattern, scales[1], bias, dtype)
    return y.view(shape)


def quantize_windows(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `int8_linear.quantize_windows`."""
    from sparse_bitnet.kernels.triton import quantize_gather
    from sparse_bitnet.kernels.windows import window_layout

    return quantize_gather.quantize_windows(x, window_layout(NMPattern(n, m)))


def norm_quantize(
    x: Tensor, weight: Tensor, epsilon: float, n: int, m: int
) -> tuple[Tensor, Tensor]:
    """See `fused_inputs.norm_quantize`."""
    from sparse_bitnet.kernels.triton import fused_inputs
    from sparse_bitnet.kernels.windows import window_layout

    layout = window_layout(NMPattern(n, m)) if m else None
    return fused_inputs.norm_quantize(x, weight, epsilon, layout)


def swiglu_quantize(gate_up: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """See `fused_inputs.swiglu_quantize`."""
    from sparse_bitnet.kernels.triton import fused_inputs
    from sparse_bitnet.kernels.windows import window_layout

    return fused_inputs.swiglu_quantize(gate_up, window_layout(NMPattern(n, m)) if m else None)


def register() -> None:
    """Make the kernels the CUDA implementation of the selection and quantisation ops."""
    from sparse_bitnet import quantizer, sparsity

    table: tuple[tuple[str, str, Callable[..., bool], Callable[..., Any]], ...] = (
        ("nm_mask", "select", supports_groups, sparsity.nm_mask_reference),
        ("absmean", "select", supports, quantizer.absmean_reference),
        ("select_ternary", "select", supports_select, quantizer.select_ternary_reference),
        (
            "select_ternary_bits",
            "select",
            supports_select,
            quantizer.select_ternary_bits_reference,
        ),
        ("quantize_int8", "quantize_gather", supports, quantizer.quantize_int8_reference),
    )
    for op, module, supported, reference in table:
        _LIBRARY.impl(op, _or_reference(module, op, supported, reference), "CUDA")


def register_products() -> None:
    """Make the kernels the CUDA implementation of the inference ops (int8_linear, fused_inputs)."""
    for op in (quantize_windows, packed_int8_linear, norm_quantize, swiglu_quantize):
        _LIBRARY.impl(op.__name__, on_its_device(op), "CUDA")


# An implementation lives as long as the library object it was registered with.
_LIBRARY = torch.library.Library("sparse_bitnet", "IMPL")


def _or_reference(
    module: str, name: str, supported: Callable[..., bool], reference: Callable[..., Any]
) -> Callable[..., Any]:
    def op(*arguments: Any) -> Any:
        if not supported(*arguments):
            return reference(*arguments)
        kernel = getattr(importlib.import_module(f"{_PACKAGE}.{module}"), name)
        return on_its_device(kernel)(*arguments)

    return op
