# SPDX-License-Identifier: Apache-2.0
"""Packed matrices in the form in which they are multiplied, each strip of rows with its scales."""

from typing import Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import BLOCK_LINEARS
from sparse_bitnet.engine.engine_model import EngineModel
from sparse_bitnet.engine.weight_forms import FORMATS, row_stride
from sparse_bitnet.engine.weight_memory import WeightMemory, in_strips
from sparse_bitnet.packing.formats import coded_pattern
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.pattern import NMPattern

_ONE_INPUT = (BLOCK_LINEARS[:3], BLOCK_LINEARS[3:4], BLOCK_LINEARS[4:6], BLOCK_LINEARS[6:])
"""Linears of a block that multiply the same input; their scales have the same groups."""


class MatrixLoader:
    """Reads a model's packed matrices into memory that `memory` keeps."""

    def __init__(
        self,
        model: EngineModel,
        memory: WeightMemory,
        kernels: _cpu.Kernels,
        pool: _cpu.ThreadPool,
    ) -> None:
        self._model, self._memory = model, memory
        self._kernels, self._pool = kernels, pool

    def block_matrices(
        self, blocks: list[str], weight_format: str
    ) -> tuple[dict[str, _cpu.Matrix], int]:
        """By name those of the blocks, in a format of `FORMATS`, and the bytes of all, with scales of
        rows and groups."""
        model, shapes = self._model, self._model.architecture.linear_shapes()
        pattern = coded_pattern(model.metadata.pattern)
        stored = model.metadata.packed_format, model.metadata.pattern
        exact = model.exact and weight_format == "lookup"
        strides = {
            name: row_stride(weight_format, pattern, columns, model.exact)
            for name, (_, columns) in shapes.items()
        }
        sizes = {name: in_strips(rows) * strides[name] for name, (rows, _) in shapes.items()}
        bytes_of_all = sum(sizes.values()) * len(blocks)
        address = self._memory.buffer(bytes_of_all).address
        matrices = {}
        for block in blocks:
            for linear, shape in shapes.items():
                name, stride = f"{block}.{linear}", strides[linear]
                group = self._scale_group(block, linear)
                scales = self._scales(f"{name}.weight_scale", shape, group)
                bytes_of_all += self._memory.kept[-1].nbytes if "scales" in scales else 0
                in_place = None
                if stored[0] == weight_format and "group" not in scales:
                    in_place = self._memory.in_place(f"{name}.weight_packed", shape[0], stride)
                matrices[name] = _cpu.Matrix(
                    FORMATS[weight_format],
                    pattern.n,
                    pattern.m,
                    *shape,
                    stride,
                    in_place or address,
                    **scales,
                    exact=exact,
                )
                self._fill(f"{name}.weight_packed", *stored, matrices[name], shape, in_place)
                address += sizes[linear]
        return matrices, bytes_of_all

    def ternary_table(self, name: str, shape: tuple[int, int]) -> tuple[_cpu.Table, int]:
        """A table of i2 rows [rows, columns] with scales of groups, and its bytes with these."""
        dense = NMPattern(1, 1)
        rows, columns = shape
        group = columns // self._model.file.entries[f"{name}_scale"].shape[1]
        stride = row_stride("i2", dense, columns, False)
        buffer = self._memory.buffer(in_strips(rows) * stride)
        scales = self._scales(f"{name}_scale", shape, group)
        matrix = _cpu.Matrix(FORMATS["i2"], 1, 1, *shape, stride, buffer.address, **scales)
        self._fill(name, "i2", dense, matrix, shape)
        return _cpu.Table(matrix), rows * stride + self._memory.kept[-1].nbytes

    def _scale_group(self, block: str, linear: str) -> int:
        """Weights that share a scale, the least of the matrices with that input; 0 for no groups."""
        beside = next(names for names in _ONE_INPUT if linear in names)
        groups = [self._model.scale_group(block, name) for name in beside]
        return min(filter(None, groups), default=0)

    def _scales(self, name: str, shape: tuple[int, int], group: int) -> dict[str, Any]:
        """The scales of a matrix as `_cpu.Matrix` takes them, for `group` weights unless that is 0."""
        values = self._model.scales(name)
        self._memory.finish(name)
        if group == 0 and values.size == 1:
            return {"scale": values.item()}
        scales, more = values, {}
        if group:
            rows, groups = shape[0], shape[1] // group
            kind = "float32"
            if values.shape == (rows, groups):
                values = self._model.file.array(name)
                kind = DTYPES[self._model.file.entries[name].dtype]
            elif values.shape != (1,):
                values = values.repeat(groups // values.shape[1], 1)
            # Those of a strip together; rows that fill up the last one have none.
            filled = np.zeros((in_strips(rows), groups), values.dtype)
            filled[:rows] = values
            scales = filled.reshape(-1, _cpu.STRIP_ROWS, groups).swapaxes(1, 2)
            more = {"group": group, "scale_type": _cpu.ScaleType[kind]}
        scales = np.ascontiguousarray(scales)
        self._memory.kept.append(scales)
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
        coded, form = coded_pattern(pattern), packed_format.replace("-", "_")
        source = _cpu.StoredMatrix(
            _cpu.StoredFormat[form], coded.n, coded.m, *shape, **self._memory.source(name, in_place)
        )
        crc32, is_readable, damage = self._kernels.repack(self._pool, source, matrix)
        why = damage and f"is damaged or not {packed_format}: {damage}"
        self._memory.check(name, crc32, is_readable, why)
