# SPDX-License-Identifier: Apache-2.0
"""Tables of what the paper leaves open: learning rates, its code's recipe, where near-zero mass falls."""

import statistics

from sparse_bitnet_paper.cells import model_label
from sparse_bitnet_paper.claims import beside_the_search, cost_estimate
from sparse_bitnet_paper.judge import Estimate, losses_of, residual_of
from sparse_bitnet_paper.rate_runs import IDEAS, published_recipe
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.spread import percent_over, perplexities, seeds_note, spread_text
from sparse_bitnet_paper.table import NOTHING, Table

_DENSE = tuple(f"{weight}-{DENSE_PATTERN}" for weight in ("full", "ternary"))


def search_table(results: Results) -> Table | None:
    """Perplexity of the four models at each learning rate tried, and the one that all share."""
    body = []
    notes = [
        "Seed 0, as many steps as all runs of the size. Table 2 and what follows from it use one "
        "rate for all models of a size, as the paper does."
    ]
    for model in results.models:
        tried = {format: results.by_rate(format, model=model) for format in results.four_formats}
        rates = sorted(set().union(*tried.values()))
        for rate in rates if len(rates) > 1 else []:
            rows = {format: found.get(rate, {}) for format, found in tried.items()}
            used = " (used)" * (rate == results.learning_rate(model))
            cost = cost_estimate(losses_of(rows if used else beside_the_search(rows)))
            if len(cost.values) > 1:
                seeds = "" if used else " without seed 0, the search's"
                notes.append(_full_minus_ternary(f"{model}, {rate:g}{seeds}", cost))
            first = {format: found[rate][0] for format, found in tried.items() if rate in found}
            losses = [row.loss for row in first.values()]
            body.append(
                (
                    f"{model}, {rate:g}{used}",
                    *(f"{first[f].perplexity:.2f}" if f in first else NOTHING for f in tried),
                    f"{statistics.fmean(losses):.4f}" if len(losses) == len(tried) else NOTHING,
                )
            )
    head = ("learning rate", *map(_label, results.four_formats), "mean loss of the four")
    return Table(head, body, notes=notes) if body else None


def own_rates_table(results: Results) -> Table | None:
    """Table 2 with the best of the rates tried for each model by itself, at the sizes with a search."""
    body: list[tuple[str, ...]] = []
    notes = []
    for model in results.models:
        own = results.at_own_rates(model)
        seeds = set.intersection(*map(set, own.values())) if own else set()
        for format, of_all in own.items():
            best, tried = of_all[0].config["learning_rate"], results.by_rate(format, model=model)
            edge = "" if min(tried) < best < max(tried) else ", the outermost"
            rows = {seed: row for seed, row in of_all.items() if seed in seeds}
            dense = own[f"{format.partition('-')[0]}-{DENSE_PATTERN}"]
            change = NOTHING if dense is of_all else percent_over(rows, dense, "+.1f")
            name, rate = f"{model}, {_label(format)}", f"{best:g}{edge}"
            body.append((name, rate, f"{len(seeds)}", perplexities(rows), change))
        if len(seeds) > 1:
            notes.append(
                _full_minus_ternary(model, cost_estimate(losses_of(beside_the_search(own))))
            )
    if notes:
        notes.append("The differences leave out seed 0, which chose the rates.")
    head = ("model", "best rate", "seeds", "PPL", "Δ %")
    return Table(head, body, notes=notes) if body else None


def recipe_table(results: Results) -> Table | None:
    """The four models with what the published code does otherwise, one thing at a time."""
    steps = results.setting["sizes"][results.main]
    changes = {"ours": {}, **published_recipe(results.setting["recipe"], steps)}
    found = {
        n: {f: results.by_seed(f, **c) for f in results.four_formats} for n, c in changes.items()
    }
    found = {name: rows for name, rows in found.items() if any(rows.values())}
    losses = {name: losses_of(rows) for name, rows in found.items()}
    body, seeds = [], {}
    for name, rows in found.items():
        alike = [n for n in found if changes[n].get("steps") == changes[name].get("steps")]
        residual = residual_of({(n, f): each for n in alike for f, each in losses[n].items()})
        line = [name]
        for weight in ("full", "ternary"):
            dense, sparse = (rows[f] for f in results.four_formats if f.startswith(weight))
            line += [perplexities(dense), perplexities(sparse), percent_over(sparse, dense, "+.1f")]
        cost = cost_estimate(losses[name], residual)
        seeds[name] = len(cost.values)
        between = f"{cost.mean:+.2f}" if cost.values else NOTHING
        sure = f"\n{cost.interval}" if cost.values and residual else ""
        body.append((*line, between + sure))
    columns = ("dense PPL", f"{results.setting['pattern']} PPL", "Δ %")
    groups = [("full", 3), ("ternary", 3), ("full minus ternary", 1)]
    notes = [
        seeds_note(seeds),
        "Full minus ternary: of the seeds that have all four models, as in the claims but not among "
        "them, with its 95 % interval by the residual of all models of as many steps, to which a recipe "
        "with one seed adds nothing.",
    ]
    head = ("recipe", *columns, *columns, "points")
    return Table(head, body, groups=groups, notes=notes) if len(body) > 1 else None


def near_zero_table(results: Results) -> Table | None:
    """Near-zero mass of the dense models over learning rate and initial distribution."""
    body: list[list[str]] = []
    falls: list[str] = []
    rises: list[str] = []
    for initial in ("normal", "uniform"):
        found = {f: results.by_rate(f, initial_weights=initial) for f in _DENSE}
        for rate in sorted(set().union(*found.values())):
            line = [f"{initial}, {rate:g}"]
            for format, tried in found.items():
                masses = [results.weights(row)["overall"] for row in tried.get(rate, {}).values()]
                changes = [100 * (mass[-1] - mass[0]) for mass in masses]
                line += [spread_text((100 * m[0] for m in masses), ".1f")]
                line += [spread_text(changes, "+.2f")]
                if format == _DENSE[1] and changes:
                    (falls if max(changes) < 0 else rises if min(changes) > 0 else []).append(
                        line[0]
                    )
            body.append(line)
    if len(body) < 2:
        return None
    head = ("at the start, %", "change, points")
    note = (
        f"For every seed the ternary model's mass falls, as the paper says, at: {_list(falls)}. "
        f"It rises at: {_list(rises)}."
    )
    return Table(
        ("initial weights, learning rate", *head, *head),
        body,
        groups=[("full", 2), ("ternary", 2)],
        notes=[note],
    )


def ideas_table(results: Results) -> Table | None:
    """What the paper does not use, against what it does; None without a run of these."""
    base = results.by_seed(IDEAS["the paper's"])
    body = []
    for name, format in IDEAS.items():
        if rows := results.by_seed(format):
            change = NOTHING if name == "the paper's" else percent_over(rows, base)
            zeros = spread_text((100 * row.zero_fraction for row in rows.values()), ".1f")
            body.append((name, format, perplexities(rows), change, zeros))
    head = ("idea", "format", "PPL", "% over the paper's", "zeros, %")
    return Table(head, body) if len(body) > 1 else None


def _full_minus_ternary(what: str, cost: Estimate) -> str:
    return f"{what}, full minus ternary: {cost.text('points')}."


def _label(format: str) -> str:
    return model_label(*format.split("-"))


def _list(names: list[str]) -> str:
    return "; ".join(names) or "none"
