# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the paper's claims, from made-up results for which the right verdicts are known."""

import dataclasses
import math
import statistics

import pandas as pd
import pytest

from made_up_results import SCALE, paper_perplexity
from sparse_bitnet_paper.claims import claims, collapse_densities
from sparse_bitnet_paper.runs import ABLATIONS
from sparse_bitnet_paper.statistics import (
    EXCLUDED,
    HOLDS,
    OPEN,
    OPPOSITE,
    Claim,
    Estimate,
    Residual,
    holm,
    judged,
    residual_of,
)


def verdicts(results):
    return {(claim.text, claim.model): claim.verdict for claim in judged(claims(results))}


def main_claims(results, model=SCALE.main):
    own = (claim for claim in claims(results) if claim.model == model)
    return [claim for claim in own if claim.text.startswith("6:8")]


def test_the_papers_own_numbers_uphold_every_claim(make_set):
    judgements = judged(claims(make_set()))
    assert {claim.verdict for claim in judgements} == {HOLDS}
    for claim in judgements:
        if claim.expected is not None:
            assert claim.estimate.mean == pytest.approx(claim.expected)
    by_text = {claim.text: claim for claim in judgements if claim.model == SCALE.main}
    sweep = by_text["2:4 sparsity costs the ternary model less than the full-precision one"]
    assert sweep.estimate.mean == pytest.approx(100 * math.log(26.03 / 21.91 * 25.99 / 27.48))
    masks = by_text["Master-weight masks with dense gradients beat “mask from quantized weight”"]
    assert masks.estimate.mean == pytest.approx(100 * math.log(32.23 / 26.31))
    assert masks.paper == "+22.5 % (32.23 against 26.31)"


def test_the_opposite_of_the_paper_refutes_its_comparisons(make_set):
    def swapped(config):
        other = {"full": "ternary", "ternary": "full"}
        weight, _, rest = config.format.partition("-")
        if "," in rest:
            return 20.0
        if config.sparse_fraction < 1:
            return 10.0
        return paper_perplexity(dataclasses.replace(config, format=f"{other[weight]}-{rest}"))

    by_claim = verdicts(make_set(swapped))
    compared = [text for text, _ in by_claim if "cost" in text or "beat" in text or "later" in text]
    assert {by_claim[key] for key in by_claim if key[0] in compared} == {OPPOSITE}


def test_two_seeds_decide_nothing(make_set):
    assert set(verdicts(make_set(seeds=2)).values()) == {f"{OPEN}, 1 more seed"}


def test_claims_without_runs_are_left_out(make_set):
    results = make_set(left_out=[ABLATIONS["mask without grad"]])
    assert not [claim for claim in claims(results) if "grad”" in claim.text]
    results.rows = results.rows[:0]
    assert claims(results) == []


def test_a_seed_counts_with_all_four_models(make_set):
    results = make_set()
    before = [(c.estimate.mean, c.estimate.half_width) for c in main_claims(results)]
    more = results.rows[(results.rows.variant == "full-8:8") & (results.rows.seed == 2)]
    results.rows = pd.concat([results.rows, more.assign(seed=3, loss=1.0)], ignore_index=True)
    assert [(c.estimate.mean, c.estimate.half_width) for c in main_claims(results)] == before


def test_collapse_is_where_the_straight_line_between_patterns_crosses(make_set):
    densities = collapse_densities(make_set())
    assert densities.full.between(0.5, 0.625).all()  # the paper: between 5:8 and 4:8
    assert densities.ternary.between(0.375, 0.5).all()  # between 4:8 and 3:8


def test_a_model_that_never_collapses_counts_as_doing_so_at_the_sparsest(make_set):
    def never(config):
        return 30.0 if config.format.startswith("ternary") else paper_perplexity(config)

    assert set(collapse_densities(make_set(never)).ternary) == {0.25}


def test_the_main_claim_is_judged_at_searched_rates_too(make_set):
    def value(config):
        # Dense full precision is best at twice the shared rate, and better than the others then.
        if config.format == "full-8:8" and config.learning_rate == 6e-3:
            return 18.0
        return paper_perplexity(config) * (1 if config.learning_rate == 3e-3 else 1.001)

    shared, together, own = main_claims(make_set(value))
    assert together.text == f"{shared.text}, all at the rate of the search"
    assert own.text == f"{shared.text}, each at its own learning rate"
    more = 100 * math.log(21.91 / 18.0)
    for searched in (together, own):
        assert searched.estimate.mean == pytest.approx(shared.estimate.mean + more, abs=0.2)
        assert searched.estimate.count == 2  # without the seed that chose the rate


def claim_of(values, expected=None, **more):
    texts = dict.fromkeys(("text", "short", "measure", "model", "paper"), "")
    return Claim(**texts, estimate=Estimate(values), expected=expected, **more)


@pytest.mark.parametrize(
    ("values", "expected", "verdict"),
    [
        ((1.0, 1.1, 0.9), None, HOLDS),
        ((1.0, 1.1, 0.9), 9.0, HOLDS),
        ((-1.0, -1.1, -0.9), 1.0, OPPOSITE),
        ((1.0, -1.0, 0.5), 20.0, EXCLUDED),
        ((5.0, 5.0), None, f"{OPEN}, 1 more seed"),
        ((5.0,), None, f"{OPEN}, at least 2 more seeds"),
        # Two tests are left: ((2.24 + 0.84) * 0.95)^2 is 8.6; with 11 degrees of freedom it takes twelve.
        ((0.1, 1.0, 2.0), 1.0, f"{OPEN}, 9 more seeds"),
        ((2.0, 3.0, 3.9), 6.0, OPEN),  # three suffice for six times the deviation
    ],
)
def test_a_verdict_needs_three_seeds_and_distance_from_zero_or_the_paper(values, expected, verdict):
    assert judged([claim_of(values, expected)])[0].verdict == verdict


def test_a_claim_may_have_to_exceed_another_number_than_zero():
    assert judged([claim_of((-0.2, -0.3, -0.1))])[0].verdict.startswith(OPEN)
    assert judged([claim_of((-0.2, -0.3, -0.1), null=-1.0)])[0].verdict == HOLDS


def test_more_claims_make_verdicts_stricter():
    claim = claim_of((1.0, 1.1, 0.7))
    assert claim.estimate.p_value(0.0) == pytest.approx(0.0162, abs=1e-3)
    assert judged([claim])[0].verdict == HOLDS
    unclear = claim_of((1.0, -1.0, 0.5))
    assert judged([claim, unclear])[0].verdict == HOLDS  # below 0.05 / 2
    assert judged([claim, unclear, unclear, unclear])[0].verdict.startswith(OPEN)
    assert list(holm([0.04, 0.001, 0.03])) == [False, True, False]


def test_intervals_agree_with_students_t():
    # R: t.test(c(1, 2, 4))$conf.int
    estimate = Estimate((1.0, 2.0, 4.0))
    assert estimate.mean - estimate.half_width == pytest.approx(-1.461250, abs=1e-6)
    assert estimate.mean + estimate.half_width == pytest.approx(6.127916, abs=1e-6)


def test_the_residual_is_that_of_a_two_way_layout():
    # R: summary(lm(y ~ m + s)): residual standard error on 2 degrees of freedom, no value missing.
    values = pd.DataFrame({"a": [1.0, 2.0, 4.0], "b": [2.0, 2.0, 7.0]})
    differences = [1.0, 0.0, 3.0]
    residual = residual_of(values)
    assert residual.freedom == 2
    assert residual.deviation == pytest.approx(statistics.stdev(differences) / math.sqrt(2))
    paired = Estimate(differences, residual, math.sqrt(2))
    assert paired.half_width == pytest.approx(Estimate(differences).half_width)
    values.loc[2, "b"] = None
    assert residual_of(values) == Residual(pytest.approx(0.5), 1)
    assert residual_of(values[:1]) is None
    assert residual_of(pd.DataFrame()) is None


@pytest.mark.parametrize("deviation", [0.3, 1.0, 7.0])
def test_seeds_needed_have_power_0_8(deviation):
    from scipy.stats import nct, t

    seeds, level = Estimate((-deviation, 0.0, deviation)).seeds_needed(1.0, 0.01), 0.01

    def power(count):
        noncentrality = math.sqrt(count) / deviation
        return nct.sf(t.isf(level / 2, count - 1), count - 1, noncentrality)

    assert power(seeds) >= 0.8
    assert seeds == 3 or power(seeds - 1) < 0.8
