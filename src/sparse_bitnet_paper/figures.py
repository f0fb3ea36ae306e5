# SPDX-License-Identifier: Apache-2.0
"""Figures of a set of results and of checkpoints' weights, as SVG text for a page.

Colour shows the weight format and line style the pattern, so nothing depends on distinguishing hues.
Text and axes use the colour of the page around them (`currentColor`), series the CSS variables `--full`
and `--ternary`, so one figure serves a light and a dark page; without a page, defaults apply.
"""

import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np
import pandas as pd

from sparse_bitnet_paper.paper import paper
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runs import ABLATIONS
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.weight_counts import BIN_CENTRES, BIN_WIDTH, NEAR_ZERO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Line = tuple[pd.DataFrame, dict[str, Any]]
"""Indexed by step: a `mean`, and with `min` and `max` a band around it; its style for `plot`."""

LABELS = {"full": "full precision", "ternary": "ternary"}
OF_WEIGHTS = ("layer-profile", "near-zero", "histogram", "thresholds")
"""Figures of `dense_figures`, in the order of a page."""

# Two colours of Okabe and Ito's palette, distinct under every common colour-vision deficiency.
COLOURS = {"full": "#0072b2", "ternary": "#d55e00"}
INK = "#123456"  # of figures.mplstyle
SIZE = (5.4, 3.6)

# Okabe and Ito; each design also has a line style of its own.
_DESIGN_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#d55e00", "linestyle": "solid", "linewidth": 2.2},
    {"color": "#009e73", "linestyle": (0, (5, 1.5))},
    {"color": "#cc79a7", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#0072b2", "linestyle": (0, (1.2, 1.2))},
)


@contextmanager
def canvas(
    name: str,
    *,
    size: tuple[float, float] = SIZE,
    grid: tuple[int, int] = (1, 1),
    shared: bool = False,
) -> Iterator[tuple["Figure", Any]]:
    """Yield a figure in our style and its axes, an array of them for a grid; inside, call `svg_text`.

    `name` makes ids reproducible; `size` is in inches; `shared`: whether panels share their axes.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    with as_file(files("sparse_bitnet_paper").joinpath("figures.mplstyle")) as style:
        with matplotlib.style.context([style, {"svg.hashsalt": name}]):
            figure = Figure(figsize=size, layout="constrained")
            squeeze = grid == (1, 1)
            yield figure, figure.subplots(*grid, sharex=shared, sharey=shared, squeeze=squeeze)


def svg_text(figure: "Figure", name: str, title: str) -> str:
    """Return a figure as SVG with the colours and the width of the page.

    `name` is a prefix of all ids, unique in a page; `title` is the text for screen readers.
    """
    buffer = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=unsaid)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Several figures share one page: ids must differ, and the page sets the size.
    text = prefix_ids(text, name)
    text = re.sub(r' (?:height|width)="[^"]*"', "", text, count=2)
    spoken = escape(title, {'"': "&quot;"})
    text = text.replace("<svg ", f'<svg role="img" aria-label="{spoken}" ', 1)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = text.replace(INK, "currentColor")
    for key, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{key}, {colour})")
    return text


def prefix_ids(svg: str, prefix: str) -> str:
    """Return the same figure with `prefix` before every id in it."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", svg)


def standalone(svg: str) -> str:
    """Return an SVG as a file of its own, with a background, a text colour and a width."""
    style = "color: #1d2327; background: #ffffff; font-family: sans-serif"
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg, count=2)
    svg = svg.replace("<svg ", f'{head}width="640" style="{style}" ', 1)
    return svg + ("" if svg.endswith("\n") else "\n")


def range_around(known: pd.DataFrame) -> np.ndarray:
    """Return [below, above] the mean, never negative by its rounding."""
    mean = known["mean"]
    return np.maximum([mean - known["min"], known["max"] - mean], 0)


def draw_curves(
    name: str,
    title: str,
    y_label: str,
    lines: Iterable[Line],
    *,
    limits: tuple[float, float] | None = None,
    log: bool = False,
) -> str:
    """Draw lines over the optimiser steps. Limits of the y axis that include 0 show a line there."""
    with canvas(name) as (figure, axes):
        if log:
            axes.set_yscale("log")
        if limits and limits[0] < 0 < limits[1]:
            axes.axhline(0, color=INK, linewidth=0.9)
        for line, style in lines:
            axes.plot(line.index, line["mean"], **style)
            if "min" in line:
                area = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
                axes.fill_between(line.index, line["min"], line["max"], **area)
        if log:
            bottom, top = axes.get_ylim()
            for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
                set_formatter(_plain_number if top > 3 * bottom else "{x:g}")
            axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.set(xlabel="optimiser step", ylabel=y_label, ylim=limits)
        axes.legend()
        return svg_text(figure, name, title)


def _plain_number(value: float, _: float) -> str:
    return f"{value:g}" if f"{value:.0e}"[0] in "1235" else ""


def sweep_figure(results: Results) -> dict[str, str]:
    """Draw figure 2, the increase of perplexity over patterns; {} before the sweep has runs."""
    patterns = results.setting["patterns"]
    ours = {}
    for weight in LABELS:
        costs = [100 * (results.relative(f"{weight}-{pattern}") - 1) for pattern in patterns]
        known = {x: cost.agg(["mean", "min", "max"]) for x, cost in enumerate(costs) if len(cost)}
        if len(known) > min(2, len(patterns) - 2):
            ours[weight] = pd.DataFrame(known).T
    if not ours:
        return {}
    markers = {"full": "o", "ternary": "s"}
    with canvas("norm-ppl") as (figure, axes):
        axes.axhline(10, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0.0, 10.4, "10 %", fontsize=8)
        for weight, known in ours.items():
            style = {"color": COLOURS[weight], "marker": markers[weight], "label": LABELS[weight]}
            ranges = range_around(known)
            axes.errorbar(known.index, known["mean"], yerr=ranges, markersize=5, capsize=3, **style)
        for weight, theirs in paper()["sweep"].items():
            axes.plot(
                range(len(patterns)),
                [100 * (theirs[pattern] / theirs[DENSE_PATTERN] - 1) for pattern in patterns],
                color=COLOURS[weight],
                linewidth=1,
                linestyle=(0, (1, 1.5)),
                marker=markers[weight],
                markersize=3.5,
                markerfacecolor="none",
                label=f"paper 0.5B, {LABELS[weight]}",
            )
        axes.set_xticks(range(len(patterns)), patterns)
        axes.set(xlabel="pattern (kept : group)", ylabel="perplexity increase over dense (%)")
        axes.legend(loc="upper left", bbox_to_anchor=(0.06, 1.0))
        title = "Perplexity increase over the dense model by N:M pattern"
        return {"norm-ppl": svg_text(figure, "norm-ppl", title)}


def ablation_figures(results: Results) -> dict[str, str]:
    """Draw figure 4: validation perplexity and flip rate by step; {} with fewer than two designs."""
    runs = {name: results.by_seed(format).name for name, format in ABLATIONS.items()}
    runs = {name: own for name, own in runs.items() if len(own)}
    curves, drawn = results.curves, {}
    for name, y_label, values, skip in (
        ("ablation-ppl", "validation perplexity", np.exp(curves.validation_loss), 0.15),
        ("ablation-flips", "mask flip rate (% per step)", 100 * curves.flip_rate, 0.0),
    ):
        bands = [_band(curves, values, set(own), skip) for own in runs.values()]
        styles = (s | {"label": d} for d, s in zip(runs, _DESIGN_STYLES, strict=False))
        what = y_label.partition(" (")[0].capitalize()
        title = f"{what} of the four training designs over the steps"
        lines = zip(bands, styles, strict=True)
        if len(runs) > 1:
            drawn[name] = draw_curves(f"{results.name}-{name}", title, y_label, lines, log=True)
    return drawn


def _band(curves: pd.DataFrame, values: pd.Series, runs: set[str], skip: float) -> pd.DataFrame:
    """Return mean and range of the runs by step, without the first share `skip` of the steps."""
    known = values[curves.run.isin(runs) & (values > 0)]
    band = known.groupby(curves.step).agg(["mean", "min", "max", "count"])
    # Without this, the band would jump at steps that only some seeds have.
    band = band[band["count"] == len(runs)]
    return band[band.index >= skip * band.index.max()]


def dense_figures(results: Results) -> dict[str, Any]:
    """Draw figures 1, 5, 6 and 7 of the largest size that has both dense models; nothing without.

    `model` names the size, `layers` the layers of a block; seed 0 is drawn.
    """
    for model in reversed(results.models):
        rows = {w: results.by_seed(f"{w}-{DENSE_PATTERN}", model=model) for w in LABELS}
        if all(0 in own.index for own in rows.values()):
            break
    else:
        return {}
    known = {weight: results.details[own.name[0]]["weights"] for weight, own in rows.items()}
    parts = {
        weight: {name: pd.Series(part) for name, part in own["final"].items()}
        for weight, own in known.items()
    }
    layers, titles = known["full"]["layers"], {w: f"{text}, dense" for w, text in LABELS.items()}
    masses = {weight: np.array(own["near_zero_mass"]) for weight, own in known.items()}
    return {
        "model": model,
        "layers": [n.rpartition(".")[2].removesuffix("_proj") for n in layers if ".0." in n],
        "layer-profile": layer_profile([(titles[w], w, own[-1]) for w, own in masses.items()]),
        "near-zero": near_zero_heat_maps(
            [(titles[w], known[w]["steps"], own) for w, own in masses.items()], layers
        ),
        "histogram": weight_histograms([(titles[w], w, own["all"]) for w, own in parts.items()]),
        "thresholds": threshold_overlay(
            [(LABELS[w], w, own) for w, own in parts.items()], name=f"{results.name}-thresholds"
        ),
    }


def _draw_density(
    axes: "Axes", centres: np.ndarray, density: np.ndarray, weight: str, label: str | None = None
) -> None:
    colour = COLOURS[weight]
    axes.fill_between(centres, density, color=colour, alpha=0.35, linewidth=0, label=label)
    axes.plot(centres, density, color=colour, linewidth=1.2)


def weight_histograms(models: Sequence[tuple[str, str, pd.Series]]) -> str:
    """Draw the density of W / mean|W| of each model, side by side on the same axes.

    The shaded band is where a weight rounds to the ternary code 0. `models`: label, weight format and
    counts of each.
    """
    columns = min(2, len(models))
    rows = math.ceil(len(models) / columns)
    size = (SIZE[0], 0.9 + 1.5 * rows)
    with canvas("weights", size=size, grid=(rows, columns), shared=True) as (figure, grid):
        panels = np.atleast_1d(grid).ravel()
        for axes in panels[len(models) :]:
            axes.set_axis_off()
        for axes, (text, weight, counts) in zip(panels, models, strict=False):
            axes.axvspan(-NEAR_ZERO, NEAR_ZERO, color=INK, alpha=0.10, linewidth=0)
            density = np.divide(counts.histogram, counts.weights * BIN_WIDTH)
            _draw_density(axes, BIN_CENTRES, density, weight)
            axes.set_title(f"{text}\n{100 * counts.near_zero / counts.weights:.1f} % near zero")
            axes.set_xlim(-3.5, 3.5)
        # Set this last: a limit ends the automatic scaling of the shared axis.
        panels[0].set_ylim(bottom=0)
        figure.supxlabel("weight / mean |weight|", fontsize=9)
        figure.supylabel("density", fontsize=9)
        return svg_text(figure, "weights", "Histogram of the master weights of each model")


def threshold_overlay(
    models: Sequence[tuple[str, str, Mapping[str, pd.Series]]], *, name: str = "thresholds"
) -> str:
    """Draw the density of |W| / mean|W| with that of the group thresholds over it (figure 7).

    `models`: label, weight format and counts by part of the depth, of which "mid" and "late" are drawn;
    `name` is unique in a page.
    """
    parts = [part for part in models[0][2] if part != "all"]
    size, shape = (5.4, 0.9 + 1.6 * len(models)), (len(models), len(parts))
    centres = BIN_CENTRES[len(BIN_CENTRES) // 2 :]
    with canvas(name, size=size, grid=shape, shared=True) as (figure, grid):
        panels = np.reshape(grid, shape)
        for row, (text, weight, counts) in zip(panels, models, strict=True):
            for axes, part in zip(row, parts, strict=True):
                below, above = np.array_split(counts[part].histogram, 2)
                magnitudes = (above + below[::-1]) / (counts[part].weights * BIN_WIDTH)
                _draw_density(axes, centres, magnitudes, weight, "weights")
                thresholds = np.divide(counts[part].thresholds, counts[part].groups * BIN_WIDTH)
                axes.plot(centres, thresholds, color=INK, linewidth=1.4, label="thresholds")
                axes.axvline(NEAR_ZERO, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
                axes.set_title(f"{text}, {part} blocks" if len(models) > 1 else f"{part} blocks")
                axes.set_xlim(0, 3)
        # Set this last: a limit ends the automatic scaling of the shared axis.
        panels[0, 0].set_ylim(bottom=0)
        panels[0, -1].legend()
        figure.supxlabel("|weight| / mean |weight|", fontsize=9.5)
        figure.supylabel("density", fontsize=9.5)
        return svg_text(figure, name, "Density of weight magnitudes and of group thresholds")


def near_zero_heat_maps(
    maps: Sequence[tuple[str, Sequence[int], np.ndarray]], layers: Sequence[str]
) -> str:
    """Draw P(|W| / mean|W| < 0.5) of every layer over training, one panel per model (figure 5).

    `maps`: label, steps, and float array [steps, layers] of each model; `layers`: their names.
    """
    values = np.concatenate([matrix.ravel() for _, _, matrix in maps])
    limits = {"vmin": float(values.min()), "vmax": float(values.max())}
    first: dict[str, int] = {}
    for place, name in enumerate(layers):
        first.setdefault(next((part for part in name.split(".") if part.isdecimal()), ""), place)
    blocks = list(first.items())[:: max(1, len(first) // 8)]
    size = (5.4, 2.2 + 0.035 * len(layers))
    with canvas("near-zero", size=size, grid=(1, len(maps))) as (figure, grid):
        panels = list(np.ravel(grid))
        for axes, (text, steps, matrix) in zip(panels, maps, strict=True):
            image = axes.imshow(
                matrix.T, aspect="auto", interpolation="none", cmap="cividis", **limits
            )
            axes.set_title(text)
            axes.grid(False)
            ticks = np.unique(np.linspace(0, len(steps) - 1, 4).round().astype(int))
            axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
            axes.set_xlabel("optimiser step")
            axes.set_yticks([place for _, place in blocks], [block for block, _ in blocks])
            axes.label_outer()
        panels[0].set_ylabel("block")
        bar = figure.colorbar(image, ax=panels, fraction=0.05)
        bar.set_label("near-zero mass")
        bar.outline.set_visible(False)
        return svg_text(figure, "near-zero", "Near-zero mass of every layer over training steps")


def layer_profile(models: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Draw near-zero mass of every layer of some checkpoints, by depth (figure 1).

    `models`: label, weight format and masses of each checkpoint, from the first layer to the last.
    """
    with canvas("layer-profile") as (figure, axes):
        for number, (text, weight, masses) in enumerate(models):
            axes.plot(
                np.arange(len(masses)) / max(1, len(masses) - 1),
                masses,
                color=COLOURS[weight],
                marker="osD^vPX*"[number % 8],
                markersize=3.5,
                linewidth=0.8,
                label=text,
            )
        axes.set_ylabel("near-zero mass")
        axes.set_xlabel("depth (0: first layer, 1: last layer)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0))
        return svg_text(figure, "layer-profile", "Near-zero mass of every layer by depth")
