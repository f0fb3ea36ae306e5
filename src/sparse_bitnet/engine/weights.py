# SPDX-License-Identifier: Apache-2.0
"""Weights of a packed model in the run-time formats that the kernels multiply. No torch.

Every byte of the file is read once: its checksum is computed, its encoding checked and its run-time
format written in the same pass, piece by piece. Rows of i2 can instead be memory-mapped.
"""

import mmap
from typing import Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.architecture import ONE_INPUT
from sparse_bitnet.engine.engine_model import INT4_GROUP, STORED_NAMES, EngineModel
from sparse_bitnet.engine.run_time_formats import ALIGNMENT, FORMATS, aligned, row_stride
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.formats import coded_pattern, needs_exact
from sparse_bitnet.packing.tensor_file import DTYPES
from sparse_bitnet.pattern import NMPattern

_TABLE_BITS = {"int8": 8, "int4": 4, "bfloat16": 16, "float32": 32}
_SLACK = 512
"""Readable bytes behind the last row."""
_SHARED_SCALES = 1 << 23
"""Scales in one array: NumPy takes huge pages for it, but not for those of one matrix."""

_DENSE = NMPattern(1, 1)


class Weights:
    """Weights of one model for the decoder: addresses of memory that `kept` and `vectors` own.

    Attributes:
        matrices: the linears of the blocks by name.
        vectors: norms, biases and weights that are not packed by name, float32.
        embedding, head: tables; the same one if the model ties them.
        weight_bytes: bytes of matrices, with scales of rows and groups, and vectors.
        head_bytes: bytes of the output head with its scales.
    """

    def __init__(
        self,
        model: EngineModel,
        kernels: _cpu.Kernels,
        pool: _cpu.ThreadPool,
        *,
        weight_format: str,
        head_format: str,
        is_mapped: bool,
    ) -> None:
        """Read all of a model's tensors.

        Args:
            model: the opened file.
            kernels, pool: used for reading.
            weight_format: a key of `FORMATS` that the model supports.
            head_format: a result of `choose_head`.
            is_mapped: whether rows that have the same layout in the file stay memory-mapped.

        Raises `UserError`, naming the tensor, if one is damaged; `MemoryError`.
        """
        self._model, self._kernels, self._pool = model, kernels, pool
        self.kept: list[Any] = []
        self._free_scales = np.empty(0, np.float32)
        self._mapped: np.ndarray | None = None
        with os_errors_as(f"cannot read {model.file.path}"), open(model.file.path, "rb") as file:
            self._descriptor = file.fileno()
            if is_mapped:
                mapped = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
                self._mapped = np.frombuffer(mapped, np.uint8)
                self.kept.append(self._mapped)
            first, *heads = model.table_names
            form = STORED_NAMES[model.file.entries[first].dtype] if heads else head_format
            self.embedding, self.head_bytes = self._table(first, form)
            self.head = self.embedding
            for name in heads:  # one of its own
                self.head, self.head_bytes = self._table(name, head_format)
            vectors = [
                f"model.layers.{layer}.{name}"
                for layer in range(model.architecture.layers)
                for name, _ in model.architecture.vectors(layer).values()
            ]
            self.vectors = {name: self._vector(name) for name in [*vectors, "model.norm.weight"]}
            self.matrices, self.weight_bytes = self._matrices(weight_format)
            self.weight_bytes += sum(vector.nbytes for vector in self.vectors.values())
        del self._pool  # the system may not start a decoder's threads beside these

    def _table(self, name: str, table_format: str) -> tuple[_cpu.Table, int]:
        """Return a table in a format of `choose_head`, and its bytes."""
        architecture = self._model.architecture
        shape = rows, columns = architecture.vocab, architecture.hidden
        stored = STORED_NAMES[self._model.file.entries[name].dtype]
        if table_format == "i2":
            return self._ternary_table(name, shape)
        stride = aligned(columns * _TABLE_BITS[table_format] // 8)
        in_place = self._in_place(name, rows, stride) if table_format == stored else None
        address = in_place or self._buffer(rows * stride).address
        stored_scales = scales = np.empty(0, np.float32)
        if stored == "int8":
            stored_scales = scales = self._model.floats(f"{name}_scale").reshape(-1)
        if table_format in ("int8", "int4") and table_format != stored:
            groups = columns // INT4_GROUP if table_format == "int4" else 1
            scales = np.empty((rows, groups), np.float32)
        self.kept.append(scales)
        own, at = self._source(name, in_place), stored_scales.ctypes.data
        source = _cpu.StoredTable(_cpu.TableType[stored], *shape, **own, scales=at)
        to = (*shape, stride, address, scales.ctypes.data)
        table = _cpu.Table(_cpu.TableType[table_format], *to)
        self._check(name, *self._kernels.load_table(self._pool, source, table))
        return table, rows * stride + scales.nbytes

    def _ternary_table(self, name: str, shape: tuple[int, int]) -> tuple[_cpu.Table, int]:
        """Return a table of i2 rows [rows, columns] with scales of groups, and its bytes with these."""
        rows, columns = shape
        group = columns // self._model.file.entries[f"{name}_scale"].shape[1]
        stride = row_stride("i2", _DENSE, columns, False)
        buffer = self._buffer(_in_strips(rows) * stride)
        scales = self._scales(f"{name}_scale", shape, group, "i2")
        matrix = _cpu.Matrix(FORMATS["i2"], 1, 1, *shape, stride, buffer.address, **scales)
        self._fill(name, "i2", _DENSE, matrix, shape)
        return _cpu.Table(matrix), rows * stride + self.kept[-1].nbytes

    def _vector(self, name: str) -> np.ndarray:
        vector = np.ascontiguousarray(self._model.floats(name))
        if name.endswith("A_log"):
            return (-np.exp(vector.astype(np.float64))).astype(np.float32)
        if name.endswith("conv1d.weight"):
            return np.ascontiguousarray(vector[:, 0].T)
        is_plain = name.endswith(("proj.norm.weight", "attn.norm.weight"))
        if name.endswith("norm.weight") and not is_plain:
            vector = vector + np.float32(self._model.architecture.norm_offset)
        return vector

    def _matrices(self, weight_format: str) -> tuple[dict[str, _cpu.Matrix], int]:
        """Return the matrices of the blocks by name, in a format of `FORMATS`, and their total bytes,
        with scales of rows and groups."""
        model, sizes = self._model, self._model.architecture
        stored = model.metadata.packed_format, model.metadata.pattern
        is_grouped = weight_format == "lookup" and model.scale_groups() != {0}
        pattern = _DENSE if is_grouped else coded_pattern(model.metadata.pattern)
        exact = needs_exact(stored[0]) and weight_format == "lookup" and not is_grouped
        plan = []
        for layer in range(sizes.layers):
            linears, shapes = sizes.linears(layer), sizes.linear_shapes(layer)
            for key, linear in linears.items():
                # The smallest group of all matrices with the same input; 0 for no groups.
                beside = next(keys for keys in ONE_INPUT if key in keys)
                groups = [model.scale_group(layer, linears[k]) for k in beside if k in linears]
                group, shape = min(filter(None, groups), default=0), shapes[linear]
                stride = row_stride(weight_format, pattern, shape[1], exact, group)
                size = _in_strips(shape[0], weight_format) * stride
                plan.append((f"model.layers.{layer}.{linear}", shape, group, stride, size))
        bytes_of_all = sum(size for *_, size in plan)
        address = self._buffer(bytes_of_all).address
        matrices = {}
        for name, shape, group, stride, size in plan:
            scales = self._scales(f"{name}.weight_scale", shape, group, weight_format)
            bytes_of_all += self.kept[-1].nbytes if "scales" in scales else 0
            in_place = None
            if stored[0] == weight_format == "i2" and not group:
                in_place = self._in_place(f"{name}.weight_packed", shape[0], stride)
            matrices[name] = _cpu.Matrix(
                FORMATS[weight_format],
                *(pattern.n, pattern.m, *shape, stride, in_place or address),
                **scales,
                exact=exact,
            )
            self._fill(f"{name}.weight_packed", *stored, matrices[name], shape, in_place)
            address += size
        return matrices, bytes_of_all

    def _scales(self, name: str, shape: tuple[int, int], group: int, form: str) -> dict[str, Any]:
        """Return a matrix's scales as arguments of `_cpu.Matrix`, one per `group` weights unless 0."""
        values = self._model.scales(name)
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
            # Scales of a strip lie together; rows that fill up the last strip have none.
            filled = np.zeros((_in_strips(rows, form), groups), values.dtype)
            filled[:rows] = values
            scales = filled.reshape(-1, _in_strips(1, form), groups).swapaxes(1, 2)
            more = {"group": group, "scale_type": _cpu.ScaleType[kind]}
        if scales.dtype != self._free_scales.dtype or scales.size > self._free_scales.size:
            self._free_scales = np.empty(max(scales.size, _SHARED_SCALES), scales.dtype)
        kept, self._free_scales = np.split(self._free_scales, [scales.size])
        kept[:] = scales.ravel()
        self.kept.append(kept)
        return {"scales": kept.ctypes.data, **more}

    def _fill(
        self,
        name: str,
        packed_format: str,
        pattern: NMPattern,
        matrix: _cpu.Matrix,
        shape: tuple[int, int],
        in_place: int | None = None,
    ) -> None:
        """Write the rows of a packed tensor to the address of its matrix, unless used `in_place`."""
        coded, form = coded_pattern(pattern), packed_format.replace("-", "_")
        source = _cpu.StoredMatrix(
            _cpu.StoredFormat[form], coded.n, coded.m, *shape, **self._source(name, in_place)
        )
        crc32, is_readable, damage = _cpu.repack(self._pool, source, matrix)
        why = damage and f"is damaged or not {packed_format}: {damage}"
        self._check(name, crc32, is_readable, why)

    def _in_place(self, name: str, rows: int, stride: int) -> int | None:
        """Return a tensor's address in the mapped file if its rows have the run-time layout."""
        entry, mapped = self._model.file.entries[name], self._mapped
        fits = entry.end - entry.begin == rows * stride and entry.begin % ALIGNMENT == 0
        read = entry.begin + _in_strips(rows) * stride + _SLACK
        if mapped is None or not fits or read > mapped.size:
            return None
        return mapped.ctypes.data + entry.begin

    def _source(self, name: str, in_place: int | None) -> dict[str, int]:
        """Return the location and the size of a tensor's bytes, as arguments for `_cpu`."""
        entry = self._model.file.entries[name]
        size = entry.end - entry.begin
        if in_place is not None:
            return {"bytes": size, "address": in_place}
        return {"bytes": size, "descriptor": self._descriptor, "offset": entry.begin}

    def _buffer(self, size: int) -> _cpu.HugeBuffer:
        """Allocate memory, in huge pages if the system has them, with readable bytes after its end."""
        buffer = _cpu.HugeBuffer(size + _SLACK)
        self.kept.append(buffer)
        return buffer

    def _check(self, name: str, crc32: int, is_readable: bool, damage: str | None) -> None:
        """Raise `UserError` for a tensor that cannot be read, has another checksum or is damaged."""
        file = self._model.file
        if not is_readable:
            raise UserError(f"{file.path}: tensor {name} cannot be read")
        file.check_crc32(name, f"{crc32:08x}")
        if damage is not None:
            raise UserError(f"{file.path}: tensor {name} {damage}")


def _in_strips(rows: int, weight_format: str = "i2") -> int:
    """Return the number of rows, rounded up to whole strips of a format."""
    strip = _cpu.B3_STRIP_ROWS if weight_format == "b3" else _cpu.STRIP_ROWS
    return -(-rows // strip) * strip
