# SPDX-License-Identifier: Apache-2.0
"""Packed folders of a preset's real shape with random weights, for measuring speed only.

Nothing is trained and torch is not imported. The same call writes the same bytes. Zeros and groups are
those of a model whose masters are Gaussian, as before training and, nearly, after: groups of codes are
drawn from a table of 65,536 that were selected as training selects them.
"""

import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import LINEAR_SIZES, QWEN35
from sparse_bitnet.checkpoint.model_folder import write_json
from sparse_bitnet.engine.architecture import Architecture, read_architecture
from sparse_bitnet.engine.engine_model import EMBEDDING, HEAD
from sparse_bitnet.errors import UserError
from sparse_bitnet.export.hf_folder import check_new_folder
from sparse_bitnet.files import atomic_folder
from sparse_bitnet.layer_config import SparseBitConfig
from sparse_bitnet.packing.codec import ROWS
from sparse_bitnet.packing.formats import I2_BLOCK_WEIGHTS, PackedMetadata, needs_exact, row_bytes
from sparse_bitnet.packing.rotation import Rotation
from sparse_bitnet.packing.tensor_file import TensorFileWriter, TensorSpec
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import find_preset

_END_OF_TEXT, _END_OF_TEXT_ID = "<|endoftext|>", 257
"""End-of-text token of the random models' tokenizer; its id follows the 256 bytes and one merge."""

_VERSION = 3
_WEIGHT_STD = 0.02
_TABLE_GROUPS = 1 << 16
_PIECE_WEIGHTS = 1 << 22
"""Weights that are made at a time."""


def _sizes(
    model_type: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "dtype": "float32",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": _END_OF_TEXT_ID,
    }


def _qwen35(sizes: tuple[int, int, int, int, int], values: int, *, tied: bool) -> dict[str, Any]:
    """Return the config of a Qwen3.5 model; `values` are heads of Gated DeltaNet."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    return _sizes(QWEN35, *sizes, 248320, tied) | {
        **{"head_dim": 256, "max_position_embeddings": 262144, "rope_parameters": rope},
        **LINEAR_SIZES,
        "linear_num_value_heads": values,
    }


PUBLISHED: dict[str, dict[str, Any]] = {
    "bitnet-2b4t": {
        **_sizes("bitnet", 2560, 6912, 30, 20, 5, 128256, tied=True),
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    "qwen3-8b": _sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, tied=False) | {"head_dim": 128},
    "bonsai-2b": _qwen35((2048, 6144, 24, 8, 2), 16, tied=True),
    "bonsai-4b": _qwen35((2560, 9216, 32, 16, 4), 32, tied=True),
    "bonsai-9b": _qwen35((4096, 12288, 32, 16, 4), 32, tied=False),
    "bonsai-27b": _qwen35((5120, 17408, 64, 24, 4), 48, tied=False),
}
"""config.json of models that others publish, ternary or made so, as far as speed depends on it."""

ROTATIONS = {"bonsai-2b": 2048, "bonsai-4b": 512, "bonsai-9b": 4096, "bonsai-27b": 1024}
"""Block of the Hadamard transform of the published models that have rotated weights. These are dense, and
have a scale for every 128 weights, in a ternary embedding and head, too."""


def config_of_model(name: str) -> dict[str, Any]:
    """Return the config.json of a published shape, or of a preset, as transformers writes it for
    `build_model.preset_config`. Raises `UserError` for another name."""
    if name in PUBLISHED:
        return dict(PUBLISHED[name])
    shape = find_preset(name)
    blocks = (shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers)
    heads = (shape.num_attention_heads, shape.num_key_value_heads)
    return _sizes("qwen2", *blocks, *heads, shape.vocab_size, tied=True) | {
        "architectures": ["Qwen2ForCausalLM"],
        "max_position_embeddings": shape.max_position_embeddings,
    }


class _RandomCodes:
    """Ternary matrices within a pattern, from Gaussian masters of `_WEIGHT_STD`."""

    def __init__(self, pattern: NMPattern, *, binary: bool) -> None:
        """`binary`: the only zero codes are those that the pattern drops."""
        self._rng = np.random.Generator(np.random.SFC64([0, 0]))
        # Eight codes are one word of the table wherever groups fill it; every preset's rows do.
        self._unit = 8 if pattern.is_dense or 8 % pattern.m == 0 else pattern.m
        masters = self._rng.standard_normal((_TABLE_GROUPS, self._unit), np.float32)
        mean = np.abs(masters).mean()
        codes = np.sign(masters) if binary else np.clip(np.rint(masters / mean), -1, 1)
        codes = codes.astype(np.int8)
        if not pattern.is_dense:
            groups = np.abs(masters).reshape(-1, pattern.m)
            dropped = np.argsort(groups, axis=1, kind="stable")[:, : pattern.m - pattern.n]
            np.put_along_axis(codes.reshape(-1, pattern.m), dropped, 0, axis=1)
        self._table, self._pattern = codes, pattern
        self.weight_scale = float(mean) * _WEIGHT_STD

    def packed(self, packed_format: str, rows: int, in_features: int) -> Iterator[np.ndarray]:
        """Yield uint8 [some rows, row_bytes] until all rows are there."""
        pack, pattern, table = ROWS[packed_format][0], self._pattern, self._table
        # Codes without a pattern may change places, so any words of packed codes make a row.
        free = packed_format == "i2" and pattern.is_dense and in_features % I2_BLOCK_WEIGHTS == 0
        if free:
            table = pack(table.reshape(-1, I2_BLOCK_WEIGHTS), pattern).reshape(-1, 8)
        words = table.view(f"V{table.shape[1]}")[:, 0]
        weights = table.shape[1] * (4 if free else 1)
        step = max(1, _PIECE_WEIGHTS // in_features)
        for first in range(0, rows, step):
            size = min(step, rows - first), -(-in_features // weights)
            drawn = words.take(self._rng.integers(0, len(words), size, np.uint16)).view(table.dtype)
            yield drawn if free else pack(np.ascontiguousarray(drawn[:, :in_features]), pattern)


def cached_random_model(
    preset: str, pattern: NMPattern, *, cache: Path | None = None, **options: Any
) -> Path:
    """Return the folder of a random model, written unless it is already in the cache; the default cache
    is this user's folder in the temporary folder.

    Options and errors are those of `write_random_model`.
    """
    if cache is None:
        owner = os.getuid() if hasattr(os, "getuid") else "user"
        cache = Path(tempfile.gettempdir()) / f"sparse-bitnet-bench-{owner}"
    chosen = "".join(f"-{name}-{value}" for name, value in sorted(options.items()))
    folder = cache / f"{preset}-{pattern}{chosen}-v{_VERSION}".replace(":", "of")
    if not (folder / "config.json").is_file():
        write_random_model(folder, preset, pattern, **options)
    return folder


def write_random_model(
    out: Path,
    preset: str,
    pattern: NMPattern,
    *,
    packed_format: str = "i2",
    scale_group: int = 0,
    vocab_size: int | None = None,
    rotated: bool = True,
) -> None:
    """Write a packed folder with random weights, and a tokenizer with the 256 bytes and the end of text.

    Args:
        out: the folder, which must not exist.
        preset: name of a preset or a published shape.
        pattern: zeros of the weights.
        packed_format: "i2", "b3", "nm-enum", or "nm-sign", whose only zeros are those of the pattern.
        scale_group: weights that share a scale in float16; 0 for one float32 scale a matrix, or 128 in
            rotated models.
        vocab_size: tokens, for another tokenizer; default the preset's.
        rotated: whether the models of `ROTATIONS` are rotated, as published.

    Raises `UserError` for an unknown preset, a pattern that does not divide the rows, or a full disk.
    """
    config = config_of_model(preset)
    if vocab_size:
        config |= {"vocab_size": vocab_size, "eos_token_id": None}
    shape = read_architecture(config, preset)
    block = ROTATIONS.get(preset, 0) if rotated else 0
    scale_group = scale_group or (128 if block else 0)
    layers = {
        f"model.layers.{layer}.{name}": size
        for layer in range(shape.layers)
        for name, size in shape.linear_shapes(layer).items()
    }
    rng = np.random.Generator(np.random.SFC64([0, 3]))
    signs = {width: rng.bytes(width // 8) for width in sorted({n for _, n in layers.values()})}
    metadata = PackedMetadata(
        packed_format=packed_format,
        format=SparseBitConfig(
            pattern=pattern, quantizer="binary" if needs_exact(packed_format) else "absmean"
        ),
        embeddings="ternary" if preset in ROTATIONS else "int8",
        layers=layers,
        rotation=Rotation(block=block, signs=signs, embedding=True, head=True) if block else None,
    )
    for _, in_features in metadata.layers.values():
        if scale_group and in_features % scale_group:
            raise UserError(f"--scale-group {scale_group} does not divide rows of {in_features}")
    tensors = list(_tensors(shape, metadata, scale_group))
    with atomic_folder(check_new_folder(out)) as folder:
        specs = [spec for spec, _ in tensors]
        with TensorFileWriter(folder / "model.safetensors", specs, metadata.to_json()) as writer:
            for spec, pieces in tensors:
                writer.write(spec.name, pieces)
        config["quantization_config"] = metadata.config_entry()
        write_json(folder / "config.json", config)
        _write_tokenizer(folder)


def _tensors(
    shape: Architecture, metadata: PackedMetadata, scale_group: int
) -> Iterator[tuple[TensorSpec, Iterable[np.ndarray]]]:
    """Yield every tensor with its content, whose pieces are made as they are written."""
    packed_format, pattern = metadata.packed_format, metadata.pattern
    source = _RandomCodes(pattern, binary=needs_exact(packed_format))
    tables = [EMBEDDING] if shape.ties_head else [EMBEDDING, HEAD]
    matrices = [
        (f"{n}.weight", "_packed", packed_format, *metadata.layers[n]) for n in metadata.layers
    ]
    if metadata.embeddings == "ternary":
        matrices += [(name, "", "i2", shape.vocab, shape.hidden) for name in tables]
        tables = []
    for name, end, form, rows, columns in matrices:
        size = row_bytes(form, pattern, columns, layer=name)
        yield TensorSpec(name + end, "uint8", (rows, size)), source.packed(form, rows, columns)
        group = scale_group or (0 if end else 256)  # a table has no scale for a whole matrix
        scales, dtype = ((rows, columns // group), "float16") if group else ((1,), "float32")
        yield _filled(f"{name}_scale", dtype, scales, source.weight_scale)
    for table in tables:
        yield TensorSpec(table, "int8", (shape.vocab, shape.hidden)), _embedding(shape)
        yield _filled(f"{table}_scale", "float32", (shape.vocab, 1), _WEIGHT_STD * 3**0.5 / 127)
    rng = np.random.Generator(np.random.SFC64([0, 2]))
    vectors = {
        f"model.layers.{layer}.{name}": lengths
        for layer in range(shape.layers)
        for name, lengths in shape.vectors(layer).values()
    } | {"model.norm.weight": (shape.hidden,)}
    # Biases, then the others: norms, whose weights are about one, and what Gated DeltaNet has.
    for name, lengths in sorted(vectors.items(), key=lambda item: not item[0].endswith(".bias")):
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        values = mean + 0.1 * rng.standard_normal(lengths, np.float32)
        yield TensorSpec(name, "float32", lengths), [values.astype(np.float32)]


def _filled(
    name: str, dtype: str, size: tuple[int, ...], value: float
) -> tuple[TensorSpec, Iterator[np.ndarray]]:
    return TensorSpec(name, dtype, size), (np.full(size, value, dtype) for _ in range(1))


def _embedding(shape: Architecture) -> Iterator[np.ndarray]:
    rng = np.random.Generator(np.random.SFC64([0, 1]))
    step = max(1, _PIECE_WEIGHTS // shape.hidden)
    for first in range(0, shape.vocab, step):
        piece = rng.integers(-127, 128, (min(step, shape.vocab - first), shape.hidden), np.int8)
        piece[:, 0] = 127  # a row's largest magnitude, by definition
        yield piece


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
    tokenizer.add_special_tokens([AddedToken(_END_OF_TEXT, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    entry = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _END_OF_TEXT}
    write_json(folder / "tokenizer_config.json", entry)
