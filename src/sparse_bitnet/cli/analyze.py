# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet analyze`: what the weights of checkpoints look like."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sparse_bitnet.cli.arguments import Positional, command
from sparse_bitnet.errors import UserError
from sparse_bitnet.layer_config import DenseLayersOption
from sparse_bitnet.pattern import NMPattern


@dataclass(kw_only=True)
class AnalyzeConfig(DenseLayersOption):
    """What to count."""

    checkpoints: Annotated[tuple[str, ...], Positional("CHECKPOINT ...")]
    """Run folders, checkpoints, any transformers folders with safetensors, or hub ids."""

    out: Path = Path("analysis")
    """Folder for weights.html (figures) and weights.json (counts of every layer)."""

    pattern: str = "6:8"
    """Whose group thresholds to draw."""


@command("analyze")
def main(options: AnalyzeConfig) -> None:
    """Histograms, thresholds, near-zero mass and zero codes of any checkpoint, read one layer at a time.

    Args:
        options: what to count.
    """
    from rich.console import Console
    from rich.text import Text

    from sparse_bitnet_paper.weights import read_checkpoint, summary_table, write_weight_report

    pattern = NMPattern.parse(options.pattern)
    if pattern.is_dense:
        raise UserError(f"--pattern {pattern} keeps every weight and has no threshold")
    console = Console()
    with console.status("reading") as status:
        found = [
            read_checkpoint(
                name,
                pattern,
                lambda path: status.update(Text(f"reading {path}")),
                options.dense_globs,
            )
            for name in options.checkpoints
        ]
    summary_table(found).print(console, "")
    write_weight_report(found, pattern, options.out)
    print(f"{options.out}/weights.html: figures; {options.out}/weights.json: every layer")
