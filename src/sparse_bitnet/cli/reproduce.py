# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet reproduce`: the paper's experiments at a chosen scale."""

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sparse_bitnet.cli.arguments import Positional, command
from sparse_bitnet.errors import UserError, check_least
from sparse_bitnet.layer_config import DenseLayersOption
from sparse_bitnet_paper.runs import EXPERIMENTS, plan
from sparse_bitnet_paper.scales import Scale, find_scale

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(kw_only=True)
class ReproduceConfig(DenseLayersOption):
    """Which experiments, at what scale, where, and for how long."""

    experiments: Annotated[tuple[str, ...], Positional("[EXPERIMENT ...]")] = ("all",)
    """all, or some of table2, sweep, ablations, schedule and search; not part of all: ideas (every score,
    quantizer, activation and schedule)."""

    scale: str = "cpu"
    """smoke (seconds) or cpu (1 to 2.5 hours on 2 cores)."""

    out: Path | None = None
    """Folder of the results, new or continued; default runs/SCALE."""

    seeds: int | None = None
    """Seeds of every experiment, instead of the scale's own numbers."""

    data: Path | None = None
    """Text prepared by `sparse-bitnet prepare`, instead of the scale's own."""

    workers: int | None = None
    """Runs trained at once; default: one for each core."""

    threads: int | None = None
    """CPU threads of each run; default: the scale's own."""

    budget_minutes: float | None = None
    """Start only runs that would end within this many minutes."""

    dry_run: bool = False
    """Print what would be trained, and train nothing."""


@command("reproduce")
def main(options: ReproduceConfig) -> None:
    """Train the runs of the paper's experiments; those that are done are skipped.

    Args:
        options: what to train.
    """
    check_least(options, workers=1, budget_minutes=0)
    scale = dataclasses.replace(find_scale(options.scale), dense_layers=options.dense_globs)
    if options.threads is not None:
        recipe = dataclasses.replace(scale.recipe, threads=options.threads)
        scale = dataclasses.replace(scale, recipe=recipe)
    names = options.experiments
    chosen = [each for name in names for each in (EXPERIMENTS if name == "all" else (name,))]
    chosen = list(dict.fromkeys(chosen))
    from rich.console import Console

    console = Console()
    out = options.out or Path("runs") / scale.name
    if options.dry_run:
        dry_run(scale, chosen, out, options, console)
        return
    run(
        scale,
        chosen,
        out=out,
        seeds=options.seeds,
        data=options.data,
        workers=options.workers,
        budget_minutes=options.budget_minutes,
        console=console,
    )


def run(
    scale: Scale, experiments: list[str], *, out: Path, console: "Console", **options: Any
) -> None:
    """Train and report in one line how it ended; `options` are those of `reproduce`."""
    from sparse_bitnet.training.run_folder import Interrupted
    from sparse_bitnet_paper.reproduce import reproduce

    try:
        outcome = reproduce(scale, experiments, out, console=console, **options)
    except Interrupted as stop:
        print(f"{stop}; the same command continues from there")
        sys.exit(130)
    print(
        f"{out}: {outcome.trained} runs trained, {outcome.skipped} were done before; "
        f"`sparse-bitnet report {out}` shows the results"
    )
    if outcome.left:
        print(f"{outcome.left} runs did not fit into the budget; the same command trains them")
    if outcome.failed:
        raise UserError("; ".join(outcome.failed))


def dry_run(
    scale: Scale, experiments: list[str], out: Path, options: ReproduceConfig, console: "Console"
) -> None:
    """Print which runs there are, which are done in `out`, and how long the others take."""
    from sparse_bitnet.presets import PRESETS
    from sparse_bitnet.progress import duration
    from sparse_bitnet_paper.record import seconds, trained_weights
    from sparse_bitnet_paper.reproduce import default_workers
    from sparse_bitnet_paper.results import Results
    from sparse_bitnet_paper.tables import table

    rows, runs = Results(out).rows, plan(scale, experiments, options.seeds)
    done = {run.name for run in runs} & set(rows.name)
    print(f"{out}: {len(done)} of {len(runs)} runs are done")
    workers, vocab = options.workers or default_workers(scale), scale.text.get("vocab_size")
    lines, left = [], 0.0
    for model in dict.fromkeys(run.config.model for run in runs):
        own = [run for run in runs if run.config.model == model]
        config, count = own[0].config, sum(run.name not in done for run in own)
        tokens = config.steps * config.tokens_per_step
        minutes = count * seconds(config, rows, vocab) / workers / 60 if count else 0.0
        left += 60 * minutes
        lines.append(
            {
                "model": model,
                "runs": f"{len(own)}",
                "done": f"{len(own) - count}",
                "tokens": f"{tokens:.3g}",
                "a weight": f"{tokens / trained_weights(PRESETS[model], vocab):.1f}",
                "minutes": f"{minutes:.1f}",
            }
        )
    table(lines).print(console, f"Scale {scale.name}: {scale.summary}")
    note = f"About {duration(left)} left on this machine, {workers} runs at once."
    console.print(note, style="dim", highlight=False)
    for run in runs:
        mark = "done" if run.name in done else "    "
        console.print(f"{mark}  {run.name}", highlight=False, soft_wrap=True)
