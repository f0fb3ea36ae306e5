"""The comparison table, built once from result rows; rendered for terminal, Markdown and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from sparse_bitnet.experiments.results import (
    DENSE_PATTERN,
    ResultRow,
    Spread,
    cells,
    paper_cells,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

NOTHING = "-"


@dataclass(frozen=True)
class Group:
    """Adjacent columns under one heading."""

    title: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One model: its name, what it is ("full", "8:8"), and its text in every column."""

    label: str
    weight: str
    pattern: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Text in rows and grouped columns; every renderer shows exactly these strings."""

    groups: tuple[Group, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def comparison_table(rows: Sequence[ResultRow], pattern: str) -> Table:
    """The paper's table 2 for our rows, beside the paper's own numbers for that pattern.

    Raises `UserError` when no seed has all four models.
    """
    ours, paper = cells(rows, pattern), paper_cells(pattern)
    groups = [Group("this run", ("PPL", "Δ", "Δ %", "zeros", "flips"))]
    groups += [Group(f"paper {size}", ("PPL", "Δ %")) for size in paper]
    lines = []
    for index, cell in enumerate(ours):
        texts = [
            spread_text(cell.perplexity, ".2f"),
            spread_text(cell.delta, "+.2f"),
            spread_text(cell.relative, "+.1f"),
            _percent(cell.zero_fraction, 1),
            _percent(cell.flip_rate, 3),
        ]
        for column in paper.values():
            texts += [
                spread_text(column[index].perplexity, ".2f"),
                spread_text(column[index].relative, "+.1f"),
            ]
        lines.append(
            Line(model_label(cell.weight, cell.pattern), cell.weight, cell.pattern, tuple(texts))
        )
    seeds = len(ours[0].perplexity.values)
    return Table(tuple(groups), tuple(lines), tuple(_notes(seeds)))


def model_label(weight: str, pattern: str) -> str:
    """The name of one of the four models: "full, dense", "ternary, 6:8"."""
    return f"{weight}, {'dense' if pattern == DENSE_PATTERN else pattern}"


def verdict(rows: Sequence[ResultRow], pattern: str) -> str:
    """What the table says in one sentence, and how far to trust it in a second."""
    ours, paper = cells(rows, pattern), paper_cells(pattern)
    full, ternary = ours[1].relative, ours[3].relative
    assert full is not None
    assert ternary is not None
    text = (
        f"{pattern} sparsity changes the perplexity of the full-precision model by "
        f"{_inline(full)} and that of the ternary model by {_inline(ternary)}"
    )
    if "0.5B" in paper:
        theirs = [paper["0.5B"][i].relative for i in (1, 3)]
        values = " and ".join(_inline(spread) for spread in theirs if spread)
        text += f" (the paper's 0.5B model: {values})"
    return f"{text}. {_trust(full, ternary)}"


def _trust(full: Spread, ternary: Spread) -> str:
    texts = []
    if min(full.mean, ternary.mean) < 0:
        texts.append(
            "A sparse model that beats its dense twin has not been trained long enough to miss what "
            "the mask removes."
        )
    if len(full.values) == 1:
        texts.append(
            "One seed of a model this small: the deltas are indicative, another seed can change "
            "their order (--seeds 3 shows by how much)."
        )
    else:
        margins = [a - b for a, b in zip(full.values, ternary.values, strict=True)]
        smaller = sum(margin > 0 for margin in margins)
        texts.append(
            f"The ternary model loses less for {smaller} of {len(margins)} seeds; at this size the "
            "deltas are indicative."
        )
    return " ".join(texts)


def _notes(seeds: int) -> list[str]:
    notes = [
        "full and ternary are the paper's BF16 and BitNet. PPL: held-out perplexity. Δ: minus that "
        "of the dense model of the same format, Δ % in percent of it. zeros: share of zero weights "
        "in the forward. flips: share of mask positions that changed at the last step.",
    ]
    if seeds > 1:
        notes.append(
            f"Mean of {seeds} seeds, below it least..greatest; Δ pairs models of one seed."
        )
    return notes


def spread_text(spread: Spread | None, form: str) -> str:
    """The mean, and on a second line the least and the greatest of several seeds."""
    if spread is None:
        return NOTHING
    if len(spread.values) == 1:
        return f"{spread.mean:{form}}"
    return f"{spread.mean:{form}}\n{spread.low:{form}}..{spread.high:{form}}"


def _inline(spread: Spread) -> str:
    mean, _, rest = spread_text(spread, "+.1f").partition("\n")
    return f"{mean} %" + (f" ({rest})" if rest else "")


def _percent(spread: Spread | None, digits: int) -> str:
    """The mean alone: seeds hardly differ in shares of weights."""
    return NOTHING if spread is None else f"{100 * spread.mean:.{digits}f} %"


def to_markdown(table: Table) -> str:
    """A pipe table; the heading of a group goes before its columns' names."""
    titles = [f"{group.title}: {column}" for group in table.groups for column in group.columns]
    rows = [["model", *titles], ["---", *("---:" for _ in titles)]]
    rows += [
        [line.label, *(text.replace("\n", " ") for text in line.texts)] for line in table.lines
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def to_html(table: Table) -> str:
    """A `<table>` with a swatch of each model's curve before its name; styling is the page's."""
    heads = "".join(
        f'<th class="first" colspan="{len(group.columns)}" scope="colgroup">'
        f"{escape(group.title)}</th>"
        for group in table.groups
    )
    columns = "".join(
        f'<th{_first(index == 0)} scope="col">{escape(column)}</th>'
        for group in table.groups
        for index, column in enumerate(group.columns)
    )
    starts = [index == 0 for group in table.groups for index in range(len(group.columns))]
    body = ""
    for line in table.lines:
        style = "dense" if line.pattern == DENSE_PATTERN else "sparse"
        swatch = f'<i class="swatch {line.weight} {style}"></i>'
        texts = "".join(
            f"<td{_first(start)}>{html_number(text)}</td>"
            for text, start in zip(line.texts, starts, strict=True)
        )
        body += f'<tr><th scope="row">{swatch}{escape(line.label)}</th>{texts}</tr>\n'
    return (
        f'<table>\n<thead><tr><th rowspan="2" scope="col">model</th>{heads}</tr>\n'
        f"<tr>{columns}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    )


def _first(starts_group: bool) -> str:
    return ' class="first"' if starts_group else ""


def html_number(text: str) -> str:
    """A cell with true minus signs, a dash for no number, and the spread below the mean."""
    if text == NOTHING:
        return "&ndash;"
    mean, _, spread = escape(text).replace("-", "&minus;").partition("\n")
    return f"{mean}<small>{spread}</small>" if spread else mean


def print_table(table: Table, console: "Console", title: str) -> None:
    """One wide table, or one for us and one for the paper where the terminal is narrower."""
    from rich.measure import Measurement

    ours, paper = table.groups[:1], table.groups[1:]
    whole = _rich(table, table.groups, title)
    unlimited = console.options.update(width=1000)
    if not paper or Measurement.get(console, unlimited, whole).maximum <= console.width:
        console.print(whole)
    else:
        console.print(_rich(table, ours, title))
        console.print(_rich(table, paper, "The paper's Qwen2.5 models"))
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def _rich(table: Table, shown: Sequence[Group], title: str) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable

    rich = RichTable(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    rich.add_column("\nmodel", no_wrap=True)
    picked = []
    position = 0
    for group in table.groups:
        # A heading cannot span columns here: its words stand over the first ones.
        words = group.title.split()
        for number, column in enumerate(group.columns):
            if group in shown:
                word = words[number] if number < len(words) else ""
                rich.add_column(f"{word}\n{column}", justify="right", no_wrap=True)
                picked.append(position)
            position += 1
    for line in table.lines:
        ours = line.weight == "ternary" and line.pattern != DENSE_PATTERN
        texts = [line.texts[position] for position in picked]
        rich.add_row(line.label, *texts, style="bold" if ours else None)
    return rich
