# SPDX-License-Identifier: Apache-2.0
"""A table of texts, shown with the same strings on a terminal, in Markdown and (by `page`) in HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """A heading and lines of texts; a second line in a text is a spread."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    groups: Sequence[tuple[str, int]] = ()
    """Titles over adjacent columns after the first, with how many columns each has."""

    notes: Sequence[str] = ()
    numeric: bool = True
    """Whether all columns but the first hold numbers."""

    @property
    def group_starts(self) -> set[int]:
        """Columns, the first left out, with which a group begins."""
        return {sum(count for _, count in self.groups[:place]) for place in range(len(self.groups))}


def to_markdown(table: Table) -> str:
    """A pipe table; the title of a group goes before its columns' names."""
    first, *rest = table.head
    titles = [title for title, count in table.groups for _ in range(count)]
    if titles:
        rest = [f"{title}: {column}" for title, column in zip(titles, rest, strict=True)]
    align = "---:" if table.numeric else "---"
    lines = [[first, *rest], ["---", *[align] * len(rest)], *table.lines]
    texts = ([text.replace("|", "\\|").replace("\n", " ") for text in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in texts)


def print_table(table: Table, console: "Console", title: str, title_of_rest: str = "") -> None:
    """One wide table, or one for the first group and one for the rest on a narrower terminal."""
    from rich.measure import Measurement

    whole = range(1, len(table.head))
    wide = _rich(table, title, whole)
    unlimited = console.options.update(width=1000)
    if len(table.groups) < 2 or Measurement.get(console, unlimited, wide).maximum <= console.width:
        console.print(wide)
    else:
        first = 1 + table.groups[0][1]
        console.print(_rich(table, title, whole[: first - 1]))
        console.print(_rich(table, title_of_rest, whole[first - 1 :]))
    for note in table.notes:
        console.print(note, style="dim", highlight=False)


def _rich(table: Table, title: str, shown: Sequence[int]) -> "RichTable":
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    # As `Text` no name in brackets is taken for a style.
    shown_title = Text(title, style="bold")
    rich = RichTable(title=shown_title, title_justify="left", box=box.SIMPLE_HEAD)
    # A title cannot span columns here: its words stand over the first ones of its group.
    above = [""]
    for group, count in table.groups:
        above += (group.split() + [""] * count)[:count]
    for index in (0, *shown):
        head = f"{above[index]}\n{table.head[index]}" if table.groups else table.head[index]
        number = table.numeric and index > 0
        rich.add_column(head, justify="right" if number else "left", no_wrap=table.numeric)
    for line in table.lines:
        rich.add_row(*(Text(line[index]) for index in (0, *shown)))
    return rich
