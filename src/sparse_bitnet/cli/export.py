# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet export`: a trained model in the format of another tool."""

from sparse_bitnet.cli.arguments import CheckpointArgument, OutArgument, parse
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_config import FORMATS, ExportConfig
from sparse_bitnet.progress import Progress


def main(arguments: list[str]) -> None:
    """Export a checkpoint; exit code 2 when a verification is out of bounds."""
    formats = "\n".join(
        f"- {name}: {info.summary} ({info.readers})" for name, info in FORMATS.items()
    )
    parse(
        run,
        arguments,
        prog="sparse-bitnet export",
        description=f"Write a trained model in a format that other tools read.\n\n{formats}",
    )


def run(checkpoint: CheckpointArgument, out: OutArgument, config: ExportConfig) -> None:
    """Export with a progress line, then print what was written and how the verification went.

    Args:
        checkpoint: run folder, or checkpoint folder of ours.
        out: new folder to write.
        config: format and options.
    """
    from rich.console import Console
    from rich.table import Table

    from sparse_bitnet.export.export_checkpoint import export

    console = Console(markup=False)
    with Progress(console) as lines:
        result = export(
            checkpoint,
            out,
            config,
            on_progress=lines.line(f"writing {config.format}", "MB", 1e6),
            on_verified=lines.line("comparing", "tokens"),
        )
    print(f"{result.folder}: {config.format}, {result.nbytes / 1e6:,.1f} MB")
    if result.warning:
        print(f"note: {result.warning}")
    if result.verification is None:
        return
    table = Table(title="Export against trained model", show_header=False)
    for row in result.verification.rows():
        table.add_row(*row)
    console.print(table)
    if failures := result.verification.failures:
        raise UserError(f"{out}: verification failed: {', '.join(failures)}")
