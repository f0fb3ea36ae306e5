# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet analyze`: what the weights of checkpoints look like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sparse_bitnet.cli.arguments import parse
from sparse_bitnet.layer_config import DenseLayersOption


def main(arguments: list[str]) -> None:
    """Count the weights of some checkpoints; prints a table and writes figures."""
    import tyro

    @dataclass(kw_only=True)
    class Options(DenseLayersOption):
        checkpoints: Annotated[tuple[str, ...], tyro.conf.Positional]
        """Run folders, checkpoints, any transformers folders with safetensors, or hub ids."""

        out: Path = Path("analysis")
        """Folder for weights.html (figures) and weights.json (counts of every layer)."""

        pattern: str = "6:8"
        """Whose group thresholds to draw."""

    options = parse(
        Options,
        arguments,
        prog="sparse-bitnet analyze",
        description="Histograms, thresholds, near-zero mass and zero codes of any checkpoint, read "
        "one layer at a time.",
    )
    run(list(options.checkpoints), options.pattern, options.out, options.dense_globs)


def run(
    checkpoints: list[str], pattern: str, out: Path, dense_layers: tuple[str, ...] = ()
) -> None:
    """Read, print, write. Raises `UserError` for a dense pattern and unreadable checkpoints."""
    from rich.console import Console

    from sparse_bitnet.errors import UserError
    from sparse_bitnet.experiments.table import print_table
    from sparse_bitnet.experiments.weight_report import (
        read_checkpoint,
        summary_table,
        write_weight_report,
    )
    from sparse_bitnet.pattern import NMPattern

    if not checkpoints:
        raise UserError("name at least one checkpoint")
    parsed = NMPattern.parse(pattern)
    if parsed.is_dense:
        raise UserError(f"--pattern {pattern} keeps every weight and has no threshold")
    console = Console()
    with console.status("reading") as status:
        found = [
            read_checkpoint(
                name, parsed, lambda path: status.update(f"reading {path}"), dense_layers
            )
            for name in checkpoints
        ]
    print_table(summary_table(found), console, "")
    write_weight_report(found, parsed, out)
    console.print(
        f"{out}/weights.html: figures; {out}/weights.json: every layer",
        highlight=False,
        soft_wrap=True,
    )
