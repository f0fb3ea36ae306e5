# SPDX-License-Identifier: Apache-2.0
"""Export to GGUF, the format of llama.cpp and the tools built on it: ternary blocks, tokenizer, metadata.

One file holds everything: sparse layers in the requested type, or in another one that their rows fill
(`gguf_blocks`), as are ternary embeddings; norms and biases in float32, other embeddings in float16.
llama.cpp quantises activations per block instead of per token, so its logits are close to ours, never
equal.
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.declared_rotation import PREFIX, rotation_keys
from sparse_bitnet.checkpoint.gguf import ROTATED
from sparse_bitnet.checkpoint.gguf_architectures import GgufArchitecture
from sparse_bitnet.checkpoint.gguf_config import (
    FORMAT,
    ROPE_FACTORS,
    WEIGHT_SCALES,
    metadata_of,
    rope_factors,
)
from sparse_bitnet.checkpoint.gguf_order import stored_order, stored_shape, to_file
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.gguf_vocabulary import add_vocabulary
from sparse_bitnet.layer_config import GATES
from sparse_bitnet.packing.gguf_blocks import I2_S, PRISM_TYPES, BlockType, block_for
from sparse_bitnet.progress import OnProgress

F32, F16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16

_SCALE_TOLERANCE = 2**-11


class GgufTensor(NamedTuple):
    """One tensor of the file, computed when it is written."""

    name: str
    type_id: int
    """Number of the ggml_type."""
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], np.ndarray]


def check_reader(source: Checkpoint, block: BlockType) -> None:
    """Raise `UserError` for a model whose file llama.cpp cannot read."""
    row = _metadata(source)[0]
    if block in (I2_S, *PRISM_TYPES):
        known = "dense" if source.rotation else "gguf-tq2_0"
        raise UserError(f"--verify: llama.cpp does not read {block.name}; verify --to {known}")
    if not row.in_llama_cpp:
        raise UserError(f"--verify: llama.cpp does not read {row.name}: {row.note}")


def _metadata(source: Checkpoint) -> tuple[GgufArchitecture, dict[str, object]]:
    """Return a model's GGUF architecture and metadata. Raises `UserError` if GGUF does not support it."""
    row, metadata = metadata_of(source.config, f"{source.folder}/config.json")
    if (rotation := source.rotation) is None:
        return row, metadata
    if row.name not in ROTATED:
        raise UserError(f"{source.folder} has rotated weights, which {row.name} does not support")
    layers = [row.stored_name(f"{layer}.weight") for layer in source.layers]
    tables, has_heads = map(row.stored_name, source.embeddings), bool(row.linear_block)
    keys = rotation_keys(rotation, layers, [*tables], has_heads=has_heads)
    metadata |= {PREFIX + key: value for key, value in keys.items()}
    # Columns stay in their order, which a rotation mixes.
    return row._replace(tiles_columns=False), metadata


def scale_groups(source: Checkpoint) -> dict[str, int]:
    """Return for each sparse layer how many weights of a row share a scale; 0: one scale per matrix."""
    groups = dict.fromkeys(source.layers, 0)
    for name, (_, columns) in source.layers.items() if not source.has_one_scale else ():
        file = source.file
        stored = file.entries[f"{name}.weight_scale"] if file else source.ternary(name).weight_scale
        groups[name] = 0 if prod(stored.shape) == 1 else columns // stored.shape[-1]
    return groups


def notes(source: Checkpoint, wanted: BlockType) -> str | None:
    """Return notes for users of the file, or None: types that replace `wanted` in rows that do not fill
    its blocks, activations it was not trained with, and features that llama.cpp lacks."""
    row, metadata = _metadata(source)
    blocks = [block_for(columns, wanted) for _, columns in source.layers.values()]
    counts = {block.name: blocks.count(block) for block in blocks if block is not wanted}
    said = []
    if counts:
        others = " and ".join(f"{count} as {name}" for name, count in counts.items())
        said.append(
            f"of {len(blocks)} layers {others}, with exact codes, since their rows do not fill "
            f"{wanted.name}'s blocks of {wanted.codes}"
        )
    if source.format.activation == "none":
        said.append("llama.cpp rounds activations to 8 bits, which the model was trained without")
    is_windowed = f"{row.name}.attention.sliding_window" in metadata
    if row.note and (is_windowed or not (row.windows and row.in_llama_cpp)):
        said.append(row.note)
    return "; ".join(said) or None


def gguf_tensors(source: Checkpoint, wanted: BlockType, embeddings: str) -> list[GgufTensor]:
    """Return every tensor of the file, under llama.cpp's names.

    Raises `UserError` for a model that the file cannot hold or llama.cpp cannot run. The error names the
    layer or the setting, and a format that works.
    """
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {wanted.name} stores ternary weights; "
            "use --to dense"
        )
    row = _metadata(source)[0]

    def gguf_name(name: str) -> str:
        stored = row.stored_name(name)
        if not stored:
            raise UserError(f"{source.folder}: llama.cpp's {row.name} has no tensor for {name}")
        return stored

    tensors = []
    groups = scale_groups(source)
    for layer, (rows, columns) in source.layers.items():
        block, group = block_for(columns, wanted), groups[layer]
        if source.rotation and block is not wanted:
            raise UserError(
                f"layer {layer} has rows of {columns}, which do not fill {wanted.name}'s blocks of "
                f"{wanted.codes}; only these hold rotated weights: use --to dense"
            )
        order = stored_order(row, source.config, layer)
        if 0 < group < columns and order is not None and order.columns is not None:
            group = gcd(group, order.run)
        if group and (block is I2_S or group % block.codes):
            own = "matrix" if block is I2_S else str(block.codes)
            raise UserError(
                f"layer {layer} has one scale per {group} weights of a row, {block.name} one per "
                f"{own}; use --to dense, or `sparse-bitnet pack`"
            )
        size = block.tensor_bytes(rows, columns)
        make = partial(_ternary, source, row, layer, block)
        name = gguf_name(f"{layer}.weight")
        tensors.append(GgufTensor(name, block.type_id, (rows, columns), size, make))
    for name, shape in source.others.items():
        table = _table(source, name, wanted) if embeddings == "auto" else None
        if table is not None:
            make = partial(np.asarray, table)
            tensors.append(GgufTensor(gguf_name(name), wanted.type_id, shape, table.nbytes, make))
            continue
        is_small = len(shape) != 2 or name.removesuffix(".weight").endswith(GATES)
        kind = F32 if is_small else GGMLQuantizationType[embeddings.upper().replace("AUTO", "F16")]
        values, size = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % values:
            raise UserError(
                f"{name} has rows of {shape[-1]}, which blocks of {values} ({embeddings}) do not fill; "
                "use --embeddings f16"
            )
        make = partial(_plain, source, row, name, kind)
        size = prod(shape) // values * size
        tensors.append(GgufTensor(gguf_name(name), kind, stored_shape(name, shape), size, make))
    if (factors := rope_factors(source.config, f"{source.folder}/config.json")) is not None:
        make = partial(np.asarray, factors)
        tensors.append(GgufTensor(ROPE_FACTORS, F32, factors.shape, factors.nbytes, make))
    return tensors


def _ternary(source: Checkpoint, row: GgufArchitecture, layer: str, block: BlockType) -> np.ndarray:
    codes, weight_scale = source.ternary(layer)
    scale = _scale(weight_scale, layer, block)
    if (order := stored_order(row, source.config, layer)) is None:
        return block.pack(codes.numpy(), scale)
    return block.pack(order.of_values(codes.numpy()), order.of_scales(scale, codes.shape[1]))


def _table(source: Checkpoint, name: str, block: BlockType) -> np.ndarray | None:
    """Return an embedding or head in blocks; None unless its rows are ternary with their scales."""
    packed: list[np.ndarray] = []
    if name in source.embeddings and block is not I2_S:
        _, columns = source.others[name]
        for piece in source.ternary_pieces(name):
            if piece is None or columns // piece.weight_scale.shape[-1] % block.codes:
                return None
            packed.append(block.pack(piece.codes.numpy(), _scale(piece.weight_scale, name, block)))
    return np.concatenate(packed) if packed else None


def _scale(weight_scale: Tensor, layer: str, block: BlockType) -> np.ndarray:
    """Return the scales of a matrix as float32. Raises `UserError` if float16 does not hold them."""
    scale = weight_scale.float().numpy()
    far = abs(np.float16(scale) - scale) > _SCALE_TOLERANCE * scale
    if block is not I2_S and far.any():
        raise UserError(
            f"layer {layer}: its weight scale {scale[far][0]:.3g} is out of range for the float16 of "
            f"{block.name}; use --to dense"
        )
    return scale


def _plain(
    source: Checkpoint, row: GgufArchitecture, name: str, kind: GGMLQuantizationType
) -> np.ndarray:
    if len(source.others[name]) == 2 and stored_order(row, source.config, name) is None:
        return np.concatenate([_encoded(part, kind, name) for part in source.pieces(name)])
    values = to_file(row, source.config, name, source.read(name).float().numpy())
    return _encoded(torch.from_numpy(values), kind, name)


def _encoded(tensor: Tensor, kind: GGMLQuantizationType, name: str) -> np.ndarray:
    values = tensor.float().numpy()
    if kind == F16 and abs(values).max() > np.finfo(np.float16).max:
        raise UserError(f"{name} has values beyond float16; use --embeddings bf16 or f32")
    return quantize(values, kind)


def write(
    path: Path,
    source: Checkpoint,
    block: BlockType,
    embeddings: str,
    on_progress: OnProgress = lambda done, total: None,
) -> None:
    """Write the file, holding one tensor in memory at a time.

    The caller gives a temporary name. Raises `OSError` when the disk is full, `UserError` as
    `gguf_tensors` and `add_vocabulary`, and for a scale that float16 cannot hold.
    """
    tensors = gguf_tensors(source, block, embeddings)
    (row, metadata), file = _metadata(source), source.file
    writer = GGUFWriter(path, row.name)
    writer.add_name(source.title)
    writer.add_description(f"sparse-bitnet {source.format}")
    writer.add_file_type(block.file_type)
    writer.add_quantization_version(2)
    writer.add_string(FORMAT, str(source.format))
    if source.has_one_scale:
        # The scale of a packed layer is read without unpacking its codes.
        scales = [
            file.checked(f"{layer}.weight_scale") if file else source.ternary(layer).weight_scale
            for layer in source.layers
        ]
        writer.add_array(WEIGHT_SCALES, [scale.item() for scale in scales])
    for key, value in metadata.items():
        kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    add_vocabulary(writer, source.folder, source.config["vocab_size"])
    for tensor in tensors:
        # With a type of our own as "raw", the shape is that of the codes, not of the bytes; and a
        # plain number passes for types that are newer than the gguf package.
        writer.add_tensor_info(
            tensor.name,
            tensor.shape,
            np.dtype(np.int8),
            tensor.nbytes,
            raw_dtype=tensor.type_id,  # type: ignore[arg-type]
        )
    with closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            writer.write_tensor_data(tensor.make())
            done += tensor.nbytes
            on_progress(done, total)
