# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet report`: the page of reproduced experiments."""

from pathlib import Path
from typing import Annotated

from sparse_bitnet.cli.arguments import Positional, command


@command("report")
def main(
    folders: Annotated[tuple[Path, ...], Positional("FOLDER ...")],
    document: Path | None = None,
    page: Path | None = None,
    engine: Path | None = None,
) -> None:
    """Render results beside the paper's own, with figures and a verdict on its claims.

    Args:
        folders: Folders written by `reproduce`, one chapter each.
        document: Markdown file to write, figures/ beside it; default report.md in the first folder.
        page: HTML file to write; default report.html in the first folder.
        engine: Rows of `bench --out` with several patterns, for table 3.
    """
    from rich.console import Console

    from sparse_bitnet_paper.claims import claims
    from sparse_bitnet_paper.report import write_report
    from sparse_bitnet_paper.statistics import judged
    from sparse_bitnet_paper.tables import table

    document = document or folders[0] / "report.md"
    page = page or folders[0] / "report.html"
    sets = write_report(folders, document=document, page=page, engine=engine)
    console = Console()
    for results in sets:
        lines = [
            {
                "claim": each.text,
                "model": each.model,
                "verdict": each.verdict,
                "measured": each.result,
            }
            for each in judged(claims(results))
        ]
        if lines:
            title = f"The paper's claims at scale {results.name}, corrected for these alone"
            table(lines, numeric=False).print(console, title)
    print(f"{document} and {page}")
