# SPDX-License-Identifier: Apache-2.0
"""Writing a packed checkpoint's file (tensor_file.py), tensor by tensor, without holding them.

Importing this module imports no torch: arrays are written as well as torch's tensors.
"""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Union

import numpy as np
from zlib_ng import zlib_ng

from sparse_bitnet.packing.tensor_file import (
    DTYPES,
    ITEM_BYTES,
    LENGTH_BYTES,
    UNKNOWN_CRC,
    Entry,
    with_crc,
)

if TYPE_CHECKING:
    import torch

Piece = Union["torch.Tensor", np.ndarray]
"""Of bfloat16, an array holds the bits as uint16."""

_KEYS = {name: key for key, name in DTYPES.items()}
_LONGEST_KEY = "BF16"

_ALIGNMENT = 64
"""Of the first tensor of one byte a value, and so of those behind it that have whole cache lines: an
engine can multiply them where they lie (weight_memory.py)."""

_HEADER_ALIGNMENT = 8


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: Union["torch.dtype", str, None]
    """torch's type or its name, for example "bfloat16"; None where it is settled on writing."""
    shape: tuple[int, ...]
    """Of a tensor of unknown length, the largest possible one."""

    @property
    def key(self) -> str:
        """The file's name of the type, one of `DTYPES`."""
        return _LONGEST_KEY if self.dtype is None else _KEYS[_type_name(self.dtype)]

    @property
    def nbytes(self) -> int:
        """Of all its values."""
        return math.prod(self.shape) * ITEM_BYTES[self.key]


class TensorFileWriter:
    """Writes tensors in any order, a piece at a time, without holding them.

    Tensors of wider types lie first and then int8, each at the place its shape gives; uint8, and those
    whose type is not announced, follow in the order in which they are written, and their shape is
    settled only then. So all of announced types are aligned to them, as the format wants, and memory and
    passes over the data stay at one.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: dict[str, Any]) -> None:
        """`metadata`: JSON-able, written with the checksums under "sparse_bitnet"."""
        self._metadata = metadata
        self._specs = {spec.name: spec for spec in specs}
        self._crc32 = dict.fromkeys(self._specs, UNKNOWN_CRC)
        self._entries: dict[str, Entry] = {}
        self._written: set[str] = set()
        largest = {
            spec.name: Entry(spec.key, spec.shape, 10**15, 10**15) for spec in self._specs.values()
        }
        used = LENGTH_BYTES + len(self._header(largest, 0))
        placed = [
            spec for spec in self._specs.values() if spec.dtype is not None and spec.key != "U8"
        ]
        placed.sort(key=lambda spec: -ITEM_BYTES[spec.key])
        wide = sum(spec.nbytes for spec in placed if spec.key != "I8")
        wide -= wide % _HEADER_ALIGNMENT
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
        """Write a tensor given as consecutive pieces; `shape`, `dtype`: where they were not announced."""
        spec = self._specs[name]
        if spec.dtype is None:
            spec = spec._replace(dtype=dtype)
        if shape is not None:
            spec = spec._replace(shape=shape)
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
        self._written.add(name)

    def _place(self, spec: TensorSpec) -> None:
        begin, self._end = self._end, self._end + spec.nbytes
        self._entries[spec.name] = Entry(spec.key, spec.shape, begin, self._end)

    def _finish(self) -> None:
        assert self._written == set(self._specs), "a tensor was not written"
        header = self._header(self._entries, self._begin)
        header = header.ljust(self._begin - LENGTH_BYTES)
        header = with_crc(header, f"{zlib_ng.crc32(header):08x}")
        self._file.seek(0)
        self._file.write(len(header).to_bytes(LENGTH_BYTES, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self, entries: dict[str, Entry], data_begin: int) -> bytes:
        ours = json.dumps({**self._metadata, "crc32": self._crc32}, separators=(",", ":"))
        header: dict[str, Any] = {
            "__metadata__": {
                "format": "pt",
                "sparse_bitnet": ours,
                "header_crc32": UNKNOWN_CRC,
            }
        }
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            header[name] = {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "data_offsets": [entry.begin - data_begin, entry.end - data_begin],
            }
        return json.dumps(header, separators=(",", ":")).encode()


def _bytes_of(piece: Piece, type_name: str) -> memoryview:
    found = _type_name(piece.dtype)
    if isinstance(piece, np.ndarray):
        assert found == ("uint16" if type_name == "bfloat16" else type_name)
        return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
    import torch

    assert found == type_name
    return piece.contiguous().view(-1).view(torch.uint8).numpy().data


def _type_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
