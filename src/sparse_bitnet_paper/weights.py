# SPDX-License-Identifier: Apache-2.0
"""Statistics of the weights of models and checkpoints (paper, section 4.3), and a page of them.

Safetensors files are read one layer at a time.
"""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from sparse_bitnet.checkpoint.model_folder import CONFIG_FILE
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint, open_checkpoint
from sparse_bitnet.checkpoint.trained import read_format
from sparse_bitnet.checkpoint.weight_files import WeightFiles
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.nn.convert import sparse_layers
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select, spread_scale
from sparse_bitnet.ops.select_ternary import absmean
from sparse_bitnet.packing.tensor_file import FLOATS
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.figures import layer_profile, threshold_overlay, weight_histograms
from sparse_bitnet_paper.report import render
from sparse_bitnet_paper.tables import Table, table
from sparse_bitnet_paper.weight_counts import (
    BIN_WIDTH,
    NEAR_ZERO,
    RANGE,
    as_json,
    depth_parts,
    pool,
    shares,
)


def count_weights(
    name: str, weight: Tensor, config: SparseBitConfig, *, pattern: NMPattern | None = None
) -> dict[str, Any]:
    """Return the counts of one layer's master weight.

    In units of the layer's mean |W|: `near_zero` counts weights below 0.5, `histogram` is int64 [160],
    bins of 0.05 from -4 to 4, `thresholds` int64 [80], bins of each group's (n+1)-th largest |W|.
    `code_zeros` counts zeros among the ternary codes before the mask (of full-precision weights as if
    rounded), `zeros` those of the weight that the forward uses. `block` is None if the name holds no
    number.

    Args:
        name: full name of the layer.
        weight: float tensor [out_features, in_features].
        config: the format in which the layer is used; decides mask, codes and scale.
        pattern: pattern whose group thresholds are counted; by default the format's own. The paper shows
            those of 6:8 on densely trained weights.

    Raises `UserError` when the pattern does not divide in_features.
    """
    pattern = pattern or config.pattern
    pattern.check_divides(weight.shape[-1], name)
    weight = weight.detach()
    selection, mean, values = select(weight, config), absmean(weight), weight.float()
    codes: Any
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
        "zeros": int(used.eq(0).sum()),
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

    The checkpoint may be ours or any other in Hugging Face format. In another tool's floating-point
    checkpoint, every matrix inside a numbered block counts, as full-precision weights; if it holds
    ternary codes only, these do.

    Raises `UserError` as `find_checkpoint`, and for a model without safetensors or countable weights.
    """
    stored = find_checkpoint(path)
    folder, dense = stored.folder, set()
    config = SparseBitConfig(weight="full", pattern=NMPattern(1, 1))
    if stored.kind == "trained":
        config = read_format(stored.entry, str(folder / CONFIG_FILE))
        dense = set(stored.entry["modules_to_not_convert"])
    left_out = SparseBitConfig(dense_layers=dense_layers)
    files = WeightFiles.in_folder(folder)
    dense |= {key[:-7] for key in files.shapes if key.endswith((".gate.weight", ".router.weight"))}
    left_out.check_dense_layers([key.removesuffix(".weight") for key in files.shapes], str(folder))
    matrices: Iterable[tuple[str, Tensor]] = _block_matrices(files)
    if stored.kind == "dense" and stored.config.get("model_type") in ("gpt2", "openai-gpt"):
        matrices = ((name, weight.T) for name, weight in matrices)  # they hold Conv1D
    if stored.kind == "packed":
        matrices = ()
    elif stored.kind == "foreign" and not set(files.dtypes.values()) <= set(FLOATS):
        opened = open_checkpoint(path)
        matrices = ((name, opened.ternary(name).codes.float()) for name in opened.layers)
    counts = [
        count_weights(name, weight, config, pattern=pattern)
        for name, weight in matrices
        if name not in dense and not left_out.keeps_dense(name)
    ]
    if not counts:
        raise UserError(
            f"{folder} holds only codes, no master weights: analyze the run that it was packed from"
        )
    return pd.DataFrame(counts)


def _block_matrices(files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    for key in sorted(files.shapes, key=_natural):
        name = key.removesuffix(".weight")
        is_matrix = files.dtypes[key] in FLOATS and len(files.shapes[key]) == 2
        if is_matrix and name != key and _block_index(name) is not None:
            yield name, files.read(key)


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


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """One checkpoint, counted."""

    label: str
    weight: str
    """ "ternary" or "full": the format in which the model was trained, as far as it says."""
    layers: pd.DataFrame


def read_checkpoint(
    path_or_id: str, pattern: NMPattern, dense_layers: tuple[str, ...] = ()
) -> CheckpointWeights:
    """Count a checkpoint's weights with one layer in memory at a time.

    Args:
        path_or_id: run folder, checkpoint, any transformers folder with safetensors, or a hub id.
        pattern: pattern whose group thresholds are counted.
        dense_layers: globs of layers not to count, since they are not pruned.

    Raises `UserError` for anything else.
    """
    opened = find_checkpoint(path_or_id)
    if opened.kind == "trained":
        weight = read_format(opened.entry, str(opened.folder / CONFIG_FILE)).weight
    else:
        weight = "ternary" if opened.kind == "foreign" else "full"
    parts = Path(path_or_id).absolute().parts
    return CheckpointWeights(
        label=[p for p in ("model", *parts) if p not in ("final", "checkpoints", "/")][-1],
        weight=weight,
        layers=count_checkpoint(path_or_id, pattern=pattern, dense_layers=dense_layers),
    )


def write_weight_report(
    checkpoints: Sequence[CheckpointWeights], pattern: NMPattern, out: Path
) -> None:
    """Write `weights.html`, a self-contained page of all figures and the numbers of each checkpoint, and
    `weights.json`, the counts of every layer, to `out`."""
    make_folder(out)
    counts = [
        {
            "checkpoint": each.label,
            "weight": each.weight,
            "all": {"name": "all layers", "block": None} | as_json(pool(each.layers)),
            "layers": [as_json(layer) for _, layer in each.layers.iterrows()],
        }
        for each in checkpoints
    ]
    page = render(
        "weights.html.j2",
        title="What the weights look like",
        pattern=pattern,
        summary=summary_table(checkpoints),
        histograms=weight_histograms(
            [(textwrap.fill(c.label, 30), c.weight, pool(c.layers)) for c in checkpoints]
        ),
        thresholds=[
            (c.label, threshold_overlay([(c.label, c.weight, depth_parts(c.layers))]))
            for c in checkpoints
        ],
        profile=layer_profile(
            [(c.label, c.weight, list(shares(c.layers)["near_zero_mass"])) for c in checkpoints]
        ),
    )
    write_atomic(out / "weights.json", json.dumps(counts))
    write_atomic(out / "weights.html", page)


def summary_table(checkpoints: Sequence[CheckpointWeights]) -> Table:
    """Return one line per checkpoint."""
    wholes = [pool(each.layers) for each in checkpoints]
    heads = ("near-zero mass", "zero codes", "zeros after the mask")
    return table(
        {"checkpoint": each.label, "layers": f"{len(each.layers)}", "weights": f"{whole.weights:,}"}
        | {h: f"{100 * v:.1f} %" for h, v in zip(heads, shares(whole).values(), strict=True)}
        for each, whole in zip(checkpoints, wholes, strict=True)
    )
