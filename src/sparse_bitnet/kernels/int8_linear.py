"""Ops of ternary inference on GPUs: schema, shapes, and the plain PyTorch that defines each.

All compute the same: int8 activation codes times ternary codes in int32, exactly, then
`* (x_scale * weight_scale) + bias` in float32, then one rounding to the output's type. They differ in
how the weight lies in memory: int8 codes (`int8_linear` in straight_through.py), windows in 2:4 form
for sparse tensor cores, or packed bytes. CUDA kernels register in cusparselt.py and triton/.
"""

import torch
from torch import Tensor

from sparse_bitnet.kernels.windows import check_two_of_four, gather_index, window_layout
from sparse_bitnet.packing.codec import unpack
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.quantizer import quantize_int8_reference
from sparse_bitnet.straight_through import int8_linear_reference

PACKED_FORMATS = ("i2", "nm-bitmap")
"""Packed formats that `packed_int8_linear` multiplies with."""


def quantize_windows(x: Tensor, pattern: NMPattern) -> tuple[Tensor, Tensor]:
    """Int8 activations per token in the order of a pattern's windows.

    Args:
        x: float [..., in_features].
        pattern: of the weights; see `windows.window_layout`.

    Returns (int8 [..., K'], K' a multiple of 32, zeros in columns that fill up; float32 [..., 1]).
    """
    return torch.ops.sparse_bitnet.quantize_windows(x, pattern.n, pattern.m)


def compress_windows(expanded: Tensor) -> Tensor:
    """The weight operand of `sparse_int8_linear`, for the device that `expanded` is on.

    Args:
        expanded: int8 [out_features, K'] in 2:4 form, K' a multiple of 32.

    Returns an opaque int8 matrix whose rows are out_features filled up to a multiple of 32. It depends
    on device and library: made on loading, never saved.

    Raises `UserError` where four columns hold more than two non-zeros.
    """
    check_two_of_four(expanded)
    filler = -expanded.shape[0] % 32
    padded = torch.nn.functional.pad(expanded, (0, 0, 0, filler))
    return torch.ops.sparse_bitnet.compress_windows(padded)


def sparse_int8_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    compressed: Tensor,
    out_features: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Product with a weight of `compress_windows`.

    Args:
        x_codes: int8 [..., K'] of `quantize_windows`.
        x_scale: float32 [..., 1].
        compressed: see `compress_windows`.
        out_features: rows of the weight without those that fill up.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns [..., out_features].
    """
    return torch.ops.sparse_bitnet.sparse_int8_linear(
        x_codes, x_scale, compressed, out_features, weight_scale, bias, dtype
    )


def packed_int8_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    packed: Tensor,
    packed_format: str,
    pattern: NMPattern,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Product with packed rows, for few tokens.

    Args:
        x_codes: int8 [..., in_features].
        x_scale: float32 [..., 1].
        packed: uint8 [out_features, row_bytes], checked when it was loaded.
        packed_format: one of `PACKED_FORMATS`.
        pattern: of the codes.
        weight_scale: float32, one value or [out_features].
        bias: [out_features] or None.
        dtype: of the output.

    Returns [..., out_features].
    """
    assert packed_format in PACKED_FORMATS, packed_format
    return torch.ops.sparse_bitnet.packed_int8_linear(
        x_codes, x_scale, packed, packed_format, pattern.n, pattern.m, weight_scale, bias, dtype
    )


def quantize_windows_reference(x: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    codes, x_scale = quantize_int8_reference(x)
    index = gather_index(NMPattern(n, m), x.shape[-1], padded=True).to(x.device)
    return torch.where(index < 0, 0, codes[..., index.clamp_min(0)]), x_scale


def compress_windows_reference(expanded: Tensor) -> Tensor:
    return expanded.clone()


def sparse_int8_linear_reference(
    x_codes: Tensor,
    x_scale: Tensor,
    compressed: Tensor,
    out_features: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    codes = compressed[:out_features]
    return int8_linear_reference(x_codes, x_scale, codes, weight_scale, bias, dtype)


def packed_int8_linear_reference(
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
    shape = (packed.shape[0], x_codes.shape[-1])
    codes = unpack(packed, packed_format, NMPattern(n, m), shape).to(x_codes.device)
    return int8_linear_reference(x_codes, x_scale, codes, weight_scale, bias, dtype)


_LIBRARY = torch.library.Library("sparse_bitnet", "FRAGMENT")
_LIBRARY.define(
    "quantize_windows(Tensor x, int n, int m) -> (Tensor codes, Tensor activation_scale)"
)
_LIBRARY.define("compress_windows(Tensor expanded) -> Tensor")
_LIBRARY.define(
    "sparse_int8_linear(Tensor x_codes, Tensor x_scale, Tensor compressed, int out_features, "
    "Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor"
)
_LIBRARY.define(
    "packed_int8_linear(Tensor x_codes, Tensor x_scale, Tensor packed, str packed_format, int n, "
    "int m, Tensor weight_scale, Tensor? bias, ScalarType dtype) -> Tensor"
)
_LIBRARY.impl("quantize_windows", quantize_windows_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("compress_windows", compress_windows_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("sparse_int8_linear", sparse_int8_linear_reference, "CompositeExplicitAutograd")
_LIBRARY.impl("packed_int8_linear", packed_int8_linear_reference, "CompositeExplicitAutograd")


@torch.library.register_fake("sparse_bitnet::quantize_windows", lib=_LIBRARY)
def _(x, n, m):
    width = window_layout(NMPattern(n, m)).padded_width(x.shape[-1])
    codes = torch.empty((*x.shape[:-1], width), dtype=torch.int8, device=x.device)
    return codes, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


@torch.library.register_fake("sparse_bitnet::sparse_int8_linear", lib=_LIBRARY)
def _(x_codes, x_scale, compressed, out_features, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], out_features), dtype=dtype, device=x_codes.device)


@torch.library.register_fake("sparse_bitnet::packed_int8_linear", lib=_LIBRARY)
def _(x_codes, x_scale, packed, packed_format, n, m, weight_scale, bias, dtype):
    return torch.empty((*x_codes.shape[:-1], packed.shape[0]), dtype=dtype, device=x_codes.device)
