# SPDX-License-Identifier: Apache-2.0
"""Writing that leaves either the old content or the whole new one, never a half.

Everything is written under a temporary name beside its target, flushed to the disk and renamed. A
process killed at any moment leaves at most a `.tmp-*` neighbour, which readers never look at and
`remove_leftovers` removes.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from zlib_ng import zlib_ng

from sparse_bitnet.errors import UserError, os_errors_as

NO_SPACE = os.strerror(errno.ENOSPC)
TEMPORARY_PREFIX = ".tmp-"
_STARTED = time.time_ns()
"""Tells this process from an earlier one with its number, as each is number 1 in a container."""


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Replace `path` by `data` in one step.

    Raises `UserError` when the disk is full or the folder cannot be written; `path` is then as before.
    """
    path = Path(os.path.realpath(path)) if os.path.islink(path) else Path(path)
    if not path.name:
        raise UserError(f"cannot write {path}: not a name for a file")
    content = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    with os_errors_as(f"cannot write {path}"):
        try:
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and its parents unless they exist. Raises `UserError` if that fails."""
    with os_errors_as(f"cannot write {path}"):
        path.mkdir(parents=True, exist_ok=True)


def check_new_file(path: Path | str) -> None:
    """Check that `write_atomic` can write here, so that a long job fails before it starts.

    Raises `UserError`.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # a device, say, which would be replaced
        what = "a folder" if path.is_dir() else "not a regular file"
        raise UserError(f"cannot write {path}: it is {what}; name a file")
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise UserError(f"cannot write {path}: its folder does not exist or is not writable")


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an exception.

    A folder already at `path`, or where a link there leads, is replaced. On any exception the
    temporary folder is removed and `path` is as before; an `OSError` (disk full, no permission)
    becomes a `UserError`. Replacing takes two renames: a process killed between them leaves the old
    folder and the new one under temporary names.

    Raises `UserError` also when `path` is a file, or this process is writing it already.
    """
    path = Path(path)
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    if path.name in ("", "..") or (path.exists() and not path.is_dir()):
        raise UserError(f"cannot write {path}: not a name for a new folder")
    ours = f"{os.getpid()}-{_STARTED}-{path.name}"
    temporary, is_ours = path.with_name(TEMPORARY_PREFIX + ours), False
    try:
        temporary.mkdir(parents=True)
        is_ours = True
        yield temporary
        mode = temporary.stat().st_mode & 0o666  # by the umask; safetensors makes private files
        for file in filter(Path.is_file, temporary.rglob("*")):
            file.chmod(mode)
        sync_tree(temporary)
        # rename() does not replace a folder that holds files: move the old one aside first.
        old = path.with_name(f"{TEMPORARY_PREFIX}replaced-{ours}")
        if path.exists():
            os.rename(path, old)
        try:
            os.rename(temporary, path)
        except OSError:
            if old.exists():
                os.rename(old, path)
            raise
        shutil.rmtree(old, ignore_errors=True)
        _sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    except Exception as error:
        # safetensors, for one, reports a full disk with an exception of its own.
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise UserError(f"cannot write {path}: {os.strerror(int(number[1]))}") from error
        raise
    finally:
        if is_ours:
            shutil.rmtree(temporary, ignore_errors=True)


def check_ours(folder: Path, marks: Iterable[str], what: str) -> None:
    """Raise `UserError` if a folder holds files but none that is named in `marks`.

    Locks and leftovers of killed writers do not count. `what` is what such a folder would be.
    """
    with os_errors_as(f"cannot write {folder}"):
        there = os.listdir(folder) if folder.is_dir() else []
    names = {name for name in there if not name.startswith((".lock", TEMPORARY_PREFIX))}
    if names and names.isdisjoint(marks):
        raise UserError(f"{folder} is neither empty nor {what}; choose another folder")


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a killed writer from `folder`; nobody else may be writing there."""
    for leftover in folder.glob(f"{TEMPORARY_PREFIX}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextmanager
def locked_folder(folder: Path, busy: str) -> Iterator[None]:
    """Create a folder and lock it for this process; the lock ends with the process at the latest.

    Raises `UserError`: `busy` if another process holds the lock, else why the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    make_folder(folder)
    with os_errors_as(f"cannot lock {folder}"):
        try:
            held = FileLock(folder / ".lock", timeout=0).acquire()
        except Timeout:
            raise UserError(busy) from None
    with held:
        yield


def file_crc32(path: Path) -> int:
    """Return the CRC-32 of a file; releases the GIL while it computes."""
    checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            checksum = zlib_ng.crc32(chunk, checksum)
    return checksum


def sync_tree(folder: Path) -> None:
    """Flush a folder and all files below it to the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            # Windows flushes only files that are open for writing.
            with open(os.path.join(root, name), "rb" if os.name == "posix" else "r+b") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
