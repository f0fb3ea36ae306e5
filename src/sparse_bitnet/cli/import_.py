# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet import`: a ternary checkpoint of another tool as one of ours."""

from dataclasses import dataclass
from typing import Annotated, Literal

from sparse_bitnet.cli.arguments import OutArgument, Positional, command
from sparse_bitnet.errors import UserError


@dataclass(kw_only=True)
class ImportConfig:
    """How to read a ternary checkpoint of another tool."""

    pattern: str | None = None
    """N:M pattern that the codes keep to, for example 6:8. Default: that of an export of ours, else
    8:8 (dense)."""

    packed: Literal["auto", "i2", "b3", "nm-enum", "nm-sign"] | None = None
    """Write the packed form in this format, or the best one with "auto", instead of masters."""

    embeddings: Literal["auto", "bf16", "int8", "float32", "ternary"] = "auto"
    """Precision of embeddings in the packed form: bf16, int8, float32, or ternary where they are; auto:
    that, else bf16."""


@command("import")
def main(
    folder: Annotated[str, Positional("FOLDER")],
    out: OutArgument,
    config: ImportConfig,
) -> None:
    """Read a ternary checkpoint of another tool: Hugging Face bitnet (packed, or BitNet b1.58
    masters in bfloat16), compressed-tensors with ternary codes, MLX with two bits, floats that
    are ternary, or a GGUF file with ternary weights.

    Args:
        folder: local folder of that checkpoint, or the .gguf file.
        out: new folder to write, which `train --init`, `evaluate`, `generate` and `pack` take.
        config: options.
    """
    from rich.console import Console

    from sparse_bitnet.export.importer import import_checkpoint
    from sparse_bitnet.pattern import NMPattern
    from sparse_bitnet.progress import Progress

    if config.packed is None and config.embeddings != "auto":
        raise UserError("--embeddings is an option of the packed form: give --packed")
    pattern = None if config.pattern is None else NMPattern.parse(config.pattern)
    with Progress(Console()) as lines:
        result = import_checkpoint(
            folder,
            out,
            pattern=pattern,
            packed=config.packed,
            embeddings=config.embeddings,
            on_progress=lines.line("importing", "MB", 1e6),
        )
    print(f"{result.folder}: {result.layers} layers of {result.kind} as {result.format}")
