# SPDX-License-Identifier: Apache-2.0
"""The paper's four models on real text in a few minutes: its table 2, its curves, one page.

Dense and sparse, full-precision and ternary, all from the same initial weights on the same batches.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sparse_bitnet.checkpoint.load import from_pretrained, load_tokenizer
from sparse_bitnet.errors import UserError
from sparse_bitnet.evaluation.sample_text import continue_text
from sparse_bitnet.files import write_atomic
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import drawings, perplexity_tables
from sparse_bitnet_paper.cells import Cell, cells_of, model_label
from sparse_bitnet_paper.page import (
    Block,
    Code,
    Facts,
    Items,
    Paragraph,
    Section,
    html,
)
from sparse_bitnet_paper.quickstart_scale import QuickstartConfig
from sparse_bitnet_paper.result_row import ResultRow
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runner import reproduce
from sparse_bitnet_paper.table import NOTHING, Table

SAMPLE_TOKENS = 96


@dataclass(frozen=True)
class QuickstartResult:
    """What a finished quickstart leaves behind."""

    results: Results
    cells: list[Cell]
    sample: str
    """What the sparse ternary model of the first seed wrote after the prompt."""

    model: Path
    """Folder of that model."""

    report: Path


def quickstart(config: QuickstartConfig, console: Console | None = None) -> QuickstartResult:
    """Prepare the text, train every model, compare them on held-out text, write the report.

    What a stopped call has finished is not done again. Shows progress on `console` (nothing without
    one).

    Raises `UserError` for bad input or a folder of another quickstart, `Interrupted` when stopped by
    a signal while training.
    """
    out = Path(config.out)
    outcome = reproduce(
        config.scale(),
        ["table2"],
        out,
        workers=config.workers,
        console=console or Console(quiet=True),
        plain_lines=5,
    )
    if outcome.failed:
        raise UserError("; ".join(outcome.failed))
    results = Results(out)
    model = out / results.by_seed(f"ternary-{config.pattern}")[0].checkpoint
    sample = continue_text(
        from_pretrained(model), load_tokenizer(model), config.prompt, max_new_tokens=SAMPLE_TOKENS
    )
    report = out / "report.html"
    title = f"Sparse-BitNet quickstart: {config.pattern} sparsity in four small models"
    write_atomic(report, html(title, quickstart_blocks(config, results, sample)))
    return QuickstartResult(results, cells_of(results, config.model), sample, model, report)


def quickstart_blocks(config: QuickstartConfig, results: Results, sample: str) -> list[Block]:
    """The page: table, curves and weights, a sample, and how far to trust it."""
    rows = {format: results.by_seed(format) for format in results.four_formats}
    first = [rows[format][0] for format in results.four_formats]
    of_all = [row for found in rows.values() for row in found.values()]
    cells = cells_of(results, config.model)
    made = dict(max(of_all, key=lambda row: row.provenance["date"]).provenance)
    versions = made.pop("versions")
    sparse_ternary = model_label("ternary", config.pattern)
    return [
        Paragraph(
            "Dense and sparse, full-precision and ternary models from the same initial weights "
            f"on the same batches ({config.model}; {config.source}, {first[0].tokens:,} training "
            "tokens per model), compared on held-out text.",
            "lead",
        ),
        Paragraph(
            f"{made['date'][:10]} · {made['hardware']} · commit {made['commit'] or 'release'}",
            "meta",
        ),
        Paragraph(perplexity_tables.verdict(cells), "verdict"),
        perplexity_tables.comparison_table(cells),
        Section("Curves and weights"),
        drawings.cost_figure(results),
        *drawings.course_figures(results),
        *drawings.dense_figures(results)[2:],
        Section("Weights of each model"),
        _weight_table(first),
        Section(f"A sample of the {sparse_ternary} model"),
        Code(sample, prompt=config.prompt),
        Section("How far to trust this"),
        Items(_caveats(config, first[0])),
        Section("Again, and further"),
        Code("\n".join(_commands(config, first[3]))),
        Section("Configuration"),
        Facts(_settings(config, of_all)),
        Section("Where and with what"),
        Facts(made | versions),
    ]


def _weight_table(rows: list[ResultRow]) -> Table:
    lines = []
    for row in rows:
        ternary = row.weight == "ternary"
        anyway = NOTHING
        if ternary and not row.is_dense:
            pruned = 1 - NMPattern.parse(row.pattern).density
            anyway = _percent(1 - (row.zero_fraction - row.code_zero_fraction) / pruned)
        lines.append(
            (
                model_label(row.weight, row.pattern),
                _percent(row.near_zero_mass),
                _percent(row.code_zero_fraction) if ternary else NOTHING,
                _percent(row.zero_fraction),
                anyway,
            )
        )
    head = ("model", "near zero", "codes 0", "zeros in the forward", "pruned that were 0 anyway")
    return Table(head, lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _caveats(config: QuickstartConfig, row: ResultRow) -> list[str]:
    shape = PRESETS[config.model]
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
        f"{row.precision}, float32 master weights (the paper: bfloat16).",
        f"Recipe: AdamW, peak learning rate {config.learning_rate:g}, cosine, the same for all four "
        "models; not tuned for any of them.",
        "Nothing here is faster because it is sparse or ternary: training simulates both in floating "
        "point. The gain is in packed inference.",
    ]


def _commands(config: QuickstartConfig, row: ResultRow) -> list[str]:
    final = f"{config.out}/{row.checkpoint}"
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


def _settings(config: QuickstartConfig, rows: list[ResultRow]) -> dict[str, Any]:
    shown = (
        *("model", "steps", "batch_size", "sequence_length", "learning_rate", "schedule"),
        *("warmup_fraction", "weight_decay", "beta1", "beta2", "epsilon", "gradient_clip"),
    )
    seconds = sum(row.seconds for row in rows)
    return {
        "source": config.source,
        "vocabulary": config.vocab_size,
        **{name: rows[0].config[name] for name in shown},
        "seeds": config.seeds,
        "training tokens": rows[0].tokens,
        "validation tokens": rows[0].validation_tokens,
        "time in steps": f"{seconds:.0f} s, summed over {len(rows)} models",
    }
