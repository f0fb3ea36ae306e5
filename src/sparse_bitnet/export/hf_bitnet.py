"""Hugging Face `bitnet`: what transformers reads natively, for any architecture.

Four codes a byte in row-blocked planes: with R = out_features / 4,
byte[r, c] = sum over i of (code[r + i * R, c] + 1) << 2i. The `bitlinear` class divides its output by
`weight_scale`, which therefore holds the reciprocal of our scale; `autobitlinear` would multiply, but
the bias too, which breaks q, k and v of Qwen2. In "offline" mode nothing is quantised again when
loading.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors
from sparse_bitnet.export.hf_folder import plan_tensors
from sparse_bitnet.export.source import ModelSource
from sparse_bitnet.packing.tensor_writer import TensorSpec

CODES_PER_BYTE = 4


def pack_row_planes(codes: Tensor) -> Tensor:
    """int8 codes [out_features, in_features] -> uint8 [out_features / 4, in_features]."""
    planes = (codes + 1).to(torch.uint8).unflatten(0, (CODES_PER_BYTE, -1))
    packed = planes[0].clone()
    for i in range(1, CODES_PER_BYTE):
        packed |= planes[i] << 2 * i
    return packed


def unpack_row_planes(packed: Tensor) -> Tensor:
    """Inverse of `pack_row_planes`; the fourth value of two bits comes back as 2."""
    planes = [(packed >> 2 * i) & 3 for i in range(CODES_PER_BYTE)]
    return torch.cat(planes).to(torch.int8) - 1


def check(source: ModelSource) -> None:
    """Raise `UserError`, naming the layer, for what the format cannot hold."""
    source.require_ternary_int8("bitnet")
    for name, (rows, _) in source.layers.items():
        if rows % CODES_PER_BYTE:
            raise UserError(
                f"layer {name} has {rows} rows, not a multiple of {CODES_PER_BYTE} as bitnet needs; "
                "use --format compressed-tensors-w8a8"
            )


def plan(source: ModelSource, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of the export; scales and everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        rows, columns = shape

        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.read_ternary(name)
            return pack_row_planes(codes), (1 / weight_scale).reshape(1).to(dtype)

        packed = TensorSpec(f"{name}.weight", torch.uint8, (rows // CODES_PER_BYTE, columns))
        return DeferredTensors((packed, TensorSpec(f"{name}.weight_scale", dtype, (1,))), make)

    return list(plan_tensors(source, dtype, layer_tensors))


def quantization_config(source: ModelSource) -> dict[str, Any]:
    """The entry of config.json."""
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": source.dense_linears,
    }
