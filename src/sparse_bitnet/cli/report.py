"""`sparse-bitnet report`: the page of reproduced experiments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sparse_bitnet.cli.arguments import parse


def main(arguments: list[str]) -> None:
    """Render the results of `reproduce` as Markdown with figures and as one HTML file."""
    import tyro

    @dataclass(kw_only=True)
    class Options:
        folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
        """Folders written by `reproduce`, one chapter each."""

        document: Path = Path("docs/experiments.md")
        """Markdown file to write; its figures go to figures/ beside it."""

        page: Path | None = None
        """HTML file to write; default report.html in the first folder."""

    options = parse(
        Options,
        arguments,
        prog="sparse-bitnet report",
        description="Render results beside the paper's own, with figures and a verdict on its claims.",
    )
    from sparse_bitnet.errors import UserError

    if not options.folders:
        raise UserError("name at least one folder of results")
    from sparse_bitnet.experiments.report import write_report

    page = options.page or options.folders[0] / "report.html"
    write_report(options.folders, document=options.document, page=page)
    print(f"{options.document} and {page}")
