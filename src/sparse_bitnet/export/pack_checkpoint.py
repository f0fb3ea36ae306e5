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

Importing this module does not import torch: arrays are packed without it.
"""

import dataclasses
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.packing.codec import pack
from sparse_bitnet.packing.formats import (
    FORMATS,
    SCALE_FLOOR,
    SCALE_GROUPS,
    auto_format,
    check_layout,
    needs_exact,
    row_bytes,
)
from sparse_bitnet.packing.metadata import EMBEDDINGS, PackedMetadata
from sparse_bitnet.packing.tensor_file import DTYPES, TensorFileWriter, TensorSpec
from sparse_bitnet.packing.ternary import TableScales, scales_of_groups, table_scales
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.progress import OnProgress

COPIED = (*TOKENIZER_FILES, "generation_config.json", "LICENSE*", POOLING_FILES)
"""Files beside the weights that belong to the model."""
PACKED_HELD = (
    "model.safetensors holds its ternary codes, packed. Without `import sparse_bitnet`, transformers "
    "finds no weights in it and would make random ones."
)


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """Result of packing a checkpoint."""

    folder: Path
    metadata: PackedMetadata
    weight_bytes: int
    """Bytes of the ternary weights' codes and scales."""
    embedding_bytes: int
    """Bytes of embedding and output head."""
    file_bytes: int
    """Bytes of model.safetensors."""
    seconds: float


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
        source: run folder or model folder of a ternary model, or an open `Checkpoint`.
        out: folder to write; must not exist or be empty.
        format: a name in `formats.FORMATS`, or "auto" (`formats.auto_format`).
        embeddings: "bf16", "int8" (one scale a row), "float32" to keep them as trained, "ternary" if they
            are; "auto" is ternary if they are, else bf16.
        progress: called with (weights done, weights in all) after every layer.

    Raises `UserError` for a source that cannot be packed or read, a format that does not hold its
    layers, an `out` that is in use, or a full disk. Nothing is then left behind.
    """
    started = time.monotonic()
    if embeddings not in ("auto", *EMBEDDINGS):
        raise UserError(f"embeddings {embeddings!r}: choose one of auto, {', '.join(EMBEDDINGS)}")
    out = check_new_folder(out)
    checkpoint = source if isinstance(source, Checkpoint) else open_ternary(source)
    metadata, forms = _described(checkpoint, format, embeddings)
    for name, (_, in_features) in metadata.layers.items():
        check_layout(metadata.packed_format, metadata.pattern, in_features, name)
    with atomic_folder(out) as folder:
        # The tokenizer comes first: if it cannot be read, packing fails before the weights.
        if not checkpoint.write_tokenizer(folder):
            read_json_if_there(checkpoint.folder / "generation_config.json")
            copy_files(checkpoint.folder, folder, COPIED)
        _order_vocabulary(folder / "tokenizer.json")
        weight_bytes = _write_tensors(checkpoint, metadata, forms, folder / MODEL_FILE, progress)
        config = {**checkpoint.config, "quantization_config": metadata.config_entry()}
        # `evaluate` then uses the context length of the run, which the folder does not name.
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
        weight_bytes=weight_bytes,
        embedding_bytes=sum(spec.nbytes for spec in _table_specs(checkpoint, forms)),
        file_bytes=(out / MODEL_FILE).stat().st_size,
        seconds=time.monotonic() - started,
    )


class PackedSize(NamedTuple):
    """Size of a checkpoint in one format, without the file's header of about 0.1 MB."""

    metadata: PackedMetadata
    weight_bytes: int
    """Bytes of the ternary weights' codes and scales."""
    total_bytes: int


def packed_sizes(source: str | Path, *, embeddings: str = "auto") -> list[PackedSize]:
    """Return sizes of a checkpoint in every format that can hold it, the default one first.

    Arguments and errors are those of `pack_checkpoint`.
    """
    checkpoint = open_ternary(source)
    metadata, forms = _described(checkpoint, "auto", embeddings)
    scale_bytes = 4 * len(checkpoint.layers)
    if not checkpoint.has_one_scale:
        scale_bytes = sum(
            checkpoint.ternary(name).weight_scale.nbytes for name in checkpoint.layers
        )
    others = (*_table_specs(checkpoint, forms), *_specs_as_stored(checkpoint))
    other_bytes = sum(spec.nbytes for spec in others)
    sizes = []
    for format in dict.fromkeys((metadata.packed_format, *FORMATS)):
        if needs_exact(format) and not _is_exact(checkpoint):
            continue
        weight_bytes = scale_bytes + sum(
            rows * row_bytes(format, metadata.pattern, in_features, layer=name)
            for name, (rows, in_features) in metadata.layers.items()
        )
        described = dataclasses.replace(metadata, packed_format=format)
        sizes.append(PackedSize(described, weight_bytes, weight_bytes + other_bytes))
    return sizes


Forms = dict[str, TableScales | str]
"""Storage of embedding and head, by name: ternary with these scales, or one of `EMBEDDINGS`."""


def _described(
    checkpoint: Checkpoint, format: str, embeddings: str
) -> tuple[PackedMetadata, Forms]:
    """Resolve "auto" for a checkpoint; return its metadata and how embedding and head are stored.

    Raises `UserError` if ternary embeddings are requested and none is ternary.
    """
    forms: Forms = {}
    for name in checkpoint.embeddings if embeddings in ("auto", "ternary") else ():
        scales = table_scales(checkpoint.ternary_pieces(name), checkpoint.others[name][1])
        if scales is not None:
            forms[name] = scales
    if embeddings == "ternary" and not forms:
        raise UserError(
            f"{checkpoint.folder}: tensor {checkpoint.embeddings[0]} is not ternary with a scale for "
            f"some {', '.join(map(str, SCALE_GROUPS))} weights; use --embeddings auto"
        )
    if embeddings == "auto":
        embeddings = "ternary" if forms else "bf16"
    if format == "auto":
        format = auto_format(checkpoint.format.pattern, exact=_is_exact(checkpoint))
    metadata = PackedMetadata(
        packed_format=format,
        format=checkpoint.format,
        embeddings=embeddings,
        layers=checkpoint.layers,
    )
    other = "bf16" if embeddings == "ternary" else embeddings
    return metadata, {name: forms.get(name, other) for name in checkpoint.embeddings}


def _is_exact(checkpoint: Checkpoint) -> bool:
    return checkpoint.format.quantizer == "binary"  # what that one keeps is never zero


def _write_tensors(
    checkpoint: Checkpoint,
    metadata: PackedMetadata,
    forms: Forms,
    path: Path,
    progress: OnProgress | None,
) -> int:
    """Write all tensors; return the bytes of packed weights with their scales."""
    done, weight_bytes, specs = 0, 0, []
    for name, (rows, in_features) in metadata.layers.items():
        columns = row_bytes(metadata.packed_format, metadata.pattern, in_features)
        specs.append(TensorSpec(f"{name}.weight_packed", "uint8", (rows, columns)))
        # If a layer has several scales, their shape and type are set when they are written.
        scales = ("float32", (1,)) if checkpoint.has_one_scale else (None, (10**15,))
        specs.append(TensorSpec(f"{name}.weight_scale", *scales))
    as_stored = list(_specs_as_stored(checkpoint))
    specs += [*_table_specs(checkpoint, forms), *as_stored]
    with TensorFileWriter(path, specs, metadata.to_json()) as writer:
        for name, (rows, in_features) in metadata.layers.items():
            codes, weight_scale = checkpoint.ternary(name)
            packed = pack(codes, metadata.packed_format, metadata.pattern, name=name)
            writer.write(f"{name}.weight_packed", [packed])
            scales = weight_scale if weight_scale.shape else weight_scale.reshape(1)
            shape = tuple(scales.shape)
            writer.write(f"{name}.weight_scale", [scales], shape, scales.dtype)
            weight_bytes += packed.nbytes + scales.nbytes
            done += rows * in_features
            if progress is not None:
                progress(done, metadata.weights)
        for name, form in forms.items():
            _write_table(checkpoint, name, form, writer)
        for spec in as_stored:
            writer.write(spec.name, [checkpoint.read(spec.name)])
    return weight_bytes


def _table_specs(checkpoint: Checkpoint, forms: Forms) -> Iterator[TensorSpec]:
    """Yield the tensors of embedding and head, and of their scales."""
    for name, form in forms.items():
        rows, columns = checkpoint.others[name]
        if isinstance(form, TableScales):
            yield TensorSpec(name, "uint8", (rows, row_bytes("i2", NMPattern(1, 1), columns)))
            yield TensorSpec(f"{name}_scale", form.dtype, (rows, columns // form.group))
        elif form == "int8":
            yield TensorSpec(name, "int8", (rows, columns))
            yield TensorSpec(f"{name}_scale", "float32", (rows, 1))
        else:
            yield TensorSpec(name, "bfloat16" if form == "bf16" else form, (rows, columns))


def _specs_as_stored(checkpoint: Checkpoint) -> Iterator[TensorSpec]:
    """Yield tensors that are written unchanged: biases, norms, linears that were left dense."""
    for name, shape in checkpoint.others.items():
        if name not in checkpoint.embeddings:
            yield TensorSpec(name, DTYPES[checkpoint.dtypes[name]], shape)


def _write_table(
    checkpoint: Checkpoint, name: str, form: TableScales | str, writer: TensorFileWriter
) -> None:
    """Write embedding or head, piece by piece."""
    if isinstance(form, TableScales):
        codes, scales = [], []
        for piece in checkpoint.ternary_pieces(name):
            assert piece is not None
            codes.append(pack(piece.codes, "i2", NMPattern(1, 1), name=name))
            scales.append(scales_of_groups(piece, form))
        writer.write(name, codes)
        writer.write(f"{name}_scale", scales)
    elif form == "int8":
        scales = []
        writer.write(name, _int8_pieces(checkpoint.pieces(name), scales))
        writer.write(f"{name}_scale", scales)
    else:
        stored = _floats if form == "float32" else _rounded
        writer.write(name, map(stored, checkpoint.pieces(name)))


def _int8_pieces(pieces: Iterator[Any], scales: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield int8 codes [rows, columns], a row quantised as `quantize_int8` does a token; append the
    float32 scales [rows, 1] to `scales`."""
    for piece in pieces:
        values = _floats(piece)
        largest = np.maximum(np.abs(values).max(-1, keepdims=True), np.float32(SCALE_FLOOR))
        scales.append(largest / np.float32(127))
        yield np.rint(values * (np.float32(127) / largest)).clip(-128, 127).astype(np.int8)


def _floats(piece: Any) -> np.ndarray:
    """Return the values of a tensor or an array as float32."""
    return piece if isinstance(piece, np.ndarray) else piece.float().numpy()


def _rounded(piece: Any) -> np.ndarray:
    """Round to the nearest bfloat16; return its bits as uint16."""
    values = _floats(piece)
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def _order_vocabulary(path: Path) -> None:
    """Sort the words of a byte-pair tokenizer and write each merge as one string: `tokenizers`, which
    makes a tree of the words, opens Qwen2.5's a fifth faster. Other tokenizers stay unchanged."""
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
