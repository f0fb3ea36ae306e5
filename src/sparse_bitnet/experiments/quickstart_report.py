"""The page of a finished quickstart: its curves and weights drawn, its limits named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.analysis.figures import (
    Bar,
    Curve,
    cost_bars,
    flip_rate_curves,
    loss_curves,
    running_mean,
    sparsity_cost_curves,
    weight_histograms,
)
from sparse_bitnet.analysis.paper_figures import threshold_overlay
from sparse_bitnet.analysis.weights import WeightStatistics, checkpoint_statistics, pool
from sparse_bitnet.experiments.html_report import Figure, Report, render_report
from sparse_bitnet.experiments.quickstart_config import QuickstartConfig, formats
from sparse_bitnet.experiments.results import DENSE_PATTERN, ResultRow, cells, paper_cells
from sparse_bitnet.experiments.table import NOTHING, comparison_table, model_label, verdict
from sparse_bitnet.models import PRESETS
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.training.metrics import METRICS_FILE, read_rows


def quickstart_report(config: QuickstartConfig, rows: Sequence[ResultRow], sample: str) -> str:
    """HTML of the rows of `train_all`, with the curves and weights read from their run folders."""
    out = Path(config.out)
    weights = {row.format: _weights(out, row) for row in rows if row.seed == 0}
    newest = max(rows, key=lambda row: row.provenance["date"])
    data = f"{config.source}, {rows[0].tokens:,} training tokens per model"
    return render_report(
        Report(
            title=f"Sparse-BitNet quickstart: {config.pattern} sparsity in four small models",
            lead=(
                "Dense and sparse, full-precision and ternary models from the same initial weights "
                f"on the same batches ({config.model}; {data}), compared on held-out text."
            ),
            verdict=verdict(rows, config.pattern),
            table=comparison_table(rows, config.pattern),
            figures=_figures(config, rows, weights),
            weights=_weight_table(config, weights),
            sample_title=f"A sample of the {_label(formats(config.pattern)[-1])} model",
            sample_prompt=config.prompt,
            sample=sample,
            caveats=_caveats(config, rows),
            commands=_commands(config, rows),
            config=_config(config, rows),
            provenance=newest.provenance,
        )
    )


def _label(format: str) -> str:
    weight, _, pattern = format.partition("-")
    return model_label(weight, pattern)


def _weights(out: Path, row: ResultRow) -> WeightStatistics:
    return pool(checkpoint_statistics(out / row.checkpoint))


def _thresholds(out: Path, row: ResultRow, pattern: str) -> WeightStatistics:
    """What `pattern` would cut in a densely trained model."""
    return pool(checkpoint_statistics(out / row.checkpoint, pattern=NMPattern.parse(pattern)))


def _curve(out: Path, row: ResultRow, column: str) -> Curve:
    logged = read_rows((out / row.checkpoint).parent / METRICS_FILE)
    steps = [each for each in logged if each.get(column) is not None]
    validations = [
        (each["step"], each["validation_loss"]) for each in logged if "validation_loss" in each
    ]
    return Curve(
        label=_label(row.format),
        weight=row.weight,
        sparse=row.pattern != DENSE_PATTERN,
        steps=[each["step"] for each in steps],
        values=[each[column] for each in steps],
        points=validations if column == "loss" else (),
    )


def _figures(
    config: QuickstartConfig, rows: Sequence[ResultRow], weights: dict[str, WeightStatistics]
) -> list[Figure]:
    out, pattern = Path(config.out), config.pattern
    first = [row for row in rows if row.seed == 0]
    losses = [_curve(out, row, "loss") for row in first]
    sparse = [row for row in first if row.pattern != DENSE_PATTERN]
    narrow, wide = _odd(config.steps // 30), _odd(config.steps // 8)
    seed = " of seed 0" if config.seeds > 1 else ""
    costs, spread = _costs(config, rows, wide)
    return [
        Figure(
            f"What {pattern} costs",
            cost_bars(_bars(rows, pattern), x_label=f"perplexity of {pattern} over dense (%)"),
            "Each model against the dense one of its own weight format: this run, and what the "
            "paper reports for models of 0.5 to 3 billion weights.",
        ),
        Figure(
            "Loss",
            loss_curves(losses, smoothing=narrow),
            f"Training loss{seed}, mean over {narrow} steps; dots are the held-out loss at the end.",
        ),
        Figure(
            "Cost of sparsity during training",
            sparsity_cost_curves(costs, smoothing=1, spread=spread),
            f"Sparse minus dense loss on the very same batches, mean over {wide} steps"
            + (f" and {config.seeds} seeds, with their range." if config.seeds > 1 else ".")
            + " Differences that the loss curves are too coarse to show.",
        ),
        Figure(
            "Mask flips",
            flip_rate_curves([_curve(out, row, "flip_rate") for row in sparse], smoothing=narrow),
            f"Share of mask positions that change from one step to the next{seed}: exploration "
            "first, then a settled mask as the learning rate falls.",
        ),
        Figure(
            "Weights after training",
            weight_histograms(
                [(curve, weights[row.format]) for curve, row in zip(losses, first, strict=True)]
            ),
            f"Master weights{seed} of all block linears in units of their layer's mean |weight|. The "
            "grey band rounds to the ternary code 0.",
        ),
        Figure(
            "Where the mask would cut",
            threshold_overlay(
                [
                    (_label(row.format), row.weight, {"all": _thresholds(out, row, pattern)})
                    for row in first
                    if row.pattern == DENSE_PATTERN
                ]
            ),
            f"The densely trained models{seed}: |weight|, filled, and as a line the largest |weight| "
            f"that {pattern} would remove from each group. The less they overlap, the less the mask "
            "costs.",
        ),
    ]


def _odd(width: int) -> int:
    return max(1, width // 2 * 2 + 1)


def _bars(rows: Sequence[ResultRow], pattern: str) -> list[Bar]:
    groups = {"this run": cells(rows, pattern)}
    groups |= {f"paper, {size}": cell for size, cell in paper_cells(pattern).items()}
    return [
        Bar(
            group=group,
            weight=cell.weight,
            value=cell.relative.mean,
            low=cell.relative.low,
            high=cell.relative.high,
        )
        for group, column in groups.items()
        for cell in column
        if cell.relative
    ]


def _costs(
    config: QuickstartConfig, rows: Sequence[ResultRow], width: int
) -> tuple[list[Curve], list[np.ndarray]]:
    """Smoothed sparse-minus-dense loss of each weight format, mean and range over the seeds."""
    out = Path(config.out)
    found = {(row.format, row.seed): row for row in rows}
    curves, spread = [], []
    for weight in ("full", "ternary"):
        differences = []
        for seed in range(config.seeds):
            dense, sparse = (
                _curve(out, found[f"{weight}-{pattern}", seed], "loss")
                for pattern in (DENSE_PATTERN, config.pattern)
            )
            differences.append(running_mean(np.subtract(sparse.values, dense.values), width))
        curves.append(
            Curve(
                label=weight,
                weight=weight,
                sparse=True,
                steps=dense.steps,
                values=np.mean(differences, axis=0),
            )
        )
        spread.append(np.stack([np.min(differences, axis=0), np.max(differences, axis=0)]))
    return curves, spread if config.seeds > 1 else []


def _weight_table(
    config: QuickstartConfig, weights: dict[str, WeightStatistics]
) -> list[tuple[str, ...]]:
    head = ("model", "near zero", "codes 0", "zeros in the forward", "pruned that were 0 anyway")
    table: list[tuple[str, ...]] = [head]
    pruned_share = 1 - NMPattern.parse(config.pattern).density
    for format, found in weights.items():
        ternary, dense = format.startswith("ternary"), format.endswith(f"-{DENSE_PATTERN}")
        pruned = pruned_share * found.weights
        already = 1 - (found.zeros - found.code_zeros) / pruned
        table.append(
            (
                _label(format),
                f"{100 * found.near_zero_mass:.1f} %",
                f"{100 * found.code_zero_fraction:.1f} %" if ternary else NOTHING,
                f"{100 * found.zero_fraction:.1f} %",
                f"{100 * already:.1f} %" if ternary and not dense else NOTHING,
            )
        )
    return table


def _caveats(config: QuickstartConfig, rows: Sequence[ResultRow]) -> list[str]:
    shape = PRESETS[config.model]
    row = rows[0]
    precision = row.provenance.get("precision", "float32")
    return [
        f"Size: {shape.block_weights / 1e6:.1f} M block weights and {row.tokens / 1e6:.1f} M training "
        "tokens per model; the paper trains 0.5 to 3 B weights on about 50 B tokens. At this size the "
        "differences between dense and sparse are small and depend on the seed.",
        f"Seeds: {config.seeds}. "
        + (
            "One seed gives one number, not an error bar; repeat with --seeds 3 or more."
            if config.seeds == 1
            else "The table shows the mean and the least and greatest value; with this few seeds that "
            "is a range, not a confidence interval."
        ),
        f"Text: {config.source}; held-out documents are chosen by hash, {row.validation_tokens:,} "
        "tokens. Another Python version ships another standard library, so perplexities compare "
        "within one report only, and not with the paper's (another text, another vocabulary).",
        f"Context: windows of {config.sequence_length} tokens that do not overlap. Compute type: "
        f"{precision}, float32 master weights (the paper: bfloat16).",
        f"Recipe: AdamW, peak learning rate {config.learning_rate:g}, cosine, the same for all four "
        "models; not tuned for any of them.",
        "Nothing here is faster because it is sparse or ternary: training simulates both in floating "
        "point. The gain is in packed inference.",
    ]


def _commands(config: QuickstartConfig, rows: Sequence[ResultRow]) -> list[str]:
    final = f"{config.out}/{rows[3].checkpoint}"
    pattern = "2:4" if config.pattern != "2:4" else "6:8"
    return [
        "# the spread over three seeds",
        f"sparse-bitnet quickstart --seeds 3 --out {config.out}-seeds",
        "# more text from the sparse ternary model, and its perplexity on a text of your own",
        f'sparse-bitnet generate {final} --prompt "import "',
        f"sparse-bitnet evaluate {final} --data my-text.txt",
        "# another pattern on the same data",
        f"sparse-bitnet train --data {config.out}/data --format ternary-{pattern} --out my-run",
    ]


def _config(config: QuickstartConfig, rows: Sequence[ResultRow]) -> dict[str, Any]:
    run = rows[0].config
    shown = (
        "model",
        "steps",
        "batch_size",
        "sequence_length",
        "learning_rate",
        "schedule",
        "warmup_fraction",
        "weight_decay",
        "beta1",
        "beta2",
        "epsilon",
        "gradient_clip",
    )
    seconds = sum(row.seconds for row in rows)
    return {
        "source": config.source,
        "vocabulary": config.vocab_size,
        **{name: run[name] for name in shown},
        "seeds": config.seeds,
        "training tokens": rows[0].tokens,
        "validation tokens": rows[0].validation_tokens,
        "time in steps": f"{seconds:.0f} s, summed over {len(rows)} models",
    }
