# SPDX-License-Identifier: Apache-2.0
"""`sparse-bitnet pack`: a trained model as a small file, checked by loading it back."""

import os
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from sparse_bitnet.cli.arguments import CheckpointArgument, command
from sparse_bitnet.errors import UserError, refuse_unused

if TYPE_CHECKING:
    from sparse_bitnet.export.pack_checkpoint import PackedSize

# The names of `packing.formats`, which imports NumPy; `--help` should not.
PackedFormat = Literal["auto", "i2", "b3", "nm-enum", "nm-sign"]
Embeddings = Literal["auto", "bf16", "int8", "float32", "ternary"]


@dataclass(kw_only=True)
class PackConfig:
    """How to store weights and embeddings."""

    packed_format: PackedFormat = "auto"
    """Packed format of the ternary weights. auto: the smallest that takes at most 1.5 times as long as
    i2 to load. nm-sign: only for models trained with quantizer=binary."""

    embeddings: Embeddings = "auto"
    """Data type of embedding and output head. int8: one scale per row. float32: as trained. auto: ternary
    if they are, as in some models of other tools, else bf16."""

    check: bool = True
    """Load the packed model and compare its logits with the trained model's."""

    dry_run: bool = False
    """Print the size in every packed format and write nothing."""


@command("pack")
def main(
    checkpoint: CheckpointArgument, config: PackConfig, out: Annotated[str | None, "[OUT]"] = None
) -> None:
    """Write a trained ternary model as a small folder that the CPU engine runs.

    Args:
        checkpoint: Run folder, checkpoint folder, or folder that `import` wrote.
        out: New folder to write.
    """
    from rich.console import Console

    from sparse_bitnet.export.pack_checkpoint import pack_checkpoint, packed_sizes
    from sparse_bitnet.export.verify import check_packed
    from sparse_bitnet.progress import Progress

    if config.dry_run:
        refuse_unused(config, ("packed_format", "check"), "--dry-run prints every format")
        _print_sizes(packed_sizes(checkpoint, embeddings=config.embeddings))
        return
    if out is None:
        raise UserError("OUT is missing: name the folder to write, or add --dry-run")
    with Progress(console := Console(markup=False)) as progress:
        packed = pack_checkpoint(
            checkpoint,
            out,
            format=config.packed_format,
            embeddings=config.embeddings,
            progress=progress.line("packing", "M weights", 1e6),
        )
    _print_result(packed)
    print(f"{out}: written")
    if config.check:
        try:
            with console.status("comparing with the trained model"):
                moved = check_packed(checkpoint, out)
        except UserError as error:
            shutil.rmtree(os.path.realpath(out))
            raise UserError(f"{error}; {out} is removed") from error
        print(
            "check: with equal embeddings, logits of 128 tokens equal the trained model's bit for bit; "
            f"embeddings as {packed.metadata.embeddings} move logits by at most {moved:.3g}"
        )


def _print_result(packed: "PackedSize") -> None:
    metadata = packed.metadata
    bits = 8 * packed.weight_bytes / metadata.weights
    others = packed.file_bytes - packed.weight_bytes - packed.embedding_bytes
    basis = "" if metadata.rotation is None else " in a rotated basis"
    print(f"Packed {metadata.format}{basis} as {metadata.packed_format}")
    for count, part in (
        (packed.weight_bytes, f"{metadata.weights:,} ternary weights, {bits:.4f} bits each"),
        (packed.embedding_bytes, f"embeddings, {metadata.embeddings}"),
        (others, "norms, biases, header"),
        (packed.file_bytes, "model.safetensors"),
    ):
        print(f"{count:>15,} bytes  {part}")


def _print_sizes(sizes: list["PackedSize"]) -> None:
    first = sizes[0].metadata
    print(f"{first.format}, embeddings {first.embeddings}")
    print("format         bits/weight    MB of weights  MB in total")
    for size in sizes:
        name = size.metadata.packed_format + (" (auto)" if size is sizes[0] else "")
        bits = 8 * size.weight_bytes / first.weights
        megabytes = (size.weight_bytes / 1e6, size.file_bytes / 1e6)
        print("{:<14} {:>13.4f} {:>14,.1f} {:>15,.1f}".format(name, bits, *megabytes))
