# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most, and what a model asks of it: speeds as shares of the roofline.

Decode reads every weight once a step, so memory bounds it; prefill multiplies every weight with every
token, so the int8 multiply-adds of the instruction set bound it. The roofline (csrc/roofline.h) is
measured in the same minutes as the speeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_bitnet.checkpoint.open_checkpoint import open_checkpoint
from sparse_bitnet.engine.weight_forms import row_bytes
from sparse_bitnet.packing.formats import needs_exact
from sparse_bitnet.packing.tensor_file import TensorFile

READ_BYTES = 512 << 20
"""More than any cache holds."""

PREFETCH_BYTES = (0, 2048, 4096, 16384)
"""Distances of the software prefetch that are tried; 0 leaves it to the hardware."""

_LOOP_SECONDS = 0.02
_CACHE_VALUE_BITS = {"float32": 32, "float16": 16, "int8": 8, "int4": 4}
_INT4_GROUP = 64


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The best of a run."""

    threads: int
    isa: str
    read_bytes_per_second: float
    int8_ops_per_second: float
    """A multiply-add is two operations."""
    float32_ops_per_second: float


class RooflineMeter:
    """Measures the roofline of one thread count, a visit at a time, between other measurements."""

    def __init__(self, threads: int, isas: Sequence[str], read_bytes: int = READ_BYTES) -> None:
        """`isas`: names of matmul.h."""
        from sparse_bitnet import _cpu

        self.threads = threads
        self._meter = _cpu.Roofline(threads, read_bytes)
        self._read: list[float] = []
        self._int8: dict[str, list[float]] = {isa: [] for isa in isas}
        self._float32: dict[str, list[float]] = {isa: [] for isa in isas}

    def visit(self) -> None:
        """Measure everything once, in about a tenth of a second."""
        self._read.append(max(self._meter.read_rate(distance) for distance in PREFETCH_BYTES))
        for isa in self._int8:
            self._int8[isa].append(self._meter.int8_rate(isa, _LOOP_SECONDS))
            self._float32[isa].append(self._meter.float32_rate(isa, _LOOP_SECONDS))

    def result(self, isa: str) -> Roofline:
        """The best of the visits so far, at least one: a neighbour can only lower what is seen."""
        return Roofline(
            threads=self.threads,
            isa=isa,
            read_bytes_per_second=max(self._read),
            int8_ops_per_second=max(self._int8[isa]),
            float32_ops_per_second=max(self._float32[isa]),
        )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a model costs in one run-time format."""

    weight_bytes: int
    """Packed weights of the blocks, scales included."""
    head_bytes: int
    """The output head, scales included."""
    cache_token_bytes: float
    """Keys and values of one token."""
    block_weights: int
    """Weights of the blocks' linears, zeros included."""

    def step_bytes(self, context: float, batch: int, *, shared_context: bool = False) -> float:
        """Bytes that one decode step must read.

        Args:
            context: tokens that each sequence has in the cache, on average.
            batch: sequences.
            shared_context: the sequences share the memory of their context.
        """
        caches = 1 if shared_context else batch
        return self.weight_bytes + self.head_bytes + caches * context * self.cache_token_bytes

    def prefill_ops(self, tokens: int) -> int:
        """int8 operations of the blocks for a prompt; attention and head are not counted."""
        return 2 * self.block_weights * tokens


def work_of(folder: Path, weight_format: str, head: str, kv_cache: str) -> Work:
    """The cost of a packed folder's model.

    Args:
        folder: packed.
        weight_format: the run-time format, "stored" or a name of `weight_forms.FORMATS`.
        head: "auto", "stored", "int8" or "int4".
        kv_cache: "float32", "float16", "int8" or "int4".

    Raises `UserError` for a folder that is not packed.
    """
    packed = open_checkpoint(folder, "packed")
    config, file, metadata = packed.config, packed.file, packed.metadata
    assert file is not None
    assert metadata is not None
    stored = weight_format in ("stored", metadata.packed_format)
    exact = needs_exact(metadata.packed_format)
    weight_bytes = sum(_size(file, f"{name}.weight_scale") for name in metadata.layers) + sum(
        _size(file, f"{name}.weight_packed")
        if stored
        else rows * row_bytes(weight_format, metadata.pattern, in_features, exact)
        for name, (rows, in_features) in metadata.layers.items()
    )
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    scale_bytes = 4 if kv_cache.startswith("int") else 0
    vector_bytes = head_dim * _CACHE_VALUE_BITS[kv_cache] / 8 + scale_bytes
    return Work(
        weight_bytes=weight_bytes,
        head_bytes=_head_bytes(file, config, head),
        cache_token_bytes=2 * config["num_hidden_layers"] * kv_heads * vector_bytes,
        block_weights=sum(rows * columns for rows, columns in metadata.layers.values()),
    )


def _size(file: TensorFile, name: str) -> int:
    return file.entries[name].end - file.entries[name].begin


def _head_bytes(file: TensorFile, config: dict[str, Any], head: str) -> int:
    name = "lm_head.weight" if "lm_head.weight" in file.entries else "model.embed_tokens.weight"
    entry = file.entries[name]
    rows, columns = entry.shape
    if head == "int4":
        return rows * columns // 2 + 4 * rows * -(-columns // _INT4_GROUP)
    if head == "int8" or entry.dtype == "I8" or (head == "auto" and entry.is_floating_point):
        return rows * (columns + 4)
    scales = f"{name}_scale"
    return _size(file, name) + (_size(file, scales) if scales in file.entries else 0)
