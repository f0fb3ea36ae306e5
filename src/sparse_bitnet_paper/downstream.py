# SPDX-License-Identifier: Apache-2.0
"""Table 1: zero-shot tasks on the models that table 2 trained."""

from collections.abc import Callable, Sequence
from pathlib import Path

from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.harness import accuracies, evaluate_tasks
from sparse_bitnet.files import write_atomic
from sparse_bitnet.provenance import provenance
from sparse_bitnet_paper.results import DOWNSTREAM, Results, json_lines
from sparse_bitnet_paper.runs import table2, with_seeds
from sparse_bitnet_paper.scales import Scale


def score(
    scale: Scale,
    out: Path,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    seeds: int = 1,
    on_model: Callable[[str], None] = lambda name: None,
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
    lines = results.scores
    known = {line["run"] for line in lines if line["asked"] == asked}
    trained = results.rows.set_index("name")
    names = [run.name for run in table2(with_seeds(scale, seeds)) if run.name in trained.index]
    if not names:
        raise UserError(f"{out}: no model of table 2 is trained yet; `reproduce table2` does it")
    new = [name for name in names if name not in known]
    for name in new:
        on_model(name)
        row = trained.loc[name]
        scores = evaluate_tasks(
            out / row.checkpoint,
            tasks,
            include_path=include_path,
            limit=limit,
            precision="bf16" if row.precision == "bfloat16" else "float32",
            device=row.device,
        )
        lines.append(
            {
                "run": name,
                "asked": asked,
                "tasks": accuracies(scores),
                "questions": {task: n["effective"] for task, n in scores["n-samples"].items()},
                "lm_eval": scores.get("lm_eval_version"),
                "provenance": provenance(),
            }
        )
        write_atomic(out / DOWNSTREAM, json_lines(lines))
    return len(new)
