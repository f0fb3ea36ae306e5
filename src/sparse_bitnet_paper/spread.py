# SPDX-License-Identifier: Apache-2.0
"""One number per seed: its mean and its range."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.table import NOTHING


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


def spread_text(values: Iterable[float], form: str) -> str:
    """Mean and range of what is known, as a table shows it."""
    known = tuple(value for value in values if not math.isnan(value))
    return Spread(known).text(form) if known else NOTHING


def perplexities(rows: Mapping[int, ResultRow]) -> str:
    """Of runs by seed."""
    return spread_text((row.perplexity for row in rows.values()), ".2f")


def percent_over(
    rows: Mapping[int, ResultRow], base: Mapping[int, ResultRow], form: str = "+.2f"
) -> str:
    """By how many percent perplexities exceed those of `base`, seed by seed."""
    pairs = [(row.perplexity, base[seed].perplexity) for seed, row in rows.items() if seed in base]
    return spread_text((100 * (mine / other - 1) for mine, other in pairs), form)


def seeds_note(seeds: Mapping[str, int]) -> str:
    """What a table says of its spreads; `seeds`: how many there are of each of its rows or columns."""
    counts = ", ".join(f"{name} {count}" for name, count in seeds.items())
    return (
        f"Seeds: {counts}. Over several: mean, then least..greatest. Δ and percentages pair models of "
        "one seed, which share initial weights and batches."
    )
