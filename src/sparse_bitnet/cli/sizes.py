# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet sizes`: bits a weight and megabytes of packed models."""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sparse_bitnet.cli.arguments import FLAT, command
from sparse_bitnet.errors import UserError, refuse_unused
from sparse_bitnet.layer_config import DenseLayersOption

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_bitnet.export.packed_sizes import CodeStatistics, ModelSize

_MOST_WEIGHTS = 1 << 28
"""Of a matrix that is made to be measured."""


@dataclass(kw_only=True)
class SizesConfig(DenseLayersOption):
    """Which table to print."""

    models: list[str] = field(
        default_factory=lambda: ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b"]
    )
    """Presets."""

    patterns: list[str] = field(default_factory=lambda: ["8:8", "6:8", "2:4", "2:8"])
    """n:m patterns."""

    embeddings: Literal["bf16", "int8", "float32"] = "bf16"
    """How embedding and output head are stored."""

    gaussian: tuple[int, int] | None = None
    """Rows and columns of a matrix of Gaussian masters whose codes to measure instead."""

    json: str | None = None
    """Also write the numbers to this file."""

    def __post_init__(self) -> None:
        """Raise `UserError` that names the option."""
        for name in ("models", "patterns"):
            if not getattr(self, name):
                raise UserError(f"--{name}: name at least one")
        if self.gaussian is not None and min(self.gaussian) < 1:
            raise UserError("--gaussian: rows and columns must be at least 1")
        if self.gaussian is not None and math.prod(self.gaussian) > _MOST_WEIGHTS:
            raise UserError(f"--gaussian: at most {_MOST_WEIGHTS:,} weights")


@command("sizes")
def main(
    checkpoint: Annotated[
        str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")
    ] = None,
    config: Annotated[SizesConfig, FLAT] = SizesConfig(),  # noqa: B008
) -> None:
    """Sizes of packed models: of the presets, or of one trained model against its entropy.

    Args:
        checkpoint: run folder or model folder of a ternary model; none: the presets.
        config: which table to print.
    """
    from rich.console import Console

    from sparse_bitnet.export.packed_sizes import code_statistics, gaussian_statistics, size_table
    from sparse_bitnet.files import check_new_file, write_atomic
    from sparse_bitnet.pattern import NMPattern
    from sparse_bitnet.progress import Progress

    if checkpoint is not None:
        unused = ("gaussian", "models", "patterns", "embeddings", "dense_layers")
        refuse_unused(config, unused, f"{checkpoint} is measured as it is")
    elif config.gaussian is not None:
        refuse_unused(config, ("models", "embeddings", "dense_layers"), "--gaussian is one matrix")
    if config.json:
        check_new_file(config.json)
    console = Console()
    if checkpoint is not None:
        with Progress(console) as progress:
            line = progress.line("reading", "M weights", 1e6)
            measured = [code_statistics(checkpoint, progress=line)]
    elif config.gaussian is not None:
        patterns = [NMPattern.parse(text) for text in config.patterns]
        measured = [gaussian_statistics(*config.gaussian, pattern) for pattern in patterns]
    else:
        measured = []
    if measured:
        _print_statistics(console, measured)
        found = [dataclasses.asdict(statistics) for statistics in measured]
    else:
        rows = size_table(config.models, config.patterns, config.embeddings, config.dense_globs)
        _print_sizes(console, rows)
        found = [{**dataclasses.asdict(row), "total_bytes": row.total_bytes} for row in rows]
    if config.json:
        write_atomic(config.json, json.dumps(found, indent=2) + "\n")


def _print_sizes(console: "Console", rows: list["ModelSize"]) -> None:
    from rich import box
    from rich.table import Table

    from sparse_bitnet.packing.formats import auto_format
    from sparse_bitnet.pattern import NMPattern

    formats = list(dict.fromkeys(row.packed_format for row in rows))
    table = Table(
        title="Bits a ternary weight, below them MB of the whole model",
        caption=f"* what --format auto takes. Embeddings in {rows[0].embeddings}, counted in MB. "
        "nm-sign holds binary weights only, nm-zstd depends on the weights: name a checkpoint.",
        box=box.SIMPLE_HEAD,
    )
    for column in ("model", "pattern", *formats):
        left = column in ("model", "pattern")
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    found = {(row.model, row.pattern, row.packed_format): row for row in rows}
    for model in dict.fromkeys(row.model for row in rows):
        for pattern in dict.fromkeys(row.pattern for row in rows):
            chosen = auto_format(NMPattern.parse(pattern))
            cells = []
            for name in formats:
                row = found.get((model, pattern, name))
                mark = "*" if name == chosen else " "
                bits = f"{row.bits_per_weight:.3f}{mark}" if row else "- "
                cells.append(f"{bits}\n{row.total_bytes / 1e6:,.0f} " if row else bits)
            table.add_row(model, pattern, *cells)
        table.add_section()
    console.print(table)


def _print_statistics(console: "Console", measured: list["CodeStatistics"]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"Bits a weight of {measured[0].weights:,} ternary weights", box=box.SIMPLE_HEAD
    )
    table.add_column("coding", no_wrap=True)
    for found in measured:
        table.add_column(found.pattern, justify="right")
    table.add_row("zeros among the codes", *(f"{found.zero_fraction:.1%}" for found in measured))
    table.add_section()
    bounds = {
        "entropy of the codes": "code_entropy",
        "log2(states of a group) / m": "pattern_bound",
        "entropy of the groups": "group_entropy",
    }
    for label, field_name in bounds.items():
        table.add_row(label, *(f"{getattr(found, field_name):.4f}" for found in measured))
    table.add_section()
    table.add_row("zstd of two-bit codes", *(f"{found.zstd_of_two_bits:.4f}" for found in measured))
    for name in dict.fromkeys(name for found in measured for name in found.formats):
        cells = [found.formats.get(name) for found in measured]
        table.add_row(name, *("-" if bits is None else f"{bits:.4f}" for bits in cells))
    console.print(table)
