# SPDX-License-Identifier: Apache-2.0
"""The page loads nothing, escapes everything, and is well-formed."""

import re
from html.parser import HTMLParser

import pytest

from sparse_bitnet_paper.cells import cells
from sparse_bitnet_paper.page import (
    Code,
    Facts,
    Figure,
    Items,
    Paragraph,
    Section,
    html,
    markdown,
)
from sparse_bitnet_paper.perplexity_tables import comparison_table, verdict
from sparse_bitnet_paper.table import Table

NASTY = "<script>alert('&')</script>"


@pytest.fixture
def blocks(make_row, make_rows):
    found = cells(make_rows(2), "6:8")
    made = make_row().provenance
    return [
        Paragraph(f"lead {NASTY}", "lead"),
        Paragraph(f"{made['date'][:10]} · {made['hardware']} · commit {made['commit']}", "meta"),
        Paragraph(verdict(found), "verdict"),
        comparison_table(found),
        Section(f"section {NASTY}"),
        Figure("one", "<svg viewBox='0 0 1 1'></svg>", f"cap {NASTY}", title=f"figure {NASTY}"),
        Table(("model", "near zero"), [(f"row {NASTY}", "1 %")]),
        Code(f"text {NASTY}", prompt=f"prompt {NASTY}"),
        Items([f"caveat {NASTY}"]),
        Code(f"command {NASTY}"),
        Facts({"steps": 1000, "source": NASTY, "nothing": None}),
        Facts(made["versions"]),
    ]


@pytest.fixture
def page(blocks):
    return html(f"title {NASTY}", blocks)


class Checker(HTMLParser):
    """Every tag is closed in order; collects what could load something."""

    VOID = ("meta", "br", "hr", "img", "input", "link")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_well_formed_and_without_anything_external(page):
    checker = Checker()
    text = page
    checker.feed(text)
    assert checker.open == []
    assert not checker.tags & {"script", "link", "img", "iframe", "object", "embed", "base"}
    names = {name for name, _ in checker.attributes}
    assert not names & {"src", "href", "srcset", "data", "action"}
    assert not any(name.startswith("on") for name in names)
    assert "@import" not in text
    assert "url(" not in text
    assert "http" not in text.replace("http-equiv", "")


def test_everything_is_escaped(page):
    text = page
    assert NASTY not in text
    assert text.count("&lt;script&gt;") == 12


def test_says_where_and_when(page):
    text = page
    for expected in ("2026-01-02", "a processor, 2 cores", "commit abc", "1,000", "3.11"):
        assert expected in text


def test_light_dark_narrow_and_print(page):
    text = page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "prefers-color-scheme: dark" in text
    assert "overflow-x: auto" in text
    assert re.search(r"minmax\(min\(100%", text)
    assert "@media print" in text


def test_long_pages_have_contents(blocks, page):
    assert "<nav" not in page
    sections = [Section(f"Chapter {n}", 2 + n % 2) for n in range(9)]
    long = html("title", [*blocks, *sections])
    links = re.findall(r'<a[^>]* href="#([^"]+)"', long)
    assert len(links) == 10
    for link in links:
        assert long.count(f'id="{link}"') == 1


def test_figures_of_one_name_in_two_sets_have_their_own_ids():
    svg = '<svg viewBox="0 0 1 1"><g id="a"/><use href="#a"/></svg>'
    text = html("title", [Figure("one", svg, ""), Paragraph("x"), Figure("two", svg, "")])
    assert re.findall(r'\bid="([^"]+)"', text) == ["one-a", "two-a"]
    assert re.findall(r'href="([^"]+)"', text) == ["#one-a", "#two-a"]
    assert text.count('<div class="figures">') == 2
    assert markdown("title", [Figure("one", svg, "cap")], "figures")[1].keys() == {"one.svg"}
