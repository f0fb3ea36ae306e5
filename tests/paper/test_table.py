# SPDX-License-Identifier: Apache-2.0
"""One table, three renderings with the same strings."""

import io
import re

import pytest
from rich.console import Console

from sparse_bitnet_paper.cells import cells, model_label
from sparse_bitnet_paper.page import html as page_html
from sparse_bitnet_paper.perplexity_tables import comparison_table, verdict
from sparse_bitnet_paper.table import print_table, to_markdown


def printed(rows, width, pattern="6:8"):
    console = Console(file=io.StringIO(), width=width)
    print_table(comparison_table(cells(rows, pattern)), console, "title", "rest")
    return console.file.getvalue()


def test_strings_of_the_table(make_rows):
    table = comparison_table(cells(make_rows(), "6:8"))
    assert [title for title, _ in table.groups] == [
        "this run",
        "paper 0.5B",
        "paper 1.5B",
        "paper 3B",
    ]
    assert [line[0] for line in table.lines] == [
        "full, dense",
        "full, 6:8",
        "ternary, dense",
        "ternary, 6:8",
    ]
    assert table.lines[1][1:] == (
        "36.40",
        "+1.40",
        "+4.0",
        "25.0 %",
        "0.123 %",
        "23.11",
        "+5.5",
        "18.70",
        "+3.3",
        "16.48",
        "+2.8",
    )
    assert table.lines[2][1:6] == ("40.00", "-", "-", "40.0 %", "-")


def test_every_renderer_shows_every_number(make_rows):
    rows = make_rows(2)
    table = comparison_table(cells(rows, "6:8"))
    html = page_html("", [table]).replace("&minus;", "-")
    markdown = to_markdown(table)
    for text in (printed(rows, 80), printed(rows, 160), html, markdown):
        for line in table.lines:
            assert line[0] in text
            for number in " ".join(line[1:]).split():
                assert number in text or number == "-"


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_terminal_table_is_never_cut(make_rows, seeds, width):
    text = printed(make_rows(seeds), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_wide_terminals_get_one_table(make_rows):
    assert printed(make_rows(), 140).count("ternary, 6:8") == 1
    assert printed(make_rows(), 80).count("ternary, 6:8") == 2


def test_seeds_show_their_spread(make_rows):
    text = comparison_table(cells(make_rows(3), "6:8")).lines[1][2]
    assert text == "+1.90\n+1.40..+2.40"
    assert "+1.90 +1.40..+2.40" in to_markdown(comparison_table(cells(make_rows(3), "6:8")))


def test_html_is_a_regular_table(make_rows):
    html = page_html("", [comparison_table(cells(make_rows(), "6:8"))])
    rows = re.findall(r"<tr>(.*?)</tr>", html, flags=re.DOTALL)
    assert len(rows) == 6
    assert [row.count("<td") for row in rows[2:]] == [11] * 4
    assert sum(map(int, re.findall(r'colspan="(\d+)"', rows[0]))) == 11
    assert "&minus;0.5" in html
    assert '<i class="swatch ternary sparse">' in html


def test_patterns_outside_the_paper_have_our_columns_only(make_rows):
    rows = make_rows()
    other = [
        row if row.pattern == "8:8" else type(row)(**row.__dict__ | {"format": f"{row.weight}-5:7"})
        for row in rows
    ]
    table = comparison_table(cells(other, "5:7"))
    assert [title for title, _ in table.groups] == ["this run"]
    assert "paper" not in verdict(cells(other, "5:7"))
    assert "5:7" in printed(other, 80, "5:7")


def test_verdict_states_values_and_limits(make_rows):
    text = verdict(cells(make_rows(), "6:8"))
    assert "+4.0 %" in text
    assert "-0.5 %" in text
    assert "+5.5 % and +1.2 %" in text
    assert "indicative" in text
    assert "--seeds 3" in text
    assert "not been trained long enough" in text
    several = verdict(cells(make_rows(3), "6:8"))
    assert "for 3 of 3 seeds" in several
    assert "(+4.0.." in several
    assert "long enough" not in several


def test_labels():
    assert model_label("ternary", "2:4") == "ternary, 2:4"
    assert model_label("full", "8:8") == "full, dense"
