# SPDX-License-Identifier: Apache-2.0
"""Weights of a packed model in the form in which they are multiplied, in memory of their own. No torch.

Every byte of the file is read once: its checksum is computed, its encoding checked and its run-time
form written in the same pass, piece by piece, so that the file takes no memory of its own. What is run as
it is stored can instead be mapped, and is only checked: the system's copy of the file is the memory then.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import BLOCK_LINEARS
from sparse_bitnet.engine.engine_model import EngineModel
from sparse_bitnet.engine.weight_forms import (
    ALIGNMENT,
    FORMATS,
    INT4_GROUP,
    STORED_NAMES,
    TABLE_BITS,
    aligned,
    row_stride,
)
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.formats import coded_pattern, has_fixed_rows
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.pattern import NMPattern
from sparse_bitnet.progress import OnProgress

_ONE_INPUT = (BLOCK_LINEARS[:3], BLOCK_LINEARS[3:4], BLOCK_LINEARS[4:6], BLOCK_LINEARS[6:])
"""Linears of a block that multiply the same input; their scales have the same groups."""

_SLACK = 512
"""Readable bytes behind the last row."""


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
    """Bytes of the matrices of the blocks."""
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
        return _Loader(
            model, descriptor, kernels, pool, weight_format, head_format, is_mapped, progress
        ).load()
    finally:
        os.close(descriptor)


class _Loader:
    def __init__(
        self,
        model: EngineModel,
        descriptor: int,
        kernels: _cpu.Kernels,
        pool: _cpu.ThreadPool,
        weight_format: str,
        head_format: str,
        is_mapped: bool,
        progress: OnProgress | None,
    ) -> None:
        self._model, self._descriptor = model, descriptor
        self._kernels, self._pool, self._progress = kernels, pool, progress
        self._weight_format, self._head_format = weight_format, head_format
        self._pattern = coded_pattern(model.metadata.pattern)
        self._done = 0
        self._total = sum(entry.end - entry.begin for entry in model.file.entries.values())
        self._kept: list[Any] = []
        self._mapped: np.ndarray | None = None
        if is_mapped:
            self._mapped = np.frombuffer(
                mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8
            )
            self._kept.append(self._mapped)

    def load(self) -> Weights:
        architecture = self._model.architecture
        blocks = [f"model.layers.{layer}" for layer in range(architecture.layers)]
        embedding, embedding_bytes = self._embedding()
        head, head_bytes = embedding, embedding_bytes
        if not architecture.ties_head:
            head, head_bytes = self._table(self._model.table_names[-1], self._head_format)
        names = [
            f"{block}.{vector}" for block in blocks for vector in architecture.vector_lengths()
        ]
        vectors = {name: self._vector(name) for name in [*names, "model.norm.weight"]}
        matrices, weight_bytes = self._matrices(blocks)
        return Weights(
            matrices=matrices,
            vectors=vectors,
            embedding=embedding,
            head=head,
            head_format=self._head_format,
            weight_bytes=weight_bytes,
            head_bytes=head_bytes,
            kept=self._kept,
        )

    def _matrices(self, blocks: list[str]) -> tuple[dict[str, _cpu.Matrix], int]:
        shapes = self._model.architecture.linear_shapes()
        format, n, m = FORMATS[self._weight_format], self._pattern.n, self._pattern.m
        stored_format = self._model.metadata.packed_format
        exact = self._model.exact and self._weight_format == "lookup"
        strides = {
            name: row_stride(self._weight_format, self._pattern, columns, self._model.exact)
            for name, (_, columns) in shapes.items()
        }
        sizes = {name: _in_strips(rows) * strides[name] for name, (rows, _) in shapes.items()}
        block_bytes = sum(sizes.values())
        buffer = self._buffer(block_bytes * len(blocks))
        address = buffer.address
        matrices = {}
        for block in blocks:
            for linear, (rows, columns) in shapes.items():
                name = f"{block}.{linear}"
                scales = self._scales(
                    f"{name}.weight_scale", (rows, columns), self._scale_group(block, linear)
                )
                in_place = None
                if stored_format == self._weight_format and "group" not in scales:
                    in_place = self._in_place(f"{name}.weight_packed", rows, strides[linear])
                matrices[name] = _cpu.Matrix(
                    format,
                    n,
                    m,
                    rows,
                    columns,
                    strides[linear],
                    in_place or address,
                    **scales,
                    exact=exact,
                )
                stored = (stored_format, self._model.metadata.pattern)
                self._fill(
                    f"{name}.weight_packed", *stored, matrices[name], (rows, columns), in_place
                )
                address += sizes[linear]
        return matrices, block_bytes * len(blocks)

    def _scale_group(self, block: str, linear: str) -> int:
        """Weights that share a scale, the least of the matrices with that input; 0 for no groups."""
        beside = next(names for names in _ONE_INPUT if linear in names)
        groups = [self._model.scale_group(block, name) for name in beside]
        return min(filter(None, groups), default=0)

    def _scales(self, name: str, shape: tuple[int, int], group: int) -> dict[str, Any]:
        """The scales of a matrix as `_cpu.Matrix` takes them, for `group` weights unless that is 0."""
        values = self._model.scales(name)
        self._finish(name)
        if group == 0 and values.size == 1:
            return {"scale": values.item()}
        scales, more = values, {}
        if group:
            rows, groups = shape[0], shape[1] // group
            kind = "float32"
            if values.shape == (rows, groups):
                values, kind = (
                    self._model.file.array(name),
                    DTYPES[self._model.file.entries[name].dtype],
                )
            elif values.shape != (1,):
                values = values.repeat(groups // values.shape[1], 1)
            # Those of a strip together; rows that fill up the last one have none.
            filled = np.zeros((_in_strips(rows), groups), values.dtype)
            filled[:rows] = values
            scales = filled.reshape(-1, _cpu.STRIP_ROWS, groups).swapaxes(1, 2)
            more = {"group": group, "scale_type": _cpu.ScaleType[kind]}
        scales = np.ascontiguousarray(scales)
        self._kept.append(scales)
        return {"scales": scales.ctypes.data, **more}

    def _fill(
        self,
        name: str,
        packed_format: str,
        pattern: NMPattern,
        matrix: _cpu.Matrix,
        shape: tuple[int, int],
        in_place: int | None = None,
    ) -> None:
        """Write the rows of a packed tensor to the address of its matrix, if they are not `in_place`."""
        codes = None if has_fixed_rows(packed_format) else self._decoded(name, shape)
        stored = "codes" if codes is not None else packed_format.replace("-", "_")
        coded = coded_pattern(pattern)
        source = _cpu.StoredMatrix(
            _cpu.StoredFormat[stored],
            coded.n,
            coded.m,
            *shape,
            **(self._in_file(name, in_place) if codes is None else _in_memory(codes)),
        )
        crc32, is_readable, damage = self._kernels.repack(self._pool, source, matrix)
        if not is_readable:
            raise UserError(f"{self._model.file.path}: tensor {name} cannot be read")
        if codes is None:
            self._model.file.check_crc32(name, f"{crc32:08x}")
        if damage is not None:
            raise UserError(
                f"{self._model.file.path}: tensor {name} is damaged or not {packed_format}: "
                f"{damage}"
            )
        self._finish(name)

    def _decoded(self, name: str, shape: tuple[int, int]) -> np.ndarray:
        """int8 codes [rows, columns] of a tensor that is compressed as a whole."""
        from sparse_bitnet.packing.codec import unpack

        file, metadata = self._model.file, self._model.metadata
        file.verify_tensor(name)
        codes = unpack(
            file.tensor(name),
            metadata.packed_format,
            metadata.pattern,
            shape,
            name=name,
        )
        return codes.numpy()

    def _embedding(self) -> tuple[_cpu.Table, int]:
        name = self._model.table_names[0]
        if self._model.architecture.ties_head:
            return self._table(name, self._head_format)
        return self._table(name, STORED_NAMES[self._model.file.entries[name].dtype])

    def _table(self, name: str, table_format: str) -> tuple[_cpu.Table, int]:
        """A table in a form of `choose_head`, and its bytes."""
        file, architecture = self._model.file, self._model.architecture
        shape = rows, columns = architecture.vocab, architecture.hidden
        dtype = file.entries[name].dtype
        if table_format == "i2":
            return self._ternary_table(name, shape)
        stride = aligned(columns * TABLE_BITS[table_format] // 8)
        in_place = None
        if table_format == STORED_NAMES[dtype]:
            in_place = self._in_place(name, rows, stride)
        address = in_place or self._buffer(rows * stride).address
        stored_scales = scales = self._stored_scales(name) if dtype == "I8" else None
        if table_format in ("int8", "int4") and table_format != STORED_NAMES[dtype]:
            groups = columns // INT4_GROUP if table_format == "int4" else 1
            scales = np.empty((rows, groups), np.float32)
        source = _cpu.StoredTable(
            _cpu.TableType[STORED_NAMES[dtype]],
            *shape,
            **self._in_file(name, in_place),
            scales=_address(stored_scales),
        )
        table = _cpu.Table(_cpu.TableType[table_format], *shape, stride, address, _address(scales))
        crc32, is_readable, damage = self._kernels.load_table(self._pool, source, table)
        if not is_readable:
            raise UserError(f"{file.path}: tensor {name} cannot be read")
        file.check_crc32(name, f"{crc32:08x}")
        if damage is not None:
            raise UserError(f"{file.path}: tensor {name} {damage}")
        self._finish(name)
        if scales is not None:
            self._kept.append(scales)
        return table, rows * stride + (0 if scales is None else scales.nbytes)

    def _ternary_table(self, name: str, shape: tuple[int, int]) -> tuple[_cpu.Table, int]:
        dense = NMPattern(1, 1)
        rows, columns = shape
        group = columns // self._model.file.entries[f"{name}_scale"].shape[1]
        stride = row_stride("i2", dense, columns, False)
        buffer = self._buffer(_in_strips(rows) * stride)
        scales = self._scales(f"{name}_scale", shape, group)
        matrix = _cpu.Matrix(FORMATS["i2"], 1, 1, *shape, stride, buffer.address, **scales)
        self._fill(name, "i2", dense, matrix, shape)
        return _cpu.Table(matrix), rows * stride + self._kept[-1].nbytes

    def _stored_scales(self, name: str) -> np.ndarray:
        """float32 [rows], contiguous."""
        scales = self._model.floats(f"{name}_scale").reshape(-1)
        self._finish(f"{name}_scale")
        return scales

    def _vector(self, name: str) -> np.ndarray:
        vector = np.ascontiguousarray(self._model.floats(name))
        if name.endswith("norm.weight") and not name.endswith("proj.norm.weight"):
            vector = vector + np.float32(self._model.architecture.norm_offset)
        self._finish(name)
        return vector

    def _in_place(self, name: str, rows: int, stride: int) -> int | None:
        """The address of a tensor in the mapped file, if its rows lie there as they would in memory."""
        entry, mapped = self._model.file.entries[name], self._mapped
        fits = entry.end - entry.begin == rows * stride and entry.begin % ALIGNMENT == 0
        read = entry.begin + _in_strips(rows) * stride + _SLACK
        if mapped is None or not fits or read > mapped.size:
            return None
        return mapped.ctypes.data + entry.begin

    def _in_file(self, name: str, in_place: int | None = None) -> dict[str, int]:
        """Where the bytes of a tensor are, for `_cpu`, and how many."""
        entry = self._model.file.entries[name]
        size = entry.end - entry.begin
        if in_place is not None:
            return {"bytes": size, "address": in_place}
        return {"bytes": size, "descriptor": self._descriptor, "offset": entry.begin}

    def _buffer(self, size: int) -> _cpu.HugeBuffer:
        buffer = _cpu.HugeBuffer(size + _SLACK)
        self._kept.append(buffer)
        return buffer

    def _finish(self, name: str) -> None:
        entry = self._model.file.entries[name]
        self._done += entry.end - entry.begin
        if self._progress is not None:
            self._progress(self._done, self._total)


def _in_strips(rows: int) -> int:
    return -(-rows // _cpu.STRIP_ROWS) * _cpu.STRIP_ROWS


def _address(array: np.ndarray | None) -> int:
    return 0 if array is None else array.ctypes.data


def _in_memory(array: np.ndarray) -> dict[str, int]:
    return {"bytes": array.nbytes, "address": array.ctypes.data}
