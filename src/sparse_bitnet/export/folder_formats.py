# SPDX-License-Identifier: Apache-2.0
"""Export formats that are a Hugging Face folder: what each refuses, its tensors, its config.json entry.

bitnet is what transformers reads natively, for any architecture: four codes a byte (`pack_row_planes`).
The `bitlinear` class divides its output by `weight_scale`, which therefore holds the reciprocal of our
scale; `autobitlinear` would multiply, but the bias too, which breaks q, k and v of Qwen2. In "offline"
mode nothing is quantised again when loading.

compressed-tensors is what vLLM reads, and transformers with the package of that name. W2A8
`pack-quantized`: `weight_packed` int32 (`pack_words`). W8A8 `int-quantized`: `weight` int8, four times
larger but read by every vLLM since mid-2024. Both hold one scale per row, often the same for all, in
float32 whatever the dtype of the rest: readers that compute in another one cast it. No
`sparsity_config`: current readers refuse it.

dense holds codes * scale, for tools that know no ternary format. Such a tool multiplies with
unquantised activations, so its logits differ from ours by the rounding of activations that ours does.
One that quantises the weights to ternary again gets the scale wrong, because the zeros enter its mean (a
factor of 0.65 for a 6:8 Gaussian); hence the warning.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.hf_folder import DeferredTensors, deferred
from sparse_bitnet.packing.tensor_file import TensorSpec
from sparse_bitnet.packing.two_bits import (
    CODES_PER_BYTE,
    CODES_PER_WORD,
    W2A8,
    W8A8,
    pack_row_planes,
    pack_words,
)

DENSE_WARNING = (
    "these are the effective weights, codes x scale: tools that quantise them again to ternary "
    "(online bitnet mode, converters to GGUF ternary types) get a wrong scale; export to their "
    "format from the trained checkpoint instead"
)


def scale_groups(source: Checkpoint) -> dict[str, int]:
    """Return for each sparse layer how many weights of a row share a scale; 0 for one scale in all."""
    groups = dict.fromkeys(source.layers, 0)
    for name, (_, columns) in source.layers.items() if not source.has_one_scale else ():
        stored = source.file.entries.get(f"{name}.weight_scale") if source.file else None
        shape = (stored or source.ternary(name).weight_scale).shape
        groups[name] = 0 if prod(shape) == 1 else columns // shape[-1]
    return groups


def check(source: Checkpoint, format: str) -> None:
    """Raise `UserError` for a model that a format cannot hold, or computes in another way."""
    if format == "dense":
        return
    is_bitnet = format == "bitnet"
    target = "bitnet" if is_bitnet else "compressed-tensors"
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {target} holds ternary weights; use --to dense"
        )
    if source.format.activation != "int8":
        raise UserError(
            f"{source.folder} was trained without int8 activations ({source.format}), with which every "
            f"reader of {target} computes; use --to dense"
        )
    for name, group in scale_groups(source).items():
        if group and (is_bitnet or group != source.layers[name][1]):
            raise UserError(
                f"layer {name} has a scale for every {group} weights of a row, {target} one for a "
                f"{'matrix' if is_bitnet else 'row'}; use --to dense, or `sparse-bitnet pack`"
            )
    for name, (rows, _) in source.layers.items():
        if is_bitnet and rows % CODES_PER_BYTE:
            raise UserError(
                f"layer {name} has {rows} rows, not a multiple of {CODES_PER_BYTE} as bitnet needs; "
                "use --to compressed-tensors-w8a8"
            )


def deferred_tensors(source: Checkpoint, format: str, dtype: torch.dtype) -> list[DeferredTensors]:
    """Return every tensor of the export: the sparse layers', the rest cast to `dtype`."""
    layers = [_layer(source, name, format, dtype) for name in source.layers]
    others = source.others.items()
    return layers + [deferred(name, dtype, s, partial(source.read, name)) for name, s in others]


def _layer(source: Checkpoint, name: str, format: str, dtype: torch.dtype) -> DeferredTensors:
    """Return the tensors that store a sparse layer's weight in `format`."""
    rows, columns = shape = source.layers[name]
    if format == "dense":
        return deferred(f"{name}.weight", dtype, shape, partial(source.effective, name))

    def make() -> Sequence[Tensor]:
        codes, weight_scale = source.ternary(name)
        if format == "bitnet":
            stored = (1 / weight_scale).reshape(1).to(dtype)
            if stored.isinf():
                raise UserError(
                    f"layer {name}: bitnet holds one over its weight scale {weight_scale.item():.4g}, "
                    "which is too large for float16; use --embeddings bf16 or f32"
                )
            return pack_row_planes(codes), stored
        scales = weight_scale.float().expand(rows, 1)
        if format == "compressed-tensors-w8a8":
            return codes, scales
        return pack_words(codes), scales, torch.tensor(shape, dtype=torch.int64)

    scales = TensorSpec(f"{name}.weight_scale", torch.float32, (rows, 1))
    if format == "bitnet":
        codes = TensorSpec(f"{name}.weight", torch.uint8, (rows // CODES_PER_BYTE, columns))
        return DeferredTensors((codes, scales._replace(dtype=dtype, shape=(1,))), make)
    if format == "compressed-tensors-w8a8":
        codes = TensorSpec(f"{name}.weight", torch.int8, (rows, columns))
        return DeferredTensors((codes, scales), make)
    words = -(-columns // CODES_PER_WORD)
    codes = TensorSpec(f"{name}.weight_packed", torch.int32, (rows, words))
    sizes = TensorSpec(f"{name}.weight_shape", torch.int64, (2,))
    return DeferredTensors((codes, scales, sizes), make)


def quantization_config(source: Checkpoint, format: str) -> dict[str, Any] | None:
    """Return the `quantization_config` of config.json, or None for `dense`, which has none."""
    if format == "dense":
        return None
    if format == "bitnet":
        return {
            "quant_method": "bitnet",
            "linear_class": "bitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": source.dense_linears,
        }
    stored, num_bits = (W2A8, 2) if format == "compressed-tensors-w2a8" else (W8A8, 8)
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = weights | {"num_bits": 8, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "format": stored,
        "weights": weights,
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "ignore": source.dense_linears,
        "config_groups": {"group_0": group},
    }
