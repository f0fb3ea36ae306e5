# SPDX-License-Identifier: Apache-2.0
"""The paper's claims on N:8 patterns, and where on the way to sparser ones a model collapses."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.cells import paper_sweep
from sparse_bitnet_paper.judge import Claim, Estimate, losses_of, paired, residual_of
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import DENSE_PATTERN

COLLAPSE = 1.10
"""NormPPL beyond which the paper calls a model collapsed."""


def sweep_claims(results: Results) -> Iterator[Claim]:
    """What the paper says of 2:4 and of patterns from dense to 2:8 (figure 2), before `judged`."""
    theirs = paper_sweep()
    patterns = results.setting["patterns"]
    sweep = [f"{weight}-{pattern}" for weight in theirs for pattern in patterns]
    cost = {w: math.log(theirs[w]["2:4"] / theirs[w][DENSE_PATTERN]) for w in theirs}
    yield Claim(
        text="2:4 sparsity costs the ternary model less than the full-precision one",
        measure="100 log of perplexity over that of the own dense model, full minus ternary",
        model=results.main,
        paper="+18.8 against +5.7 %",
        expected=100 * (cost["full"] - cost["ternary"]),
        estimate=Estimate(
            values=paired(
                results.relative("full-2:4"),
                results.relative("ternary-2:4"),
                lambda a, b: 100 * math.log(a / b),
            ),
            residual=residual_of(losses_of({format: results.by_seed(format) for format in sweep})),
            weight=200.0,
        ),
    )
    full, ternary = collapse_densities(results)
    yield Claim(
        text="In the N:8 sweep ternary passes the 10 % line later",
        measure="density in percent at which the perplexity passes 1.10 times the dense one, full minus "
        "ternary",
        model=results.main,
        paper="between 5:8 and 4:8 against between 4:8 and 3:8",
        estimate=Estimate(values=paired(full, ternary, lambda a, b: 100 * (a - b))),
    )


def collapse_densities(results: Results) -> tuple[dict[int, float], ...]:
    """Of full precision and ternary, by seed the density N/M at which NormPPL passes 1.10, between
    patterns by a straight line.

    A model that never passes it counts as passing at the sparsest pattern. Only seeds with all
    patterns, and only where one of the two formats passes the line for that seed at all.
    """
    full, ternary = (norm_ppl_by_seed(results, weight) for weight in ("full", "ternary"))
    passed = [
        seed
        for seed in full
        if seed in ternary and max(value for _, value in (*full[seed], *ternary[seed])) > COLLAPSE
    ]
    return tuple({seed: _crossing(curves[seed]) for seed in passed} for curves in (full, ternary))


def norm_ppl_by_seed(results: Results, weight: str) -> dict[int, list[tuple[float, float]]]:
    """(density, NormPPL) from dense to sparse, for seeds with every pattern of the sweep."""
    columns = [
        (NMPattern.parse(pattern).density, results.relative(f"{weight}-{pattern}"))
        for pattern in results.setting["patterns"]
    ]
    seeds = set.intersection(*(set(column) for _, column in columns))
    return {
        seed: sorted(((density, column[seed]) for density, column in columns), reverse=True)
        for seed in sorted(seeds)
    }


def _crossing(curve: Sequence[tuple[float, float]]) -> float:
    for (dense, low), (sparse, high) in pairwise(curve):
        if high > COLLAPSE:
            if low >= COLLAPSE:
                return dense
            return dense + (sparse - dense) * (COLLAPSE - low) / (high - low)
    return curve[-1][0]
