# SPDX-License-Identifier: Apache-2.0
"""A page of results as blocks, rendered as Markdown with figure files and as one HTML file.

The HTML is self-contained: inline CSS and SVG, nothing loaded from anywhere. It reads in a narrow and a
wide window, in light and dark, and on paper.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from markupsafe import Markup, escape

from sparse_bitnet_paper.judge import EXCLUDED, HOLDS, OPEN, OPPOSITE
from sparse_bitnet_paper.svg import prefix_ids
from sparse_bitnet_paper.table import NOTHING, Table, to_markdown

# On its own an SVG has no page whose ink and background it could take.
_STANDALONE_STYLE = "color: #1d2327; background: #ffffff; font-family: sans-serif"
_STANDALONE_WIDTH = 640

CONTENTS_FROM = 8
"""So many sections make a page long enough for a table of contents."""


@dataclass(frozen=True)
class Section:
    """A heading; `level` 2 is a chapter, 3 a part of one."""

    title: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """Text in which Markdown's code spans and links count; empty lines part paragraphs."""

    text: str
    style: str = ""
    """ "lead", "meta" or "verdict": how the HTML page sets it off."""


@dataclass(frozen=True)
class Items:
    """A list of texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    values: dict[str, Any]


@dataclass(frozen=True)
class Code:
    """Commands or a sample; `prompt` is set off before it."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Figure:
    """A drawing, as `analysis.figures` returns it; `name` is that of its file."""

    name: str
    svg: str
    caption: str
    title: str = ""


Block = Section | Paragraph | Items | Facts | Code | Figure | Table


def markdown(title: str, blocks: Sequence[Block], figures: str) -> tuple[str, dict[str, str]]:
    """The document and its figure files by name.

    Args:
        title: heading of the page.
        blocks: what it shows.
        figures: path of the figures' folder, relative to the document.
    """
    parts, files = [f"# {title}\n"], {}
    for block in blocks:
        match block:
            case Section():
                text = f"{'#' * block.level} {block.title}\n"
            case Paragraph():
                text = f"{block.text}\n"
            case Items():
                text = "".join(f"- {item}\n" for item in block.texts)
            case Facts():
                text = "".join(f"- {name}: {value}\n" for name, value in block.values.items())
            case Code():
                text = f"```\n{block.prompt}{block.text}\n```\n"
            case Figure():
                files[f"{block.name}.svg"] = _standalone(block.svg)
                text = f"![{block.caption}]({figures}/{block.name}.svg)\n\n*{block.caption}*\n"
            case Table():
                text = to_markdown(block) + "".join(f"\n{note}\n" for note in block.notes)
        parts.append(text)
    return "\n".join(parts), files


def html(title: str, blocks: Sequence[Block]) -> str:
    """The whole HTML document."""
    sections = [block for block in blocks if isinstance(block, Section)]
    return _template().render(
        title=title,
        blocks=blocks,
        contents=sections if len(sections) >= CONTENTS_FROM else [],
    )


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("sparse_bitnet_paper", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "cell": _cell,
        "inline": _inline,
        "swatch": _swatch,
        "value": _value,
        "svg": lambda figure: Markup(prefix_ids(figure.svg, figure.name)),
    }
    return environment.get_template("page.html.j2")


def _cell(text: str, numeric: bool) -> Markup:
    """True minus signs, a dash for no number, and the spread below the mean; verdicts in colour."""
    kinds = {HOLDS: "yes", OPPOSITE: "no", EXCLUDED: "no", OPEN: "open"}
    if found := [kind for kind in kinds if text == kind or text.startswith(f"{kind}, ")]:
        return Markup('<b class="{}">{}</b>').format(kinds[found[0]], text)
    if not numeric:
        return escape(text)
    if text == NOTHING:
        return Markup("&ndash;")
    first, _, spread = escape(text).replace("-", Markup("&minus;")).partition("\n")
    return first + Markup("<small>{}</small>").format(spread) if spread else first


def _inline(text: str) -> Markup:
    """Code spans and links of Markdown; everything else as it is."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    return Markup(re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text))


def _swatch(label: str) -> Markup:
    """The line of the model's curves, before the name of one of the four models."""
    model = re.match(r"(full|ternary), (dense)?", label)
    if model is None:
        return Markup("")
    return Markup('<i class="swatch {} {}"></i>').format(model[1], model[2] or "sparse")


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _standalone(svg: str) -> str:
    """A figure that is a file of its own: with a background, an ink and a width."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    attributes = f'width="{_STANDALONE_WIDTH}" style="{_STANDALONE_STYLE}" '
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg, count=2)
    return svg.replace("<svg ", head + attributes, 1) + ("" if svg.endswith("\n") else "\n")
