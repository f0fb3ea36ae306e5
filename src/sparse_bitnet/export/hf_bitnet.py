# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `bitnet`: what transformers reads natively, for any architecture.

Four codes a byte (`pack_row_planes`). The `bitlinear` class divides its output by
`weight_scale`, which therefore holds the reciprocal of our scale; `autobitlinear` would multiply, but
the bias too, which breaks q, k and v of Qwen2. In "offline" mode nothing is quantised again when
loading.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors
from sparse_bitnet.export.hf_folder import plan_tensors, refuse_groups, require_ternary_int8
from sparse_bitnet.packing.tensor_writer import TensorSpec
from sparse_bitnet.packing.two_bits import CODES_PER_BYTE, pack_row_planes


def check(source: Checkpoint) -> None:
    """Raise `UserError`, naming the layer, for what the format cannot hold."""
    require_ternary_int8(source, "bitnet")
    refuse_groups(source, "bitnet", rows=False)
    for name, (rows, _) in source.layers.items():
        if rows % CODES_PER_BYTE:
            raise UserError(
                f"layer {name} has {rows} rows, not a multiple of {CODES_PER_BYTE} as bitnet needs; "
                "use --format compressed-tensors-w8a8"
            )


def plan(source: Checkpoint, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of the export; scales and everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        rows, columns = shape

        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.ternary(name)
            return pack_row_planes(codes), (1 / weight_scale).reshape(1).to(dtype)

        packed = TensorSpec(f"{name}.weight", torch.uint8, (rows // CODES_PER_BYTE, columns))
        return DeferredTensors((packed, TensorSpec(f"{name}.weight_scale", dtype, (1,))), make)

    return list(plan_tensors(source, dtype, layer_tensors))


def quantization_config(source: Checkpoint) -> dict[str, Any]:
    """The entry of config.json."""
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": source.dense_linears,
    }
