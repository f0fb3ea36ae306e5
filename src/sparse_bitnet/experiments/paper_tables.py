"""The tables of the paper with our numbers and its own side by side."""

import math
import statistics
from collections.abc import Mapping, Sequence

from sparse_bitnet.experiments.claims import Claim
from sparse_bitnet.experiments.document import Grid
from sparse_bitnet.experiments.paper import ABLATIONS, FOUR_CELLS
from sparse_bitnet.experiments.result_set import ResultSet
from sparse_bitnet.experiments.results import (
    Cell,
    Spread,
    cells,
    paper_cells,
    paper_results,
)
from sparse_bitnet.experiments.store import RunRow
from sparse_bitnet.experiments.table import (
    NOTHING,
    Group,
    Line,
    Table,
    model_label,
    spread_text,
)

_SPREAD_NOTE = (
    "Over several seeds: mean, then least..greatest. Δ and percentages pair models of one seed, which "
    "share initial weights and batches."
)


def perplexity_table(results: ResultSet) -> Table | None:
    """Table 2 at every size that has all four models for a seed; None where there is none."""
    ours = {model: found for model in results.models if (found := four_cells(results, model))}
    if not ours:
        return None
    paper = paper_cells("6:8")
    groups = [Group(model, ("PPL", "Δ", "Δ %")) for model in ours]
    groups += [Group(f"paper {size}", ("PPL", "Δ %")) for size in paper]
    lines = []
    for index, (weight, pattern) in enumerate(
        (w, p) for w in ("full", "ternary") for p in ("8:8", "6:8")
    ):
        texts: list[str] = []
        for column in ours.values():
            cell = column[index]
            texts += [
                spread_text(cell.perplexity, ".2f"),
                spread_text(cell.delta, "+.2f"),
                spread_text(cell.relative, "+.1f"),
            ]
        for column in paper.values():
            cell = column[index]
            texts += [spread_text(cell.perplexity, ".2f"), spread_text(cell.relative, "+.1f")]
        lines.append(Line(model_label(weight, pattern), weight, pattern, tuple(texts)))
    seeds = ", ".join(f"{model} {len(c[0].perplexity.values)}" for model, c in ours.items())
    return Table(tuple(groups), tuple(lines), (f"Seeds: {seeds}. {_SPREAD_NOTE}",))


def four_cells(results: ResultSet, model: str) -> list[Cell]:
    """The cells of table 2 at one size; none unless some seed has all four models."""
    found = [results.by_seed(format, model=model) for format in FOUR_CELLS]
    complete = set.intersection(*(set(rows) for rows in found))
    if not complete:
        return []
    return cells([rows[seed] for rows in found for seed in sorted(complete)], "6:8")


def claim_grid(claims: Sequence[Claim]) -> Grid:
    """One line per claim and model size."""
    head = ("claim", "model", "verdict", "measured", "what is measured", "paper")
    body = [
        (claim.text, claim.model, claim.verdict, claim.result, claim.measure, claim.paper)
        for claim in claims
    ]
    return Grid((head, *body), numeric=False)


def sweep_grid(results: ResultSet) -> Grid:
    """Raw perplexities of the sweep and their increase over dense (appendix table, figure 2)."""
    paper = paper_results()["nm_sweep_ppl_0.5B"]
    body = []
    for pattern in results.setting["patterns"]:
        line = [pattern]
        for weight in ("full", "ternary"):
            line.append(_perplexity(results.by_seed(f"{weight}-{pattern}")))
            line.append(_increase(results, f"{weight}-{pattern}"))
        for name in ("bf16", "bitnet"):
            place = paper["patterns"].index(pattern)
            line.append(f"{100 * (paper[name][place] / paper[name][0] - 1):+.1f}")
        body.append(tuple(line))
    ours = ("full PPL", "full %", "ternary PPL", "ternary %")
    head = ("pattern", *ours, "paper full %", "paper ternary %")
    return Grid((head, *body))


def ablation_grid(results: ResultSet) -> Grid:
    """The four training designs: perplexity, and how much their masks move (figure 4)."""
    base = results.by_seed(ABLATIONS["baseline"])
    paper = {"baseline": "26.31", "mask from quantized weight": "32.23 (+22.5 %)"}
    body = []
    for name, format in ABLATIONS.items():
        rows = results.by_seed(format)
        relative = [
            100 * (row.perplexity / base[seed].perplexity - 1)
            for seed, row in rows.items()
            if seed in base
        ]
        moves = [_quarters(results, row) for row in rows.values()]
        body.append(
            (
                name,
                _perplexity(rows),
                NOTHING if format == ABLATIONS["baseline"] else _spread(relative, "+.2f"),
                *(_spread([100 * move[part] for move in moves], ".3f") for part in (0, 1)),
                paper.get(name, "higher, no number"),
            )
        )
    flips = ("flips first quarter, %", "flips last quarter, %")
    head = ("design", "PPL", "% over baseline", *flips, "paper PPL")
    return Grid((head, *body))


def _quarters(results: ResultSet, row: RunRow) -> tuple[float, float]:
    """Mean flip rate of the first and of the last quarter of the steps."""
    curve = [part for part in results.folder.curves(row) if "flip_rate" in part]
    if not curve:
        return math.nan, math.nan
    first = [part["flip_rate"] for part in curve if part["step"] <= max(row.steps / 4, 2)]
    last = [part["flip_rate"] for part in curve if part["step"] > row.steps * 3 / 4]
    return statistics.fmean(first), statistics.fmean(last)


def schedule_grid(results: ResultSet) -> Grid:
    """Dense-to-sparse schedules (table 4)."""
    always = results.by_seed("ternary-6:8")
    paper = paper_results()["dense_to_sparse_ppl_0.5B_6:8"]
    theirs = dict(zip(paper["sparse_fraction_percent"], paper["ppl"], strict=True))
    theirs[0] = paper["dense_ppl"]
    body = []
    for percent in results.setting["sparse_percents"]:
        format = "ternary-6:8" if percent else "ternary-8:8"
        rows = results.by_seed(format, sparse_percent=percent)
        relative = [
            100 * (row.perplexity / always[seed].perplexity - 1)
            for seed, row in rows.items()
            if seed in always
        ]
        name = {0: "0 (dense training)", 100: "100 (sparse from scratch)"}.get(
            percent, str(percent)
        )
        body.append(
            (
                name,
                _perplexity(rows),
                NOTHING if percent == 100 else _spread(relative, "+.2f"),
                f"{theirs[percent]:.2f}",
                f"{100 * (theirs[percent] / theirs[100] - 1):+.1f}",
            )
        )
    head = ("sparse steps, %", "PPL", "% over 100", "paper PPL", "paper % over 100")
    return Grid((head, *body))


def search_grid(results: ResultSet) -> Grid | None:
    """Perplexity of the four models at each learning rate tried, and the one chosen."""
    columns = _search(results)
    if len(columns) < 2:
        return None
    body = []
    for rate, rows in columns.items():
        chosen = " (used)" if rate == results.learning_rate else ""
        dense = statistics.fmean(rows[format].loss for format in ("full-8:8", "ternary-8:8"))
        cells_of_rate = (f"{rows[format].perplexity:.2f}" for format in FOUR_CELLS)
        body.append((f"{rate:g}{chosen}", *cells_of_rate, f"{dense:.4f}"))
    labels = (model_label(*format.split("-")) for format in FOUR_CELLS)
    return Grid((("learning rate", *labels, "mean loss of the dense two"), *body))


def best_rate_grid(results: ResultSet) -> Grid | None:
    """Table 2 at the main size with the best of the rates tried for each format by itself."""
    columns = _search(results)
    if len(columns) < 2:
        return None
    body = []
    for weight in ("full", "ternary"):
        rate = min(columns, key=lambda rate: columns[rate][f"{weight}-8:8"].loss)
        dense, sparse = (columns[rate][f"{weight}-{pattern}"] for pattern in ("8:8", "6:8"))
        increase = 100 * (sparse.perplexity / dense.perplexity - 1)
        body.append(
            (
                weight,
                f"{rate:g}",
                f"{dense.perplexity:.2f}",
                f"{sparse.perplexity:.2f}",
                f"{increase:+.1f}",
            )
        )
    return Grid((("weights", "best rate", "dense PPL", "6:8 PPL", "Δ %"), *body))


def _search(results: ResultSet) -> dict[float, dict[str, RunRow]]:
    """By learning rate, seed 0's four models; rates at which one is missing are left out."""
    found: dict[float, dict[str, RunRow]] = {}
    for rate in sorted(results.setting["search"]):
        rows = {f: results.by_seed(f, learning_rate=rate).get(0) for f in FOUR_CELLS}
        complete = {format: row for format, row in rows.items() if row is not None}
        if len(complete) == len(FOUR_CELLS):
            found[rate] = complete
    return found


def polarisation_grid(results: ResultSet) -> Grid:
    """Near-zero mass of the dense models at the start and the end of training."""
    body = []
    for model in results.models:
        for weight in ("full", "ternary"):
            rows = results.by_seed(f"{weight}-8:8", model=model)
            if not rows:
                continue
            masses = [results.folder.weights(row)["overall"] for row in rows.values()]
            body.append(
                (
                    f"{model}, {weight}",
                    _spread([100 * mass[0] for mass in masses], ".1f"),
                    _spread([100 * mass[-1] for mass in masses], ".1f"),
                )
            )
    head = ("dense model", "near-zero mass at the start, %", "at the end, %")
    return Grid((head, *body))


def effort_grid(results: ResultSet) -> Grid:
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
                f"{one.epochs:.2f}",
                f"{statistics.median(row.tokens_per_second for row in rows):,.0f}",
                f"{sum(row.seconds for row in rows) / 60:.0f}",
            )
        )
    tokens = ("tokens a run", "tokens per weight", "epochs", "tokens/s")
    head = ("model", "runs", "steps", *tokens, "minutes")
    return Grid((head, *body))


def downstream_grid(results: ResultSet) -> Grid | None:
    """Table 1: accuracy on each task, the average and its change; None without scores.

    The average is the paper's, of the accuracies of all tasks; acc_norm stands below where there is one.
    The paper's own average is that of its model of the same place among the sizes.
    """
    scores = results.downstream()
    if not scores:
        return None
    tasks = list(scores[0][1])
    averages = {(row.model, row.format, row.seed): _average(found) for row, found in scores}
    body = []
    for row, found in scores:
        average = averages[row.model, row.format, row.seed]
        dense = averages.get((row.model, f"{row.weight}-8:8", row.seed))
        body.append(
            (
                f"{row.model}, {model_label(row.weight, row.pattern)}, seed {row.seed}",
                *(_accuracy(found.get(task)) for task in tasks),
                f"{average:.2f}",
                NOTHING if dense is None or row.pattern == "8:8" else f"{average - dense:+.2f}",
                *_paper_average(results, row),
            )
        )
    return Grid((("model", *tasks, "average acc", "Δ", "paper average", "paper Δ"), *body))


def _average(scores: Mapping[str, Mapping[str, float]]) -> float:
    return 100 * statistics.fmean(values["acc"] for values in scores.values())


def _paper_average(results: ResultSet, row: RunRow) -> tuple[str, str]:
    table = paper_results()["downstream_accuracy_percent"]
    sizes = [name for name in table if name.endswith("B")]
    place = list(results.setting["sizes"]).index(row.model)
    if place >= len(sizes) or row.format not in FOUR_CELLS:
        return NOTHING, NOTHING
    cells_of_size = list(table[sizes[place]].values())
    index = FOUR_CELLS.index(row.format)
    average = statistics.fmean(cells_of_size[index])
    dense = statistics.fmean(cells_of_size[index - index % 2])
    change = NOTHING if index % 2 == 0 else f"{average - dense:+.2f}"
    return f"{average:.2f} ({sizes[place]})", change


def _accuracy(values: Mapping[str, float] | None) -> str:
    if values is None:
        return NOTHING
    norm = values.get("acc_norm")
    text = f"{100 * values['acc']:.2f}"
    return text if norm is None else f"{text}\nnorm {100 * norm:.2f}"


def _perplexity(rows: Mapping[int, RunRow]) -> str:
    return _spread([row.perplexity for row in rows.values()], ".2f")


def _increase(results: ResultSet, format: str) -> str:
    if format.endswith("-8:8"):
        return NOTHING
    return _spread([100 * (value - 1) for value in results.relative(format).values()], "+.1f")


def _spread(values: Sequence[float], form: str) -> str:
    known = tuple(value for value in values if not math.isnan(value))
    return spread_text(Spread(known), form) if known else NOTHING
