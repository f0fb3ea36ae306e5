# SPDX-License-Identifier: Apache-2.0
"""Packing a trained checkpoint: a folder that is complete, exact, and small.

model.safetensors   <layer>.weight_packed  uint8 [rows, row_bytes]
                    <layer>.weight_scale   float32 [1], the multiplier of the codes; of models of others
                                           also one for each row or group (csrc/packed_format.h)
                    embedding and output head, if it is not tied to it: bfloat16 or float32
                    <name>.weight, int8 <name>.weight with float32 <name>.weight_scale [rows, 1], or the
                    bytes of i2 with scales [rows, groups]
                    biases, norms and linears that were left dense, as they were
config.json         the model's, with quant_method "sparse_bitnet_packed"
generation files, copied; the tokenizer, the same in an order that is read faster

Importing this module imports no torch: what comes as arrays is packed without it.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.checkpoint import TRAINED_CONTEXT, Checkpoint
from sparse_bitnet.checkpoint.model_folder import (
    POOLING_FILES,
    TOKENIZER_FILES,
    copy_files,
    finish_folder,
    read_json_if_there,
    write_json,
)
from sparse_bitnet.checkpoint.open_checkpoint import open_ternary
from sparse_bitnet.checkpoint.packed import MODEL_FILE
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.hf_folder import check_new_folder
from sparse_bitnet.export.packed_tables import table_specs, ternary_tables, write_table
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import (
    FORMATS,
    auto_format,
    check_layout,
    needs_exact,
    row_bytes,
)
from sparse_bitnet.packing.metadata import EMBEDDINGS, PackedMetadata
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFileWriter, TensorSpec
from sparse_bitnet.packing.ternary import TableScales
from sparse_bitnet.progress import OnProgress

COPIED = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*", POOLING_FILES)
"""Files beside the weights that belong to the model."""
PACKED_HELD = (
    "model.safetensors holds its ternary codes, packed. Without `import sparse_bitnet`, transformers "
    "finds no weights in it and would make random ones."
)


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """What was written."""

    folder: Path
    metadata: PackedMetadata
    weights: int
    """Ternary weights."""
    weight_bytes: int
    """Bytes of their codes and scales."""
    embedding_bytes: int
    """Bytes of embedding and output head."""
    file_bytes: int
    """Bytes of model.safetensors."""
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Of the packed layers."""
        return 8 * self.weight_bytes / self.weights


def pack_checkpoint(
    source: str | Path | Checkpoint,
    out: str | Path,
    *,
    format: str = "auto",
    embeddings: str = "auto",
    progress: OnProgress | None = None,
) -> PackResult:
    """Write the packed form of a trained checkpoint, one tensor in memory at a time.

    Args:
        source: run folder or model folder of a ternary model, or one that is open.
        out: folder to write; must not exist or be empty.
        format: a name in `formats.FORMATS`, or "auto" (`formats.auto_format`).
        embeddings: "bf16", "int8" (one scale a row), "float32" to keep them as trained, "ternary" where
            they are; "auto" that or bf16.
        progress: told the weights done and in all, after every tensor.

    Raises `UserError` for a source that cannot be packed or read, a format that does not hold its
    layers, an `out` that is in use, or a full disk. Nothing is then left behind.
    """
    started = time.monotonic()
    if embeddings not in ("auto", *EMBEDDINGS):
        raise UserError(f"embeddings {embeddings!r}: choose one of auto, {', '.join(EMBEDDINGS)}")
    out = check_new_folder(out)
    checkpoint = source if isinstance(source, Checkpoint) else open_ternary(source)
    tables, embeddings = _tables(checkpoint, embeddings)
    metadata = PackedMetadata(
        packed_format=_auto(checkpoint.format) if format == "auto" else format,
        format=checkpoint.format,
        embeddings=embeddings,
        layers=checkpoint.layers,
    )
    for name, (_, in_features) in metadata.layers.items():
        check_layout(metadata.packed_format, metadata.pattern, in_features, name)
    with atomic_folder(out) as folder:
        # First: one that cannot be read should not show only after all weights.
        if not checkpoint.write_tokenizer(folder):
            read_json_if_there(checkpoint.folder / "generation_config.json")
            copy_files(checkpoint.folder, folder, COPIED)
        _order_vocabulary(folder / "tokenizer.json")
        weight_bytes, embedding_bytes = _write_tensors(
            checkpoint, metadata, tables, folder / MODEL_FILE, progress
        )
        config = {**checkpoint.config, "quantization_config": metadata.config_entry()}
        # So that `evaluate` cuts texts as it does for the run, which the folder does not name.
        if (
            checkpoint.kind == "trained"
            and (length := checkpoint.trained_context_length) is not None
        ):
            config[TRAINED_CONTEXT] = length
        write_json(folder / "config.json", config)
        finish_folder(folder, PACKED_HELD)
    return PackResult(
        folder=out,
        metadata=metadata,
        weights=_weights(metadata),
        weight_bytes=weight_bytes,
        embedding_bytes=embedding_bytes,
        file_bytes=(out / MODEL_FILE).stat().st_size,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True, kw_only=True)
class PackedSize:
    """What a checkpoint takes in one format; the file's header, about 0.1 MB, is not counted."""

    metadata: PackedMetadata
    weight_bytes: int
    """Bytes of the ternary weights' codes and scales."""
    total_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of a ternary weight, scales and padding included."""
        return 8 * self.weight_bytes / _weights(self.metadata)


def packed_sizes(source: str | Path, *, embeddings: str = "auto") -> list[PackedSize]:
    """Sizes of a checkpoint in every format that can hold it, the default of `--format auto` first.

    Arguments and errors are those of `pack_checkpoint`.
    """
    checkpoint = open_ternary(source)
    tables, embeddings = _tables(checkpoint, embeddings)
    scale_bytes = 4 * len(checkpoint.layers)
    if not checkpoint.has_one_scale:
        scale_bytes = sum(
            checkpoint.ternary(name).weight_scale.nbytes for name in checkpoint.layers
        )
    other_bytes = sum(spec.nbytes for spec in _other_specs(checkpoint, embeddings, tables))
    auto, is_binary = _auto(checkpoint.format), checkpoint.format.quantizer == "binary"
    sizes = []
    for format in (auto, *(name for name in FORMATS if name != auto)):
        if needs_exact(format) and not is_binary:
            continue
        metadata = PackedMetadata(
            packed_format=format,
            format=checkpoint.format,
            embeddings=embeddings,
            layers=checkpoint.layers,
        )
        weight_bytes = scale_bytes + sum(
            rows * row_bytes(format, metadata.pattern, in_features, layer=name)
            for name, (rows, in_features) in metadata.layers.items()
        )
        sizes.append(
            PackedSize(
                metadata=metadata, weight_bytes=weight_bytes, total_bytes=weight_bytes + other_bytes
            )
        )
    return sizes


def _tables(checkpoint: Checkpoint, embeddings: str) -> tuple[dict[str, TableScales], str]:
    """The tables that stay ternary, and the form of embeddings that "auto" stands for."""
    tables = ternary_tables(checkpoint, embeddings)
    if embeddings == "auto":
        embeddings = "ternary" if tables else "bf16"
    return tables, embeddings


def _auto(format: SparseBitConfig) -> str:
    # What that quantiser keeps is never zero.
    return auto_format(format.pattern, exact=format.quantizer == "binary")


def _weights(metadata: PackedMetadata) -> int:
    return sum(rows * in_features for rows, in_features in metadata.layers.values())


def _write_tensors(
    checkpoint: Checkpoint,
    metadata: PackedMetadata,
    tables: dict[str, TableScales],
    path: Path,
    progress: OnProgress | None,
) -> tuple[int, int]:
    """Returns bytes of packed weights with scales, and bytes of embeddings."""
    done, total = 0, _weights(metadata)
    weight_bytes = embedding_bytes = 0
    specs = _specs(checkpoint, metadata, tables)
    with TensorFileWriter(path, specs, metadata.to_json()) as writer:
        for name, (rows, in_features) in metadata.layers.items():
            codes, weight_scale = checkpoint.ternary(name)
            packed = pack(codes, metadata.packed_format, metadata.pattern, name=name)
            writer.write(f"{name}.weight_packed", [packed], tuple(packed.shape))
            scales = weight_scale if weight_scale.shape else weight_scale.reshape(1)
            shape = tuple(scales.shape)
            writer.write(f"{name}.weight_scale", [scales], shape, scales.dtype)
            weight_bytes += packed.nbytes + scales.nbytes
            done += rows * in_features
            if progress is not None:
                progress(done, total)
        for name in checkpoint.embeddings:
            form = tables.get(name, metadata.embeddings)
            embedding_bytes += write_table(checkpoint, name, form, writer)
        for name in _as_stored(checkpoint):
            writer.write(name, [checkpoint.read(name)])
    return weight_bytes, embedding_bytes


def _specs(
    checkpoint: Checkpoint, metadata: PackedMetadata, tables: dict[str, TableScales]
) -> Iterator[TensorSpec]:
    for name, (rows, in_features) in metadata.layers.items():
        columns = row_bytes(metadata.packed_format, metadata.pattern, in_features)
        yield TensorSpec(f"{name}.weight_packed", "uint8", (rows, columns))
        # Of several, shape and type are settled when they are written.
        scales = ("float32", (1,)) if checkpoint.has_one_scale else (None, (10**15,))
        yield TensorSpec(f"{name}.weight_scale", *scales)
    yield from _other_specs(checkpoint, metadata.embeddings, tables)


def _other_specs(
    checkpoint: Checkpoint, embeddings: str, tables: dict[str, TableScales]
) -> Iterator[TensorSpec]:
    yield from table_specs(checkpoint, embeddings, tables)
    for name in _as_stored(checkpoint):
        yield TensorSpec(name, DTYPES[checkpoint.dtypes[name]], checkpoint.others[name])


def _as_stored(checkpoint: Checkpoint) -> list[str]:
    """Tensors that are written as they were: biases, norms, linears that were left dense."""
    return [name for name in checkpoint.others if name not in checkpoint.embeddings]


def _order_vocabulary(path: Path) -> None:
    """Sorts the words of a byte-pair tokenizer and writes each merge as one string: `tokenizers`, which
    makes a tree of the words, opens Qwen2.5's a fifth faster. Other tokenizers stay as they are."""
    content = read_json_if_there(path)
    match content.get("model"):
        case {"type": "BPE", "vocab": dict(vocab), "merges": list(merges)}:
            content["model"]["vocab"] = dict(sorted(vocab.items()))
            if all(map(_is_plain, merges)):
                content["model"]["merges"] = [" ".join(pair) for pair in merges]
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
            path.write_text(text, encoding="utf-8")


def _is_plain(pair: Any) -> bool:
    """Whether a merge as a string is read as these two words: not with a space, nor as a file's head."""
    match pair:
        case [str(left), str(right)]:
            return not (" " in left + right or left.startswith("#version"))
    return False
