# SPDX-License-Identifier: Apache-2.0
"""The paper's claims as one number per seed, positive if the seed supports the claim."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.paper import paper, paper_accuracies
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runs import ABLATIONS
from sparse_bitnet_paper.scales import DENSE_PATTERN, four_formats
from sparse_bitnet_paper.statistics import Claim, Estimate, Residual, residual_of

COLLAPSE = 1.10
"""NormPPL beyond which the paper calls a model collapsed."""

LEAST_FLIPS = 1e-9
"""Stands for no flips at all, which have no logarithm."""

NOTHING = "-"


def claims(results: Results) -> list[Claim]:
    """Return the paper's claims that have a number here, in its order, not yet judged."""
    every = [
        *_robustness(results),
        *_sweep(results),
        *_ablations(results),
        *_flips(results),
        *_schedule(results),
        *_near_zero(results),
        *_downstream(results),
    ]
    return [claim for claim in every if claim.estimate.count]


def _claim(
    name: str, model: str, estimate: Estimate, expected: float | None = None, **words: Any
) -> Claim:
    """Return a claim of paper.toml, with `words` filled in."""
    values = paper()["claims"][name]
    texts = {key: values[key].format(**words) for key in ("text", "short", "measure", "paper")}
    return Claim(**values | texts, model=model, estimate=estimate, expected=expected)


def cost_estimate(losses: pd.DataFrame, residual: Residual | None = None) -> Estimate:
    """Return how many points more sparsity costs in full precision, from the four models' losses.

    Only seeds that have all four count. `residual` is by default that of these models.
    """
    whole = losses.dropna()
    dense, full, dense_ternary, ternary = (whole[format] for format in whole)
    values = 100 * (full - dense - ternary + dense_ternary)
    return Estimate(values, residual=residual or residual_of(whole), weight=200.0)


def losses_at(rates: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return losses at searched rates, without seed 0, which chose the rate and may be lucky."""
    return pd.DataFrame({format: rows.loss for format, rows in rates.items()}).drop(
        0, errors="ignore"
    )


def _robustness(results: Results) -> Iterator[Claim]:
    """Yield what 6:8 costs at each size, beside the paper's model at the same place among the sizes."""
    theirs = {}
    for model, own in zip(results.setting["sizes"], paper()["perplexity"].values(), strict=False):
        dense, full, dense_ternary, ternary = (100 * math.log(value) for value in own.values())
        theirs[model] = (full - dense, ternary - dense_ternary)
    for model in reversed(results.models):
        expected = theirs[model][0] - theirs[model][1] if model in theirs else None
        losses = results.losses(model)
        yield _claim("cost", model, cost_estimate(losses), expected)
        shown = [losses.drop(0, errors="ignore")]
        for name, shared in (("cost-at-chosen-rate", True), ("cost-at-own-rates", False)):
            searched = results.at_best_rates(model, shared=shared)
            if searched and not any(losses_at(searched).equals(other) for other in shown):
                shown.append(losses_at(searched))
                estimate = cost_estimate(shown[-1])
                if estimate.count > 1:
                    yield _claim(name, model, estimate, expected)
    penalties = {model: results.relative("ternary-6:8", model=model) for model in theirs}
    known = [model for model, ours in penalties.items() if len(ours)]
    if len(known) > 1:
        small, large = known[0], known[-1]
        estimate = Estimate((100 * np.log(penalties[small] / penalties[large])).dropna())
        expected = theirs[small][1] - theirs[large][1]
        yield _claim("shrinks", large, estimate, expected, small=small, large=large)


def _sweep(results: Results) -> Iterator[Claim]:
    theirs = paper()["sweep"]
    cost = {w: math.log(theirs[w]["2:4"] / theirs[w][DENSE_PATTERN]) for w in theirs}
    formats = [
        f"{weight}-{pattern}" for weight in theirs for pattern in results.setting["patterns"]
    ]
    measured = results.relative("full-2:4") / results.relative("ternary-2:4")
    residual = residual_of(pd.DataFrame({f: results.by_seed(f).loss for f in formats}))
    estimate = Estimate((100 * np.log(measured)).dropna(), residual=residual, weight=200.0)
    expected = 100 * (cost["full"] - cost["ternary"])
    yield _claim("cost-at-2of4", results.main, estimate, expected)
    collapse = collapse_densities(results)
    estimate = Estimate(100 * (collapse.full - collapse.ternary))
    yield _claim("collapse", results.main, estimate)


def collapse_densities(results: Results) -> pd.DataFrame:
    """Return by seed the density N/M at which NormPPL exceeds 1.10, for `full` and for `ternary`.

    Between patterns it is interpolated linearly. A model that never exceeds 1.10 counts as doing so at
    the sparsest pattern. Only seeds with all patterns count, if one of the two formats exceeds it.
    """
    density = {pattern: NMPattern.parse(pattern).density for pattern in results.setting["patterns"]}
    patterns = sorted(density, key=lambda pattern: -density[pattern])
    norm_ppl = {
        weight: pd.DataFrame({p: results.relative(f"{weight}-{p}") for p in patterns})
        for weight in ("full", "ternary")
    }
    both = pd.concat(norm_ppl, axis=1).dropna()
    both = both[both.max(axis=1) > COLLAPSE]
    densities = [density[pattern] for pattern in patterns]
    crossings = {
        weight: [_crossing(densities, list(line)) for line in both[weight].to_numpy()]
        for weight in norm_ppl
    }
    return pd.DataFrame(crossings, index=both.index, dtype=float)


def _crossing(densities: Sequence[float], norm_ppl: Sequence[float]) -> float:
    for (dense, low), (sparse, high) in pairwise(zip(densities, norm_ppl, strict=True)):
        if high > COLLAPSE:
            return dense + (sparse - dense) * max(0.0, (COLLAPSE - low) / (high - low))
    return densities[-1]


def _ablations(results: Results) -> Iterator[Claim]:
    losses = pd.DataFrame({n: results.by_seed(format).loss for n, format in ABLATIONS.items()})
    base = paper()["designs"]["baseline"]
    for design in list(ABLATIONS)[1:]:
        words, expected = "higher, no number", None
        if (theirs := paper()["designs"].get(design)) is not None:
            words = f"{100 * (theirs / base - 1):+.1f} % ({theirs} against {base})"
            expected = 100 * math.log(theirs / base)
        estimate = _higher(losses, design, "baseline")
        yield _claim("design", results.main, estimate, expected, design=design, theirs=words)


def _schedule(results: Results) -> Iterator[Claim]:
    theirs, percents = paper()["schedule"], results.setting["sparse_percents"]
    formats = {percent: "ternary-6:8" if percent else "ternary-8:8" for percent in percents}
    losses = pd.DataFrame(
        {p: results.by_seed(format, sparse_percent=p).loss for p, format in formats.items()}
    )
    for percent in percents if 100 in percents else ():
        if 0 < percent < 100:
            over = theirs[str(percent)] / theirs["100"]
            words = {"percent": percent, "theirs": f"{100 * (over - 1):+.1f} %"}
            estimate = _higher(losses, percent, 100)
            yield _claim("schedule", results.main, estimate, 100 * math.log(over), **words)


def _higher(losses: pd.DataFrame, name: str | int, base: str | int) -> Estimate:
    """Return by how many points the perplexity of one column exceeds that of another."""
    values = (100 * (losses[name] - losses[base])).dropna()
    return Estimate(values, residual=residual_of(losses), weight=100 * math.sqrt(2))


def _flips(results: Results) -> Iterator[Claim]:
    """Yield the paper's claims on flip rates (figure 4)."""
    base, frozen, ternary_mask, masked_scale = (
        flip_curves(results, format) for format in ABLATIONS.values()
    )
    for name, values in (
        ("flips-decay", np.log2(flip_means(base, end=0.25) / flip_means(base, start=0.75))),
        ("flips-without-gradient", octaves(base, frozen)),
        ("flips-of-ternary-masks", octaves(ternary_mask, base)),
        ("flips-of-masked-scales", octaves(base, masked_scale)),
        ("noise-of-ternary-masks", octaves(ternary_mask, base, key="flip_noise", end=0.5)),
    ):
        yield _claim(name, results.main, Estimate(values))


def flips_by_tenth(results: Results) -> dict[str, list[Estimate]]:
    """Return by design how many octaves more its masks flip than the baseline's, by tenths of steps."""
    (_, base), *others = ((n, flip_curves(results, format)) for n, format in ABLATIONS.items())
    by_design = {
        name: [
            Estimate(octaves(curves, base, start=number / 10, end=(number + 1) / 10))
            for number in range(10)
        ]
        for name, curves in others
    }
    return {name: tenths for name, tenths in by_design.items() if tenths[0].count}


def flip_curves(results: Results, format: str) -> pd.DataFrame:
    """Return the thinned curves of a design's runs, with `seed` and `share` of the steps.

    A stretch without a flip has a rate of 0. Runs without any flip, or too short to tell tenths apart,
    are left out.
    """
    seeds = {name: seed for seed, name in results.by_seed(format).name.items()}
    curves = results.curves[results.curves.run.isin(list(seeds)) & results.curves.loss.notna()]
    curves = curves.fillna({"flip_rate": 0.0, "flip_noise": 0.0})
    by_run = curves.groupby("run")
    share = curves.step / by_run.step.transform("max")
    curves = curves.assign(seed=curves.run.map(seeds), share=share)
    return curves[(by_run.flip_rate.transform("max") > 0) & (by_run.step.transform("size") >= 20)]


def flip_means(
    curves: pd.DataFrame, key: str = "flip_rate", start: float = 0, end: float = 1
) -> pd.Series:
    """Return by seed the mean of `key` over a part of the steps, at least `LEAST_FLIPS`."""
    part = curves[(curves.share > start) & (curves.share <= end)]
    return part.groupby("seed")[key].mean().clip(lower=LEAST_FLIPS)


def octaves(first: pd.DataFrame, second: pd.DataFrame, **part: Any) -> pd.Series:
    """Return by how many octaves `flip_means` are higher, for the seeds that both have."""
    return np.log2(flip_means(first, **part) / flip_means(second, **part)).dropna()


def _near_zero(results: Results) -> Iterator[Claim]:
    for model in reversed(results.models):
        falls = {}
        for weight in ("full", "ternary"):
            rows = results.by_seed(f"{weight}-{DENSE_PATTERN}", model=model)
            falls[weight] = 100 * (rows.near_zero_start - rows.near_zero_mass)
        yield _claim("mass-falls", model, Estimate(falls["ternary"]))
        yield _claim("mass-stays", model, Estimate(-falls["full"]))


def average_accuracies(results: Results) -> pd.DataFrame:
    """Return the models scored on tasks: their rows, with `tasks` and `average`, in the order of scoring.

    Where other tasks or another limit were requested at different times, the newest count. The average
    accuracy over all tasks is in percent, as in the paper.
    """
    lines = [line for line in results.scores if line["run"] in set(results.rows.name)]
    lines = [line for line in lines if line["asked"] == lines[-1]["asked"]]
    scores = pd.DataFrame(lines, columns=["run", "tasks"])
    accuracies = ([values["acc"] for values in tasks.values()] for tasks in scores.tasks)
    scores["average"] = [100 * float(np.mean(each)) for each in accuracies]
    return scores.merge(results.rows, left_on="run", right_on="name")


def _downstream(results: Results) -> Iterator[Claim]:
    scored = average_accuracies(results)
    theirs = pd.DataFrame(paper_accuracies(scored.tasks.iloc[0] if len(scored) else ()))
    formats = list(four_formats("6:8"))

    def changes(accuracy: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        """Return those of full precision and of ternary, of accuracies with a column a format."""
        dense, full, dense_ternary, ternary = (accuracy[format] for format in formats)
        return full - dense, ternary - dense_ternary

    words, expected = NOTHING, pd.Series(dtype=float)
    if len(theirs):
        of_full, of_ternary = changes(theirs.T)
        full, ternary = (" / ".join(f"{c:+.2f}" for c in both) for both in (of_full, of_ternary))
        words = f"{ternary} against {full} points on these tasks"
        expected = of_ternary - of_full
    for model in reversed(results.models):
        place = list(results.setting["sizes"]).index(model)
        own = scored[scored.model == model].pivot_table("average", "seed", "variant")
        of_full, of_ternary = changes(own.reindex(columns=formats))
        estimate = Estimate((of_ternary - of_full).dropna())
        at_place = expected.iloc[place] if place < len(expected) else None
        yield _claim("accuracy", model, estimate, at_place, theirs=words)
