# SPDX-License-Identifier: Apache-2.0
"""Export of a trained checkpoint to the files of another tool: one function for all formats.

Everything that can be refused from names and shapes is refused before the first byte is written; the
files appear under their name when all of them are complete.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from sparse_bitnet.checkpoint.checkpoint import Checkpoint, stored_tensors
from sparse_bitnet.checkpoint.model_folder import EXPORTED_FORMAT, LINEAR_NORMS, write_json
from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.errors import UserError
from sparse_bitnet.export import folder_formats, gguf_export
from sparse_bitnet.export.export_config import ExportConfig
from sparse_bitnet.export.hf_folder import (
    check_new_folder,
    copy_tokenizer,
    older_rope,
    plain_config,
    write_generation_config,
    write_safetensors,
)
from sparse_bitnet.export.model_card import gguf_file_name, model_card
from sparse_bitnet.export.verify import Verification, absent_reader, text_to_verify, verify
from sparse_bitnet.files import atomic_folder, write_atomic
from sparse_bitnet.packing.gguf_blocks import BLOCK_TYPES, BlockType
from sparse_bitnet.progress import OnProgress

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Result of an export."""

    folder: Path
    nbytes: int
    """Size of all files, in bytes."""
    warning: str | None
    """Note that a user of this format must know, or None."""
    verification: Verification | None
    """Result of the verification; None if it was not requested."""


def export(
    checkpoint: str | Path,
    out: str | Path,
    config: ExportConfig,
    *,
    on_progress: OnProgress | None = None,
    on_verified: OnProgress | None = None,
) -> Export:
    """Write a trained model in the format of another tool; verify it if `config.verify` is set.

    Args:
        checkpoint: run folder, or checkpoint folder of ours.
        out: a new folder.
        config: format and options.
        on_progress: called with (bytes written, bytes in all) after every tensor.
        on_verified: called with (tokens compared, tokens in all) during the verification.

    A verification out of bounds is returned, not raised; the files stay and their card records it.

    Raises `UserError` for an unusable checkpoint, an `out` that exists, a model the format cannot hold,
    or a full disk; nothing is then left behind.
    """
    out = check_new_folder(out)
    if config.verify and (absent := absent_reader(config.format)):
        raise UserError(f"--verify: {absent}; without --verify the export needs none")
    source = open_checkpoint(checkpoint, "trained", "packed")
    block = _block(config)
    if config.verify and block is not None:
        gguf_export.check_reader(source, block)
    text = text_to_verify(source, config) if config.verify else None
    write(source, out, config, on_progress)
    verification = None
    if text is not None:
        verification = verify(source, out, config, text, on_verified)
        card = model_card(source, config.format, config.embeddings, checked=verification.rows())
        write_atomic(out / "README.md", card)
    warning = None if block is None else gguf_export.notes(source, block)
    if config.format == "dense" and source.format.weight == "ternary":
        warning = folder_formats.DENSE_WARNING
    return Export(
        folder=out,
        nbytes=sum(file.stat().st_size for file in out.rglob("*") if file.is_file()),
        warning=warning,
        verification=verification,
    )


def write(
    source: Checkpoint, out: Path, config: ExportConfig, on_progress: OnProgress | None = None
) -> None:
    """Check, then write the folder `out` in one step; see `export`."""
    assert config.embeddings is not None
    if source.format.variant("activation").has("transform"):
        raise UserError(
            f"{source.folder} was trained with activation={source.format.activation}, which transforms "
            "what layers take; no other tool's format says so: run it with --engine transformers"
        )
    block = _block(config)
    _check_tensors(source, holds_linear_norms=block is not None)
    if block is None:
        folder_formats.check(source, config.format)
    with atomic_folder(out) as folder:
        if block is not None:
            path = folder / gguf_file_name(config.format)
            gguf_export.write(path, source, block, config.embeddings, on_progress)
        else:
            dtype = DTYPES[config.embeddings]
            tensors = folder_formats.deferred_tensors(source, config.format, dtype)
            write_safetensors(folder / "model.safetensors", tensors, on_progress)
            values = older_rope(source.config) | plain_config(source.config, dtype)
            values |= {EXPORTED_FORMAT: str(source.format)}
            if entry := folder_formats.quantization_config(source, config.format):
                values["quantization_config"] = entry
            write_json(folder / "config.json", values)
            copy_tokenizer(source.folder, folder)
            write_generation_config(source.folder, folder)
        card = model_card(source, config.format, config.embeddings)
        (folder / "README.md").write_text(card, encoding="utf-8")


def _check_tensors(source: Checkpoint, *, holds_linear_norms: bool) -> None:
    """Raise `UserError` unless a packed model's tensors are those of its config.json: readers would drop
    the others, or make up those that are missing."""
    if source.kind != "packed":
        return
    wanted = {name: tuple(tensor.shape) for name, tensor in stored_tensors(source.model()).items()}
    if holds_linear_norms and LINEAR_NORMS in source.config:
        wanted |= {f"{name}.norm.weight": (shape[1],) for name, shape in source.layers.items()}
    stored = source.others | {f"{name}.weight": shape for name, shape in source.layers.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            shapes = [
                "not there" if shape is None else list(shape)
                for shape in (stored.get(name), wanted.get(name))
            ]
            raise UserError(
                f"{source.folder}: {name} is {shapes[0]} in the file and {shapes[1]} in the formats of "
                "other tools, which follow config.json"
            )


def _block(config: ExportConfig) -> BlockType | None:
    """Return the block type of a GGUF format, or None for any other format."""
    return BLOCK_TYPES.get(config.format.removeprefix("gguf-").upper())
