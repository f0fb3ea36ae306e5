# SPDX-License-Identifier: Apache-2.0
"""Reader of untrusted GGUF files: metadata, places of tensors, and values of any type.

The gguf package's reader refuses files that contain ternary types of llama.cpp's relatives. Its
dequantisers are used here for all types that are neither ternary nor plain nor Q8_0.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparse_bitnet.checkpoint.config_fields import check_basis
from sparse_bitnet.checkpoint.declared_rotation import PREFIX
from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.packing.gguf_blocks import I2_S, READ_TYPES, BlockType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Type of a value -> its format in `struct`."""
_MOST_DIMENSIONS, _MOST_COUNT = 4, 1 << 24

_BF16, _Q8_0 = 30, np.dtype([("scale", "<f2"), ("codes", "i1", 32)])
_FLOATS = {0: "<f4", 1: "<f2", _BF16: "<u2", 28: "<f8"}
_PLAIN = {*_FLOATS, 8}
_OF_GGML = """F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K
IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16"""
_NAMES = dict(enumerate(_OF_GGML.split())) | {39: "MXFP4"}
_OF_LLAMA_CPP = 100
"""Limit of llama.cpp's type numbers; other tools give their types higher ones."""

_NOT_GGUF = {b"vers": "a Git LFS pointer stands in its place: git lfs pull"} | dict.fromkeys(
    (b"lmgg", b"fmgg", b"tjgg", b"algg"), "GGML from before GGUF: convert it again"
)
"""First bytes of files that are not GGUF -> what to do."""


@dataclass(frozen=True)
class GgufEntry:
    """A tensor of the file."""

    type_id: int
    shape: tuple[int, ...]
    """Shape in PyTorch's order: rows first."""
    begin: int
    """Offset in bytes from the start of the file."""
    most: int
    """Number of bytes up to the next tensor."""


class GgufFile:
    """A GGUF file; only its header stays in memory.

    Attributes:
        metadata: key -> a string, a number or a list of them.
        tensors: name -> entry.
        i2_s: block type of the tensors of type I2_S.
    """

    def __init__(self, path: Path) -> None:
        """Raises `UserError` for a file that is damaged, cut off or of another version."""
        self.path, self.i2_s = path, I2_S
        with os_errors_as(f"cannot read {path}"), open(path, "rb") as file:
            try:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                    reader = _Reader(data)
            except UserError as error:
                raise UserError(f"{path}: {error}") from None
            except (ValueError, struct.error) as error:
                raise UserError(f"{path} is not a GGUF file, or is damaged: {error}") from error
        self.metadata, self.tensors = reader.metadata, reader.tensors
        # What follows a tensor begins at a multiple of the alignment, of some 32 bytes.
        self._padding = max(64, reader.alignment)
        others = {key: v for key, v in self.metadata.items() if not key.startswith(PREFIX)}
        check_basis(others, str(path))

    def block_type(self, name: str) -> BlockType | None:
        """Return the ternary type of a matrix, or None for any other type. Raises `UserError` if its
        shape does not match its size in the file."""
        entry = self.tensors[name]
        candidates = [block for block in READ_TYPES if block.type_id == entry.type_id]
        if not candidates or len(entry.shape) != 2:
            return None
        rows, columns = entry.shape
        for block in candidates:
            rest = entry.most - block.tensor_bytes(rows, columns)
            if columns % block.codes == 0 and 0 <= rest < self._padding:
                return self.i2_s if block is I2_S else block
        raise UserError(
            f"{self.path}: tensor {name} has {entry.most:,} bytes, not those of {candidates[0].name} "
            f"{list(entry.shape)}"
        )

    def type_name(self, name: str) -> str:
        """Return the name of a tensor's type, for messages."""
        block, type_id = self.block_type(name), self.tensors[name].type_id
        return _NAMES.get(type_id, f"type {type_id}") if block is None else block.name

    def is_quantised(self, name: str) -> bool:
        """Whether a tensor has a type of llama.cpp's that is neither ternary nor holds ternary weights
        exactly, as floats and Q8_0 do."""
        type_id = self.tensors[name].type_id
        return self.block_type(name) is None and type_id not in _PLAIN and type_id < _OF_LLAMA_CPP

    def codes(
        self, name: str, block: BlockType, part: slice = slice(None)
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return codes and scales of a ternary matrix, or of some of its rows (`BlockType.unpack`)."""
        rows, columns = self.tensors[name].shape
        size = block.tensor_bytes(rows, columns)
        if block.scale_of == "matrix":
            codes, scales = block.unpack(self._bytes(name, 0, size), rows, columns)
            return codes[part], scales
        first, last, _ = part.indices(rows)
        data = self._bytes(name, first * (size // rows), (last - first) * (size // rows))
        return block.unpack(data, last - first, columns)

    def floats(self, name: str, part: slice = slice(None)) -> np.ndarray:
        """Return a tensor, or some of its rows, as float32.

        Raises `UserError` for a type that is not read here, or a truncated tensor.
        """
        entry = self.tensors[name]
        rows = entry.shape[0] if entry.shape else 1
        first, last, _ = part.indices(rows)
        row_values = math.prod(entry.shape) // rows
        shape = (last - first, *entry.shape[1:])
        if entry.type_id in _FLOATS:
            dtype = np.dtype(_FLOATS[entry.type_id])
            size = row_values * dtype.itemsize
            values: np.ndarray = self._bytes(name, first * size, (last - first) * size).view(dtype)
            if entry.type_id == _BF16:
                values = (values.astype(np.uint32) << 16).view(np.float32)
            return values.astype(np.float32).reshape(shape)
        if entry.type_id == 8 and row_values % 32 == 0:
            size = row_values // 32 * _Q8_0.itemsize
            blocks = self._bytes(name, first * size, (last - first) * size).view(_Q8_0)
            return (blocks["codes"] * blocks["scale"][:, None].astype(np.float32)).reshape(shape)
        if (block := self.block_type(name)) is not None:
            codes, scales = self.codes(name, block, part)
            runs = codes.reshape(last - first, -1, block.codes)
            return (runs * scales.astype(np.float32)[..., None]).reshape(shape)
        if entry.type_id >= _OF_LLAMA_CPP:
            raise UserError(
                f"{self.path}: tensor {name} is {self.type_name(name)}, which neither sparse-bitnet nor "
                "llama.cpp supports"
            )
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            kind = GGMLQuantizationType(entry.type_id)
            block_values, block_bytes = GGML_QUANT_SIZES[kind]
            if row_values % block_values:
                raise ValueError(f"rows of {row_values} do not fill its blocks of {block_values}")
            size = row_values // block_values * block_bytes
            data = self._bytes(name, first * size, (last - first) * size)
            return dequantize(data.reshape(-1, size), kind).reshape(shape)
        except (ValueError, KeyError, NotImplementedError) as error:
            raise UserError(
                f"{self.path}: tensor {name} is {self.type_name(name)}, which is not supported ({error})"
            ) from error

    def _bytes(self, name: str, first: int, count: int) -> np.ndarray:
        entry = self.tensors[name]
        if first + count > entry.most:
            raise UserError(f"{self.path}: tensor {name} is cut off; copy the file again")
        with os_errors_as(f"cannot read {self.path}"):
            return np.fromfile(self.path, np.uint8, count, offset=entry.begin + first)


class _Reader:
    """Parses a header; raises `ValueError` or `struct.error` if it is malformed."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0
        if (magic := self._bytes(4)) not in (_MAGIC, _MAGIC[::-1]):
            raise ValueError(_NOT_GGUF.get(magic, "it does not begin with GGUF"))
        version = self._number("I")
        if magic != _MAGIC or version >= 1 << 16:
            raise UserError("it is big-endian: convert the model again as little-endian")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}, readable are {_VERSIONS}")
        tensors, fields = self._count(24), self._count(13)
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            if key in self.metadata:
                raise ValueError(f"{key} is repeated")
            self.metadata[key] = self._value(self._number("I"))
        parts = str(self.metadata.get("split.count", 0))[:9]
        if parts not in ("0", "1"):
            raise UserError(f"it is one of {parts} parts: llama-gguf-split --merge FIRST OUT.gguf")
        self.alignment = self.metadata.get("general.alignment", 32)
        if type(self.alignment) is not int or not 0 < self.alignment <= 1 << 16:
            raise ValueError(f"an alignment of {self.alignment!r}")
        self.tensors = self._placed([self._tensor() for _ in range(tensors)])

    def _placed(self, entries: list[tuple[str, int, tuple[int, ...], int]]) -> dict[str, GgufEntry]:
        """Return the tensors by name; each ends where the next one begins."""
        begin = -(-self._at // self.alignment) * self.alignment
        size = len(self._data) - begin
        offsets = sorted({offset for *_, offset in entries})
        ends = dict(zip(offsets, [*offsets[1:], size], strict=True)) if entries else {}
        if len({name for name, *_ in entries}) < len(entries) or len(offsets) < len(entries):
            raise ValueError("a tensor name is repeated, or tensors overlap")
        placed = {}
        for name, type_id, shape, offset in entries:
            if offset % self.alignment or offset >= size:
                raise ValueError(f"tensor {name} lies outside the file")
            placed[name] = GgufEntry(type_id, shape, begin + offset, ends[offset] - offset)
        return placed

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        """Read name, type, shape and offset of a tensor."""
        name = self._string()
        count = self._number("I")
        if count > _MOST_DIMENSIONS:
            raise ValueError(f"tensor {name} has {count} dimensions")
        shape = tuple(self._number("Q") for _ in range(count))[::-1]
        if not all(0 < size < 1 << 40 for size in shape):
            raise ValueError(f"tensor {name} has the shape {list(shape)}")
        return name, self._number("I"), shape, self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            if kind not in _NUMBERS:
                raise ValueError(f"a value of type {kind}")
            return self._number(_NUMBERS[kind])
        kind = self._number("I")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(8))]
        if kind not in _NUMBERS:
            raise ValueError(f"a list of type {kind}")
        count = self._count(struct.calcsize(_NUMBERS[kind]))
        return list(self._unpack(f"<{count}{_NUMBERS[kind]}"))

    def _string(self) -> str:
        return self._bytes(self._count(1)).decode("utf-8", "replace")

    def _count(self, item_bytes: int) -> int:
        """Read a count of items that take at least `item_bytes` each; `ValueError` if they do not fit."""
        count = self._number("Q")
        if count > _MOST_COUNT or count * item_bytes > len(self._data) - self._at:
            raise ValueError(f"a count of {count:,}; if it is cut off, copy or download it again")
        return count

    def _number(self, format: str) -> Any:
        return self._unpack(f"<{format}")[0]

    def _unpack(self, format: str) -> tuple[Any, ...]:
        return struct.unpack(format, self._bytes(struct.calcsize(format)))

    def _bytes(self, count: int) -> bytes:
        content = self._data[self._at : self._at + count]
        if len(content) != count:
            raise ValueError("it is cut off: copy or download it again")
        self._at += count
        return content
