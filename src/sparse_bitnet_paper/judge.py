# SPDX-License-Identifier: Apache-2.0
"""Whether a claim holds: one residual for an experiment, and Holm over all claims of a page."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from sparse_bitnet_paper.result_row import ResultRow

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

LEAST_SEEDS = 3
LEVEL = 0.05

HOLDS, OPPOSITE = "holds", "opposite"
EXCLUDED, OPEN = "excluded at the paper's size", "not decided"

RULE = (
    "How claims are judged, fixed before the first run of scale cpu-paper had ended; what was added "
    "since changed no verdict then: how searched rates are treated and further seeds counted, that too "
    "few seeds are no test, that a seed counts with all four models, and one claim on flips; the claims "
    "at searched rates count in the correction since. Every claim is a number per seed that is positive "
    "where the claim is right; models of one seed share initial weights and batches. Perplexities are "
    "compared by their logarithms (1 point is about 1 %), with one residual pooled over all models of "
    "the experiment: what a mean for each model and a shift for each seed leave. Other measures, and two "
    "sizes with each other, are judged by the spread of their seeds. Each claim is tested (two-sided t) "
    "against zero (a near-zero mass that stays: against a fall of one point) and, where the paper has a "
    f"number, against that number; Holm's correction at {100 * LEVEL:g} % runs over all tests of the "
    "page. Where zero is rejected a claim “holds” or is “opposite”; else, where the paper's number is "
    "rejected from below, it is “excluded at the paper's size”: if there is an effect, it is smaller "
    "than the paper's (our first three sizes stand beside its 0.5B, 1.5B and 3B); else it is “not "
    "decided”, with the further seeds that would show, four times in five and at the level that Holm's "
    "correction leaves, an effect of the paper's size, or of one unit where the paper has no number, if "
    f"those there do not suffice. Claims with fewer than {LEAST_SEEDS} seeds are not tested. A set that "
    "is added can change the verdicts of others. Brackets are 95 % intervals of one claim alone."
)


@dataclass(frozen=True)
class Residual:
    """Standard deviation of one model's measure around model and seed, and its degrees of freedom."""

    deviation: float
    freedom: int


def residual_of(measured: Mapping[K, Mapping[int, float]]) -> Residual | None:
    """Of measures by model and seed, some of which may be missing; None where too few are there."""
    models = list(measured)
    seeds = sorted({seed for found in measured.values() for seed in found})
    places = [(model, seed) for model in models for seed in measured[model]]
    design = np.zeros((len(places), len(models) + len(seeds)))
    for row, (model, seed) in enumerate(places):
        design[row, models.index(model)] = design[row, len(models) + seeds.index(seed)] = 1
    freedom = len(places) - int(np.linalg.matrix_rank(design)) if places else 0
    if freedom < 1:
        return None
    values = np.array([measured[model][seed] for model, seed in places])
    rest = values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
    return Residual(math.sqrt(float(rest @ rest) / freedom), freedom)


def losses_of(rows: Mapping[K, Mapping[int, ResultRow]]) -> dict[K, dict[int, float]]:
    """Held-out losses of runs by model and seed."""
    return {name: {seed: row.loss for seed, row in found.items()} for name, found in rows.items()}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of a measure over seeds, and how sure it is."""

    values: tuple[float, ...]
    """One per seed."""

    residual: Residual | None = None
    """Pooled; None: the values' own spread."""

    weight: float = 1.0
    """Standard deviations of `residual` in one value: the norm of the contrast that it is."""

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """Of one value; infinite where it cannot be known."""
        if self.residual is not None:
            return self.weight * self.residual.deviation
        return statistics.stdev(self.values) if len(self.values) > 1 else math.inf

    @property
    def half_width(self) -> float:
        """Of the mean's 95 % interval."""
        if math.isinf(self.deviation):
            return math.inf
        from scipy.special import stdtrit

        return float(stdtrit(self._freedom, 1 - LEVEL / 2)) * self._error

    def p_value(self, null: float) -> float:
        """Two-sided, that the mean is `null`."""
        from scipy.special import stdtr

        away = abs(self.mean - null)
        if self._error == 0:
            return 0.0 if away else 1.0
        return 2 * float(stdtr(self._freedom, -away / self._error))

    def seeds_needed(self, effect: float, level: float = LEVEL) -> int:
        """All seeds with which a test at this level sees an effect of this size four times in five.

        Without a known deviation, and without any, as many as decide anything.
        """
        if self.deviation in (0, math.inf):
            return LEAST_SEEDS
        from scipy.special import nctdtr, ndtri, stdtrit

        ratio, freedom = abs(effect) / self.deviation, self._freedom / max(1, len(self.values) - 1)

        def misses(seeds: int) -> float:
            of_all = freedom * (seeds - 1)
            return nctdtr(of_all, ratio * math.sqrt(seeds), stdtrit(of_all, 1 - level / 2))

        # As many as with a deviation that is known, then more until it is known well enough.
        least = ((ndtri(1 - level / 2) + ndtri(0.8)) / ratio) ** 2
        seeds = max(LEAST_SEEDS, math.ceil(least))
        while misses(seeds) > 0.2:
            seeds += 1
        return seeds

    def text(self, unit: str) -> str:
        """Mean, 95 % interval and number of seeds."""
        text, count = f"{self.mean:+.2f} {unit}", len(self.values)
        return f"{text} (1 seed)" if count == 1 else f"{text} {self.interval}, {count} seeds"

    @property
    def interval(self) -> str:
        """Of the mean, 95 %."""
        return f"[{self.mean - self.half_width:+.2f}, {self.mean + self.half_width:+.2f}]"

    @property
    def _freedom(self) -> int:
        return len(self.values) - 1 if self.residual is None else self.residual.freedom

    @property
    def _error(self) -> float:
        return self.deviation / math.sqrt(len(self.values))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim at one model size."""

    text: str
    """What the paper says."""

    measure: str
    """What is computed, per seed, so that a positive number speaks for the claim."""

    model: str
    paper: str
    """The paper's own value of the measure, or what it says in words; "-" where it says nothing."""

    estimate: Estimate
    """Without values where runs are missing."""

    expected: float | None = None
    """The paper's own value as a number."""

    null: float = 0.0
    """What the measure must exceed."""

    unit: str = "points"
    verdict: str = OPEN
    """By `judged`."""

    @property
    def result(self) -> str:
        """Mean, interval and seeds in words."""
        return self.estimate.text(self.unit)


def judged(claims: Sequence[Claim]) -> list[Claim]:
    """All claims of a page with their verdicts; see `RULE`."""
    tested = [(n, c) for n, c in enumerate(claims) if len(c.estimate.values) >= LEAST_SEEDS]
    tests = [(number, claim.null) for number, claim in tested]
    tests += [(n, c.expected) for n, c in tested if c.expected is not None]
    p_values = [claims[number].estimate.p_value(null) for number, null in tests]
    rejected = {tests[place] for place in holm(p_values)}
    level = LEVEL / max(1, len(tests) - len(rejected))
    return [
        dataclasses.replace(claim, verdict=_verdict(number, claim, rejected, level))
        for number, claim in enumerate(claims)
    ]


def _verdict(number: int, claim: Claim, rejected: set[tuple[int, float]], level: float) -> str:
    estimate, expected = claim.estimate, claim.expected
    if (number, claim.null) in rejected:
        return HOLDS if estimate.mean > claim.null else OPPOSITE
    if expected is not None and (number, expected) in rejected and estimate.mean < expected:
        return EXCLUDED
    more = estimate.seeds_needed(expected or 1.0, level) - len(estimate.values)
    least = "at least " * math.isinf(estimate.deviation)
    return OPEN if more < 1 else f"{OPEN}, {least}{more} more seed{'' if more == 1 else 's'}"


def holm(p_values: Sequence[float]) -> list[int]:
    """Places of the hypotheses that Holm's step-down procedure rejects."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    rejected: list[int] = []
    for done, place in enumerate(order):
        if p_values[place] > LEVEL / (len(order) - done):
            break
        rejected.append(place)
    return rejected


def paired(
    first: Mapping[int, T], second: Mapping[int, T], difference: Callable[[T, T], float]
) -> tuple[float, ...]:
    """One number for every seed that both have."""
    return tuple(difference(first[seed], second[seed]) for seed in first if seed in second)
