# SPDX-License-Identifier: Apache-2.0
"""Packed folders of a preset's real shape with random weights: for measuring speed, not for reading.

Nothing is trained and torch is not imported. The same seed gives the same bytes.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.bench.model_shapes import config_of_model
from sparse_bitnet.bench.random_codes import (
    PIECE_WEIGHTS,
    TABLE_GROUPS,
    WEIGHT_STD,
    RandomCodes,
)
from sparse_bitnet.checkpoint.model_folder import TOKENIZER_FILES, copy_files
from sparse_bitnet.engine.architecture import Architecture, read_architecture
from sparse_bitnet.engine.engine_model import EMBEDDING, HEAD
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.generation.text import TextTokenizer
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.formats import check_layout, needs_exact, row_bytes
from sparse_bitnet.packing.metadata import PackedMetadata
from sparse_bitnet.packing.rows import ROWS
from sparse_bitnet.packing.tensor_file import TensorFileWriter, TensorSpec
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import PRESETS

END_OF_TEXT = "<|endoftext|>"

_VERSION = 1
_TABLE_GROUP = 128


def default_cache() -> Path:
    """Where random models are kept between runs: a folder of this user's in the temporary folder."""
    owner = os.getuid() if hasattr(os, "getuid") else "user"
    return Path(tempfile.gettempdir()) / f"sparse-bitnet-bench-{owner}"


def cached_random_model(
    preset: str,
    pattern: NMPattern,
    *,
    cache: Path | None = None,
    packed_format: str = "i2",
    embeddings: str = "int8",
    scale_group: int = 0,
) -> Path:
    """The folder of a random model, written unless it is already in the cache.

    Raises `UserError` as `write_random_model` does.
    """
    name = f"{preset}-{pattern}-{packed_format}-{embeddings}-v{_VERSION}".replace(":", "of")
    name += f"-g{scale_group}" if scale_group else ""
    folder = (cache or default_cache()) / name
    if not (folder / "config.json").is_file():
        write_random_model(
            folder,
            preset,
            pattern,
            packed_format=packed_format,
            embeddings=embeddings,
            scale_group=scale_group,
        )
    return folder


def write_random_model(
    out: Path | str,
    preset: str,
    pattern: NMPattern,
    *,
    packed_format: str = "i2",
    embeddings: str = "int8",
    scale_group: int = 0,
    tokenizer: Path | None = None,
    seed: int = 0,
) -> None:
    """Write a complete packed folder: weights, config.json and a tokenizer.

    Args:
        out: folder to write, replaced if it exists.
        preset: a name in `PRESETS` or `PUBLISHED`.
        pattern: n:m of the codes.
        packed_format: a name in `ROWS`; "nm-sign" for binary weights.
        embeddings: of embedding and head, "int8", "bf16" or "ternary", with a float16 scale for
            `scale_group` weights or 128.
        scale_group: weights that share a scale in float16; 0 for one float32 scale a matrix.
        tokenizer: folder of the one to take, with its chat template; small presets take its vocabulary.
            Default: one whose tokens are the 256 bytes and the end of text.
        seed: of all values.

    Raises `UserError` for an unknown preset, format or embedding type, a pattern that does not divide
    the rows, a tokenizer that is none or too large for the shape, or a full disk.
    """
    config = config_of_model(preset, tokenizer=tokenizer is None)
    if tokenizer is not None:
        _take_vocabulary(config, preset, tokenizer)
    shape = read_architecture(config, preset)
    if packed_format not in ROWS:
        raise UserError(f"random models are written as {', '.join(ROWS)}, not {packed_format!r}")
    if embeddings not in ("int8", "bf16", "ternary"):
        raise UserError(f"random models have int8, bf16 or ternary embeddings, not {embeddings!r}")
    table_group = scale_group or _TABLE_GROUP
    if embeddings == "ternary" and shape.hidden % table_group:
        raise UserError(f"ternary embeddings: {table_group} does not divide rows of {shape.hidden}")
    metadata = PackedMetadata(
        packed_format=packed_format,
        format=SparseBitConfig(
            pattern=pattern, quantizer="binary" if needs_exact(packed_format) else "absmean"
        ),
        embeddings=embeddings,
        layers={
            f"model.layers.{layer}.{name}": size
            for layer in range(shape.layers)
            for name, size in shape.linear_shapes().items()
        },
    )
    for name, (_, in_features) in metadata.layers.items():
        check_layout(packed_format, pattern, in_features, name)
        if scale_group and in_features % scale_group:
            raise UserError(f"--scale-group {scale_group} does not divide rows of {in_features}")
    tensors = list(_tensors(shape, metadata, seed, scale_group))
    with atomic_folder(out) as folder:
        specs = [spec for spec, _ in tensors]
        with TensorFileWriter(folder / "model.safetensors", specs, metadata.to_json()) as writer:
            for spec, pieces in tensors:
                writer.write(spec.name, pieces)
        config["quantization_config"] = metadata.config_entry()
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if tokenizer is None:
            _write_tokenizer(folder)
        else:
            copy_files(tokenizer, folder, TOKENIZER_FILES)


def _tensors(
    shape: Architecture, metadata: PackedMetadata, seed: int, scale_group: int
) -> Iterator[tuple[TensorSpec, Iterable[np.ndarray]]]:
    """Every tensor with its content, whose pieces are made as they are written."""
    packed_format, pattern = metadata.packed_format, metadata.pattern
    source = RandomCodes(pattern, seed, binary=needs_exact(packed_format))
    pack = ROWS[packed_format][0]
    for name, (rows, columns) in metadata.layers.items():
        size = rows, row_bytes(packed_format, pattern, columns)
        pieces = source.pieces(rows, columns)
        yield (
            TensorSpec(f"{name}.weight_packed", "uint8", size),
            (pack(codes, pattern) for codes in pieces),
        )
        scales = (rows, columns // scale_group) if scale_group else (1,)
        dtype = "float16" if scale_group else "float32"
        yield _filled(f"{name}.weight_scale", dtype, scales, source.weight_scale)
    for table in (EMBEDDING,) if shape.ties_head else (EMBEDDING, HEAD):
        if metadata.embeddings == "ternary":
            dense = NMPattern(1, 1)
            source = RandomCodes(dense, seed + 1)
            size = shape.vocab, row_bytes("i2", dense, shape.hidden)
            pieces = source.pieces(shape.vocab, shape.hidden)
            yield (
                TensorSpec(table, "uint8", size),
                (ROWS["i2"][0](codes, dense) for codes in pieces),
            )
            scales = shape.vocab, shape.hidden // (scale_group or _TABLE_GROUP)
            yield _filled(f"{table}_scale", "float16", scales, source.weight_scale)
            continue
        is_int8 = metadata.embeddings == "int8"
        spec = TensorSpec(table, "int8" if is_int8 else "bfloat16", (shape.vocab, shape.hidden))
        yield spec, _embedding(shape, is_int8, seed)
        if is_int8:
            yield _filled(f"{table}_scale", "float32", (shape.vocab, 1), WEIGHT_STD * 3.5 / 127)
    rng = np.random.Generator(np.random.SFC64([seed, 2]))
    vectors = {
        f"model.layers.{layer}.{name}": length
        for layer in range(shape.layers)
        for name, length in shape.vectors().values()
    } | {"model.norm.weight": shape.hidden}
    # Biases, then norms, which are about one.
    for name, length in sorted(vectors.items(), key=lambda item: not item[0].endswith(".bias")):
        mean = 0.0 if name.endswith(".bias") else 1.0
        values = mean + 0.1 * rng.standard_normal(length, np.float32)
        yield TensorSpec(name, "float32", (length,)), [values.astype(np.float32)]


def _filled(
    name: str, dtype: str, size: tuple[int, ...], value: float
) -> tuple[TensorSpec, Iterator[np.ndarray]]:
    return TensorSpec(name, dtype, size), (np.full(size, value, dtype) for _ in range(1))


def _embedding(shape: Architecture, is_int8: bool, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.Generator(np.random.SFC64([seed, 1]))
    values = rng.standard_normal((TABLE_GROUPS, 8), np.float32)
    if is_int8:
        # A row's largest magnitude, about 3.5 standard deviations, is 127 by definition.
        table = np.clip(np.rint(values * (127 / 3.5)), -127, 127).astype(np.int8)
    else:
        # The upper half of a float32 is its bfloat16, truncated.
        table = ((WEIGHT_STD * values).view(np.uint32) >> 16).astype(np.uint16)
    step = max(1, PIECE_WEIGHTS // shape.hidden)
    for first in range(0, shape.vocab, step):
        count = min(step, shape.vocab - first)
        drawn = rng.integers(0, TABLE_GROUPS, (count, shape.hidden // 8), np.uint16)
        piece = table[drawn].reshape(count, shape.hidden)
        if is_int8:
            piece[:, 0] = 127
        yield piece


def _take_vocabulary(config: dict[str, Any], preset: str, folder: Path) -> None:
    size = len(TextTokenizer.load(folder).vocabulary)
    if preset in PRESETS and not PRESETS[preset].published:
        config["vocab_size"] = -(-size // 64) * 64
    if size > config["vocab_size"]:
        raise UserError(f"{folder} has {size} tokens, {preset} has {config['vocab_size']}")


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # One merge, because llama.cpp refuses a tokenizer without.
    pair = ("e", "r")
    vocabulary = {token: index for index, token in enumerate([*letters, "".join(pair)])}
    tokenizer = Tokenizer(BPE(vocabulary, [pair]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    entry = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(entry, indent=2) + "\n")
