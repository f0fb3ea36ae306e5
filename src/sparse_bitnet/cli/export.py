# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet export`: a trained model in the format of another tool; `sparse-bitnet import`: a
ternary checkpoint of another tool as one of ours."""

from dataclasses import dataclass

from sparse_bitnet.cli.arguments import CheckpointArgument, OutArgument, command, parse
from sparse_bitnet.cli.pack import Embeddings, PackedFormat
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.export_config import FORMATS, ExportConfig


def main(arguments: list[str]) -> None:
    """Export a checkpoint; exit code 2 when a verification is out of bounds."""
    lines = (f"- {name}: {summary} ({readers})" for name, (summary, readers) in FORMATS.items())
    text = "Write a trained model in a format of another tool.\n\n" + "\n".join(lines)
    parse(run, arguments, prog="sparse-bitnet export", description=text)


def run(checkpoint: CheckpointArgument, out: OutArgument, config: ExportConfig) -> None:
    """Export with a progress line, then print what was written and how the verification went.

    Args:
        checkpoint: Run folder, checkpoint folder, or packed folder.
        out: New folder to write.
    """
    from rich.console import Console

    from sparse_bitnet.export.export_checkpoint import export
    from sparse_bitnet.progress import Progress

    with Progress(Console(markup=False)) as lines:
        result = export(
            checkpoint,
            out,
            config,
            on_progress=lines.line(f"writing {config.format}", "MB", 1e6),
            on_verified=lines.line("comparing", "tokens"),
        )
    print(f"{out}: {config.format}, {result.nbytes / 1e6:,.1f} MB")
    if result.warning:
        print(f"note: {result.warning}")
    if result.verification is None:
        return
    print("verification: export compared with the trained model")
    for name, value in result.verification.rows():
        print(f"  {name:<16} {value}")
    if failures := result.verification.failures:
        raise UserError(f"{out}: verification failed: {', '.join(failures)}")


@dataclass(kw_only=True)
class ImportConfig:
    """How to read a ternary checkpoint of another tool."""

    pattern: str | None = None
    """N:M pattern of the codes, for example 6:8. Default: the recorded pattern of a sparse-bitnet export,
    else 8:8 (dense)."""

    packed_format: PackedFormat | None = None
    """Write a packed folder in this format, as `pack` does, instead of master weights to train from."""

    embeddings: Embeddings = "auto"
    """With --packed-format: data type of embedding and output head, as in `pack`."""


@command("import")
def import_(checkpoint: CheckpointArgument, out: OutArgument, config: ImportConfig) -> None:
    """Convert a ternary checkpoint of another tool: Hugging Face bitnet (packed, or bfloat16 master
    weights of BitNet b1.58), compressed-tensors with ternary codes, MLX with two bits, floating-point
    weights that are ternary, or a GGUF file with ternary weights.

    Args:
        checkpoint: Folder or hub id of the ternary checkpoint, or a .gguf file.
        out: New folder to write, for `train --init`, `evaluate`, `generate` and `pack`.
    """
    from rich.console import Console

    from sparse_bitnet.export.importer import import_checkpoint
    from sparse_bitnet.pattern import NMPattern
    from sparse_bitnet.progress import Progress

    if config.packed_format is None and config.embeddings != "auto":
        raise UserError("--embeddings has no effect without --packed-format: add that option")
    pattern = None if config.pattern is None else NMPattern.parse(config.pattern)
    with Progress(Console()) as lines:
        result = import_checkpoint(
            checkpoint,
            out,
            pattern=pattern,
            packed=config.packed_format,
            embeddings=config.embeddings,
            on_progress=lines.line("importing", "MB", 1e6),
        )
    print(
        f"{out}: {result.layers} ternary layers, read from {result.kind}, written as {result.format}"
    )
