# SPDX-License-Identifier: Apache-2.0
"""Curves and histograms as SVG text for a page.

Colour says the weight format and line style the pattern, so nothing depends on telling hues apart.
matplotlib is imported when a figure is drawn, without pyplot and its global state.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet_paper.svg import (
    COLOURS,
    INK,
    SIZE,
    draw_density,
    single,
    style_sheet,
    svg_text,
)
from sparse_bitnet_paper.weight_statistics import NEAR_ZERO, WeightStatistics, bin_centres

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"full": "full precision", "ternary": "ternary"}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A measure over the steps of a run, or over patterns, with its range over several seeds."""

    label: str
    weight: str = ""
    """ "full" or "ternary": the colour."""

    sparse: bool = False
    """The line style: dense runs are wide and pale, sparse ones thin and dashed, on top."""

    steps: Sequence[float]
    values: Sequence[float] | np.ndarray
    low: Sequence[float] | np.ndarray = ()
    high: Sequence[float] | np.ndarray = ()
    points: Sequence[tuple[int, float]] = ()
    """(step, value) measured now and then, for example the validation loss; drawn as dots."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One measured value of one weight format, with its spread over seeds if there are several."""

    group: str
    weight: str
    value: float
    low: float | None = None
    high: float | None = None


def cost_bars(bars: Sequence[Bar], *, x_label: str) -> str:
    """Horizontal bars in groups, one bar per weight format, each with its value beside it."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(bar.group for bar in bars))
    edges = [edge for bar in bars for edge in (bar.value, bar.low, bar.high) if edge is not None]
    least, greatest = min([*edges, 0.0]), max([*edges, 0.0])
    span = greatest - least or 1.0
    with style_sheet("cost-bars"):
        figure = Figure(figsize=(SIZE[0], 1.0 + 0.6 * len(groups)), layout="constrained")
        axes = figure.subplots()
        for weight, offset in (("full", -0.19), ("ternary", 0.19)):
            mine = [bar for bar in bars if bar.weight == weight]
            heights = [groups.index(bar.group) + offset for bar in mine]
            lengths = [bar.value for bar in mine]
            axes.barh(heights, lengths, 0.34, color=COLOURS[weight], label=LABELS[weight])
            for bar, height in zip(mine, heights, strict=True):
                low = bar.value if bar.low is None else bar.low
                high = bar.value if bar.high is None else bar.high
                if low < high:
                    axes.plot([low, high], [height, height], color=INK, linewidth=1.2)
                if bar.value < 0:
                    end, side = min(low, bar.value) - 0.015 * span, "right"
                else:
                    end, side = max(high, bar.value) + 0.015 * span, "left"
                axes.text(end, height, f"{bar.value:+.1f}", va="center", ha=side)
        axes.axvline(0, color=INK, linewidth=0.9)
        axes.set_yticks(range(len(groups)), groups)
        axes.invert_yaxis()
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_xlim(least - (0.15 * span if least < 0 else 0.0), greatest + 0.15 * span)
        axes.set_xlabel(x_label)
        figure.legend(loc="outside upper center", ncols=2)
        return svg_text(
            figure, "cost-bars", "Perplexity increase through sparsity, by weight format"
        )


def loss_curves(curves: Sequence[Curve]) -> str:
    """Training loss over steps, validation loss as dots."""

    def draw(axes: "Axes") -> None:
        lowest = highest = math.inf
        for curve in curves:
            values = curve.values
            axes.plot(curve.steps, values, **_style(curve))
            if curve.points:
                dots = axes.plot(*zip(*curve.points, strict=True), "o", markersize=4)[0]
                dots.set_color(COLOURS[curve.weight])
                dots.set_markerfacecolor("none" if curve.sparse else COLOURS[curve.weight])
            ends = [*values[-1:], *(value for _, value in curve.points[-1:])]
            lowest = min(lowest, *ends)
            # The first steps fall from log(vocabulary) and would flatten all that follows.
            highest = min(highest, values[len(values) // 10])
        if highest - lowest > 1e-3:
            margin = 0.06 * (highest - lowest)
            axes.set_ylim(lowest - 2 * margin, highest + 2 * margin)
        axes.set_ylabel("loss (nats per token)")

    return _figure("loss", "Training loss of each model over optimiser steps", draw)


def sparsity_cost_curves(curves: Sequence[Curve]) -> str:
    """Training loss of sparse runs minus that of their dense twins on the same batches, by format."""

    def draw(axes: "Axes") -> None:
        axes.axhline(0, color=INK, linewidth=0.9)
        seen = [0.0]
        for curve in curves:
            colour, band = COLOURS[curve.weight], (curve.low, curve.high)
            axes.plot(curve.steps, curve.values, color=colour, label=curve.label)
            if len(curve.low):
                axes.fill_between(curve.steps, *band, color=colour, alpha=0.18, linewidth=0)
            # The first steps, where every model still learns the unigrams, say nothing.
            seen += list(curve.values[len(curve.values) // 20 :])
        margin = 0.12 * max(max(seen) - min(seen), 1e-3)
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
        axes.set_ylabel("sparse minus dense loss (nats)")

    return _figure("cost", "Training loss of sparse minus dense models over steps", draw)


def flip_rate_curves(curves: Sequence[Curve]) -> str:
    """Share of mask positions that changed between consecutive steps, logarithmic, in percent."""
    from matplotlib.ticker import LogLocator, NullFormatter

    def draw(axes: "Axes") -> None:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        for curve in curves:
            values = 100 * np.asarray(curve.values)
            # Zero has no place on a logarithmic axis: leave a gap.
            axes.plot(curve.steps, np.where(values > 0, values, np.nan), **_style(curve))
        axes.set_ylabel("mask flip rate (% per step)")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    return _figure("flips", "Mask flip rate of the sparse models over optimiser steps", draw)


def weight_histograms(models: Sequence[tuple[str, str, WeightStatistics]]) -> str:
    """Density of W / mean|W| of each model, side by side on the same axes.

    The shaded band is where a weight rounds to the ternary code 0.

    Args:
        models: label, weight format (its colour) and statistics of each.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(models))
    rows = math.ceil(len(models) / columns)
    with style_sheet("weights"):
        figure = Figure(figsize=(SIZE[0], 0.9 + 1.5 * rows), layout="constrained")
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(models) :]:
            axes.set_axis_off()
        for axes, (label, weight, statistics) in zip(grid.flat, models, strict=False):
            axes.axvspan(-NEAR_ZERO, NEAR_ZERO, color=INK, alpha=0.10, linewidth=0)
            draw_density(axes, bin_centres(), statistics.density, COLOURS[weight])
            axes.set_title(f"{label}\n{100 * statistics.near_zero_mass:.1f} % near zero")
            axes.set_xlim(-3.5, 3.5)
        # After the last one: setting a limit ends the automatic choice of the shared axis.
        grid[0, 0].set_ylim(bottom=0)
        figure.supxlabel("weight / mean |weight|", fontsize=9)
        figure.supylabel("density", fontsize=9)
        return svg_text(figure, "weights", "Histogram of the master weights of each model")


def running_mean(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Centred mean over `width` values (an odd number), over those that exist near the ends."""
    series = np.asarray(values, dtype=np.float64)
    half = min(width, len(series)) // 2
    if half == 0:
        return series
    total = np.concatenate([[0.0], np.cumsum(series)])
    index = np.arange(len(series))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(series))
    return (total[high] - total[low]) / (high - low)


def _style(curve: Curve) -> dict[str, Any]:
    """A sparse run lies within a line's width of its dense twin: thin and dark over wide and pale."""
    line: dict[str, Any] = {"color": COLOURS[curve.weight], "label": curve.label}
    if curve.sparse:
        return line | {"linestyle": (0, (3.5, 1.6)), "linewidth": 1.3, "zorder": 3}
    return line | {"linewidth": 4, "alpha": 0.4}


def _figure(name: str, title: str, draw: Callable[["Axes"], None]) -> str:
    def over_steps(axes: "Axes") -> None:
        draw(axes)
        axes.set_xlabel("optimiser step")
        axes.margins(x=0.01)
        axes.legend()

    return single(name, title, over_steps)
