# SPDX-License-Identifier: Apache-2.0
"""GGUF: what llama.cpp and everything built on it read. Ternary blocks, tokenizer and metadata.

One file holds all: sparse layers as TQ1_0, TQ2_0 or Q2_0, or as what their rows fill (`gguf_blocks`),
norms and biases in float32, embeddings in float16 unless asked otherwise. llama.cpp quantises activations
per block instead of per token, so its logits are close to ours, never equal.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.checkpoint import Checkpoint
from sparse_bitnet.checkpoint.gguf_architectures import GgufArchitecture
from sparse_bitnet.checkpoint.gguf_config import (
    FORMAT,
    ROPE_FACTORS,
    WEIGHT_SCALES,
    metadata_of,
    rope_factors,
)
from sparse_bitnet.errors import UserError, install
from sparse_bitnet.export.gguf_vocabulary import GgufVocabulary, add_vocabulary, read_vocabulary
from sparse_bitnet.export.hf_folder import scale_groups
from sparse_bitnet.packing.gguf_blocks import I2_S, BlockType, block_for
from sparse_bitnet.progress import OnProgress

if TYPE_CHECKING:
    from gguf import GGUFWriter

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
EMBEDDING_TYPES = {"f32": F32, "f16": F16, "bf16": BF16, "q8_0": Q8_0}
"""Choices for embeddings and head -> ggml_type."""

_Q8_0_BLOCK = 32
_SCALE_TOLERANCE = 2**-11
_ATTENTION = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file, computed when it is written."""

    name: str
    type_id: int
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], np.ndarray]


def check(source: Checkpoint, block: BlockType, embeddings: str) -> GgufVocabulary:
    """Refuse what the file could not hold or llama.cpp could not run; returns the vocabulary.

    Raises `UserError` naming the layer or the setting, and the format that would do.
    """
    require_gguf()
    if source.format.weight != "ternary":
        raise UserError(
            f"{source.folder} is {source.format}: {block.name} holds ternary weights; "
            "use --format dense"
        )
    architecture(source)
    for name, group in scale_groups(source).items():
        fitting = block_for(source.layers[name][1], block)
        if group and (fitting is I2_S or group % fitting.codes):
            own = "the matrix" if fitting is I2_S else str(fitting.codes)
            raise UserError(
                f"layer {name} has a scale for every {group} weights of a row, {fitting.name} one for "
                f"{own}; use --format dense, or `sparse-bitnet pack`"
            )
    for name, shape in source.others.items():
        if embeddings == "q8_0" and len(shape) > 1 and shape[-1] % _Q8_0_BLOCK:
            raise UserError(
                f"{name} has rows of {shape[-1]}, which blocks of {_Q8_0_BLOCK} (q8_0) do not fill; "
                "use --embeddings f16"
            )
    return read_vocabulary(source.folder, source.config["vocab_size"])


def architecture(source: Checkpoint) -> GgufArchitecture:
    """As what the file is written. Raises `UserError` for a model that it cannot hold."""
    return metadata_of(source.config, f"{source.folder}/config.json")[0]


def check_reader(source: Checkpoint, block: BlockType) -> None:
    """Raise `UserError` for a model whose file llama.cpp does not read."""
    row = architecture(source)
    if block is I2_S:
        raise UserError("--verify: llama.cpp does not read I2_S; verify --format gguf-tq2_0")
    if not row.in_llama_cpp:
        raise UserError(f"--verify: llama.cpp does not read {row.name}: {row.note}")


def require_gguf() -> None:
    """Raise `UserError` when the gguf package is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"writing GGUF needs gguf, which is not installed: {install('export')}"
        ) from error


def notes(source: Checkpoint, wanted: BlockType) -> str | None:
    """What a user of the file must know."""
    row, metadata = metadata_of(source.config, f"{source.folder}/config.json")
    applies = (
        not (row.windows and row.in_llama_cpp) or f"{row.name}.attention.sliding_window" in metadata
    )
    found = [other_types(source, wanted), row.note if applies else ""]
    return "; ".join(note for note in found if note) or None


def other_types(source: Checkpoint, wanted: BlockType) -> str | None:
    """Which types stand in for `wanted` in rows that do not fill its blocks; None where none does."""
    blocks = [block_for(columns, wanted) for _, columns in source.layers.values()]
    counts = {block.name: blocks.count(block) for block in blocks if block is not wanted}
    if not counts:
        return None
    found = " and ".join(f"{count} as {name}" for name, count in counts.items())
    return (
        f"rows that do not fill blocks of {wanted.codes} ({wanted.name}) are stored otherwise, codes "
        f"exact: of {len(blocks)} layers {found}"
    )


def gguf_tensors(source: Checkpoint, block: BlockType, embeddings: str) -> list[GgufTensor]:
    """Every tensor of the file, under llama.cpp's names."""
    row = architecture(source)

    def gguf_name(name: str) -> str:
        found = row.stored_name(name)
        if found is None:
            raise UserError(f"{source.folder}: llama.cpp's {row.name} has no tensor for {name}")
        return found

    tensors = []
    for layer, (rows, columns) in source.layers.items():
        fitting = block_for(columns, block)
        size = fitting.tensor_bytes(rows, columns)
        make = _ternary(source, row, layer, fitting)
        name = gguf_name(f"{layer}.weight")
        tensors.append(GgufTensor(name, fitting.type_id, (rows, columns), size, make))
    for name, shape in source.others.items():
        type_id = F32 if len(shape) == 1 else EMBEDDING_TYPES[embeddings]
        tensors.append(_plain(source, row, name, gguf_name(name), shape, type_id))
    if row.biases == "always":
        tensors += _absent_biases(source, gguf_name)
    if (factors := rope_factors(source.config, f"{source.folder}/config.json")) is not None:
        make = partial(np.asarray, factors)
        tensors.append(GgufTensor(ROPE_FACTORS, F32, factors.shape, factors.nbytes, make))
    return tensors


def _ternary(
    source: Checkpoint, row: GgufArchitecture, layer: str, block: BlockType
) -> Callable[[], np.ndarray]:
    def make() -> np.ndarray:
        codes, weight_scale = source.ternary(layer)
        scale = weight_scale.float().numpy()
        far = abs(np.float16(scale) - scale) > _SCALE_TOLERANCE * scale
        if block is not I2_S and far.any():
            raise UserError(
                f"layer {layer}: its weight scale {scale[far][0]:.3g} is too far out for float16, in "
                f"which {block.name} holds it; use --format bitnet"
            )
        if not row.rotates_neighbours:
            return block.pack(codes.numpy(), scale)
        if scale.ndim:
            scale = _in_rotation_order(source, layer, scale)
        return block.pack(_in_rotation_order(source, layer, codes.numpy()), scale)

    return make


def _in_rotation_order(source: Checkpoint, name: str, values: np.ndarray) -> np.ndarray:
    """Rows in llama.cpp's order: its llama rotates neighbours of a head, transformers halves apart."""
    config = source.config
    projection = name.removesuffix(".bias").removesuffix(".weight").rpartition(".")[2]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(projection)
    if heads is None:
        return values
    count = config.get(heads) or config["num_attention_heads"]
    order = np.arange(len(values)).reshape(count, 2, -1).swapaxes(1, 2).reshape(-1)
    return values[order]


def _plain(
    source: Checkpoint,
    row: GgufArchitecture,
    name: str,
    gguf_name: str,
    shape: tuple[int, ...],
    type_id: int,
) -> GgufTensor:
    is_turned = row.rotates_neighbours and name.endswith((".bias", "proj.weight"))

    def make() -> np.ndarray:
        if len(shape) == 2 and not is_turned:
            return np.concatenate([encode_plain(part, type_id) for part in source.pieces(name)])
        tensor = source.read(name)
        if offset := row.offset_of(name):
            tensor = tensor.float() + offset
        elif is_turned:
            tensor = torch.from_numpy(_in_rotation_order(source, name, tensor.float().numpy()))
        return encode_plain(tensor, type_id)

    return GgufTensor(gguf_name, type_id, shape, _plain_bytes(shape, type_id), make)


def _plain_bytes(shape: tuple[int, ...], type_id: int) -> int:
    if type_id == Q8_0:
        return prod(shape) // _Q8_0_BLOCK * (_Q8_0_BLOCK + 2)
    return prod(shape) * (4 if type_id == F32 else 2)


def encode_plain(tensor: Tensor, type_id: int) -> np.ndarray:
    """A tensor as the bytes of one of `EMBEDDING_TYPES`."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    values = tensor.float().numpy()
    if type_id == F16 and abs(values).max() > np.finfo(np.float16).max:
        raise UserError("embedding or head has values beyond float16; use --embeddings bf16 or f32")
    return quantize(values, GGMLQuantizationType(type_id))


def _absent_biases(source: Checkpoint, gguf_name: Callable[[str], str]) -> Iterator[GgufTensor]:
    # llama.cpp's qwen2 requires them; a variant of the model without has zeros.
    for layer, (rows, _) in source.layers.items():
        bias = f"{layer}.bias"
        if layer.endswith(_ATTENTION) and bias not in source.others:
            make = partial(np.zeros, rows, np.float32)
            yield GgufTensor(gguf_name(bias), F32, (rows,), 4 * rows, make)


def write(
    path: Path,
    source: Checkpoint,
    tensors: list[GgufTensor],
    vocabulary: GgufVocabulary,
    block: BlockType,
    on_progress: OnProgress | None = None,
) -> None:
    """Write the file, holding one tensor in memory at a time.

    The caller gives a temporary name. Raises `OSError` when the disk is full, `UserError` for a scale
    that float16 cannot hold.
    """
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture(source).name)
    _add_metadata(writer, source, block)
    add_vocabulary(writer, vocabulary, source.folder)
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
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done, total = 0, sum(tensor.nbytes for tensor in tensors)
        for tensor in tensors:
            writer.write_tensor_data(tensor.make())
            done += tensor.nbytes
            if on_progress is not None:
                on_progress(done, total)
    finally:
        writer.close()


def _add_metadata(writer: "GGUFWriter", source: Checkpoint, block: BlockType) -> None:
    from gguf import GGUFValueType

    writer.add_name(source.title)
    writer.add_description(f"sparse-bitnet {source.format}")
    writer.add_file_type(block.file_type)
    writer.add_quantization_version(2)
    writer.add_string(FORMAT, str(source.format))
    if source.has_one_scale:
        writer.add_array(WEIGHT_SCALES, [_float32_scale(source, layer) for layer in source.layers])
    _, values = metadata_of(source.config, f"{source.folder}/config.json")
    for key, value in values.items():
        types = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
        writer.add_key_value(key, value, types.get(type(value), GGUFValueType.ARRAY))


def _float32_scale(source: Checkpoint, layer: str) -> float:
    # Of a packed layer without unpacking its codes.
    name = f"{layer}.weight_scale"
    scale = source.ternary(layer).weight_scale if source.file is None else source.file.checked(name)
    return scale.item()
