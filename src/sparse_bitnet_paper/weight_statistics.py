# SPDX-License-Identifier: Apache-2.0
"""Counts over the weights of one layer or several, which add up exactly, and what follows from them.

Everything is counted per layer on W / mean|W|, so that layers of different scales can be pooled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

BIN_WIDTH = 0.05
RANGE = 4.0
"""Histograms cover |W| / mean|W| < 4; what lies outside is in `weights` but in no bin."""

NEAR_ZERO = 0.5
"""Below this |W| / mean|W| a weight rounds to the code 0."""

_NAMED = ("name", "block")
"""Fields of `WeightStatistics` that are no counts."""


@dataclass(frozen=True, kw_only=True)
class WeightStatistics:
    """Counts over one layer or over several pooled ones; every field adds up exactly."""

    name: str
    block: int | None
    """Index of the decoder block, None when the name holds none or blocks are pooled."""

    weights: int
    """Number of weights counted."""

    absolute_sum: float
    """sum |W|."""

    near_zero: int
    """Weights with |W| / mean|W| < 0.5."""

    code_zeros: int
    """Zeros among the ternary codes before the mask; for full-precision weights, as if rounded."""

    zeros: int
    """Zeros of the weight that the forward uses, mask included."""

    histogram: np.ndarray
    """int64 [160]: W / mean|W| in bins of 0.05 from -4 to 4."""

    groups: int
    """Groups of m weights that have a threshold; 0 with a dense pattern."""

    thresholds: np.ndarray
    """int64 [80]: (n+1)-th largest |W| of each group, over mean|W|, in bins of 0.05 from 0 to 4."""

    @property
    def weight_scale(self) -> float:
        """mean |W|."""
        return self.absolute_sum / self.weights

    @property
    def near_zero_mass(self) -> float:
        """P(|W| / mean|W| < 0.5)."""
        return self.near_zero / self.weights

    @property
    def code_zero_fraction(self) -> float:
        """Share of zero codes before the mask."""
        return self.code_zeros / self.weights

    @property
    def zero_fraction(self) -> float:
        """Share of zeros in the weight that the forward uses."""
        return self.zeros / self.weights

    @property
    def density(self) -> np.ndarray:
        """float64 [160]: probability density of W / mean|W| at `bin_centres()`."""
        return self.histogram / (self.weights * BIN_WIDTH)

    @property
    def magnitude_density(self) -> np.ndarray:
        """float64 [80]: probability density of |W| / mean|W| at the positive bin centres."""
        half = len(self.histogram) // 2
        return (self.histogram[half:] + self.histogram[half - 1 :: -1]) / (self.weights * BIN_WIDTH)

    @property
    def threshold_density(self) -> np.ndarray:
        """float64 [80]: probability density of the group thresholds; zeros with a dense pattern."""
        return self.thresholds / (max(self.groups, 1) * BIN_WIDTH)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: the shares and both histograms as counts."""
        return {
            "name": self.name,
            "block": self.block,
            "weights": self.weights,
            "weight_scale": self.weight_scale,
            "near_zero_mass": self.near_zero_mass,
            "code_zero_fraction": self.code_zero_fraction,
            "zero_fraction": self.zero_fraction,
            "bin_width": BIN_WIDTH,
            "histogram": self.histogram.tolist(),
            "groups": self.groups,
            "thresholds": self.thresholds.tolist(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        weights = values["weights"]
        return cls(
            name=values["name"],
            block=values["block"],
            weights=weights,
            absolute_sum=values["weight_scale"] * weights,
            near_zero=round(values["near_zero_mass"] * weights),
            code_zeros=round(values["code_zero_fraction"] * weights),
            zeros=round(values["zero_fraction"] * weights),
            histogram=np.array(values["histogram"]),
            groups=values["groups"],
            thresholds=np.array(values["thresholds"]),
        )


def bin_centres() -> np.ndarray:
    """float64 [160]: W / mean|W| at the middle of each histogram bin."""
    count = round(2 * RANGE / BIN_WIDTH)
    return (np.arange(count) + 0.5) * BIN_WIDTH - RANGE


def pool(layers: Iterable[WeightStatistics]) -> WeightStatistics:
    """Several layers as one; every weight keeps the mean of its own layer as its unit."""
    parts = list(layers)
    assert parts
    counts = [field.name for field in fields(WeightStatistics) if field.name not in _NAMED]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in counts}
    return WeightStatistics(name="all layers", block=None, **sums)
