# SPDX-License-Identifier: Apache-2.0
"""Counts over the weights of layers, and how layers are pooled. Free of torch.

Everything is counted per layer on W / mean|W|, so that layers of different scales can be pooled, and
adds up exactly. Layers are a DataFrame with one row per layer.
"""

from typing import Any

import numpy as np
import pandas as pd

BIN_WIDTH = 0.05
RANGE = 4.0
"""Histograms cover |W| / mean|W| < 4; what lies outside is in `weights` but in no bin."""

NEAR_ZERO = 0.5
"""Below this |W| / mean|W| a weight rounds to the code 0."""

BIN_CENTRES = (np.arange(round(2 * RANGE / BIN_WIDTH)) + 0.5) * BIN_WIDTH - RANGE
"""float64 [160]: W / mean|W| at the middle of each histogram bin."""


def pool(layers: pd.DataFrame) -> pd.Series:
    """Return several layers as one; every weight keeps the mean of its own layer as its unit."""
    return layers.drop(columns=["name", "block"]).sum()


def depth_parts(layers: pd.DataFrame) -> dict[str, pd.Series]:
    """Pool all layers, those of the middle third of the blocks ("mid") and of the last third ("late")."""
    block = layers.block.fillna(0)
    depth = (block + 0.5) / (1 + block.max())
    thirds = {"all": (0, 1), "mid": (1 / 3, 2 / 3), "late": (2 / 3, 1)}
    parts = {name: layers[(low <= depth) & (depth < high)] for name, (low, high) in thirds.items()}
    return {name: pool(part) for name, part in parts.items() if len(part)}


def shares(counts: pd.Series | pd.DataFrame) -> dict[str, Any]:
    """Return near-zero mass, zero codes before the mask and zeros in the forward as shares."""
    return {
        "near_zero_mass": counts.near_zero / counts.weights,
        "code_zero_fraction": counts.code_zeros / counts.weights,
        "zero_fraction": counts.zeros / counts.weights,
    }


def as_json(counts: pd.Series) -> dict[str, Any]:
    """Return counts and shares as JSON holds them."""
    lists = {name: list(map(int, counts[name])) for name in ("histogram", "thresholds")}
    plain = counts.drop(list(lists)).to_dict()
    values = plain | {"weight_scale": plain["absolute_sum"] / plain["weights"]} | shares(counts)
    return {name: getattr(v, "item", lambda v=v: v)() for name, v in values.items()} | lists
