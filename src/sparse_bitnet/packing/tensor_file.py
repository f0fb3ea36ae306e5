"""The file of a packed checkpoint: safetensors, written tensor by tensor and read without trust.

Any safetensors reader opens it. Beyond that format it carries, in `__metadata__`,

    sparse_bitnet   JSON: what the tensors are (metadata.py) and "crc32", the checksum of each
    header_crc32    checksum of the header itself, computed with eight zeros in its own place

so that one flipped bit anywhere is found, and found in the tensor that it damages. Checksums are
CRC-32 (zlib), eight hexadecimal digits.
"""

import json
import math
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparse_bitnet.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_LENGTH_BYTES = 8
_HEADER_ALIGNMENT = 64
_LARGEST_HEADER = 100_000_000
_LARGEST_DIMENSION = 1 << 48
_UNKNOWN_CRC = "00000000"
_CRC_KEY = b'"header_crc32":"'


class TensorSpec(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of a tensor of unknown length, the largest possible one."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes from the start of the file."""


class TensorFileWriter:
    """Writes tensors in any order, a piece at a time, without holding them.

    Tensors of wider types lie first, each at the place its shape gives; those of one byte a value
    follow in the order in which they are written, and their shape is settled only then. So all are
    aligned to their type, as the format wants, and memory and passes over the data stay at one.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec], metadata: dict[str, Any]) -> None:
        """`metadata`: JSON-able, written with the checksums under "sparse_bitnet"."""
        self._metadata = metadata
        self._specs = {spec.name: spec for spec in specs}
        self._crc32 = dict.fromkeys(self._specs, _UNKNOWN_CRC)
        self._entries: dict[str, Entry] = {}
        self._written: set[str] = set()
        largest = {
            spec.name: Entry(spec.dtype, spec.shape, 10**15, 10**15)
            for spec in self._specs.values()
        }
        used = _LENGTH_BYTES + len(self._header(largest, 0))
        self._begin = -(-used // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT
        self._end = self._begin
        for spec in sorted(self._specs.values(), key=lambda spec: -spec.dtype.itemsize):
            if spec.dtype.itemsize > 1:
                self._place(spec, spec.shape)
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
        self, name: str, pieces: Iterable[Tensor], shape: tuple[int, ...] | None = None
    ) -> None:
        """Write a tensor given as consecutive pieces; `shape` where it is not the announced one."""
        spec = self._specs[name]
        if name not in self._entries:
            self._place(spec, spec.shape if shape is None else shape)
        entry = self._entries[name]
        self._file.seek(entry.begin)
        crc32 = 0
        for piece in pieces:
            assert piece.dtype == spec.dtype
            data = piece.contiguous().view(-1).view(torch.uint8).numpy().data
            crc32 = zlib.crc32(data, crc32)
            self._file.write(data)
        assert self._file.tell() == entry.end, f"{name}: pieces do not make up its shape"
        self._crc32[name] = f"{crc32:08x}"
        self._written.add(name)

    def _place(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        begin, self._end = self._end, self._end + math.prod(shape) * spec.dtype.itemsize
        self._entries[spec.name] = Entry(spec.dtype, shape, begin, self._end)

    def _finish(self) -> None:
        assert self._written == set(self._specs), "a tensor was not written"
        header = self._header(self._entries, self._begin)
        header = header.ljust(self._begin - _LENGTH_BYTES)
        header = _with_crc(header, f"{zlib.crc32(header):08x}")
        self._file.seek(0)
        self._file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self, entries: dict[str, Entry], data_begin: int) -> bytes:
        ours = json.dumps({**self._metadata, "crc32": self._crc32}, separators=(",", ":"))
        header: dict[str, Any] = {
            "__metadata__": {
                "format": "pt",
                "sparse_bitnet": ours,
                "header_crc32": _UNKNOWN_CRC,
            }
        }
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            header[name] = {
                "dtype": _NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [entry.begin - data_begin, entry.end - data_begin],
            }
        return json.dumps(header, separators=(",", ":")).encode()


class TensorFile:
    """A packed checkpoint's file, mapped into memory, its header checked.

    Attributes:
        path: of the file.
        metadata: what the writer was given, plus "crc32".
        entries: the tensors by name.
    """

    def __init__(self, path: Path | str) -> None:
        """Raises `UserError` for a file that is damaged, truncated, or not of this kind."""
        self.path = Path(path)
        try:
            size = self.path.stat().st_size
            if size <= _LENGTH_BYTES:
                raise UserError(f"{path}: {size} bytes are too few for a safetensors file")
            self._data = np.memmap(self.path, np.uint8, mode="c")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            begin, header = self._read_header()
            self.metadata = _read_metadata(header)
            self.entries = _read_entries(header, begin)
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: the header is damaged ({error}); copy it again") from error
        self._check_extent(begin)

    def tensor(self, name: str) -> Tensor:
        """A tensor as a view of the mapped file; its bytes are read when used."""
        entry = self.entries[name]
        flat = torch.from_numpy(self._data[entry.begin : entry.end])
        if flat.data_ptr() % entry.dtype.itemsize:
            flat = flat.clone()
        return flat.view(entry.dtype).view(entry.shape)

    def verify(self) -> None:
        """Compare every tensor with its checksum. Raises `UserError` naming the first damaged one."""
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            for name, crc32 in zip(
                self.entries, pool.map(self._crc32, self.entries.values()), strict=True
            ):
                if self.metadata["crc32"].get(name) != crc32:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise UserError(
                        f"{self.path}: tensor {name} is damaged (checksum {crc32}, expected "
                        f"{self.metadata['crc32'].get(name)}); copy the file again"
                    )

    def _crc32(self, entry: Entry) -> str:
        return f"{zlib.crc32(self._data[entry.begin : entry.end].data):08x}"

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(self._data[:_LENGTH_BYTES].tobytes(), "little")
        available = len(self._data) - _LENGTH_BYTES
        if length > min(available, _LARGEST_HEADER):
            raise ValueError(f"it claims {length:,} bytes, {available:,} are there")
        raw = self._data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes()
        at = raw.find(_CRC_KEY) + len(_CRC_KEY)
        if at < len(_CRC_KEY):
            raise ValueError("no checksum: not written by sparse-bitnet pack")
        if raw[at : at + 8] != f"{zlib.crc32(_with_crc(raw, _UNKNOWN_CRC)):08x}".encode():
            raise ValueError("its checksum differs")
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
        return _LENGTH_BYTES + length, header

    def _check_extent(self, begin: int) -> None:
        """Tensors follow each other from `begin` to the end of the file."""
        position, size = begin, len(self._data)
        for name, entry in sorted(self.entries.items(), key=lambda item: item[1].begin):
            if entry.begin != position:
                raise UserError(f"{self.path}: tensor {name} does not follow the one before it")
            if entry.end > size:
                raise UserError(
                    f"{self.path}: truncated: tensor {name} ends at byte {entry.end:,}, the file at "
                    f"{size:,}; copy the file again"
                )
            position = entry.end
        if position != size:
            raise UserError(f"{self.path}: {size - position:,} bytes too long; copy the file again")


def _with_crc(header: bytes, crc32: str) -> bytes:
    at = header.find(_CRC_KEY) + len(_CRC_KEY)
    return header[:at] + crc32.encode() + header[at + len(crc32) :]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _read_metadata(header: dict[str, Any]) -> dict[str, Any]:
    entry = header.get("__metadata__")
    text = entry.get("sparse_bitnet") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise ValueError("no sparse_bitnet entry")
    metadata = json.loads(text, object_pairs_hook=_without_duplicates)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("crc32"), dict):
        raise ValueError("no sparse_bitnet entry")
    return metadata


def _read_entries(header: dict[str, Any], data_begin: int) -> dict[str, Entry]:
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"the entry of tensor {name} is no tensor")
        dtype = DTYPES.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        shape, offsets = fields["shape"], fields["data_offsets"]
        if dtype is None or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"tensor {name} has an unreadable type, shape or place")
        begin, end = offsets
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"tensor {name}: {end - begin:,} bytes do not make up its shape")
        entries[name] = Entry(dtype, tuple(shape), data_begin + begin, data_begin + end)
    return entries


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= _LARGEST_DIMENSION for value in values
    )
