# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet pack`: a trained model as a small file, checked by loading it back."""

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from sparse_bitnet.cli.arguments import CheckpointArgument, command
from sparse_bitnet.errors import UserError, refuse_unused

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_bitnet.export.pack_checkpoint import PackedSize, PackResult
    from sparse_bitnet.export.verify import PackCheck


@dataclass(kw_only=True)
class PackConfig:
    """How to store weights and embeddings."""

    packed_format: Literal["auto", "i2", "b3", "nm-enum", "nm-sign"] = "auto"
    """Packed format of the ternary weights. auto: the smallest that loads within 1.5 times of i2.
    nm-sign is for quantizer=binary."""

    embeddings: Literal["auto", "bf16", "int8", "float32", "ternary"] = "auto"
    """Type of the embedding and output head. int8: one scale per row. float32: as trained. auto: ternary
    if they are ternary, as in models of other tools, else bf16."""

    check: bool = True
    """Load trained and packed model, one after the other, and compare their logits."""

    dry_run: bool = False
    """Print the size in every format and write nothing."""


@command("pack")
def main(
    checkpoint: CheckpointArgument,
    config: PackConfig,
    out: Annotated[str | None, "[OUT]"] = None,
) -> None:
    """Write a trained ternary model as a small, complete folder.

    Args:
        checkpoint: Run folder or model folder.
        out: Folder to write; must not exist or be empty.
        config: formats.
    """
    from rich.console import Console

    from sparse_bitnet.export.pack_checkpoint import pack_checkpoint, packed_sizes
    from sparse_bitnet.export.verify import check_packed
    from sparse_bitnet.progress import Progress

    console = Console(markup=False)
    if config.dry_run:
        refuse_unused(config, ("packed_format", "check"), "--dry-run prints every format")
        _print_sizes(console, packed_sizes(checkpoint, embeddings=config.embeddings))
        return
    if out is None:
        raise UserError("pack: name OUT, the folder to write, or add --dry-run")
    with Progress(console) as progress:
        packed = pack_checkpoint(
            checkpoint,
            out,
            format=config.packed_format,
            embeddings=config.embeddings,
            progress=progress.line("packing", "M weights", 1e6),
        )
    _print_result(console, packed)
    if config.check:
        try:
            with console.status("comparing with the trained model"):
                found = check_packed(checkpoint, out)
            _print_check(found, out)
        except UserError:
            shutil.rmtree(out)
            raise


def _print_result(console: "Console", packed: "PackResult") -> None:
    from rich.table import Table

    metadata = packed.metadata
    others = packed.file_bytes - packed.weight_bytes - packed.embedding_bytes
    table = Table(title=f"Packed {metadata.format} as {metadata.packed_format}")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    table.add_row(
        f"{metadata.weights:,} ternary weights, {8 * packed.weight_bytes / metadata.weights:.4f} bits "
        "each",
        f"{packed.weight_bytes:,}",
    )
    table.add_row(f"embeddings, {metadata.embeddings}", f"{packed.embedding_bytes:,}")
    table.add_row("norms, biases, header", f"{others:,}")
    table.add_row("model.safetensors", f"{packed.file_bytes:,}", style="bold")
    console.print(table)
    print(f"{packed.folder} written in {packed.seconds:.1f} s")


def _print_sizes(console: "Console", sizes: list["PackedSize"]) -> None:
    from rich.table import Table

    first = sizes[0].metadata
    table = Table(title=f"{first.format}, embeddings {first.embeddings}")
    for column in ("format", "bits a weight", "MB of weights", "MB of the file"):
        table.add_column(column, justify="left" if column == "format" else "right")
    for size in sizes:
        name = size.metadata.packed_format + (" (auto)" if size is sizes[0] else "")
        megabytes = (f"{count / 1e6:,.1f}" for count in (size.weight_bytes, size.total_bytes))
        table.add_row(name, f"{8 * size.weight_bytes / first.weights:.4f}", *megabytes)
    console.print(table)


def _print_check(found: "PackCheck", out: str) -> None:
    if not found.exact:
        raise UserError(
            f"{out} would not compute what the trained model computes (logits differ by up to "
            f"{found.largest_difference:.3g}) and is removed: report this as a defect"
        )
    print(
        f"loaded back: logits of {found.tokens} tokens equal the trained model's bit for bit, given "
        f"the stored embeddings; storing those moves logits by at most {found.largest_difference:.3g} "
        f"(KL divergence {found.kl_divergence:.2g} nats)"
    )
