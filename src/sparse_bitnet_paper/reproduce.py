# SPDX-License-Identifier: Apache-2.0
"""Trains the missing runs of a set of experiments, keeps their results, and scores their models.

Runs are trained in this process one after another, or several at once in processes of their own. Models
of a few million weights keep one core busy and hardly two: two runs of one thread each take little more
than half the time of the same two runs with two threads, and give the same numbers.
"""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from sparse_bitnet.data.documents import SPLITS
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.harness import accuracies, evaluate_tasks
from sparse_bitnet.files import check_ours, write_atomic
from sparse_bitnet.host import available_cores
from sparse_bitnet.progress import Line, Progress
from sparse_bitnet.provenance import provenance
from sparse_bitnet.training.device import resolve_device
from sparse_bitnet.training.run_folder import Interrupted, run_lock, stop_signals
from sparse_bitnet_paper.record import OnStep, flops, train_and_measure
from sparse_bitnet_paper.results import (
    DOWNSTREAM,
    SETTING,
    Measured,
    Results,
    json_lines,
    make_setting,
)
from sparse_bitnet_paper.runs import Run, plan
from sparse_bitnet_paper.scales import Scale

_REPORT_SECONDS = 0.25


class Outcome(NamedTuple):
    """Result of a call of `reproduce`."""

    trained: int
    skipped: int
    """Runs finished by an earlier call."""
    failed: tuple[str, ...]
    """Messages of runs that could not be trained."""


def reproduce(
    scale: Scale,
    experiments: Sequence[str],
    out: Path,
    *,
    seeds: int | None = None,
    data: Path | None = None,
    workers: int | None = None,
    console: Console,
) -> Outcome:
    """Train every run of some experiments that `out` does not hold yet.

    `experiments` are names of `runs.EXPERIMENTS`, or "ideas"; `seeds`, `data` and `workers` override
    those of the scale. Its text is prepared in `out/data`. Progress goes to `console`.

    Returns the `Outcome`. Raises `UserError` for a folder of another setting or one in use, and
    `Interrupted` after SIGINT, once all runs in progress have checkpoints: the same call resumes them.
    """
    results, runs = Results(out), plan(scale, experiments, seeds)
    check_ours(out, [SETTING, results.data.name], "a set of results")
    if (out / SETTING).is_file():  # refuses another scale before its text is prepared there
        results.check(make_setting(scale, results.setting["data"]))
    with run_lock(out):
        if data is None:
            data, text = results.data, dict(scale.text)
            tokens = {key: text.pop(key, None) for key in ("tokenizer", "vocab_size")}
            prepare(parse_source(text.pop("source"), **text), data, **tokens)
        splits = [TokenDataset.open(data, split) for split in SPLITS]
        if splits[0].is_chat:
            raise UserError(f"{data} holds conversations: the experiments train on plain text")
        results.open(make_setting(scale, {split.split: split.identity() for split in splits}))
        pending = [run for run in runs if run.name not in set(results.rows.name)]
        # By default as many runs as fit the cores with the recipe's threads.
        threads = scale.recipe.threads
        on_cpu = resolve_device(scale.recipe.device).type == "cpu"
        fitting = available_cores() // threads if on_cpu and threads else 1
        at_once = min(workers or scale.workers or max(1, fitting), max(1, len(pending)))
        with Progress(console, plain_lines=5) as progress:
            queue = _Queue(results, pending, progress)
            for run, result in _trained(queue, out, data, queue.step, at_once):
                queue.end(run, result)
    return Outcome(queue.ended - len(queue.failed), len(runs) - len(pending), tuple(queue.failed))


def score(
    scale: Scale,
    out: Path,
    tasks: Sequence[str],
    include_path: Path | None,
    limit: int | None,
    seeds: int,
) -> int:
    """Score the trained models of table 2 in `out` on lm-eval tasks (table 1), those of seeds below
    `seeds`; skips those that are done. `tasks`, `include_path` and `limit` are those of `evaluate_tasks`.

    Returns how many models were scored. Raises `UserError` when no model is there, or for what
    `evaluate_tasks` raises.
    """
    results, lines = Results(out), Results(out).scores
    asked = [*tasks, *([f"limit {limit}"] if limit else [])]
    trained = results.rows.set_index("name")
    names = [run.name for run in plan(scale, ["table2"], seeds) if run.name in trained.index]
    if not names:
        raise UserError(f"{out}: no model of table 2 is trained yet; `reproduce table2` does it")
    known = {line["run"] for line in lines if line["asked"] == asked}
    new = [name for name in names if name not in known]
    lines.sort(key=lambda line: line["asked"] == asked)  # the report shows the last line's tasks
    write_atomic(out / DOWNSTREAM, json_lines(lines))
    for name in new:
        print(f"scoring {name}")
        row = trained.loc[name]
        scores = evaluate_tasks(
            out / row.checkpoint,
            tasks,
            include_path=include_path,
            fewshot=0,
            limit=limit,
            precision="bf16" if row.precision == "bfloat16" else "float32",
            device=row.device,
        )
        questions = {task: n["effective"] for task, n in scores["n-samples"].items()}
        if lacking := sorted(questions.keys() - accuracies(scores).keys()):
            raise UserError(f"task {lacking[0]} has no acc, the accuracy of table 1: leave it out")
        lines.append(
            {
                "run": name,
                "asked": asked,
                "tasks": accuracies(scores),
                "questions": questions,
                "lm_eval": scores.get("lm_eval_version"),
                "provenance": provenance(),
            }
        )
        write_atomic(out / DOWNSTREAM, json_lines(lines))
    return len(new)


class _Queue:
    """The runs of one call: an iterator over the runs to train, which shows progress."""

    def __init__(self, results: Results, pending: list[Run], progress: Progress) -> None:
        self.results, self.pending, self.progress = results, pending, progress
        self.ended, self.failed = 0, list[str]()
        self.lines: dict[str, Line] = {}
        self.whole = progress.line("all runs")
        self.steps = {run.name: run.config.steps for run in pending}
        vocab = results.setting["data"]["train"]["vocab_size"]
        self.work = {
            run.name: flops(run.config.model, run.config.steps * run.config.tokens_per_step, vocab)
            for run in pending
        }
        self.done = dict.fromkeys(self.work, 0.0)
        """Share of each run's steps that is done."""

    def __iter__(self) -> Iterator[Run]:
        for run in self.pending:
            self.lines[run.name] = self.progress.line(run.name, "steps")
            yield run

    def step(self, name: str, row: dict[str, Any]) -> None:
        """Show a step; see `record.OnStep`."""
        if name not in self.lines:  # reported by a worker just before its run ended
            return
        steps = self.steps[name]
        self.done[name] = row["step"] / steps
        text = f"loss {row['loss']:.3f}" if row["step"] < steps else "scoring the held-out text"
        self.lines[name](row["step"], steps, text=text)
        done = sum(share * self.work[run] for run, share in self.done.items())
        self.whole(done, sum(self.work.values()))

    def end(self, run: Run, result: Measured | UserError) -> None:
        """Keep the results of a run, and report how it ended."""
        self.ended += 1
        self.done[run.name] = 1.0
        self.lines.pop(run.name).end()
        head = f"[{self.ended}/{len(self.pending)}] {run.name}"
        if isinstance(result, UserError):
            self.failed.append(f"{run.name}: {result}")
            self.progress.note(f"{head} failed: {result}", style="red")
            return
        self.results.add(result)
        # A run with a row needs no checkpoint; the model itself stays in final/.
        for name in ("checkpoints", "consolidated"):
            shutil.rmtree(self.results.run(run.name) / name, ignore_errors=True)
        row, _ = result
        self.progress.note(
            f"{head}: perplexity {row['perplexity']:.3f}, {row['seconds']:.0f} s, "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )


def _trained(
    runs: Iterable[Run], out: Path, data: Path, on_step: OnStep, workers: int
) -> Iterator[tuple[Run, Measured | UserError]]:
    """Train `workers` runs at a time, in the order of `runs`; yield each as it ends.

    The next run starts when the caller asks for the next result. On SIGINT every run in progress saves a
    checkpoint; then `Interrupted` is raised.
    """
    if workers == 1:
        for run in runs:
            try:
                yield run, train_and_measure(out, data, run, on_step)
            except UserError as error:
                yield run, error
        return
    # Workers are forked from a process that has imported the training code and nothing else.
    context = multiprocessing.get_context("forkserver")
    imported = ["torch.distributed.checkpoint", "transformers.models.qwen2.modeling_qwen2"]
    context.set_forkserver_preload(["sparse_bitnet_paper.record", *imported])
    steps = context.Queue()
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (steps,))
    waiting, stopped = iter(runs), threading.Event()
    under_way: dict[Future[Measured], Run] = {}

    def stop() -> None:
        stopped.set()
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)

    with pool, stop_signals(stop):
        try:
            while True:
                while len(under_way) < workers and not stopped.is_set():
                    if (new := next(waiting, None)) is None:
                        break
                    under_way[pool.submit(_in_worker, out, data, new)] = new
                if not under_way:
                    break
                ended, _ = wait(under_way, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                while not steps.empty():
                    on_step(*steps.get())
                for future in ended:
                    run = under_way.pop(future)
                    try:
                        yield run, future.result()
                    except UserError as error:
                        yield run, error
                    except Interrupted:
                        stopped.set()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process died, perhaps for lack of memory; the same command resumes, "
                "and --workers 1 needs the least"
            ) from error
        except BaseException:
            if not stopped.is_set():
                stop()
            raise
    if stopped.is_set():
        raise Interrupted("stopped; run the same command to resume the runs from their checkpoints")


_worker_steps: Any = None


def _begin_worker(steps: Any) -> None:
    """Leave the terminal's process group: only the first process gets Ctrl-C; it stops the workers."""
    global _worker_steps
    _worker_steps = steps
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Unsent progress must not keep a worker alive.
    steps.cancel_join_thread()


def _in_worker(out: Path, data: Path, run: Run) -> Measured:
    reported, parent = 0.0, multiprocessing.parent_process()

    def report(name: str, row: dict[str, Any]) -> None:
        nonlocal reported
        if parent is not None and not parent.is_alive():
            os._exit(1)  # the process that collects results has gone
        if time.monotonic() - reported > _REPORT_SECONDS or row["step"] == run.config.steps:
            reported = time.monotonic()
            _worker_steps.put((name, {key: row[key] for key in ("step", "loss")}))

    # `train` listens by itself, once its model is built; before and after there is nothing to save.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return train_and_measure(out, data, run, report)
    except KeyboardInterrupt as stop:
        raise Interrupted from stop
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
