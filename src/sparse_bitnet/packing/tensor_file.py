# SPDX-License-Identifier: Apache-2.0
"""Tensor file of a packed checkpoint: safetensors, validated on reading and written piece by piece.

Importing this module imports no torch: arrays and torch's tensors can both be written.

Any safetensors reader opens the file. Its `__metadata__` holds two more entries:

    sparse_bitnet   JSON: what the tensors are (formats.py) and "crc32", the checksum of each
    header_crc32    checksum of the header itself, computed with eight zeros in its own place

A flipped bit anywhere is therefore noticed, and the damaged tensor named. Checksums are CRC-32 (zlib),
eight hexadecimal digits.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Union

import numpy as np
from zlib_ng import zlib_ng

from sparse_bitnet.errors import UserError, library_errors_as, os_errors_as

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES: dict[str, str] = {
    "F64": "float64",
    "I64": "int64",
    "F32": "float32",
    "I32": "int32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The file's name of each type -> torch's."""
FLOATS = ("F64", "F32", "F16", "BF16")

ITEM_BYTES = {k: 2 if v == "bfloat16" else np.dtype(v).itemsize for k, v in DTYPES.items()}

_KEYS = {name: key for key, name in DTYPES.items()}
_LENGTH_BYTES = 8
_LARGEST_DIMENSION = 1 << 48
_CRC_KEY = b'"header_crc32":"'
_UNKNOWN_CRC = "00000000"

_ALIGNMENT = 64
"""Alignment in bytes of the first tensor with one byte a value, and so of those behind it that fill whole
cache lines: the engine can multiply those of i2 in place (engine/weights.py)."""


class Entry(NamedTuple):
    """A tensor of a file."""

    dtype: str
    """A key of `DTYPES`."""
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes from the start of the file."""


class TensorFile:
    """A packed checkpoint's file, mapped into memory, with its header checked.

    Attributes:
        path: path of the file.
        metadata: the writer's metadata, plus "crc32".
        entries: the tensors by name.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises `UserError` for a file that is damaged, truncated, or not of this kind."""
        self.path = Path(path)
        damaged = library_errors_as(f"{path}: the header is damaged, copy it again")
        with damaged, os_errors_as(f"cannot read {path}"):
            self._data = np.asarray(np.memmap(self.path, np.uint8, mode="c"))
            data_begin = _LENGTH_BYTES + int.from_bytes(self._data[:_LENGTH_BYTES], "little")
            raw = self._data[_LENGTH_BYTES:data_begin].tobytes()
            head, key, rest = raw.partition(_CRC_KEY)
            if not key:
                raise ValueError("no checksum: not written by sparse-bitnet pack")
            unknown = head + key + _UNKNOWN_CRC.encode() + rest[len(_UNKNOWN_CRC) :]
            if not rest.startswith(f"{zlib_ng.crc32(unknown):08x}".encode()):
                raise ValueError("its checksum differs")
            header = json.loads(raw)
            self.metadata = json.loads(header.pop("__metadata__")["sparse_bitnet"])
            self.entries = {name: _entry(name, data_begin, **header[name]) for name in header}
            if self.metadata["crc32"].keys() != self.entries.keys():
                raise ValueError("its tensors are not those with a checksum")
            ends = [data_begin, *sorted(entry.end for entry in self.entries.values())]
            if ends[:-1] != sorted(entry.begin for entry in self.entries.values()):
                raise ValueError("its tensors leave a gap, or overlap")
        size, end = len(self._data), ends[-1]
        if end != size:
            raise UserError(
                f"{path} is {'truncated' if end > size else 'too long'}: its tensors end at byte "
                f"{end:,}, the file at {size:,}; copy it again"
            )

    def tensor(self, name: str) -> "Tensor":
        """Return a tensor as a view of the mapped file; its bytes are read when used."""
        import torch

        entry = self.entries[name]
        dtype = getattr(torch, DTYPES[entry.dtype])
        flat = torch.from_numpy(self._bytes(name))
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def checked(self, name: str) -> "Tensor":
        """Return a tensor whose checksum matches. Raises `UserError` naming a damaged one."""
        self.verify_tensor(name)
        return self.tensor(name)

    def _bytes(self, name: str) -> np.ndarray:
        """uint8 [bytes of the tensor], a view of the mapped file, without alignment."""
        entry = self.entries[name]
        return self._data[entry.begin : entry.end]

    def array(self, name: str) -> np.ndarray:
        """Return a tensor as an array in memory of its own; bfloat16 comes as its bits in uint16."""
        entry = self.entries[name]
        dtype = np.uint16 if entry.dtype == "BF16" else np.dtype(DTYPES[entry.dtype])
        return np.array(self._bytes(name)).view(dtype).reshape(entry.shape)

    def verify(self) -> None:
        """Compare every tensor with its checksum. Raises `UserError` naming the first damaged one."""
        for name in self.entries:
            self.verify_tensor(name)

    def verify_tensor(self, name: str) -> None:
        """Compare one tensor with its checksum. Raises `UserError` that names it."""
        self.check_crc32(name, f"{zlib_ng.crc32(self._bytes(name).data):08x}")

    def check_crc32(self, name: str, crc32: str) -> None:
        """Raise `UserError` unless a tensor's checksum is the one that the file states."""
        expected = self.metadata["crc32"].get(name)
        if crc32 != expected:
            raise UserError(
                f"{self.path}: tensor {name} is damaged (checksum {crc32}, expected {expected}); "
                "copy the file again"
            )


def _entry(
    name: str, data_begin: int, dtype: str, shape: list[int], data_offsets: list[int]
) -> Entry:
    """Return the tensor that a header describes. Raises `ValueError`, naming it, if it is invalid."""
    begin, end = data_offsets
    if len(shape) > 8 or not all(
        type(size) is int and 0 <= size <= _LARGEST_DIMENSION for size in (*shape, begin, end)
    ):
        raise ValueError(f"tensor {name} has an unreadable shape or place")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name}: {end - begin:,} bytes do not make up its shape")
    return Entry(dtype, tuple(shape), data_begin + begin, data_begin + end)


Piece = Union["torch.Tensor", np.ndarray]
"""Part of a tensor's values; an array holds bfloat16 as its bits in uint16."""


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: Union["torch.dtype", str, None]
    """torch's type or its name, for example "bfloat16"; None if it is set on writing."""
    shape: tuple[int, ...]
    """Shape of the tensor; the largest possible one if its length is unknown."""

    @property
    def key(self) -> str:
        """The file's name of the type, one of `DTYPES`; the longest one if the type is not set yet."""
        return "BF16" if self.dtype is None else _KEYS[_type_name(self.dtype)]

    @property
    def nbytes(self) -> int:
        """Size of all its values, in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.key]


class TensorFileWriter:
    """Writes tensors in any order, a piece at a time, without holding them.

    Tensors with more than one byte a value come first, then int8, each at the place that its announced
    shape gives. uint8 tensors, and those without an announced type, follow in the order of writing,
    which also sets their shape. So every announced type is aligned, as the format requires, and writing
    takes one pass.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: dict[str, Any]) -> None:
        """`metadata`: JSON-able, written with the checksums under "sparse_bitnet"."""
        self._metadata, self._specs = metadata, {spec.name: spec for spec in specs}
        self._crc32: dict[str, str] = {}
        self._entries: dict[str, Entry] = {}
        largest = {n: Entry(s.key, s.shape, 10**15, 10**15) for n, s in self._specs.items()}
        used = _LENGTH_BYTES + len(self._header(largest, 0))
        announced = (spec for spec in self._specs.values() if spec.dtype is not None)
        placed = [spec for spec in announced if spec.key != "U8"]
        placed.sort(key=lambda spec: -ITEM_BYTES[spec.key])
        wide = sum(spec.nbytes for spec in placed if spec.key != "I8")
        wide -= wide % 8  # the alignment of a header
        self._begin = self._end = -(-(used + wide) // _ALIGNMENT) * _ALIGNMENT - wide
        for spec in placed:
            self._place(spec)
        self._file: BinaryIO = open(path, "wb")

    def __enter__(self) -> "TensorFileWriter":
        return self

    def __exit__(self, kind: type | None, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def write(
        self,
        name: str,
        pieces: Iterable[Piece],
        shape: tuple[int, ...] | None = None,
        dtype: Union["torch.dtype", str, None] = None,
    ) -> None:
        """Write a tensor given as consecutive pieces, with `shape` and `dtype` if not yet announced."""
        spec = self._specs[name]
        spec = spec._replace(dtype=spec.dtype or dtype, shape=shape or spec.shape)
        if name not in self._entries:
            self._place(spec)
        entry = self._entries[name]
        self._file.seek(entry.begin)
        crc32 = 0
        for piece in pieces:
            data = _bytes_of(piece, _type_name(spec.dtype))
            crc32 = zlib_ng.crc32(data, crc32)
            self._file.write(data)
        assert self._file.tell() == entry.end, f"{name}: pieces do not make up its shape"
        self._crc32[name] = f"{crc32:08x}"

    def _place(self, spec: TensorSpec) -> None:
        begin, self._end = self._end, self._end + spec.nbytes
        self._entries[spec.name] = Entry(spec.key, spec.shape, begin, self._end)

    def _finish(self) -> None:
        assert self._crc32.keys() == self._specs.keys(), "a tensor was not written"
        header = self._header(self._entries, self._begin)
        header = header.ljust(self._begin - _LENGTH_BYTES)
        own = _CRC_KEY + f"{zlib_ng.crc32(header):08x}".encode()
        header = header.replace(_CRC_KEY + _UNKNOWN_CRC.encode(), own, 1)
        self._file.seek(0)
        self._file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)

    def _header(self, entries: dict[str, Entry], data_begin: int) -> bytes:
        crc32 = {name: self._crc32.get(name, _UNKNOWN_CRC) for name in self._specs}
        ours = json.dumps({**self._metadata, "crc32": crc32}, separators=(",", ":"))
        described = {"format": "pt", "sparse_bitnet": ours, "header_crc32": _UNKNOWN_CRC}
        header: dict[str, Any] = {"__metadata__": described}
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            header[name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin - data_begin, entry.end - data_begin],
            }
        return json.dumps(header, separators=(",", ":")).encode()


def _bytes_of(piece: Piece, type_name: str) -> memoryview:
    if isinstance(piece, np.ndarray):
        assert piece.dtype == ("uint16" if type_name == "bfloat16" else type_name)
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
    import torch

    assert _type_name(piece.dtype) == type_name
    return piece.contiguous().view(-1).view(torch.uint8).numpy().data


def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
