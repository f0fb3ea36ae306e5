# SPDX-License-Identifier: Apache-2.0
"""Pages from jinja2 templates: Markdown with figures beside it, and self-contained HTML.

The HTML has inline CSS and SVG and loads nothing. It reads in a narrow and a wide window, in light and
dark, and on paper.
"""

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from markupsafe import Markup, escape

from sparse_bitnet_paper.claims import NOTHING
from sparse_bitnet_paper.figures import prefix_ids
from sparse_bitnet_paper.statistics import EXCLUDED, HOLDS, OPEN, OPPOSITE
from sparse_bitnet_paper.tables import dense_of, label, percent_over, pipe_line, spread

_VERDICTS = {HOLDS: "yes", OPPOSITE: "no", EXCLUDED: "no", OPEN: "open"}
_SPREAD = re.compile(r"([-+]?[\d.,]+(?: %)?)[ \n]((?:norm|[-+±\d\[]).*)")


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
        "ids": lambda svg, name: Markup(prefix_ids(svg, name)),
        "dense_of": dense_of,
        "label": label,
        "line": pipe_line,
        "over": percent_over,
        "percent": lambda share: f"{100 * share:.1f} %",
        "spread": spread,
        "thousands": lambda number: f"{number:,}",
    }
    return environment


def markdown_page(title: str, text: str, figures: Mapping[str, str]) -> str:
    """Return a Markdown page as one HTML file.

    Args:
        title: of the file.
        text: Markdown.
        figures: SVG by name, for the images of that name.
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
        return f'<span class="figure">{prefix_ids(figures[name], name)}</span>'

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
    if text == NOTHING:
        return Markup("&ndash;")
    if found := _SPREAD.fullmatch(text):
        first, rest = (escape(part).replace("-", Markup("&minus;")) for part in found.groups())
        return Markup("{}<small>{}</small>").format(first, rest)
    return (
        escape(text).replace("-", Markup("&minus;"))
        if re.match(r"-[\d.]+$", text)
        else escape(text)
    )
