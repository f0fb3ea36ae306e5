"""The paper's claims as numbers per seed; `spread.RULE` says what follows from them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar

from sparse_bitnet.experiments.cells import average_accuracy
from sparse_bitnet.experiments.paper_runs import ABLATIONS
from sparse_bitnet.experiments.results import Results
from sparse_bitnet.experiments.spread import Spread

COLLAPSE = 1.10
"""NormPPL beyond which the paper calls a model collapsed."""

STILL_MASS = 0.01
"""A near-zero mass that falls by less than one percentage point counts as not falling."""

_BASE, _FROZEN, _TERNARY_MASK, _ = ABLATIONS.values()

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim at one model size."""

    text: str
    """What the paper says."""

    measure: str
    """What is computed, per seed, so that a positive number speaks for the claim."""

    model: str
    paper: str
    """The paper's own value of the measure, where it has one, else "-"."""

    values: tuple[float, ...]
    """One per seed; empty where runs are missing."""

    form: str = "+.2f"
    unit: str = ""

    @property
    def verdict(self) -> str:
        """See `Spread.verdict`."""
        return Spread(self.values).verdict

    @property
    def result(self) -> str:
        """Mean, interval and seeds in words."""
        if not self.values:
            return "no runs"
        interval, unit = Spread(self.values), f" {self.unit}" if self.unit else ""
        text = f"{interval.mean:{self.form}}{unit}"
        if len(self.values) == 1:
            return f"{text} (1 seed)"
        return (
            f"{text} [{interval.low:{self.form}}, {interval.high:{self.form}}], "
            f"{len(self.values)} seeds"
        )


def claims(results: Results) -> list[Claim]:
    """Every claim of the paper on which there is a number, in the paper's order."""
    found = [
        *_robustness(results),
        *_sweep(results),
        *_ablations(results),
        *_flips(results),
        *_schedule(results),
        *_near_zero(results),
        *_downstream(results),
    ]
    return [claim for claim in found if claim.values]


def _robustness(results: Results) -> Iterator[Claim]:
    paper = {"full": "+5.5 / +3.3 / +2.8", "ternary": "+1.2 / +1.2 / +1.0"}
    for model in reversed(results.models):
        full, ternary = (results.relative(f"{w}-6:8", model=model) for w in ("full", "ternary"))
        yield Claim(
            text="6:8 sparsity costs the ternary model less than the full-precision one",
            measure="increase of perplexity over the own dense model, full minus ternary, in points",
            model=model,
            paper=f"{paper['full']} against {paper['ternary']} % (0.5B / 1.5B / 3B)",
            values=_paired(full, ternary, lambda a, b: 100 * (a - b)),
            unit="points",
        )
    if len(results.models) > 1:
        small, large = results.models[0], results.models[-1]
        yield Claim(
            text="The ternary model's penalty shrinks with model size",
            measure=f"increase of perplexity at 6:8, {small} minus {large}, in points",
            model=large,
            paper="+1.2 against +1.0 %",
            values=_paired(
                results.relative("ternary-6:8", model=small),
                results.relative("ternary-6:8", model=large),
                lambda a, b: 100 * (a - b),
            ),
            unit="points",
        )


def _sweep(results: Results) -> Iterator[Claim]:
    full, ternary = (results.relative(f"{weight}-2:4") for weight in ("full", "ternary"))
    yield Claim(
        text="2:4 sparsity costs the ternary model less than the full-precision one",
        measure="increase of perplexity over the own dense model, full minus ternary, in points",
        model=results.main,
        paper="+18.8 against +5.7 %",
        values=_paired(full, ternary, lambda a, b: 100 * (a - b)),
        unit="points",
    )
    limits = {weight: collapse_density(results, weight) for weight in ("full", "ternary")}
    yield Claim(
        text="In the N:8 sweep ternary passes the 10 % line later",
        measure="density at which the perplexity passes 1.10 times the dense one, full minus ternary",
        model=results.main,
        paper="between 5:8 and 4:8 against between 4:8 and 3:8",
        values=_paired(limits["full"], limits["ternary"], lambda a, b: a - b),
        form="+.3f",
    )


def collapse_density(results: Results, weight: str) -> dict[int, float]:
    """By seed the density N/M at which NormPPL passes 1.10, between patterns by a straight line.

    A model that never passes it counts as passing at the sparsest pattern. Only seeds with all
    patterns, and only where one of the two formats passes the line for that seed at all.
    """
    curves = norm_ppl_by_seed(results, weight)
    other = norm_ppl_by_seed(results, "full" if weight == "ternary" else "ternary")
    passed = {
        seed
        for seed in curves.keys() & other.keys()
        if max(value for _, value in (*curves[seed], *other[seed])) > COLLAPSE
    }
    return {seed: _crossing(curves[seed]) for seed in sorted(passed)}


def norm_ppl_by_seed(results: Results, weight: str) -> dict[int, list[tuple[float, float]]]:
    """(density, NormPPL) from dense to sparse, for seeds with every pattern of the sweep."""
    columns = {
        pattern: results.relative(f"{weight}-{pattern}") for pattern in results.setting["patterns"]
    }
    seeds = set.intersection(*(set(column) for column in columns.values()))
    return {
        seed: sorted(
            ((density(pattern), column[seed]) for pattern, column in columns.items()), reverse=True
        )
        for seed in sorted(seeds)
    }


def density(pattern: str) -> float:
    """ "6:8" -> 0.75."""
    kept, group = pattern.split(":")
    return int(kept) / int(group)


def _crossing(curve: Sequence[tuple[float, float]]) -> float:
    for (dense, low), (sparse, high) in pairwise(curve):
        if high > COLLAPSE:
            if low >= COLLAPSE:
                return dense
            return dense + (sparse - dense) * (COLLAPSE - low) / (high - low)
    return curve[-1][0]


def _ablations(results: Results) -> Iterator[Claim]:
    paper = {_TERNARY_MASK: "+22.5 % (32.23 against 26.31)"}
    base = results.by_seed(_BASE)
    for name, format in list(ABLATIONS.items())[1:]:
        yield Claim(
            text=f"Master-weight masks with dense gradients beat “{name}”",
            measure="perplexity of the variant over that of the baseline, in percent",
            model=results.main,
            paper=paper.get(format, "higher, no number"),
            values=_paired(
                results.by_seed(format),
                base,
                lambda a, b: 100 * (a.perplexity / b.perplexity - 1),
            ),
            unit="%",
        )


def _flips(results: Results) -> Iterator[Claim]:
    base = _curves(results, _BASE)
    yield Claim(
        text="The flip rate decays from high to low",
        measure="mean flip rate of the first quarter of the steps over that of the last, log2",
        model=results.main,
        paper="decays, no number",
        values=tuple(
            math.log2(_part(curve, "flip_rate", 0, 0.25) / _part(curve, "flip_rate", 0.75, 1))
            for curve in base.values()
        ),
        unit="octaves",
    )
    yield Claim(
        text="“Mask without grad” flips less throughout training",
        measure="flip rate of the baseline over the variant's, log2, in the tenth of the steps where "
        "this is least",
        model=results.main,
        paper="much lower, no number",
        values=_paired(
            base,
            _curves(results, _FROZEN),
            lambda a, b: min(
                math.log2(
                    _part(a, "flip_rate", t / 10, (t + 1) / 10)
                    / max(_part(b, "flip_rate", t / 10, (t + 1) / 10), 1e-9)
                )
                for t in range(10)
            ),
        ),
        unit="octaves",
    )
    yield Claim(
        text="“Mask from quantized weight” flips more and noisily early on",
        measure="step-to-step noise of the flip rate in the first half, variant over baseline, log2",
        model=results.main,
        paper="large and noisy, no number",
        values=_paired(
            _curves(results, _TERNARY_MASK),
            base,
            lambda a, b: math.log2(
                max(_part(a, "flip_noise", 0, 0.5), 1e-9)
                / max(_part(b, "flip_noise", 0, 0.5), 1e-9)
            ),
        ),
        unit="octaves",
    )


def _schedule(results: Results) -> Iterator[Claim]:
    paper = {25: "+4.4 %", 50: "+4.1 %", 75: "+1.5 %"}
    always = results.by_seed("ternary-6:8")
    for percent in results.setting["sparse_percents"]:
        if percent in (0, 100):
            continue
        yield Claim(
            text=f"Sparse from scratch beats {percent} % sparse steps",
            measure="perplexity of the schedule over that of sparse from scratch, in percent",
            model=results.main,
            paper=paper.get(percent, "-"),
            values=_paired(
                results.by_seed("ternary-6:8", sparse_percent=percent),
                always,
                lambda a, b: 100 * (a.perplexity / b.perplexity - 1),
            ),
            unit="%",
        )


def _near_zero(results: Results) -> Iterator[Claim]:
    for model in reversed(results.models):
        yield Claim(
            text="Near-zero mass falls over training for the ternary model",
            measure="P(|W| / mean|W| < 0.5) of all block weights, start minus end, in points",
            model=model,
            paper="falls, no number",
            values=tuple(100 * fall for fall in _falls(results, "ternary-8:8", model)),
            unit="points",
        )
        yield Claim(
            text="Near-zero mass does not fall for the full-precision model",
            measure=f"the same, end minus start, plus {100 * STILL_MASS:g} point of tolerance",
            model=model,
            paper="stays, no number",
            values=tuple(100 * (STILL_MASS - fall) for fall in _falls(results, "full-8:8", model)),
            unit="points",
        )


def _falls(results: Results, format: str, model: str) -> Iterator[float]:
    for row in results.by_seed(format, model=model).values():
        overall = results.weights(row)["overall"]
        yield overall[0] - overall[-1]


def _downstream(results: Results) -> Iterator[Claim]:
    average = {
        (row.model, row.variant, row.seed): average_accuracy(found)
        for row, found in results.downstream()
    }
    for model in reversed(results.models):
        changes = {
            weight: {
                seed: value - average[model, f"{weight}-8:8", seed]
                for (name, format, seed), value in average.items()
                if (name, format) == (model, f"{weight}-6:8")
                and (model, f"{weight}-8:8", seed) in average
            }
            for weight in ("full", "ternary")
        }
        yield Claim(
            text="On zero-shot tasks 6:8 sparsity costs the ternary model less",
            measure="change of the average accuracy against the own dense model, ternary minus full",
            model=model,
            paper="-1.15 / -3.79 / -0.80 against -3.02 / -7.71 / -3.20 points",
            values=_paired(changes["ternary"], changes["full"], lambda a, b: a - b),
            unit="points",
        )


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


def _paired(
    first: Mapping[int, T], second: Mapping[int, T], difference: Callable[[T, T], float]
) -> tuple[float, ...]:
    """One number for every seed that both have."""
    return tuple(difference(first[seed], second[seed]) for seed in first if seed in second)
