# SPDX-License-Identifier: Apache-2.0
"""Tables of a set of results, and their rendering on a terminal and in Markdown."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sparse_bitnet.errors import UserError
from sparse_bitnet_paper.claims import NOTHING, cost_estimate
from sparse_bitnet_paper.paper import paper, paper_gains, paper_perplexities
from sparse_bitnet_paper.results import Results, read_lines
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.statistics import Estimate, holm, residual_of

if TYPE_CHECKING:
    from rich.console import Console

CHANCE = {"hellaswag": 0.25, "arc_easy": 0.25, "piqa": 0.5, "boolq": 0.622, "copa": 0.5}
"""Accuracy of guessing; for BoolQ, of always giving its more frequent answer."""


@dataclass(frozen=True)
class Table:
    """Cells of text; a second line in a cell is the spread."""

    frame: pd.DataFrame
    """The index is the first column, its name that column's head."""
    notes: Sequence[str] = ()
    numeric: bool = True
    """Whether all columns but the first hold numbers."""

    def markdown(self) -> str:
        """Return a pipe table and the notes."""
        frame, align = self.frame, "---:" if self.numeric else "---"
        heads = [frame.index.name, *frame.columns]
        lines = [heads, ["---", *[align] * len(frame.columns)], *frame.itertuples()]
        notes = (f"\n{note}\n" for note in self.notes)
        return "".join((*(f"{pipe_line(line)}\n" for line in lines), *notes))

    def print(self, console: "Console", title: str) -> None:
        """Print table and notes on a terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        # `Text` keeps rich from reading names in brackets as styles.
        style: Any = {"title_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False}
        rich = RichTable(title=Text(title, "bold"), **style)
        rich.add_column(self.frame.index.name, no_wrap=self.numeric)
        for name in self.frame.columns:
            justify: Any = "right" if self.numeric else "left"
            head = textwrap.fill(name, 6, break_long_words=False, break_on_hyphens=False)
            rich.add_column(head, justify=justify, no_wrap=self.numeric)
        for line in self.frame.itertuples():
            rich.add_row(*(Text(cell) for cell in line))
        console.print(rich)
        for note in self.notes:
            console.print(note, style="dim", highlight=False)


def pipe_line(cells: Iterable[str]) -> str:
    """Return a line of a Markdown table."""
    texts = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(texts)} |"


def table(
    lines: Iterable[Mapping[str, str]], notes: Sequence[str] = (), *, numeric: bool = True
) -> Table:
    """Return a table from lines, each a mapping of column to cell."""
    frame = pd.DataFrame(lines)
    return Table(frame.set_index(frame.columns[0]), notes, numeric)


def spread(values: Iterable[float], form: str) -> str:
    """Return the mean of the known values and, for several seeds, their range on a second line."""
    known = pd.Series(values, dtype=float).dropna()
    if known.empty:
        return NOTHING
    text = f"{known.mean():{form}}"
    return text if len(known) == 1 else f"{text}\n{known.min():{form}}..{known.max():{form}}"


def percent_over(rows: pd.DataFrame, base: pd.DataFrame, form: str = "+.2f") -> str:
    """Return by how many percent perplexities exceed those of `base`, seed by seed."""
    return spread(100 * (rows.perplexity / base.perplexity - 1), form)


def label(format: str) -> str:
    """Return the name of one of the four models: "full, dense", "ternary, 6:8"."""
    weight, _, pattern = format.partition("-")
    return f"{weight}, {'dense' if pattern == DENSE_PATTERN else pattern}"


def dense_of(format: str) -> str:
    """Return the dense format of the same weights."""
    return f"{format.partition('-')[0]}-{DENSE_PATTERN}"


def perplexities(rows: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return perplexities of the seeds that all models have: a row per seed, a column per format."""
    return pd.DataFrame({format: own.perplexity for format, own in rows.items()}).dropna()


def four_models(results: Results, model: str) -> dict[str, pd.DataFrame]:
    """Return the runs of the four models at one size, of the seeds that have all four; {} without one."""
    rows = {format: results.by_seed(format, model=model) for format in results.four_formats}
    seeds = sorted(set.intersection(*(set(own.index) for own in rows.values())))
    return {format: own.loc[seeds] for format, own in rows.items()} if seeds else {}


def perplexity_columns(perplexity: pd.DataFrame) -> pd.DataFrame:
    """Return PPL, Δ and Δ % of the four models from perplexities: a row per seed, a column per format."""
    lines = []
    for format, own in perplexity.items():
        base = dense_of(str(format))
        over, is_dense = perplexity[base], base == format
        lines.append(
            {
                "model": label(str(format)),
                "PPL": spread(own, ".2f"),
                "Δ": NOTHING if is_dense else spread(own - over, "+.2f"),
                "Δ %": NOTHING if is_dense else spread(100 * (own / over - 1), "+.1f"),
            }
        )
    return table(lines).frame if lines else pd.DataFrame()


def sparsity_costs(perplexity: pd.DataFrame) -> pd.DataFrame:
    """Return by how many percent sparse models exceed their dense ones: one column per sparse format."""
    sparse = [format for format in perplexity if format != dense_of(format)]
    return pd.DataFrame({f: 100 * (perplexity[f] / perplexity[dense_of(f)] - 1) for f in sparse})


def beside_paper(ours: pd.DataFrame, pattern: str, place: int) -> pd.DataFrame:
    """Return `ours`, columns of the four models, beside the paper's at its size of that place, if any."""
    for size, perplexity in list(paper_perplexities(pattern).items())[place : place + 1]:
        theirs = perplexity_columns(perplexity)[["PPL", "Δ %"]]
        ours = ours.join(theirs.set_axis(ours.index).add_prefix(f"paper {size}: "))
    return ours


def comparison_table(rows: Mapping[str, pd.DataFrame]) -> Table:
    """Return table 2 for one size, beside the paper's smallest model of that pattern.

    `rows`: see `four_models`.
    """
    columns = perplexity_columns(perplexities(rows)).drop(columns="Δ")
    # The mean alone: seeds hardly differ in shares of weights.
    columns["zeros"] = [f"{100 * own.zero_fraction.mean():.1f} %" for own in rows.values()]
    columns["flips"] = [
        NOTHING if format == dense_of(format) else f"{100 * own.flip_rate.mean():.3f} %"
        for format, own in rows.items()
    ]
    notes = [
        "full and ternary: the paper's BF16 and BitNet. PPL: held-out perplexity. Δ %: PPL relative "
        "to the dense model of the same weight format. zeros: share of zero weights in the forward "
        "pass. flips: share of mask positions that changed in the last step."
    ]
    first, sparse, *_ = rows
    if (seeds := len(rows[first])) > 1:
        notes.append(
            f"Mean of {seeds} seeds, with the range below it; Δ compares models of the same seed."
        )
    return Table(beside_paper(columns, sparse.partition("-")[2], 0), notes)


def perplexity_tables(results: Results) -> dict[str, tuple[Table, int]]:
    """Return table 2 at every size that has all four models for a seed, and of how many seeds."""
    shown = {}
    for place, model in enumerate(results.setting["sizes"]):
        if rows := four_models(results, model):
            ours = perplexities(rows)
            columns = beside_paper(perplexity_columns(ours), results.setting["pattern"], place)
            shown[model] = (Table(columns), len(ours))
    return shown


def other_text(results: Results) -> dict[str, dict[str, Any]]:
    """Return table 2 on the other held-out text by size: `columns`, `count` of seeds, `cost`, `name`."""
    by_size = {}
    for model in results.models:
        texts = {f: results.by_seed(f, model=model).other_text for f in results.four_formats}
        ppl = pd.DataFrame({f: own.str["perplexity"] for f, own in texts.items()}).dropna()
        if len(ppl):
            name = texts[results.four_formats[0]].dropna().str["name"].iloc[0]
            cost = cost_estimate(np.log(ppl := ppl.astype(float)))
            columns = perplexity_columns(ppl)
            by_size[model] = {"columns": columns, "count": len(ppl), "cost": cost, "name": name}
    return by_size


def recipes(results: Results) -> dict[str, tuple[dict[str, pd.DataFrame], Estimate]]:
    """Return by recipe the runs of the four models, and how much more sparsity costs full precision.

    "" stands for ours, which comes first. The residual is that of all models of as many steps.
    """
    rows = {
        name: {format: results.by_seed(format, recipe=name) for format in results.four_formats}
        for name in sorted(results.rows.recipe.unique(), key=bool)
    }
    rows = {name: own for name, own in rows.items() if any(map(len, own.values()))}
    losses = {n: pd.DataFrame({f: own.loss for f, own in of.items()}) for n, of in rows.items()}
    steps = {n: max(own.steps.max() for own in of.values() if len(own)) for n, of in rows.items()}
    by_recipe = {}
    for name, own in rows.items():
        alike = [losses[n].add_prefix(n) for n in rows if steps[n] == steps[name]]
        by_recipe[name] = (own, cost_estimate(losses[name], residual_of(pd.concat(alike, axis=1))))
    return by_recipe


def beside_chance(results: Results) -> dict[str, Any]:
    """Return which models are better than guessing, by one-sided binomial tests of every accuracy.

    `guesses`: chance accuracy by task; `tests`: their number; `above`: better models (Holm-corrected).
    """
    from scipy.stats import binomtest

    asked = results.scores[-1]["asked"]
    tests = [
        (line["run"], task, binomtest(round(scores["acc"] * n), n, CHANCE[task], "greater").pvalue)
        for line in results.scores
        for task, scores in line["tasks"].items()
        if line["asked"] == asked and task in CHANCE and (n := line["questions"].get(task))
    ]
    rejected = zip(tests, holm([p for _, _, p in tests]), strict=True)
    return {
        "guesses": {task: CHANCE[task] for _, task, _ in tests},
        "tests": len(tests),
        "above": [f"{run} in {task}" for (run, task, _), is_above in rejected if is_above],
    }


def throughput_table(path: Path) -> Table:
    """Return table 3: throughput of dense and sparse models on the CPU engine, beside the paper's.

    `path` holds rows of `sparse-bitnet bench --pattern 8:8 6:8 --out`; the last ones count. Each pattern
    is in its fastest format, with float16 caches and without context. Raises `UserError` for none.
    """
    try:
        rows = pd.DataFrame(read_lines(path))
        rows = rows[rows.date == rows.date.iloc[-1]]
        shown = rows[rows.kv_cache.eq("float16") & (rows.phase.eq("prefill") | rows.tokens.eq(0))]
        measured = ["phase", "tokens", "batch", "threads"]
        speeds = shown.pivot_table("tokens_per_second", measured, "pattern", "max", sort=False)
        dense = speeds.pop(DENSE_PATTERN)
        made, widest = rows.iloc[0], rows.spread.max()
        if speeds.empty or speeds.isna().any(axis=None):
            raise LookupError
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} has no rows of dense and sparse models from one run of `sparse-bitnet bench "
            "--pattern 8:8 6:8 --out`"
        ) from error
    lines = []
    for (phase, tokens, batch, threads), sparse in speeds.iterrows():
        base = dense[phase, tokens, batch, threads]
        size = f"{tokens} tokens" if phase == "prefill" else f"batch {batch}"
        what = {"tokens/s": f"{phase}, {size}, {threads} thread{'s' * (threads > 1)}"}
        speed = {p: f"{own:.1f}\n{own / base:.2f}x" for p, own in sparse.items()}
        lines.append(what | {"dense": f"{base:.1f}"} | speed)
    theirs = (
        f"{phase} {min(gains := paper_gains(phase).values()):.2f}x to {max(gains):.2f}x ({own['gpu']})"
        for phase, own in paper()["throughput"].items()
    )
    notes = [
        f"`sparse-bitnet bench` ({made.model}, random weights; {made.hardware}, {made.date[:10]}). "
        "Each pattern in its fastest format; 1.00x is the speed of the dense model. The rounds of a "
        f"measurement differ by up to {widest:.0%}.",
        f"The paper's 3B model, 6:8 over dense: {'; '.join(theirs)}, over prompts of 512 to 65,536 "
        "tokens and batches of 64 to 512.",
    ]
    return table(lines, notes)
