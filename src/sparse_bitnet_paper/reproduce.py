# SPDX-License-Identifier: Apache-2.0
"""Trains what a set of experiments still lacks, keeps what is worth keeping of it, and scores its models.

Runs are trained in this process one after another, or several at once in processes of their own. Models
of a few million weights keep one core busy and hardly two: two runs of one thread each take little more
than half the time of the same two runs with two threads, and give the same numbers.
"""

import contextlib
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty
from typing import TYPE_CHECKING, Any

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
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.run_folder import Interrupted, run_lock, stop_signals
from sparse_bitnet_paper.record import OnStep, flops, seconds, train_and_measure
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

if TYPE_CHECKING:
    from rich.console import Console

TrainOne = Callable[[Run, OnStep], Measured]
"""Trains one run; a picklable function. Raises what `train` raises."""

Ended = tuple[Run, Measured | UserError]
"""A run that was trained, or could not be."""

_REPORT_SECONDS = 0.25
_IMPORTED = [
    "sparse_bitnet_paper.record",
    "torch.distributed.checkpoint",
    "transformers.models.qwen2.modeling_qwen2",
]


@dataclass(frozen=True)
class Outcome:
    """How a call of `reproduce` ended."""

    trained: int
    skipped: int
    """Runs finished by an earlier call."""

    left: int
    """Runs not started, because they would not have fitted into the budget."""

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
    budget_minutes: float | None = None,
    console: "Console",
    plain_lines: int = 0,
) -> Outcome:
    """Train every run of some experiments that `out` does not hold yet.

    Args:
        scale: sizes, text and recipe.
        experiments: names of `runs.EXPERIMENTS`, or "ideas".
        out: folder of the set, new or continued; see `results`.
        seeds: instead of the scale's numbers of seeds.
        data: already prepared text; by default the scale's is prepared in `out/data`.
        workers: runs trained at once; by default the scale's number, or one for each core.
        budget_minutes: no run is started that would end later than this, by the speed so far.
        console: for progress.
        plain_lines: lines that each run prints on its way where the console is not a terminal.

    Raises `UserError` for a folder of another setting or one in use, and `Interrupted` after SIGINT,
    when the runs under way have checkpoints: the same call continues them.
    """
    deadline = time.monotonic() + 60 * (math.inf if budget_minutes is None else budget_minutes)
    results = Results(out)
    runs = plan(scale, experiments, seeds)
    if not runs:
        raise UserError(f"scale {scale.name} has no runs of {', '.join(experiments)}")
    check_ours(out, [SETTING, results.data.name], "a set of results")
    if (out / SETTING).is_file():  # refuses another scale before its text is prepared there
        results.check(_setting(results, scale, results.setting["data"]))
    with run_lock(out):
        data = data or prepare_text(scale, results.data)
        splits = [TokenDataset.open(data, split) for split in SPLITS]
        identity = {split.split: split.identity() for split in splits}
        results.open(_setting(results, scale, identity))
        pending = [run for run in runs if run.name not in set(results.rows.name)]
        at_once = min(workers or default_workers(scale), max(1, len(pending)))
        work = partial(train_and_measure, out, data)
        with Progress(console, plain_lines=plain_lines) as progress:
            queue = _Queue(results, pending, deadline, progress)
            for run, result in _trained(queue, work, queue.step, at_once):
                queue.end(run, result)
    left = len(pending) - queue.ended
    return Outcome(
        queue.ended - len(queue.failed), len(runs) - len(pending), left, tuple(queue.failed)
    )


def score(
    scale: Scale,
    out: Path,
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    seeds: int = 1,
) -> int:
    """Score the trained models of table 2 on lm-eval tasks (table 1); skips those that are done.

    Args:
        scale: scale of the results.
        out: folder of the results; the models are in its run folders.
        tasks, include_path, limit: as in `evaluate_tasks`.
        seeds: models of seeds below this one are scored.

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
    for name in new:
        print(f"scoring {name}")
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


class _Queue:
    """The runs of one call: an iterator over those that fit into the budget, which shows progress."""

    def __init__(
        self, results: Results, pending: list[Run], deadline: float, progress: Progress
    ) -> None:
        self.results, self.pending = results, pending
        self.deadline, self.progress = deadline, progress
        self.ended, self.failed = 0, list[str]()
        self.lines: dict[str, Line] = {}
        self.whole = progress.line("all runs")
        self.work = {
            run.name: flops(run.config.model, run.config.steps * run.config.tokens_per_step)
            for run in pending
        }
        self.done = dict.fromkeys(self.work, 0.0)
        """Share of each run's steps that is done."""

    def __iter__(self) -> Iterator[Run]:
        several = len({run.config.seed for run in self.pending}) > 1
        for run in self.pending:
            needed = seconds(run.config, self.results.rows) if self.deadline < math.inf else 0.0
            if time.monotonic() + needed > self.deadline:
                continue  # a smaller one may fit
            seed = f", seed {run.config.seed}" if several else ""
            self.lines[run.name] = self.progress.line(f"{run.purpose}{seed}", "steps")
            yield run

    def step(self, name: str, row: dict[str, Any]) -> None:
        """Show a step; see `record.OnStep`."""
        if name not in self.lines:  # reported by a worker just before its run ended
            return
        steps = next(run.config.steps for run in self.pending if run.name == name)
        self.done[name] = row["step"] / steps
        text = f"loss {row['loss']:.3f}" if row["step"] < steps else "scoring the held-out text"
        self.lines[name](row["step"], steps, text=text)
        done = sum(share * self.work[run] for run, share in self.done.items())
        self.whole(done, sum(self.work.values()))

    def end(self, run: Run, result: Measured | UserError) -> None:
        """Keep what a run has left, and say how it ended."""
        self.ended += 1
        self.done[run.name] = 1.0
        self.lines.pop(run.name).end()
        head = f"[{self.ended}/{len(self.pending)}] {run.name}"
        if isinstance(result, UserError):
            self.failed.append(f"{run.name}: {result}")
            self.progress.note(f"{head} failed: {result}", style="red")
            return
        self.results.add(result)
        # With its row written a run needs no checkpoint; the model itself stays in final/.
        for name in ("checkpoints", "consolidated"):
            shutil.rmtree(self.results.run(run.name) / name, ignore_errors=True)
        row, _ = result
        self.progress.note(
            f"{head}: perplexity {row['perplexity']:.3f}, {row['seconds']:.0f} s, "
            f"{row['tokens_per_second']:,.0f} tok/s"
        )


def default_workers(scale: Scale) -> int:
    """Return the scale's own number, or how many runs the recipe's threads leave room for at once."""
    if scale.workers is not None:
        return scale.workers
    if resolve_device(scale.recipe.device).type != "cpu" or scale.recipe.threads is None:
        return 1
    return max(1, available_cores() // scale.recipe.threads)


def prepare_text(scale: Scale, folder: Path) -> Path:
    """Tokenise the scale's text into `folder`; return at once when that is done already."""
    text = dict(scale.text)
    tokens = {key: text.pop(key, None) for key in ("tokenizer", "vocab_size")}
    prepare(parse_source(text.pop("source"), **text), folder, **tokens)
    return folder


def _setting(results: Results, scale: Scale, data: dict[str, Any]) -> dict[str, Any]:
    device = resolve_device(scale.recipe.device)
    dtype = str(resolve_dtype(scale.recipe.precision, device)).removeprefix("torch.")
    if scale.recipe.precision == "auto" and (results.path / SETTING).is_file():
        dtype = results.setting["precision"]  # the set goes on in the type it was begun in
    return make_setting(scale, data, device.type, dtype)


def _trained(
    runs: Iterable[Run], train_one: TrainOne, on_step: OnStep, workers: int
) -> Iterator[Ended]:
    """Train `workers` runs at a time, in the order of `runs`, yielded as they end.

    The next run is taken when one before has been dealt with. On SIGINT every run under way saves a
    checkpoint; then `Interrupted` is raised.
    """
    if workers == 1:
        for run in runs:
            try:
                yield run, train_one(run, on_step)
            except UserError as error:
                yield run, error
        return
    # Processes are forked from one that has imported what training takes, and nothing else.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    steps = context.Queue()
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (steps,))
    waiting, stopped = iter(runs), threading.Event()
    under_way: dict[Future[Measured], Run] = {}

    def stop() -> None:
        stopped.set()
        for process in multiprocessing.active_children():
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.kill(process.pid, signal.SIGINT)

    with pool, stop_signals(stop):
        try:
            while True:
                while len(under_way) < workers and not stopped.is_set():
                    if (new := next(waiting, None)) is None:
                        break
                    under_way[pool.submit(_in_worker, train_one, new)] = new
                if not under_way:
                    break
                ended, _ = wait(under_way, timeout=_REPORT_SECONDS, return_when=FIRST_COMPLETED)
                with contextlib.suppress(Empty):
                    while True:
                        on_step(*steps.get_nowait())
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
                "a worker process died, perhaps for want of memory; the same command resumes, "
                "and --workers 1 needs the least"
            ) from error
        except BaseException:
            if not stopped.is_set():
                stop()
            raise
    if stopped.is_set():
        raise Interrupted("stopped; every run under way has a checkpoint")


_worker_steps: Any = None
_asked_to_stop = threading.Event()


def _begin_worker(steps: Any) -> None:
    """Leave the terminal's process group, so that Ctrl-C comes once, from the first process."""
    global _worker_steps
    _worker_steps = steps
    os.setpgrp()
    # `train` listens by itself, once its model is built; while measuring there is nothing to save.
    signal.signal(signal.SIGINT, lambda number, frame: _asked_to_stop.set())
    # Half-sent progress must not keep a worker from ending.
    steps.cancel_join_thread()


def _in_worker(train_one: TrainOne, run: Run) -> Measured:
    reported, parent = 0.0, multiprocessing.parent_process()

    def report(name: str, row: dict[str, Any]) -> None:
        nonlocal reported
        if parent is not None and not parent.is_alive():
            signal.raise_signal(signal.SIGTERM)
        if _asked_to_stop.is_set():
            _asked_to_stop.clear()
            signal.raise_signal(signal.SIGINT)
        if time.monotonic() - reported > _REPORT_SECONDS or row["step"] == run.config.steps:
            reported = time.monotonic()
            _worker_steps.put((name, {key: row[key] for key in ("step", "loss")}))

    try:
        return train_one(run, report)
    finally:
        if parent is not None and not parent.is_alive():
            os._exit(1)
