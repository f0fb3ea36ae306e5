# SPDX-License-Identifier: Apache-2.0
"""The paper's four models on real text in a few minutes: its table 2, its curves, one page.

The models are dense and sparse, full-precision and ternary, with equal initial weights and batches.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rich.console import Console

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import tables
from sparse_bitnet_paper.figures import (
    COLOURS,
    INK,
    LABELS,
    SIZE,
    Line,
    canvas,
    dense_figures,
    draw_curves,
    range_around,
    svg_text,
)
from sparse_bitnet_paper.paper import paper_perplexities
from sparse_bitnet_paper.report import render
from sparse_bitnet_paper.reproduce import reproduce
from sparse_bitnet_paper.results import CURVE_POINTS, Results
from sparse_bitnet_paper.scales import QuickstartConfig

SAMPLE_TOKENS = 96
SMOOTH = 13
"""Points of a thinned curve over which differences of losses are averaged."""


class QuickstartResult(NamedTuple):
    """Results and files of a finished quickstart."""

    comparison: tables.Table
    verdict: str
    sample: str
    """Text that the sparse ternary model of the first seed wrote after the prompt."""
    model: Path
    """Folder of that model."""
    report: Path


def quickstart(config: QuickstartConfig, console: Console | None = None) -> QuickstartResult:
    """Prepare the text, train every model, compare them on held-out text, write the report.

    Finished work of an interrupted call is not repeated. Shows progress on `console`, if given.

    Raises `UserError` for bad input or a folder of another quickstart, `Interrupted` when stopped by a
    signal while training.
    """
    out = Path(config.out)
    shown = console or Console(quiet=True)
    outcome = reproduce(config.scale(), ["table2"], out, workers=config.workers, console=shown)
    if outcome.failed:
        raise UserError("; ".join(outcome.failed))
    results, report = Results(out), out / "report.html"
    rows = tables.four_models(results, config.model)
    model = out / rows[f"ternary-{config.pattern}"].checkpoint[0]
    opened = open_model(model)
    sample = opened.generate(config.prompt, max_tokens=SAMPLE_TOKENS)
    opened.engine.close()
    comparison, words = tables.comparison_table(rows), verdict(rows)
    provenance = results.rows.provenance
    page = render(
        "quickstart.html.j2",
        title=f"Sparse-BitNet quickstart: {config.pattern} sparsity in four small models",
        config=config,
        seeds=max(map(len, rows.values())),
        shape=PRESETS[config.model],
        rows={format: own.loc[0] for format, own in rows.items()},
        pruned=1 - NMPattern.parse(config.pattern).density,
        seconds=results.rows.seconds.sum(),
        made=provenance[provenance.str["date"].idxmax()],
        verdict=words,
        comparison=comparison,
        costs=cost_figure(results),
        course=course_figures(results),
        weights=dense_figures(results),
        stretch=-(-config.steps // CURVE_POINTS),
        smooth=SMOOTH,
        sample=sample,
    )
    write_atomic(report, page)
    return QuickstartResult(comparison, words, sample, model, report)


def cost_figure(results: Results) -> str:
    """Draw the cost of sparsity at the main size beside the paper's own, with a bar per format."""
    pattern = results.setting["pattern"]
    models = {"this run": tables.perplexities(tables.four_models(results, results.main))}
    models |= {f"paper, {size}": theirs for size, theirs in paper_perplexities(pattern).items()}
    with canvas("cost-bars", size=(SIZE[0], 1.0 + 0.6 * len(models))) as (figure, axes):
        for weight, offset in (("full", -0.19), ("ternary", 0.19)):
            costs = [tables.sparsity_costs(own)[f"{weight}-{pattern}"] for own in models.values()]
            known = pd.DataFrame([cost.agg(["mean", "min", "max"]) for cost in costs])
            bars = axes.barh(
                np.arange(len(models)) + offset,
                known["mean"].to_numpy(),
                0.34,
                xerr=range_around(known),
                error_kw={"ecolor": INK, "elinewidth": 1.2},
                color=COLOURS[weight],
                label=LABELS[weight],
            )
            axes.bar_label(bars, fmt="%+.1f", padding=3)
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set_yticks(range(len(models)), list(models))
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.margins(x=0.15)
        axes.set_xlabel(f"perplexity of {pattern} over dense (%)")
        figure.legend(loc="outside upper center", ncols=2)
        title = "Perplexity increase through sparsity, by weight format"
        return svg_text(figure, "cost-bars", title)


def course_figures(results: Results) -> dict[str, str]:
    """Draw loss, cost of sparsity and mask flips of the four models of the main size over the steps.

    `loss` and `flips` are of the first seed.
    """
    curves = {
        format: [results.curves[results.curves.run == name].set_index("step") for name in rows.name]
        for format, rows in tables.four_models(results, results.main).items()
    }
    losses, flips, costs = list[Line](), list[Line](), list[Line]()
    for format, runs in curves.items():
        first, weight, dense = runs[0], format.partition("-")[0], tables.dense_of(format)
        line: dict[str, Any] = {"color": COLOURS[weight], "label": tables.label(format)}
        face = COLOURS[weight] if format == dense else "none"
        dots = {"marker": "o", "linestyle": "none", "markersize": 4, "markerfacecolor": face}
        # A sparse run lies within a line's width of its dense twin: thin over wide.
        if format == dense:
            line |= {"linewidth": 4, "alpha": 0.4}
        else:
            line |= {"linestyle": (0, (3.5, 1.6)), "linewidth": 1.3, "zorder": 3}
            # Zero has no place on a logarithmic axis: a gap.
            flips.append((_mean(100 * first.flip_rate.where(first.flip_rate > 0)), line))
            twins = zip(runs, curves[dense], strict=True)
            apart = [own.loss.dropna() - twin.loss.dropna() for own, twin in twins]
            cost = pd.concat(apart, axis=1).rolling(SMOOTH, center=True, min_periods=1).mean()
            style = {"color": COLOURS[weight], "label": weight}
            costs.append((cost.agg(["mean", "min", "max"], axis=1), style))
        losses.append((_mean(first.loss), line))
        losses.append((_mean(first.validation_loss), {"color": COLOURS[weight]} | dots))
    title = "Training loss of each model over optimiser steps"
    of_costs = "Training loss of sparse minus dense models over steps"
    of_flips = "Mask flip rate of the sparse models over optimiser steps"
    costs_label, flips_label = "sparse minus dense loss (nats)", "mask flip rate (% per step)"
    limits = _limits(costs, 0.0)
    return {
        "loss": draw_curves("loss", title, "loss (nats per token)", losses, limits=_limits(losses)),
        "sparsity-costs": draw_curves("cost", of_costs, costs_label, costs, limits=limits),
        "flips": draw_curves("flips", of_flips, flips_label, flips, log=True),
    }


def _mean(values: pd.Series) -> pd.DataFrame:
    return values.dropna().to_frame("mean")


def _limits(lines: Sequence[Line], *seen: float) -> tuple[float, float]:
    """Return y limits for all but the first tenth of each line, which would flatten the rest."""
    late = np.concatenate([seen, *(line["mean"][len(line) // 10 :] for line, _ in lines)])
    margin = 0.12 * max(late.max() - late.min(), 1e-3)
    return late.min() - margin, late.max() + margin


def verdict(rows: Mapping[str, pd.DataFrame]) -> str:
    """Return a sentence with the result of the comparison, and one on how far to trust it.

    `rows`: see `tables.four_models`.
    """
    ours = tables.sparsity_costs(tables.perplexities(rows))
    pattern = ours.columns[0].partition("-")[2]
    theirs = paper_perplexities(pattern).get("0.5B")
    costs = None if theirs is None else tables.sparsity_costs(theirs)
    return " ".join(render("verdict.txt.j2", pattern=pattern, ours=ours, theirs=costs).split())
