# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet pack`: a trained model as a small file, checked by loading it back."""

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from sparse_bitnet.cli.arguments import FLAT, CheckpointArgument, OutArgument, command
from sparse_bitnet.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sparse_bitnet.export.pack_check import PackCheck
    from sparse_bitnet.export.pack_checkpoint import PackResult


@dataclass(kw_only=True)
class PackConfig:
    """How to store weights and embeddings."""

    format: Literal["auto", "i2", "b3", "nm-bitmap", "nm-enum", "nm-sign", "nm-zstd"] = "auto"
    """Of the ternary weights. auto: the smallest of those that decode within 10 % of the fastest.
    nm-enum and nm-zstd are the smallest, and are decoded on loading; nm-sign is the smallest of all for
    quantizer=binary."""

    embeddings: Literal["auto", "bf16", "int8", "float32", "ternary"] = "auto"
    """Of embedding and output head. int8: one scale a row. float32: as trained. auto: ternary where
    they are, as in models of other tools, else bf16."""

    check: bool = True
    """Load trained and packed model, one after the other, and compare their logits."""


@command("pack")
def main(
    checkpoint: CheckpointArgument, out: OutArgument, config: Annotated[PackConfig, FLAT]
) -> None:
    """Write a trained ternary model as a small, complete folder.

    Args:
        checkpoint: run folder or model folder.
        out: folder to write; must not exist or be empty.
        config: formats.
    """
    from rich.console import Console

    from sparse_bitnet.export.pack_check import check_packed
    from sparse_bitnet.export.pack_checkpoint import pack_checkpoint
    from sparse_bitnet.progress import Progress

    console = Console(markup=False)
    with Progress(console) as progress:
        packed = pack_checkpoint(
            checkpoint,
            out,
            format=config.format,
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
        f"{packed.weights:,} ternary weights, {packed.bits_per_weight:.4f} bits each",
        f"{packed.weight_bytes:,}",
    )
    table.add_row(f"embeddings, {metadata.embeddings}", f"{packed.embedding_bytes:,}")
    table.add_row("norms, biases, header", f"{others:,}")
    table.add_row("model.safetensors", f"{packed.file_bytes:,}", style="bold")
    console.print(table)
    print(f"{packed.folder} written in {packed.seconds:.1f} s")


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
