# SPDX-License-Identifier: Apache-2.0
"""Figures are well-formed, self-contained SVG that takes its colours from the page."""

import dataclasses
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch

from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet_paper.figures import (
    Bar,
    Curve,
    cost_bars,
    flip_rate_curves,
    loss_curves,
    running_mean,
    sparsity_cost_curves,
    weight_histograms,
)
from sparse_bitnet_paper.weights import weight_statistics


def curve(label, weight, sparse, values):
    steps = list(range(1, len(values) + 1))
    points = [(steps[-1], float(values[-1]))]
    return Curve(
        label=label, weight=weight, sparse=sparse, steps=steps, values=values, points=points
    )


def four(values):
    return [
        curve("full, dense", "full", False, values),
        curve("full, 6:8", "full", True, values + 0.1),
        curve("ternary, dense", "ternary", False, values + 0.2),
        curve("ternary, 6:8 <&>", "ternary", True, values + 0.3),
    ]


FALLING = 3 + 4 * np.exp(-np.arange(60) / 10)


def draw(name):
    if name == "loss":
        return loss_curves(four(FALLING))
    if name == "cost":
        band = {"low": FALLING * 0.01 - 0.01, "high": FALLING * 0.01 + 0.01}
        curves = [dataclasses.replace(four(FALLING * 0.01)[index], **band) for index in (1, 3)]
        return sparsity_cost_curves(curves)
    if name == "flips":
        return flip_rate_curves([four(FALLING * 1e-3)[3]])
    if name == "bars":
        bars = [
            Bar(group="this run", weight="full", value=2.8, low=2.0, high=3.5),
            Bar(group="this run", weight="ternary", value=-0.4),
            Bar(group="paper 3B", weight="full", value=2.8),
        ]
        return cost_bars(bars, x_label="percent")
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    statistics = weight_statistics("x", weight, SparseBitConfig.parse("ternary-6:8"))
    return weight_histograms([(each.label, each.weight, statistics) for each in four(FALLING)])


NAMES = ("loss", "cost", "flips", "bars", "weights")


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_self_contained_and_themed(name):
    svg = draw(name)
    root = ElementTree.fromstring(svg)
    assert root.get("viewBox")
    assert root.get("width") is None
    assert root.get("height") is None
    assert root.get("aria-label")
    assert "currentColor" in svg
    assert "var(--full, " in svg or "var(--ternary, " in svg
    assert "#123456" not in svg
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
    assert "http" not in without_namespaces
    assert "font-family" not in svg
    ids = re.findall(r'\bid="([^"]+)"', svg)
    assert len(ids) == len(set(ids))
    for reference in re.findall(r'(?:url\(|href=")#([^")]+)', svg):
        assert reference in ids


def test_ids_of_different_figures_differ():
    ids = [set(re.findall(r'\bid="([^"]+)"', draw(name))) for name in NAMES]
    assert len(set().union(*ids)) == sum(map(len, ids))


@pytest.mark.parametrize("name", NAMES)
def test_same_input_same_bytes(name):
    assert draw(name) == draw(name)


def test_sparse_curves_lie_thin_over_their_wide_dense_twins():
    svg = draw("loss")
    wide = [match.start() for match in re.finditer(r"stroke-width: 4[;\"]", svg)]
    dashed = [match.start() for match in re.finditer(r"stroke-dasharray: [^;]*; [^>]*--full", svg)]
    assert wide
    assert dashed
    assert max(wide[:2]) < min(dashed)


def test_labels_are_text_and_escaped():
    texts = [element.text for element in ElementTree.fromstring(draw("loss")).iter()]
    assert "ternary, 6:8 <&>" in texts
    assert "loss (nats per token)" in texts


def test_settings_of_matplotlib_stay_untouched():
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw("loss")
    assert dict(matplotlib.rcParams) == before


def test_matplotlib_is_imported_late_and_without_pyplot():
    code = """
import sys
from sparse_bitnet_paper.figures import Curve, loss_curves
assert not any(name.startswith("matplotlib") for name in sys.modules)
loss_curves([Curve(label="", weight="full", sparse=False, steps=[1, 2], values=[2.0, 1.0])])
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flat_short_and_zero_curves_can_be_drawn():
    for values in (np.array([3.0]), np.array([3.0, 3.0]), np.zeros(5)):
        curves = four(values)
        for svg in (
            loss_curves(curves),
            sparsity_cost_curves(curves[1:2]),
            flip_rate_curves(curves[:1]),
        ):
            ElementTree.fromstring(svg)


@pytest.mark.parametrize("width", [1, 3, 8, 21, 500])
def test_running_mean_is_the_mean_of_what_exists(width):
    values = np.random.default_rng(0).normal(size=40)
    half = min(width, 40) // 2
    expected = [values[max(0, i - half) : i + half + 1].mean() for i in range(40)]
    assert running_mean(values, width) == pytest.approx(expected)
