"""Table 1: zero-shot tasks on the models that table 2 trained."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.harness import accuracies, evaluate_tasks
from sparse_bitnet.experiments.paper_runs import table2
from sparse_bitnet.experiments.provenance import provenance
from sparse_bitnet.experiments.results import Results
from sparse_bitnet.experiments.scales import Scale


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
        include_path: folder of task files of one's own, for use without network.
        limit: only the first so many questions of each task.
        seeds: models of seeds below this one are scored.
        on_model: called with the name of each model before it is scored.

    Returns how many models were scored. Raises `UserError` when no model is there, or for what
    `evaluate_tasks` raises.
    """
    results = Results(out)
    asked = [*tasks, *([f"limit {limit}"] if limit else [])]
    known = {(line["run"], *line["asked"]) for line in results.scores()}
    trained = {row.name: row for row in results.rows}
    runs = [run for run in table2(scale) if run.config.seed < seeds and run.name in trained]
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
