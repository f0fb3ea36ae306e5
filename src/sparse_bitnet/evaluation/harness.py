# SPDX-License-Identifier: Apache-2.0
"""Tasks through lm-eval, in this process: its tasks, its scores, its result format.

lm-eval drives the model. Here the model is loaded once, its masks and codes are selected once, and
lm-eval's errors become one line. The paper's five tasks also read data sets in a local folder, as stored
by `hf download Rowan/hellaswag --repo-type dataset --local-dir FOLDER/hellaswag`, or one file
FOLDER/TASK*.jsonl.
"""

import json
import logging
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from sparse_bitnet.checkpoint.load import load_tokenizer
from sparse_bitnet.checkpoint.open_checkpoint import find_checkpoint
from sparse_bitnet.engine.engine_options import EngineOptions
from sparse_bitnet.errors import UserError, install, reason_of
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.nn.convert import selected
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.logits import check_logits

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


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


def evaluate_tasks(
    checkpoint: str | Path,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    precision: str = "auto",
    device: str = "auto",
    engine: EngineOptions | None = None,
) -> dict[str, Any]:
    """Score a checkpoint on lm-eval tasks.

    Args:
        checkpoint: run folder, checkpoint folder, or any transformers folder or hub id.
        tasks, include_path: as in `load_tasks`.
        fewshot: number of examples before each question; None: the task's own.
        limit: score only this many questions of each task, from the first.
        batch_size: sequences per forward.
        precision, device: as in `TrainConfig`; not for an engine.
        engine: options of the CPU engine, to score a packed folder with it.

    Returns lm-eval's result dictionary ("results", "configs", "versions", "n-shot", ...), ready for
    JSON. Raises `UserError` as `load_tasks`, and for errors of lm-eval.
    """
    loaded, manager = load_tasks(tasks, include_path)
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import handle_non_serializable

    with ExitStack() as stack:
        if engine is None:
            stored, where = find_checkpoint(checkpoint), resolve_device(device)
            dtype, network = resolve_dtype(precision, where), cast(Any, stored.load)
            # lm-eval warns of options that a loaded model ignores; none is set here.
            logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)
            model: Any = HFLM(
                pretrained=network(dtype=torch.float32).to(where).eval(),
                tokenizer=load_tokenizer(stored.folder),
                backend="causal",
                batch_size=batch_size,
                mixed_precision_dtype=None if dtype == torch.float32 else dtype,
                softmax_dtype="float32",
            )
            check_logits(model._model)
            stack.enter_context(selected(model._model))
        else:
            from sparse_bitnet.evaluation.engine_lm import EngineLM

            opened = open_model(checkpoint, engine)
            stack.callback(opened.engine.close)
            model = EngineLM(opened, batch_size=batch_size)
        logged = stack.enter_context(_lm_eval_errors("--tasks"))
        results = simple_evaluate(
            model=model,
            tasks=loaded,
            # Without this, lm-eval would read all of its task files again.
            task_manager=manager,
            num_fewshot=fewshot,
            limit=limit,
            log_samples=False,
            bootstrap_iters=1000,
        )
    for message in logged:
        print(f"sparse-bitnet: lm-eval: {message}", file=sys.stderr)
    for task in results["configs"]:
        if not any("," in key for key in results["results"].get(task, ())):
            raise UserError(f"task {task}: lm-eval computes none of its metrics (metric_list)")
    results["config"]["model"] = str(checkpoint)
    # lm-eval writes its files the same way.
    return json.loads(json.dumps(results, default=handle_non_serializable))


def accuracies(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return acc and, where there is one, acc_norm of every task, not of groups, of lm-eval's results."""
    scores: dict[str, dict[str, float]] = {}
    for task, values in results["results"].items():
        metrics = [name for name in ("acc", "acc_norm") if f"{name},none" in values]
        known = {name: float(values[f"{name},none"]) for name in metrics}
        if "acc" in known and task not in results.get("group_subtasks", {}):
            scores[task] = known
    return scores


def load_tasks(
    tasks: Sequence[str], include_path: str | Path | None = None
) -> tuple[list[Any], "TaskManager"]:
    """Load tasks and their data; return tasks and groups, and lm-eval's index of them. Names may be
    joined by commas; "paper" stands for the paper's five. A task in a group is scored only as part of
    the group.

    `include_path` is a folder of data sets of the paper's five tasks, or of your own task files (.yaml),
    which replace lm-eval's of the same name; both work offline.

    Raises `UserError` if lm-eval is not installed, for an unknown task, data that cannot be loaded or
    has no answers, and a task that two groups hold.
    """
    try:
        import lm_eval.tasks
    except ImportError as error:
        remedy = install("lm-eval")
        raise UserError(f"tasks need lm-eval, which is not installed: {remedy}") from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    asked = [name for task in tasks for name in task.split(",")]
    names = [name for task in asked for name in (PAPER_TASKS if task == "paper" else (task,))]
    loaded: dict[str, Any] = {}
    held: set[str] = set()
    with tempfile.TemporaryDirectory() as made:
        if include_path is None:
            manager = lm_eval.tasks.TaskManager()
        elif not Path(include_path).is_dir():
            raise UserError(f"--include-path {include_path}: no such folder")
        else:
            write_task_files(names, Path(include_path), Path(made))
            paths: list[str | Path] = [made, str(include_path)]  # the user's own task files win
            manager = lm_eval.tasks.TaskManager(include_path=paths, include_defaults=False)
            # Reading lm-eval's thousands of files takes seconds: only if needed.
            if not set(names) <= set(manager.all_tasks):
                manager = lm_eval.tasks.TaskManager(include_path=paths)
        for name in names:
            if name not in manager.all_tasks:
                raise UserError(
                    f"task {name!r} is unknown to lm-eval; `lm-eval ls tasks` lists its tasks, "
                    "--include-path adds others"
                )
            with _lm_eval_errors(f"task {name}") as logged:
                parts = manager.load(name)
            if logged:
                raise UserError(f"task {name}: lm-eval: {logged[0]}")
            for part, task in parts["tasks"].items():
                _check_answers(part, task)
                if lacking := [each for each, mean in task.aggregation().items() if mean is None]:
                    raise UserError(f"task {part}: lm-eval has no such aggregation of {lacking[0]}")
            if name in parts["groups"]:
                held |= parts["tasks"].keys() | parts["groups"].keys() - {name}
                loaded[name] = parts["groups"][name]
            else:
                loaded |= parts["tasks"]
    kept = [item for name, item in loaded.items() if name not in held]
    try:
        manager.load(kept)
    except ValueError as error:
        raise UserError(f"--tasks: {error}; score one group at a time") from error
    return kept, manager


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
                raise UserError(f"task {name}: {path} is not of the split {task.split}")
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
        (out / f"{name}.yaml").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")


def _check_answers(name: str, task: Any) -> None:
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


@contextmanager
def _lm_eval_errors(failure: str) -> Iterator[list[str]]:
    """Turn an error of lm-eval inside into a `UserError`: `failure`, then the error itself.

    Yields the list of errors that lm-eval only logs, such as a metric that it does not know. Errors of
    our own code and of the model keep their traceback.
    """
    messages: list[str] = []
    logger, handler = logging.getLogger("lm_eval"), logging.Handler(logging.ERROR)
    handler.emit = lambda record: messages.append(" ".join(record.getMessage().split()))  # type: ignore[method-assign]
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield messages
    except UserError:
        raise
    except Exception as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        modules = {frame.f_globals.get("__name__", "") for frame in frames} - {__name__}
        if any(name.startswith(("sparse_bitnet.", "transformers.", "torch.")) for name in modules):
            raise
        traceback.clear_frames(error.__traceback__)  # ends the line of a progress bar
        lines = [line for line in str(error).splitlines() if any(map(str.isalnum, line))]
        reason = f"{type(error).__name__}: {reason_of(ValueError(' '.join(lines)))}"
        # A download can fail in too many ways to name: network, hub client, loading script, files.
        if any(frame.f_code.co_name == "download" for frame in frames):
            raise UserError(
                f"{failure}: its data set cannot be loaded ({reason}); without a network, name a folder "
                "of data sets or task files with --include-path"
            ) from error
        raise UserError(f"{failure}: lm-eval: {messages[0] if messages else reason}") from error
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
