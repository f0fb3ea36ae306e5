# SPDX-License-Identifier: Apache-2.0
"""The paper's analysis figures for any checkpoints: what their weights look like, layer by layer."""

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.figures import (
    layer_profile,
    near_zero_heat_maps,
    threshold_overlay,
    weight_histograms,
)
from sparse_bitnet_paper.page import render
from sparse_bitnet_paper.tables import Table, table
from sparse_bitnet_paper.weight_counts import as_json, depth_parts, pool, shares
from sparse_bitnet_paper.weights import count_checkpoint


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """One checkpoint, counted."""

    label: str
    weight: str
    """ "ternary" or "full": the format in which the model was trained, as far as it says."""

    layers: pd.DataFrame

    history: Sequence[tuple[int, pd.DataFrame]] = ()
    """(step, layers) of every checkpoint of a run folder; empty for a single checkpoint."""


def read_checkpoint(
    path_or_id: str,
    pattern: NMPattern,
    on_read: Callable[[str], None] = lambda name: None,
    dense_layers: tuple[str, ...] = (),
) -> CheckpointWeights:
    """Count a checkpoint's weights with one layer in memory at a time.

    Args:
        path_or_id: run folder (all its checkpoints are counted), checkpoint, any transformers folder
            with safetensors, or a hub id.
        pattern: whose group thresholds to count.
        on_read: called with the name of each checkpoint before it is read.
        dense_layers: globs of layers not to count, as not pruned.

    Raises `UserError` for anything else.
    """

    def count(path: str | Path) -> pd.DataFrame:
        on_read(str(path))
        return count_checkpoint(path, pattern=pattern, dense_layers=dense_layers)

    layers, found = count(path_or_id), find_checkpoint(path_or_id)
    steps = list_checkpoints(Path(path_or_id))
    if found.kind == "trained":
        weight = found.entry["format"]["weight"]
    else:
        weight = "ternary" if found.entry.get("quant_method") == "bitnet" else "full"
    parts = [part for part in Path(path_or_id).parts if part not in ("final", "checkpoints", "/")]
    several = len(parts) > 1 and parts[-1].startswith("step-")
    return CheckpointWeights(
        label="/".join(parts[-2:] if several else parts[-1:]),
        weight=weight,
        layers=layers,
        history=[(each.step, count(each.path)) for each in steps] if len(steps) > 1 else (),
    )


def write_weight_report(
    checkpoints: Sequence[CheckpointWeights], pattern: NMPattern, out: Path
) -> None:
    """Write `weights.html`, the figures, and `weights.json`, the counts of every layer, to `out`."""
    make_folder(out)
    counts = [
        {
            "checkpoint": each.label,
            "weight": each.weight,
            "all": {"name": "all layers", "block": None} | as_json(pool(each.layers)),
            "layers": [as_json(layer) for _, layer in each.layers.iterrows()],
            "history": [
                {
                    "step": step,
                    "near_zero_mass": dict(zip(layers.name, _masses(layers), strict=True)),
                }
                for step, layers in each.history
            ],
        }
        for each in checkpoints
    ]
    write_atomic(out / "weights.json", json.dumps(counts))
    write_atomic(out / "weights.html", weight_page(checkpoints, pattern))


def weight_page(checkpoints: Sequence[CheckpointWeights], pattern: NMPattern) -> str:
    """Return a self-contained HTML page with all figures and the numbers of each checkpoint."""
    heat_maps = []
    for c in checkpoints:
        if c.history:
            steps, layers = zip(*c.history, strict=True)
            masses = np.array([_masses(each) for each in layers])
            drawn = near_zero_heat_maps([(c.label, steps, masses)], list(c.layers.name))
            heat_maps.append((c.label, drawn))
    return render(
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
        profile=layer_profile([(c.label, c.weight, _masses(c.layers)) for c in checkpoints]),
        heat_maps=heat_maps,
    )


def _masses(layers: pd.DataFrame) -> list[float]:
    return list(shares(layers)["near_zero_mass"])


def summary_table(checkpoints: Sequence[CheckpointWeights]) -> Table:
    """Return one line per checkpoint."""
    wholes = [pool(each.layers) for each in checkpoints]
    heads = ("near-zero mass", "zero codes", "zeros in the forward")
    return table(
        {"checkpoint": each.label, "layers": f"{len(each.layers)}", "weights": f"{whole.weights:,}"}
        | {h: f"{100 * v:.1f} %" for h, v in zip(heads, shares(whole).values(), strict=True)}
        for each, whole in zip(checkpoints, wholes, strict=True)
    )
