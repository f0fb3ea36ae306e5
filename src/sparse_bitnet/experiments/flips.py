# SPDX-License-Identifier: Apache-2.0
"""How much the masks of the training designs move: claims over all of training, and figures by tenths."""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from sparse_bitnet.experiments.judge import Claim, Estimate, paired
from sparse_bitnet.experiments.paper_runs import ABLATIONS
from sparse_bitnet.experiments.results import Results

_BASE, _FROZEN, _TERNARY_MASK, _MASKED_SCALE = ABLATIONS.values()
_OTHERS = list(ABLATIONS.items())[1:]


def flip_claims(results: Results) -> Iterator[Claim]:
    """What the paper says of flip rates (figure 4), before `judged`."""
    base = _curves(results, _BASE)
    for text, measure, paper, values in (
        (
            "The flip rate decays from high to low",
            "mean flip rate of the first quarter of the steps over that of the last, log2",
            "decays, no number",
            tuple(
                math.log2(_part(curve, "flip_rate", 0, 0.25) / _part(curve, "flip_rate", 0.75, 1))
                for curve in base.values()
            ),
        ),
        (
            "“Mask without grad” flips less",
            "mean flip rate of the whole training, baseline over variant, log2",
            "much lower, no number",
            paired(base, _curves(results, _FROZEN), lambda a, b: _octaves(a, b, "flip_rate", 0, 1)),
        ),
        (
            "“Mask from quantized weight” flips more",
            "mean flip rate of the whole training, variant over baseline, log2",
            "large, no number",
            paired(
                _curves(results, _TERNARY_MASK),
                base,
                lambda a, b: _octaves(a, b, "flip_rate", 0, 1),
            ),
        ),
        (
            "“Sparse before quant” flips less",
            "mean flip rate of the whole training, baseline over variant, log2",
            "lower, no number",
            paired(
                base,
                _curves(results, _MASKED_SCALE),
                lambda a, b: _octaves(a, b, "flip_rate", 0, 1),
            ),
        ),
        (
            "“Mask from quantized weight” flips noisily early on",
            "step-to-step noise of the flip rate in the first half, variant over baseline, log2",
            "large and noisy, no number",
            paired(
                _curves(results, _TERNARY_MASK),
                base,
                lambda a, b: _octaves(a, b, "flip_noise", 0, 0.5),
            ),
        ),
    ):
        yield Claim(
            text=text,
            measure=measure,
            model=results.main,
            paper=paper,
            estimate=Estimate(values=values),
            unit="octaves",
        )


def flips_by_tenth(results: Results) -> dict[str, list[Estimate]]:
    """By design the octaves by which its masks flip more than the baseline's, by tenths of the steps."""
    base = _curves(results, _BASE)

    def tenth(format: str, number: int) -> Estimate:
        start, end = number / 10, (number + 1) / 10
        values = paired(
            _curves(results, format),
            base,
            lambda a, b: _octaves(a, b, "flip_rate", start, end),
        )
        return Estimate(values=values)

    found = {name: [tenth(format, number) for number in range(10)] for name, format in _OTHERS}
    return {name: tenths for name, tenths in found.items() if tenths[0].values}


def _octaves(
    a: list[dict[str, Any]], b: list[dict[str, Any]], key: str, start: float, end: float
) -> float:
    first, second = (max(_part(curve, key, start, end), 1e-9) for curve in (a, b))
    return math.log2(first / second)


def _curves(results: Results, format: str) -> dict[int, list[dict[str, Any]]]:
    """Thinned flip-rate rows by seed; of runs long enough to tell tenths apart."""
    found = {}
    for seed, row in results.by_seed(format).items():
        curve = [part for part in results.curves(row) if part.get("flip_rate")]
        if len(curve) >= 20:
            found[seed] = curve
    return found


def _part(curve: Sequence[Mapping[str, Any]], key: str, start: float, end: float) -> float:
    last = curve[-1]["step"]
    return fmean(row[key] for row in curve if start * last < row["step"] <= end * last)
