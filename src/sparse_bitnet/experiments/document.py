"""A page of results as blocks, rendered as Markdown with figure files and as one HTML file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

from sparse_bitnet.experiments.html_report import PAGE_CSS, html_page
from sparse_bitnet.experiments.table import Table, to_html, to_markdown

# On its own an SVG has no page whose ink and background it could take.
_STANDALONE_STYLE = "color: #1d2327; background: #ffffff; font-family: sans-serif"
_STANDALONE_WIDTH = 640


@dataclass(frozen=True)
class Section:
    """A heading; `level` 2 is a chapter, 3 a part of one."""

    title: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Items:
    """A list of plain texts."""

    texts: Sequence[str]


@dataclass(frozen=True)
class Code:
    """Commands."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Grid:
    """A table of plain texts, the heading first."""

    rows: Sequence[Sequence[str]]
    numeric: bool = True
    """Whether all columns but the first hold numbers; a second line in a cell is its spread."""


@dataclass(frozen=True)
class Drawing:
    """A figure; `name` is that of its file."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Notes:
    """Markdown written by people, taken over as it is."""

    markdown: str


Block = Section | Text | Items | Code | Grid | Drawing | Notes | Table


def markdown(title: str, blocks: Sequence[Block], figures: str) -> tuple[str, dict[str, str]]:
    """The document and its figure files by name.

    Args:
        title: heading of the page.
        blocks: what it shows.
        figures: path of the figures' folder, relative to the document.
    """
    parts, files = [f"# {title}\n"], {}
    for block in blocks:
        if isinstance(block, Drawing):
            files[f"{block.name}.svg"] = standalone_svg(block.svg)
            text = f"![{block.caption}]({figures}/{block.name}.svg)\n\n*{block.caption}*\n"
        else:
            text = _markdown(block)
        parts.append(text)
    return "\n".join(parts), files


def _markdown(block: Block) -> str:
    match block:
        case Section():
            return f"{'#' * block.level} {block.title}\n"
        case Text():
            return f"{block.text}\n"
        case Items():
            return "".join(f"- {text}\n" for text in block.texts)
        case Code():
            return "```\n" + "".join(f"{line}\n" for line in block.lines) + "```\n"
        case Grid():
            head, *body = ([_cell(text) for text in row] for row in block.rows)
            align = "---:" if block.numeric else "---"
            lines = [head, ["---", *[align] * (len(head) - 1)], *body]
            return "".join(f"| {' | '.join(line)} |\n" for line in lines)
        case Notes():
            return f"{block.markdown.strip()}\n"
        case Table():
            notes = "".join(f"\n{note}\n" for note in block.notes)
            return to_markdown(block) + notes
    raise AssertionError(block)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def html(title: str, blocks: Sequence[Block]) -> str:
    """One self-contained page."""
    body = ""
    for drawings, group in groupby(blocks, lambda block: isinstance(block, Drawing)):
        part = "\n".join(_html(block) for block in group)
        # Figures that follow each other stand side by side where there is room.
        body += f'<div class="figures">{part}</div>\n' if drawings else f"{part}\n"
    return html_page(title, f"{PAGE_CSS}{_MORE_CSS}", f"<h1>{escape(title)}</h1>\n{body}")


def _html(block: Block) -> str:
    match block:
        case Section():
            return f"<h{block.level}>{escape(block.title)}</h{block.level}>"
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Items():
            return f"<ul>{''.join(f'<li>{_inline(text)}</li>' for text in block.texts)}</ul>"
        case Code():
            return f"<pre>{escape(chr(10).join(block.lines))}</pre>"
        case Grid():
            return _scroll(_grid(block))
        case Drawing():
            caption = _inline(block.caption)
            svg = _with_own_ids(block.svg, block.name)
            return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"
        case Notes():
            return "".join(
                f"<p>{_inline(part)}</p>" for part in block.markdown.strip().split("\n\n")
            )
        case Table():
            notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in block.notes)
            return _scroll(to_html(block)) + notes
    raise AssertionError(block)


def _scroll(table: str) -> str:
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'


def _grid(block: Grid) -> str:
    head, *body = block.rows
    titles = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    lines = ""
    for first, *rest in body:
        render = _number if block.numeric else _verdict
        cells = "".join(f"<td>{render(text)}</td>" for text in rest)
        lines += f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>\n'
    kind = "" if block.numeric else ' class="words"'
    return f"<table{kind}>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{lines}</tbody>\n</table>"


def _number(text: str) -> str:
    first, _, spread = escape(text).replace("-", "&minus;").partition("\n")
    return f"{first}<small>{spread}</small>" if spread else first


def _verdict(text: str) -> str:
    kinds = {"holds": "yes", "does not hold": "no", "not decided": "open"}
    kind = kinds.get(text)
    return f'<b class="{kind}">{escape(text)}</b>' if kind else escape(text)


def _inline(text: str) -> str:
    """Code spans and links of Markdown; everything else as it is."""
    text = escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)


def _with_own_ids(svg: str, prefix: str) -> str:
    """The same figure of two sets stands on one page: ids must differ."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", svg)


def standalone_svg(svg: str) -> str:
    """A figure that is a file of its own: with a background, an ink and a width."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    attributes = f'width="{_STANDALONE_WIDTH}" style="{_STANDALONE_STYLE}" '
    svg = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", svg, count=2)
    return svg.replace("<svg ", head + attributes, 1) + ("" if svg.endswith("\n") else "\n")


_MORE_CSS = """\
h2 { margin-top: 2.6rem; }
h3 { margin-top: 1.8rem; }
.figures, .scroll, pre, ul { margin: 1rem 0; }
.figures { align-items: start; }
figure:only-child { max-width: 46rem; }
code { font: .9em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
table.words td { text-align: left; white-space: normal; min-width: 6rem; }
table.words th { text-align: left; white-space: normal; min-width: 9rem; }
b.yes { color: #15803d; } b.no { color: #c2410c; } b.open { color: var(--soft); }
@media (prefers-color-scheme: dark) { b.yes { color: #4ade80; } b.no { color: #fb923c; } }
"""
