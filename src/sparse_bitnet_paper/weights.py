# SPDX-License-Identifier: Apache-2.0
"""Counting the master weights of models and checkpoints (paper, section 4.3).

From safetensors files one layer is in memory at a time.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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
from sparse_bitnet.ops.select_ternary import absmean
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.weight_counts import BIN_WIDTH, NEAR_ZERO, RANGE

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def count_weights(
    name: str, weight: Tensor, config: SparseBitConfig, *, pattern: NMPattern | None = None
) -> dict[str, Any]:
    """Return the `COUNTS` of one layer's master weight.

    Args:
        name: full name of the layer.
        weight: float tensor [out_features, in_features].
        config: the format in which the layer is used; decides mask, codes and scale.
        pattern: pattern whose group thresholds are counted; by default the format's own. The paper
            shows those of 6:8 on densely trained weights.

    Raises `UserError` when the pattern does not divide in_features.
    """
    pattern = pattern or config.pattern
    pattern.check_divides(weight.shape[-1], name)
    weight = weight.detach()
    selection, mean, values = select(weight, config), absmean(weight), weight.float()
    if config.weight == "ternary" and not config.is_plain:
        codes = select(weight, config, kept=config.pattern.m).codes
    else:  # the codes of absmean follow from its scale
        scale = mean if selection.weight_scale is None else selection.weight_scale
        codes = (values / spread_scale(scale, weight.shape[-1])).round()
    relative, used = values / mean, selection.codes
    thresholds = relative.new_empty(0)
    if not pattern.is_dense:
        groups = relative.abs().unflatten(-1, (-1, pattern.m))
        thresholds = groups.topk(pattern.n + 1).values[..., -1]
    if used is None:
        used = values if selection.mask is None else values * selection.mask
    return {
        "name": name,
        "block": _block_index(name),
        "weights": values.numel(),
        "absolute_sum": values.abs().sum(dtype=torch.float64).item(),
        "near_zero": int((relative.abs() < NEAR_ZERO).sum()),
        "code_zeros": int((codes == 0).sum()),
        "zeros": int((used == 0).sum()),
        "groups": thresholds.numel(),
        "histogram": _histogram(relative, -RANGE),
        "thresholds": _histogram(thresholds, 0.0),
    }


def count_model(model: nn.Module, *, pattern: NMPattern | None = None) -> pd.DataFrame:
    """Return the counts of every `SparseBitLinear` of a model, in order.

    Raises `UserError` when there is none or a pattern does not fit.
    """
    layers = sparse_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} has no SparseBitLinear; use convert_ first")
    return pd.DataFrame(
        count_weights(name, layer.weight, layer.config, pattern=pattern)
        for name, layer in layers.items()
    )


def count_checkpoint(
    path: str | Path, *, pattern: NMPattern | None = None, dense_layers: tuple[str, ...] = ()
) -> pd.DataFrame:
    """Return the counts of every linear of the blocks of a safetensors checkpoint.

    It may be one of ours or any other in Hugging Face form. Of another's floating-point weights every
    matrix inside a numbered block counts, as full-precision weights; if it holds ternary codes alone,
    these do.

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
    counts = [
        count_weights(name, weight, config, pattern=pattern)
        for name, weight in _block_matrices(folder)
        if name not in dense and not left_out.keeps_dense(name)
    ]
    if not counts and found.kind == "foreign":
        opened = open_checkpoint(path)
        counts = [
            count_weights(name, opened.ternary(name).codes.float(), config, pattern=pattern)
            for name in opened.layers
            if not left_out.keeps_dense(name)
        ]
    if not counts:
        raise UserError(
            f"{folder}: no floating-point block weights (packed checkpoints hold only codes)"
        )
    return pd.DataFrame(counts)


def _block_matrices(folder: Path) -> Iterator[tuple[str, Tensor]]:
    files = WeightFiles.in_folder(folder)
    for key in sorted(files.shapes, key=_natural):
        name = key.removesuffix(".weight")
        if name == key or _block_index(name) is None or len(files.shapes[key]) != 2:
            continue
        weight = files.read(key)
        if weight.dtype in _FLOATS:
            yield name, weight


def _histogram(values: Tensor, low: float) -> np.ndarray:
    """Return counts in bins of `BIN_WIDTH` from `low` to `RANGE`."""
    bins = round((RANGE - low) / BIN_WIDTH)
    index = ((values.flatten() - low) / BIN_WIDTH).floor()
    inside = index[(index >= 0) & (index < bins)]
    return torch.bincount(inside.to(torch.int64), minlength=bins).cpu().numpy()


def _block_index(name: str) -> int | None:
    return next((int(part) for part in name.split(".") if part.isdecimal()), None)


def _natural(key: str) -> list[tuple[str, int]]:
    """Return a key that sorts layers.2 before layers.10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", key)]
