# SPDX-License-Identifier: Apache-2.0
"""The page of one or more sets of results: every table, figure and claim, from result files alone."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import drawings, perplexity_tables, rate_tables, tables
from sparse_bitnet_paper.claims import claims
from sparse_bitnet_paper.downstream import downstream_table
from sparse_bitnet_paper.judge import RULE, Claim, judged
from sparse_bitnet_paper.page import (
    Block,
    Code,
    Items,
    Paragraph,
    Section,
    html,
    markdown,
)
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.scales import DENSE_PATTERN
from sparse_bitnet_paper.table import Table, print_table
from sparse_bitnet_paper.throughput import throughput_blocks

if TYPE_CHECKING:
    from rich.console import Console

TITLE = "The paper's experiments, repeated"


def write_report(
    folders: Sequence[Path],
    *,
    document: Path | None = None,
    page: Path | None = None,
    engine: Path | None = None,
) -> list[Results]:
    """Render sets of results and return them.

    Args:
        folders: of `reproduce`, in the order of the chapters.
        document: Markdown file; its figures go to `figures/` beside it.
        page: self-contained HTML file.
        engine: rows of `sparse-bitnet bench --out`, for table 3.

    Raises `UserError` for a folder without results.
    """
    sets = [Results(folder) for folder in folders]
    blocks = report_blocks(sets, engine)
    if page is not None:
        make_folder(page.parent)
        write_atomic(page, html(TITLE, blocks))
    if document is not None:
        text, files = markdown(TITLE, blocks, "figures")
        make_folder(document.parent / "figures")
        for name, svg in files.items():
            write_atomic(document.parent / "figures" / name, svg)
        write_atomic(document, text)
    return sets


def print_claims(results: Results, console: "Console") -> None:
    """The table of claims, short enough for a terminal."""
    short = Table(
        ("claim", "model", "verdict", "measured"),
        [
            (claim.text, claim.model, claim.verdict, claim.result)
            for claim in judged(claims(results))
        ],
        numeric=False,
    )
    title = f"The paper's claims at scale {results.setting['scale']}, corrected for these alone"
    print_table(short, console, title)


def report_blocks(sets: Sequence[Results], engine: Path | None = None) -> list[Block]:
    """Everything the page shows. Raises `UserError` for a set without a single run."""
    command = " ".join(str(results.path) for results in sets)
    command += f" --engine {engine}" if engine else ""
    blocks: list[Block] = [
        Paragraph(
            "Every verdict, and every number in a table or a figure, is computed from the result files "
            "named in its chapter; what to make of it is written by hand. The page is the output of "
            f"`sparse-bitnet report {command}`. full and ternary are the paper's BF16 and BitNet; "
            "perplexity (PPL) is that of the whole held-out text."
        ),
        Paragraph(RULE),
    ]
    scales = [results.setting["scale"] for results in sets]
    for results, scale in zip(sets, scales, strict=True):
        if not results.rows:
            raise UserError(
                f"{results.path}: no finished run of {scale} yet; `reproduce` trains them"
            )
        if not results.setting["patterns"]:
            raise UserError(f"{results.path} holds a quickstart, whose page is its report.html")
    # A set that has its scale to itself is called after it, else after its folder.
    folders = [results.path.name for results in sets]
    for place, (results, scale, folder) in enumerate(zip(sets, scales, folders, strict=True)):
        if scales.count(scale) > 1:
            earlier = folders[:place].count(folder)
            results.name = f"{folder}-{earlier + 1}" if earlier else folder
    found = [claims(results) if _is_of_the_paper(results) else [] for results in sets]
    # Holm's correction runs over the whole page.
    verdicts = iter(judged([claim for chapter in found for claim in chapter]))
    chapters = {
        results.name: list(itertools.islice(verdicts, len(own)))
        for results, own in zip(sets, found, strict=True)
    }
    if len(with_claims := {name: own for name, own in chapters.items() if own}) > 1:
        blocks += [Section("All verdicts"), tables.overview_table(with_claims)]
    for results in sets:
        blocks += _chapter(results, chapters[results.name])
    return blocks + (throughput_blocks(engine) if engine else [])


def _is_of_the_paper(results: Results) -> bool:
    """Whether there is any dense full-precision model, without which no claim can be judged."""
    return bool(results.by_seed(f"full-{DENSE_PATTERN}"))


def _chapter(results: Results, found: Sequence[Claim]) -> list[Block]:
    name = results.name
    blocks: list[Block] = [Section(f"Scale {name}"), *_setting(results)]
    if found:
        blocks += [
            Section(f"The paper's claims at this scale ({name})", 3),
            tables.claim_table(found),
        ]
    notes = results.path / "notes.md"
    if notes.is_file():
        try:
            text = notes.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {notes}: {error}") from error
        blocks += [Section(f"What to make of it ({name})", 3), Paragraph(text)]
    return blocks + _parts(results)


def _setting(results: Results) -> list[Block]:
    setting, rows = results.setting, results.rows
    hardware = sorted({row.provenance["hardware"] for row in rows})
    commits = sorted({row.provenance["commit"] or "release" for row in rows})
    dates = sorted(row.provenance["date"][:10] for row in rows)
    last = max(rows, key=lambda row: row.provenance["date"])
    versions = ", ".join(f"{n} {v}" for n, v in last.provenance["versions"].items())
    recipe, text = setting["recipe"], setting["data"]
    between = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return [
        Paragraph(f"{_capital(setting['summary'])}. Results: `{results.path}`."),
        tables.effort_table(results),
        Items(
            (
                f"Text: {setting['text']['source'] or 'prepared beforehand'}, "
                f"{text['train']['tokens']:,} training and "
                f"{text['validation']['tokens']:,} held-out tokens, vocabulary "
                f"{text['train']['vocab_size']:,}.",
                f"Recipe, where a table does not vary it: {recipe['batch_size']} sequences of "
                f"{recipe['sequence_length']} tokens a step, learning rate "
                f"{_rates(results)} ({recipe['schedule']}, warm-up "
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
        Code(
            f"sparse-bitnet reproduce {'all' if _is_of_the_paper(results) else 'ideas'} "
            + "table1 " * bool(results.scores())
            + f"--scale {setting['scale']}"
            + ("" if setting["text"]["source"] else " --data DATA")
            + (" --other-text TEXT" if any(row.other_text for row in rows) else "")
        ),
    ]


def _rates(results: Results) -> str:
    """The learning rate of the main size, and those that differ from it."""
    main = results.learning_rate(results.main)
    found = {model: results.learning_rate(model) for model in results.models}
    others = [f"{rate:g} at {model}" for model, rate in found.items() if rate != main]
    return ", ".join((f"{main:g}", *others))


def _parts(results: Results) -> list[Block]:
    """Each table and figure of which there are results, under its heading."""
    name = results.name
    partly = [p for p in results.setting["sparse_percents"] if 0 < p < 100]
    schedules = any(results.by_seed("ternary-6:8", sparse_percent=percent) for percent in partly)
    designs = drawings.ablation_figures(results)
    looks = drawings.dense_figures(results)
    sweep = drawings.sweep_figure(results)
    parts: list[tuple[str, Sequence[Block | None]]] = [
        (
            "Perplexity of the four models (table 2)",
            [
                perplexity_tables.perplexity_table(results),
                perplexity_tables.seed_table(results),
                perplexity_tables.other_text_table(results),
            ],
        ),
        (
            "The N:8 sweep (figure 2 and the table of raw perplexities)",
            [sweep, tables.sweep_table(results) if sweep else None],
        ),
        (
            "Training designs (figure 4), and master against ternary masks",
            [*designs, tables.ablation_table(results), tables.flip_table(results)]
            if designs
            else [],
        ),
        (
            "Dense-to-sparse schedules (table 4)",
            [tables.schedule_table(results) if schedules else None],
        ),
        (
            "What the weights look like (figures 1, 5, 6 and 7)",
            [*looks, tables.polarisation_table(results), _ZERO_CODES] if looks else [],
        ),
        (
            "Near-zero mass over learning rate and initial weights",
            [rate_tables.near_zero_table(results)],
        ),
        ("Zero-shot tasks (table 1)", [downstream_table(results)]),
        ("Search of the learning rate: one for all models", [rate_tables.search_table(results)]),
        ("Each model at its own learning rate", [rate_tables.own_rates_table(results)]),
        ("The published code's recipe, one thing at a time", [rate_tables.recipe_table(results)]),
        ("Other scores, quantisers, activations and schedules", [rate_tables.ideas_table(results)]),
    ]
    if not _is_of_the_paper(results):
        parts = parts[-1:]
    blocks: list[Block] = []
    sizes = results.setting["sizes"] if _is_of_the_paper(results) else ()
    missing = [f"{model}: not run." for model in sizes if model not in results.models]
    for title, found in parts:
        if shown := [block for block in found if block is not None]:
            blocks += [Section(f"{title}, {name}", 3), *shown]
        else:
            missing.append(f"{title}: not run.")
    if missing:
        blocks += [Section(f"Not there yet, {name}", 3), Items(missing)]
    return blocks


_ZERO_CODES = Paragraph(
    "A weight is near zero exactly where its ternary code is 0, so the mass is also the share of zero "
    "codes: 31.0 % of normally distributed weights, and by the paper 42.3 % of the released BitNet b1.58 "
    "2B model."
)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
