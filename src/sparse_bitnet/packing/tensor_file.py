# SPDX-License-Identifier: Apache-2.0
"""The file of a packed checkpoint: safetensors, read without trust.

tensor_writer.py writes it. Importing this module imports no torch.

Any safetensors reader opens the file. Beyond that format it carries, in `__metadata__`,

    sparse_bitnet   JSON: what the tensors are (metadata.py) and "crc32", the checksum of each
    header_crc32    checksum of the header itself, computed with eight zeros in its own place

so that one flipped bit anywhere is found, and found in the tensor that it damages. Checksums are
CRC-32 (zlib), eight hexadecimal digits.
"""

import json
import math
import mmap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from zlib_ng import zlib_ng

from sparse_bitnet.errors import UserError, os_errors_as
from sparse_bitnet.host import available_cores

if TYPE_CHECKING:
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

ITEM_BYTES = {
    key: 2 if name == "bfloat16" else np.dtype(name).itemsize for key, name in DTYPES.items()
}

LENGTH_BYTES = 8
UNKNOWN_CRC = "00000000"

_LARGEST_HEADER = 100_000_000
_LARGEST_DIMENSION = 1 << 48
_MOST_DIMENSIONS = 8
_CRC_KEY = b'"header_crc32":"'


@dataclass(frozen=True)
class Entry:
    """A tensor of a file."""

    dtype: str
    """A key of `DTYPES`."""
    shape: tuple[int, ...]
    begin: int
    end: int
    """Bytes from the start of the file."""

    @property
    def is_floating_point(self) -> bool:
        """Whether its values are floats."""
        return self.dtype in FLOATS


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
        with os_errors_as(f"cannot read {path}"):
            size = self.path.stat().st_size
            if size <= LENGTH_BYTES:
                raise UserError(f"{path}: {size} bytes are too few for a safetensors file")
            with open(self.path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._data = np.frombuffer(self._map, np.uint8)
        try:
            begin, header = self._read_header()
            self.metadata = _read_metadata(header)
            self.entries = _read_entries(header, begin)
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}: the header is damaged ({error}); copy it again") from error
        self._check_extent(begin)

    def tensor(self, name: str) -> "Tensor":
        """A tensor as a view of the mapped file; its bytes are read when used."""
        import torch

        entry = self.entries[name]
        dtype = getattr(torch, DTYPES[entry.dtype])
        flat = torch.from_numpy(self.bytes(name))
        if flat.data_ptr() % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def checked(self, name: str) -> "Tensor":
        """As `tensor`, compared with its checksum. Raises `UserError` that names a damaged one."""
        self.verify_tensor(name)
        return self.tensor(name)

    def bytes(self, name: str) -> np.ndarray:
        """uint8 [bytes of the tensor], a view of the mapped file, aligned to nothing."""
        entry = self.entries[name]
        return self._data[entry.begin : entry.end]

    def array(self, name: str) -> np.ndarray:
        """A tensor as an array in memory of its own; of bfloat16 its bits, as uint16."""
        entry = self.entries[name]
        dtype = np.uint16 if entry.dtype == "BF16" else np.dtype(DTYPES[entry.dtype])
        return np.array(self.bytes(name)).view(dtype).reshape(entry.shape)

    def verify(self) -> None:
        """Compare every tensor with its checksum. Raises `UserError` naming the first damaged one."""
        with ThreadPoolExecutor(available_cores()) as pool:
            for name, crc32 in zip(
                self.entries, pool.map(self._crc32, self.entries.values()), strict=True
            ):
                if self.metadata["crc32"].get(name) != crc32:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.check_crc32(name, crc32)

    def verify_tensor(self, name: str) -> None:
        """Compare one tensor with its checksum. Raises `UserError` that names it."""
        self.check_crc32(name, self._crc32(self.entries[name]))

    def check_crc32(self, name: str, crc32: str) -> None:
        """Raise `UserError` unless a tensor's checksum is the one that the file states."""
        expected = self.metadata["crc32"].get(name)
        if crc32 != expected:
            raise UserError(
                f"{self.path}: tensor {name} is damaged (checksum {crc32}, expected {expected}); "
                "copy the file again"
            )

    def _crc32(self, entry: Entry) -> str:
        return f"{zlib_ng.crc32(self._data[entry.begin : entry.end].data):08x}"

    def _read_header(self) -> tuple[int, dict[str, Any]]:
        length = int.from_bytes(self._data[:LENGTH_BYTES].tobytes(), "little")
        available = len(self._data) - LENGTH_BYTES
        if length > min(available, _LARGEST_HEADER):
            raise ValueError(f"it claims {length:,} bytes, {available:,} are there")
        raw = self._data[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
        at = raw.find(_CRC_KEY) + len(_CRC_KEY)
        if at < len(_CRC_KEY):
            raise ValueError("no checksum: not written by sparse-bitnet pack")
        if raw[at : at + 8] != f"{zlib_ng.crc32(with_crc(raw, UNKNOWN_CRC)):08x}".encode():
            raise ValueError("its checksum differs")
        header = json.loads(raw, object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise ValueError("not a JSON object")
        return LENGTH_BYTES + length, header

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


def with_crc(header: bytes, crc32: str) -> bytes:
    """A header with another checksum in the place of its own."""
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
            raise ValueError(f"the entry of tensor {name} does not describe one")
        dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
        known = isinstance(dtype, str) and dtype in DTYPES
        if not known or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f"tensor {name} has an unreadable type, shape or place")
        begin, end = offsets
        if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise ValueError(f"tensor {name}: {end - begin:,} bytes do not make up its shape")
        entries[name] = Entry(dtype, tuple(shape), data_begin + begin, data_begin + end)
    return entries


def _are_counts(values: Any) -> bool:
    few = isinstance(values, list) and len(values) <= _MOST_DIMENSIONS
    return few and all(type(value) is int and 0 <= value <= _LARGEST_DIMENSION for value in values)
