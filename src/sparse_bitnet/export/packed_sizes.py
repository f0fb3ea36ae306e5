# SPDX-License-Identifier: Apache-2.0
"""How many bytes a packed model takes, and how near its formats come to what its codes contain.

Three bounds, in bits a weight:

    codes     entropy of -1, 0, 1 as independent symbols: no coder that ignores the pattern is below
    pattern   log2(states of a group) / m: no coder of fixed size is below
    groups    entropy of the number of non-zeros in a group, plus which ones and their signs as if all
              were equally likely: what knowing the pattern and the zeros can reach
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.checkpoint.open_checkpoint import open_ternary
from sparse_bitnet.errors import UserError
from sparse_bitnet.nn.layer import SparseBitConfig
from sparse_bitnet.nn.selection import select
from sparse_bitnet.packing.codec import is_exact, pack
from sparse_bitnet.packing.formats import (
    FORMATS,
    coded_pattern,
    has_fixed_rows,
    holds_pattern,
    needs_exact,
    nm_enum_states,
    row_bytes,
)
from sparse_bitnet.packing.two_bits import pack_codes
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.presets import find_preset
from sparse_bitnet.progress import OnProgress

PUBLISHED_MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b")
PATTERNS = ("8:8", "6:8", "2:4", "2:8")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Bytes of a packed model; the file's header, about 0.1 MB, is not counted."""

    model: str
    pattern: str
    packed_format: str
    embeddings: str
    bits_per_weight: float
    """Of the ternary layers, padding and scales included."""
    weight_bytes: int
    embedding_bytes: int
    other_bytes: int
    """Biases, norms and linears that stay dense, in float32."""

    @property
    def total_bytes(self) -> int:
        """All tensors together."""
        return self.weight_bytes + self.embedding_bytes + self.other_bytes


@dataclass(frozen=True, kw_only=True)
class CodeStatistics:
    """What the ternary codes of one model contain; all in bits a weight but the first three."""

    pattern: str
    weights: int
    zero_fraction: float
    code_entropy: float
    pattern_bound: float
    group_entropy: float
    formats: dict[str, float]
    """Every packed format that holds the weights."""
    zstd_of_two_bits: float
    """Four consecutive two-bit codes a byte through zstd, for comparison."""


def model_size(
    model: str,
    pattern: NMPattern,
    packed_format: str,
    embeddings: str,
    dense_layers: tuple[str, ...] = (),
) -> ModelSize:
    """Bytes of a preset in a format of fixed size.

    Args:
        model: a preset's name.
        pattern: of its ternary layers.
        packed_format: any but nm-zstd, whose size depends on the weights.
        embeddings: "bf16", "int8" or "float32"; the output head is tied.
        dense_layers: globs of layers that stay as trained, in float32.

    Raises `UserError` for unknown names and for a format that does not hold the pattern.
    """
    value_bytes = {"bf16": 2, "int8": 1, "float32": 4}
    if embeddings not in value_bytes:
        raise UserError(f"embeddings {embeddings!r}: choose one of {', '.join(value_bytes)}")
    shape = find_preset(model)
    format = SparseBitConfig(pattern=pattern, dense_layers=dense_layers)
    linears = format.converted(shape.linears, model)
    weights = sum(math.prod(linear) for linear in linears.values())
    weight_bytes = sum(
        rows * row_bytes(packed_format, pattern, in_features, layer=f"of {model}") + 4
        for rows, in_features in linears.values()
    )
    scale_bytes = 4 * shape.vocab_size if embeddings == "int8" else 0
    return ModelSize(
        model=model,
        pattern=str(pattern),
        packed_format=packed_format,
        embeddings=embeddings,
        bits_per_weight=8 * weight_bytes / weights,
        weight_bytes=weight_bytes,
        embedding_bytes=shape.vocab_size * shape.hidden_size * value_bytes[embeddings]
        + scale_bytes,
        other_bytes=4 * (shape.vector_values + shape.block_weights - weights),
    )


def size_table(
    models: Sequence[str] = PUBLISHED_MODELS,
    patterns: Sequence[str] = PATTERNS,
    embeddings: str = "bf16",
    dense_layers: tuple[str, ...] = (),
) -> list[ModelSize]:
    """`model_size` of every combination in the formats that have a fixed size and hold any weights of
    the pattern."""
    rows = []
    for model in models:
        for text in patterns:
            pattern = NMPattern.parse(text)
            for name in FORMATS:
                if has_fixed_rows(name) and holds_pattern(name, pattern) and not needs_exact(name):
                    rows.append(model_size(model, pattern, name, embeddings, dense_layers))
    return rows


def code_statistics(source: str | Path, *, progress: OnProgress | None = None) -> CodeStatistics:
    """Entropies of a trained checkpoint's codes and its bits a weight in every format.

    Args:
        source: run folder or model folder of a ternary model; read a layer at a time.
        progress: told the weights done and the weights in all.

    Raises `UserError` as `open_ternary` does.
    """
    checkpoint = open_ternary(source)
    total = sum(math.prod(shape) for shape in checkpoint.layers.values())

    def matrices() -> Iterator[Tensor]:
        done = 0
        for layer in checkpoint.layers:
            codes = checkpoint.ternary(layer).codes
            yield codes
            done += codes.numel()
            if progress is not None:
                progress(done, total)

    return statistics_of(matrices(), checkpoint.format.pattern)


def gaussian_statistics(rows: int, in_features: int, pattern: NMPattern) -> CodeStatistics:
    """`code_statistics` of one matrix whose masters are Gaussian, as before training."""
    pattern.check_divides(in_features, "of Gaussian weights")
    weight = torch.randn(rows, in_features, generator=torch.Generator().manual_seed(0))
    codes = select(weight, SparseBitConfig(pattern=pattern)).codes
    assert codes is not None
    return statistics_of([codes], pattern)


def statistics_of(matrices: Iterable[Tensor], pattern: NMPattern) -> CodeStatistics:
    """Entropies and bits a weight of int8 matrices [rows, in_features] within a pattern."""
    names = [name for name in FORMATS if holds_pattern(name, pattern)]
    format_bits = dict.fromkeys(names, 0)
    total = zeros = zstd = 0
    code_entropy = group_entropy = 0.0
    for codes in matrices:
        rows, in_features = codes.shape
        if not is_exact(codes.numpy(), pattern):
            names = [name for name in names if not needs_exact(name)]
        counts = np.array([int((codes == value).sum()) for value in (-1, 0, 1)])
        total += codes.numel()
        zeros += counts[1]
        code_entropy += codes.numel() * _entropy(counts)
        group_entropy += codes.numel() * _group_entropy(codes, pattern)
        zstd += 8 * _zstd_bytes(codes)
        for name in names:
            format_bits[name] += 8 * (
                rows * row_bytes(name, pattern, in_features)
                if has_fixed_rows(name)
                else pack(codes, name, pattern).numel()
            )
    coded = coded_pattern(pattern)
    return CodeStatistics(
        pattern=str(pattern),
        weights=total,
        zero_fraction=float(zeros / total),
        code_entropy=code_entropy / total,
        pattern_bound=math.log2(nm_enum_states(coded.m, coded.n)) / coded.m,
        group_entropy=group_entropy / total,
        formats={name: format_bits[name] / total for name in names},
        zstd_of_two_bits=zstd / total,
    )


def _entropy(counts: np.ndarray) -> float:
    """Bits per symbol of a histogram."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def _group_entropy(codes: Tensor, pattern: NMPattern) -> float:
    coded = coded_pattern(pattern)
    nonzeros = (codes != 0).view(-1, coded.m).sum(-1)
    counts = np.bincount(nonzeros.numpy(), minlength=coded.m + 1)
    within = [math.log2(math.comb(coded.m, k)) + k for k in range(coded.m + 1)]
    bits = _entropy(counts) + float((counts / counts.sum() * within).sum())
    return bits / coded.m


def _zstd_bytes(codes: Tensor) -> int:
    """Bytes of a zstd frame over four consecutive two-bit codes a byte."""
    import zstandard

    plain = pack_codes(codes.reshape(1, -1))
    return len(zstandard.ZstdCompressor(level=3).compress(plain.numpy().data))
