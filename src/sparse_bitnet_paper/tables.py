# SPDX-License-Identifier: Apache-2.0
"""The tables of a set: claims, sweep, designs, schedules, weights, and what all of it took."""

import math
import statistics
from collections.abc import Mapping, Sequence

from sparse_bitnet.presets import PRESETS
from sparse_bitnet.training.footprint import flops_per_token
from sparse_bitnet_paper.cells import paper_results, paper_sweep
from sparse_bitnet_paper.flips import flip_curve, flips_by_tenth
from sparse_bitnet_paper.judge import Claim
from sparse_bitnet_paper.paper_runs import ABLATIONS
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.spread import percent_over, perplexities, seeds_note, spread_text
from sparse_bitnet_paper.table import NOTHING, Table


def claim_table(claims: Sequence[Claim]) -> Table:
    """One line per claim and model size."""
    head = ("claim", "model", "verdict", "measured", "what is measured", "paper")
    body = [
        (claim.text, claim.model, claim.verdict, claim.result, claim.measure, claim.paper)
        for claim in claims
    ]
    return Table(head, body, numeric=False)


def overview_table(chapters: Mapping[str, Sequence[Claim]]) -> Table:
    """A line per claim, a column per set of results, by its name."""
    texts = dict.fromkeys(claim.text for found in chapters.values() for claim in found)
    body = [(text, *(_verdicts(text, found) for found in chapters.values())) for text in texts]
    return Table(("claim", *chapters), body, numeric=False)


def _verdicts(text: str, claims: Sequence[Claim]) -> str:
    return (
        "; ".join(
            f"{claim.model.removeprefix('qwen2.5-')}: {claim.verdict.partition(',')[0]}, "
            f"{claim.result.partition(' [')[0]}"
            for claim in claims
            if claim.text == text
        )
        or NOTHING
    )


def sweep_table(results: Results) -> Table:
    """Raw perplexities of the sweep and their increase over dense (appendix table, figure 2)."""
    paper = paper_sweep()
    body, seeds = [], {}
    for pattern in results.setting["patterns"]:
        line = [pattern]
        both = {weight: results.by_seed(f"{weight}-{pattern}") for weight in ("full", "ternary")}
        seeds[pattern] = min(map(len, both.values()))
        for weight, rows in both.items():
            dense = results.by_seed(f"{weight}-8:8")
            over = NOTHING if pattern == "8:8" else percent_over(rows, dense, "+.1f")
            line += [perplexities(rows), over]
        for theirs in paper.values():
            line.append(f"{100 * (theirs[pattern] / theirs['8:8'] - 1):+.1f}")
        body.append(tuple(line))
    ours = ("full PPL", "full %", "ternary PPL", "ternary %")
    head = ("pattern", *ours, "paper full %", "paper ternary %")
    return Table(head, body, notes=[seeds_note(seeds)])


def ablation_table(results: Results) -> Table:
    """The four training designs: perplexity, and how much their masks move (figure 4)."""
    base = results.by_seed(ABLATIONS["baseline"])
    paper = {"baseline": "26.31", "mask from quantized weight": "32.23 (+22.5 %)"}
    body, seeds = [], {}
    for name, format in ABLATIONS.items():
        rows = results.by_seed(format)
        seeds[name] = len(rows)
        moves = [_quarters(results, row) for row in rows.values()]
        body.append(
            (
                name,
                perplexities(rows),
                NOTHING if format == ABLATIONS["baseline"] else percent_over(rows, base),
                *(spread_text([100 * move[part] for move in moves], ".3f") for part in (0, 1)),
                paper.get(name, "higher, no number"),
            )
        )
    flips = ("flips first quarter, %", "flips last quarter, %")
    head = ("design", "PPL", "% over baseline", *flips, "paper PPL")
    return Table(head, body, notes=[seeds_note(seeds)])


def flip_table(results: Results) -> Table | None:
    """By how many octaves the designs' masks flip more than the baseline's, tenth by tenth."""
    found = flips_by_tenth(results)
    if not found:
        return None
    body = [
        (name, *(f"{tenth.mean:+.2f}\n±{tenth.half_width:.2f}" for tenth in tenths))
        for name, tenths in found.items()
    ]
    head = ("flips over the baseline's, octaves", *(f"{10 * n} %" for n in range(1, 11)))
    return Table(head, body, notes=["By tenths of the steps; ± the 95 % interval of the seeds."])


def _quarters(results: Results, row: ResultRow) -> tuple[float, float]:
    """Mean flip rate of the first and of the last quarter of the steps."""
    if not (curve := flip_curve(results, row)):
        return math.nan, math.nan
    first = [part["flip_rate"] for part in curve if part["step"] <= max(row.steps / 4, 2)]
    last = [part["flip_rate"] for part in curve if part["step"] > row.steps * 3 / 4]
    return statistics.fmean(first), statistics.fmean(last)


def schedule_table(results: Results) -> Table:
    """Dense-to-sparse schedules (table 4)."""
    always = results.by_seed("ternary-6:8")
    paper = paper_results()["dense_to_sparse_ppl_0.5B_6:8"]
    theirs = dict(zip(paper["sparse_fraction_percent"], paper["ppl"], strict=True))
    theirs[0] = paper["dense_ppl"]
    body, seeds = [], {}
    for percent in results.setting["sparse_percents"]:
        format = "ternary-6:8" if percent else "ternary-8:8"
        rows = results.by_seed(format, sparse_percent=percent)
        seeds[f"{percent} %"] = len(rows)
        name = {0: "0 (dense training)", 100: "100 (sparse from scratch)"}.get(
            percent, str(percent)
        )
        body.append(
            (
                name,
                perplexities(rows),
                NOTHING if percent == 100 else percent_over(rows, always),
                f"{theirs[percent]:.2f}",
                f"{100 * (theirs[percent] / theirs[100] - 1):+.1f}",
            )
        )
    head = ("sparse steps, %", "PPL", "% over 100", "paper PPL", "paper % over 100")
    return Table(head, body, notes=[seeds_note(seeds)])


def polarisation_table(results: Results) -> Table:
    """Near-zero mass of the dense models at the start and the end of training."""
    body = []
    for model in results.models:
        for weight in ("full", "ternary"):
            rows = results.by_seed(f"{weight}-8:8", model=model)
            if not rows:
                continue
            masses = [results.weights(row)["overall"] for row in rows.values()]
            body.append(
                (
                    f"{model}, {weight}",
                    spread_text([100 * mass[0] for mass in masses], ".1f"),
                    spread_text([100 * mass[-1] for mass in masses], ".1f"),
                )
            )
    head = ("dense model", "near-zero mass at the start, %", "at the end, %")
    return Table(head, body)


def effort_table(results: Results) -> Table:
    """What was trained: runs, tokens and speed by model size."""
    body = []
    for model in results.models:
        rows = [row for row in results.rows if row.model == model]
        one = rows[0]
        body.append(
            (
                model,
                f"{len(rows)}",
                f"{one.steps:,}",
                f"{one.tokens:,}",
                f"{one.tokens_per_weight:.1f}",
                f"{one.tokens / PRESETS[model].block_weights:.1f}",
                f"{one.epochs:.2f}",
                f"{statistics.median(row.tokens_per_second for row in rows):,.0f}",
                _share_used(results, rows),
                f"{sum(row.seconds for row in rows) / 60:.0f}",
            )
        )
    tokens = ("tokens a run", "tokens per weight", "per block weight", "epochs", "tokens/s")
    head = ("model", "runs", "steps", *tokens, "of the product rate", "minutes")
    note = (
        "Of the product rate: operations a second of the model (dense products, forward and backward) "
        "over those of large matrix products of the same type on as many threads. Steps and what follows "
        "from them: where a table does not vary them."
    )
    return Table(head, body, notes=[note])


def _share_used(results: Results, rows: Sequence[ResultRow]) -> str:
    shares = []
    for row in rows:
        if rate := results.product_rate(row):
            vocab = results.setting["data"]["train"].get("vocab_size")
            length = row.config["sequence_length"]
            operations = flops_per_token(PRESETS[row.model], length, vocab)
            shares.append(operations * row.tokens_per_second / rate)
    return f"{100 * statistics.median(shares):.1f} %" if shares else NOTHING
