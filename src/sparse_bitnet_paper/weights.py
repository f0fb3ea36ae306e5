# SPDX-License-Identifier: Apache-2.0
"""Statistics of master weights that explain why a format tolerates sparsity (paper, section 4.3).

From safetensors files one layer is in memory at a time.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.hub import read_format
from sparse_bitnet.checkpoint.model_folder import CONFIG_FILE
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select, spread_scale
from sparse_bitnet.ops.absmean import absmean
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.weight_statistics import (
    BIN_WIDTH,
    NEAR_ZERO,
    RANGE,
    WeightStatistics,
)

_BLOCK_WEIGHTS = 1 << 22
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weight_statistics(
    name: str, weight: Tensor, config: SparseBitConfig, *, pattern: NMPattern | None = None
) -> WeightStatistics:
    """Count one layer's master weight.

    Args:
        name: full name of the layer.
        weight: float tensor [out_features, in_features].
        config: the format in which the layer is used; decides mask, codes and scale.
        pattern: whose group thresholds to count; by default the format's own. The paper shows those
            of 6:8 on densely trained weights.

    Raises `UserError` when the pattern does not divide in_features.
    """
    pattern = pattern or config.pattern
    pattern.check_divides(weight.shape[-1], name)
    weight = weight.detach()
    selection = select(weight, config)
    unpruned = None  # the codes of absmean follow from its scale
    if config.weight == "ternary" and not config.is_plain:
        unpruned = select(weight, config, kept=config.pattern.m).codes
    mean = absmean(weight)
    weight_scale = mean if selection.weight_scale is None else selection.weight_scale
    # One scale, or one for each weight.
    weight_scale = spread_scale(weight_scale, weight.shape[-1]).expand(weight.shape)
    counts = torch.zeros(round(2 * RANGE / BIN_WIDTH), dtype=torch.int64, device=weight.device)
    thresholds = torch.zeros(len(counts) // 2, dtype=torch.int64, device=weight.device)
    near_zero = code_zeros = zeros = groups = 0
    absolute_sum = 0.0
    rows = max(1, _BLOCK_WEIGHTS // weight.shape[-1])
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        values = weight[part].float()
        absolute_sum += values.abs().sum(dtype=torch.float64).item()
        relative = values / mean
        near_zero += int((relative.abs() < NEAR_ZERO).sum())
        codes = (values / weight_scale[part]).round() if unpruned is None else unpruned[part]
        code_zeros += int((codes == 0).sum())
        zeros += _zeros(values, *(x if x is None else x[part] for x in selection[:2]))
        counts += _binned(relative, -RANGE, len(counts))
        if not pattern.is_dense:
            largest = relative.abs().unflatten(-1, (-1, pattern.m)).topk(pattern.n + 1).values
            thresholds += _binned(largest[..., -1], 0.0, len(thresholds))
            groups += largest[..., -1].numel()
    return WeightStatistics(
        name=name,
        block=_block_index(name),
        weights=weight.numel(),
        absolute_sum=absolute_sum,
        near_zero=near_zero,
        code_zeros=code_zeros,
        zeros=zeros,
        histogram=counts.cpu().numpy(),
        groups=groups,
        thresholds=thresholds.cpu().numpy(),
    )


def model_statistics(
    model: nn.Module, *, pattern: NMPattern | None = None
) -> list[WeightStatistics]:
    """Every `SparseBitLinear` of a model, in order.

    Raises `UserError` when there is none or a pattern does not fit.
    """
    layers = sparse_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no SparseBitLinear; use convert_ first")
    return [
        weight_statistics(name, layer.weight, layer.config, pattern=pattern)
        for name, layer in layers.items()
    ]


def checkpoint_statistics(
    path: str | Path, *, pattern: NMPattern | None = None, dense_layers: tuple[str, ...] = ()
) -> list[WeightStatistics]:
    """Every linear of the blocks of a safetensors checkpoint, read one layer at a time.

    It may be one of ours or any other in Hugging Face form with floating-point weights; of the latter,
    every matrix inside a numbered block is counted, as full-precision weights. Of a ternary model of
    another tool that holds codes alone, these are counted.

    Raises `UserError` as `find_checkpoint`, and for a model without safetensors or countable weights.
    """
    found = find_checkpoint(path)
    folder, dense = found.folder, set()
    config = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
    if found.kind == "trained":
        config = read_format(found.entry, str(folder / CONFIG_FILE))
        dense = set(found.entry["modules_to_not_convert"])
    left_out = SparseBitConfig(dense_layers=dense_layers)
    names = [key.removesuffix(".weight") for key in WeightFiles.in_folder(folder).shapes]
    left_out.check_dense_layers(names, str(folder))
    statistics = [
        weight_statistics(name, weight, config, pattern=pattern)
        for name, weight in _block_matrices(folder)
        if name not in dense and not left_out.keeps_dense(name)
    ]
    if not statistics and found.kind == "foreign":
        opened = open_checkpoint(path)
        statistics = [
            weight_statistics(name, opened.ternary(name).codes.float(), config, pattern=pattern)
            for name in opened.layers
            if not left_out.keeps_dense(name)
        ]
    if not statistics:
        raise UserError(
            f"{folder}: no floating-point block weights (packed checkpoints hold only codes)"
        )
    return statistics


def _block_matrices(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = WeightFiles.in_folder(folder)
    for key in sorted(files.shapes, key=_natural):
        name = key.removesuffix(".weight")
        if name == key or _block_index(name) is None or len(files.shapes[key]) != 2:
            continue
        weight = files.read(key)
        if weight.dtype in _FLOATS:
            yield name, weight


def _zeros(values: Tensor, codes: Tensor | None, mask: Tensor | None) -> int:
    if codes is not None:
        return int((codes == 0).sum())
    return int((values == 0).sum() if mask is None else (values * mask == 0).sum())


def _binned(values: Tensor, low: float, bins: int) -> Tensor:
    index = ((values.flatten() - low) / BIN_WIDTH).floor()
    inside = index[(index >= 0) & (index < bins)]
    return torch.bincount(inside.to(torch.int64), minlength=bins)


def _block_index(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _natural(key: str) -> list[tuple[str, int]]:
    """Sorts layers.2 before layers.10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", key)]
