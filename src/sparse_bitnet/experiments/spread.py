"""One number per seed: its mean, its range, and what the interval of the mean decides."""

import math
import statistics
from dataclasses import dataclass

LEAST_SEEDS = 3

RULE = (
    "Every claim is a number per seed that is positive where the claim is right; models of one seed "
    "share initial weights and batches. A claim holds where the 95 % Student t interval of the mean "
    f"over at least {LEAST_SEEDS} seeds lies above zero, does not hold where it lies below, and is "
    "not decided otherwise."
)

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"


@dataclass(frozen=True)
class Spread:
    """A measure over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over all seeds."""
        return statistics.fmean(self.values)

    @property
    def least(self) -> float:
        """Of the seed with the smallest value."""
        return min(self.values)

    @property
    def greatest(self) -> float:
        """Of the seed with the largest value."""
        return max(self.values)

    @property
    def half_width(self) -> float:
        """Of the mean's 95 % interval; infinite for a single value."""
        count = len(self.values)
        if count < 2:
            return math.inf
        from scipy.special import stdtrit

        return float(stdtrit(count - 1, 0.975)) * statistics.stdev(self.values) / math.sqrt(count)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.mean + self.half_width

    @property
    def verdict(self) -> str:
        """`HOLDS`, `FAILS` or `OPEN`, of values that are positive where a claim is right."""
        if len(self.values) < LEAST_SEEDS:
            return OPEN
        return HOLDS if self.low > 0 else FAILS if self.high < 0 else OPEN

    def text(self, form: str) -> str:
        """The mean, and on a second line the range of several seeds."""
        if len(self.values) == 1:
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}}\n{self.least:{form}}..{self.greatest:{form}}"
