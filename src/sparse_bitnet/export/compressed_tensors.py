"""compressed-tensors: what vLLM reads, and transformers with the package of that name.

W2A8 `pack-quantized`: `weight_packed` int32 [out, ceil(in / 16)], sixteen codes a word along the row,
code + 2, least significant bits first; W8A8 `int-quantized`: `weight` int8, four times larger but read
by every vLLM since mid-2024. Both hold one scale per row, here the same for all, in float32 whatever
the dtype of the rest: readers that compute in another one cast it. No `sparsity_config`: current
readers refuse it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.export.deferred import DeferredTensors
from sparse_bitnet.export.hf_folder import plan_tensors
from sparse_bitnet.export.source import ModelSource
from sparse_bitnet.packing.tensor_writer import TensorSpec

CODES_PER_WORD = 16
_OFFSET = 2
"""Stored value of the code 0: half the range of two bits."""

W2A8 = "pack-quantized"
W8A8 = "int-quantized"


def pack_words(codes: Tensor) -> Tensor:
    """int8 codes [out, in] -> int32 [out, ceil(in / 16)]; the last word of a row ends in zero bits."""
    rows, columns = codes.shape
    words = -(-columns // CODES_PER_WORD)
    values = torch.zeros(rows, words * CODES_PER_WORD, dtype=torch.uint8)
    values[:, :columns] = (codes + _OFFSET).to(torch.uint8)
    # Four codes to a byte; four bytes, little end first, are the word.
    quads = values.view(rows, -1, 4)
    packed = quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6
    return packed.contiguous().view(torch.int32)


def unpack_words(packed: Tensor, columns: int) -> Tensor:
    """Inverse of `pack_words` for rows of `columns` codes; a code -2 comes back as it is."""
    quads = packed.contiguous().view(torch.uint8)
    values = torch.stack([(quads >> 2 * i) & 3 for i in range(4)], -1).flatten(1)
    return values[:, :columns].to(torch.int8) - _OFFSET


def check(source: ModelSource) -> None:
    """Raise `UserError` for what the format cannot hold."""
    source.require_ternary_int8("compressed-tensors")


def plan_w2a8(source: ModelSource, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of a W2A8 export; everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        rows, columns = shape

        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.read_ternary(name)
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


def plan_w8a8(source: ModelSource, dtype: torch.dtype) -> list[DeferredTensors]:
    """The tensors of a W8A8 export; everything dense in `dtype`."""

    def layer_tensors(name: str, shape: tuple[int, int]) -> DeferredTensors:
        def make() -> Sequence[Tensor]:
            codes, weight_scale = source.read_ternary(name)
            return codes, weight_scale.expand(shape[0], 1)

        codes = TensorSpec(f"{name}.weight", torch.int8, shape)
        scale = TensorSpec(f"{name}.weight_scale", torch.float32, (shape[0], 1))
        return DeferredTensors((codes, scale), make)

    return list(plan_tensors(source, dtype, layer_tensors))


def quantization_config(source: ModelSource, format: str, num_bits: int) -> dict[str, Any]:
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
