# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet report`: the page of reproduced experiments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sparse_bitnet.cli.arguments import parse


def main(arguments: list[str]) -> None:
    """Render the results of `reproduce` as Markdown with figures and as one HTML file."""

    @dataclass(kw_only=True)
    class Options:
        folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """Folders written by `reproduce`, one chapter each."""

        document: Path | None = None
        """Markdown file to write, figures/ beside it; default report.md in the first folder."""

        page: Path | None = None
        """HTML file to write; default report.html in the first folder."""

        engine: Path | None = None
        """Rows of `bench --out` with several patterns, for table 3."""

    options = parse(
        Options,
        arguments,
        prog="sparse-bitnet report",
        description="Render results beside the paper's own, with figures and a verdict on its claims.",
    )
    from sparse_bitnet.errors import UserError

    if not options.folders:
        raise UserError("name at least one folder of results")
    from rich.console import Console

    from sparse_bitnet.experiments.results_page import print_claims, write_report

    document = options.document or options.folders[0] / "report.md"
    page = options.page or options.folders[0] / "report.html"
    sets = write_report(options.folders, document=document, page=page, engine=options.engine)
    console = Console()
    for results in sets:
        print_claims(results, console)
    print(f"{document} and {page}")
