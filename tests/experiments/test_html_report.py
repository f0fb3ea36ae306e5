"""The page loads nothing, escapes everything, and is well-formed."""

import re
from html.parser import HTMLParser

import pytest

from sparse_bitnet.experiments.html_report import Figure, Report, render_report
from sparse_bitnet.experiments.table import comparison_table, verdict

NASTY = "<script>alert('&')</script>"


@pytest.fixture
def page(make_row, make_rows):
    rows = make_rows(2)
    return render_report(
        Report(
            title=f"title {NASTY}",
            lead=f"lead {NASTY}",
            verdict=verdict(rows, "6:8"),
            table=comparison_table(rows, "6:8"),
            figures=[Figure(f"figure {NASTY}", "<svg viewBox='0 0 1 1'></svg>", f"cap {NASTY}")],
            weights=[("model", "near zero"), (f"row {NASTY}", "1 %")],
            sample_title="sample",
            sample_prompt=f"prompt {NASTY}",
            sample=f"text {NASTY}",
            caveats=[f"caveat {NASTY}"],
            commands=[f"command {NASTY}"],
            config={"steps": 1000, "source": NASTY, "nothing": None},
            provenance=make_row().provenance,
        )
    )


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
    assert text.count("&lt;script&gt;") == 11


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
