# SPDX-License-Identifier: Apache-2.0
"""The paper's analysis figures for any checkpoints: what their weights look like, layer by layer."""

import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.checkpoint.saved_steps import list_checkpoints
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.figures import weight_histograms
from sparse_bitnet_paper.measured_run import depth_parts
from sparse_bitnet_paper.page import Block, Figure, Paragraph, Section, html
from sparse_bitnet_paper.paper_figures import (
    layer_profile,
    near_zero_heat_maps,
    threshold_overlay,
)
from sparse_bitnet_paper.table import Table
from sparse_bitnet_paper.weight_statistics import WeightStatistics, pool
from sparse_bitnet_paper.weights import checkpoint_statistics

PAPER_ZERO_CODES = 0.423
"""Of the released BitNet b1.58 2B model (the paper's figure 1)."""


@dataclass(frozen=True, kw_only=True)
class CheckpointWeights:
    """One checkpoint, counted."""

    label: str
    weight: str
    """ "ternary" or "full": the format in which the model was trained, as far as it says."""

    layers: Sequence[WeightStatistics]

    history: Sequence[tuple[int, Sequence[WeightStatistics]]] = ()
    """(step, layers) of every checkpoint of a run folder; empty for a single checkpoint."""


def read_checkpoint(
    path_or_id: str,
    pattern: NMPattern,
    on_layer: Callable[[str], None] | None = None,
    dense_layers: tuple[str, ...] = (),
) -> CheckpointWeights:
    """Count a checkpoint's weights with one layer in memory at a time.

    Args:
        path_or_id: run folder (all its checkpoints are counted), checkpoint, any transformers folder
            with safetensors, or a hub id.
        pattern: whose group thresholds to count.
        on_layer: called with the name of each checkpoint before it is read.
        dense_layers: globs of layers not to count, as not pruned.

    Raises `UserError` for anything else.
    """
    say = on_layer or (lambda name: None)
    say(str(path_or_id))
    layers = checkpoint_statistics(path_or_id, pattern=pattern, dense_layers=dense_layers)
    history = []
    found = list_checkpoints(Path(path_or_id))
    if len(found) > 1:
        for checkpoint in found:
            say(str(checkpoint.path))
            statistics = checkpoint_statistics(
                checkpoint.path, pattern=pattern, dense_layers=dense_layers
            )
            history.append((checkpoint.step, statistics))
    return CheckpointWeights(
        label=_label(path_or_id), weight=_trained_format(path_or_id), layers=layers, history=history
    )


def _label(path_or_id: str) -> str:
    parts = [part for part in Path(path_or_id).parts if part not in ("final", "checkpoints", "/")]
    return "/".join(parts[-2:] if len(parts) > 1 and parts[-1].startswith("step-") else parts[-1:])


def _trained_format(path_or_id: str | Path) -> str:
    found = find_checkpoint(path_or_id)
    if found.kind == "trained":
        return found.entry["format"]["weight"]
    return "ternary" if found.entry.get("quant_method") == "bitnet" else "full"


def weight_page(checkpoints: Sequence[CheckpointWeights], pattern: NMPattern) -> str:
    """A self-contained HTML page with all figures and the numbers of each checkpoint."""
    histograms = weight_histograms(
        [(textwrap.fill(c.label, 30), c.weight, pool(c.layers)) for c in checkpoints]
    )
    blocks: list[Block] = [
        Paragraph(
            "Weights W of every linear layer of the blocks in units of their layer's mean |W|. Below "
            "0.5 a weight is near zero: it rounds to the ternary code 0. The paper reports "
            f"{100 * PAPER_ZERO_CODES:.1f} % zero codes in the released BitNet b1.58 2B model."
        ),
        summary_table(checkpoints),
        Section("Histograms (figures 1 and 6)"),
        Figure("histogram", histograms, "All block weights; shaded: near zero."),
        Section(f"Magnitudes and {pattern} thresholds (figure 7)"),
        *_thresholds(checkpoints, pattern),
        Section("Layer by layer (figure 1)"),
        Figure(
            "layer-profile",
            layer_profile(
                [(c.label, c.weight, [x.near_zero_mass for x in c.layers]) for c in checkpoints]
            ),
            "Near-zero mass of every layer: the share of its weights that round to the code 0.",
        ),
    ]
    if maps := [checkpoint for checkpoint in checkpoints if checkpoint.history]:
        blocks += [
            Section("Near-zero mass over training (figure 5)"),
            *(_heat_map(number, checkpoint) for number, checkpoint in enumerate(maps)),
        ]
    return html("What the weights look like", blocks)


def weight_json(checkpoints: Sequence[CheckpointWeights]) -> str:
    """Counts of every layer of every checkpoint."""
    return json.dumps(
        [
            {
                "checkpoint": checkpoint.label,
                "weight": checkpoint.weight,
                "all": pool(checkpoint.layers).to_dict(),
                "layers": [layer.to_dict() for layer in checkpoint.layers],
                "history": [
                    {
                        "step": step,
                        "near_zero_mass": {layer.name: layer.near_zero_mass for layer in layers},
                    }
                    for step, layers in checkpoint.history
                ],
            }
            for checkpoint in checkpoints
        ]
    )


def write_weight_report(
    checkpoints: Sequence[CheckpointWeights], pattern: NMPattern, out: Path
) -> None:
    """Write `weights.html` and `weights.json` to the folder `out`."""
    make_folder(out)
    write_atomic(out / "weights.json", weight_json(checkpoints))
    write_atomic(out / "weights.html", weight_page(checkpoints, pattern))


def summary_table(checkpoints: Sequence[CheckpointWeights]) -> Table:
    """One line per checkpoint."""
    shares = ("near-zero mass", "zero codes", "zeros in the forward")
    head = ("checkpoint", "layers", "weights", *shares)
    lines = []
    for checkpoint in checkpoints:
        whole = pool(checkpoint.layers)
        found = (whole.near_zero_mass, whole.code_zero_fraction, whole.zero_fraction)
        texts = (f"{100 * share:.1f} %" for share in found)
        lines.append((checkpoint.label, f"{len(checkpoint.layers)}", f"{whole.weights:,}", *texts))
    return Table(head, lines)


def _thresholds(checkpoints: Sequence[CheckpointWeights], pattern: NMPattern) -> list[Block]:
    drawings: list[Block] = []
    for number, checkpoint in enumerate(checkpoints):
        parts = depth_parts(checkpoint.layers)
        shown: dict[str, WeightStatistics] = {
            name: pool(parts[name]) for name in ("mid", "late") if name in parts
        }
        name = f"thresholds-{number}"
        drawings.append(
            Figure(
                name,
                threshold_overlay([(checkpoint.label, checkpoint.weight, shown)], name=name),
                f"{checkpoint.label}: density of |W| / mean|W|, and (line) of the largest magnitude "
                f"that {pattern} selection prunes in each group.",
            )
        )
    return drawings


def _heat_map(number: int, checkpoint: CheckpointWeights) -> Figure:
    steps = [step for step, _ in checkpoint.history]
    matrix = np.array([[x.near_zero_mass for x in layers] for _, layers in checkpoint.history])
    names = [layer.name for layer in checkpoint.layers]
    figure = near_zero_heat_maps([(checkpoint.label, steps, matrix)], names)
    caption = f"Near-zero mass of every layer of {checkpoint.label}."
    return Figure(f"near-zero-{number}", figure, caption)
