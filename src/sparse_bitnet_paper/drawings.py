# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, drawn from the files of one set of results."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparse_bitnet_paper.cells import (
    cells_of,
    model_label,
    paper_cells,
    paper_sweep,
)
from sparse_bitnet_paper.figures import (
    LABELS,
    Bar,
    Curve,
    cost_bars,
    flip_rate_curves,
    loss_curves,
    running_mean,
    sparsity_cost_curves,
    weight_histograms,
)
from sparse_bitnet_paper.page import Figure
from sparse_bitnet_paper.paper_figures import (
    ablation_curves,
    layer_profile,
    near_zero_heat_maps,
    norm_ppl,
    threshold_overlay,
)
from sparse_bitnet_paper.paper_runs import ABLATIONS
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import CURVE_POINTS, Results
from sparse_bitnet_paper.weight_statistics import WeightStatistics

WEIGHTS = ("full", "ternary")

_SMOOTH = 13
"""Points of a thinned curve over which differences of losses are averaged."""


def cost_figure(results: Results) -> Figure:
    """What sparsity costs at the main size, beside the paper's own."""
    pattern = results.setting["pattern"]
    groups = {"this run": cells_of(results, results.main)}
    groups |= {f"paper, {size}": cell for size, cell in paper_cells(pattern).items()}
    bars = [
        Bar(
            group=group,
            weight=cell.weight,
            value=cell.relative.mean,
            low=cell.relative.least,
            high=cell.relative.greatest,
        )
        for group, column in groups.items()
        for cell in column
        if cell.relative
    ]
    return Figure(
        _name(results, "costs"),
        cost_bars(bars, x_label=f"perplexity of {pattern} over dense (%)"),
        "Each model against the dense one of its own weight format: this run, and what the "
        "paper reports for models of 0.5 to 3 billion weights.",
        f"What {pattern} costs",
    )


def course_figures(results: Results) -> list[Figure]:
    """Loss, cost of sparsity and mask flips of the four models of the main size over the steps."""
    rows = {format: results.by_seed(format) for format in results.four_formats}
    seeds = sorted(set.intersection(*(set(found) for found in rows.values())))
    first = [rows[format][seeds[0]] for format in results.four_formats]
    sparse = [row for row in first if not row.is_dense]
    of_seed = f" of seed {seeds[0]}" if len(seeds) > 1 else ""
    costs = []
    for weight, dense, pruned in zip(
        WEIGHTS, results.four_formats[::2], results.four_formats[1::2], strict=True
    ):
        columns = []
        for seed in seeds:
            twins = [_logged(results, rows[format][seed], "loss") for format in (pruned, dense)]
            columns.append(running_mean(np.subtract(twins[0].values, twins[1].values), _SMOOTH))
        points = list(zip(twins[0].steps, np.transpose(columns), strict=True))
        costs.append(_band(weight, points, weight, sparse=True))
    steps = first[0].steps
    stretch = -(-steps // CURVE_POINTS)
    return [
        Figure(
            _name(results, "loss"),
            loss_curves([_logged(results, row, "loss") for row in first]),
            f"Training loss{of_seed}, mean over {stretch} steps; dots are the held-out loss.",
            "Loss",
        ),
        Figure(
            _name(results, "sparsity-costs"),
            sparsity_cost_curves(costs),
            f"Sparse minus dense loss on the very same batches, mean over {_SMOOTH * stretch} steps"
            + (f" and {len(seeds)} seeds, with their range." if len(seeds) > 1 else ".")
            + " Differences that the loss curves are too coarse to show.",
            "Cost of sparsity during training",
        ),
        Figure(
            _name(results, "flips"),
            flip_rate_curves([_logged(results, row, "flip_rate") for row in sparse]),
            f"Share of mask positions that change from one step to the next{of_seed}: exploration "
            "first, then a settled mask as the learning rate falls.",
            "Mask flips",
        ),
    ]


def _logged(results: Results, row: ResultRow, key: str) -> Curve:
    """A measure over the steps of one run."""
    parts = results.curves(row)
    logged = [part for part in parts if key in part]
    held_out = [(p["step"], p["validation_loss"]) for p in parts if "validation_loss" in p]
    return Curve(
        label=model_label(row.weight, row.pattern),
        weight=row.weight,
        sparse=not row.is_dense,
        steps=[part["step"] for part in logged],
        values=[part[key] for part in logged],
        points=held_out if key == "loss" else (),
    )


def sweep_figure(results: Results) -> Figure | None:
    """Figure 2; None before the sweep has runs."""
    patterns = results.setting["patterns"]
    ours = []
    for weight in WEIGHTS:
        points = [
            (place, [100 * (value - 1) for value in found.values()])
            for place, pattern in enumerate(patterns)
            if (found := results.relative(f"{weight}-{pattern}"))
        ]
        if len(points) > 2 or (len(points) > 1 and len(patterns) < 4):
            ours.append(_band(LABELS[weight], points, weight))
    if not ours:
        return None
    paper = {
        weight: [100 * (values[pattern] / values["8:8"] - 1) for pattern in patterns]
        for weight, values in paper_sweep().items()
    }
    return Figure(
        _name(results, "norm-ppl"),
        norm_ppl(ours, paper, patterns),
        f"Perplexity of {results.main} over that of its own dense model, by pattern: mean and range "
        "of the seeds, whose number the table says. Dotted: the paper's 0.5B models. 2:4 has the density "
        "of 4:8.",
    )


def ablation_figures(results: Results) -> list[Figure]:
    """Figure 4: validation perplexity and flip rate over the steps."""
    perplexity, flips = [], []
    for name, format in ABLATIONS.items():
        rows = list(results.by_seed(format).values())
        if not rows:
            continue
        perplexity.append(_curve_band(results, rows, name, "validation_loss", math.exp))
        flips.append(_curve_band(results, rows, name, "flip_rate", lambda rate: 100 * rate))
    if len(perplexity) < 2:
        return []
    tokens = results.setting["recipe"]["validation_tokens"]
    where = f"{results.main}, 6:8; bands are the range of the seeds, whose number the table says."
    return [
        Figure(
            _name(results, "ablation-ppl"),
            ablation_curves(
                perplexity,
                name=_name(results, "ablation-ppl"),
                y_label="validation perplexity",
                title="Validation perplexity of the four training designs over the steps",
                skip=0.15,
            ),
            f"Perplexity of the four training designs on the first {tokens:,} held-out tokens. {where}",
        ),
        Figure(
            _name(results, "ablation-flips"),
            ablation_curves(
                flips,
                name=_name(results, "ablation-flips"),
                y_label="mask flip rate (% per step)",
                title="Mask flip rate of the four training designs over the steps",
            ),
            f"Mask flip rate between consecutive steps. {where}",
        ),
    ]


def dense_figures(results: Results) -> list[Figure]:
    """Figures 1, 5, 6 and 7, for the largest size that has both dense models; none without."""
    found = _dense_pair(results)
    if found is None:
        return []
    model, weights = found
    maps, profiles, histograms, thresholds = [], [], [], []
    for weight, history in weights.items():
        label, masses = f"{LABELS[weight]}, dense", np.array(history["near_zero_mass"])
        final = {k: WeightStatistics.from_dict(part) for k, part in history["final"].items()}
        maps.append((label, history["steps"], masses))
        profiles.append((label, weight, masses[-1]))
        histograms.append((label, weight, final.pop("all")))
        thresholds.append((LABELS[weight], weight, final))
    layers = history["layers"]
    name = _name(results, "thresholds")
    return [
        Figure(
            _name(results, "layer-profile"),
            layer_profile(profiles),
            f"Near-zero mass of every linear layer of {model}, seed 0, after dense training, from the "
            "first block to the last; `sparse-bitnet analyze CHECKPOINT...` draws it of any BitNet "
            "checkpoint.",
        ),
        Figure(
            _name(results, "near-zero"),
            near_zero_heat_maps(maps, layers),
            f"Near-zero mass P(|W| / mean|W| < 0.5) of every linear layer of {model}, seed 0, over dense "
            f"training; within a block from the top: {_layers_of_a_block(layers)}.",
        ),
        Figure(
            _name(results, "histogram"),
            weight_histograms(histograms),
            f"Master weights of all block layers of {model}, seed 0, after dense training. In the "
            "shaded band a weight rounds to the code 0.",
        ),
        Figure(
            name,
            threshold_overlay(thresholds, name=name),
            f"Density of |W| / mean|W| of {model}, seed 0, after dense training, and (line) of the "
            f"largest magnitude that {results.setting['pattern']} selection prunes in each group.",
        ),
    ]


def _dense_pair(results: Results) -> tuple[str, dict[str, dict[str, Any]]] | None:
    """What is kept of the weights of seed 0's dense models, of the largest size that has both."""
    for model in reversed(results.models):
        rows = {w: results.by_seed(f"{w}-8:8", model=model).get(0) for w in WEIGHTS}
        known = {weight: results.weights(row) for weight, row in rows.items() if row is not None}
        if len(known) == len(WEIGHTS):
            return model, known
    return None


def _curve_band(
    results: Results,
    rows: Sequence[ResultRow],
    label: str,
    key: str,
    convert: Callable[[float], float],
) -> Curve:
    values: dict[int, list[float]] = {}
    for row in rows:
        for part in results.curves(row):
            if part.get(key):
                values.setdefault(part["step"], []).append(convert(part[key]))
    # Steps that not every seed reached in the same stretch would make the band jump.
    return _band(label, [(s, v) for s, v in sorted(values.items()) if len(v) == len(rows)])


def _band(
    label: str, points: Sequence[tuple[float, Sequence[float]]], weight: str = "", **style: Any
) -> Curve:
    """Mean and range of the seeds at each place."""
    return Curve(
        label=label,
        weight=weight,
        steps=[x for x, _ in points],
        values=[statistics.fmean(values) for _, values in points],
        low=[min(values) for _, values in points],
        high=[max(values) for _, values in points],
        **style,
    )


def _layers_of_a_block(layers: Sequence[str]) -> str:
    first = [name for name in layers if ".0." in name]
    return ", ".join(name.rpartition(".")[2].removesuffix("_proj") for name in first)


def _name(results: Results, figure: str) -> str:
    return f"{results.name}-{figure}"
