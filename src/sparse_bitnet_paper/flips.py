# SPDX-License-Identifier: Apache-2.0
"""How much the masks of the training designs move: claims over all of training, and figures by tenths."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from sparse_bitnet_paper.judge import Claim, Estimate, paired
from sparse_bitnet_paper.paper_runs import ABLATIONS
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results

_STILL = {"flip_rate": 0.0, "flip_noise": 0.0}
_LEAST = 1e-9
"""Stands for no flips at all, which have no logarithm."""

Curves = dict[int, list[dict[str, Any]]]
"""Thinned rows by seed."""


def flip_claims(results: Results) -> Iterator[Claim]:
    """What the paper says of flip rates (figure 4), before `judged`."""
    base, frozen, ternary_mask, masked_scale = (
        _curves(results, format) for format in ABLATIONS.values()
    )
    whole = "mean flip rate of the whole training"

    def claim(text: str, measure: str, paper: str, values: tuple[float, ...]) -> Claim:
        return Claim(
            text=text,
            measure=f"{measure}, log2",
            model=results.main,
            paper=f"{paper}, no number",
            estimate=Estimate(values=values),
            unit="octaves",
        )

    yield claim(
        "The flip rate decays from high to low",
        "mean flip rate of the first quarter of the steps over that of the last",
        "decays",
        tuple(
            math.log2(_part(curve, "flip_rate", 0, 0.25) / _part(curve, "flip_rate", 0.75, 1))
            for curve in base.values()
        ),
    )
    yield claim(
        "“Mask without grad” flips less",
        f"{whole}, baseline over variant",
        "much lower",
        _octaves(base, frozen),
    )
    yield claim(
        "“Mask from quantized weight” flips more",
        f"{whole}, variant over baseline",
        "large",
        _octaves(ternary_mask, base),
    )
    yield claim(
        "“Sparse before quant” flips less",
        f"{whole}, baseline over variant",
        "lower",
        _octaves(base, masked_scale),
    )
    yield claim(
        "“Mask from quantized weight” flips noisily early on",
        "step-to-step noise of the flip rate in the first half, variant over baseline",
        "large and noisy",
        _octaves(ternary_mask, base, key="flip_noise", end=0.5),
    )


def flips_by_tenth(results: Results) -> dict[str, list[Estimate]]:
    """By design the octaves by which its masks flip more than the baseline's, by tenths of the steps."""
    (_, base), *others = ((name, _curves(results, format)) for name, format in ABLATIONS.items())
    found = {
        name: [
            Estimate(values=_octaves(curves, base, start=number / 10, end=(number + 1) / 10))
            for number in range(10)
        ]
        for name, curves in others
    }
    return {name: tenths for name, tenths in found.items() if tenths[0].values}


def _octaves(
    first: Curves, second: Curves, *, key: str = "flip_rate", start: float = 0, end: float = 1
) -> tuple[float, ...]:
    """By how many octaves the mean of `key` over a part of the steps is higher, for each seed of both."""
    return paired(
        first,
        second,
        lambda a, b: math.log2(_part(a, key, start, end) / _part(b, key, start, end)),
    )


def _curves(results: Results, format: str) -> Curves:
    """Those of flip rates; of runs long enough to tell tenths apart."""
    found = {}
    for seed, row in results.by_seed(format).items():
        if len(curve := flip_curve(results, row)) >= 20:
            found[seed] = curve
    return found


def flip_curve(results: Results, row: ResultRow) -> list[dict[str, Any]]:
    """Thinned rows of a run, a stretch without a flip at a rate of 0; none where nothing flips at all."""
    curve = [_STILL | part for part in results.curves(row) if "loss" in part]
    return curve if any(part["flip_rate"] for part in curve) else []


def _part(curve: Sequence[Mapping[str, Any]], key: str, start: float, end: float) -> float:
    last = curve[-1]["step"]
    mean = fmean(row[key] for row in curve if start * last < row["step"] <= end * last)
    return max(mean, _LEAST)
