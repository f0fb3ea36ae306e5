# SPDX-License-Identifier: Apache-2.0
"""The paper's five tasks on data sets in a local folder: lm-eval's own tasks on local data.

A data set is stored as downloaded by `hf download Rowan/hellaswag --repo-type dataset --local-dir
FOLDER/hellaswag`, or is one file FOLDER/TASK*.jsonl.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sparse_bitnet.errors import UserError


class _Task(NamedTuple):
    yaml: str
    """lm-eval's own file."""
    name: str
    """The data set's name on the hub."""
    config: str = ""
    split: str = "validation"
    """Split with the questions."""


_TASKS = {
    "hellaswag": _Task("hellaswag/hellaswag.yaml", "Rowan/hellaswag"),
    "arc_easy": _Task("arc/arc_easy.yaml", "allenai/ai2_arc", "ARC-Easy", "test"),
    "piqa": _Task("piqa/piqa.yaml", "baber/piqa"),
    "boolq": _Task("super_glue/boolq/default.yaml", "aps/super_glue", "boolq"),
    "copa": _Task("super_glue/copa/default.yaml", "aps/super_glue", "copa"),
}
PAPER_TASKS = tuple(_TASKS)
"""Table 1. BoolQ and COPA report acc alone, the others acc and acc_norm."""


def write_task_files(names: Iterable[str], data: Path, out: Path) -> None:
    """Write a task file to `out` for each of `names` that has data.

    Raises `UserError` if the data lacks the split with the questions.
    """
    import lm_eval.tasks

    own = Path(lm_eval.tasks.__file__).parent
    for name in set(names) & set(_TASKS):
        task = _TASKS[name]
        files = {task.split: sorted(data.glob(f"{name}*.jsonl"))}
        others = ("train", "val", "dev") if task.split == "test" else ("train", "test")
        for path in files[task.split]:
            if any(word in path.name.lower() for word in others):
                raise UserError(f"task {name}: {path} is of another split than {task.split}")
        kind, folder = "json", data / task.name.rpartition("/")[2] / task.config
        if not files[task.split] and folder.is_dir():
            kind, splits = "parquet", ("train", task.split)
            files = {split: sorted(folder.rglob(f"*{split}*.parquet")) for split in splits}
            if not files[task.split]:
                raise UserError(
                    f"task {name}: {folder} has no .parquet file of its {task.split} split"
                )
        known = {split: [str(p.absolute()) for p in of] for split, of in files.items() if of}
        if not known:
            continue
        config = {
            "include": str(own / task.yaml),
            "task": name,
            "dataset_path": kind,
            "dataset_name": None,
            "dataset_kwargs": {"data_files": known},
            "training_split": "train" if "train" in known else None,
            "validation_split": None,
            "test_split": None,
            f"{task.split}_split": task.split,
        }
        # YAML can contain JSON, but not JSON's escapes of characters as surrogate pairs.
        text = json.dumps(config, ensure_ascii=False)
        (out / f"{name}.yaml").write_text(text, encoding="utf-8")


def check_answers(name: str, task: Any) -> None:
    """Raise `UserError` if the loaded data of a task lacks questions or answers.

    lm-eval uses the name of a missing column as the text, so that every choice would be wrong.
    """
    columns = getattr(task.eval_docs, "column_names", None)
    for field in ("doc_to_text", "doc_to_target"):
        column = getattr(task.config, field, None)
        if columns and isinstance(column, str) and column.isidentifier() and column not in columns:
            remedy = f"{field} names a column"
            if name in _TASKS:
                remedy = f"take it as it lies on the hub ({_TASKS[name].name})"
            raise UserError(f"task {name}: its data has no {column}; {remedy}")
