# SPDX-License-Identifier: Apache-2.0
"""Sizes and checksums of shards, and the record of which files were already found right."""

import contextlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sparse_bitnet.data.manifest import VERIFIED, Shard
from sparse_bitnet.errors import UserError
from sparse_bitnet.files import file_crc32, write_atomic
from sparse_bitnet.host import available_cores
from sparse_bitnet.progress import Progress

_PROGRESS_BYTES = 1 << 30


def check_size(folder: Path, shard: Shard, dtype: np.dtype) -> None:
    """Raise `UserError` where a shard is missing or has another size than its tokens need."""
    path, expected = folder / shard.file, shard.tokens * dtype.itemsize
    if not path.is_file():
        raise UserError(f"{path}: this shard is missing; prepare the data again")
    if (size := path.stat().st_size) != expected:
        what = "truncated" if size < expected else "too long"
        raise UserError(
            f"{path}: {what} ({size:,} bytes, expected {expected:,}); copy this file again or prepare "
            "the data again"
        )


def verify_shards(folder: Path, shards: Sequence[Shard]) -> None:
    """Compare shards with their checksums and record those found right.

    Raises `UserError` that names the first corrupt shard. Shows progress for more than 1 GB.
    """
    if not shards:
        return
    paths = [folder / shard.file for shard in shards]
    # Taken first: a file that changes while it is read does not look like the one that was found right.
    stamps = [_stamp(path) for path in paths]
    total, done = sum(size for size, _ in stamps), 0
    with Progress() as progress, ThreadPoolExecutor(min(4, available_cores())) as pool:
        line = progress.line(f"checking {folder}", "MB", 1e6)
        checksums = pool.map(file_crc32, paths)
        for shard, checksum, (size, _) in zip(shards, checksums, stamps, strict=True):
            done += size
            if total >= _PROGRESS_BYTES:
                line(done, total)
            if shard.crc32 != f"{checksum:08x}":
                pool.shutdown(wait=False, cancel_futures=True)
                raise UserError(
                    f"{folder / shard.file}: corrupt (checksum {checksum:08x}, expected {shard.crc32}); "
                    "copy this file again or prepare the data again"
                )
    _record(folder, shards, stamps)


def record_written(folder: Path, shards: Sequence[Shard]) -> None:
    """Record shards that this process has just written: their checksums need no second look."""
    _record(folder, shards, [_stamp(folder / shard.file) for shard in shards])


def changed_shards(folder: Path, shards: Sequence[Shard]) -> list[Shard]:
    """The shards that were not yet found right as they now are."""
    record = _read_record(folder)
    return [
        shard
        for shard in shards
        if record.get(shard.file) != [*_stamp(folder / shard.file), shard.crc32]
    ]


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _read_record(folder: Path) -> dict[str, list[int | str]]:
    try:
        record = json.loads((folder / VERIFIED).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _record(folder: Path, shards: Sequence[Shard], stamps: Sequence[tuple[int, int]]) -> None:
    record = _read_record(folder)
    for shard, stamp in zip(shards, stamps, strict=True):
        record[shard.file] = [*stamp, shard.crc32]
    # In a folder that cannot be written the next opening verifies again, nothing more.
    with contextlib.suppress(UserError):
        write_atomic(folder / VERIFIED, json.dumps(record, indent=2) + "\n")
