# SPDX-License-Identifier: Apache-2.0
"""The paper's five tasks on data sets that lie in a folder: lm-eval's own tasks on local data.

A data set lies as it was downloaded, `hf download Rowan/hellaswag --repo-type dataset --local-dir
FOLDER/hellaswag`, below the name of its task or its own, or is one file FOLDER/TASK*.jsonl.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from sparse_bitnet.errors import UserError

_READERS = {".parquet": "parquet", ".jsonl": "json"}
_SPLIT_NAMES = {"train": "train", "validation": "val|dev", "test": "test"}


class _Task(NamedTuple):
    yaml: str
    """lm-eval's own file."""
    name: str
    """The data set's name on the hub."""
    config: str = ""
    split: str = "validation"
    """The split whose questions are asked."""


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
    """Write a task file to `out` for every one of `names` of which there is data.

    Raises `UserError` where the data lacks the split that is asked.
    """
    import lm_eval.tasks

    own = Path(lm_eval.tasks.__file__).parent
    for name in set(names) & set(_TASKS):
        task = _TASKS[name]
        if not (files := _files(data, name, task)):
            continue
        splits = _by_split(files, data)
        if task.split not in splits:
            raise UserError(
                f"task {name}: {data} has its {', '.join(splits)} split, not {task.split}; the file of "
                "that split has it in its name"
            )
        kind = splits[task.split][0].suffix
        wanted = {
            split: [str(path.absolute()) for path in splits[split] if path.suffix == kind]
            for split in ("train", task.split)
            if split in splits
        }
        config = {
            "include": str(own / task.yaml),
            "task": name,
            "dataset_path": _READERS[kind],
            "dataset_name": None,
            "dataset_kwargs": {
                "data_files": {key: paths for key, paths in wanted.items() if paths}
            },
            "training_split": "train" if wanted.get("train") else None,
            "validation_split": None,
            "test_split": None,
            f"{task.split}_split": task.split,
        }
        # YAML holds JSON, but not the pairs of surrogates by which that escapes characters.
        text = json.dumps(config, ensure_ascii=False)
        (out / f"{name}.yaml").write_text(text, encoding="utf-8")


def check_answers(name: str, task: Any) -> None:
    """Raise `UserError` where the data of a task, once loaded, lacks its questions or answers.

    lm-eval takes the name of a column that is not there for the text, so that every choice is wrong.
    """
    columns = getattr(task.eval_docs, "column_names", None)
    for field in ("doc_to_text", "doc_to_target"):
        column = getattr(task.config, field, None)
        if columns and isinstance(column, str) and column.isidentifier() and column not in columns:
            remedy = f"{field} names a column"
            if name in _TASKS:
                remedy = f"take it as it lies on the hub ({_TASKS[name].name})"
            raise UserError(f"task {name}: its data has no {column}; {remedy}")


def _files(data: Path, name: str, task: _Task) -> list[Path]:
    """Return all files of a data set, without those of its other configurations."""
    owner, _, short = task.name.partition("/")
    files = set(data.glob(f"{name}*"))
    for place in (data / name, data / short, data / owner / short):
        inside = {path: path.relative_to(place).parts for path in place.rglob("*")}
        named = {p for p, parts in inside.items() if any(x.startswith(task.config) for x in parts)}
        files |= set(inside) if place.name == name and not named else named
    return sorted(path for path in files if path.suffix in _READERS)


def _by_split(files: list[Path], data: Path) -> dict[str, list[Path]]:
    """Group files by the word in their names, else in their folders'; files without one are of any split,
    so they are asked."""
    found: dict[str, list[Path]] = {}
    for path in files:
        splits = [
            split
            for part in reversed(path.relative_to(data).parts)
            for split, words in _SPLIT_NAMES.items()
            if re.search(rf"(?:^|[-_.])(?:{words})", part, re.IGNORECASE)
        ]
        if splits:
            found.setdefault(splits[0], []).append(path)
    return found or {split: files for split in ("validation", "test")}
