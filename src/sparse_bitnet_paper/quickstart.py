# SPDX-License-Identifier: Apache-2.0
"""The paper's four models on real text in a few minutes: its table 2, its curves, one page.

Dense and sparse, full-precision and ternary, all from the same initial weights on the same batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import write_atomic
from sparse_bitnet.generation.open_model import open_model
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import figures, tables
from sparse_bitnet_paper.report import render
from sparse_bitnet_paper.reproduce import reproduce
from sparse_bitnet_paper.results import CURVE_POINTS, Results
from sparse_bitnet_paper.scales import QuickstartConfig

SAMPLE_TOKENS = 96


@dataclass(frozen=True)
class QuickstartResult:
    """Results and files of a finished quickstart."""

    results: Results
    comparison: tables.Table
    verdict: str
    sample: str
    """Text that the sparse ternary model of the first seed wrote after the prompt."""

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
    results, report = Results(out), out / "report.html"
    rows = tables.four_models(results, config.model)
    model = out / rows[f"ternary-{config.pattern}"].checkpoint[0]
    opened = open_model(model)
    sample = opened.generate(config.prompt, max_tokens=SAMPLE_TOKENS)
    opened.engine.close()
    comparison, words = tables.comparison_table(rows), verdict(rows)
    provenance = results.rows.provenance
    page = render(
        "quickstart.html.j2",
        title=f"Sparse-BitNet quickstart: {config.pattern} sparsity in four small models",
        config=config,
        shape=PRESETS[config.model],
        rows={format: own.loc[0] for format, own in rows.items()},
        pruned=1 - NMPattern.parse(config.pattern).density,
        seconds=results.rows.seconds.sum(),
        made=provenance[provenance.str["date"].idxmax()],
        verdict=words,
        comparison=comparison,
        costs=figures.cost_figure(results),
        course=figures.course_figures(results),
        weights=figures.dense_figures(results),
        stretch=-(-config.steps // CURVE_POINTS),
        smooth=figures.SMOOTH,
        sample=sample,
    )
    write_atomic(report, page)
    return QuickstartResult(results, comparison, words, sample, model, report)


def verdict(rows: Mapping[str, pd.DataFrame]) -> str:
    """Return what the comparison says in one sentence, and how far to trust it in a second.

    `rows`: see `tables.four_models`.
    """
    ours = tables.sparsity_costs(tables.perplexities(rows))
    pattern = ours.columns[0].partition("-")[2]
    theirs = tables.paper_models(pattern).get("0.5B")
    costs = None if theirs is None else tables.sparsity_costs(theirs)
    return " ".join(render("verdict.txt.j2", pattern=pattern, ours=ours, theirs=costs).split())
