# SPDX-License-Identifier: Apache-2.0
"""The paper's figures, in the paper's form, as SVG text; see `figures` for colours and styles."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_bitnet_paper.figures import LABELS, Curve
from sparse_bitnet_paper.svg import COLOURS, INK, draw_density, single, style_sheet, svg_text
from sparse_bitnet_paper.weight_statistics import BIN_WIDTH, NEAR_ZERO, WeightStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito; each variant also has a line style of its own.
_VARIANT_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#d55e00", "linestyle": "solid", "linewidth": 2.2},
    {"color": "#009e73", "linestyle": (0, (5, 1.5))},
    {"color": "#cc79a7", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#0072b2", "linestyle": (0, (1.2, 1.2))},
)


def norm_ppl(
    ours: Sequence[Curve], paper: Mapping[str, Sequence[float]], patterns: Sequence[str]
) -> str:
    """Increase of perplexity over the own dense model, in percent, over the pattern (figure 2).

    Args:
        ours: one per weight format; steps are positions in `patterns`.
        paper: the paper's own values for all `patterns` by weight format, drawn thin; may be empty.
        patterns: dense first.
    """

    def draw(axes: "Axes") -> None:
        axes.axhline(10, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        axes.text(0.0, 10.4, "10 %", fontsize=8)
        markers = {"full": "o", "ternary": "s"}
        for curve in ours:
            axes.errorbar(
                curve.steps,
                curve.values,
                yerr=[np.subtract(curve.values, curve.low), np.subtract(curve.high, curve.values)],
                color=COLOURS[curve.weight],
                marker=markers[curve.weight],
                markersize=5,
                capsize=3,
                label=curve.label,
            )
        for weight, values in paper.items():
            axes.plot(
                range(len(patterns)),
                values,
                color=COLOURS[weight],
                linewidth=1,
                linestyle=(0, (1, 1.5)),
                marker=markers[weight],
                markersize=3.5,
                markerfacecolor="none",
                label=f"paper 0.5B, {LABELS[weight]}",
            )
        axes.set_xticks(range(len(patterns)), patterns)
        axes.set_xlabel("pattern (kept : group)")
        axes.set_ylabel("perplexity increase over dense (%)")
        axes.legend(loc="upper left", bbox_to_anchor=(0.06, 1.0))

    return single("norm-ppl", "Perplexity increase over the dense model by N:M pattern", draw)


def ablation_curves(
    variants: Sequence[Curve], *, name: str, y_label: str, title: str, skip: float = 0.0
) -> str:
    """One curve per training design over the steps, logarithmic (figure 4).

    `skip` is the first share of the steps left out of the picture.
    """

    def draw(axes: "Axes") -> None:
        axes.set_yscale("log")
        for variant, style in zip(variants, _VARIANT_STYLES, strict=False):
            x = np.asarray(variant.steps)
            shown = x >= skip * x.max()
            line: dict[str, Any] = {"label": variant.label, **style}
            axes.plot(x[shown], np.asarray(variant.values)[shown], **line)
            low, high = np.asarray(variant.low)[shown], np.asarray(variant.high)[shown]
            axes.fill_between(x[shown], low, high, color=style["color"], alpha=0.15, linewidth=0)
        bottom, top = axes.get_ylim()
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(_plain_number if top > 3 * bottom else "{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.set_xlabel("optimiser step")
        axes.set_ylabel(y_label)
        axes.legend()

    return single(name, title, draw)


def near_zero_heat_maps(
    maps: Sequence[tuple[str, Sequence[int], np.ndarray]], layers: Sequence[str]
) -> str:
    """P(|W| / mean|W| < 0.5) of every layer over training, one panel per model (figure 5).

    Args:
        maps: label, steps, and float array [steps, layers] of each model; one colour scale.
        layers: names from the first to the last.
    """
    from matplotlib.figure import Figure

    values = np.concatenate([matrix.ravel() for _, _, matrix in maps])
    limits = {"vmin": float(values.min()), "vmax": float(values.max())}
    with style_sheet("near-zero"):
        figure = Figure(figsize=(5.4, 2.2 + 0.035 * len(layers)), layout="constrained")
        grid = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        for axes, (label, steps, matrix) in zip(grid, maps, strict=True):
            image = axes.imshow(
                matrix.T, aspect="auto", interpolation="none", cmap="cividis", **limits
            )
            axes.set_title(label)
            axes.grid(False)
            ticks = np.unique(np.linspace(0, len(steps) - 1, 4).round().astype(int))
            axes.set_xticks(ticks, [f"{steps[tick]:,}" for tick in ticks])
            axes.set_xlabel("optimiser step")
        places, names = _block_ticks(layers)
        grid[0].set_yticks(places, names)
        grid[0].set_ylabel("block")
        bar = figure.colorbar(image, ax=list(grid), fraction=0.05)
        bar.set_label("near-zero mass")
        bar.outline.set_visible(False)
        return svg_text(figure, "near-zero", "Near-zero mass of every layer over training steps")


def threshold_overlay(
    models: Sequence[tuple[str, str, Mapping[str, WeightStatistics]]], *, name: str = "thresholds"
) -> str:
    """Density of |W| / mean|W| with that of the 6:8 group thresholds over it (figure 7).

    Args:
        models: label, weight format (its colour) and statistics by part of the depth ("mid", "late").
        name: unique in a page.
    """
    from matplotlib.figure import Figure

    parts = list(models[0][2])
    with style_sheet(name):
        figure = Figure(figsize=(5.4, 0.9 + 1.6 * len(models)), layout="constrained")
        grid = figure.subplots(len(models), len(parts), sharex=True, sharey=True, squeeze=False)
        for row, (label, weight, statistics) in zip(grid, models, strict=True):
            for axes, part in zip(row, parts, strict=True):
                layers = statistics[part]
                centres = (np.arange(len(layers.thresholds)) + 0.5) * BIN_WIDTH
                draw_density(axes, centres, layers.magnitude_density, COLOURS[weight], "weights")
                axes.plot(
                    centres, layers.threshold_density, color=INK, linewidth=1.4, label="thresholds"
                )
                axes.axvline(NEAR_ZERO, color=INK, linewidth=0.7, linestyle=(0, (2, 2)))
                axes.set_title(f"{label}, {part} blocks" if len(models) > 1 else f"{part} blocks")
                axes.set_xlim(0, 3)
        # After the last one: setting a limit ends the automatic choice of the shared axis.
        grid[0, 0].set_ylim(bottom=0)
        grid[0, -1].legend()
        figure.supxlabel("|weight| / mean |weight|", fontsize=9.5)
        figure.supylabel("density", fontsize=9.5)
        return svg_text(figure, name, "Density of weight magnitudes and of group thresholds")


def layer_profile(models: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Near-zero mass of every layer of some checkpoints, by depth (figure 1).

    Args:
        models: label, weight format and masses of each checkpoint, from the first layer to the last.
    """

    def draw(axes: "Axes") -> None:
        for number, (label, weight, masses) in enumerate(models):
            axes.plot(
                np.arange(len(masses)) / max(1, len(masses) - 1),
                masses,
                color=COLOURS[weight],
                marker="osD^vPX*"[number % 8],
                markersize=3.5,
                linewidth=0.8,
                label=label,
            )
        axes.set_ylabel("near-zero mass")
        axes.set_xlabel("depth (0: first layer, 1: last layer)")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0))

    return single("layer-profile", "Near-zero mass of every layer by depth", draw)


def _plain_number(value: float, _: float) -> str:
    return f"{value:g}" if f"{value:.0e}"[0] in "1235" else ""


def _block_ticks(layers: Sequence[str]) -> tuple[list[int], list[str]]:
    """Where each block begins; every few blocks in a deep model."""
    first: dict[str, int] = {}
    for place, name in enumerate(layers):
        block = next((part for part in name.split(".") if part.isdecimal()), "")
        first.setdefault(block, place)
    stride = max(1, len(first) // 8)
    kept = list(first.items())[::stride]
    return [place for _, place in kept], [block for block, _ in kept]
