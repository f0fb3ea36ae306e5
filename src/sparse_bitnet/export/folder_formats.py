# SPDX-License-Identifier: Apache-2.0
"""The formats that are a Hugging Face folder: what each refuses, its tensors, its entry in config.json.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.deferred import DeferredTensors, deferred
from sparse_bitnet.export.hf_folder import scale_groups
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


@dataclass(frozen=True, kw_only=True)
class FolderFormat:
    """A format that is a Hugging Face folder."""

    check: Callable[[Checkpoint], None]
    """Raises `UserError` for what the format cannot hold."""
    layer: Callable[[Checkpoint, str, torch.dtype], DeferredTensors]
    """What stands for a sparse layer's weight, where everything dense is of that type."""
    quantization_config: Callable[[Checkpoint], dict[str, Any] | None]

    def deferred_tensors(self, source: Checkpoint, dtype: torch.dtype) -> list[DeferredTensors]:
        """Every tensor of the export: the sparse layers', the rest cast to `dtype`."""
        layers = [self.layer(source, name, dtype) for name in source.layers]
        others = source.others.items()
        return layers + [deferred(name, dtype, s, partial(source.read, name)) for name, s in others]


def require_ternary_int8(source: Checkpoint, target: str) -> None:
    """Raise `UserError` unless the model computes as `target` does: ternary x int8."""
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {target} holds ternary weights; use --format dense"
        )
    if source.format.activation != "int8":
        raise UserError(
            f"{source.folder} was trained without int8 activations ({source.format}), with which every "
            f"reader of {target} computes; use --format dense"
        )


def _refuse_groups(source: Checkpoint, target: str, rows: bool) -> None:
    """Raise `UserError` for more scales than one a matrix, or with `rows` than one a row."""
    for name, group in scale_groups(source).items():
        if group and not (rows and group == source.layers[name][1]):
            what = "row" if rows else "matrix"
            raise UserError(
                f"layer {name} has a scale for every {group} weights of a row, {target} one for a "
                f"{what}; use --format dense, or `sparse-bitnet pack`"
            )


def _check_bitnet(source: Checkpoint) -> None:
    require_ternary_int8(source, "bitnet")
    _refuse_groups(source, "bitnet", rows=False)
    for name, (rows, _) in source.layers.items():
        if rows % CODES_PER_BYTE:
            raise UserError(
                f"layer {name} has {rows} rows, not a multiple of {CODES_PER_BYTE} as bitnet needs; "
                "use --format compressed-tensors-w8a8"
            )


def _bitnet_layer(source: Checkpoint, name: str, dtype: torch.dtype) -> DeferredTensors:
    rows, columns = source.layers[name]

    def make() -> Sequence[Tensor]:
        codes, weight_scale = source.ternary(name)
        stored = (1 / weight_scale).reshape(1).to(dtype)
        if stored.isinf():
            raise UserError(
                f"layer {name}: bitnet holds one over its weight scale {weight_scale.item():.4g}, which "
                "is too large for float16; use --embeddings bf16 or f32"
            )
        return pack_row_planes(codes), stored

    packed = TensorSpec(f"{name}.weight", torch.uint8, (rows // CODES_PER_BYTE, columns))
    return DeferredTensors((packed, TensorSpec(f"{name}.weight_scale", dtype, (1,))), make)


def _bitnet_config(source: Checkpoint) -> dict[str, Any]:
    return {
        "quant_method": "bitnet",
        "linear_class": "bitlinear",
        "quantization_mode": "offline",
        "modules_to_not_convert": source.dense_linears,
    }


def _check_compressed_tensors(source: Checkpoint) -> None:
    require_ternary_int8(source, "compressed-tensors")
    _refuse_groups(source, "compressed-tensors", rows=True)


def _w2a8_layer(source: Checkpoint, name: str, dtype: torch.dtype) -> DeferredTensors:
    rows, columns = shape = source.layers[name]

    def make() -> Sequence[Tensor]:
        codes, weight_scale = source.ternary(name)
        scales = weight_scale.float().expand(rows, 1)
        return pack_words(codes), scales, torch.tensor(shape, dtype=torch.int64)

    words = -(-columns // CODES_PER_WORD)
    specs = (
        TensorSpec(f"{name}.weight_packed", torch.int32, (rows, words)),
        TensorSpec(f"{name}.weight_scale", torch.float32, (rows, 1)),
        TensorSpec(f"{name}.weight_shape", torch.int64, (2,)),
    )
    return DeferredTensors(specs, make)


def _w8a8_layer(source: Checkpoint, name: str, dtype: torch.dtype) -> DeferredTensors:
    rows, columns = source.layers[name]

    def make() -> Sequence[Tensor]:
        codes, weight_scale = source.ternary(name)
        return codes, weight_scale.float().expand(rows, 1)

    codes = TensorSpec(f"{name}.weight", torch.int8, (rows, columns))
    scale = TensorSpec(f"{name}.weight_scale", torch.float32, (rows, 1))
    return DeferredTensors((codes, scale), make)


def _compressed_tensors_config(format: str, num_bits: int, source: Checkpoint) -> dict[str, Any]:
    """`format` is W2A8 or W8A8, `num_bits` that of a weight."""
    weights = {"num_bits": num_bits, "type": "int", "symmetric": True, "strategy": "channel"}
    activations = weights | {"num_bits": 8, "strategy": "token", "dynamic": True}
    group = {
        "targets": ["Linear"],
        "format": format,
        "weights": weights,
        "input_activations": activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": source.dense_linears,
        "config_groups": {"group_0": group},
    }


def _dense_layer(source: Checkpoint, name: str, dtype: torch.dtype) -> DeferredTensors:
    read = partial(source.effective, name)
    return deferred(f"{name}.weight", dtype, source.layers[name], read)


FOLDER_FORMATS: dict[str, FolderFormat] = {
    "bitnet": FolderFormat(
        check=_check_bitnet, layer=_bitnet_layer, quantization_config=_bitnet_config
    ),
    "compressed-tensors-w2a8": FolderFormat(
        check=_check_compressed_tensors,
        layer=_w2a8_layer,
        quantization_config=partial(_compressed_tensors_config, W2A8, 2),
    ),
    "compressed-tensors-w8a8": FolderFormat(
        check=_check_compressed_tensors,
        layer=_w8a8_layer,
        quantization_config=partial(_compressed_tensors_config, W8A8, 8),
    ),
    "dense": FolderFormat(
        check=lambda source: None,
        layer=_dense_layer,
        quantization_config=lambda source: None,
    ),
}
