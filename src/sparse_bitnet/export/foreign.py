"""Ternary checkpoints of other tools, opened: which layers are ternary, and their codes and scales.

Read are Hugging Face `bitnet` (bitlinear and autobitlinear, packed), compressed-tensors with two- or
eight-bit weights that hold ternary codes, and the published form of BitNet b1.58 masters: bfloat16
weights that the reader quantises to ternary on every forward (`bitnet` in "online" mode).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparse_bitnet.errors import UserError
from sparse_bitnet.export import compressed_tensors, hf_bitnet
from sparse_bitnet.export.source import TernaryWeight, linear_layers
from sparse_bitnet.model_folder import quantization_entry, read_config
from sparse_bitnet.models import skeleton
from sparse_bitnet.weight_files import WeightFiles


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """What one of those folders holds, in our terms."""

    folder: Path
    kind: str
    """For people: the format found."""
    config: dict[str, Any]
    """config.json without its quantization_config."""
    layers: dict[str, tuple[int, int]]
    """[out_features, in_features] of every ternary layer."""
    dense_linears: list[str]
    other_tensors: dict[str, tuple[int, ...]]
    """Everything that is not a ternary layer's weight or scale."""
    read_other: Callable[[str], Tensor]
    """One of `other_tensors`, as the tool's own reader would use it."""
    read_ternary: Callable[[str], TernaryWeight] | None
    """Codes and scale of a layer; None where the checkpoint holds masters."""
    read_master: Callable[[str], Tensor]
    """The weight of a layer as stored, where the checkpoint holds masters."""


def open_foreign(folder: str | Path) -> ForeignCheckpoint:
    """Recognise a folder by its config.json and open it.

    Raises `UserError` for formats other than those above, settings of theirs that have no counterpart
    here, and incomplete files.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no local folder; download it first (hf download {folder})")
    config = read_config(folder)
    entry = quantization_entry(config)
    config.pop("quantization_config", None)
    method = entry.get("quant_method")
    if method == "bitnet":
        return _open_bitnet(folder, config, entry)
    if method == "compressed-tensors":
        return _open_compressed(folder, config, entry)
    if not entry and config.get("model_type") == "bitnet":
        return _open_bitnet(folder, config, {"quantization_mode": "online"})
    raise UserError(
        f"{folder}: quant_method {method!r} in config.json is not importable; readable are bitnet and "
        "compressed-tensors with ternary codes"
    )


def _open_bitnet(folder: Path, config: dict[str, Any], entry: dict[str, Any]) -> ForeignCheckpoint:
    if entry.get("use_rms_norm"):
        raise UserError(
            f"{folder}: use_rms_norm puts a norm inside each layer, which is not covered"
        )
    linears = linear_layers(skeleton(config, folder))
    files = WeightFiles.in_folder(folder)
    online = entry.get("quantization_mode", "offline") == "online"
    auto = entry.get("linear_class", "bitlinear") == "autobitlinear" or online
    if online:
        kept = entry.get("modules_to_not_convert") or ["lm_head"]
        layers = {
            name: (linear.out_features, linear.in_features)
            for name, linear in linears.items()
            if not _matches(name, kept)
        }
    else:
        layers = {
            name: (linear.out_features, linear.in_features)
            for name, linear in linears.items()
            if f"{name}.weight_scale" in files
        }

    def read_ternary(layer: str) -> TernaryWeight:
        codes = _bitnet_codes(files.read(f"{layer}.weight"), layers[layer], layer)
        scale = files.read(f"{layer}.weight_scale").float()
        return _checked(codes, scale if auto else 1 / scale, layer)

    def read_other(name: str) -> Tensor:
        tensor = files.read(name)
        layer = name.removesuffix(".bias")
        if auto and not online and name != layer and layer in layers:
            # That class multiplies its whole output, the bias included, by the scale.
            tensor = tensor.float() * files.read(f"{layer}.weight_scale").float()
        return tensor

    names = ("weight", "weight_scale")
    return ForeignCheckpoint(
        folder=folder,
        kind="bitnet masters" if online else "bitnet",
        config=config,
        layers=_complete(layers, files, "weight"),
        dense_linears=[name for name in linears if name not in layers],
        other_tensors=_others(files, layers, names),
        read_other=read_other,
        read_ternary=None if online else read_ternary,
        read_master=lambda layer: _master(files, layer, layers[layer]),
    )


def _open_compressed(
    folder: Path, config: dict[str, Any], entry: dict[str, Any]
) -> ForeignCheckpoint:
    packed = _is_packed(folder, entry)
    linears = linear_layers(skeleton(config, folder))
    files = WeightFiles.in_folder(folder)
    weight = "weight_packed" if packed else "weight"
    layers = {
        name: (linear.out_features, linear.in_features)
        for name, linear in linears.items()
        if f"{name}.weight_scale" in files
    }

    def read_ternary(layer: str) -> TernaryWeight:
        stored = files.read(f"{layer}.{weight}")
        rows, columns = layers[layer]
        words = -(-columns // compressed_tensors.CODES_PER_WORD)
        expected = (torch.int32, (rows, words)) if packed else (torch.int8, (rows, columns))
        if (stored.dtype, tuple(stored.shape)) != expected:
            raise UserError(
                f"layer {layer}: {weight} is {stored.dtype} {list(stored.shape)}, expected "
                f"{expected[0]} {list(expected[1])}"
            )
        codes = compressed_tensors.unpack_words(stored, columns) if packed else stored
        return _checked(codes, files.read(f"{layer}.weight_scale").float(), layer)

    return ForeignCheckpoint(
        folder=folder,
        kind=f"compressed-tensors {entry['format']}",
        config=config,
        layers=_complete(layers, files, weight),
        dense_linears=[name for name in linears if name not in layers],
        other_tensors=_others(files, layers, (weight, "weight_scale", "weight_shape")),
        read_other=files.read,
        read_ternary=read_ternary,
        read_master=lambda layer: _master(files, layer, layers[layer]),
    )


def _is_packed(folder: Path, entry: dict[str, Any]) -> bool:
    where = f"{folder}/config.json"
    if entry.get("sparsity_config"):
        raise UserError(f"{where}: a sparsity_config is not covered; decompress the model first")
    groups = list((entry.get("config_groups") or {}).values())
    formats = {compressed_tensors.W2A8: 2, compressed_tensors.W8A8: 8}
    bits = formats.get(entry.get("format", ""))
    if bits is None or len(groups) != 1 or not isinstance(groups[0], dict):
        raise UserError(
            f"{where}: compressed-tensors with one group of format {' or '.join(formats)} is "
            f"importable, not {entry.get('format')!r} with {len(groups)} groups"
        )
    weights = groups[0].get("weights") or {}
    found = (weights.get("num_bits"), weights.get("symmetric"), weights.get("strategy"))
    if found[:2] != (bits, True) or found[2] not in ("channel", "tensor"):
        raise UserError(
            f"{where}: weights with num_bits, symmetric, strategy = {found} are not importable; "
            f"({bits}, True, channel or tensor) are"
        )
    activations = groups[0].get("input_activations")
    if not activations or activations.get("num_bits") != 8:
        raise UserError(f"{where}: the layers have no 8-bit activations, as ternary ones here have")
    return entry["format"] == compressed_tensors.W2A8


def _bitnet_codes(stored: Tensor, shape: tuple[int, int], layer: str) -> Tensor:
    rows, columns = shape
    if stored.dtype == torch.uint8 and tuple(stored.shape) == (rows // 4, columns):
        return hf_bitnet.unpack_row_planes(stored)
    raise UserError(
        f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected torch.uint8 "
        f"{[rows // 4, columns]}"
    )


def _checked(codes: Tensor, scale: Tensor, layer: str) -> TernaryWeight:
    low, high = codes.aminmax()
    if low < -1 or high > 1:
        raise UserError(f"layer {layer} is not ternary: it has codes from {low} to {high}")
    smallest, largest = scale.aminmax()
    if not (0 < smallest <= largest < float("inf")):
        raise UserError(f"layer {layer}: its weight scale is not a positive number")
    if smallest != largest:
        raise UserError(
            f"layer {layer} has different scales in its rows ({smallest:.4g} to {largest:.4g}); one "
            "scale for a matrix is importable"
        )
    return TernaryWeight(codes, largest)


def _master(files: WeightFiles, layer: str, shape: tuple[int, int]) -> Tensor:
    stored = files.read(f"{layer}.weight")
    if tuple(stored.shape) != shape or not stored.is_floating_point():
        raise UserError(
            f"layer {layer}: weight is {stored.dtype} {list(stored.shape)}, expected floats "
            f"{list(shape)}"
        )
    return stored


def _complete(
    layers: dict[str, tuple[int, int]], files: WeightFiles, weight: str
) -> dict[str, tuple[int, int]]:
    if not layers:
        raise UserError(f"{files.folder} has no ternary layer")
    for name in layers:
        if f"{name}.{weight}" not in files:
            raise UserError(f"{files.folder} lacks {name}.{weight}: the files are incomplete")
    return layers


def _others(
    files: WeightFiles, layers: dict[str, tuple[int, int]], names: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    of_layers = {f"{layer}.{name}" for layer in layers for name in names}
    return {name: shape for name, shape in files.shapes.items() if name not in of_layers}


def _matches(name: str, patterns: list[str]) -> bool:
    """Whether transformers would leave a module alone: a start or an end of its name, or a regex."""
    return any(re.match(rf"(?:{key})(?:\.|$)", name) or name.endswith(key) for key in patterns)
