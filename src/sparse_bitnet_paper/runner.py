# SPDX-License-Identifier: Apache-2.0
"""Trains what a set of experiments still lacks, and keeps what is worth keeping of it."""

import dataclasses
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_bitnet.data.manifest import TOKENIZER
from sparse_bitnet.data.preparation import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.held_out import read_held_out
from sparse_bitnet.files import check_ours
from sparse_bitnet.host import available_cores
from sparse_bitnet.progress import Line, Progress
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.run_folder import run_lock
from sparse_bitnet.training.train_run import train
from sparse_bitnet.training.validation import identity_of
from sparse_bitnet_paper.estimate import Speed, cost
from sparse_bitnet_paper.machine import record_machine
from sparse_bitnet_paper.measured_run import measure
from sparse_bitnet_paper.paper_runs import plan
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import Scale
from sparse_bitnet_paper.setting import SETTING, make_setting
from sparse_bitnet_paper.training_run import Run
from sparse_bitnet_paper.workers import OnStep, parallel, serial

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
    other_text: Path | None = None,
    workers: int | None = None,
    budget_minutes: float | None = None,
    console: "Console",
    plain_lines: int = 0,
) -> Outcome:
    """Train every run of some experiments that `out` does not hold yet.

    Args:
        scale: sizes, text and recipe.
        experiments: names of `paper_runs.EXPERIMENTS`.
        out: folder of the set, new or continued; see `results`.
        seeds: instead of the scale's numbers of seeds.
        data: already prepared text; by default the scale's is prepared in `out/data`.
        other_text: file or glob of text, of which each model's perplexity is also measured.
        workers: runs trained at once; by default the scale's number, or one for each core.
        budget_minutes: no run is started that would end later than this, by the speed so far.
        console: for progress.
        plain_lines: lines that each run prints on its way where the console is not a terminal.

    Raises `UserError` for a folder of another setting or one in use, and `Interrupted` after SIGINT,
    when the runs under way have checkpoints: the same call continues them.
    """
    deadline = time.monotonic() + 60 * (float("inf") if budget_minutes is None else budget_minutes)
    results = Results(out)
    if data is None and not scale.text.source:
        raise UserError(
            f"scale {scale.name} trains on text of yours: prepare it and give the folder with --data "
            "(docs/method.md shows how)"
        )
    other = {row.other_text["name"] for row in results.rows if row.other_text}
    if other_text is not None and other - {other_text.name}:
        raise UserError(
            f"--other-text {other_text}: the models of {out} are measured on {min(other)}; give that, "
            "or choose another --out"
        )
    if not plan(scale, experiments, seeds, results.losses):
        why = "own-rates needs `search` first, and other experiments another scale"
        raise UserError(f"scale {scale.name} has no runs of {', '.join(experiments)}: {why}")
    check_ours(out, [SETTING, results.data.name], "a set of results")
    if (out / SETTING).is_file():  # refuses another scale before its text is prepared there
        results.check(_setting(results, scale, results.setting["data"]))
    with run_lock(out):
        data = data or prepare_text(scale, results.data)
        if other_text is not None:
            read_held_out(other_text, str(data / TOKENIZER))  # refuses what could not be read later
        results.open(_setting(results, scale, identity_of(data, verify=True)))
        record_machine(results, scale.recipe)
        whole = Outcome(0, -1, 0, ())
        while True:
            # What a search still lacks follows from the runs that have ended.
            runs = plan(scale, experiments, seeds, results.losses)
            done = finished(results, runs)
            pending = [run for run in runs if run.name not in done]
            skipped = len(done) if whole.skipped < 0 else whole.skipped
            with Progress(console, plain_lines=plain_lines) as progress:
                at_once = min(workers or default_workers(scale), max(1, len(pending)))
                part = _Set(results, pending, at_once, deadline, progress, other_text)
                ended = part.train(data, skipped)
            whole = dataclasses.replace(ended, trained=whole.trained + ended.trained)
            if not pending or whole.left or whole.failed:
                return whole


class _Set:
    """The runs of one call: which comes next, and what to do with those that have ended."""

    def __init__(
        self,
        results: Results,
        pending: list[Run],
        workers: int,
        deadline: float,
        progress: Progress,
        other_text: Path | None,
    ) -> None:
        self.results, self.pending, self.workers = results, pending, workers
        self.deadline, self.progress = deadline, progress
        self.other_text = other_text
        self.speed = Speed(results.rows)
        self.lines: dict[str, Line] = {}
        self.whole = progress.line("all runs")
        self.done = 0.0
        """Cost of the runs that have ended."""
        self.under_way: dict[str, tuple[Run, float]] = {}
        """Runs with their shares of steps done."""

    def train(self, data: Path, skipped: int) -> Outcome:
        work = partial(train_and_measure, self.results.path, data, self.other_text)
        ended = (
            serial(self._next(), work, self.step)
            if self.workers == 1
            else parallel(self._next(), work, self.step, self.workers)
        )
        trained = 0
        failed: list[str] = []
        for run, result in ended:
            del self.under_way[run.name]
            self.done += cost(run.config)
            self.lines.pop(run.name).end()
            head = f"[{trained + len(failed) + 1}/{len(self.pending)}] {run.name}"
            if isinstance(result, ResultRow):
                self.results.add(result)
                remove_checkpoints(self.results.path, run)
                self.speed.add(result)
                trained += 1
                self.progress.print(
                    f"{head}: perplexity {result.perplexity:.3f}, {result.seconds:.0f} s, "
                    f"{result.tokens_per_second:,.0f} tok/s"
                )
            else:
                failed.append(f"{run.name}: {result}")
                self.progress.print(f"{head} failed: {result}", style="red")
        started = trained + len(failed)
        return Outcome(trained, skipped, len(self.pending) - started, tuple(failed))

    def seed(self, run: Run) -> str:
        """In words, where the runs have several."""
        several = len({each.config.seed for each in self.pending}) > 1
        return f", seed {run.config.seed}" if several else ""

    def _next(self) -> Iterator[Run]:
        for run in self.pending:
            if time.monotonic() + (self.speed.seconds(run.config) or 0.0) > self.deadline:
                continue  # a smaller one may fit
            self.under_way[run.name] = run, 0.0
            self.lines[run.name] = self.progress.line(f"{run.purpose}{self.seed(run)}", "steps")
            yield run

    def step(self, name: str, row: dict[str, Any]) -> None:
        """`workers.OnStep`."""
        if name not in self.under_way:  # reported by a worker just before its run ended
            return
        run, _ = self.under_way[name]
        steps = run.config.steps
        self.under_way[name] = run, row["step"] / steps
        text = f"loss {row['loss']:.3f}" if row["step"] < steps else "scoring the held-out text"
        self.lines[name](row["step"], steps, text=text)
        part = sum(cost(run.config) * share for run, share in self.under_way.values())
        self.whole(self.done + part, sum(cost(run.config) for run in self.pending))


def train_and_measure(
    out: Path, data: Path, other_text: Path | None, run: Run, on_step: OnStep
) -> ResultRow:
    """One run from its config to its row; the row is for the caller to add to the results.

    Raises what `train` raises.
    """
    results = Results(out)
    config = dataclasses.replace(
        run.config,
        data=str(data),
        out=str(results.run(run.name)),
        # That of the set: "auto" may be another one here than where it was begun.
        precision="bf16" if results.setting["precision"] == "bfloat16" else "float32",
    )
    result = train(config, on_step=lambda row: on_step(run.name, row))
    return measure(results, run, config, result, other_text)


def remove_checkpoints(out: Path, run: Run) -> None:
    """With its row written a run needs none any more; the model itself stays in final/."""
    for name in ("checkpoints", "consolidated"):
        shutil.rmtree(Results(out).run(run.name) / name, ignore_errors=True)


def default_workers(scale: Scale) -> int:
    """The scale's own number, or as many as the recipe's threads leave room for."""
    if scale.workers is not None:
        return scale.workers
    if resolve_device(scale.recipe.device).type != "cpu" or scale.recipe.threads is None:
        return 1
    return max(1, available_cores() // scale.recipe.threads)


def finished(results: Results, runs: Sequence[Run]) -> dict[str, ResultRow]:
    """Rows of the runs that are finished.

    Raises `UserError` where a row's config is not that of the run of its name.
    """
    rows = {row.name: row for row in results.rows}
    done = {run.name: rows[run.name] for run in runs if run.name in rows}
    for run in runs:
        if run.name in done and (changed := run.differences(done[run.name].config)):
            raise UserError(
                f"{results.path}: {run.name} was trained with another config ({changed}); choose "
                "another --out"
            )
    return done


def prepare_text(scale: Scale, folder: Path) -> Path:
    """Tokenise the scale's text into `folder`; returns at once when that is done already."""
    text = scale.text
    source = parse_source(text.source, column=text.column, limit_bytes=text.limit_bytes)
    prepare(source, folder, tokenizer=text.tokenizer, vocab_size=text.vocab_size)
    return folder


def _setting(results: Results, scale: Scale, data: dict[str, Any]) -> dict[str, Any]:
    device = resolve_device(scale.recipe.device)
    dtype = str(resolve_dtype(scale.recipe.precision, device)).removeprefix("torch.")
    if scale.recipe.precision == "auto" and (results.path / SETTING).is_file():
        dtype = results.setting["precision"]  # the set goes on in the type it was begun in
    return make_setting(scale, data, device.type, dtype)
