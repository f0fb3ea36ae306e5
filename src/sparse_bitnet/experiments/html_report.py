"""A result as one self-contained page: inline CSS and SVG, nothing loaded from anywhere.

It reads in a narrow and a wide window, in light and dark, and on paper.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sparse_bitnet.experiments.table import Table, html_number, to_html


@dataclass(frozen=True)
class Figure:
    """One drawing with what it shows and what to look for in it."""

    title: str
    svg: str
    """Trusted markup, as `analysis.figures` returns it."""

    caption: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything the page shows; texts are plain, figures are SVG."""

    title: str
    lead: str
    """One or two sentences: what was done."""

    verdict: str
    """What came out of it."""

    table: Table
    figures: Sequence[Figure]
    weights: Sequence[tuple[str, ...]]
    """Weight statistics: heading, then one row per model."""

    sample_title: str
    sample_prompt: str
    sample: str
    """What the model wrote after the prompt."""

    caveats: Sequence[str]
    commands: Sequence[str]
    """To repeat the run and to go on from it."""

    config: Mapping[str, Any]
    provenance: Mapping[str, Any]


def render_report(report: Report) -> str:
    """The whole HTML document."""
    figures = "".join(_figure(figure) for figure in report.figures)
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in report.table.notes)
    caveats = "".join(f"<li>{escape(caveat)}</li>" for caveat in report.caveats)
    commands = escape("\n".join(report.commands))
    return html_page(
        report.title,
        PAGE_CSS,
        f"""\
<header>
<h1>{escape(report.title)}</h1>
<p class="lead">{escape(report.lead)}</p>
<p class="meta">{_meta(report.provenance)}</p>
</header>
<section>
<p class="verdict">{escape(report.verdict)}</p>
<div class="scroll" tabindex="0" role="region" aria-label="Results">
{to_html(report.table)}
</div>
{notes}
</section>
<section>
<h2>Curves and weights</h2>
<div class="figures">
{figures}</div>
</section>
<section>
<h2>Weights of each model</h2>
<div class="scroll" tabindex="0" role="region" aria-label="Weight statistics">
{_plain_table(report.weights)}
</div>
</section>
<section>
<h2>{escape(report.sample_title)}</h2>
<pre><b>{escape(report.sample_prompt)}</b>{escape(report.sample)}</pre>
</section>
<section>
<h2>How far to trust this</h2>
<ul>{caveats}</ul>
</section>
<section>
<h2>Again, and further</h2>
<pre>{commands}</pre>
</section>
<section class="details">
<div><h2>Configuration</h2>{_definitions(report.config)}</div>
<div><h2>Where and with what</h2>{_definitions(_flat(report.provenance))}</div>
</section>
""",
    )


def html_page(title: str, css: str, body: str) -> str:
    """A self-contained HTML document of one column.

    Args:
        title: text.
        css: of the style element.
        body: the column's HTML, with a newline at the end.
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
{body}</main>
</body>
</html>
"""


def _figure(figure: Figure) -> str:
    return (
        f"<figure><h3>{escape(figure.title)}</h3>\n{figure.svg}\n"
        f"<figcaption>{escape(figure.caption)}</figcaption></figure>\n"
    )


def _meta(provenance: Mapping[str, Any]) -> str:
    commit = provenance.get("commit") or "release"
    texts = (provenance["date"][:10], provenance["hardware"], f"commit {commit}")
    return " &middot; ".join(escape(text) for text in texts)


def _plain_table(rows: Sequence[tuple[str, ...]]) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{html_number(text)}</td>" for text in row[1:])
        + "</tr>\n"
        for row in rows[1:]
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _definitions(values: Mapping[str, Any]) -> str:
    return (
        "<dl>"
        + "".join(
            f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_text(value))}</dd>"
            for name, value in values.items()
        )
        + "</dl>"
    )


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings (the versions) as entries of their own."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= value if isinstance(value, Mapping) else {name: value}
    return flat


PAGE_CSS = """\
:root { --page: #fbfbfa; --card: #ffffff; --ink: #1d2327; --soft: #5a646c; --line: #dcdfe2;
  --full: #0072b2; --ternary: #d55e00; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --card: #1c2125; --ink: #e6e8ea; --soft: #9aa5ad; --line: #343b41;
    --full: #56b4e9; --ternary: #f0883e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: clamp(1rem, 4vw, 3rem) clamp(.9rem, 4vw, 2.5rem); }
h1 { font-size: clamp(1.5rem, 1.1rem + 2vw, 2.2rem); line-height: 1.2; margin: 0 0 .6rem; }
h2 { font-size: 1.2rem; margin: 0 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .4rem; }
section { margin-top: 2.4rem; }
p, li { max-width: 46rem; }
.lead { font-size: 1.08rem; margin: 0 0 .6rem; }
.meta, .note, figcaption { color: var(--soft); font-size: .875rem; }
.meta { margin: 0; max-width: none; overflow-wrap: anywhere; }
.note { margin: .6rem 0 0; max-width: 60rem; }
.verdict { border-left: 4px solid var(--ternary); padding: .1rem 0 .1rem 1rem;
  font-size: 1.08rem; margin: 0 0 1.4rem; }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .75rem; text-align: right; white-space: nowrap; vertical-align: top; }
tbody th, thead tr:first-child th:first-child { text-align: left; }
tbody th, thead tr:first-child th:first-child { position: sticky; left: 0; background: var(--card); }
thead th { font-size: .85rem; font-weight: 600; color: var(--soft); vertical-align: bottom; }
thead th[colspan] { text-align: center; }
thead tr:last-child th { border-bottom: 1px solid var(--line); }
thead th[rowspan] { border-bottom: 1px solid var(--line); }
tbody tr + tr > * { border-top: 1px solid var(--line); }
tbody th { font-weight: 600; }
.first { border-left: 1px solid var(--line); }
td small { display: block; color: var(--soft); font-size: .78rem; }
.swatch { display: inline-block; width: 1.9em; height: 0; margin-right: .6em; vertical-align: .28em;
  border-top: 3px solid currentColor; }
.swatch.sparse { border-top-style: dashed; }
.swatch.full { color: var(--full); }
.swatch.ternary { color: var(--ternary); }
.figures { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; min-width: 0; display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: auto; padding-top: .6rem; }
pre { margin: 0; padding: 1rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; overflow-x: auto; font: .875rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas,
  monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
pre b { color: var(--ternary); }
ul { padding-left: 1.2rem; margin: 0; }
li + li { margin-top: .35rem; }
.details { display: grid; gap: 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
dl { display: grid; grid-template-columns: minmax(8rem, auto) 1fr; gap: .2rem 1rem; margin: 0;
  font-size: .875rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  th, td { padding: .45rem .5rem; }
  .swatch { width: 1.3em; margin-right: .4em; } }
@media print { body { background: none; } section, figure { break-inside: avoid; } }
"""
