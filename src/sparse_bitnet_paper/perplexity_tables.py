# SPDX-License-Identifier: Apache-2.0
"""Table 2: the four models side by side, with the paper's beside them, and what it says in words."""

import itertools
import math
from collections.abc import Sequence

from sparse_bitnet_paper.cells import Cell, cells_of, model_label, paper_cells
from sparse_bitnet_paper.claims import cost_estimate
from sparse_bitnet_paper.judge import Estimate, losses_of
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.spread import Spread, seeds_note, spread_text
from sparse_bitnet_paper.table import NOTHING, Table

DECIDED_POINTS = 2.0
"""What sparsity costs full precision more than ternary weights, for the seeds that would decide it."""


def comparison_table(ours: Sequence[Cell]) -> Table:
    """Table 2 for one size, beside the paper's own numbers for that pattern."""
    columns = [
        *_perplexity_columns(ours),
        # The mean alone: seeds hardly differ in shares of weights.
        [_percent(cell.zero_fraction, 1) for cell in ours],
        [_percent(cell.flip_rate, 3) for cell in ours],
    ]
    notes = [
        "full and ternary are the paper's BF16 and BitNet. PPL: held-out perplexity. Δ: minus that "
        "of the dense model of the same format, Δ % in percent of it. zeros: share of zero weights "
        "in the forward. flips: share of mask positions that changed at the last step."
    ]
    if (seeds := len(ours[0].perplexity.values)) > 1:
        notes.append(
            f"Mean of {seeds} seeds, below it least..greatest; Δ pairs models of one seed."
        )
    groups = [("this run", ("PPL", "Δ", "Δ %", "zeros", "flips"))]
    return _beside_paper(ours, groups, columns, notes)


def perplexity_table(results: Results) -> Table | None:
    """Table 2 at every size that has all four models for a seed; None where there is none."""
    ours = {model: found for model in results.models if (found := cells_of(results, model))}
    if not ours:
        return None
    columns = [column for cells in ours.values() for column in _perplexity_columns(cells)]
    groups = [(model, ("PPL", "Δ", "Δ %")) for model in ours]
    seeds = {model: len(column[0].perplexity.values) for model, column in ours.items()}
    return _beside_paper(next(iter(ours.values())), groups, columns, [seeds_note(seeds)])


def seed_table(results: Results) -> Table | None:
    """How many seeds decide the paper's main claim; None before a second one."""
    body = []
    for model in results.models:
        rows = {format: results.by_seed(format, model=model) for format in results.four_formats}
        cost = cost_estimate(losses_of(rows))
        if len(cost.values) > 1 and cost.residual is not None:
            deviation, needed = cost.residual.deviation, cost.seeds_needed(DECIDED_POINTS)
            there = len(cost.values)
            body.append(
                (
                    model,
                    f"{there}",
                    f"{100 * deviation:.2f} %",
                    f"{cost.deviation:.2f}",
                    Estimate(values=cost.values).interval,
                    f"{needed}",
                    f"{max(0, needed - there)}",
                )
            )
    spreads = ("deviation of a model", "of the comparison, points", "interval by its own spread")
    head = ("size", "seeds", *spreads, f"seeds for {DECIDED_POINTS:g} points", "still")
    note = (
        "Deviation: what a mean for each model and a shift for each seed leave, by which the claim is "
        "judged. The comparison's own spread leaves out what its models share. This many seeds would "
        f"show a difference of {DECIDED_POINTS:g} points four times in five, in a test by itself."
    )
    return Table(head, body, notes=[note]) if body else None


def other_text_table(results: Results) -> Table | None:
    """The four models on the other held-out text; None where none was given."""
    names = {row.other_text["name"] for row in results.rows if row.other_text}
    body, notes = [], []
    for model in results.models:
        found = {
            format: {
                seed: row.other_text["perplexity"]
                for seed, row in results.by_seed(format, model=model).items()
                if row.other_text
            }
            for format in results.four_formats
        }
        seeds = set.intersection(*map(set, found.values()))
        for format, values in found.items() if seeds else ():
            weight, pattern = format.split("-")
            dense = found[f"{weight}-{DENSE_PATTERN}"]
            change = [100 * (values[seed] / dense[seed] - 1) for seed in seeds]
            body.append(
                (
                    f"{model}, {model_label(weight, pattern)}",
                    f"{len(seeds)}",
                    spread_text((values[seed] for seed in seeds), ".2f"),
                    NOTHING if values is dense else spread_text(change, "+.1f"),
                )
            )
        losses = {f: {s: math.log(values[s]) for s in seeds} for f, values in found.items()}
        if len(seeds) > 1:
            cost = cost_estimate(losses).text("points")
            notes.append(f"{model}, full minus ternary: {cost}; not among the claims.")
    head = ("model", "seeds", f"PPL of {', '.join(sorted(names))}", "Δ %")
    return Table(head, body, notes=notes) if body else None


def _perplexity_columns(cells: Sequence[Cell]) -> list[list[str]]:
    return [
        [_text(cell.perplexity, ".2f") for cell in cells],
        [_text(cell.delta, "+.2f") for cell in cells],
        [_text(cell.relative, "+.1f") for cell in cells],
    ]


def _beside_paper(
    ours: Sequence[Cell],
    groups: Sequence[tuple[str, Sequence[str]]],
    columns: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> Table:
    """Columns of the four models under their titles, then the paper's at each of its sizes."""
    paper = paper_cells(ours[1].pattern)
    groups = [*groups, *((f"paper {size}", ("PPL", "Δ %")) for size in paper)]
    theirs = [_perplexity_columns(cells)[::2] for cells in paper.values()]
    return Table(
        head=("model", *(name for _, names in groups for name in names)),
        lines=list(
            zip([cell.label for cell in ours], *columns, *itertools.chain(*theirs), strict=True)
        ),
        groups=[(title, len(names)) for title, names in groups],
        notes=notes,
    )


def verdict(ours: Sequence[Cell]) -> str:
    """What `comparison_table` says in one sentence, and how far to trust it in a second."""
    pattern = ours[1].pattern
    full, ternary = ours[1].relative, ours[3].relative
    assert full is not None
    assert ternary is not None
    text = (
        f"{pattern} sparsity changes the perplexity of the full-precision model by "
        f"{_in_words(full)} and that of the ternary model by {_in_words(ternary)}"
    )
    if theirs := paper_cells(pattern).get("0.5B"):
        values = " and ".join(_in_words(cell.relative) for cell in theirs if cell.relative)
        text += f" (the paper's 0.5B model: {values})"
    texts = [f"{text}."]
    if min(full.mean, ternary.mean) < 0:
        texts.append(
            "A sparse model that beats its dense twin has not been trained long enough to miss what "
            "the mask removes."
        )
    if len(full.values) == 1:
        texts.append(
            "One seed of a model this small: the deltas are indicative, another seed can change "
            "their order (--seeds 3 shows by how much)."
        )
    else:
        margins = [a - b for a, b in zip(full.values, ternary.values, strict=True)]
        texts.append(
            f"The ternary model loses less for {sum(margin > 0 for margin in margins)} of "
            f"{len(margins)} seeds; at this size the deltas are indicative."
        )
    return " ".join(texts)


def _in_words(spread: Spread) -> str:
    mean, _, rest = spread.text("+.1f").partition("\n")
    return f"{mean} %" + (f" ({rest})" if rest else "")


def _text(spread: Spread | None, form: str) -> str:
    return NOTHING if spread is None else spread.text(form)


def _percent(share: Spread | None, digits: int) -> str:
    return NOTHING if share is None else f"{100 * share.mean:.{digits}f} %"
