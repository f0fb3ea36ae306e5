# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors: what vLLM reads, and transformers with the package of that name.

W2A8 `pack-quantized`: `weight_packed` int32 (`pack_words`). W8A8 `int-quantized`: `weight` int8, four
times larger but read by every vLLM since mid-2024. Both hold one scale per row, often the same for all,
in float32 whatever the dtype of the rest: readers that compute in another one cast it. No
`sparsity_config`: current readers refuse it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.export.deferred import DeferredTensors
from sparse_bitnet.export.hf_folder import plan_tensors, refuse_groups, require_ternary_int8
from sparse_bitnet.packing.tensor_writer import TensorSpec
from sparse_bitnet.packing.two_bits import CODES_PER_WORD, pack_words


def check(source: Checkpoint) -> None:
    """Raise `UserError` for what the format cannot hold."""
    require_ternary_int8(source, "compressed-tensors")
    refuse_groups(source, "compressed-tensors", rows=True)


def plan_w2a8(source: Checkpoint, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of a W2A8 export; everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        rows, columns = shape

        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.ternary(name)
            scales = weight_scale.expand(rows, 1)
            return pack_words(codes), scales, torch.tensor(shape, dtype=torch.int64)

        return DeferredTensors(
            (
                TensorSpec(
                    f"{name}.weight_packed", torch.int32, (rows, -(-columns // CODES_PER_WORD))
                ),
                TensorSpec(f"{name}.weight_scale", torch.float32, (rows, 1)),
                TensorSpec(f"{name}.weight_shape", torch.int64, (2,)),
            ),
            make,
        )

    return list(plan_tensors(source, dtype, layer_tensors))


def plan_w8a8(source: Checkpoint, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of a W8A8 export; everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.ternary(name)
            return codes, weight_scale.expand(shape[0], 1)

        codes = TensorSpec(f"{name}.weight", torch.int8, shape)
        scale = TensorSpec(f"{name}.weight_scale", torch.float32, (shape[0], 1))
        return DeferredTensors((codes, scale), make)

    return list(plan_tensors(source, dtype, layer_tensors))


def quantization_config(source: Checkpoint, format: str, num_bits: int) -> dict[str, Any]:
    """The entry of config.json: `format` is W2A8 or W8A8, `num_bits` that of a weight."""
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": source.dense_linears,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": format,
                "weights": weights,
                "input_activations": activations,
            }
        },
    }
