# SPDX-License-Identifier: Apache-2.0
"""The paper's commands: `quickstart`, `reproduce`, `report` and `analyze`."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from sparse_bitnet.cli.arguments import command, parse
from sparse_bitnet.errors import UserError, check_least, refuse_unused
from sparse_bitnet.layer_config import DenseLayersOption
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet_paper.runs import EXPERIMENTS, plan
from sparse_bitnet_paper.scales import QuickstartConfig, Scale, find_scale

if TYPE_CHECKING:
    from rich.console import Console

GPU_FLOPS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""Dense bfloat16 FLOP/s of the SXM boards, from the makers' data sheets."""
UTILISATION = 0.4
"""Share of that rate that training reaches."""


def quickstart(arguments: list[str]) -> None:
    """Train the paper's four models, compare them, write a report."""
    run_quickstart(parse(QuickstartConfig, arguments, prog="sparse-bitnet quickstart"))


def run_quickstart(config: QuickstartConfig) -> None:
    """Print progress, the table and where everything is."""
    from rich.console import Console

    from sparse_bitnet_paper.quickstart import quickstart

    console = Console()
    began = time.monotonic()
    try:
        result = quickstart(config, console)
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(str(stop) or "stopped; run the same command to resume") from stop
    result.comparison.print(console, f"Held-out perplexity, {config.model}, {config.source}")
    console.print(f"\n{result.verdict}", highlight=False)
    heading = f"\nternary-{config.pattern} continues {config.prompt!r}:"
    console.print(heading, style="bold", highlight=False, markup=False)
    console.print(f"{config.prompt}{result.sample}", highlight=False, markup=False)
    minutes, seconds = divmod(round(time.monotonic() - began), 60)
    print(
        f"\nreport:  {result.report}\nresults: {config.out}/results.jsonl\n"
        f"models:  {result.model.parent.parent}/*/final\ntime:    {minutes} min {seconds} s"
    )


@dataclass(kw_only=True)
class ReproduceConfig(DenseLayersOption):
    """Experiments to run: which, at what scale, where, and for how long."""

    GROUPS: ClassVar = {
        **{"dense_layers": "training", "scale": "", "data": "training", "workers": ""},
        **{"tasks": "tasks of table1", "dry_run": ""},
    }

    experiments: Annotated[tuple[str, ...], "[EXPERIMENT ...]"] = ("all",)
    """Experiments to run: all (table2, sweep, ablations, schedule and search), or any of these, ideas
    (scores, quantizers, activations and schedules beyond the paper) and table1 (tasks, after table2)."""

    scale: Literal["smoke", "cpu", "gpu", "paper"] = "cpu"
    """Model sizes and training lengths. smoke: a test in seconds. cpu: 1 to 2.5 hours on 2 cores. gpu: 25
    minutes on an H200. paper: the paper's own."""

    out: Path | None = None
    """Folder for the results; finished runs in it are skipped. Default: runs/SCALE."""

    seeds: int | None = None
    """Number of seeds of every experiment. Default: set by the scale; 1 for table1."""

    data: Path | None = None
    """Folder written by `sparse-bitnet prepare`, to train on instead of the scale's own text."""

    workers: int | None = None
    """Number of runs trained at the same time. Default: one for each core, or four on a GPU."""

    tasks: str = "paper"
    """lm-eval tasks, separated by commas; `paper`: the paper's five zero-shot tasks."""

    include_path: Path | None = None
    """Folder of data sets or task files, for use without a network; see `evaluate --help`."""

    limit: int | None = None
    """Score only the first N questions of each task."""

    dry_run: bool = False
    """Print the runs and their sizes without training."""


@command("reproduce")
def reproduce(options: ReproduceConfig) -> None:
    """Train the models of the paper's experiments. The same command resumes after an interruption."""
    from rich.console import Console

    check_least(options, workers=1, limit=1)
    scale = dataclasses.replace(find_scale(options.scale), dense_layers=options.dense_globs)
    if options.data is not None:
        summary = f"{scale.summary.partition(', on ')[0]}, on a text prepared beforehand"
        scale = dataclasses.replace(scale, text={}, summary=summary)
    names = options.experiments
    chosen = [each for name in names for each in (EXPERIMENTS if name == "all" else (name,))]
    scores = "table1" in chosen
    if scores:
        chosen = [*(name for name in chosen if name != "table1"), "table2"]
    else:
        refuse_unused(options, ("tasks", "include_path", "limit"), "only table1 scores tasks")
    chosen, out = list(dict.fromkeys(chosen)), options.out or Path("runs") / scale.name
    if options.dry_run:
        _dry_run(scale, chosen, out, options.seeds, Console())
        return
    given = {name: getattr(options, name) for name in ("seeds", "data", "workers")}
    tasks = options.tasks.split(",")
    if scores:  # before hours of training
        from sparse_bitnet.evaluation.harness import load_tasks

        load_tasks(tasks, options.include_path)
    train_set(scale, chosen, out=out, console=Console(), **given)
    if scores:
        from sparse_bitnet_paper.reproduce import score

        count = score(scale, out, tasks, options.include_path, options.limit, options.seeds or 1)
        print(f"{count} models scored; `sparse-bitnet report {out}` writes table 1")


def train_set(scale: Scale, experiments: Sequence[str], *, out: Path, **options: Any) -> None:
    """Train and report in one line how it ended; `options` are those of `reproduce`."""
    from sparse_bitnet.training.device import resolve_device
    from sparse_bitnet_paper.reproduce import reproduce

    if scale.needs_gpu and resolve_device("auto").type == "cpu":
        raise UserError(f"--scale {scale.name} needs a GPU; --dry-run prints how many hours of one")
    outcome = reproduce(scale, experiments, out, **options)
    print(
        f"{out}: {outcome.trained} runs trained, {outcome.skipped} done before; "
        f"`sparse-bitnet report {out}` writes tables and figures"
    )
    if outcome.failed:
        raise UserError("; ".join(outcome.failed))


def _dry_run(
    scale: Scale, experiments: list[str], out: Path, seeds: int | None, console: "Console"
) -> None:
    """Print which runs there are and which are done in `out`; of GPUs, how many hours the others take."""
    from sparse_bitnet.presets import PRESETS
    from sparse_bitnet_paper.record import flops, trained_weights
    from sparse_bitnet_paper.results import Results
    from sparse_bitnet_paper.tables import table

    runs, vocab, lines = plan(scale, experiments, seeds), scale.text.get("vocab_size"), []
    done, total = {run.name for run in runs} & set(Results(out).rows.name), 0.0
    print(f"{out}: {len(done)} of {len(runs)} runs are done")
    for model in dict.fromkeys(run.config.model for run in runs):
        own = [run for run in runs if run.config.model == model]
        count = sum(run.name in done for run in own)
        tokens = own[0].config.steps * own[0].config.tokens_per_step
        total += (len(own) - count) * flops(model, tokens, vocab)
        lines.append(
            {
                "model": model,
                "runs": f"{len(own)}",
                "done": f"{count}",
                "tokens": f"{tokens:.3g}",
                "tokens/weight": f"{tokens / trained_weights(PRESETS[model], vocab):.1f}",
            }
        )
    table(lines).print(console, f"Scale {scale.name}: {scale.summary}")
    if scale.needs_gpu:
        hours = {gpu: total / (3600 * UTILISATION * rate) for gpu, rate in GPU_FLOPS.items()}
        each = ", ".join(f"{gpu} {count:,.2f}" for gpu, count in hours.items())
        console.print(f"Remaining hours on one GPU at {UTILISATION:.0%} of its bf16 peak: {each}.")
    for run in runs:
        mark = "done" if run.name in done else "    "
        console.print(f"{mark}  {run.name}", highlight=False, soft_wrap=True)


@command("report")
def report(
    folders: Annotated[tuple[Path, ...], "FOLDER ..."],
    document: Path | None = None,
    engine: Path | None = None,
) -> None:
    """Write tables and figures of the experiments next to the paper's, and a verdict on each claim.

    Args:
        folders: Folders written by `reproduce`, one page each.
        document: Markdown file of the first page. Default: report.md in the first folder. Other pages go
            to a folder of the same name (report/), figures to figures/ beside it.
        engine: File written by `bench --out` with several patterns, for table 3.
    """
    from rich.console import Console

    from sparse_bitnet_paper.claims import claims
    from sparse_bitnet_paper.report import write_report
    from sparse_bitnet_paper.statistics import judged
    from sparse_bitnet_paper.tables import table

    document = document or folders[0] / "report.md"
    if document.suffix != ".md":
        raise UserError(f"--document {document}: name a .md file")
    for results in write_report(folders, document, engine):
        columns = {"claim": "short", "model": "model", "verdict": "verdict", "measured": "result"}
        lines = [
            {column: getattr(claim, name) for column, name in columns.items()}
            for claim in judged(claims(results))
        ]
        if lines:
            title = f"The paper's claims at scale {results.name}, corrected for these alone"
            table(lines, numeric=False).print(Console(), title)
    print(f"{document}: first page of the report, with links to the others")


@dataclass(kw_only=True)
class AnalyzeConfig(DenseLayersOption):
    """Checkpoints to analyze, and the folder of the result."""

    GROUPS: ClassVar = {"dense_layers": "layers", "out": ""}

    checkpoints: Annotated[tuple[str, ...], "CHECKPOINT ..."]
    """Run folders, checkpoint folders, transformers folders with safetensors, or hub ids."""

    out: Path = Path("analysis")
    """Folder to write weights.html (figures) and weights.json (counts of every layer) to."""

    pattern: str = "6:8"
    """N:M pattern whose pruning thresholds are drawn."""


@command("analyze")
def analyze(options: AnalyzeConfig) -> None:
    """Write weight histograms, pruning thresholds, and shares of near-zero weights and zero codes."""
    from rich.console import Console
    from rich.text import Text

    from sparse_bitnet_paper.weights import read_checkpoint, summary_table, write_weight_report

    pattern = NMPattern.parse(options.pattern)
    if pattern.is_dense:
        raise UserError(f"--pattern {pattern} keeps every weight and has no threshold")
    console = Console()
    weights = []
    for name in options.checkpoints:
        with console.status(Text(f"reading {name}")):
            weights.append(read_checkpoint(name, pattern, options.dense_globs))
    if len({each.label for each in weights}) < len(weights):
        pairs = zip(weights, options.checkpoints, strict=True)
        weights = [dataclasses.replace(each, label=name) for each, name in pairs]
    summary_table(weights).print(console, "")
    write_weight_report(weights, pattern, options.out)
    print(f"{options.out}/weights.html: figures; {options.out}/weights.json: counts of every layer")
