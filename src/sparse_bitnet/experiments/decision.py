"""When a difference over a few seeds decides a question: the interval, and the rule."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_SEEDS = 3

RULE = (
    "Every claim is a number per seed that is positive where the claim is right; models of one seed "
    "share initial weights and batches. A claim holds where the 95 % Student t interval of the mean "
    f"over at least {LEAST_SEEDS} seeds lies above zero, does not hold where it lies below, and is "
    "not decided otherwise."
)

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """Mean over seeds with its 95 % interval; without bounds for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float:
        """Infinite for a single value."""
        count = len(self.values)
        if count < 2:
            return math.inf
        quantile = _T95[min(count - 1, len(_T95)) - 1]
        return quantile * statistics.stdev(self.values) / math.sqrt(count)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def verdict(values: Sequence[float]) -> str:
    """`HOLDS`, `FAILS` or `OPEN` for one number per seed, positive where the claim is right."""
    if len(values) < LEAST_SEEDS:
        return OPEN
    interval = Interval(tuple(values))
    if interval.low > 0:
        return HOLDS
    return FAILS if interval.high < 0 else OPEN
