# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a packed model's tensors are read from, and the memory that they are written to."""

import mmap
from typing import Any

import numpy as np

from sparse_bitnet import _cpu
from sparse_bitnet.engine.engine_model import EngineModel
from sparse_bitnet.engine.weight_forms import ALIGNMENT
from sparse_bitnet.errors import UserError
from sparse_bitnet.progress import OnProgress

_SLACK = 512
"""Readable bytes behind the last row."""


class WeightMemory:
    """Of one model while it is loaded; `kept` owns what the decoder points to."""

    def __init__(
        self,
        model: EngineModel,
        descriptor: int,
        *,
        is_mapped: bool,
        progress: OnProgress | None,
    ) -> None:
        """
        Args:
            model: the opened file.
            descriptor: of the same file.
            is_mapped: whether rows that lie in the file as they would in memory stay there.
            progress: told of the bytes of the tensors that are done.
        """
        self.kept: list[Any] = []
        self._model, self._descriptor, self._progress = model, descriptor, progress
        self._done = 0
        self._total = sum(entry.end - entry.begin for entry in model.file.entries.values())
        self._mapped: np.ndarray | None = None
        if is_mapped:
            self._mapped = np.frombuffer(
                mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8
            )
            self.kept.append(self._mapped)

    def in_place(self, name: str, rows: int, stride: int) -> int | None:
        """The address of a tensor in the mapped file, if its rows lie there as they would in memory."""
        entry, mapped = self._model.file.entries[name], self._mapped
        fits = entry.end - entry.begin == rows * stride and entry.begin % ALIGNMENT == 0
        read = entry.begin + in_strips(rows) * stride + _SLACK
        if mapped is None or not fits or read > mapped.size:
            return None
        return mapped.ctypes.data + entry.begin

    def source(self, name: str, in_place: int | None = None) -> dict[str, int]:
        """Where the bytes of a tensor are, for `_cpu`, and how many."""
        entry = self._model.file.entries[name]
        size = entry.end - entry.begin
        if in_place is not None:
            return {"bytes": size, "address": in_place}
        return {"bytes": size, "descriptor": self._descriptor, "offset": entry.begin}

    def buffer(self, size: int) -> _cpu.HugeBuffer:
        """Memory in huge pages where there are some, with readable bytes behind it."""
        buffer = _cpu.HugeBuffer(size + _SLACK)
        self.kept.append(buffer)
        return buffer

    def check(self, name: str, crc32: int | None, is_readable: bool, damage: str | None) -> None:
        """What was found in the bytes of a tensor, which is done then.

        Raises `UserError` where they cannot be read, have another checksum (unless that is None, known to
        be right) or are damaged.
        """
        if not is_readable:
            raise UserError(f"{self._model.file.path}: tensor {name} cannot be read")
        if crc32 is not None:
            self._model.file.check_crc32(name, f"{crc32:08x}")
        if damage is not None:
            raise UserError(f"{self._model.file.path}: tensor {name} {damage}")
        self.finish(name)

    def finish(self, name: str) -> None:
        """Count a tensor as done."""
        entry = self._model.file.entries[name]
        self._done += entry.end - entry.begin
        if self._progress is not None:
            self._progress(self._done, self._total)


def in_strips(rows: int) -> int:
    """Rows, with those that fill up the last strip."""
    return -(-rows // _cpu.STRIP_ROWS) * _cpu.STRIP_ROWS
