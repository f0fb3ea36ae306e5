"""The page of one or more sets of results: every table, figure and claim, from result files alone."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.errors import UserError
from sparse_bitnet.experiments import paper_tables as tables
from sparse_bitnet.experiments.claims import claims
from sparse_bitnet.experiments.decision import RULE
from sparse_bitnet.experiments.document import (
    Block,
    Code,
    Items,
    Notes,
    Section,
    Text,
    html,
    markdown,
)
from sparse_bitnet.experiments.report_figures import (
    ablation_drawings,
    heat_map_drawing,
    histogram_drawing,
    sweep_drawing,
    threshold_drawing,
)
from sparse_bitnet.experiments.result_set import ResultSet
from sparse_bitnet.files import write_atomic
from sparse_bitnet.models import PRESETS

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "The paper's experiments, repeated"


def write_report(
    folders: Sequence[Path], *, document: Path | None = None, page: Path | None = None
) -> list[ResultSet]:
    """Render sets of results and return them.

    Args:
        folders: of `reproduce`, in the order of the chapters.
        document: Markdown file; its figures go to `figures/` beside it.
        page: self-contained HTML file.

    Raises `UserError` for a folder without results.
    """
    sets = [ResultSet.read(folder) for folder in folders]
    blocks = report_blocks(sets)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(page, html(TITLE, blocks))
    if document is not None:
        text, files = markdown(TITLE, blocks, "figures")
        (document.parent / "figures").mkdir(parents=True, exist_ok=True)
        for name, svg in files.items():
            write_atomic(document.parent / "figures" / name, svg)
        write_atomic(document, text)
    return sets


def print_claims(results: ResultSet, console: "Console") -> None:
    """The table of claims, short enough for a terminal."""
    from rich import box
    from rich.table import Table

    title = f"The paper's claims at scale {results.setting['scale']}"
    table = Table("claim", "model", "verdict", "measured", title=title, box=box.SIMPLE_HEAD)
    for claim in claims(results):
        table.add_row(claim.text, claim.model, claim.verdict, claim.result)
    console.print(table)


def report_blocks(sets: Sequence[ResultSet]) -> list[Block]:
    """Everything the page shows. Raises `UserError` for a set without a single run."""
    blocks: list[Block] = [
        Text(
            "Every number and every verdict on this page is computed from the result files named in "
            "its chapter; the page is the output of `sparse-bitnet report "
            f"{' '.join(str(results.folder.path) for results in sets)}`. full and ternary are the "
            "paper's BF16 and BitNet; perplexity (PPL) is that of the whole held-out text."
        )
    ]
    for results in sets:
        if not results.rows:
            raise UserError(f"{results.folder.path}: no finished run yet; `reproduce` trains them")
        blocks += _chapter(results)
    return blocks


def _chapter(results: ResultSet) -> list[Block]:
    name = results.setting["scale"]
    blocks: list[Block] = [
        Section(f"Scale {name}"),
        *_setting(results),
        Section(f"The paper's claims at this scale ({name})", 3),
        Text(RULE),
        tables.claim_grid(claims(results)),
    ]
    notes = results.folder.path / "notes.md"
    if notes.is_file():
        blocks += [Section(f"What to make of it ({name})", 3), Notes(notes.read_text())]
    blocks += _table2(results) + _sweep(results) + _ablations(results) + _schedule(results)
    blocks += _analyses(results) + _downstream(results) + _search(results)
    return blocks


def _setting(results: ResultSet) -> list[Block]:
    setting, rows = results.setting, results.rows
    hardware = sorted({row.provenance["hardware"] for row in rows})
    commits = sorted({row.provenance["commit"] or "release" for row in rows})
    dates = sorted(row.provenance["date"][:10] for row in rows)
    last = max(rows, key=lambda row: row.provenance["date"])
    versions = ", ".join(f"{n} {v}" for n, v in last.provenance["versions"].items())
    recipe, text = setting["recipe"], setting["data"]
    between = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return [
        Text(f"{_capital(setting['summary'])}. Results: `{results.folder.path}`."),
        tables.effort_grid(results),
        Items(
            (
                f"Text: {setting['text']['source']}, {text['train']['tokens']:,} training and "
                f"{text['validation']['tokens']:,} held-out tokens, vocabulary "
                f"{text['train']['vocab_size']:,}.",
                f"Recipe of every run: {recipe['batch_size']} sequences of "
                f"{recipe['sequence_length']} tokens a step, learning rate "
                f"{recipe['learning_rate']:g} ({recipe['schedule']}, warm-up "
                f"{100 * recipe['warmup_fraction']:g} %), weight decay {recipe['weight_decay']:g}, "
                f"AdamW ({recipe['beta1']:g}, {recipe['beta2']:g}, {recipe['epsilon']:g}), "
                f"{setting['precision']} with float32 masters.",
                "Block weights: "
                + ", ".join(f"{model} {PRESETS[model].block_weights:,}" for model in results.models)
                + ".",
                f"Hardware: {'; '.join(hardware)}; {between}; commit {', '.join(commits)}.",
                f"Versions: {versions}.",
            )
        ),
        Code((f"sparse-bitnet reproduce all --scale {setting['scale']}",)),
    ]


def _table2(results: ResultSet) -> list[Block]:
    table = tables.perplexity_table(results)
    if table is None:
        return []
    return [_part(results, "Perplexity of the four models (table 2)"), table]


def _sweep(results: ResultSet) -> list[Block]:
    drawing = sweep_drawing(results)
    if drawing is None:
        return []
    return [
        _part(results, "The N:8 sweep (figure 2 and the table of raw perplexities)"),
        drawing,
        tables.sweep_grid(results),
    ]


def _ablations(results: ResultSet) -> list[Block]:
    drawings = ablation_drawings(results)
    if not drawings:
        return []
    return [
        _part(results, "Training designs (figure 4), and master against ternary masks"),
        *drawings,
        tables.ablation_grid(results),
    ]


def _schedule(results: ResultSet) -> list[Block]:
    partly = [p for p in results.setting["sparse_percents"] if 0 < p < 100]
    if not any(results.by_seed("ternary-6:8", sparse_percent=percent) for percent in partly):
        return []
    return [
        _part(results, "Dense-to-sparse schedules (table 4)"),
        tables.schedule_grid(results),
    ]


def _analyses(results: ResultSet) -> list[Block]:
    drawings = [heat_map_drawing(results), histogram_drawing(results), threshold_drawing(results)]
    shown = [drawing for drawing in drawings if drawing is not None]
    if not shown:
        return []
    return [
        _part(results, "What the weights look like (figures 1, 5, 6 and 7)"),
        *shown,
        tables.polarisation_grid(results),
        Text(
            "A weight is near zero exactly where its ternary code is 0, so the mass is also the share "
            "of zero codes: 31.0 % of normally distributed weights, and by the paper 42.3 % of the "
            "released BitNet b1.58 2B model."
        ),
    ]


def _downstream(results: ResultSet) -> list[Block]:
    grid = tables.downstream_grid(results)
    if grid is None:
        return []
    return [
        _part(results, "Zero-shot tasks (table 1)"),
        grid,
        Text(
            "Accuracy in percent, acc_norm below acc where lm-eval reports both. Chance is 25 to 50."
        ),
    ]


def _search(results: ResultSet) -> list[Block]:
    grid, best = tables.search_grid(results), tables.best_rate_grid(results)
    if grid is None or best is None:
        return []
    return [
        _part(results, "Search of the learning rate"),
        Text(
            f"{results.main}, seed 0, as many steps as all its runs. Every other table uses one rate "
            "for all models, as the paper does; the second table here gives each format its own."
        ),
        grid,
        best,
    ]


def _part(results: ResultSet, title: str) -> Section:
    return Section(f"{title}, {results.setting['scale']}", 3)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
