"""Trains what a set of experiments still lacks, and keeps what is worth keeping of it."""

import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.data.prepare import prepare
from sparse_bitnet.data.shards import TokenDataset
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments.measure import measure
from sparse_bitnet.experiments.paper import Run, plan
from sparse_bitnet.experiments.progress import SetProgress
from sparse_bitnet.experiments.scales import Scale
from sparse_bitnet.experiments.speed import Speed
from sparse_bitnet.experiments.store import ResultFolder, RunRow, make_setting
from sparse_bitnet.experiments.workers import OnStep, parallel, serial
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.run_folder import run_lock
from sparse_bitnet.training.train import train

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Outcome:
    """How a call of `reproduce` ended."""

    trained: int
    skipped: int
    """Finished by an earlier call."""

    left: int
    """Not started, because they would not have fitted into the budget."""

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
) -> Outcome:
    """Train every run of some experiments that `out` does not hold yet.

    Args:
        scale: sizes, text and recipe.
        experiments: names of `paper.EXPERIMENTS`.
        out: folder of the set, new or continued; see `store`.
        seeds: instead of the scale's numbers of seeds.
        data: already prepared text; by default the scale's is prepared in `out/data`.
        workers: runs trained at once; by default the scale's number, or one for each core.
        budget_minutes: no run is started that would end later than this, by the speed so far.
        console: for progress.

    Raises `UserError` for a folder of another setting or one in use, and `Interrupted` after SIGINT,
    when the runs under way have checkpoints: the same call continues them.
    """
    deadline = time.monotonic() + 60 * (float("inf") if budget_minutes is None else budget_minutes)
    folder = ResultFolder(out)
    runs = plan(scale, experiments, seeds)
    out.mkdir(parents=True, exist_ok=True)
    with run_lock(out):
        data = data or _prepare(scale, folder)
        folder.open(_setting(scale, data))
        done = _done(folder, runs)
        pending = [run for run in runs if run.name not in done]
        workers = min(workers or default_workers(scale), max(1, len(pending)))
        return _Set(folder, pending, workers, deadline, console).train(data, skipped=len(done))


class _Set:
    """The runs of one call: which comes next, and what to do with those that have ended."""

    def __init__(
        self,
        folder: ResultFolder,
        pending: list[Run],
        workers: int,
        deadline: float,
        console: "Console",
    ) -> None:
        self.folder, self.pending, self.workers = folder, pending, workers
        self.deadline = deadline
        self.speed = Speed(folder.rows())
        self.progress = SetProgress(
            console, len(pending), sum(self.speed.cost(run.config) for run in pending)
        )
        self.unfinished = {run.name: run for run in pending}
        self.started = 0

    def train(self, data: Path, skipped: int) -> Outcome:
        out, step = self.folder.path, self.progress.step
        work = partial(train_and_measure, out, data)
        trained, failed = 0, []
        with self.progress:
            ended = (
                serial(self._next(), work, step)
                if self.workers == 1
                else parallel(self._next(), work, step, self.workers)
            )
            for run, result in ended:
                del self.unfinished[run.name]
                if isinstance(result, RunRow):
                    self.folder.add(result)
                    remove_checkpoints(out, run)
                    self.speed.add(result)
                    trained += 1
                else:
                    failed.append(f"{run.name}: {result}")
                self.progress.end(run, result, self._seconds_left())
        return Outcome(trained, skipped, len(self.pending) - self.started, tuple(failed))

    def _next(self) -> Iterator[Run]:
        for run in self.pending:
            if time.monotonic() + (self.speed.seconds(run.config) or 0.0) > self.deadline:
                return
            self.started += 1
            self.progress.start(run, self.speed.cost(run.config))
            yield run

    def _seconds_left(self) -> float:
        left = sum(self.speed.seconds(run.config) or 0.0 for run in self.unfinished.values())
        return left / self.workers


def train_and_measure(out: Path, data: Path, run: Run, on_step: OnStep) -> RunRow:
    """One run from its config to its row; the row is for the caller to add to the results.

    Raises what `train` raises.
    """
    folder = ResultFolder(out)
    config = dataclasses.replace(run.config, data=str(data), out=str(folder.run(run.name)))
    result = train(config, on_step=lambda row: on_step(run.name, row))
    return measure(folder, run, config, result)


def remove_checkpoints(out: Path, run: Run) -> None:
    """With its row written a run needs none any more; the model itself stays in final/."""
    for name in ("checkpoints", "consolidated"):
        shutil.rmtree(ResultFolder(out).run(run.name) / name, ignore_errors=True)


def default_workers(scale: Scale) -> int:
    """The scale's own number, or as many as the recipe's threads leave room for."""
    if scale.workers is not None:
        return scale.workers
    if resolve_device(scale.recipe.device).type != "cpu" or scale.recipe.threads is None:
        return 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // scale.recipe.threads)


def _done(folder: ResultFolder, runs: Sequence[Run]) -> dict[str, RunRow]:
    """Rows of the runs that are finished.

    Raises `UserError` where a row's config is not that of the run of its name.
    """
    rows = {row.name: row for row in folder.rows()}
    done = {run.name: rows[run.name] for run in runs if run.name in rows}
    for run in runs:
        if run.name in done and (changed := run.differences(done[run.name].config)):
            raise UserError(
                f"{folder.results}: {run.name} was trained with another config ({changed}); choose "
                "another --out"
            )
    return done


def _prepare(scale: Scale, folder: ResultFolder) -> Path:
    text = scale.text
    source = parse_source(text.source, column=text.column, limit_bytes=text.limit_bytes)
    prepare(source, folder.data, tokenizer=text.tokenizer, vocab_size=text.vocab_size)
    return folder.data


def _setting(scale: Scale, data: Path) -> dict[str, Any]:
    splits = ("train", "validation")
    identity = {split: TokenDataset.open(data, split).identity() for split in splits}
    device = resolve_device(scale.recipe.device)
    dtype = str(resolve_dtype(scale.recipe.precision, device)).removeprefix("torch.")
    return make_setting(scale, identity, device.type, dtype)
