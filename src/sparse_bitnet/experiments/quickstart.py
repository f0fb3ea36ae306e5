"""The paper's four models on real text in five minutes: its table 2, its curves, one page.

Dense and sparse, full-precision and ternary, all from the same initial weights on the same batches.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from sparse_bitnet.data.prepare import prepare
from sparse_bitnet.data.sources import parse_source
from sparse_bitnet.data.tokenizer import load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.sampling import continue_text
from sparse_bitnet.experiments.provenance import provenance
from sparse_bitnet.experiments.quickstart_config import (
    QuickstartConfig,
    formats,
    run_configs,
    run_folder,
)
from sparse_bitnet.experiments.quickstart_report import quickstart_report
from sparse_bitnet.experiments.results import DENSE_PATTERN, ResultRow, read_rows, write_rows
from sparse_bitnet.experiments.runs_progress import runs_progress
from sparse_bitnet.experiments.workers import Ended, OnStep, parallel, serial
from sparse_bitnet.files import write_atomic
from sparse_bitnet.hub import from_pretrained
from sparse_bitnet.models import preset_config
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training import metrics
from sparse_bitnet.training.config import TrainConfig
from sparse_bitnet.training.device import resolve_device, resolve_dtype
from sparse_bitnet.training.train import RunResult, train

EXPERIMENT = "quickstart"
RESULTS = "results.jsonl"
REPORT = "report.html"
SAMPLE_TOKENS = 96


@dataclass(frozen=True)
class QuickstartResult:
    """What a finished quickstart leaves behind."""

    rows: list[ResultRow]
    sample: str
    """What the sparse ternary model of the first seed wrote after the prompt."""
    report: Path


def quickstart(config: QuickstartConfig, console: Console | None = None) -> QuickstartResult:
    """Prepare the text, train every model, compare them on held-out text, write the report.

    What a stopped call has finished is not done again. Shows progress on `console` (nothing without
    one).

    Raises `UserError` for bad input or a folder of another quickstart, `Interrupted` when stopped by
    a signal while training.
    """
    _check_pattern(config)
    prepare_text(config)
    rows = train_all(config, console or Console(quiet=True))
    final = run_folder(config, formats(config.pattern)[-1], 0) / "final"
    sample = continue_text(
        from_pretrained(final), load_tokenizer(final), config.prompt, max_new_tokens=SAMPLE_TOKENS
    )
    report = Path(config.out) / REPORT
    write_atomic(report, quickstart_report(config, rows, sample))
    return QuickstartResult(rows, sample, report)


def _check_pattern(config: QuickstartConfig) -> None:
    """Refuse what would only fail at the second model, a minute later."""
    pattern = NMPattern.parse(config.pattern)
    if pattern.is_dense:
        raise UserError(f"pattern={config.pattern} is dense; choose one that prunes, like 6:8")
    sizes = preset_config(config.model)
    pattern.check_divides(sizes.hidden_size, "q_proj")
    pattern.check_divides(sizes.intermediate_size, "down_proj")


def prepare_text(config: QuickstartConfig) -> None:
    """Tokenise the text into `out/data`; returns at once when that is done already."""
    source = parse_source(config.source)
    prepare(source, Path(config.out) / "data", vocab_size=config.vocab_size)


@dataclass(frozen=True)
class TrainingJob:
    """One of the quickstart's runs, as `workers` takes it."""

    config: TrainConfig

    @property
    def name(self) -> str:
        return self.config.out


def train_all(config: QuickstartConfig, console: Console) -> list[ResultRow]:
    """Train what is missing; `results.jsonl` gains a row after each run and loses none."""
    path = Path(config.out) / RESULTS
    known = {(row.format, row.seed): row for row in read_rows(path)}
    runs = run_configs(config)
    workers = config.workers or default_workers(len(runs))
    with runs_progress(runs, console, workers) as progress:
        for job, result in _trained(runs, workers, progress.step):
            if isinstance(result, UserError):
                raise result
            run = job.config
            row = known.get((run.format, run.seed))
            if row is None or row.config != asdict(run):
                known[run.format, run.seed] = result_row(run, result, Path(config.out))
                write_rows(path, list(known.values()))
            progress.finish(run, result.validation_perplexity)
    return [known[run.format, run.seed] for run in runs]


def default_workers(runs: int) -> int:
    """One run for each core, on a GPU one at a time."""
    if resolve_device("auto").type != "cpu":
        return 1
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return min(cores, runs)


def _trained(
    runs: Sequence[TrainConfig], workers: int, on_step: OnStep
) -> Iterator[Ended[TrainingJob, RunResult]]:
    """All runs as they end; first those that an earlier call has finished."""
    jobs = [TrainingJob(run) for run in runs]
    finished = [job for job in jobs if (Path(job.name) / "result.json").is_file()]
    pending = [job for job in jobs if job not in finished]
    yield from serial(finished, train_job, on_step)
    workers = min(workers, len(pending))
    if workers > 1:
        yield from parallel(pending, train_job, on_step, workers)
    else:
        yield from serial(pending, train_job, on_step)


def train_job(job: TrainingJob, on_step: OnStep) -> RunResult:
    """`workers.Work` of a quickstart."""
    return train(job.config, on_step=lambda row: on_step(job.name, row))


def result_row(run: TrainConfig, result: RunResult, out: Path) -> ResultRow:
    """One line of results.jsonl from a finished run."""
    device = resolve_device(run.device)
    where = {
        "threads": run.threads,
        "device": device.type,
        "precision": str(resolve_dtype(run.precision, device)).removeprefix("torch."),
    }
    timing = metrics.read_rows(Path(run.out) / metrics.TIMING_FILE)
    dense = run.format.endswith(f"-{DENSE_PATTERN}")
    return ResultRow(
        experiment=EXPERIMENT,
        format=run.format,
        seed=run.seed,
        model=run.model,
        steps=result.steps,
        tokens=result.tokens,
        perplexity=result.validation_perplexity,
        loss=result.validation_loss,
        validation_tokens=result.validation_tokens,
        training_loss=result.training_loss,
        zero_fraction=result.zero_fraction,
        flip_rate=None if dense else result.flip_rate,
        seconds=round(sum(row["seconds"] for row in timing), 3),
        checkpoint=str((Path(run.out) / "final").relative_to(out)),
        config=asdict(run),
        provenance=provenance() | where,
    )
