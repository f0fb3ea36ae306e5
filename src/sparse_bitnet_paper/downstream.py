# SPDX-License-Identifier: Apache-2.0
"""Table 1: zero-shot tasks on the models that table 2 trained."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.harness import accuracies, evaluate_tasks
from sparse_bitnet.provenance import provenance
from sparse_bitnet_paper.cells import average_accuracy, model_label, paper_accuracies
from sparse_bitnet_paper.judge import holm
from sparse_bitnet_paper.paper_runs import table2, with_seeds
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import Scale
from sparse_bitnet_paper.table import NOTHING, Table

CHANCE = {"hellaswag": 0.25, "arc_easy": 0.25, "piqa": 0.5, "boolq": 0.622, "copa": 0.5}
"""acc of guessing; of BoolQ, of always giving its more frequent answer."""


def score(
    scale: Scale,
    out: Path,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    seeds: int = 1,
    on_model: Callable[[str], None] | None = None,
) -> int:
    """Score what was trained of table 2 on lm-eval tasks, dense models first; skips what is done.

    Args:
        scale: of the results.
        out: folder of the results; the models are in its run folders.
        tasks: lm-eval's names; "paper" stands for the paper's five.
        include_path: folder of data sets or task files, as `evaluate_tasks` takes it.
        limit: score only this many questions of each task, the first ones.
        seeds: models of seeds below this one are scored.
        on_model: called with the name of each model before it is scored.

    Returns how many models were scored. Raises `UserError` when no model is there, or for what
    `evaluate_tasks` raises.
    """
    results = Results(out)
    asked = [*tasks, *([f"limit {limit}"] if limit else [])]
    known = {(line["run"], *line["asked"]) for line in results.scores()}
    trained = {row.name: row for row in results.rows}
    runs = [run for run in table2(with_seeds(scale, seeds)) if run.name in trained]
    if not runs:
        raise UserError(f"{out}: no model of table 2 is trained yet; `reproduce table2` does it")
    scored = 0
    for run in runs:
        if (run.name, *asked) in known:
            continue
        if on_model:
            on_model(run.name)
        row = trained[run.name]
        scores = evaluate_tasks(
            out / row.checkpoint,
            tasks,
            include_path=include_path,
            limit=limit,
            precision="bf16" if row.precision == "bfloat16" else "float32",
            device=row.device,
        )
        line = {
            "run": run.name,
            "asked": asked,
            "tasks": accuracies(scores),
            "questions": {task: n["effective"] for task, n in scores["n-samples"].items()},
            "lm_eval": scores.get("lm_eval_version"),
            "provenance": provenance(),
        }
        lines = [*results.scores(), line]
        results.write("downstream.jsonl", "".join(json.dumps(each) + "\n" for each in lines))
        scored += 1
    return scored


def downstream_table(results: Results) -> Table | None:
    """Table 1: accuracy on each task, the average and its change; None without scores.

    The average is of the accuracies of all tasks, as the paper's; acc_norm stands below where there is
    one. The paper's own average is over the same tasks, of its model of the same place among the sizes.
    """
    scores = results.downstream()
    if not scores:
        return None
    tasks = list(scores[0][1])
    averages = {
        (row.model, row.variant, row.seed): average_accuracy(found) for row, found in scores
    }
    body = []
    for row, found in scores:
        average = averages[row.model, row.variant, row.seed]
        dense = averages.get((row.model, f"{row.weight}-8:8", row.seed))
        body.append(
            (
                f"{row.model}, {model_label(row.weight, row.pattern)}, seed {row.seed}",
                *(_accuracy(found.get(task)) for task in tasks),
                f"{average:.2f}",
                NOTHING if dense is None or row.pattern == "8:8" else f"{average - dense:+.2f}",
                *_paper_average(results, row, tasks),
            )
        )
    head = ("model", *tasks, "average acc", "Δ", "paper average", "paper Δ")
    return Table(head, body, notes=[_beside_chance(results)])


def _beside_chance(results: Results) -> str:
    """Whether any model is better than guessing, by one-sided binomial tests of every acc."""
    from scipy.stats import binomtest

    newest = results.scores()[-1]["asked"]
    found = [
        (line["run"], task, binomtest(round(scores["acc"] * n), n, CHANCE[task], "greater").pvalue)
        for line in results.scores()
        for task, scores in line["tasks"].items()
        if line["asked"] == newest and task in CHANCE and (n := line["questions"].get(task))
    ]
    above = [found[place] for place in holm([p for _, _, p in found])]
    tasks = dict.fromkeys(task for _, task, _ in found)
    guess = ", ".join(f"{task} {100 * CHANCE[task]:g} %" for task in tasks)
    who = ", ".join(f"{run} in {task}" for run, task, _ in above)
    return (
        "Accuracy in percent, acc_norm below acc where lm-eval reports both. "
        f"Guessing: {guess}. Better than that ({len(found)} one-sided binomial tests of acc, Holm's "
        f"correction at 5 %): {who or 'no model in any task: these cannot be told from chance'}."
    )


def _paper_average(results: Results, row: ResultRow, tasks: Sequence[str]) -> tuple[str, str]:
    paper = list(paper_accuracies(tasks).items())
    place = list(results.setting["sizes"]).index(row.model)
    if place >= len(paper) or row.variant not in results.four_formats:
        return NOTHING, NOTHING
    size, averages = paper[place]
    index = results.four_formats.index(row.variant)
    change = averages[index] - averages[index - index % 2]
    return f"{averages[index]:.2f} ({size})", f"{change:+.2f}" if index % 2 else NOTHING


def _accuracy(values: Mapping[str, float] | None) -> str:
    if values is None:
        return NOTHING
    norm = values.get("acc_norm")
    text = f"{100 * values['acc']:.2f}"
    return text if norm is None else f"{text}\nnorm {100 * norm:.2f}"
