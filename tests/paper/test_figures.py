# SPDX-License-Identifier: Apache-2.0
"""Figures are well-formed, self-contained SVG that takes its colours from the page."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pandas as pd
import pytest
import torch

from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet_paper import figures, quickstart
from sparse_bitnet_paper.weight_counts import depth_parts
from sparse_bitnet_paper.weights import count_weights


@pytest.fixture
def drawn(make_set):
    """Every figure of a set, and those of weights."""
    results = make_set()
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    counts = [
        count_weights(f"layers.{block}.q", weight, SparseBitConfig.parse("ternary-6:8"))
        for block in range(3)
    ]
    parts = depth_parts(pd.DataFrame(counts))
    masses = np.full((3, 2), 0.3)
    return {
        "costs": quickstart.cost_figure(results),
        **quickstart.course_figures(results),
        **figures.sweep_figure(results),
        "ablation-flips": figures.ablation_figures(results)["ablation-flips"],
        "histogram": figures.weight_histograms([("a", "full", parts["all"])] * 3),
        "thresholds": figures.threshold_overlay([("a <&>", "ternary", parts)] * 2),
        "near-zero": figures.near_zero_heat_maps([("a", [0, 4, 8], masses)], ["b.0.q", "b.1.q"]),
        "layer-profile": figures.layer_profile([("a", "ternary", [0.3, 0.4])]),
    }


def test_svg_is_self_contained_and_themed(drawn):
    every_id: list[str] = []
    for name, svg in drawn.items():
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox")
        assert (root.get("width"), root.get("height")) == (None, None)
        assert root.get("aria-label")
        assert "currentColor" in svg
        assert name == "near-zero" or "var(--full, " in svg or "var(--ternary, " in svg
        assert "#123456" not in svg
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", svg)
        assert "font-family" not in svg
        ids = re.findall(r'\bid="([^"]+)"', svg)
        for reference in re.findall(r'(?:url\(|href=")#([^")]+)', svg):
            assert reference in ids
        every_id += ids
        ElementTree.fromstring(figures.standalone(svg))
    assert len(every_id) == len(set(every_id))
    assert "a <&>, mid blocks" in [
        e.text for e in ElementTree.fromstring(drawn["thresholds"]).iter()
    ]


def test_figures_without_runs_are_none(make_set):
    results = make_set(seeds=1, names=["search"])
    assert figures.sweep_figure(results) == {}
    assert figures.ablation_figures(results) == {}
    results.rows = results.rows[:0]
    assert figures.dense_figures(results) == {}


def test_flat_and_still_curves_can_be_drawn(make_set):
    results = make_set(seeds=1, names=["table2"])
    results.curves[["flip_rate", "flip_noise"]] = 0.0
    for svg in quickstart.course_figures(results).values():
        ElementTree.fromstring(svg)
