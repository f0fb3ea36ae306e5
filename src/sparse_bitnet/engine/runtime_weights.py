# SPDX-License-Identifier: Apache-2.0
"""Weights of a packed model in the form in which they are multiplied, in memory of their own. No torch.

Every byte of the file is read once: its checksum is computed, its encoding checked and its run-time
form written in the same pass, piece by piece, so that the file takes no memory of its own. What is run as
it is stored can instead be mapped, and is only checked: the system's copy of the file is the memory then.
"""

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.engine_model import EngineModel
from sparse_bitnet.engine.runtime_matrices import MatrixLoader
from sparse_bitnet.engine.weight_forms import INT4_GROUP, STORED_NAMES, TABLE_BITS, aligned
from sparse_bitnet.engine.weight_memory import WeightMemory
from sparse_bitnet.errors import os_errors_as
from sparse_bitnet.progress import OnProgress


@dataclass(kw_only=True)
class Weights:
    """What the decoder points to; `kept` owns the memory."""

    matrices: dict[str, _cpu.Matrix] = field(default_factory=dict)
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    embedding: _cpu.Table
    head: _cpu.Table
    head_format: str
    """int8, int4, bfloat16, float32, or i2 where it is ternary."""
    weight_bytes: int
    """Bytes of the matrices of the blocks, with scales of rows and groups."""
    head_bytes: int
    """Bytes of the output head with its scales."""
    kept: list[Any] = field(default_factory=list)


def load_weights(
    model: EngineModel,
    kernels: _cpu.Kernels,
    pool: _cpu.ThreadPool,
    *,
    weight_format: str,
    head_format: str,
    is_mapped: bool = False,
    progress: OnProgress | None = None,
) -> Weights:
    """Read all of a model's tensors.

    Args:
        model: the opened file.
        kernels: of an instruction set.
        pool: threads to do it with.
        weight_format: a key of `FORMATS`, accepted by `check_format`.
        head_format: what `choose_head` returned.
        is_mapped: whether rows that lie in the file as they would in memory stay there.

    Raises `UserError`, naming the tensor, where one is damaged; `MemoryError`.
    """
    with os_errors_as(f"cannot read {model.file.path}"):
        descriptor = os.open(model.file.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        memory = WeightMemory(model, descriptor, is_mapped=is_mapped, progress=progress)
        return _WeightLoader(model, memory, kernels, pool).load(weight_format, head_format)
    finally:
        os.close(descriptor)


class _WeightLoader(MatrixLoader):
    def load(self, weight_format: str, head_format: str) -> Weights:
        model, architecture = self._model, self._model.architecture
        blocks = [f"model.layers.{layer}" for layer in range(architecture.layers)]
        embedding_format = head_format
        if not architecture.ties_head:
            embedding_format = STORED_NAMES[model.file.entries[model.table_names[0]].dtype]
        embedding, embedding_bytes = self._table(model.table_names[0], embedding_format)
        head, head_bytes = embedding, embedding_bytes
        if not architecture.ties_head:
            head, head_bytes = self._table(model.table_names[-1], head_format)
        names = [
            f"{block}.{vector}" for block in blocks for vector in architecture.vector_lengths()
        ]
        vectors = {name: self._vector(name) for name in [*names, "model.norm.weight"]}
        matrices, weight_bytes = self.block_matrices(blocks, weight_format)
        return Weights(
            matrices=matrices,
            vectors=vectors,
            embedding=embedding,
            head=head,
            head_format=head_format,
            weight_bytes=weight_bytes,
            head_bytes=head_bytes,
            kept=self._memory.kept,
        )

    def _table(self, name: str, table_format: str) -> tuple[_cpu.Table, int]:
        """A table in a form of `choose_head`, and its bytes."""
        architecture, memory = self._model.architecture, self._memory
        shape = rows, columns = architecture.vocab, architecture.hidden
        dtype = self._model.file.entries[name].dtype
        if table_format == "i2":
            return self.ternary_table(name, shape)
        stride = aligned(columns * TABLE_BITS[table_format] // 8)
        in_place = None
        if table_format == STORED_NAMES[dtype]:
            in_place = memory.in_place(name, rows, stride)
        address = in_place or memory.buffer(rows * stride).address
        stored_scales = scales = self._stored_scales(name) if dtype == "I8" else None
        if table_format in ("int8", "int4") and table_format != STORED_NAMES[dtype]:
            groups = columns // INT4_GROUP if table_format == "int4" else 1
            scales = np.empty((rows, groups), np.float32)
        source = _cpu.StoredTable(
            _cpu.TableType[STORED_NAMES[dtype]],
            *shape,
            **memory.source(name, in_place),
            scales=_address(stored_scales),
        )
        table = _cpu.Table(_cpu.TableType[table_format], *shape, stride, address, _address(scales))
        memory.check(name, *self._kernels.load_table(self._pool, source, table))
        if scales is not None:
            memory.kept.append(scales)
        return table, rows * stride + (0 if scales is None else scales.nbytes)

    def _stored_scales(self, name: str) -> np.ndarray:
        """float32 [rows], contiguous."""
        scales = self._model.floats(f"{name}_scale").reshape(-1)
        self._memory.finish(f"{name}_scale")
        return scales

    def _vector(self, name: str) -> np.ndarray:
        vector = np.ascontiguousarray(self._model.floats(name))
        if name.endswith("norm.weight") and not name.endswith("proj.norm.weight"):
            vector = vector + np.float32(self._model.architecture.norm_offset)
        self._memory.finish(name)
        return vector


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data
