# SPDX-License-Identifier: Apache-2.0
"""The paper's claims as numbers per seed; `judge.RULE` says what follows from them."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from sparse_bitnet_paper.cells import (
    average_accuracy,
    paper_accuracies,
    paper_cells,
    paper_results,
)
from sparse_bitnet_paper.flips import flip_claims
from sparse_bitnet_paper.judge import (
    Claim,
    Estimate,
    Residual,
    losses_of,
    paired,
    residual_of,
)
from sparse_bitnet_paper.paper_runs import ABLATIONS
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.sweep_claims import sweep_claims
from sparse_bitnet_paper.table import NOTHING

STILL_MASS = 0.01
"""A near-zero mass that falls by less than one percentage point counts as not falling."""

_BASE, _TERNARY_MASK = ABLATIONS["baseline"], ABLATIONS["mask from quantized weight"]
_OTHERS = list(ABLATIONS.items())[1:]

K = TypeVar("K", bound=Hashable)


def claims(results: Results) -> list[Claim]:
    """The paper's claims on which there is a number, in its order, before `judged`."""
    found = [
        *_robustness(results),
        *sweep_claims(results),
        *_ablations(results),
        *flip_claims(results),
        *_schedule(results),
        *_near_zero(results),
        *_downstream(results),
    ]
    return [claim for claim in found if claim.estimate.values]


def _robustness(results: Results) -> Iterator[Claim]:
    paper = {"full": "+5.5 / +3.3 / +2.8", "ternary": "+1.2 / +1.2 / +1.0"}
    theirs = {model: _paper_costs(results, model) for model in results.models}
    for model in reversed(results.models):
        rows = {format: results.by_seed(format, model=model) for format in results.four_formats}
        claim = Claim(
            text="6:8 sparsity costs the ternary model less than the full-precision one",
            measure="100 log of perplexity over that of the own dense model, full minus ternary",
            model=model,
            paper=f"{paper['full']} against {paper['ternary']} % (0.5B / 1.5B / 3B)",
            expected=None if (cost := theirs[model]) is None else cost["full"] - cost["ternary"],
            estimate=cost_estimate(losses_of(rows)),
        )
        yield claim
        shown: list[Mapping[str, Mapping[int, ResultRow]]] = [{}, rows]
        for searched, what in (
            (results.at_chosen_rate(model), "all at the rate of the search"),
            (results.at_own_rates(model), "each at its own learning rate"),
        ):
            estimate = cost_estimate(losses_of(beside_the_search(searched or rows)))
            if searched not in shown and len(estimate.values) > 1:
                shown.append(searched)
                yield dataclasses.replace(
                    claim,
                    text=f"{claim.text}, {what}",
                    measure=f"{claim.measure}; seed 0, which chose the rate, is left out",
                    estimate=estimate,
                )
    penalties = {
        model: (cost["ternary"], ours)
        for model, cost in theirs.items()
        if cost is not None and (ours := results.relative("ternary-6:8", model=model))
    }
    if len(penalties) > 1:
        (small, (of_theirs, of_ours)), *_, (large, (at_theirs, at_ours)) = penalties.items()
        yield Claim(
            text="The ternary model's penalty shrinks with model size",
            measure=f"100 log of perplexity at 6:8 over dense, {small} minus {large}",
            model=large,
            paper="+1.2 against +1.0 %",
            expected=of_theirs - at_theirs,
            estimate=Estimate(values=paired(of_ours, at_ours, lambda a, b: 100 * math.log(a / b))),
        )


def beside_the_search(
    rows: Mapping[str, Mapping[int, ResultRow]],
) -> dict[str, dict[int, ResultRow]]:
    """Without seed 0, whose losses chose the learning rate and may be the lowest by luck."""
    return {name: {s: row for s, row in found.items() if s} for name, found in rows.items()}


def cost_estimate(
    losses: Mapping[str, Mapping[int, float]], residual: Residual | None = None
) -> Estimate:
    """How many points more sparsity costs full precision, from the four models' losses by seed.

    Only of seeds that have all four. `residual` is by default that of these models.
    """
    whole = set.intersection(*(set(found) for found in losses.values()))
    losses = {name: {seed: found[seed] for seed in sorted(whole)} for name, found in losses.items()}
    dense, full, dense_ternary, ternary = losses.values()
    return Estimate(
        values=tuple(
            100 * (full[seed] - dense[seed] - ternary[seed] + dense_ternary[seed]) for seed in full
        ),
        residual=residual or residual_of(losses),
        weight=200.0,
    )


def _paper_costs(results: Results, model: str) -> dict[str, float] | None:
    """100 log of sparse over dense perplexity of the paper's model of the same place among the sizes."""
    columns = list(paper_cells("6:8").values())
    place = list(results.setting["sizes"]).index(model)
    if place >= len(columns):
        return None
    cells = columns[place]
    return {
        sparse.weight: 100 * math.log(sparse.perplexity.mean / dense.perplexity.mean)
        for dense, sparse in (cells[:2], cells[2:])
    }


def _ablations(results: Results) -> Iterator[Claim]:
    paper = {_TERNARY_MASK: "+22.5 % (32.23 against 26.31)"}
    expected = {_TERNARY_MASK: 100 * math.log(32.23 / 26.31)}
    yield from _comparisons(
        results,
        {format: results.by_seed(format) for format in ABLATIONS.values()},
        _BASE,
        {
            format: f"Master-weight masks with dense gradients beat “{name}”"
            for name, format in _OTHERS
        },
        against="the baseline",
        paper=lambda format: paper.get(format, "higher, no number"),
        expected=expected.get,
    )


def _comparisons(
    results: Results,
    rows: Mapping[K, Mapping[int, ResultRow]],
    base: K,
    texts: Mapping[K, str],
    *,
    against: str,
    paper: Callable[[K], str],
    expected: Callable[[K], float | None],
) -> Iterator[Claim]:
    """A claim for each of `texts`: that its models have a higher perplexity than those of `base`."""
    residual = residual_of(losses_of(rows))
    for name, text in texts.items():
        yield Claim(
            text=text,
            measure=f"100 log of its perplexity over that of {against}",
            model=results.main,
            paper=paper(name),
            expected=expected(name),
            estimate=Estimate(
                values=paired(rows[name], rows[base], lambda a, b: 100 * (a.loss - b.loss)),
                residual=residual,
                weight=100 * math.sqrt(2),
            ),
        )


def _schedule(results: Results) -> Iterator[Claim]:
    table = paper_results()["dense_to_sparse_ppl_0.5B_6:8"]
    theirs = dict(zip(table["sparse_fraction_percent"], table["ppl"], strict=True))
    percents = results.setting["sparse_percents"]
    rows = {
        percent: results.by_seed(
            "ternary-6:8" if percent else "ternary-8:8", sparse_percent=percent
        )
        for percent in percents
    }
    if 100 not in rows:
        return
    yield from _comparisons(
        results,
        rows,
        100,
        {p: f"Sparse from scratch beats {p} % sparse steps" for p in percents if 0 < p < 100},
        against="sparse from scratch",
        paper=lambda p: f"{100 * (theirs[p] / theirs[100] - 1):+.1f} %" if p in theirs else "-",
        expected=lambda p: 100 * math.log(theirs[p] / theirs[100]) if p in theirs else None,
    )


def _near_zero(results: Results) -> Iterator[Claim]:
    for model in reversed(results.models):
        yield Claim(
            text="Near-zero mass falls over training for the ternary model",
            measure="P(|W| / mean|W| < 0.5) of all block weights, start minus end, in points",
            model=model,
            paper="falls, no number",
            estimate=Estimate(
                values=tuple(100 * fall for fall in _falls(results, "ternary-8:8", model))
            ),
        )
        yield Claim(
            text="Near-zero mass does not fall for the full-precision model",
            measure=f"the same, end minus start; a fall below {100 * STILL_MASS:g} point is none",
            model=model,
            paper="stays, no number",
            estimate=Estimate(
                values=tuple(-100 * fall for fall in _falls(results, "full-8:8", model))
            ),
            null=-100 * STILL_MASS,
        )


def _falls(results: Results, format: str, model: str) -> Iterator[float]:
    for row in results.by_seed(format, model=model).values():
        overall = results.weights(row)["overall"]
        yield overall[0] - overall[-1]


def _downstream(results: Results) -> Iterator[Claim]:
    scored = results.downstream()
    average = {(row.model, row.variant, row.seed): average_accuracy(found) for row, found in scored}
    tasks = scored[0][1] if scored else ()
    paper = [(b - a, d - c) for a, b, c, d in paper_accuracies(tasks).values()]
    full, ternary = (" / ".join(f"{change[i]:+.2f}" for change in paper) for i in (0, 1))
    for model in reversed(results.models):
        place = list(results.setting["sizes"]).index(model)
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
            paper=f"{ternary} against {full} points on these tasks" if paper else NOTHING,
            expected=paper[place][1] - paper[place][0] if place < len(paper) else None,
            estimate=Estimate(
                values=paired(changes["ternary"], changes["full"], lambda a, b: a - b)
            ),
        )
