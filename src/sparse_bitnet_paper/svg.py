# SPDX-License-Identifier: Apache-2.0
"""matplotlib's figures as SVG text for a page.

Text and axes take the colour of the page around them (`currentColor`), series the CSS variables
`--full` and `--ternary`, so one figure serves a light and a dark page; standing alone, the defaults
apply.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two colours of Okabe and Ito's palette, distinct under every common colour-vision deficiency.
COLOURS = {"full": "#0072b2", "ternary": "#d55e00"}
INK = "#123456"
SIZE = (5.4, 3.6)


def single(name: str, title: str, draw: Callable[["Axes"], None]) -> str:
    """A figure of one panel, filled by `draw`; see `svg_text`."""
    from matplotlib.figure import Figure

    with style_sheet(name):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.subplots())
        return svg_text(figure, name, title)


def draw_density(
    axes: "Axes", centres: np.ndarray, density: np.ndarray, colour: str, label: str | None = None
) -> None:
    """A histogram as a filled curve."""
    axes.fill_between(centres, density, color=colour, alpha=0.35, linewidth=0, label=label)
    axes.plot(centres, density, color=colour, linewidth=1.2)


@contextmanager
def style_sheet(name: str) -> Iterator[None]:
    """matplotlib's settings for every figure; `name` makes the ids inside reproducible."""
    import matplotlib

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.grid.which": "major",
        "axes.axisbelow": True,
        "grid.alpha": 0.13,
        "grid.linewidth": 0.7,
        "lines.linewidth": 1.7,
        "legend.frameon": False,
        "legend.handlelength": 2.6,
    }
    inked = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color", "grid.color")
    style |= dict.fromkeys((*inked, "xtick.color", "ytick.color"), INK)
    style |= dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    with matplotlib.rc_context(style):
        yield


def svg_text(figure: "Figure", name: str, title: str) -> str:
    """A drawn figure as SVG that takes its colours and its width from the page.

    Args:
        figure: what to draw.
        name: prefix of all ids, unique in a page.
        title: read out in place of the drawing.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several figures share one page: ids must differ, and the page sets the size.
    text = prefix_ids(text, name)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    label = escape(title, {'"': "&quot;"})
    text = text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = text.replace(INK, "currentColor")
    for key, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{key}, {colour})")
    return text


def prefix_ids(svg: str, prefix: str) -> str:
    """The same figure with `prefix` before every id in it."""
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    return re.sub(r'(url\(|href=")#', rf"\g<1>#{prefix}-", svg)
