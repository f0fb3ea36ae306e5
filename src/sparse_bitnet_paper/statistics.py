# SPDX-License-Identifier: Apache-2.0
"""Statistics of claims: a mean over seeds with its interval, and Holm's correction over a page.

verdicts.md.j2 explains how claims are judged.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

LEAST_SEEDS = 3
LEVEL = 0.05

HOLDS, OPPOSITE = "holds", "opposite"
EXCLUDED, OPEN = "excluded at the paper's size", "not decided"


@dataclass(frozen=True)
class Residual:
    """Standard deviation of a measure after removing a mean per model and a shift per seed, and its
    degrees of freedom."""

    deviation: float
    freedom: float


def residual_of(measured: pd.DataFrame) -> Residual | None:
    """Return the residual of a measure minus a mean per model and a shift per seed.

    `measured` has a row per seed and a column per model; some may be missing. None if there are too few.
    """
    from statsmodels.api import OLS

    known = measured.melt(var_name="model", ignore_index=False).dropna()
    if known.empty:
        return None
    design = pd.get_dummies(known.assign(seed=known.index)[["model", "seed"]].astype(str))
    with warnings.catch_warnings():
        # Means and shifts are not unique, but the residual is.
        warnings.simplefilter("ignore")
        fit = OLS(known.value.to_numpy(), design.to_numpy(dtype=float)).fit()
    return Residual(math.sqrt(fit.scale), fit.df_resid) if fit.df_resid >= 1 else None


class Estimate:
    """The mean of a measure over seeds, and its uncertainty."""

    def __init__(
        self,
        values: Sequence[float] | pd.Series,
        residual: Residual | None = None,
        weight: float = 1.0,
    ) -> None:
        """Estimate from one number per seed.

        Args:
            values: by seed.
            residual: pooled; by default the values' own spread.
            weight: standard deviation of one value in units of `residual`: the norm of its contrast.
        """
        self.values, self.count = values, len(values)
        self.mean = float(np.mean(values)) if self.count else math.nan
        self.deviation, self.freedom = math.inf, self.count - 1.0
        if residual is not None:
            self.deviation, self.freedom = weight * residual.deviation, residual.freedom
        elif self.count > 1:
            self.deviation = float(np.std(values, ddof=1))
        self.error = self.deviation / math.sqrt(max(1, self.count))

    @property
    def half_width(self) -> float:
        """Half of the mean's 95 % interval."""
        from scipy.stats import t

        known = math.isfinite(self.deviation)
        return float(t.ppf(1 - LEVEL / 2, self.freedom)) * self.error if known else math.inf

    @property
    def interval(self) -> str:
        """The mean's 95 % interval."""
        return f"[{self.mean - self.half_width:+.2f}, {self.mean + self.half_width:+.2f}]"

    def text(self, unit: str) -> str:
        """Return mean, 95 % interval and number of seeds."""
        seeds = "(1 seed)" if self.count == 1 else f"{self.interval}, {self.count} seeds"
        return f"{self.mean:+.2f} {unit} {seeds}"

    def p_value(self, null: float) -> float:
        """Return the two-sided probability of a mean this far from `null`."""
        from scipy.stats import t

        away = abs(self.mean - null)
        if self.error == 0:
            return 0.0 if away else 1.0
        return 2 * float(t.sf(away / self.error, self.freedom))

    def seeds_needed(self, effect: float, level: float = LEVEL) -> int:
        """Return how many seeds let a test of this level detect an effect this large with power 0.8.

        With no spread, or an unknown one, return the fewest seeds that allow a verdict.
        """
        from statsmodels.stats.power import normal_sample_size_one_tail, ttest_power

        if self.deviation in (0, math.inf):
            return LEAST_SEEDS
        ratio, freedom = abs(effect) / self.deviation, self.freedom / max(1, self.count - 1)
        # As many as with a deviation that is known, then more until it is known well enough.
        seeds = max(LEAST_SEEDS, math.ceil(normal_sample_size_one_tail(ratio, 0.8, level / 2)))
        power = partial(ttest_power, ratio, alpha=level / 2, alternative="larger")
        while power(seeds, df=freedom * (seeds - 1)) < 0.8:
            seeds += 1
        return seeds


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """One claim at one model size."""

    text: str
    """The claim, as the paper states it."""
    short: str
    """The claim in at most 40 characters."""
    measure: str
    """How the number of each seed is computed; a positive number speaks for the claim."""
    model: str
    paper: str
    """The paper's own value of the measure, or its statement in words; "-" without one."""
    estimate: Estimate
    """The estimate; without values if runs are missing."""
    expected: float | None = None
    """The paper's own value as a number."""
    null: float = 0.0
    """Threshold that the measure must exceed."""
    unit: str = "points"
    main: str = ""
    """Wording on the first page, for one of the paper's main claims."""
    verdict: str = OPEN
    """See `judged`."""

    @property
    def result(self) -> str:
        """Mean, interval and seeds in words."""
        return self.estimate.text(self.unit)


def judged(claims: Sequence[Claim]) -> list[Claim]:
    """Return all claims of a page with their verdicts."""
    tests = [
        (number, value)
        for number, claim in enumerate(claims)
        if claim.estimate.count >= LEAST_SEEDS
        for value in (claim.null, claim.expected)
        if value is not None
    ]
    rejected = holm([claims[number].estimate.p_value(value) for number, value in tests])
    rejections = {test for test, reject in zip(tests, rejected, strict=True) if reject}
    level = LEVEL / max(1, len(tests) - len(rejections))
    return [
        dataclasses.replace(claim, verdict=_verdict(number, claim, rejections, level))
        for number, claim in enumerate(claims)
    ]


def _verdict(number: int, claim: Claim, rejections: set[tuple[int, float]], level: float) -> str:
    estimate, expected = claim.estimate, claim.expected
    if (number, claim.null) in rejections:
        return HOLDS if estimate.mean > claim.null else OPPOSITE
    if expected is not None and (number, expected) in rejections and estimate.mean < expected:
        return EXCLUDED
    more = estimate.seeds_needed(expected or 1.0, level) - estimate.count
    least = "at least " * math.isinf(estimate.deviation)
    return OPEN if more < 1 else f"{OPEN}, {least}{more} more seed{'' if more == 1 else 's'}"


def holm(p_values: Sequence[float]) -> Sequence[bool]:
    """Return for each hypothesis whether Holm's step-down procedure rejects it."""
    from statsmodels.stats.multitest import multipletests

    return multipletests(p_values, LEVEL, "holm")[0] if p_values else []
