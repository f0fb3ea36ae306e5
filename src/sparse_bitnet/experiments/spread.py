# SPDX-License-Identifier: Apache-2.0
"""One number per seed: its mean and its range."""

import statistics
from dataclasses import dataclass


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

    def text(self, form: str) -> str:
        """The mean, and on a second line the range of several seeds."""
        if len(self.values) == 1:
            return f"{self.mean:{form}}"
        return f"{self.mean:{form}}\n{self.least:{form}}..{self.greatest:{form}}"
