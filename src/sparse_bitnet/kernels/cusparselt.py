"""2:4 sparse int8 products on NVIDIA's sparse tensor cores, through PyTorch's binding of cuSPARSELt.

The library is slower than a dense product for few tokens on some GPUs: which of the two a layer uses
is for `choice_table` to say.
"""

from functools import cache

import torch
from torch import Tensor

from sparse_bitnet.kernels.cublaslt import filled, scaled
from sparse_bitnet.kernels.launch_device import on_its_device

TOKEN_MULTIPLE = 16
"""Columns of a dense int8 operand of cuSPARSELt, our tokens, are a multiple of this."""


@cache
def unavailable() -> str:
    """Why 2:4 products cannot run on this machine; empty where they can."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"sparse tensor cores come with compute capability 8.0, this GPU has {major}.{minor}"
    library = getattr(torch.backends, "cusparselt", None)
    if library is None or not library.is_available():
        return "this PyTorch is built without cuSPARSELt"
    return ""


def compress_windows(expanded: Tensor) -> Tensor:
    """See `int8_linear.compress_windows`; rows and columns are multiples of 32."""
    return torch._cslt_compress(expanded.contiguous())


def sparse_product(x_codes: Tensor, compressed: Tensor) -> Tensor:
    """int32 [tokens filled up to a multiple of 16, rows of the weight].

    Args:
        x_codes: int8 [tokens, K'].
        compressed: of `compress_windows`.
    """
    x = filled(x_codes, -x_codes.shape[0] % TOKEN_MULTIPLE, 0).t()
    return torch._cslt_sparse_mm(
        compressed,
        x,
        out_dtype=torch.int32,
        transpose_result=True,
        alg_id=_algorithm(compressed, x),
    )


def sparse_int8_linear(
    x_codes: Tensor,
    x_scale: Tensor,
    compressed: Tensor,
    out_features: int,
    weight_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """See `int8_linear.sparse_int8_linear`."""
    x = x_codes.reshape(-1, x_codes.shape[-1])
    if not x.shape[0]:
        return x_codes.new_empty((*x_codes.shape[:-1], out_features), dtype=dtype)
    sums = sparse_product(x, compressed)
    y = scaled(sums, out_features, x_scale, weight_scale, bias, dtype)
    return y.view(*x_codes.shape[:-1], out_features)


_ALGORITHMS: dict[tuple[int, ...], int] = {}


def _algorithm(compressed: Tensor, x: Tensor) -> int:
    """The library's fastest algorithm for a shape, searched the first time the shape is met."""
    device = compressed.device.index or 0
    key = (device, *compressed.shape, *x.shape)
    if key not in _ALGORITHMS:
        if torch.cuda.is_current_stream_capturing():
            # A search times kernels and synchronises, which a graph cannot record.
            return 0
        _ALGORITHMS[key] = torch._cslt_sparse_mm_search(
            compressed, x, out_dtype=torch.int32, transpose_result=True
        )
    return _ALGORITHMS[key]


def register() -> None:
    """Make them the CUDA implementation of the sparse ops in int8_linear.py."""
    _LIBRARY.impl("compress_windows", on_its_device(compress_windows), "CUDA")
    _LIBRARY.impl("sparse_int8_linear", on_its_device(sparse_int8_linear), "CUDA")


# An implementation lives as long as the library object it was registered with.
_LIBRARY = torch.library.Library("sparse_bitnet", "IMPL")
