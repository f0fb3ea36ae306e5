"""The figures of a report, drawn from the files of one set of results."""

import math
import statistics
from collections.abc import Sequence

import numpy as np

from sparse_bitnet.analysis.figures import LABELS, Curve, weight_histograms
from sparse_bitnet.analysis.paper_figures import (
    Band,
    ablation_curves,
    near_zero_heat_maps,
    norm_ppl,
    threshold_overlay,
)
from sparse_bitnet.analysis.weights import WeightStatistics
from sparse_bitnet.experiments.document import Drawing
from sparse_bitnet.experiments.paper import ABLATIONS
from sparse_bitnet.experiments.result_set import ResultSet
from sparse_bitnet.experiments.results import paper_results
from sparse_bitnet.experiments.store import RunRow

WEIGHTS = ("full", "ternary")


def sweep_drawing(results: ResultSet) -> Drawing | None:
    """Figure 2; None before the sweep has runs."""
    patterns = results.setting["patterns"]
    ours = {}
    for weight in WEIGHTS:
        points = [
            (place, [100 * (value - 1) for value in found.values()])
            for place, pattern in enumerate(patterns)
            if (found := results.relative(f"{weight}-{pattern}"))
        ]
        if len(points) > 2 or (len(points) > 1 and len(patterns) < 4):
            ours[weight] = _band(LABELS[weight], points)
    if not ours:
        return None
    table = paper_results()["nm_sweep_ppl_0.5B"]
    paper = {}
    for weight, name in (("full", "bf16"), ("ternary", "bitnet")):
        values = dict(zip(table["patterns"], table[name], strict=True))
        paper[weight] = [100 * (values[pattern] / values["8:8"] - 1) for pattern in patterns]
    return Drawing(
        _name(results, "norm-ppl"),
        norm_ppl(ours, paper, patterns),
        f"Perplexity of {results.main} over that of its own dense model, by pattern: mean and range "
        "of the seeds. Dotted: the paper's 0.5B models. 2:4 has the density of 4:8.",
    )


def ablation_drawings(results: ResultSet) -> list[Drawing]:
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
    where = f"{results.main}, 6:8; bands are the range of the seeds."
    return [
        Drawing(
            _name(results, "ablation-ppl"),
            ablation_curves(
                perplexity,
                name=_name(results, "ablation-ppl"),
                y_label="validation perplexity",
                title="Validation perplexity of the four training designs over the steps",
                skip=0.15,
            ),
            f"Validation perplexity of the four training designs. {where}",
        ),
        Drawing(
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


def heat_map_drawing(results: ResultSet) -> Drawing | None:
    """Figure 5, for the largest size that has both dense models."""
    found = _dense_pair(results)
    if found is None:
        return None
    model, rows = found
    maps, layers = [], []
    for weight, row in rows.items():
        history = results.folder.weights(row)
        maps.append(
            (f"{LABELS[weight]}, dense", history["steps"], np.array(history["near_zero_mass"]))
        )
        layers = history["layers"]
    return Drawing(
        _name(results, "near-zero"),
        near_zero_heat_maps(maps, layers),
        f"Near-zero mass P(|W| / mean|W| < 0.5) of every linear layer of {model} over dense training; "
        f"within a block from the top: {_layers_of_a_block(layers)}.",
    )


def histogram_drawing(results: ResultSet) -> Drawing | None:
    """Figure 6: all master weights of the dense models at the end."""
    found = _dense_pair(results)
    if found is None:
        return None
    model, rows = found
    models = []
    for weight, row in rows.items():
        values = results.folder.weights(row)["final"]["all"]
        curve = Curve(
            label=f"{LABELS[weight]}, dense", weight=weight, sparse=False, steps=(), values=()
        )
        models.append((curve, WeightStatistics.from_dict(values)))
    return Drawing(
        _name(results, "histogram"),
        weight_histograms(models),
        f"Master weights of all block layers of {model} after dense training. In the shaded band a "
        "weight rounds to the code 0.",
    )


def threshold_drawing(results: ResultSet) -> Drawing | None:
    """Figure 7: magnitudes and 6:8 thresholds, middle and last third of the blocks."""
    found = _dense_pair(results)
    if found is None:
        return None
    model, rows = found
    models = []
    for weight, row in rows.items():
        final = results.folder.weights(row)["final"]
        parts = {
            part: WeightStatistics.from_dict(final[part])
            for part in ("mid", "late")
            if part in final
        }
        models.append((LABELS[weight], weight, parts))
    return Drawing(
        _name(results, "thresholds"),
        threshold_overlay(models, name=_name(results, "thresholds")),
        f"Density of |W| / mean|W| of {model} after dense training, and (line) of the largest magnitude "
        "that 6:8 selection prunes in each group of eight.",
    )


def _dense_pair(results: ResultSet) -> tuple[str, dict[str, RunRow]] | None:
    """Seed 0's dense models of the largest size that has both."""
    for model in reversed(results.models):
        rows = {w: results.by_seed(f"{w}-8:8", model=model).get(0) for w in WEIGHTS}
        known = {weight: row for weight, row in rows.items() if row is not None}
        if len(known) == len(WEIGHTS):
            return model, known
    return None


def _curve_band(results: ResultSet, rows: Sequence[RunRow], label: str, key: str, convert) -> Band:
    values: dict[int, list[float]] = {}
    for row in rows:
        for part in results.folder.curves(row):
            if part.get(key):
                values.setdefault(part["step"], []).append(convert(part[key]))
    # Steps that not every seed reached in the same stretch would make the band jump.
    return _band(label, [(s, v) for s, v in sorted(values.items()) if len(v) == len(rows)])


def _band(label: str, points: Sequence[tuple[float, Sequence[float]]]) -> Band:
    return Band(
        label=label,
        x=[x for x, _ in points],
        mean=[statistics.fmean(values) for _, values in points],
        low=[min(values) for _, values in points],
        high=[max(values) for _, values in points],
    )


def _layers_of_a_block(layers: Sequence[str]) -> str:
    first = [name for name in layers if ".0." in name]
    return ", ".join(name.rpartition(".")[2].removesuffix("_proj") for name in first)


def _name(results: ResultSet, figure: str) -> str:
    return f"{results.setting['scale']}-{figure}"
