# SPDX-License-Identifier: Apache-2.0
"""Pages from jinja2 templates, and the page of one or more sets of results.

Pages are Markdown with figures beside it, or self-contained HTML: inline CSS and SVG, nothing is loaded.
It reads in a narrow and a wide window, in light and dark, and on paper. The page of results has every
table, figure and claim, from result files alone.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from sparse_bitnet.errors import UserError
from sparse_bitnet.files import make_folder, write_atomic
from sparse_bitnet.presets import PRESETS
from sparse_bitnet_paper import claims, figures, tables
from sparse_bitnet_paper.paper import paper, paper_accuracies
from sparse_bitnet_paper.results import Results
from sparse_bitnet_paper.runs import ABLATIONS
from sparse_bitnet_paper.scales import DENSE_PATTERN, SCALES
from sparse_bitnet_paper.statistics import (
    EXCLUDED,
    HOLDS,
    LEAST_SEEDS,
    LEVEL,
    OPEN,
    OPPOSITE,
    Claim,
    Estimate,
    judged,
)

TITLE = "The paper's experiments, repeated"

_VERDICTS = {HOLDS: "yes", OPPOSITE: "no", EXCLUDED: "no", OPEN: "open"}
_SPREAD = re.compile(r"([-+]?[\d.,]+(?: %)?)[ \n]((?:norm|[-+±\d\[]).*)")


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
    text, drawn = markdown_report(sets, engine)
    if page is not None:
        make_folder(page.parent)
        write_atomic(page, markdown_page(TITLE, text, drawn))
    if document is not None:
        make_folder(document.parent / "figures")
        for name, svg in drawn.items():
            write_atomic(document.parent / "figures" / f"{name}.svg", figures.standalone(svg))
        write_atomic(document, text)
    return sets


def markdown_report(
    sets: Sequence[Results], engine: Path | None = None
) -> tuple[str, dict[str, str]]:
    """Return the page in Markdown, and the SVG of its figures by name."""
    _check(sets)
    # Holm's correction runs over the whole page.
    own = [claims.claims(results) if _is_of_the_paper(results) else [] for results in sets]
    verdicts = iter(judged([claim for of_set in own for claim in of_set]))
    judgements = [list(itertools.islice(verdicts, len(of_set))) for of_set in own]
    chapters = [_chapter(*each) for each in zip(sets, judgements, strict=True)]
    with_claims = {r.name: of_set for r, of_set in zip(sets, judgements, strict=True) if of_set}
    command = " ".join(str(results.path) for results in sets)
    text = render(
        "experiments.md.j2",
        title=TITLE,
        command=f"{command} --engine {engine}" if engine else command,
        level=LEVEL,
        least_seeds=LEAST_SEEDS,
        overview=with_claims if len(with_claims) > 1 else None,
        chapters=chapters,
        throughput=tables.throughput_table(engine) if engine else None,
        claims=claims,
        tables=tables,
        estimate=Estimate,
        paper=paper(),
        paper_accuracies=paper_accuracies,
        designs=ABLATIONS,
        presets=PRESETS,
        scales=SCALES,
    )
    return text.rstrip() + "\n", {
        f"{chapter['results'].name}-{name}": svg
        for chapter in chapters
        for name, svg in chapter["drawn"].items()
    }


def _check(sets: Sequence[Results]) -> None:
    """Raise `UserError` for a set that cannot be shown; name sets of one scale after their folders."""
    scales = [results.setting["scale"] for results in sets]
    for results, scale in zip(sets, scales, strict=True):
        if results.rows.empty:
            raise UserError(
                f"{results.path}: no finished run of {scale} yet; `reproduce` trains them"
            )
        if not results.setting["patterns"]:
            raise UserError(f"{results.path} holds a quickstart, whose page is its report.html")
        if scales.count(scale) > 1:
            results.name = results.path.name
    names = [results.name for results in sets]
    if again := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two folders named {again[0]} hold results of one scale; rename one")


def _is_of_the_paper(results: Results) -> bool:
    """Return whether there is a dense full-precision model, without which no claim can be judged."""
    return len(results.by_seed(f"full-{DENSE_PATTERN}")) > 0


def _chapter(results: Results, judgements: Sequence[Claim]) -> dict[str, Any]:
    """Return what the template shows of a set beside its tables: claims, notes and drawings."""
    notes, of_the_paper = results.path / "notes.md", _is_of_the_paper(results)
    weights = figures.dense_figures(results) if of_the_paper else {}
    drawn = {name: svg for name, svg in weights.items() if name in figures.OF_WEIGHTS}
    if of_the_paper:
        drawn = {**figures.sweep_figure(results), **figures.ablation_figures(results), **drawn}
    try:
        text = notes.read_text(encoding="utf-8").strip() if notes.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {notes}: {error}") from error
    chapter = {"results": results, "of_the_paper": of_the_paper, "claims": judgements}
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


def markdown_page(title: str, text: str, drawn: Mapping[str, str]) -> str:
    """Return a Markdown page as one HTML file.

    Args:
        title: of the file.
        text: Markdown.
        drawn: SVG by name, for the images of that name.
    """
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark").enable("table")
    contents: list[tuple[str, str]] = []

    def heading(self: Any, tokens: Any, place: int, *_: Any) -> str:
        tag = tokens[place].tag
        contents.append((tag, tokens[place + 1].content))
        return f'<{tag} id="section-{len(contents)}">'

    def image(self: Any, tokens: Any, place: int, *_: Any) -> str:
        name = tokens[place].attrs["src"].rpartition("/")[2].removesuffix(".svg")
        return f'<span class="figure">{figures.prefix_ids(drawn[name], name)}</span>'

    markdown.add_render_rule("heading_open", heading)
    markdown.add_render_rule("image", image)
    markdown.add_render_rule("text", lambda self, tokens, place, *_: cell(tokens[place].content))
    body = Markup(markdown.render(text))
    return render("markdown.html.j2", title=title, contents=contents, body=body)


def cell(text: str) -> Markup:
    """Return a cell's text with a verdict in colour, or the spread of a number set off from it."""
    for verdict, colour in _VERDICTS.items():
        if text == verdict or text.startswith(f"{verdict}, "):
            return Markup('<b class="{}">{}</b>').format(colour, text)
    if text == claims.NOTHING:
        return Markup("&ndash;")
    if found := _SPREAD.fullmatch(text):
        first, rest = (escape(part).replace("-", Markup("&minus;")) for part in found.groups())
        return Markup("{}<small>{}</small>").format(first, rest)
    return (
        escape(text).replace("-", Markup("&minus;"))
        if re.match(r"-[\d.]+$", text)
        else escape(text)
    )
