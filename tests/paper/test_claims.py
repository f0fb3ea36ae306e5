# SPDX-License-Identifier: Apache-2.0
"""Verdicts on the paper's claims, from made-up results of which the right answer is known."""

import dataclasses
import json
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet_paper import downstream, drawings
from sparse_bitnet_paper.cells import paper_results
from sparse_bitnet_paper.claims import claims
from sparse_bitnet_paper.flips import flips_by_tenth
from sparse_bitnet_paper.judge import (
    EXCLUDED,
    HOLDS,
    OPEN,
    OPPOSITE,
    Claim,
    Estimate,
    Residual,
    judged,
    residual_of,
)
from sparse_bitnet_paper.page import Code, Figure, Section
from sparse_bitnet_paper.paper_runs import ABLATIONS, EXPERIMENTS, plan, with_seeds
from sparse_bitnet_paper.perplexity_tables import (
    other_text_table,
    perplexity_table,
    seed_table,
)
from sparse_bitnet_paper.rate_runs import IDEAS
from sparse_bitnet_paper.rate_tables import (
    ideas_table,
    near_zero_table,
    own_rates_table,
    recipe_table,
    search_table,
)
from sparse_bitnet_paper.result_row import ResultRow, write_rows
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.results_page import report_blocks
from sparse_bitnet_paper.scales import find_scale
from sparse_bitnet_paper.setting import make_setting
from sparse_bitnet_paper.sweep_claims import collapse_densities
from sparse_bitnet_paper.tables import (
    ablation_table,
    effort_table,
    overview_table,
    schedule_table,
    sweep_table,
)

SCALE = find_scale("cpu")
SEARCH = SCALE.size(SCALE.main).search
SIZES = dict(zip((size.model for size in SCALE.sizes), ("0.5B", "1.5B", "3B"), strict=True))
NOISE = (0.0, 0.004, -0.003)


def paper_perplexity(config: TrainConfig) -> float:
    """What the paper's model of this run has."""
    results = paper_results()
    weight, _, rest = config.format.partition("-")
    pattern, _, option = rest.partition(",")
    if option:
        return {"mask_source=ternary": 32.23}.get(option, 26.9)
    if config.sparse_fraction < 1:
        table = results["dense_to_sparse_ppl_0.5B_6:8"]
        place = table["sparse_fraction_percent"].index(round(100 * config.sparse_fraction))
        return table["ppl"][place]
    if config.model == SCALE.main:
        table = results["nm_sweep_ppl_0.5B"]
        name = "bf16" if weight == "full" else "bitnet"
        return table[name][table["patterns"].index(pattern)]
    table = results["validation_ppl"]
    kind = {"8:8": "dense", "6:8": "sparse"}[pattern]
    end = {"full": "bf16", "ternary": "bitnet"}[weight]
    name = f"{kind}_{end}" + ("_6:8" if kind == "sparse" else "")
    return table[name][table["models"].index(SIZES[config.model])]


def flip_rate(config: TrainConfig, share: float) -> tuple[float, float]:
    """(mean, noise): decaying; less without gradient or with a masked scale, noisy with ternary masks."""
    base = 0.02 * 0.02**share
    if "mask_gradient=masked" in config.format:
        return base / 4, base / 50
    if "mask_source=ternary" in config.format:
        return 2 * base, base / 2
    if "scale_source=masked" in config.format:
        return base / 2, base / 20
    return base, base / 20


def near_zero(config: TrainConfig, seed: int) -> list[float]:
    fall = 0.08 if config.format.startswith("ternary") else -0.01
    return [0.31 + 0.001 * seed, 0.31 + 0.001 * seed - fall]


PROVENANCE = {
    "hardware": "a machine",
    "commit": "c",
    "date": "2026-01-02",
    "versions": {"torch": "1"},
}


def result_set(
    folder_path, perplexity=paper_perplexity, seeds=3, left_out=(), scale=SCALE, names=EXPERIMENTS
) -> Results:
    """Results of a whole scale, cpu, with these perplexities, a little different by seed."""
    results = Results(folder_path)
    text = {"train": {"tokens": 9, "vocab_size": 9}, "validation": {"tokens": 9}}
    results.open(make_setting(scale, text, "cpu", "float32"))
    for run in plan(scale, list(names), seeds):
        config = run.config
        if config.format in left_out:
            continue
        value = perplexity(config) * (1 + NOISE[config.seed])
        curves, weights = f"curves/{run.name}.jsonl", f"weights/{run.name}.json"
        points = []
        for place in range(100):
            rate, noise = flip_rate(config, place / 100)
            points.append(
                {"step": 10 * place + 10, "loss": 3, "flip_rate": rate, "flip_noise": noise}
            )
        results.write(curves, "".join(json.dumps(point) + "\n" for point in points))
        if run.is_dense:
            results.write(weights, json.dumps({"overall": near_zero(config, config.seed)}))
        results.rows.append(
            ResultRow(
                experiment="cpu",
                name=run.name,
                format=config.format,
                seed=config.seed,
                model=config.model,
                steps=config.steps,
                tokens=1000,
                perplexity=value,
                loss=math.log(value),
                validation_tokens=100,
                training_loss=3.0,
                zero_fraction=0.4,
                flip_rate=None,
                seconds=1.0,
                checkpoint="",
                config=dataclasses.asdict(config),
                provenance=PROVENANCE,
                other_text={"name": "web", "tokens": 9, "perplexity": 2 * value},
                curves=curves,
                weights=weights if run.is_dense else None,
                near_zero_mass=0.3,
                code_zero_fraction=0.3,
                epochs=1.0,
                tokens_per_weight=1.0,
                tokens_per_second=1.0,
                device="cpu",
                precision="float32",
            )
        )
    return results


def verdicts(results: Results) -> dict[tuple[str, str], str]:
    return {(claim.text, claim.model): claim.verdict for claim in judged(claims(results))}


def test_the_papers_own_numbers_uphold_every_claim(tmp_path):
    found = judged(claims(result_set(tmp_path)))
    assert {claim.verdict for claim in found} == {HOLDS}
    assert len(found) == 3 + 1 + 2 + 3 + 5 + 3 + 6
    by_text = {claim.text: claim for claim in found if claim.model == SCALE.main}
    sweep = by_text["2:4 sparsity costs the ternary model less than the full-precision one"]
    assert sweep.estimate.mean == pytest.approx(
        100 * math.log(26.03 / 21.91 * 25.99 / 27.48), abs=0.05
    )
    masks = by_text["Master-weight masks with dense gradients beat “mask from quantized weight”"]
    assert masks.estimate.mean == pytest.approx(100 * math.log(32.23 / 26.31), abs=0.01)
    assert all(
        claim.estimate.mean == pytest.approx(claim.expected)
        for claim in found
        if claim.expected is not None
    )
    assert sum(claim.expected is not None for claim in found) == 3 + 1 + 1 + 1 + 3


def test_the_opposite_of_the_paper_refutes_its_comparisons(tmp_path):
    def swapped(config):
        other = {"full": "ternary", "ternary": "full"}
        weight, _, rest = config.format.partition("-")
        if "," in rest:
            return 20.0
        if config.sparse_fraction < 1:
            return 10.0
        return paper_perplexity(dataclasses.replace(config, format=f"{other[weight]}-{rest}"))

    found = verdicts(result_set(tmp_path, swapped))
    compared = [text for text, _ in found if "cost" in text or "beat" in text or "later" in text]
    assert len(compared) == 3 + 2 + 3 + 3
    assert {found[key] for key in found if key[0] in compared} == {OPPOSITE}


def test_two_seeds_decide_nothing(tmp_path):
    found = set(verdicts(result_set(tmp_path, seeds=2)).values())
    assert found == {f"{OPEN}, 1 more seed"}


def test_claims_without_runs_are_left_out(tmp_path):
    results = result_set(tmp_path, left_out=[ABLATIONS["mask without grad"]])
    assert not [claim for claim in claims(results) if "grad”" in claim.text]
    results.rows.clear()
    assert claims(results) == []


def test_what_is_not_whole_yet_changes_no_claim(tmp_path):
    results = result_set(tmp_path)

    def main_claims():
        return [claim for claim in judged(claims(results)) if claim.text.startswith("6:8")]

    before = main_claims()
    row = next(row for row in results.rows if row.variant == "full-8:8" and row.seed == 2)
    results.rows.append(dataclasses.replace(row, name="of a fourth seed", seed=3, loss=1.0))
    assert main_claims() == before
    large = next(row for row in results.rows if row.model == "qwen2.5-1m" and not row.weights)
    results.setting["sizes"]["qwen2.5-3m"] = large.steps
    results.rows.append(dataclasses.replace(large, model="qwen2.5-3m"))
    shrinks = [claim for claim in claims(results) if "shrinks" in claim.text]
    assert [claim.model for claim in shrinks] == ["qwen2.5-1m"]


def test_collapse_is_where_the_straight_line_between_patterns_crosses(tmp_path):
    results = result_set(tmp_path)
    full, ternary = collapse_densities(results)
    assert 0.5 < full[0] < 0.625  # the paper: between 5:8 and 4:8
    assert 0.375 < ternary[0] < 0.5  # between 4:8 and 3:8


def test_without_a_collapse_there_is_nothing_to_compare(tmp_path):
    results = result_set(tmp_path, lambda config: 30.0)
    assert collapse_densities(results) == ({}, {})
    assert not [claim for claim in claims(results) if "later" in claim.text]


def test_a_model_that_never_collapses_counts_as_doing_so_at_the_sparsest(tmp_path):
    def never(config):
        return 30.0 if config.format.startswith("ternary") else paper_perplexity(config)

    _, ternary = collapse_densities(result_set(tmp_path, never))
    assert set(ternary.values()) == {0.25}


def test_other_learning_rates_and_schedules_stay_out_of_the_comparisons(tmp_path):
    results = result_set(tmp_path)
    rows = results.by_seed("ternary-6:8")
    assert list(rows) == [0, 1, 2]
    assert {row.config["learning_rate"] for row in rows.values()} == {
        results.learning_rate(SCALE.main)
    }
    assert {row.sparse_percent for row in rows.values()} == {100}
    assert {r.sparse_percent for r in results.by_seed("ternary-8:8").values()} == {0}
    halves = results.by_seed("ternary-6:8", sparse_percent=50)
    assert {row.perplexity for row in halves.values()}.isdisjoint(
        row.perplexity for row in rows.values()
    )


def test_tables_show_the_papers_numbers_beside_ours(tmp_path):
    results = result_set(tmp_path, seeds=1)
    table = perplexity_table(results)
    assert table is not None
    texts = {line[0]: line[1:] for line in table.lines}
    assert texts["ternary, 6:8"][:3] == ("26.31", "+0.32", "+1.2")
    assert texts["full, 6:8"][-2:] == ("16.48", "+2.8")
    sweep = {row[0]: row[1:] for row in sweep_table(results).lines}
    assert sweep["2:4"] == ("26.03", "+18.8", "27.48", "+5.7", "+18.8", "+5.7")
    schedule = {row[0]: row[1:] for row in schedule_table(results).lines}
    assert schedule["25"] == ("27.48", "+4.45", "27.48", "+4.4")
    ablation = {row[0]: row[1:] for row in ablation_table(results).lines}
    assert ablation["mask from quantized weight"][:2] == ("32.23", "+22.50")


def test_the_search_marks_the_rate_in_use_and_each_formats_best(tmp_path):
    results = result_set(tmp_path, lambda config: 20 + 1000 * config.learning_rate, seeds=1)
    rows = search_table(results).lines
    used = [row[0] for row in rows if "used" in row[0]]
    assert used == [f"{SCALE.main}, {results.learning_rate(SCALE.main):g} (used)"]
    assert len(rows) == len(SEARCH)
    best = own_rates_table(results)
    lowest = f"{min(SEARCH):g}, the outermost"
    assert [row[:2] for row in best.lines] == [
        (f"{SCALE.main}, {label}", lowest)
        for label in ("full, dense", "full, 6:8", "ternary, dense", "ternary, 6:8")
    ]
    assert best.notes == []


@pytest.fixture(scope="module")
def paper_set(tmp_path_factory):
    """What scale cpu-paper knows and cpu does not: rates, recipe, near-zero mass."""
    found = {"0.003": 31.0, "0.006": 30.0, "0.012": 32.0}

    def value(config):
        rate = found.get(f"{config.learning_rate:g}", 40.0)
        worse = 1.1 if config.format.endswith("6:8") and config.format.startswith("full") else 1.0
        return rate * worse * (2 if config.masters == "bf16" else 1)

    names = ("table2", "search", "recipe", "near-zero", "ideas")
    scale = dataclasses.replace(
        find_scale("cpu-paper"), seeds=dict.fromkeys(("search", "recipe", "near-zero", "ideas"), 3)
    )
    return result_set(tmp_path_factory.mktemp("paper"), value, scale=scale, names=names)


def test_the_main_claim_is_judged_at_each_models_own_rate_too(tmp_path):
    def value(config):
        # Dense full precision is best at twice the shared rate, and better than the others then.
        own = config.format == "full-8:8" and config.learning_rate == 6e-3
        return 18.0 if own else paper_perplexity(config)

    found = {
        claim.text: claim
        for claim in claims(result_set(tmp_path, value))
        if claim.model == SCALE.main and claim.text.startswith("6:8")
    }
    shared, together, own = found.values()
    first, *more_texts = found
    assert more_texts == [
        f"{first}, {what}"
        for what in ("all at the rate of the search", "each at its own learning rate")
    ]
    more = 100 * math.log(21.91 / 18.0)
    for searched in (together, own):
        assert searched.estimate.mean == pytest.approx(shared.estimate.mean + more, abs=0.01)
        assert len(searched.estimate.values) == 2  # without the seed that chose the rate


def test_each_model_has_its_own_rate_inside_the_grid(paper_set):
    table = own_rates_table(paper_set)
    lines = {line[0]: line[1:] for line in table.lines}
    assert lines["qwen2.5-0.3m, full, 6:8"][0] == "0.006"
    assert lines["qwen2.5-1m, full, 6:8"][0] == "0.006, the outermost"
    assert lines["qwen2.5-0.3m, full, 6:8"][1] == "3"
    assert lines["qwen2.5-0.3m, full, 6:8"][3].startswith("+10.0")
    assert lines["qwen2.5-0.3m, ternary, dense"][3] == "-"
    *notes, last = table.notes
    assert [note.partition(" points [")[0] for note in notes] == [
        f"{model}, full minus ternary: +9.53"
        for model in ("qwen2.5-0.3m", "qwen2.5-0.5m", "qwen2.5-1m")
    ]
    assert all(note.endswith("2 seeds.") for note in notes)
    assert last == "The differences leave out seed 0, which chose the rates."


def test_a_size_may_have_a_rate_of_its_own_and_rates_of_several_seeds_are_compared(paper_set):
    table = search_table(paper_set)
    used = [line[0] for line in table.lines if "used" in line[0]]
    assert used == [f"qwen2.5-{size}, 0.006 (used)" for size in ("0.3m", "0.5m", "1m")]
    beside = " without seed 0, the search's"
    assert [note.partition(", full minus ternary: +9.53")[0] for note in table.notes[1:]] == [
        *("qwen2.5-0.3m, " + rate for rate in (f"0.003{beside}", "0.006", f"0.012{beside}")),
        *("qwen2.5-0.5m, " + rate for rate in (f"0.003{beside}", "0.006")),
        *("qwen2.5-1m, " + rate for rate in (f"0.0015{beside}", f"0.003{beside}", "0.006")),
    ]
    rows = paper_set.by_seed("full-8:8", model="qwen2.5-3m")
    assert {row.config["learning_rate"] for row in rows.values()} == {3e-3}


def test_the_published_recipe_stands_beside_ours(paper_set):
    lines = {line[0]: line[1:] for line in recipe_table(paper_set).lines}
    assert next(iter(lines)) == "ours"
    assert len(lines) == 6
    assert lines["ours"][0].startswith("30.01")
    assert lines["bf16 masters"][0].startswith("60.02")
    assert lines["512 sequences a step"][2].startswith("+10.0")
    # One residual for all: the same interval wherever there are as many seeds.
    assert {line[-1] for line in lines.values()} == {"+9.53\n[+9.53, +9.53]"}


def test_near_zero_mass_is_shown_over_rate_and_initial_weights(paper_set):
    table = near_zero_table(paper_set)
    assert [line[0] for line in table.lines] == [
        f"{initial}, {rate}"
        for initial in ("normal", "uniform")
        for rate in ("0.0003", "0.003", "0.006", "0.012")
    ]
    assert table.lines[0][2].startswith("+1.00")
    assert table.lines[0][4].startswith("-8.00")
    assert "falls, as the paper says, at: normal, 0.0003; normal, 0.003" in table.notes[0]
    assert "rises at: none" in table.notes[0]


def test_ideas_stand_beside_the_papers_own(paper_set):
    lines = {line[0]: line[1:] for line in ideas_table(paper_set).lines}
    assert list(lines) == list(IDEAS)
    assert lines["the paper's"][2] == "-"
    assert lines["score wanda"][:1] == ("ternary-6:8,score=wanda",)
    assert lines["score wanda"][2].startswith("+0.00")


def test_sets_beside_the_paper_have_chapters_of_their_tables_alone(tmp_path):
    scale = dataclasses.replace(find_scale("cpu-paper"), seeds={"ideas": 3})
    sets = [
        result_set(tmp_path / name, lambda config: 30.0, scale=scale, names=("ideas",))
        for name in ("one", "two")
    ]
    blocks = report_blocks(sets)
    ideas = "Other scores, quantisers, activations and schedules"
    assert [block.title for block in blocks if isinstance(block, Section)] == [
        title for name in ("one", "two") for title in (f"Scale {name}", f"{ideas}, {name}")
    ]
    commands = {block.text for block in blocks if isinstance(block, Code)}
    assert commands == {
        "sparse-bitnet reproduce ideas --scale cpu-paper --data DATA --other-text TEXT"
    }


def test_figures_of_two_sets_of_one_scale_have_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "dense_figures", lambda found: [Figure(found.name, "", "")])
    sets = [result_set(tmp_path / name / "cpu", names=("search",)) for name in ("one", "two")]
    names = [block.name for block in report_blocks(sets) if isinstance(block, Figure)]
    assert names == ["cpu", "cpu-2"]


def test_one_rate_that_is_best_for_each_and_for_all_is_one_claim(tmp_path):
    scale = dataclasses.replace(find_scale("cpu-paper"), seeds={"search": 3})
    names = ("table2", "search")
    lowest = result_set(
        tmp_path, lambda config: 30 + config.learning_rate, scale=scale, names=names
    )
    found = [c.text for c in claims(lowest) if c.model == scale.main and "6:8 sparsity" in c.text]
    assert [text.rpartition(", ")[2] for text in found[1:]] == ["all at the rate of the search"]


def test_as_many_seeds_are_scored_as_are_asked_for(tmp_path, monkeypatch):
    found = {"results": {"piqa": {"acc,none": 0.5}}, "n-samples": {"piqa": {"effective": 10}}}
    monkeypatch.setattr(downstream, "evaluate_tasks", lambda *arguments, **options: found)
    results = result_set(tmp_path, seeds=2, names=("table2",))
    one_seed = with_seeds(SCALE, 1)
    write_rows(tmp_path / "results.jsonl", results.rows)
    assert downstream.score(one_seed, tmp_path, tasks=["piqa"], seeds=2) == len(results.rows) == 24


def test_the_overview_has_the_verdicts_of_each_set_side_by_side(tmp_path):
    found = judged(claims(result_set(tmp_path)))
    table = overview_table({"one": found, "two": found[1:3]})
    assert list(table.head) == ["claim", "one", "two"]
    assert len(table.lines) == len({claim.text for claim in found})
    costs = next(line for line in table.lines if line[0] == found[2].text)
    assert costs[1].split("; ")[-1] == "0.3m: holds, +4.11 points"
    assert costs[2].count("points") == 2
    assert {line[2] for line in table.lines if line[0] != found[2].text} == {"-"}


def test_seeds_that_decide_two_points_follow_from_the_residual(tmp_path, paper_set):
    assert [line[-1] for line in seed_table(paper_set).lines] == ["0"] * 4
    swing = {0: 0.9, 1: 1.0, 2: 1.1}

    def noisy(config):
        sparse = config.format == "full-6:8"
        return paper_perplexity(config) * (swing[config.seed] if sparse else 1)

    results = result_set(tmp_path, noisy, names=["table2"])
    _, seeds, deviation, contrast, own, needed, still = seed_table(results).lines[0]
    assert own.startswith("[-")
    assert float(contrast) == pytest.approx(2 * float(deviation.removesuffix(" %")), abs=0.02)
    # One more than with a deviation that is known.
    assert int(needed) == 1 + math.ceil((2.8 * float(contrast) / 2) ** 2) == int(seeds) + int(still)
    assert seed_table(result_set(tmp_path / "one", seeds=1, names=["table2"])) is None


def test_speed_is_a_share_of_the_machines_products(paper_set):
    assert {line[-2] for line in effort_table(paper_set).lines} == {"-"}
    machine = {"hardware": "a machine", "threads": 1, "precision": "float32"}
    paper_set.write("machines.jsonl", json.dumps({**machine, "operations_per_second": 3e7}) + "\n")
    shares = [line[-2] for line in effort_table(paper_set).lines]
    assert all(share.endswith(" %") for share in shares)
    assert sorted(shares, key=lambda share: float(share[:-2])) == shares  # larger models do more


def test_the_other_text_has_a_table(paper_set):
    table = other_text_table(paper_set)
    assert table.head[2:] == ("PPL of web", "Δ %")
    assert table.lines[0][:2] == ("qwen2.5-0.3m, full, dense", "3")
    assert table.lines[0][2].startswith("60.02")


def claim_of(values: tuple[float, ...], expected: float | None = None, **estimate) -> Claim:
    return Claim(
        text="",
        measure="",
        model="",
        paper="",
        estimate=Estimate(values=values, **estimate),
        expected=expected,
    )


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
    claim = claim_of((-0.2, -0.3, -0.1))
    assert judged([claim])[0].verdict.startswith(OPEN)
    assert judged([dataclasses.replace(claim, null=-1.0)])[0].verdict == HOLDS


def test_the_more_claims_the_stricter():
    claim = claim_of((1.0, 1.1, 0.7))  # p = 0.016
    assert claim.estimate.p_value(0.0) == pytest.approx(0.0162, abs=1e-3)
    assert judged([claim])[0].verdict == HOLDS
    unclear = claim_of((1.0, -1.0, 0.5))
    assert judged([claim, unclear])[0].verdict == HOLDS  # below 0.05 / 2
    assert judged([claim, unclear, unclear, unclear])[0].verdict.startswith(OPEN)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12), st.floats(-50, 50))
def test_intervals_move_with_their_values(values, shift):
    estimate, moved = (
        Estimate(values=tuple(values)),
        Estimate(values=tuple(v + shift for v in values)),
    )
    assert moved.mean == pytest.approx(estimate.mean + shift, abs=1e-6)
    assert moved.half_width == pytest.approx(estimate.half_width, abs=1e-5)


def test_intervals_agree_with_students_t():
    # R: t.test(c(1, 2, 4))$conf.int
    estimate = Estimate(values=(1.0, 2.0, 4.0))
    assert estimate.mean - estimate.half_width == pytest.approx(-1.461250, abs=1e-6)
    assert estimate.mean + estimate.half_width == pytest.approx(6.127916, abs=1e-6)


def test_the_residual_is_that_of_a_two_way_layout():
    # R: summary(lm(y ~ m + s)): residual standard error on 2 degrees of freedom, no value missing.
    values = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 2.0, 1: 2.0, 2: 7.0}}
    differences = [1.0, 0.0, 3.0]
    residual = residual_of(values)
    assert residual.freedom == 2
    assert residual.deviation == pytest.approx(statistics.stdev(differences) / math.sqrt(2))
    paired = Estimate(values=tuple(differences), residual=residual, weight=math.sqrt(2))
    assert paired.half_width == pytest.approx(Estimate(values=tuple(differences)).half_width)
    del values["b"][2]
    assert residual_of(values) == Residual(pytest.approx(0.5), 1)
    assert residual_of({"a": {0: 1.0}, "b": {0: 2.0}}) is None
    assert residual_of({}) is None


def test_flips_are_compared_by_tenths(tmp_path):
    found = flips_by_tenth(result_set(tmp_path))
    assert [tenth.mean for tenth in found["mask without grad"]] == pytest.approx([-2.0] * 10)
    assert [tenth.mean for tenth in found["mask from quantized weight"]] == pytest.approx(
        [1.0] * 10
    )


@pytest.mark.parametrize("deviation", [0.3, 1.0, 7.0])
def test_the_seeds_that_are_asked_for_see_the_effect_four_times_in_five(deviation):
    from scipy.stats import nct, t

    estimate = Estimate(values=(-deviation, 0.0, deviation))
    seeds, level = estimate.seeds_needed(1.0, 0.01), 0.01

    def power(count):
        noncentrality = math.sqrt(count) / deviation
        return nct.sf(t.isf(level / 2, count - 1), count - 1, noncentrality)

    assert power(seeds) >= 0.8
    assert seeds == 3 or power(seeds - 1) < 0.8


def test_masks_that_come_to_rest_count_as_still(tmp_path):
    results = result_set(tmp_path)
    for row in results.by_seed(ABLATIONS["mask without grad"]).values():
        curve = results.curves(row)
        moved = [
            {"step": part["step"], "loss": 3.0} if part["step"] > 550 else part for part in curve
        ]
        results.write(row.curves, "".join(json.dumps(part) + "\n" for part in moved))
    still = flips_by_tenth(results)["mask without grad"]
    assert still[4].mean == pytest.approx(-2.0)
    assert all(tenth.mean < -10 for tenth in still[6:])
    assert "0.000" in ablation_table(results).lines[1][4]
