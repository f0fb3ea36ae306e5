# SPDX-License-Identifier: Apache-2.0
"""Pages from jinja2 templates, and the pages of one or more sets of results.

The first page has the answer: the paper's main claims. Other pages have the rules of judging with all
verdicts, each set of results, and throughput. All are made from result files alone.
"""

import itertools
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from sparse_bitnet.errors import UserError, library_errors_as
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import claims, figures, tables
from sparse_bitnet_paper.paper import paper, paper_accuracies
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runs import ABLATIONS
from sparse_bitnet_paper.scales import SCALES
from sparse_bitnet_paper.statistics import LEAST_SEEDS, LEVEL, Claim, Estimate, judged

_SPREAD = re.compile(r"([-+]?[\d.,]+(?: %)?)[ \n]((?:norm|[-+±\d\[]).*)")


def write_report(
    folders: Sequence[Path], document: Path, engine: Path | None = None
) -> list[Results]:
    """Render sets of results; return those with models of the paper.

    Args:
        folders: of `reproduce`, in the order of their pages.
        document: Markdown file of the first page; the others go to the folder of that name without
            suffix, the figures to `figures/` beside it.
        engine: rows of `sparse-bitnet bench --out`, for table 3.

    Raises `UserError` for a folder without results.
    """
    sets = [Results(folder) for folder in folders]
    files, drawn = markdown_report(sets, engine, document.stem)
    files |= {f"figures/{name}.svg": figures.standalone(svg) for name, svg in drawn.items()}
    for name, text in files.items():
        path = document.parent / name
        make_folder(path.parent)
        write_atomic(path, text)
    return [results for results in sets if _is_of_the_paper(results)]


def markdown_report(
    sets: Sequence[Results], engine: Path | None = None, name: str = "experiments"
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the Markdown pages by path, first `name`.md, and the SVG of their figures by name."""
    _check(sets)
    # Holm's correction runs over all sets.
    own = [claims.claims(results) if _is_of_the_paper(results) else [] for results in sets]
    verdicts = iter(judged([claim for of_set in own for claim in of_set]))
    chapters = [
        _chapter(results, list(itertools.islice(verdicts, len(of_set))))
        for results, of_set in zip(sets, own, strict=True)
    ]
    answer = next((chapter for chapter in chapters if chapter["judged"]), None)
    command = " ".join(str(results.path) for results in sets)
    shared: dict[str, Any] = {
        "name": name,
        "command": f"{command} --engine {engine}" if engine else command,
        "level": LEVEL,
        "least_seeds": LEAST_SEEDS,
        "chapters": chapters,
        "answer": answer,
        "main": main_claims(answer["results"].main, answer["judged"]) if answer else [],
        "largest": max(PRESETS[m].block_weights for results in sets for m in results.models),
        "claims": claims,
        "tables": tables,
        "estimate": Estimate,
        "paper": paper(),
        "paper_accuracies": paper_accuracies,
        "designs": ABLATIONS,
        "presets": PRESETS,
        "scales": SCALES,
        "throughput": tables.throughput_table(engine) if engine else None,
    }
    pages = {f"{name}.md": render("experiments.md.j2", **shared)}
    for page in ["verdicts", *["throughput"] * (engine is not None)]:
        pages[f"{name}/{page}.md"] = render(f"{page}.md.j2", **shared)
    for chapter in chapters:
        pages[f"{name}/{chapter['results'].name}.md"] = render("scale.md.j2", **shared, **chapter)
    return {path: text.rstrip() + "\n" for path, text in pages.items()}, {
        f"{chapter['results'].name}-{figure}": svg
        for chapter in chapters
        for figure, svg in chapter["drawn"].items()
    }


def main_claims(model: str, judgements: Sequence[Claim]) -> list[Claim]:
    """Return one claim for each of the paper's main claims: at `model` if it is judged there, and of its
    variants the one with the paper's largest number."""
    own = [claim for claim in judgements if claim.main]
    return [
        max(
            (claim for claim in own if claim.main == main),
            key=lambda claim: (claim.model == model, claim.expected or 0.0),
        )
        for main in dict.fromkeys(claim.main for claim in own)
    ]


def _check(sets: Sequence[Results]) -> None:
    """Raise `UserError` for a set that cannot be shown."""
    names = ["verdicts", "throughput", *(results.name for results in sets)]
    for results in sets:
        if results.rows.empty:
            scale = results.setting["scale"]
            raise UserError(
                f"{results.path}: no finished run of {scale} yet; `reproduce` trains them"
            )
        if not results.setting["patterns"]:
            raise UserError(f"{results.path} holds a quickstart, whose page is its report.html")
        if names.count(results.name) > 1:
            raise UserError(f"two pages would be named {results.name}; rename a folder")


def _is_of_the_paper(results: Results) -> bool:
    """Return whether there is a model of the paper beside those of `ideas`."""
    of_ideas = results.rows.variant.isin(["ternary-6:8", *paper()["ideas"].values()])
    return not (of_ideas & (results.rows.sparse_percent == 100)).all()


def _chapter(results: Results, judgements: Sequence[Claim]) -> dict[str, Any]:
    """Return what the template shows of a set beside its tables: claims, notes and drawings."""
    notes, of_the_paper = results.path / "notes.md", _is_of_the_paper(results)
    weights = figures.dense_figures(results) if of_the_paper else {}
    drawn = {name: svg for name, svg in weights.items() if name in figures.OF_WEIGHTS}
    if of_the_paper:
        drawn = {**figures.sweep_figure(results), **figures.ablation_figures(results), **drawn}
    with library_errors_as(f"cannot read {notes}"):
        text = notes.read_text(encoding="utf-8").strip() if notes.is_file() else ""
    chapter = {"results": results, "of_the_paper": of_the_paper, "judged": judgements}
    return chapter | {"notes": text, "drawn": drawn, "weights": weights}


def render(template: str, **values: Any) -> str:
    """Return a template of this package, filled in; values in an HTML template are escaped."""
    return _environment().get_template(template).render(**values)


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("sparse_bitnet_paper"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.globals |= {"e": math.e, "infinity": math.inf, "zip": zip}
    environment.filters |= {
        "cell": cell,
        "ids": lambda svg, name: Markup(figures.prefix_ids(svg, name)),
        "dense_of": tables.dense_of,
        "label": tables.label,
        "line": tables.pipe_line,
        "over": tables.percent_over,
        "percent": lambda share: f"{100 * share:.1f} %",
        "spread": tables.spread,
        "thousands": lambda number: f"{number:,}",
    }
    return environment


def cell(text: str) -> Markup:
    """Return a cell's text with the spread of a number set off from it."""
    if text == claims.NOTHING:
        return Markup("&ndash;")
    if parts := _SPREAD.fullmatch(text):
        first, rest = (escape(part).replace("-", Markup("&minus;")) for part in parts.groups())
        return Markup("{}<small>{}</small>").format(first, rest)
    is_negative = re.match(r"-[\d.]+$", text)
    return escape(text).replace("-", Markup("&minus;")) if is_negative else escape(text)
